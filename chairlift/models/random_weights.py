"""Models with random weights, for tests and benchmarks where only the shapes matter."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from chairlift.kernels.weights import PLAIN
from chairlift.models.causal_lm import CausalLM
from chairlift.models.formats.checkpoint import hf_state_dict
from chairlift.models.hf_config import NetworkConfig, parse_config
from chairlift.models.loader import resolve_dtype

__all__ = ["random_model", "write_random_model"]


def random_model(
    config: NetworkConfig, dtype: str | torch.dtype = "auto", *, seed: int = 0, std: float = 0.02
) -> CausalLM:
    """A CPU model with random weights, ready for inference. Matrices have the standard deviation ``std``; the weights
    of norms are near 1.

    The same ``seed`` gives the same weights in every dtype, up to rounding.
    """
    torch_dtype = resolve_dtype(config, dtype)
    with torch.device("meta"):
        model = CausalLM(config)
    model.lay_out(PLAIN, torch_dtype, torch.device("cpu"))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator) * std
            parameter.copy_(values + 1 if name.endswith("norm.weight") else values)
    return model.eval().requires_grad_(False)


def write_random_model(
    model_dir: Path, config: Mapping[str, Any], *, dtype: str = "auto", seed: int = 0, std: float = 0.02
) -> Path:
    """Write ``config.json`` and ``model.safetensors`` with random weights. Returns ``model_dir``, which is created if
    needed.

    ``config`` is the content of a Hugging Face ``config.json``. The directory has no tokenizer.
    """
    model = random_model(parse_config(config), dtype, seed=seed, std=std)
    model_dir.mkdir(parents=True, exist_ok=True)
    save_file(hf_state_dict(model), model_dir / "model.safetensors", metadata={"format": "pt"})
    (model_dir / "config.json").write_text(json.dumps(dict(config), indent=2) + "\n")
    return model_dir
