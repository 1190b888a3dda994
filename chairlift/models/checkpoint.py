"""How our parameters relate to the tensor names in a Hugging Face checkpoint.

Names agree except where we fuse products: q, k and v are the rows of ``qkv_proj``, gate and up those of
``gate_up_proj``. :func:`checkpoint_layout` is the one place that knows, for loading and for saving.
"""

from __future__ import annotations

import dataclasses

from torch import Tensor

from chairlift.errors import ConfigError
from chairlift.kernels.weights import PLAIN
from chairlift.models.causal_lm import CausalLM
from chairlift.models.layers.linear import Matrix

__all__ = ["CheckpointPart", "checkpoint_layout", "hf_state_dict"]


@dataclasses.dataclass(frozen=True, slots=True)
class CheckpointPart:
    """One tensor of a Hugging Face checkpoint and the rows of our parameter it fills."""

    name: str
    """The tensor's name in the checkpoint."""
    parameter: str
    """Our parameter's name, as in ``model.named_parameters()``."""
    start: int
    """First row it fills."""
    shape: tuple[int, ...]
    """Its shape; ``shape[0]`` rows are filled."""


def checkpoint_layout(model: CausalLM) -> list[CheckpointPart]:
    """Every checkpoint tensor the model consists of, in the order of ``model.named_parameters()``.

    A tied output head is no tensor of its own. The model may live on the meta device.
    """
    config = model.config
    width, kv_width = (heads * config.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads))
    fused = {
        "qkv_proj": (("q_proj", width), ("k_proj", kv_width), ("v_proj", kv_width)),
        "gate_up_proj": (("gate_proj", config.intermediate_size), ("up_proj", config.intermediate_size)),
    }
    parts: list[CheckpointPart] = []
    for parameter, tensor in model.named_parameters():
        layer_name = parameter.split(".")[-2]
        start = 0
        for part_name, rows in fused.get(layer_name, ((layer_name, tensor.shape[0]),)):
            name = parameter.replace(f".{layer_name}.", f".{part_name}.")
            parts.append(CheckpointPart(name, parameter, start, (rows, *tensor.shape[1:])))
            start += rows
    return parts


def hf_state_dict(model: CausalLM) -> dict[str, Tensor]:
    """The model's weights under Hugging Face's names, detached and contiguous, ready for ``safetensors``.

    Raises :class:`~chairlift.errors.ConfigError` for a model in a format for serving, whose plain weights are gone.
    """
    if any(isinstance(module, Matrix) and module.format != PLAIN for module in model.modules()):
        raise ConfigError(
            "the model's weights were packed for serving and cannot be saved; load it with weight_format=PLAIN"
        )
    parameters = dict(model.named_parameters())
    tensors: dict[str, Tensor] = {}
    for part in checkpoint_layout(model):
        whole = parameters[part.parameter].detach()
        tensors[part.name] = whole[part.start : part.start + part.shape[0]].contiguous()
    return tensors
