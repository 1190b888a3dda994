"""Recipes: which matrix gets how many bits, the bytes that are written, and every native family.

Changes that must make these fail: an embedding in 16 bits; zero points that are not written; rows of experts in another
order; a stack that is written as one matrix; wide matrices with 4 bits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from chairlift import LLM
from chairlift.kernels.grouped import GROUP, GroupKind
from chairlift.kernels.weights import PLAIN
from chairlift.models.formats.checkpoint import hf_state_dict
from chairlift.models.formats.quantize.recipes import DEFAULT_RECIPE, RECIPES
from chairlift.models.formats.quantize.rounding import round_rows
from chairlift.models.formats.quantize.run import quantize_model
from chairlift.models.loader import load_model
from chairlift.models.model_files import read_config
from tests.models.quantize.test_run import small
from tests.models.tiny import EXPERT_FAMILIES, FAMILIES, MORE_FAMILIES, RECURRENT_FAMILIES
from tests.native import needs_kernels

ZERO_POINTS = GroupKind(4, GROUP, minimum=True)
WIDE = GroupKind(8, GROUP)
ALL = [name for name in (*FAMILIES, *MORE_FAMILIES, *EXPERT_FAMILIES, *RECURRENT_FAMILIES) if name != "gpt2"]
"""All families but GPT-2, whose weights are stored transposed."""
FIELDS: dict[str, dict[str, Any]] = {
    "glm4_moe": {"moe_intermediate_size": 64},
    "qwen2_moe": {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 96},
    "qwen3_moe": {"moe_intermediate_size": 64},
    **{
        name: {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 96, "num_hidden_layers": 3}
        for name in ("qwen3_5_moe_text", "qwen3_next")
    },
    "helium": {"head_dim": 32},
    "lfm2_moe": {"num_hidden_layers": 4, "moe_intermediate_size": 64},
    "mamba2": {"num_heads": 16},
    "opt": {"word_embed_proj_dim": 128},
    **{name: {"num_hidden_layers": 3} for name in ("gemma3_text", "gpt_neo", "qwen3_5_text", "granitemoehybrid")},
    **{name: {"num_hidden_layers": 4} for name in ("cohere2", "exaone4", "gemma2", "olmo3", "smollm3", "lfm2")},
    "nemotron_h": {"num_hidden_layers": 5},
}
"""Fields that make the rows of all matrices multiples of 32, and the numbers of layers that other fields need."""


def weights(model_dir: Path) -> dict[str, torch.Tensor]:
    return hf_state_dict(load_model(model_dir, read_config(model_dir), "float32", weight_format=PLAIN))


@pytest.mark.parametrize("family", ALL)
def test_every_family_is_written_and_read(tmp_path: Path, family: str) -> None:
    """Experts, recurrent layers and stacks included. Weights in a wrong place would differ by more than their size."""
    model_dir, out = small(tmp_path, family, dtype=torch.bfloat16, **FIELDS.get(family, {})), tmp_path / "out"
    report = quantize_model(model_dir, out, DEFAULT_RECIPE)
    before, after = weights(model_dir), weights(out)
    assert before.keys() == after.keys()
    losses = {name: float((after[name] - values).norm() / values.norm()) for name, values in before.items()}
    assert max(losses.values()) < 0.1
    lossy = sum(values.numel() for name, values in before.items() if losses[name] > 0.003)
    assert lossy == report.weights
    assert report.nbytes == sum(each.nbytes for each in load_file(out / "model.safetensors").values())


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "granitemoe"])
def test_experts_are_calibrated(tmp_path: Path, family: str) -> None:
    """Experts are rounded for the inputs of their layer, and the other matrices by GPTQ."""
    model_dir, samples = small(tmp_path, family), [[5, 9, 100, 3, 77, 20] * 8, [7, 8, 9]]
    plain, found = (
        quantize_model(model_dir, tmp_path / name, "int4-small", given)
        for name, given in (("plain", None), ("out", samples))
    )
    before, after = weights(model_dir), weights(tmp_path / "out")
    assert max(float((after[name] - values).norm() / values.norm()) for name, values in before.items()) < 0.25
    assert (found.samples, found.tokens, found.weights) == (2, 51, plain.weights)
    assert len(found.output_errors) == 2 * 2  # qkv and o of two layers


def test_bytes_are_those_of_the_recipe(tmp_path: Path) -> None:
    """A tied embedding of V x 128, two layers of q, k, v, o (128 + 64 + 64 + 128 rows), gate, up (256) and down."""
    model_dir = small(tmp_path, dtype=torch.bfloat16, tie_word_embeddings=True)
    vocabulary = read_config(model_dir).vocab_size
    narrow, wide = 2 * (384 + 512) * 128, 2 * 128 * 256
    shapes, norms = 8 * 2, 2 * 5 * 128
    small_bytes = (narrow + wide) * 4.5 / 8 + vocabulary * 128 * 8.5 / 8 + 15 * shapes + norms
    # a scale of 16 bits and a zero point of 4 for each 32 weights
    wanted = narrow * 4.625 / 8 + (wide + vocabulary * 128) * 8.5 / 8 + 15 * shapes + norms
    for form, nbytes in (("int4-small", small_bytes), (DEFAULT_RECIPE, wanted)):
        report = quantize_model(model_dir, tmp_path / form, form)
        assert report.nbytes == nbytes
        assert report.quantised_bytes == nbytes - norms
        assert report.weights == narrow + wide + vocabulary * 128
        assert sum(report.kinds.values()) == report.weights


@needs_kernels
@pytest.mark.parametrize("tied", [True, False])
def test_kernels_serve_the_kinds_of_the_recipe(tmp_path: Path, tied: bool) -> None:
    model_dir = small(tmp_path, dtype=torch.bfloat16, tie_word_embeddings=tied)
    quantize_model(model_dir, tmp_path / "out", DEFAULT_RECIPE)
    llm = LLM(str(tmp_path / "out"), num_kv_blocks=16)
    assert llm.info.quantization == "int4+int8"
    model = load_model(tmp_path / "out", read_config(tmp_path / "out"), weight_format=PLAIN)
    kinds = {name: model.get_submodule(f"model.layers.1.{name}").shape.kind for name in ("mlp.gate_up_proj",)}
    assert kinds == {"mlp.gate_up_proj": ZERO_POINTS}
    assert model.model.layers[1].mlp.down_proj.shape.kind == WIDE
    assert model.model.embed_tokens.shape.kind == WIDE
    assert model.lm_head.shape.kind == WIDE


@needs_kernels
def test_five_and_six_bits_are_read_as_they_were_rounded(tmp_path: Path) -> None:
    """The kernels have codes of 8 bits, with the same numbers."""
    model_dir = small(tmp_path, dtype=torch.bfloat16, tie_word_embeddings=False)
    report = quantize_model(model_dir, tmp_path / "out", "int5")
    assert set(report.kinds) == {"int5 in groups of 32 with minimums", "int6 in groups of 32"}
    before, after = weights(model_dir), weights(tmp_path / "out")
    for name, values in before.items():
        kind = RECIPES["int5"].kind(name) if values.dim() == 2 else None
        if kind is None:
            assert torch.equal(after[name], values)
        else:
            rounded, _ = round_rows(values, kind, torch.bfloat16)
            assert torch.equal(after[name], rounded.dequantize())
    assert LLM(str(tmp_path / "out"), num_kv_blocks=16, skip_tokenizer_init=True).info.quantization == "int8"


def test_names_outside_the_layers_are_the_ends() -> None:
    for name in ("lm_head.weight", "model.embed_tokens.weight", "model.project_in.weight"):
        assert RECIPES[DEFAULT_RECIPE].kind(name) == WIDE
        assert RECIPES["int8"].kind(name) is None
