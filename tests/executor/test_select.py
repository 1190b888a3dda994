"""Who runs a model, and what is said when it is not the native kernels."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from chairlift import LLM, SamplingParams
from chairlift.config import EngineConfig
from chairlift.errors import ConfigError
from chairlift.executor import select
from chairlift.executor.model_runner import TorchModelRunner
from chairlift.executor.native_runner import NativeModelRunner
from chairlift.executor.select import choose_isa, why_not_native
from chairlift.kernels.cpu.library import best_isa, supported_isas
from chairlift.models.hf_config import ModelConfig, parse_config
from tests.kernels.cpu.models import tiny_model
from tests.native import needs_kernels

pytestmark = needs_kernels

CPU = torch.device("cpu")


def network(head_dim: int = 32) -> ModelConfig:
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    return parse_config({"model_type": "llama", "num_attention_heads": 2, "head_dim": head_dim, **sizes})


@pytest.mark.parametrize(
    ("dtype", "device", "block_size", "head_dim", "words"),
    [
        (torch.float32, "cpu", 16, 32, ""),
        (torch.bfloat16, "cpu", 256, 256, ""),
        (torch.float16, "cpu", 16, 32, "dtype is float16; use one of those"),
        (torch.bfloat16, "cuda:1", 16, 32, "device is cuda:1; use device='cpu'"),
        (torch.bfloat16, "cpu", 8, 32, "multiple of 16, and it is 8; leave it out"),
        (torch.bfloat16, "cpu", 16, 16, ""),
        (torch.bfloat16, "cpu", 16, 8, "this model's is 8"),
        (torch.bfloat16, "cpu", 16, 72, "this model's is 72"),
        (torch.bfloat16, "cpu", 16, 272, "this model's is 272"),
    ],
)
def test_what_the_native_kernels_can_run(
    dtype: torch.dtype, device: str, block_size: int, head_dim: int, words: str
) -> None:
    reason = why_not_native(network(head_dim), dtype, torch.device(device), block_size)
    assert reason.endswith(words) and bool(reason) == bool(words)


def choose(head_dim: int = 32, dtype: torch.dtype = torch.float32, device: torch.device = CPU, **settings: Any) -> Any:
    return choose_isa(EngineConfig.from_flat(settings), network(head_dim), dtype, device)


def test_the_best_path_is_chosen_and_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    assert choose() == best_isa()
    assert choose(kernels="torch") is None
    assert choose(head_dim=24, kernels="torch") is None
    assert choose(device=torch.device("cuda")) is None
    assert not caplog.records


@pytest.mark.parametrize("isa", supported_isas())
def test_a_path_may_be_named(isa: str) -> None:
    assert choose(kernels=isa) == isa


def test_falling_back_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "chairlift"):
        assert choose(block_size=8) is None
    assert len(caplog.records) == 1
    assert caplog.records[0].name.startswith("chairlift")
    assert "PyTorch runs this model" in caplog.text and "block_size" in caplog.text


def test_a_path_that_cannot_be_had_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"kernels is 'avx2', but the native kernels cannot run this model: .*size"):
        choose(head_dim=24, kernels="avx2")
    monkeypatch.setattr(select, "supported_isas", lambda: ("avx2", "avx512"))
    with pytest.raises(ConfigError, match="kernels is 'amx', but this processor runs avx2, avx512; use one of them"):
        choose(kernels="amx")


def test_an_llm_is_run_by_what_was_chosen(tmp_path: Path) -> None:
    model_dir = tiny_model(tmp_path, "qwen2")
    settings: dict[str, Any] = {"skip_tokenizer_init": True, "num_kv_blocks": 20, "max_num_seqs": 2, "threads": 1}
    runners, answers = [], []
    torch.set_num_threads(2)
    for kernels in ("auto", *supported_isas(), "torch"):
        llm = LLM(model_dir, kernels=kernels, **settings)
        runners.append(type(llm.engine.core.executor._runner))  # type: ignore[attr-defined]
        params = SamplingParams(n=2, seed=5, max_tokens=12, ignore_eos=True)
        answers.append([answer.token_ids for answer in llm.generate([[5, 6, 7, 8]], params)[0].outputs])
    assert runners == [*[NativeModelRunner] * (1 + len(supported_isas())), TorchModelRunner]
    assert all(answer == answers[0] for answer in answers)
    assert torch.get_num_threads() == 1
