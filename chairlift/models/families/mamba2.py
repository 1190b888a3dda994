"""Mamba-2 (Dao and Gu, 2024): recurrent layers only, without attention and MLPs."""

from __future__ import annotations

import math
from typing import Any

from chairlift.models.family import Family, Fields
from chairlift.models.mixers import Mamba2Config

__all__ = ["MAMBA2", "Mamba2Keys", "read_mamba2", "read_time_limit"]

_OURS = "model.layers.*"
_THEIRS = "backbone.layers.*"
_MOST_TAPS = 64


class Mamba2Keys(dict[str, str]):
    """Names in the family's files of the keys ``heads``, ``head_dim``, ``state``, ``groups``, ``taps``, ``expand``,
    ``conv_bias``, ``bias``, and of ``activation`` if it is not ``hidden_act``."""


def read_mamba2(fields: Fields, keys: Mamba2Keys, *, inner: int | None = None, **how: Any) -> Mamba2Config:
    """Read the sizes of the Mamba-2 layers. ``inner`` is their inner width; None means ``expand`` times the hidden
    size. ``how`` are further fields of Mamba2Config. Raises :class:`~chairlift.errors.ModelLoadError` for sizes that do
    not fit together."""
    hidden = fields.integer("hidden_size", 1, 65_536)
    if inner is None:
        inner = int(fields.number(keys["expand"], 0.0, 64.0) * hidden)
    heads = fields.integer(keys["heads"], 1, 4_096)
    size = fields.get(keys["head_dim"])
    head_dim = inner // heads if size in (None, "auto") else fields.integer(keys["head_dim"], 1, 4_096)
    if heads * head_dim != inner:
        fields.fail(
            f"{keys['heads']} {heads} heads of {keys['head_dim']} {head_dim} must make the inner width {inner}, which"
            f" is {keys['expand']} times the hidden size"
        )
    groups = fields.integer(keys["groups"], 1, 4_096)
    if heads % groups or inner % groups:
        fields.fail(f"{keys['heads']} {heads} is not a multiple of {keys['groups']} {groups}")
    name = keys.get("activation", "hidden_act")
    activation = fields.get(name)
    if activation not in ("silu", "swish"):
        fields.fail(f"{name} of a Mamba-2 layer must be silu, got {activation!r:.80}")
    return Mamba2Config(
        heads=heads,
        head_dim=head_dim,
        state_size=fields.integer(keys["state"], 1, 4_096),
        groups=groups,
        taps=fields.integer(keys["taps"], 2, _MOST_TAPS),
        conv_bias=fields.boolean(keys["conv_bias"], True),
        bias=fields.boolean(keys["bias"], False),
        **{"norm_groups": groups, **how, "time_limit": how.get("time_limit") or read_time_limit(fields)},
    )


def read_time_limit(fields: Fields) -> tuple[float, float]:
    """(minimum, maximum) to which the time steps of Mamba-2 layers are limited."""
    given = fields.get("time_step_limit")
    if given is None:
        return 0.0, math.inf
    listed: list[Any] = [_INFINITY.get(str(each), each) for each in given] if isinstance(given, (list, tuple)) else []
    numbers = all(isinstance(each, (int, float)) and not isinstance(each, bool) for each in listed)
    if not numbers or len(listed) != 2 or not 0 <= listed[0] <= listed[1] or not math.isfinite(listed[0]):
        fields.fail(f"time_step_limit must be two numbers, a minimum of at least 0 and a maximum, got {given!r:.80}")
    return float(listed[0]), float(listed[1])


_INFINITY = dict.fromkeys((str({"__float__": "Infinity"}), "Infinity"), math.inf)
"""Texts that mean infinity in JSON files -> infinity."""


_KEYS = Mamba2Keys(
    heads="num_heads",
    head_dim="head_dim",
    state="state_size",
    groups="n_groups",
    taps="conv_kernel",
    expand="expand",
    conv_bias="use_conv_bias",
    bias="use_bias",
)


def _read(fields: Fields, layers: int) -> dict[str, Any]:
    mixer = read_mamba2(fields, _KEYS)
    return {
        "intermediate_size": mixer.inner,
        "layer_windows": (None,) * layers,
        "mixers": (mixer,) * layers,
        "mlp_layers": (False,) * layers,
    }


MAMBA2 = Family(
    model_type="mamba2",
    architecture="Mamba2ForCausalLM",
    models="Mamba-2, Codestral Mamba",
    differences="recurrent layers only, without K and V",
    read=_read,
    keys={"num_attention_heads": "num_heads", "num_key_value_heads": "num_heads", "rms_norm_eps": "layer_norm_epsilon"},
    defaults={
        "conv_kernel": 4,
        "eos_token_id": 2,
        "expand": 2,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "layer_norm_epsilon": 1e-5,
        "max_position_embeddings": 131_072,
        "n_groups": 8,
        "num_heads": 128,
        "num_hidden_layers": 64,
        "state_size": 128,
        "vocab_size": 32_768,
    },
    rotary=False,
    tensors={
        "model.embed_tokens": ("backbone.embeddings",),
        f"{_OURS}.input_layernorm": (f"{_THEIRS}.norm",),
        f"{_OURS}.mixer": (f"{_THEIRS}.mixer",),
        f"{_OURS}.mixer.in_proj": (f"{_THEIRS}.mixer.in_proj",),
        f"{_OURS}.mixer.conv": (f"{_THEIRS}.mixer.conv1d",),
        f"{_OURS}.mixer.norm": (f"{_THEIRS}.mixer.norm",),
        f"{_OURS}.mixer.out_proj": (f"{_THEIRS}.mixer.out_proj",),
        "model.norm": ("backbone.norm_f",),
    },
)
