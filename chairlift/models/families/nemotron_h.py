"""Nemotron-H (NVIDIA, 2025): each layer has one part only: Mamba-2, attention without rotation, an MLP without a
gate, or experts without gates."""

from __future__ import annotations

import math
from typing import Any

from chairlift.models.families.mamba2 import Mamba2Keys, read_mamba2, read_time_limit
from chairlift.models.family import ExpertLayers, Family, Fields, read_experts

__all__ = ["NEMOTRON_H"]

_OURS = "model.layers.*"
_THEIRS = "backbone.layers.*"
_LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
"""Letter of ``hybrid_override_pattern`` in ``config.json`` -> type of layer."""
_KINDS = {**{name: name for name in _LETTERS.values()}, "mamba": "linear_attention", "attention": "full_attention"}
"""Name in ``layers_block_type`` of ``config.json`` -> type of layer."""
_PRODUCTS = ("up_proj", "down_proj")
_DEFAULT = ["linear_attention", "moe", "full_attention", "mlp"]

_MAMBA = Mamba2Keys(
    heads="mamba_num_heads",
    head_dim="mamba_head_dim",
    state="ssm_state_size",
    groups="n_groups",
    taps="conv_kernel",
    expand="expand",
    conv_bias="use_conv_bias",
    bias="use_bias",
    activation="mamba_hidden_act",
)


def _read(fields: Fields, layers: int) -> dict[str, Any]:
    kinds = _kinds(fields)
    given = fields.raw.get("num_hidden_layers")
    if given is not None and layers != len(kinds):
        fields.fail(f"num_hidden_layers is {layers}, but the list or pattern of layers has {len(kinds)}")
    if fields.boolean("attention_bias", False):
        fields.fail("attention_bias is true, but transformers' NemotronHForCausalLM has no biases in attention")
    layers = len(kinds)
    inner = fields.integer(_MAMBA["heads"], 1, 4_096) * fields.integer(_MAMBA["head_dim"], 1, 4_096)
    mixer = read_mamba2(fields, _MAMBA, inner=inner, time_limit=_time_limit(fields))
    head_dim = fields.integer("head_dim", 1, 1_024)
    experts = {"experts": _read_experts(fields, kinds)} if "moe" in kinds else {}
    return {
        **experts,
        "attention_layers": tuple(kind == "full_attention" for kind in kinds),
        "layer_scales": (head_dim**-0.5,) * layers,
        "layer_windows": (None,) * layers,
        "mixers": tuple(mixer if kind == "linear_attention" else None for kind in kinds),
        "mlp_bias": fields.boolean("mlp_bias", False),
        "mlp_layers": tuple(kind in ("mlp", "moe") for kind in kinds),
        "num_hidden_layers": layers,
    }


def _time_limit(fields: Fields) -> tuple[float, float]:
    """(minimum, maximum) of time steps. transformers ignores ``time_step_limit``, and raises the steps of a text to
    ``time_step_min``."""
    low, high = read_time_limit(fields)
    if (low, high) != (0.0, math.inf):
        fields.fail(f"time_step_limit {[low, high]} is not supported for this family, whose class ignores it")
    key = "time_step_min" if fields.get("mamba_dt_min") is None else "mamba_dt_min"
    return fields.number(key, 0.0, 1e6), math.inf


def _read_experts(fields: Fields, kinds: list[str]) -> ExpertLayers:
    latent = fields.optional_integer("moe_latent_size", 1, 65_536)
    return read_experts(
        fields,
        tuple(kind == "moe" for kind in kinds),
        fields.integer("moe_intermediate_size", 1, 2**20),
        count_keys=("n_routed_experts", "num_local_experts"),
        # All shared experts together form one MLP, so this size is the sum of their sizes.
        shared_size=fields.integer("moe_shared_expert_intermediate_size", 1, 2**20),
        correction=True,
        latent_size=latent or 0,
        scoring="sigmoid",
        normalise=fields.boolean("norm_topk_prob", True),
        epsilon=1e-20,
        scale=fields.number("routed_scaling_factor", 0.0, 1e6),
        groups=fields.integer("n_group", 1, 4_096),
        kept_groups=fields.integer("topk_group", 1, 4_096),
    )


def _kinds(fields: Fields) -> list[str]:
    """One entry per layer: the type of the layer, such as ``moe``."""
    listed = fields.get("layers_block_type")
    pattern = fields.get("hybrid_override_pattern")
    listed = fields.get("layer_types") if listed is None else listed
    if listed is None and pattern is None:
        return _DEFAULT
    names: Any = [*map(str, listed)] if isinstance(listed, list) else listed
    if listed is None and isinstance(pattern, str):
        names = [_LETTERS.get(letter, letter) for letter in pattern]
    if not isinstance(names, list) or not names or not _KINDS.keys() >= set(names) or len(names) > 1_024:
        fields.fail(
            f"layers_block_type must list {', '.join(_LETTERS.values())}, or hybrid_override_pattern have their letters"
            f" {' '.join(_LETTERS)}, up to 1024 layers, got {listed if pattern is None else pattern!r:.160}"
        )
    return [_KINDS[name] for name in names]


NEMOTRON_H = Family(
    model_type="nemotron_h",
    architecture="NemotronHForCausalLM",
    models="Nemotron-H, Nemotron Nano 2, Nemotron 3",
    differences="layers of one part: Mamba-2, attention without rotation, an MLP or experts; no gates, squared ReLU",
    read=_read,
    keys={"hidden_act": "mlp_hidden_act", "rms_norm_eps": "layer_norm_epsilon"},
    defaults={
        "conv_kernel": 4,
        "time_step_min": 0.001,
        "eos_token_id": 2,
        "expand": 2,
        "head_dim": 128,
        "hidden_size": 4096,
        "intermediate_size": 21504,
        "layer_norm_epsilon": 1e-5,
        "mamba_head_dim": 64,
        "mamba_hidden_act": "silu",
        "mamba_num_heads": 128,
        "max_position_embeddings": 4096,
        "mlp_hidden_act": "relu2",
        "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
        "n_group": 1,
        "n_groups": 8,
        "n_routed_experts": 8,
        "num_attention_heads": 32,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 4,
        "num_key_value_heads": 8,
        "routed_scaling_factor": 1.0,
        "ssm_state_size": 128,
        "topk_group": 1,
        "vocab_size": 131_072,
    },
    activations={"relu2": "relu2"},
    # Files have numbers under these keys even if no layer has experts.
    own_keys=("n_routed_experts", "num_experts_per_tok", "num_local_experts"),
    known_code=("modeling_nemotron_h.NemotronHForCausalLM",),
    rotary=False,
    tensors={
        "model.embed_tokens": ("backbone.embeddings",),
        **{f"{_OURS}.{norm}": (f"{_THEIRS}.norm",) for norm in ("input_layernorm", "post_attention_layernorm")},
        f"{_OURS}.mixer": (f"{_THEIRS}.mixer",),
        f"{_OURS}.mixer.conv": (f"{_THEIRS}.mixer.conv1d",),
        **{f"{_OURS}.mixer.{name}": (f"{_THEIRS}.mixer.{name}",) for name in ("in_proj", "norm", "out_proj")},
        f"{_OURS}.self_attn.qkv_proj": tuple(f"{_THEIRS}.mixer.{name}_proj" for name in "qkv"),
        f"{_OURS}.self_attn.o_proj": (f"{_THEIRS}.mixer.o_proj",),
        **{f"{_OURS}.mlp.{name}": (f"{_THEIRS}.mixer.{name}",) for name in (*_PRODUCTS, "gate")},
        **{f"{_OURS}.mlp.shared_expert.{name}": (f"{_THEIRS}.mixer.shared_experts.{name}",) for name in _PRODUCTS},
        **{f"{_OURS}.mlp.experts.{name}": (f"{_THEIRS}.mixer.experts.#.{name}",) for name in _PRODUCTS},
        f"{_OURS}.mlp.latent_in": (f"{_THEIRS}.mixer.fc1_latent_proj",),
        f"{_OURS}.mlp.latent_out": (f"{_THEIRS}.mixer.fc2_latent_proj",),
        "model.norm": ("backbone.norm_f",),
    },
    module_prefix=("backbone.", "model."),
    ignored_tensors=r"rotary_emb\.inv_freq|^mtp\.",
)
