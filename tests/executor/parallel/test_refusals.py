"""What cannot be divided among processes is refused by name, by the engine and by ``chairlift check`` alike."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from chairlift.base.sampling_params import SamplingParams
from chairlift.cli.main import main
from chairlift.config import EngineConfig
from chairlift.engine.kv_moves import MoveOrder
from chairlift.errors import ChairliftError, ConfigError
from chairlift.executor.backends.triton.backend import TritonBackend
from chairlift.executor.parallel.shares import refuse_division
from chairlift.llm import LLM
from chairlift.models.model_files import read_config
from tests.executor.parallel.rank_threads import use_threads
from tests.executor.parallel.test_processes import engine_of, tokens
from tests.kernels.cpu.models import tiny_model
from tests.models.vision.tiny import tiny_vlm
from tests.native import needs_kernels

pytestmark = needs_kernels

THREE: dict[str, Any] = {"tensor_parallel_size": 3, "threads": 3}
REFUSED: dict[str, dict[str, Any]] = {
    "but this model has 2 KV heads, and each process needs one; use at most 2": THREE,
    "but PyTorch's kernels run this model, on one process": {"kernels": "torch"},
    "but threads is 1, and each process needs one; set threads to 2": {"threads": 1},
    "but kv_store cannot be divided": {"kv_store": "/tmp/kv"},
    "but models for embeddings or classes run on one process": {"runner": "pooling"},
    "but images cannot be divided": {"model": "images"},
}
"""Words of the message -> settings."""


def settings_of(given: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """All settings of an engine that is refused. Models are written to ``folder``."""
    settings: dict[str, Any] = {"skip_tokenizer_init": True, "tensor_parallel_size": 2, "threads": 2, **given}
    if settings.pop("model", "") == "images":
        return {**settings, "model": str(tiny_vlm(folder)), "skip_tokenizer_init": False}
    return {**settings, "model": str(tiny_model(folder, "llama"))}


def of_engine(settings: Mapping[str, Any]) -> str:
    """The message with which the engine refuses."""
    with pytest.raises(ChairliftError) as refused:
        LLM(**settings)
    return str(refused.value)


def of_check(settings: Mapping[str, Any], capsys: pytest.CaptureFixture[str]) -> str:
    """The message with which the command refuses, with the names of settings in place of flags."""
    capsys.readouterr()
    argv = ["check", settings["model"]]
    for name, value in settings.items():
        flag = f"--{name.replace('_', '-')}"
        argv += [] if name == "model" or value is False else [flag] if value is True else [flag, str(value)]
    assert main(argv) == 2
    return re.sub("--([a-z-]+)", lambda flag: flag[1].replace("-", "_"), capsys.readouterr().err)


@pytest.mark.parametrize("words", REFUSED)
def test_the_engine_and_check_refuse_in_the_same_words(
    words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = settings_of(REFUSED[words], tmp_path)
    message = of_engine(settings)
    assert message.startswith(f"tensor_parallel_size is {settings['tensor_parallel_size']}, {words}")
    assert message in of_check(settings, capsys)


@pytest.mark.parametrize("method", ["draft_model", "medusa", "eagle3", "mtp"])
def test_draft_models_are_refused(method: str, tmp_path: Path) -> None:
    files = {} if method == "mtp" else {"model": str(tmp_path)}
    drafting = {"speculative_config": json.dumps({"method": method, **files})}
    message = of_engine(settings_of(drafting, tmp_path))
    assert message.startswith("tensor_parallel_size is 2, but draft models cannot be divided")


def test_gpus_are_refused(tmp_path: Path) -> None:
    config = EngineConfig.from_flat({"model": "x", "tensor_parallel_size": 2})
    network = read_config(tiny_model(tmp_path, "llama"))
    with pytest.raises(ConfigError, match="but Triton's kernels run this model, on one process and one device"):
        refuse_division(config, network, TritonBackend.choose("auto"))


def test_hashlm_is_refused() -> None:
    assert "but HashLM has no layers to divide" in of_engine({"model": "hashlm", "tensor_parallel_size": 2})


def test_other_systems_than_linux_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chairlift.executor.parallel.shares.sys", SimpleNamespace(platform="darwin"))
    assert "share a memory file as only Linux has it" in of_engine(settings_of({}, tmp_path))


def test_a_model_of_images_is_divided_for_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_threads(monkeypatch)
    settings = settings_of({"model": "images", "mmproj": "none"}, tmp_path)
    params = SamplingParams(temperature=0.9, seed=1, max_tokens=8, logprobs=1)
    found = [LLM(**settings | {"tensor_parallel_size": size}).generate([[5, 9, 11]], params) for size in (1, 2)]
    assert tokens(found[0]) == tokens(found[1])


def test_requests_do_not_move_to_another_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Moves pass through the files of ``kv_store``, which is refused. A request can pause, and go on."""
    use_threads(monkeypatch)
    llm = LLM(**settings_of({}, tmp_path))
    engine = engine_of(llm)
    name = engine.add_request([5, 9, 11], SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
    engine.step()
    moves = engine.core.preparers.kv_moves
    [sequence] = engine.core.scheduler.requests
    moves.follow(MoveOrder(sequence, "write"))
    [report] = moves.take_reports()
    assert (report.stage, report.failure) == ("write", "nothing is written: no store")
    moves.follow(MoveOrder(sequence, "pause"))
    assert not engine.step()
    moves.follow(MoveOrder(sequence, "resume"))
    outputs = []
    while engine.has_unfinished:
        outputs += [each for each in engine.step() if each.finished]
    assert [each.request_id for each in outputs] == [name]
    assert len(outputs[0].outputs[0].token_ids) == 8
