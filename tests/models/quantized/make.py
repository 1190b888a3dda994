"""Tiny models with quantised layers, each with a twin that has the same numbers dequantised."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from chairlift.kernels.weights import PLAIN
from chairlift.models.loader import load_model
from chairlift.models.model_files import read_config
from tests.models.tiny import tiny_hf_model

__all__ = ["Pack", "model_pair", "packed_words", "parameters", "rewrite"]

Pack = Callable[[Tensor], tuple[Mapping[str, Tensor], Tensor]]
"""Weight float32 [out, in] -> (tensors stored instead of ``weight``, dequantised weight)."""


def model_pair(
    tmp_path: Path, settings: Mapping[str, Any], pack: Pack, *, family: str = "llama", **overrides: Any
) -> tuple[Path, Path]:
    """Directories of a model with quantised projections, and of its twin in float32."""
    twin = tiny_hf_model(tmp_path, family, **{"intermediate_size": 128, "num_hidden_layers": 2, **overrides})
    quantised = tmp_path / "quantised"
    shutil.copytree(twin, quantised)
    stored, worth = dict[str, Tensor](), dict[str, Tensor]()
    for name, weight in load_file(twin / "model.safetensors").items():
        if name.endswith("_proj.weight"):
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


def rewrite(model_dir: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Change the tensors of a directory."""
    path = model_dir / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def packed_words(codes: Tensor, bits: int) -> Tensor:
    """Codes [rows, columns] in int32 words along the columns, lowest first: [rows, columns * bits / 32]."""
    per_word = 32 // bits
    wide = codes.long().view(len(codes), -1, per_word)
    words = sum(wide[:, :, i] << (bits * i) for i in range(per_word))
    assert isinstance(words, Tensor)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def parameters(model_dir: Path) -> dict[str, Tensor]:
    """Every parameter in float32, as plain layers hold it."""
    model = load_model(model_dir, read_config(model_dir), "float32", weight_format=PLAIN)
    return dict(model.named_parameters())
