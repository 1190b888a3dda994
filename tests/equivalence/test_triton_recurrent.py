"""Recurrent and hybrid families in Triton say what transformers and the CPU's kernels say, and mistakes show."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kernels.triton import conftest  # before anything that imports the kernels, which it makes interpreted ones

# isort: split
from chairlift import LLM, SamplingParams
from chairlift.config import ONE_STATE
from chairlift.executor.backends.triton import triton_runner
from chairlift.kernels.triton.program import PagedKV
from tests.equivalence.cases import Job, agree, check_text, make_llm, run, transformers_greedy
from tests.equivalence.test_triton import SIZES, check_invariance, greedy, invariant_jobs, triton_llm
from tests.executor.test_triton_runner import OverwritingGraphs
from tests.models.tiny import hf_model, tiny_hf_model
from tests.native import needs_kernels

if conftest.MISSING:
    pytest.skip(conftest.MISSING, allow_module_level=True)
device, interpreter = conftest.device, conftest.interpreter

NETS: dict[str, Any] = {
    **{"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 1},
    **{"linear_num_value_heads": 2, "linear_value_head_dim": 16, "intermediate_size": 48},
}
MODELS: dict[str, dict[str, Any]] = {
    "lfm2": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"], "intermediate_size": 48},
    "qwen3_5_text": NETS,
    "mamba2": {"num_hidden_layers": 1, "hidden_size": 32, "num_heads": 2, "head_dim": 32, "state_size": 8},
    "falcon_h1": {"num_hidden_layers": 1},
    "granitemoehybrid": {},
    "lfm2_moe": {},
    "nemotron_h": {},
    "qwen3_next": {**NETS, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40},
}
DEFAULT = ("lfm2", "qwen3_5_text", "mamba2")
"""One family for each kind of recurrent layer; the others only in nightly runs, to save time."""
SNAPSHOTS = {"state_snapshot_interval": 4}


@pytest.fixture(autouse=True)
def products_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreting them takes longer than all the rest, and test_triton.py has them."""
    monkeypatch.setattr("chairlift.kernels.triton.program.SMALL_ROWS", 0)


def tiny(tmp_path: Path, family: str) -> Path:
    return tiny_hf_model(tmp_path, family, **MODELS[family])


def tokens(llm: LLM, jobs: list[Job], arrival: str = "together") -> list[list[int]]:
    return [output.outputs[0].token_ids for output in run(llm, jobs, arrival)]


@needs_kernels
@pytest.mark.parametrize(
    "family", [each if each in DEFAULT else pytest.param(each, marks=pytest.mark.nightly) for each in MODELS]
)
def test_greedy_text_is_that_of_transformers_and_of_the_cpu(family: str, tmp_path: Path, device: torch.device) -> None:
    """Three requests, of which two share a beginning, in chunks of at most 12 tokens, with snapshots."""
    model_dir = tiny(tmp_path, family)
    jobs = greedy(3, 9, 3)
    llm = triton_llm(model_dir, jobs, device, **SNAPSHOTS)
    answers = tokens(llm, jobs, "staggered")
    assert not [name for name in llm.engine.core.executor.calls if "recurrence" in name]
    model = hf_model(model_dir)
    agree([transformers_greedy(model, job) for job in jobs], answers, lambda i: check_text(model, jobs[i], answers[i]))
    sizes = {**SIZES, "block_size": 16}
    cpu = tokens(make_llm(model_dir, jobs, **sizes), jobs)
    agree(cpu, answers, lambda i: check_text(model, jobs[i], answers[i]))


SHARING = [
    Job([*range(5, 14), *more], SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, logprobs=0))
    for more in ([20, 21], [30, 31, 32])
]
"""Two requests that share nine tokens."""


def in_turn(model_dir: Path, device: torch.device) -> tuple[list[list[int]], list[float], int]:
    """(tokens, their log-probabilities, number of cached prompt tokens) of the jobs, one after the other."""
    llm = triton_llm(model_dir, SHARING, device, **SNAPSHOTS)
    outputs = [run(llm, [job])[0] for job in SHARING]
    answers = [output.outputs[0] for output in outputs]
    scores = [
        entry[token].logprob
        for answer in answers
        for entry, token in zip(answer.logprobs or (), answer.token_ids, strict=True)
    ]
    return [answer.token_ids for answer in answers], scores, sum(output.num_cached_tokens for output in outputs)


def forget_snapshots(patch: pytest.MonkeyPatch) -> None:
    made = triton_runner.PagedKV

    def without(*given: Any) -> PagedKV:
        kv = made(*given)
        return dataclasses.replace(kv, state_spans=[span and ONE_STATE for span in kv.state_spans])

    patch.setattr(triton_runner, "PagedKV", without)


@pytest.mark.planted("test_a_snapshot_in_the_prefix_cache_is_used")
def test_missing_snapshots_are_noticed(tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    model_dir = tiny(tmp_path, "mamba2")
    _, expected, _ = in_turn(model_dir, device)
    forget_snapshots(monkeypatch)
    _, found, _ = in_turn(model_dir, device)
    assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) > 0.01


def test_a_snapshot_in_the_prefix_cache_is_used(tmp_path: Path, device: torch.device) -> None:
    model_dir = tiny(tmp_path, "mamba2")
    answers, scores, cached = in_turn(model_dir, device)
    assert cached == 8
    llm = make_llm(model_dir, SHARING, kernels="torch", enable_prefix_caching=False, **SIZES)
    for job, answer, own in zip(SHARING, answers, (scores[:3], scores[3:]), strict=True):
        plain = run(llm, [job])[0].outputs[0]
        assert answer == plain.token_ids
        theirs = [entry[token].logprob for entry, token in zip(plain.logprobs or (), answer, strict=True)]
        assert own == pytest.approx(theirs, abs=1e-4)


@pytest.mark.full
@pytest.mark.parametrize("family", ["lfm2", pytest.param("qwen3_5_text", marks=pytest.mark.nightly)])
def test_graphs_run_ahead_with_states(family: str, tmp_path: Path, device: torch.device) -> None:
    """Recorded steps, one step ahead, with requests that are preempted and that end in the middle."""
    model_dir = tiny(tmp_path, family)
    jobs = greedy(4, 7, 5)
    expected = tokens(make_llm(model_dir, jobs, kernels="torch", **SIZES), jobs)
    llm = triton_llm(model_dir, jobs, device, tight=True, num_lookahead_steps=1, block_size=1, **SNAPSHOTS)
    runner: Any = llm.engine.core.executor._runner  # type: ignore[attr-defined]
    if not conftest.ON_GPU:
        runner.graphs = OverwritingGraphs()
    model = hf_model(model_dir)
    answers = tokens(llm, jobs)
    agree(expected, answers, lambda i: check_text(model, jobs[i], answers[i]))
    assert runner.graphs.num_graphs > 1 and llm.engine.scheduler.num_preemptions > 0


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["lfm2", "mamba2"])
def test_batch_invariant_answers_have_the_same_bits_in_any_batch(
    family: str, tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chairlift.kernels.triton.program.SMALL_ROWS", 64)
    assert check_invariance(tiny(tmp_path, family), invariant_jobs(3, 20, 3), device)
