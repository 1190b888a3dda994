"""compressed-tensors: the public package packs, and says what is worth what."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from torch import Tensor

from chairlift import LLM, SamplingParams
from chairlift.errors import ModelLoadError
from chairlift.kernels.grouped import GroupKind
from chairlift.kernels.weights import PLAIN
from chairlift.models.loader import load_model
from chairlift.models.model_files import read_config
from tests.models.quantized.make import Pack, model_pair, parameters, rewrite

INT8 = {"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token", "symmetric": True}
FP8 = {**INT8, "type": "float"}


def settings_and_pack(form: str, weights: Mapping[str, Any], activations: Any = None) -> tuple[Any, Pack]:
    """A configuration as LLM Compressor writes it, and a packer that is the package's own."""
    args = QuantizationArgs(**weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    compressor = BaseCompressor.get_value_from_registry(form)

    def pack(weight: Tensor) -> tuple[Mapping[str, Tensor], Tensor]:
        scale, zero = scales(args, weight)
        given = {"weight": weight, "weight_scale": scale}
        if zero is not None:
            given["weight_zero_point"] = zero
        stored = compressor.compress(dict(given), scheme)
        # The package computes in the scale's dtype, and we in float32.
        exact = {name: each.float() if each.dtype == torch.float16 else each for name, each in stored.items()}
        worth = compressor.decompress(exact, scheme)["weight"]
        assert worth.dtype == torch.float32
        return {name: each for name, each in stored.items() if each is not None}, worth

    group = {
        "targets": ["Linear"],
        "weights": args.model_dump(mode="json"),
        "input_activations": activations,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*no_such.*"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
        "global_compression_ratio": 1.4,
    }, pack


def scales(args: QuantizationArgs, weight: Tensor) -> tuple[Tensor, Tensor | None]:
    """Scales of float16, which are exact in every product, and random zero points of int8."""
    n, k = weight.shape
    shape: tuple[int, ...] = {
        "tensor": (1,),
        "channel": (n, 1),
        "group": (n, k // (args.group_size or k)),
        "block": (-(-n // 48), -(-k // 32)),
    }[args.strategy]
    generator = torch.Generator().manual_seed(n)
    largest = 448 if args.type == "float" else 1 << (args.num_bits - 1)
    scale = ((torch.rand(shape, generator=generator) + 0.5) / largest).half()
    if args.symmetric:
        return scale, None
    half = 1 << (args.num_bits - 1)
    return scale, torch.randint(-half, half, shape, generator=generator).to(torch.int8)


def int_weights(bits: int, strategy: str, *, symmetric: bool = True, group: int | None = None) -> dict[str, Any]:
    return {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": strategy, "group_size": group}


def float_weights(strategy: str, block: list[int] | None = None) -> dict[str, Any]:
    return {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, "block_structure": block}


CASES: dict[str, tuple[str, dict[str, Any], Any, GroupKind | None]] = {
    "W8A8": ("int-quantized", int_weights(8, "channel"), INT8, GroupKind(8, 64)),
    "W8A8, one scale": ("int-quantized", int_weights(8, "tensor"), INT8, GroupKind(8, 64)),
    "W8A8, asymmetric": ("int-quantized", int_weights(8, "channel", symmetric=False), INT8, GroupKind(8, 64, True)),
    "W8A8 in groups": ("int-quantized", int_weights(8, "group", group=32), INT8, GroupKind(8, 32)),
    "W4A16": ("pack-quantized", int_weights(4, "group", group=32), None, GroupKind(4, 32)),
    "W4A16 in groups of 64": ("pack-quantized", int_weights(4, "group", group=64), None, GroupKind(4, 64)),
    "W4A16, asymmetric": (
        "pack-quantized",
        int_weights(4, "group", symmetric=False, group=32),
        None,
        GroupKind(4, 32, True),
    ),
    "W4A16 by channel": ("pack-quantized", int_weights(4, "channel"), None, GroupKind(4, 64)),
    "W4A8 by channel": ("pack-quantized", int_weights(4, "channel", symmetric=False), INT8, GroupKind(4, 64, True)),
    "W5A16": ("pack-quantized", int_weights(5, "group", symmetric=False, group=32), None, GroupKind(8, 32, True)),
    "W6A16": ("pack-quantized", int_weights(6, "group", group=64), None, GroupKind(8, 64)),
    "W3A16 by channel": ("pack-quantized", int_weights(3, "channel"), None, GroupKind(4, 64)),
    "W8A16": ("pack-quantized", int_weights(8, "group", group=64), None, GroupKind(8, 64)),
    "W8A16, asymmetric": ("pack-quantized", int_weights(8, "channel", symmetric=False), None, GroupKind(8, 64, True)),
    "FP8": ("float-quantized", float_weights("channel"), FP8, GroupKind(8, 320, e4m3=True)),
    "FP8, one scale": ("float-quantized", float_weights("tensor"), FP8, GroupKind(8, 320, e4m3=True)),
}
SIZES = {"hidden_size": 192, "intermediate_size": 320, "head_dim": 48}
"""Multiples of 64 only."""


@pytest.mark.parametrize("case", CASES)
def test_numbers_are_the_packages_own(tmp_path: Path, case: str) -> None:
    form, weights, activations, kind = CASES[case]
    quantised, twin = model_pair(tmp_path, *settings_and_pack(form, weights, activations), num_hidden_layers=1, **SIZES)
    found, wanted = parameters(quantised), parameters(twin)
    for name in wanted:
        assert torch.equal(found[name], wanted[name]), name
    model = load_model(quantised, read_config(quantised), "float32", weight_format=PLAIN)
    assert model.get_submodule("model.layers.0.mlp.down_proj").shape.kind == kind


def test_blocks_of_floats_are_read_as_the_package_writes_them(tmp_path: Path) -> None:
    """The package divides such weights into whole blocks only; the sizes here leave parts of blocks."""

    def pack(weight: Tensor) -> tuple[Mapping[str, Tensor], Tensor]:
        n, k = weight.shape
        stored, scale = weight.to(torch.float8_e4m3fn), torch.rand(-(-n // 48), -(-k // 80))
        wide = scale.repeat_interleave(48, 0).repeat_interleave(80, 1)
        return {"weight": stored, "weight_scale": scale}, stored.float() * wide[:n, :k]

    settings, _ = settings_and_pack("float-quantized", float_weights("block", [48, 80]), FP8)
    quantised, twin = model_pair(tmp_path, settings, pack)
    found, wanted = parameters(quantised), parameters(twin)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("case", ["W8A8", "W4A16, asymmetric", "FP8"])
def test_answers_are_those_of_the_twin(tmp_path: Path, case: str) -> None:
    form, weights, activations, _ = CASES[case]
    answers = []
    for model_dir in model_pair(tmp_path, *settings_and_pack(form, weights, activations)):
        llm = LLM(str(model_dir), dtype="float32", quantization="none", skip_tokenizer_init=True, num_kv_blocks=64)
        outputs = llm.generate([[5, 9, 100, 3]], SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))
        answers.append(outputs[0].outputs[0].token_ids)
    assert answers[0] == answers[1]


def test_the_old_name_of_the_settings_and_dense_weights_are_read(tmp_path: Path) -> None:
    quantised, twin = model_pair(tmp_path, *settings_and_pack("int-quantized", int_weights(8, "channel"), INT8))
    config = json.loads((quantised / "config.json").read_text())
    settings = {**config.pop("quantization_config"), "sparsity_config": {"format": "dense", "global_sparsity": 0.1}}
    (quantised / "config.json").write_text(json.dumps({**config, "compression_config": settings}))
    found, wanted = parameters(quantised), parameters(twin)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_zero_points_of_zero_beside_symmetric_weights_are_passed_over(tmp_path: Path) -> None:
    quantised, twin = model_pair(tmp_path, *settings_and_pack("int-quantized", int_weights(8, "channel"), INT8))
    name = "model.layers.0.self_attn.q_proj.weight_zero_point"
    rewrite(quantised, lambda tensors: tensors.update({name: torch.zeros(64, 1, dtype=torch.int8)}))
    found, wanted = parameters(quantised), parameters(twin)
    assert all(torch.equal(found[each], wanted[each]) for each in wanted)
    rewrite(quantised, lambda tensors: tensors.update({name: torch.ones(64, 1, dtype=torch.int8)}))
    with pytest.raises(ModelLoadError, match=f"tensor {name} is not 0, but .* symmetric"):
        parameters(quantised)
