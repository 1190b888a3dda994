from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from chairlift.base.sampling_params import SamplingParams
from chairlift.cli import flags
from chairlift.cli.flags import add_engine_flags, add_sampling_flags, read_settings
from chairlift.config import EngineConfig, flat_fields
from chairlift.errors import ConfigError


def parse(*argv: str, sampling: bool = True) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    if sampling:
        add_sampling_flags(parser, 256)
    add_engine_flags(parser, leave_out={"seed"} if sampling else ())
    return parser.parse_args(argv)


def test_every_setting_has_a_flag_that_reaches_the_engine() -> None:
    values = {"bool": [], "int": ["2"], "float": ["0.25"], "str": ["text"]}
    known = {"scheduling_policy": "priority", "batching": "dynamic", "prefill_mode": "mixed", "governor": "rules"}
    known |= {"model_impl": "native", "cache_eviction": "lru"}
    known |= {"kv_store_bytes": "1048576", "kv_store_write_rate": "1024"}
    argv = []
    for flag in flat_fields():
        name = "--" + flag.name.replace("_", "-")
        if flag.name in ("service_classes", "tenant_weights"):
            argv += [name, "{}"]
            continue
        if flag.name in known:
            argv += [name, known[flag.name]]
            continue
        if flag.name == "preferred_batch_sizes":
            argv += [name, "2,4"]
            continue
        argv += [name, *(flag.choices[-1:] if flag.choices else values[flag.kind.__name__])]
    settings, _ = read_settings(parse(*argv, sampling=False), sampling=False)
    assert list(settings) == [flag.name for flag in flat_fields()]
    for flag in flat_fields():
        assert type(settings[flag.name]) is flag.kind
    assert EngineConfig.from_flat(settings | {"device": "cpu", "prefix_offload": False}).scheduler.batching == "dynamic"


def test_nothing_given_leaves_every_default() -> None:
    assert read_settings(parse(), sampling=True) == ({}, {"temperature": 0.0})


def test_help_names_defaults_and_no_empty_ones() -> None:
    parser = argparse.ArgumentParser()
    add_engine_flags(parser)
    text = parser.format_help()
    assert "(default: 16)" in text and "(default: False)" in text
    assert "(default: )" not in text


def test_sampling_flags_make_sampling_parameters() -> None:
    argv = "--max-tokens 9 --temperature 0.5 --top-p 0.9 --top-k 4 --seed 7 --n 2 --stop a --stop b --ignore-eos"
    argv += " --min-p 0.1 --min-tokens 3 --presence-penalty 1 --frequency-penalty 1 --repetition-penalty 1.1"
    argv += " --logprobs 2 --bad-words bad --include-stop-str-in-output"
    _, fields = read_settings(parse(*argv.split()), sampling=True)
    params = SamplingParams.from_dict(fields)
    assert (params.max_tokens, params.temperature, params.top_k, params.seed, params.n) == (9, 0.5, 4, 7, 2)
    assert (params.stop, params.bad_words, params.logprobs) == (("a", "b"), ("bad",), 2)
    assert params.ignore_eos
    assert params.include_stop_str_in_output


@pytest.mark.parametrize("name", ["settings.yaml", "settings.json"])
def test_a_config_file_takes_the_same_names_and_flags_go_first(tmp_path: Path, name: str) -> None:
    content = {"max-num-seqs": 8, "block_size": 32, "admission-watermark": 0, "temperature": 1, "stop": "x", "seed": 3}
    content["max_model_len"] = None
    (tmp_path / name).write_text(json.dumps(content))
    args = parse("--config", str(tmp_path / name), "--block-size", "8", "--temperature", "0.5")
    engine, sampling = read_settings(args, sampling=True)
    assert engine == {"max_num_seqs": 8, "block_size": 8, "admission_watermark": 0.0, "max_model_len": None}
    assert sampling == {"temperature": 0.5, "stop": ["x"], "seed": 3}


CLASSES = {"chat": {"priority": -5, "min_seqs": 2}}


@pytest.mark.parametrize("way", ["text", "file", "yaml mapping", "yaml text", "json mapping", "yaml file"])
def test_classes_of_service_are_given_in_any_of_these_ways(tmp_path: Path, way: str) -> None:
    text = json.dumps(CLASSES)
    kept = tmp_path / "classes.json"
    kept.write_text(text)
    yaml = {"yaml mapping": f"service_classes: {text}", "yaml text": f"service_classes: '{text}'"}
    yaml |= {"json mapping": json.dumps({"service-classes": CLASSES}), "yaml file": f'service_classes: "@{kept}"'}
    if way in yaml:
        config = tmp_path / ("c.json" if way == "json mapping" else "c.yaml")
        config.write_text(yaml[way])
        argv = ["--config", str(config)]
    else:
        argv = ["--service-classes", text if way == "text" else f"@{kept}"]
    settings, _ = read_settings(parse(*argv, sampling=False), sampling=False)
    scheduler = EngineConfig.from_flat(settings | {"scheduling_policy": "priority"}).scheduler
    assert scheduler.promises is not None
    assert (scheduler.promises["chat"].priority, scheduler.promises["chat"].min_seqs) == (-5, 2)


def test_classes_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the file of --service-classes .*none\.json"):
        read_settings(parse("--service-classes", f"@{tmp_path}/none.json", sampling=False), sampling=False)
    (tmp_path / "c.yaml").write_text("tenant_weights: [1]")
    with pytest.raises(ConfigError, match=r"tenant_weights in .* must be a mapping, JSON text or @FILE, got '\[1\]'"):
        read_settings(parse("--config", f"{tmp_path}/c.yaml", sampling=False), sampling=False)
    (tmp_path / "c.yaml").write_text("tenant_weights: {alice: 2020-01-01}")
    settings, _ = read_settings(parse("--config", f"{tmp_path}/c.yaml", sampling=False), sampling=False)
    with pytest.raises(ConfigError, match="weight of 'alice' must be from"):
        EngineConfig.from_flat(settings | {"scheduling_policy": "priority"})


def test_the_examples_in_the_help_can_be_used(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--help")
    shown = " ".join(capsys.readouterr().out.split())
    for example in flags._JSON.values():
        assert example in shown
    EngineConfig.from_flat({"scheduling_policy": "priority", **flags._JSON})


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("c.yaml", "max_num_seq: 4", "unknown setting 'max_num_seq' in .*did you mean 'max_num_seqs'"),
        ("c.yaml", "max_num_seqs: many", "max_num_seqs in .* must be a whole number, .* got 'many'"),
        ("c.yaml", "max_num_seqs: true", "must be of type int, got 'True'"),
        ("c.yaml", "enable_prefix_caching: 1", "must be of type bool"),
        ("c.yaml", "max_num_seqs: null", "must be of type int"),
        ("c.yaml", "- a\n- b", "must hold names and values, got list"),
        ("c.yaml", "a: [", "not valid YAML"),
        ("c.yaml", "a: !!python/object/apply:os.system ['true']", "not valid YAML"),
        ("c.json", "{", "not valid JSON"),
        ("c.json", '{"temperature": 1}', "unknown setting 'temperature'"),
        ("c.json", "\udcff", "not UTF-8"),
    ],
)
def test_a_wrong_config_file_is_refused(tmp_path: Path, name: str, text: str, complaint: str) -> None:
    (tmp_path / name).write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=complaint):
        read_settings(parse("--config", str(tmp_path / name), sampling=False), sampling=False)
