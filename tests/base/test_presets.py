"""Presets: each is a valid configuration, gives the same tokens, and yields to explicit settings."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from chairlift import LLM, SamplingParams
from chairlift.base.presets import BASELINE, PRESETS, with_preset
from chairlift.cli.flags import add_engine_flags, add_server_flags, read_server_settings, read_settings
from chairlift.config import EngineConfig, flat_fields
from chairlift.engine.idle_settings import idle_settings
from chairlift.errors import ConfigError

EXPECTED = {
    "static": ("static", "mixed", "none", False),
    "triton-dynamic": ("dynamic", "mixed", "none", False),
    "cellular": ("continuous", "separate", "none", False),
    "orca": ("continuous", "mixed", "none", False),
    "vllm": ("continuous", "mixed", "recompute", True),
    "sglang": ("continuous", "prefill_first", "recompute", True),
    "tensorrt-llm": ("continuous", "mixed", "none", True),
    "tensorrt-llm-max-utilization": ("continuous", "mixed", "recompute", True),
    "tgi": ("continuous", "separate", "none", False),
    "lightllm": ("continuous", "auto", "recompute", True),
}
"""Preset -> batching, prefill mode, preemption mode, prefix caching."""
PROMPTS = [[10 + (index * step) % 200 for step in range(3 + 5 * index)] for index in range(8)]
PARAMS = [SamplingParams(temperature=0.0, max_tokens=4 + 3 * index, ignore_eos=True) for index in range(8)]


DOCUMENT = Path(__file__).parents[2] / "docs" / "presets.md"


def values(config: EngineConfig, names: Mapping[str, Any]) -> dict[str, Any]:
    parts = {flag.name: flag.part for flag in flat_fields()}
    return {name: getattr(getattr(config, parts[name]), name) for name in names}


@functools.cache
def plain_answers() -> list[list[int]]:
    return answers()


def answers(**settings: Any) -> list[list[int]]:
    """Tokens of the bundled model, with so little memory and so few rows that requests wait or are preempted."""
    llm = LLM(max_num_seqs=4, num_kv_blocks=10, max_model_len=64, skip_tokenizer_init=True, **settings)
    outputs = llm.generate(PROMPTS, PARAMS)
    llm.engine.core.shutdown()
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_the_baseline_comes_first_and_every_preset_is_described() -> None:
    assert list(PRESETS) == list(EXPECTED)
    assert next(iter(PRESETS)) == BASELINE
    for preset in PRESETS.values():
        assert preset.system and preset.does.endswith(".") and preset.differs.endswith(".")


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_a_valid_configuration_with_its_documented_settings(name: str) -> None:
    config = EngineConfig.from_flat({"preset": name})
    assert values(config, PRESETS[name].settings) == PRESETS[name].settings
    scheduler = config.scheduler
    found = (scheduler.batching, scheduler.prefill_mode, scheduler.preemption_mode, config.cache.enable_prefix_caching)
    assert found == EXPECTED[name]
    assert EngineConfig.from_flat(config.to_flat()) == config


def test_the_document_has_the_texts_and_settings_of_every_preset() -> None:
    text = DOCUMENT.read_text("utf-8")
    for name, preset in PRESETS.items():
        written = {
            key: str(value).lower() if isinstance(value, bool) else value for key, value in preset.settings.items()
        }
        settings = "<br>".join(f"`{key}: {value}`" for key, value in written.items())
        assert f"| `{name}` | {preset.system}: {preset.does} | {settings} | {preset.differs} |\n" in text


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_gives_the_same_tokens(name: str) -> None:
    assert answers(preset=name) == plain_answers()


@pytest.mark.parametrize("name", PRESETS)
def test_no_setting_of_a_preset_is_without_effect(name: str) -> None:
    llm = LLM(preset=name, num_kv_blocks=10, skip_tokenizer_init=True)
    assert idle_settings(llm.config, llm.info) == []
    assert llm.info.preset == name
    llm.engine.core.shutdown()


def test_an_explicit_setting_wins_also_in_another_process() -> None:
    config = EngineConfig.from_flat({"preset": "static", "batching": "continuous", "max_num_seqs": 3})
    assert (config.scheduler.batching, config.scheduler.preemption_mode) == ("continuous", "none")
    assert config.to_flat()["batching"] == "continuous"  # the default, and still sent to the engine's process
    assert EngineConfig.from_flat(config.to_flat()) == config


@pytest.mark.parametrize("name", ["orka", "", 5, ["orca"]])
def test_an_unknown_preset_is_refused_with_the_list(name: Any) -> None:
    with pytest.raises(ConfigError, match=r"preset must be one of static, .*, lightllm; got "):
        EngineConfig.from_flat({"preset": name})


def test_without_a_preset_nothing_changes() -> None:
    assert with_preset({"preset": None, "block_size": 8}) == {"preset": None, "block_size": 8}
    assert EngineConfig.from_flat({"preset": None}) == EngineConfig()


# --- on the command line ---------------------------------------------------------------------------------------------


def read(*argv: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    add_server_flags(parser)
    add_engine_flags(parser)
    args = parser.parse_args(argv)
    settings, _ = read_settings(args, sampling=False)
    assert read_server_settings(args)[0] == settings
    return settings


def test_a_flag_wins_over_the_environment_and_the_environment_over_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("preset: tgi\nprefill_mode: mixed\n")
    assert read() == {}
    monkeypatch.setenv("CHAIRLIFT_PRESET", "vllm")
    assert read() == {"preset": "vllm"}
    assert read("--config", str(file)) == {"preset": "vllm", "prefill_mode": "mixed"}
    assert read("--config", str(file), "--preset", "orca")["preset"] == "orca"
    config = EngineConfig.from_flat(read("--config", str(file), "--preset", "sglang"))
    assert config.scheduler.prefill_mode == "mixed"  # explicit, in the file
    assert config.scheduler.preemption_mode == "recompute"
    monkeypatch.setenv("CHAIRLIFT_PRESET", "")
    assert read() == {}


def test_an_unknown_preset_in_the_environment_is_refused_by_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHAIRLIFT_PRESET", "fastest")
    with pytest.raises(ConfigError, match=r"CHAIRLIFT_PRESET must be one of static, .*; got 'fastest'"):
        read()


def test_an_unknown_preset_as_a_flag_is_refused_with_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read("--preset", "fastest")
    assert "tensorrt-llm-max-utilization" in capsys.readouterr().err
