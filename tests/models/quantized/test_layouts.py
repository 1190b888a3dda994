"""Layouts of publishers compute what transformers computes with the dequantised weights, alone and in company.

compressed-tensors' own package packs its layouts. The others are packed from their descriptions. Changes that must make
these fail: the halves of a byte exchanged; the second scale of NVFP4 divided for multiplied; a block of nf4 that begins
with its row; a layer read with another layer's number of bits.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.mx_utils import decompress_mx_scale
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from torch import Tensor

from chairlift.errors import ModelLoadError
from chairlift.kernels.grouped import GroupKind
from chairlift.kernels.weights import PLAIN
from chairlift.models import loader
from chairlift.models.loader import load_model
from chairlift.models.model_files import read_config
from tests.models.quantized import packers
from tests.models.quantized.layouts import check_layout
from tests.models.quantized.make import Pack, model_pair, packed_words, parameters, rewrite
from tests.models.quantized.test_compressed_tensors import INT8, float_weights, int_weights, settings_and_pack

DOWN = "model.layers.1.mlp.down_proj"


def floats(seed: Tensor, *shape: int) -> Tensor:
    """Random numbers from 0.5 to 1.5."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(len(seed) + seed.shape[1])) + 0.5


def small_floats(form: str, group: int) -> tuple[Any, Pack]:
    """A format of floats in groups, packed by compressed-tensors."""
    strategy = "tensor_group" if form.startswith("nv") else "group"
    bits = 8 if "fp8" in form else 4
    weights = {"num_bits": bits, "type": "float", "strategy": strategy, "group_size": group, "symmetric": True}
    args = QuantizationArgs(**weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)

    def pack(weight: Tensor) -> tuple[Mapping[str, Tensor], Tensor]:
        n, k = weight.shape
        scale = floats(weight, n, k // group) * (60 if form.startswith("nv") else 0.1)
        given = {"weight": weight, "weight_scale": scale.to(torch.float8_e4m3fn).float()}
        if form.startswith("nv"):
            given["weight_global_scale"] = torch.tensor([500.0])
        else:
            given["weight_scale"] = torch.exp2(torch.floor(torch.log2(scale)))
        stored = BaseCompressor.get_value_from_registry(form).compress(given, scheme)
        found = stored["weight"].float() if bits == 8 else unpack_fp4_from_uint8(stored["weight_packed"], n, k).float()
        read = stored["weight_scale"].float() / 500 if form.startswith("nv") else _powers(stored["weight_scale"])
        return {name: each for name, each in stored.items() if each is not None}, found * read.repeat_interleave(
            group, 1
        )

    settings, _ = settings_and_pack("float-quantized", float_weights("tensor"))
    group_settings = {"targets": ["Linear"], "weights": weights, "format": form}
    return {**settings, "format": form, "config_groups": {"group_0": group_settings}}, pack


def _powers(exponents: Tensor) -> Tensor:
    return decompress_mx_scale(exponents).float()


def modelopt_nvfp4(algorithm: str = "NVFP4") -> tuple[Any, Pack]:
    """NVFP4 as Model Optimizer names its tensors."""
    _, pack = small_floats("nvfp4-pack-quantized", 16)

    def renamed(weight: Tensor) -> tuple[Mapping[str, Tensor], Tensor]:
        tensors, _ = pack(weight)
        codes = unpack_fp4_from_uint8(tensors["weight_packed"], *weight.shape).float()
        second = torch.tensor(0.0021)
        worth = codes * (tensors["weight_scale"].float() * second).repeat_interleave(16, 1)
        found = {
            "weight": tensors["weight_packed"],
            "weight_scale": tensors["weight_scale"],
            "weight_scale_2": second,
            "input_scale": torch.tensor(0.5),
        }
        if algorithm == "NVFP4_AWQ":
            found["pre_quant_scale"] = floats(weight, weight.shape[1]).bfloat16()
            worth = worth * found["pre_quant_scale"].float()
        return found, worth

    return {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"]}, renamed


def modelopt_fp8() -> tuple[Any, Pack]:
    _, pack = packers.static_fp8("weight_scale", "input_scale")
    return {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}, pack


def bitsandbytes_4bit(*, nested: bool = False, block: int = 64) -> tuple[Any, Pack]:
    """Codes of a table, high half of a byte first, in blocks of the flattened weight."""

    def pack(weight: Tensor) -> tuple[Mapping[str, Tensor], Tensor]:
        generator = torch.Generator().manual_seed(len(weight))
        table = torch.cat([torch.linspace(-1, 0, 8), torch.linspace(0.08, 1, 8) ** 1.1])
        codes = torch.randint(0, 16, (weight.numel(),), generator=generator)
        blocks = -(-weight.numel() // block)
        absmax = torch.rand(blocks, generator=generator)
        state: dict[str, Any] = {
            "quant_type": "nf4",
            "blocksize": block,
            "dtype": "bfloat16",
            "shape": [*weight.shape],
        }
        tensors = {
            "weight": (codes[::2] << 4 | codes[1::2]).to(torch.uint8).view(-1, 1),
            "weight.absmax": absmax,
            "weight.quant_map": table,
        }
        if nested:
            small = torch.randint(0, 256, (blocks,), generator=generator)
            second, factors = torch.linspace(-1, 1, 256), torch.rand(-(-blocks // 256), generator=generator)
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.31}
            tensors |= {
                "weight.absmax": small.to(torch.uint8),
                "weight.nested_absmax": factors,
                "weight.nested_quant_map": second,
            }
            absmax = torch.stack([second[small[i]] * factors[i // 256] + 0.31 for i in range(blocks)])
        text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        tensors["weight.quant_state.bitsandbytes__nf4"] = text
        return tensors, (table[codes] * absmax[torch.arange(weight.numel()) // block]).view(weight.shape)

    return {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, pack


def bitsandbytes_8bit() -> tuple[Any, Pack]:
    def pack(weight: Tensor) -> tuple[Mapping[str, Tensor], Tensor]:
        largest = weight.abs().amax(1)
        codes = (weight * (127 / largest[:, None])).round().to(torch.int8)
        tensors = {"weight": codes, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
        return tensors, codes.float() * (largest / 127)[:, None]

    return {"quant_method": "bitsandbytes", "load_in_8bit": True}, pack


def autoround(packing: str, symmetric: bool = True) -> tuple[Any, Pack]:
    _, pack = packers.awq() if "awq" in packing else packers.gptq(symmetric=symmetric)
    extra = {"model.layers.0.mlp.gate": {"bits": 16, "data_type": "float"}}
    return {
        **{"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": symmetric, "data_type": "int"},
        **{"packing_format": packing, "autoround_version": "0.8.0", "extra_config": extra},
    }, pack


def mlx(bits: int, group: int) -> tuple[Any, Pack]:
    """Affine integers as MLX packs them."""

    def pack(weight: Tensor) -> tuple[Mapping[str, Tensor], Tensor]:
        n, k = weight.shape
        codes = torch.randint(0, 1 << bits, (n, k), generator=torch.Generator().manual_seed(n + k))
        scales, biases = floats(weight, n, k // group).half() / (1 << bits), -floats(weight, n, k // group).half()
        worth = scales.float().repeat_interleave(group, 1) * codes + biases.float().repeat_interleave(group, 1)
        return {"weight": packed_words(codes, bits).view(torch.uint32), "scales": scales, "biases": biases}, worth

    return {"group_size": group, "bits": bits, "mode": "affine"}, pack


def by_turns(settings: Any, *packs: Pack) -> tuple[Any, Pack]:
    """A packer that packs by the number of columns: those of ``down_proj`` differ from the others'."""
    return settings, lambda weight: packs[weight.shape[1] == 128](weight)


def gptq_dynamic() -> tuple[Any, Pack]:
    """GPTQModel: down_proj of 8 bits, everything else of 4, and patterns that leave layers out."""
    settings, four = packers.gptq()
    _, eight = packers.gptq(8, 64)
    dynamic: dict[str, Any] = {"-:.*no_such.*": {}, "+:.*down_proj.*": {"bits": 8, "group_size": 64}}
    return by_turns({**settings, "dynamic": dynamic}, four, eight)


def two_formats() -> tuple[Any, Pack]:
    """compressed-tensors: down_proj in FP8, everything else in 4 bits."""
    four, pack_four = settings_and_pack("pack-quantized", int_weights(4, "group", group=32))
    eight, pack_eight = settings_and_pack("float-quantized", float_weights("channel"))
    groups = {
        "group_0": {**four["config_groups"]["group_0"], "format": "pack-quantized"},
        "group_1": {**eight["config_groups"]["group_0"], "format": "float-quantized"},
    }
    return by_turns({**four, "format": "mixed-precision", "config_groups": groups}, pack_four, pack_eight)


def two_widths() -> tuple[Any, Pack]:
    """compressed-tensors: down_proj of 8 bits, everything else of 4, in one format."""
    four, pack_four = settings_and_pack("pack-quantized", int_weights(4, "group", group=32))
    eight, pack_eight = settings_and_pack("pack-quantized", int_weights(8, "channel"))
    groups = {**four["config_groups"], "group_1": eight["config_groups"]["group_0"]}
    return by_turns({**four, "config_groups": groups}, pack_four, pack_eight)


def scattered(symmetric: bool) -> tuple[Any, Pack]:
    """compressed-tensors with ``actorder: group``, as older versions write it."""
    settings, _ = settings_and_pack("pack-quantized", int_weights(4, "group", group=32, symmetric=symmetric))
    settings["config_groups"]["group_0"]["weights"]["actorder"] = "group"

    def pack(weight: Tensor) -> tuple[Mapping[str, Tensor], Tensor]:
        n, k = weight.shape
        generator = torch.Generator().manual_seed(n)
        codes = torch.randint(0, 16, (n, k), generator=generator)
        zeros = torch.full((n, k // 32), 8) if symmetric else torch.randint(0, 16, (n, k // 32), generator=generator)
        scales = floats(weight, n, k // 32).half() / 16
        order = torch.randperm(k, generator=generator) // 32
        tensors = {
            "weight_packed": packed_words(codes, 4),
            "weight_scale": scales,
            "weight_shape": torch.tensor([n, k]),
            "weight_g_idx": order.int(),
        }
        if not symmetric:
            tensors["weight_zero_point"] = packed_words(zeros.t().contiguous(), 4).t()
        return tensors, (codes - zeros[:, order]).float() * scales.float()[:, order]

    return settings, pack


W4A8 = settings_and_pack("int-quantized", int_weights(4, "channel"), INT8)
CASES: dict[str, tuple[tuple[Any, Pack], GroupKind | None]] = {
    "compressed-tensors NVFP4": (small_floats("nvfp4-pack-quantized", 16), None),
    "compressed-tensors MXFP4": (small_floats("mxfp4-pack-quantized", 32), GroupKind(4, 32, e2m1=True)),
    "compressed-tensors MXFP8": (small_floats("mxfp8-quantized", 32), GroupKind(8, 32, e4m3=True)),
    "compressed-tensors W4A8": (W4A8, GroupKind(4, 128)),
    "compressed-tensors W4A8 in groups": (
        settings_and_pack("int-quantized", int_weights(4, "group", group=32, symmetric=False), INT8),
        GroupKind(4, 32, True),
    ),
    "compressed-tensors, two formats": (two_formats(), GroupKind(8, 128, e4m3=True)),
    "compressed-tensors, two widths": (two_widths(), GroupKind(8, 128)),
    "compressed-tensors, scattered groups": (scattered(True), None),
    "compressed-tensors, scattered groups, asymmetric": (scattered(False), None),
    "ModelOpt FP8": (modelopt_fp8(), GroupKind(8, 128, e4m3=True)),
    "ModelOpt NVFP4": (modelopt_nvfp4(), None),
    "ModelOpt NVFP4 AWQ": (modelopt_nvfp4("NVFP4_AWQ"), None),
    "ModelOpt, two formats": (
        by_turns({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, modelopt_nvfp4()[1], modelopt_fp8()[1]),
        GroupKind(8, 128, e4m3=True),
    ),
    "bitsandbytes nf4": (bitsandbytes_4bit(), None),
    "bitsandbytes nf4, nested": (bitsandbytes_4bit(nested=True), None),
    "bitsandbytes nf4 in blocks that cross rows": (bitsandbytes_4bit(block=96), None),
    "bitsandbytes int8": (bitsandbytes_8bit(), GroupKind(8, 128)),
    "AutoRound, GPTQ": (autoround("auto_round:auto_gptq"), GroupKind(4, 32)),
    "AutoRound, GPTQ, asymmetric": (autoround("auto_round:auto_gptq", False), GroupKind(4, 32, True)),
    "AutoRound, AWQ": (autoround("auto_round:auto_awq"), GroupKind(4, 32, True)),
    "GPTQ of 2 bits": (packers.gptq(2), GroupKind(4, 32)),
    "GPTQ of 3 bits": (packers.gptq(3, 64), GroupKind(4, 64)),
    "GPTQ of 3 bits, asymmetric": (packers.gptq(3, symmetric=False), GroupKind(4, 32, True)),
    "GPTQ of 3 bits in another order": (packers.gptq(3, symmetric=False, order="random"), None),
    "GPTQModel, two widths": (gptq_dynamic(), GroupKind(8, 64)),
}


def kind_of(model_dir: Path) -> GroupKind | None:
    model = load_model(model_dir, read_config(model_dir), "float32", weight_format=PLAIN)
    kind: GroupKind | None = model.get_submodule(DOWN).shape.kind
    return kind


@pytest.mark.parametrize("case", CASES)
def test_layouts_compute_what_their_dequantised_weights_compute(tmp_path: Path, case: str) -> None:
    made, kind = CASES[case]
    quantised, twin = model_pair(tmp_path, *made)
    check_layout(quantised, twin)
    assert kind_of(quantised) == kind


EXPERTS = {
    "compressed-tensors NVFP4": small_floats("nvfp4-pack-quantized", 16),
    "ModelOpt NVFP4": modelopt_nvfp4(),
    "FP8 with fixed scales": packers.static_fp8("weight_scale", "input_scale"),
    "GPTQ": packers.gptq(),
}


@pytest.mark.parametrize("case", EXPERTS)
def test_experts_are_quantised_one_by_one(tmp_path: Path, case: str) -> None:
    check_layout(*model_pair(tmp_path, *EXPERTS[case], family="qwen3_moe", moe_intermediate_size=64))


def test_a_checkpoint_whose_kv_cache_alone_is_quantised_has_plain_weights(tmp_path: Path) -> None:
    settings, _ = settings_and_pack("float-quantized", float_weights("tensor"))
    scheme = {"num_bits": 8, "type": "float", "dynamic": False, "symmetric": True}
    given = {**settings, "format": "dense", "config_groups": {}, "kv_cache_scheme": scheme}
    quantised, twin = model_pair(tmp_path, given, lambda weight: ({"weight": weight}, weight))
    scales = {f"model.layers.{i}.self_attn.k_scale": torch.tensor(0.1) for i in range(2)}
    rewrite(quantised, lambda tensors: tensors.update(scales))
    assert any("kv_cache_scheme is not followed" in note for note in check_layout(quantised, twin))


@pytest.mark.parametrize("case", CASES)
def test_rows_of_layouts_are_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """Pieces of 7 or 15 rows: their ends lie within words of several outputs, and within blocks that cross rows."""
    quantised, twin = model_pair(tmp_path, *CASES[case][0], num_hidden_layers=1)
    wanted = parameters(twin)
    monkeypatch.setattr(loader, "MOST_NUMBERS", 1000)
    found = parameters(quantised)
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


def test_older_settings_of_modelopt_have_a_file_of_their_own(tmp_path: Path) -> None:
    settings, pack = modelopt_nvfp4()
    quantised, twin = model_pair(tmp_path, settings, pack)
    config = json.loads((quantised / "config.json").read_text())
    del config["quantization_config"]
    (quantised / "config.json").write_text(json.dumps(config))
    given = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": ["lm_head"]}
    (quantised / "hf_quant_config.json").write_text(
        json.dumps({"producer": {"name": "modelopt"}, "quantization": given})
    )
    notes = check_layout(quantised, twin)
    assert any("kv_cache_quant_algo is not followed" in note for note in notes)


@pytest.mark.parametrize(("bits", "group", "kind"), [(4, 64, 4), (8, 32, 8), (3, 32, 4), (6, 64, 8)])
def test_mlx_keeps_its_integers(tmp_path: Path, bits: int, group: int, kind: int) -> None:
    """The embedding is quantised too, and the head of a tied model with it."""
    settings, pack = mlx(bits, group)
    quantised, twin = model_pair(tmp_path, settings, pack, endings=("_proj.weight", "embed_tokens.weight"))
    config = json.loads((quantised / "config.json").read_text())
    config["quantization"] = {**config.pop("quantization_config"), "model.layers.0.mlp.none": False}
    (quantised / "config.json").write_text(json.dumps(config))
    check_layout(quantised, twin)
    assert kind_of(quantised) == GroupKind(kind, group, True)


def test_layers_of_mlx_have_numbers_of_bits_of_their_own(tmp_path: Path) -> None:
    settings, four = mlx(4, 64)
    _, eight = mlx(8, 32)
    own = {f"model.layers.{i}.mlp.down_proj": {"bits": 8, "group_size": 32} for i in range(2)}
    quantised, twin = model_pair(tmp_path, *by_turns({**settings, **own}, four, eight))
    config = json.loads((quantised / "config.json").read_text())
    config["quantization"] = config["quantization_config"]  # MLX writes both
    (quantised / "config.json").write_text(json.dumps(config))
    check_layout(quantised, twin)


def test_a_layer_that_fits_two_formats_with_different_values_is_refused(tmp_path: Path) -> None:
    settings, pack = packers.gptq()
    quantised, _ = model_pair(tmp_path, {**settings, "dynamic": {".*": {"sym": False}}}, pack)
    with pytest.raises(ModelLoadError, match="fits several formats that the config names"):
        kind_of(quantised)
