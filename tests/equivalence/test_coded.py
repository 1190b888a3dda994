"""Quantised weights on the Triton kernels: codes stay codes, and the answers are those of the dequantised model.

Activations are not rounded there, so the tokens are also those of the CPU with dtype float32, which computes with the
dequantised weights.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from tests.kernels.triton import conftest  # before anything that imports the kernels, which it makes interpreted ones

# isort: split
from chairlift import LLM
from chairlift.errors import ConfigError
from chairlift.executor.local import LocalExecutor
from chairlift.kernels.coded import CodedWeight
from chairlift.kernels.grouped import GroupKind
from chairlift.kernels.rounding import rounded_rows
from chairlift.kernels.triton import program
from chairlift.models.layers.linear import Linear, Matrix, Stack
from tests.equivalence.cases import Job, agree, check_text, make_llm, run, transformers_greedy
from tests.equivalence.test_triton import SMALL, check_greedy, check_invariance, greedy, invariant_jobs, triton_llm
from tests.models.gguf.make import to_gguf
from tests.models.quantized import packers
from tests.models.quantized.make import Pack, model_pair, mxfp4_pair
from tests.models.quantized.test_compressed_tensors import int_weights, settings_and_pack
from tests.models.quantized.test_layouts import small_floats
from tests.models.tiny import hf_model, tiny_hf_model
from tests.native import needs_kernels

if conftest.MISSING:
    pytest.skip(conftest.MISSING, allow_module_level=True)
if conftest.ON_GPU:
    pytest.skip("the interpreter's float32 is what these are exact in", allow_module_level=True)
device, interpreter = conftest.device, conftest.interpreter

FORMATS: dict[str, tuple[tuple[Any, Pack], GroupKind]] = {
    "gptq": (packers.gptq(4, 32), GroupKind(4, 32)),
    "gptq-8-bits-with-zero-points": (packers.gptq(8, 32, symmetric=False), GroupKind(8, 32, True)),
    "awq": (packers.awq(32), GroupKind(4, 32, True)),
    "compressed-tensors": (
        settings_and_pack("pack-quantized", int_weights(4, "group", group=64)),
        GroupKind(4, 64),
    ),
    "fp8-blocks": (packers.block_fp8((48, 32)), GroupKind(8, 32, e4m3=True)),
    "fp8-one-scale": (packers.tensor_fp8(), GroupKind(8, 64, e4m3=True)),
    "mxfp4": (small_floats("mxfp4-pack-quantized", 32), GroupKind(4, 32, e2m1=True)),
}
E2M1 = GroupKind(4, 32, e2m1=True)
SIZE = {"num_hidden_layers": 2, "intermediate_size": 64}


def layers_of(llm: LLM) -> list[Matrix]:
    assert isinstance(llm.engine.core.executor, LocalExecutor)
    model: Any = llm.engine.core.executor._runner._model  # type: ignore[attr-defined]
    return [layer for layer in model.modules() if isinstance(layer, Matrix)]


def tokens(llm: LLM, jobs: list[Job]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in run(llm, jobs)]


def has_codes(llm: LLM, kind: GroupKind) -> bool:
    """Whether all linear layers but the output head keep codes of ``kind``."""
    layers = [layer for layer in layers_of(llm) if isinstance(layer, Linear)][:-1]
    return bool(layers) and all(isinstance(each.weight, CodedWeight) and each.weight.kind == kind for each in layers)


@needs_kernels
@pytest.mark.full
@pytest.mark.parametrize("case", FORMATS)
def test_a_checkpoint_in_codes_answers_like_its_numbers_and_like_the_cpu(
    case: str, tmp_path: Path, device: torch.device
) -> None:
    (settings, pack), kind = FORMATS[case]
    quantised, twin = model_pair(tmp_path, settings, pack, **SIZE)
    jobs = greedy(2, 6, 3)
    llm = triton_llm(quantised, jobs, device)
    assert has_codes(llm, kind) and llm.info.quantization == kind.name and llm.info.approximations == ()
    answers = tokens(llm, jobs)
    assert answers == tokens(make_llm(quantised, jobs), jobs)
    model = hf_model(twin)
    agree([transformers_greedy(model, job) for job in jobs], answers, lambda i: check_text(model, jobs[i], answers[i]))


@pytest.mark.parametrize("rows", ["tiles", "library"])
def test_many_rows_answer_alike(
    rows: str, tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    (settings, pack), _ = FORMATS["awq"]
    quantised, twin = model_pair(tmp_path, settings, pack, **SIZE)
    monkeypatch.setattr(program, "SMALL_ROWS", 0)
    monkeypatch.setattr(program, "CODED_ROWS", 0 if rows == "library" else 256)
    check_greedy((quantised, hf_model(twin)), greedy(3, 9, 3), device)


def experts_in(case: str, where: Path) -> tuple[Path, Path, GroupKind]:
    """(a model whose experts are codes, its twin in floats, kind of the codes)."""
    if case == "gpt_oss-mxfp4":
        kinds: dict[str, Any] = {"layer_types": ["full_attention", "sliding_attention"]}
        return *mxfp4_pair(where, hidden_size=64, intermediate_size=32, num_hidden_layers=2, **kinds), E2M1
    kind = GroupKind(8, 32, e4m3=True) if case.endswith("fp8") else GroupKind(4, 32)
    settings, pack = packers.block_fp8((16, 32)) if kind.e4m3 else packers.gptq(4, 32)
    sizes: dict[str, Any] = {"moe_intermediate_size": 32, "num_hidden_layers": 2, "norm_topk_prob": True}
    return *model_pair(where, settings, pack, family="qwen3_moe", **sizes), kind


@needs_kernels
@pytest.mark.parametrize(
    "case", ["gpt_oss-mxfp4", "qwen3_moe-int4", pytest.param("qwen3_moe-fp8", marks=pytest.mark.nightly)]
)
def test_experts_in_codes_answer_like_their_numbers_and_like_the_cpu(
    case: str, tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With few and with many pairs of a token and an expert. Rows that pad a step choose no expert."""
    padding: list[int] = []

    def watched(*given: Any, slots: Tensor, **how: Any) -> Tensor:
        padding.append(int((slots < 0).sum()))
        result: Tensor = experts(*given, slots=slots, **how)
        return result

    experts: Any = vars(program)["experts"]
    monkeypatch.setattr(program, "experts", watched)
    monkeypatch.setattr(program, "SMALL_ROWS", 0)
    monkeypatch.setattr("chairlift.kernels.triton.experts.FEW_PAIRS", 8)
    quantised, twin, kind = experts_in(case, tmp_path)
    jobs = greedy(3, 9, 3)
    llm = triton_llm(quantised, jobs, device)
    stacks = [layer.weight for layer in layers_of(llm) if isinstance(layer, Stack)]
    assert len(stacks) == 4 and all(isinstance(each, CodedWeight) and each.kind == kind for each in stacks)
    answers = tokens(llm, jobs)
    assert any(padding) and not all(padding)
    assert answers == tokens(make_llm(quantised, jobs), jobs)
    model = hf_model(twin)
    agree([transformers_greedy(model, job) for job in jobs], answers, lambda i: check_text(model, jobs[i], answers[i]))


def rounded_twin(where: Path, bits: int, *, tied: bool) -> tuple[Path, PreTrainedModel]:
    """A model, and transformers with its weights rounded as ``quantization`` says."""
    family = "llama" if tied else "qwen2"
    model_dir = tiny_hf_model(where / "plain", family, tie_word_embeddings=tied, **SMALL)
    copy = Path(shutil.copytree(model_dir, where / "rounded"))

    def rounded(name: str, rows: Tensor) -> Tensor:
        if name.endswith("_proj.weight"):
            return rounded_rows(rows, GroupKind(bits, 32)).dequantize()
        head = "model.embed_tokens.weight" if tied else "lm_head.weight"
        return rounded_rows(rows, GroupKind(8, 32)).dequantize() if name == head else rows

    weights = {name: rounded(name, rows) for name, rows in load_file(copy / "model.safetensors").items()}
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    return model_dir, hf_model(copy)


@needs_kernels
@pytest.mark.parametrize(("bits", "tied"), [(8, False), (4, True)])
def test_weights_rounded_at_load_answer_like_the_numbers_they_became(
    bits: int, tied: bool, tmp_path: Path, device: torch.device
) -> None:
    """A tied head shares the codes of the embedding, which are read by rows."""
    how: dict[str, Any] = {"quantization": f"int{bits}"}
    model_dir, model = rounded_twin(tmp_path, bits, tied=tied)
    jobs = greedy(2, 6, 3)
    llm = triton_llm(model_dir, jobs, device, **how)
    answers = tokens(llm, jobs)
    agree([transformers_greedy(model, job) for job in jobs], answers, lambda i: check_text(model, jobs[i], answers[i]))
    assert has_codes(llm, GroupKind(bits, 32))
    assert set(llm.info.approximations) == {"weights rounded to int8", f"weights rounded to int{bits}"}


@needs_kernels
@pytest.mark.parametrize("block_type", ["Q4_0", "Q8_0", "Q4_1"])
def test_a_gguf_file_answers_like_the_cpu(block_type: str, tmp_path: Path, device: torch.device) -> None:
    """Also its embedding and its output head are codes."""
    dense = tiny_hf_model(tmp_path, "qwen2", **{**SMALL, "intermediate_size": 64}, tie_word_embeddings=True)
    path = to_gguf(dense, tmp_path / "model.gguf", gguf.GGMLQuantizationType[block_type].name)
    jobs = greedy(3, 7, 3)
    llm, cpu = triton_llm(path, jobs, device), make_llm(path, jobs)
    assert all(isinstance(layer.weight, CodedWeight) for layer in layers_of(llm))
    assert tokens(llm, jobs) == tokens(cpu, jobs)


@needs_kernels
def test_no_second_copy_is_kept_and_none_asks_for_floats(tmp_path: Path, device: torch.device) -> None:
    (settings, pack), _ = FORMATS["gptq"]
    quantised, twin = model_pair(tmp_path, settings, pack, **SIZE)
    jobs = greedy(1, 5, 2)
    llm, floats = triton_llm(quantised, jobs, device), triton_llm(quantised, jobs, device, quantization="none")
    held = [layer.weight.nbytes for layer in layers_of(llm) if isinstance(layer.weight, CodedWeight)]
    plain = [layer.weight.nbytes for layer in layers_of(floats) if isinstance(layer, Linear)][:-1]
    assert len(held) == len(plain) and sum(held) * 6 < sum(plain)  # 5 bits each with float32 scales, or 32 bits
    assert llm.info.weight_bytes == floats.info.weight_bytes - sum(plain) + sum(held)
    assert floats.info.quantization is None and not [layer for layer in layers_of(floats) if not layer.format.embeds]
    stored = triton_llm(quantised, jobs, device, quantization="stored")
    assert stored.info.quantization == "int4"
    with pytest.raises(ConfigError, match="PyTorch's kernels would run this model, and the native CPU kernels and the"):
        make_llm(quantised, jobs, kernels="torch", quantization="stored")
    assert twin.is_dir()


def test_batch_invariant_answers_have_the_same_bits_in_any_batch(
    tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    (settings, pack), _ = FORMATS["awq"]
    quantised, _ = model_pair(tmp_path, settings, pack, num_hidden_layers=1, intermediate_size=32)
    monkeypatch.setattr(program, "SMALL_ROWS", 4)
    monkeypatch.setattr(program, "CODED_ROWS", 8)
    assert check_invariance(quantised, invariant_jobs(2, 12, 2), device, max_num_batched_tokens=24)


@pytest.mark.nightly
@needs_kernels
def test_new_weights_are_rounded_where_the_old_ones_lay(tmp_path: Path, device: torch.device) -> None:
    how: dict[str, Any] = {"quantization": "int8"}
    old, new = (tiny_hf_model(tmp_path, "qwen2", seed=seed, **SMALL) for seed in (0, 1))
    jobs = greedy(2, 5, 3)
    wanted, llm = tokens(triton_llm(new, jobs, device, **how), jobs), triton_llm(old, jobs, device, **how)
    layer: Any = layers_of(llm)[3]
    places = layer.weight.codes.data_ptr(), layer.weight.scales.data_ptr()
    before = tokens(llm, jobs)
    llm.update_weights(new, 1)
    assert tokens(llm, jobs) == wanted != before
    assert (layer.weight.codes.data_ptr(), layer.weight.scales.data_ptr()) == places
