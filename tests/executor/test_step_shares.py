"""Decode steps of the Triton runner whose rows read shared keys together. Interpreted where there is no GPU."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.kernels.triton import conftest  # before anything that imports the kernels, which it makes interpreted ones

# isort: split
from chairlift import LLM, SamplingParams
from chairlift.base.step_batch import StepBatch
from chairlift.executor.backends.triton import step_shares, triton_runner
from chairlift.executor.backends.triton.step_shares import StepShares
from chairlift.executor.kv_tensors import plan_kv_cache
from chairlift.executor.local import LocalExecutor
from chairlift.kernels.recurrent import StatePart
from chairlift.kernels.triton import shared_prefixes
from chairlift.kernels.triton.launch import AttentionLaunch, attention_launch
from chairlift.models.context import LayerCache, LayerState
from chairlift.models.model_files import read_config
from tests.executor.test_triton_runner import OverwritingGraphs
from tests.models.tiny import tiny_hf_model

if conftest.MISSING:
    pytest.skip(conftest.MISSING, allow_module_level=True)
device, interpreter = conftest.device, conftest.interpreter

SYSTEM = list(range(5, 22))
DOCUMENT = [*SYSTEM, *range(60, 92)]
PROMPTS = [[*DOCUMENT, 50], list(range(90, 110)), [*DOCUMENT, 51, 52], [*SYSTEM, *range(20, 53)]]
"""Two levels: three share a tile of 16 keys, and two of them share three tiles. The second shares nothing."""
EVERYONE = list(range(len(PROMPTS)))
LENGTHS = [5, 7, 6, 6]
"""The first ends first, so that the others move up."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_hf_model(tmp_path_factory.mktemp("models"), "llama", num_hidden_layers=1, intermediate_size=32)


@pytest.fixture(autouse=True)
def products_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreting them takes longer than all the rest, and test_triton.py has them."""
    monkeypatch.setattr("chairlift.kernels.triton.program.SMALL_ROWS", 0)


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sharing is worth its launch for any number of rows and keys."""
    monkeypatch.setattr(shared_prefixes, "LEAST_TILES", 1)
    monkeypatch.setattr(shared_prefixes, "LAUNCH_SECONDS", -1.0)
    monkeypatch.setattr(step_shares, "least_rows", lambda *sizes: 2)


def small_launch(**settings: Any) -> AttentionLaunch:
    return dataclasses.replace(attention_launch(**settings), block_n=16)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_runner, "attention_launch", small_launch)


@pytest.fixture(scope="module")
def apart(model_dir: Path, interpreter: None) -> dict[int, Any]:
    """The answers of rows that read their keys alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("chairlift.kernels.triton.program.SMALL_ROWS", 0)
        patch.setattr(StepShares, "find", lambda self, batch, size, launch: None)
        patch.setattr(triton_runner, "attention_launch", small_launch)
        return serve(make(model_dir, torch.device("cuda" if conftest.ON_GPU else "cpu")), EVERYONE)


def make(model_dir: Path, device: torch.device, **changes: Any) -> LLM:
    sizes = {"max_num_seqs": 5, "num_kv_blocks": 60, "block_size": 8, "max_model_len": 64, "dtype": "float32"}
    llm = LLM(model_dir, skip_tokenizer_init=True, kernels="triton", device=str(device), **sizes, **changes)
    if not conftest.ON_GPU:  # there, they are real
        runner_of(llm).graphs = OverwritingGraphs()
    return llm


def runner_of(llm: LLM) -> Any:
    assert isinstance(llm.engine.core.executor, LocalExecutor)
    return llm.engine.core.executor._runner


def serve(llm: LLM, which: list[int]) -> dict[int, Any]:
    """Tokens and log-probabilities, to the last bit. The prompts arrive one after the other, so that their beginnings
    are in the cache, and end one after the other."""
    engine = llm.engine
    done = {}
    waiting = list(which)
    while waiting or engine.has_unfinished:
        if waiting:
            i = waiting.pop(0)
            params = SamplingParams(temperature=0.0, max_tokens=LENGTHS[i], ignore_eos=True, logprobs=0)
            engine.add_request(PROMPTS[i], params, request_id=str(i), stream=False)
        for output in engine.step():
            answer = output.outputs[0]
            done[int(output.request_id)] = (answer.token_ids, answer.logprobs)
    return done


def tasks_of(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[int, ...], ...]]:
    """A list that will have the tasks of each step that has some."""
    seen: list[tuple[tuple[int, ...], ...]] = []
    send = StepShares.send

    def watched(self: StepShares, size: int, found: Any) -> Any:
        seen.append(tuple(tuple(row for row in task if row >= 0) for task in found[0].members.tolist() if task[0] >= 0))
        return send(self, size, found)

    monkeypatch.setattr(StepShares, "send", watched)
    return seen


def test_rows_that_read_together_have_the_bits_of_rows_that_do_not(
    model_dir: Path,
    device: torch.device,
    always: None,
    apart: dict[int, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm = make(model_dir, device)
    seen = tasks_of(llm, monkeypatch)
    assert serve(llm, EVERYONE) == apart
    assert len(set(seen)) > 1, "the tasks should change with the rows"
    assert runner_of(llm)._shared_decodes
    assert llm.engine.core.executor.reads_shared_once


@pytest.mark.full
def test_with_batch_invariance_rows_that_read_together_have_the_bits_that_they_have_alone(
    model_dir: Path, device: torch.device, always: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = make(model_dir, device, batch_invariant=True)
    expected = {i: serve(alone, [i])[i] for i in (0, 2)}
    llm = make(model_dir, device, batch_invariant=True)
    seen = tasks_of(llm, monkeypatch)
    assert serve(llm, [0, 2]) == expected
    assert seen


@pytest.mark.full
@pytest.mark.parametrize("fault", ["an earlier step's tasks", "the keys of another row", "one tile too many"])
def test_wrong_tasks_are_seen_in_the_answers(
    fault: str,
    model_dir: Path,
    device: torch.device,
    always: None,
    apart: dict[int, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm = make(model_dir, device)
    find = StepShares.find
    kept: dict[int, Any] = {}

    def faulty(self: StepShares, batch: Any, size: int, launch: Any) -> Any:
        found = find(self, batch, size, launch)
        if found is None:
            return None
        if fault == "an earlier step's tasks":
            found = kept.setdefault(size, found)
        if fault == "the keys of another row":
            others = set(range(len(batch.slots))) - set(found[0].members[0].tolist())
            if others:
                found[0].ends[min(others)] = found[0].ends[found[0].members[0, 0]]
                found[0].members[0] = [min(others), *found[0].members[0, :-1]]
        if fault == "one tile too many":
            found[0].ends[found[0].ends > 0] += 1
        return found

    monkeypatch.setattr(StepShares, "find", faulty)
    assert serve(llm, EVERYONE) != apart


def test_equal_blocks_of_states_are_no_shared_keys(model_dir: Path, always: None) -> None:
    """Rows with a common beginning have the same snapshots in their tables."""
    spec = (LayerCache(2, 16, None), LayerState((StatePart((4,)),)))
    how = {"block_size": 4, "memory_bytes": 1 << 20, "num_blocks": None, "most_tokens": 400, "rows": 4}
    plan = plan_kv_cache(spec, dtype=torch.float32, **how)  # type: ignore[arg-type]
    network = read_config(model_dir)
    shares = StepShares(plan, network, 2, torch.device("cpu"))
    ints = np.ones(4, dtype=np.int32)
    tables = np.ones((2, 4, 40), dtype=np.int32)
    batch = StepBatch(ints, 99 * ints, np.arange(5, dtype=np.int32), 100 * ints, tables, np.zeros((2, 4), np.int64))
    batch = dataclasses.replace(batch, slots=np.arange(4, dtype=np.int32))
    sizes = {"head_dim": 16, "group": 2, "num_kv_heads": 2, "max_rows": 4, "num_multiprocessors": 2}
    found = shares.find(batch, 4, small_launch(**sizes, decode_only=True))
    assert found is not None and len(found) == 2
    assert (found[0].members >= 0).any() and not (found[1].members >= 0).any()


def test_sharing_that_saves_no_time_is_not_used(
    model_dir: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is so small that a launch takes longer than its keys."""
    monkeypatch.setattr(shared_prefixes, "LEAST_TILES", 1)
    monkeypatch.setattr(step_shares, "least_rows", lambda *sizes: 2)
    llm = make(model_dir, device)
    serve(llm, [0, 2])
    assert runner_of(llm)._decodes and not runner_of(llm)._shared_decodes
