"""Recurrent and hybrid families in Triton say what transformers and the CPU's kernels say, and mistakes show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kernels.triton import conftest  # before anything that imports the kernels, which it makes interpreted ones

# isort: split
from chairlift import LLM
from tests.equivalence.cases import Job, agree, check_text, make_llm, run, transformers_greedy
from tests.equivalence.test_triton import SIZES, check_invariance, greedy, invariant_jobs, triton_llm
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


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["lfm2", "mamba2"])
def test_batch_invariant_answers_have_the_same_bits_in_any_batch(
    family: str, tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chairlift.kernels.triton.program.SMALL_ROWS", 64)
    assert check_invariance(tiny(tmp_path, family), invariant_jobs(3, 20, 3), device)
