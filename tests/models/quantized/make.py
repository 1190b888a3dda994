"""Tiny models with quantised layers. Each has a twin with the same weights, dequantised."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from chairlift.kernels.weights import PLAIN
from chairlift.models.loader import load_model
from chairlift.models.model_files import read_config
from tests.models.tiny import tiny_hf_model

__all__ = ["Pack", "model_pair", "mxfp4_pair", "packed_words", "parameters", "rewrite"]

Pack = Callable[[Tensor], tuple[Mapping[str, Tensor], Tensor]]
"""Function from a weight, float32 [out, in], to (tensors stored instead of ``weight``, dequantised weight)."""


def model_pair(
    tmp_path: Path,
    settings: Mapping[str, Any],
    pack: Pack,
    *,
    family: str = "llama",
    endings: tuple[str, ...] = ("_proj.weight",),
    **overrides: Any,
) -> tuple[Path, Path]:
    """Write a model whose weights with names that end with ``endings`` are quantised, and its twin in float32. Returns
    both directories."""
    twin = tiny_hf_model(tmp_path, family, **{"intermediate_size": 128, "num_hidden_layers": 2, **overrides})
    quantised = tmp_path / "quantised"
    shutil.copytree(twin, quantised)
    stored, worth = dict[str, Tensor](), dict[str, Tensor]()
    for name, weight in load_file(twin / "model.safetensors").items():
        if name.endswith(endings):
            tensors, worth[name] = pack(weight)
            layer = name.removesuffix(".weight")
            stored |= {f"{layer}.{ending}": each.contiguous() for ending, each in tensors.items()}
        else:
            stored[name] = worth[name] = weight
    save_file(worth, twin / "model.safetensors", metadata={"format": "pt"})
    save_file(stored, quantised / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((quantised / "config.json").read_text())
    (quantised / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    return quantised, twin


def mxfp4_pair(tmp_path: Path, **settings: Any) -> tuple[Path, Path]:
    """Write a gpt-oss model whose experts are random numbers of MXFP4, and its twin with the floats that transformers
    makes of them. Returns both directories."""
    generator = torch.Generator().manual_seed(0)
    floats = tiny_hf_model(tmp_path, "gpt_oss", **settings)
    codes = tmp_path / "codes"
    shutil.copytree(floats, codes)
    packed: dict[str, Tensor] = {}

    def quantize(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
            count, size, rows = tensors.pop(name).shape
            packed[f"{name}_blocks"] = torch.randint(
                0, 256, (count, rows, size // 32, 16), generator=generator, dtype=torch.uint8
            )
            packed[f"{name}_scales"] = torch.randint(
                122, 125, (count, rows, size // 32), generator=generator, dtype=torch.uint8
            )
        tensors.update(packed)

    def dequantize(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
            parts = packed[f"{name}_blocks"], packed[f"{name}_scales"]
            tensors[name] = convert_moe_packed_tensors(*parts, dtype=torch.bfloat16)

    rewrite(codes, quantize)
    rewrite(floats, dequantize)
    config = json.loads((codes / "config.json").read_text())
    ignored = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ignored}
    (codes / "config.json").write_text(json.dumps(config))
    return codes, floats


def rewrite(model_dir: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Read all tensors of a directory, apply ``change`` to them, and write them again."""
    path = model_dir / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file({name: each.contiguous() for name, each in tensors.items()}, path, metadata={"format": "pt"})


def packed_words(codes: Tensor, bits: int) -> Tensor:
    """Pack codes [rows, columns] into int32 words along the columns, lowest bits first: [rows, columns * bits / 32]."""
    stream = torch.stack([codes.long() >> place & 1 for place in range(bits)], -1).view(len(codes), -1, 32)
    words = sum(stream[:, :, place] << place for place in range(32))
    assert isinstance(words, Tensor)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def parameters(model_dir: Path) -> dict[str, Tensor]:
    """Every parameter of a directory's model in float32, with the names of plain layers."""
    model = load_model(model_dir, read_config(model_dir), "float32", weight_format=PLAIN)
    return dict(model.named_parameters())
