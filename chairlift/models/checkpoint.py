"""How our parameters relate to the tensor names in a Hugging Face checkpoint.

A model's :class:`~chairlift.models.family.Family` says where names differ, and which products are stored in pieces:
q, k and v are the rows of ``qkv_proj``, gate and up those of ``gate_up_proj``.
"""

from __future__ import annotations

import dataclasses
import re

from torch import Tensor

from chairlift.errors import ConfigError
from chairlift.kernels.weights import PLAIN
from chairlift.models.causal_lm import CausalLM
from chairlift.models.layers.linear import Matrix
from chairlift.models.registry import FAMILIES

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
    """The shape of what it fills; ``shape[0]`` rows."""
    transposed: bool = False
    """Whether the checkpoint holds the transpose of that."""


def checkpoint_layout(model: CausalLM) -> list[CheckpointPart]:
    """Every checkpoint tensor the model consists of, in the order of ``model.named_parameters()``.

    A tied output head is no tensor of its own. The model may live on the meta device.
    """
    config, family = model.config, FAMILIES[model.config.model_type]
    width, kv_width = (heads * config.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads))
    rows = {"qkv_proj": (width, kv_width, kv_width), "gate_up_proj": (config.intermediate_size,) * 2}
    parts: list[CheckpointPart] = []
    for parameter, tensor in model.named_parameters():
        layer, _, attribute = parameter.rpartition(".")
        kind, last = re.sub(r"\.\d+\.", ".*.", layer), layer.rpartition(".")[2]
        number = re.search(r"\d+", layer)
        names = family.tensors.get(kind, (kind,))
        transposed = tensor.dim() == 2 and last in family.transposed
        start = 0
        for name, count in zip(names, rows[last] if len(names) > 1 else (tensor.shape[0],), strict=True):
            whole = f"{name.replace('*', number.group() if number else '')}.{attribute}"
            parts.append(CheckpointPart(whole, parameter, start, (count, *tensor.shape[1:]), transposed))
            start += count
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
        rows = whole[part.start : part.start + part.shape[0]]
        tensors[part.name] = (rows.t() if part.transposed else rows).contiguous()
    return tensors
