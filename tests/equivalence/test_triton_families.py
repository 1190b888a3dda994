"""Families with experts, caps and sinks in Triton say what transformers and the CPU's kernels say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.equivalence.cases import agree, check_text, make_llm, run, transformers_greedy
from tests.equivalence.test_triton import SIZES, check_invariance, greedy, invariant_jobs, triton_llm
from tests.kernels.triton import conftest
from tests.models.tiny import hf_model, tiny_hf_model
from tests.native import needs_kernels

if conftest.MISSING:
    pytest.skip(conftest.MISSING, allow_module_level=True)
device, interpreter = conftest.device, conftest.interpreter

SMALL: dict[str, Any] = {"num_hidden_layers": 2, "intermediate_size": 48}
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "qwen3_moe": {"moe_intermediate_size": 24, "norm_topk_prob": True},
    "qwen2_moe": {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 40},  # a gated expert for all tokens
    "gpt_oss": {"layer_types": ["full_attention", "sliding_attention"]},
    "glm4_moe": {"moe_intermediate_size": 24, "first_k_dense_replace": 0},  # groups, a correction, a shared expert
    "gemma2": {"layer_types": ["sliding_attention", "full_attention"]},
}
DEFAULT = ("gpt_oss", "gemma2")  # experts with sinks, and caps; the others only in nightly runs, to save time


def tiny(tmp_path: Path, family: str) -> Path:
    return tiny_hf_model(tmp_path, family, **{**SMALL, **MODELS[family]})


@needs_kernels
@pytest.mark.parametrize(
    "family", [each if each in DEFAULT else pytest.param(each, marks=pytest.mark.nightly) for each in MODELS]
)
def test_greedy_text_is_that_of_transformers_and_of_the_cpu(
    family: str, tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three requests, of which two share a beginning, in chunks of at most 12 tokens: experts with few and with many
    pairs."""
    monkeypatch.setattr("chairlift.kernels.triton.program.SMALL_ROWS", 0)
    monkeypatch.setattr("chairlift.kernels.triton.experts.FEW_PAIRS", 8)
    model_dir = tiny(tmp_path, family)
    jobs = greedy(3, 9, 3)
    llm = triton_llm(model_dir, jobs, device)
    answers = [output.outputs[0].token_ids for output in run(llm, jobs)]
    assert not [name for name in llm.engine.core.executor.calls if "experts" in name]
    model = hf_model(model_dir)
    agree([transformers_greedy(model, job) for job in jobs], answers, lambda i: check_text(model, jobs[i], answers[i]))
    cpu = [output.outputs[0].token_ids for output in run(make_llm(model_dir, jobs, **SIZES), jobs)]
    agree(cpu, answers, lambda i: check_text(model, jobs[i], answers[i]))


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["qwen2_moe", "gpt_oss"])
def test_batch_invariant_answers_have_the_same_bits_in_any_batch(
    family: str, tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chairlift.kernels.triton.experts.FEW_PAIRS", 8)
    assert check_invariance(tiny(tmp_path, family), invariant_jobs(3, 20, 3), device)
