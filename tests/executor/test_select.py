"""An executor is chosen for a model, and a note says why if it is not the one with native kernels."""

from __future__ import annotations

import dataclasses
import logging
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from chairlift import LLM, SamplingParams
from chairlift.config import EngineConfig
from chairlift.errors import ConfigError
from chairlift.executor.backends.native import backend as native_backend
from chairlift.executor.backends.native.backend import NativeBackend
from chairlift.executor.backends.native.native_runner import NativeModelRunner
from chairlift.executor.backends.torch.model_runner import TorchModelRunner
from chairlift.executor.backends.triton.backend import TritonBackend
from chairlift.executor.select import choose_backend
from chairlift.kernels.cpu.library import best_isa, supported_isas
from chairlift.models.hf_config import NetworkConfig, parse_config
from tests.kernels.cpu.models import tiny_model
from tests.native import needs_kernels

pytestmark = needs_kernels

CPU = torch.device("cpu")


def network(head_dim: int = 32, **heads: int) -> NetworkConfig:
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    return parse_config({"model_type": "llama", "num_attention_heads": 2, "head_dim": head_dim, **sizes, **heads})


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
def test_the_native_kernels_name_what_they_cannot_run(
    dtype: torch.dtype, device: str, block_size: int, head_dim: int, words: str
) -> None:
    reason = NativeBackend.why_not(network(head_dim), dtype, torch.device(device), block_size)
    assert reason.endswith(words) and bool(reason) == bool(words)


def choose(head_dim: int = 32, dtype: torch.dtype = torch.float32, device: torch.device = CPU, **settings: Any) -> Any:
    return choose_backend(EngineConfig.from_flat(settings), network(head_dim), dtype, device).kernels


def test_the_best_path_is_chosen_and_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    assert choose() == best_isa()
    assert choose(kernels="torch") == "torch"
    assert choose(head_dim=24, kernels="torch") == "torch"
    assert not caplog.records


@pytest.mark.parametrize("isa", supported_isas())
def test_a_path_may_be_named(isa: str) -> None:
    assert choose(kernels=isa) == isa


def test_falling_back_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "chairlift"):
        assert choose(block_size=8) == "torch"
    assert len(caplog.records) == 1
    assert caplog.records[0].name.startswith("chairlift")
    assert "PyTorch runs this model" in caplog.text and "block_size" in caplog.text


def test_a_path_that_cannot_be_had_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigError, match=r"kernels is 'avx2', but the native CPU kernels cannot run this model: .*size"
    ):
        choose(head_dim=24, kernels="avx2")
    monkeypatch.setattr(native_backend, "supported_isas", lambda: ("avx2", "avx512"))
    monkeypatch.setattr(native_backend, "built_isas", lambda: ("avx2", "avx512", "amx"))
    with pytest.raises(ConfigError, match="kernels is 'amx', but this processor runs avx2, avx512; use one of them"):
        choose(kernels="amx")
    missing = "kernels is 'avx512_bf16', but Chairlift was compiled only for avx2, avx512, amx; .*CHAIRLIFT_KERNELS=all"
    with pytest.raises(ConfigError, match=missing):
        choose(kernels="avx512_bf16")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    with pytest.raises(ConfigError, match="kernels is 'neon', which is for ARM64, and this processor is x86_64; use"):
        choose(kernels="neon")


def pick(device: str = "cuda", head_dim: int = 32, dtype: torch.dtype = torch.float32, **settings: Any) -> str:
    return choose_backend(EngineConfig.from_flat(settings), network(head_dim), dtype, torch.device(device)).kernels


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a GPU and Triton, as far as the choice of kernels looks."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H100")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setitem(sys.modules, "triton.runtime", Triton())


class Triton:
    """Its runtime, where ``error`` comes of compiling what launches kernels."""

    error: Exception | None = None

    @property
    def driver(self) -> Triton:
        return self

    @property
    def active(self) -> Triton:
        if self.error is not None:
            raise self.error
        return self


@pytest.mark.usefixtures("hopper")
def test_on_a_gpu_triton_runs_the_model(caplog: pytest.LogCaptureFixture) -> None:
    assert pick() == pick("cuda:1", kernels="triton", dtype=torch.bfloat16) == "triton"
    assert pick(kernels="torch") == "torch"
    assert not caplog.records
    assert pick("cpu") == best_isa()
    with pytest.raises(ConfigError, match="kernels is 'avx2', but the native CPU kernels cannot run this model"):
        pick(kernels="avx2")


@pytest.mark.usefixtures("hopper")
def test_pytorch_does_not_promise_equal_bits() -> None:
    assert pick(batch_invariant=True) == "triton" and pick("cpu", batch_invariant=True) == best_isa()
    for settings in ({"kernels": "torch"}, {"head_dim": 8}):
        with pytest.raises(ConfigError, match="batch_invariant is on, but PyTorch would run this model"):
            pick(batch_invariant=True, **settings)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_codes_are_for_kernels_that_read_them(quantization: str) -> None:
    assert pick("cpu", quantization=quantization) == best_isa()
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        assert pick(quantization=quantization, dtype=dtype) == "triton"
    refused: list[tuple[dict[str, Any], str]] = [
        ({"kernels": "torch"}, "PyTorch's kernels would run this model, and the native CPU kernels and the Triton"),
        ({"device": "cpu", "kernels": "torch"}, "PyTorch's kernels would run this model"),
        ({"device": "cpu", "head_dim": 8}, "PyTorch's kernels would run this model"),
    ]
    for settings, words in refused:
        with pytest.raises(ConfigError, match=f"quantization is '{quantization}', but {words}.*leave quantization out"):
            pick(**{"quantization": quantization, **settings})
    for device in ("cpu", "cuda"):
        assert pick(device, quantization="none") == pick(device)


@pytest.mark.usefixtures("hopper")
def test_k_and_v_in_8_bits_are_not_for_pytorch() -> None:
    int8: dict[str, Any] = {"kv_cache_dtype": "int8"}
    assert pick("cpu", **int8) == best_isa() and pick("cuda", **int8) == "triton"
    refused = (
        "kv_cache_dtype is 'int8', but PyTorch's kernels would run this model, and only the CPU's native and Triton's"
        " ones read K and V in 8 bits"
    )
    cases: list[tuple[dict[str, Any], str]] = [
        ({"head_dim": 8}, ": they need an even head size from 16 to 256, and this model's is 8, or leave"),
        ({"kernels": "torch"}, "; use kernels='auto', or leave kv_cache_dtype out"),
        ({"device": "cpu", "kernels": "torch"}, "; use kernels='auto', or leave"),
        ({"device": "cpu", "block_size": 8}, ": they need block_size to be a multiple of 16"),
        ({"device": "cpu", "head_dim": 8}, ": they need a head size"),
        ({"device": "cpu", "dtype": torch.float16}, ": they compute in bfloat16 and float32"),
    ]
    for settings, why in cases:
        with pytest.raises(ConfigError, match=re.escape(refused + why)):
            pick(**{**int8, **settings})
    with pytest.raises(ConfigError, match="kv_cache_dtype is 'fp8', but K and V of 8 bits are integers here"):
        pick("cpu", kv_cache_dtype="fp8")


@pytest.mark.usefixtures("hopper")
def test_fp8_is_for_the_triton_kernels_on_a_gpu_that_knows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    fp8: dict[str, Any] = {"quantization": "fp8", "dtype": torch.bfloat16}
    assert pick(**fp8) == pick("cuda:1", kernels="triton", batch_invariant=True, **fp8) == "triton"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    assert pick(**fp8) == "triton"
    alone = "quantization is 'fp8', but {} kernels would run this model, and the Triton kernels alone know it; use dev"
    refused: list[tuple[dict[str, Any], str]] = [
        ({"device": "cpu"}, alone.format(f"the CPU's {best_isa()}")),
        ({"device": "cpu", "kernels": "torch"}, alone.format("PyTorch's")),
        ({"kernels": "torch"}, alone.format("PyTorch's")),
        ({"head_dim": 8}, alone.format("PyTorch's")),
        ({"dtype": torch.float16}, "quantization is 'fp8', but dtype is float16; use dtype='bfloat16', or leave"),
        ({"dtype": torch.float32}, "quantization is 'fp8', but dtype is float32; use dtype='bfloat16', or leave"),
    ]
    for settings, words in refused:
        with pytest.raises(ConfigError, match=re.escape(words)):
            pick(**{**fp8, **settings})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    with pytest.raises(ConfigError, match=r"capability 8.9 or higher, and H100 has 8.6; use another, or leave"):
        pick(**fp8)
    with pytest.raises(ConfigError, match="quantization must be one of int8, int4, fp8, stored, none; got 'int9'"):
        pick(quantization="int9")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert pick("cpu", kernels="triton", quantization="fp8") == "triton"


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RuntimeError("Failed to find C compiler. Please specify"), "(RuntimeError: Failed to find C compiler. Please"),
        (subprocess.CalledProcessError(1, ["gcc", "driver.c"]), "(CalledProcessError: Command '['gcc', 'driver.c']'"),
        (PermissionError(13, "Permission denied", "/cache/.triton"), "(PermissionError: [Errno 13] Permission denied"),
    ],
)
def test_without_a_c_compiler_pytorch_runs_the_model(
    error: Exception, words: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Triton, "error", error)
    with caplog.at_level(logging.WARNING, "chairlift"):
        assert pick() == "torch"
    assert "install a C compiler and Python's headers" in caplog.text and words in caplog.text
    with pytest.raises(ConfigError, match=r"kernels is 'triton', but .*: Triton cannot compile what launches them"):
        pick(kernels="triton")


@pytest.mark.usefixtures("hopper")
def test_a_tile_holds_all_heads_that_share_a_kv_head() -> None:
    models = [network(128, num_attention_heads=heads, num_key_value_heads=2) for heads in (64, 66)]
    reasons = [TritonBackend.why_not(model, torch.bfloat16, torch.device("cuda"), 16) for model in models]
    assert reasons == ["", "they need at most 32 query heads for each KV head, and this model has 33"]


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("change", [{"score_cap": 50.0}, {"sinks": True}, {"logit_cap": 30.0}])
def test_caps_and_sinks_are_no_reason_for_pytorch(change: dict[str, Any]) -> None:
    model = dataclasses.replace(network(), **change)
    assert TritonBackend.why_not(model, torch.bfloat16, torch.device("cuda"), 16) == ""


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("capability", "found", "head_dim", "words"),
    [
        ((7, 5), "triton", 32, "compute capability 8.0 or higher, and H100 has 7.5"),
        ((9, 0), None, 32, "the package triton is not installed"),
        ((9, 0), "triton", 8, "head size from 16 to 256, and this model's is 8"),
        ((8, 0), "triton", 258, "head size from 16 to 256, and this model's is 258"),
    ],
)
def test_without_what_triton_needs_pytorch_runs_the_model(
    capability: tuple[int, int],
    found: str | None,
    head_dim: int,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: found)
    with caplog.at_level(logging.WARNING, "chairlift"):
        assert pick(head_dim=head_dim) == "torch"
    assert [record.levelname for record in caplog.records] == ["WARNING"] and words in caplog.text
    with pytest.raises(ConfigError, match="kernels is 'triton', but the Triton kernels cannot run this model") as error:
        pick(head_dim=head_dim, kernels="triton")
    assert words in str(error.value)


def test_triton_on_a_cpu_is_for_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match="device is cpu; use device='cuda', or set TRITON_INTERPRET=1"):
        pick("cpu", kernels="triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert pick("cpu", kernels="triton") == "triton"
    assert pick("cpu") == best_isa()
    assert "float32 only" in TritonBackend.why_not(network(), torch.bfloat16, CPU, 16)


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


def test_float16_checkpoints_run_in_bfloat16_where_the_cpu_may_choose(tmp_path: Path) -> None:
    model_dir = tiny_model(tmp_path, "llama", dtype="float16", torch_dtype="float16")
    settings: dict[str, Any] = {"skip_tokenizer_init": True, "num_kv_blocks": 20}
    llm = LLM(model_dir, **settings)
    assert (llm.info.dtype, llm.info.kernels) == ("bfloat16", best_isa())
    assert sum("the checkpoint is in float16" in note for note in llm.notes) == 1
    exact = LLM(model_dir, dtype="float32", **settings)
    assert exact.info.dtype == "float32" and not any("float16" in note for note in exact.notes)
    with pytest.raises(ConfigError, match="dtype is float16"):
        LLM(model_dir, dtype="float16", kernels=best_isa(), **settings)
