"""Names of the tensors in GGUF files, for the layers of any network.

llama.cpp names a weight by what it does, so one table is enough for all architectures. Where an architecture has
another name for a weight, or stores several in one tensor, the names in the file decide.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Final

from chairlift.models.formats.checkpoint import Naming
from chairlift.models.formats.gguf.reader import GGUFModel
from chairlift.models.formats.gguf_families import NEIGHBOURS, GGUFFamily
from chairlift.models.hf_config import NetworkConfig
from chairlift.models.mixers import DeltaNetConfig, StoredPart

__all__ = ["adapter_naming", "gguf_naming"]

_OUTER: Final = {
    "model.embed_tokens": ("token_embd",),
    "model.embed_positions": ("position_embd",),
    "model.norm": ("output_norm", "token_embd_norm"),
    "lm_head": ("output",),
}
"""Layer outside of decoder layers -> its names in files; the first that the file has counts."""
_LAYER: Final[dict[str, tuple[tuple[str, ...], ...]]] = {
    "input_layernorm": (("attn_norm_2",), ("attn_norm",)),  # two in Falcon 40B, the second one for attention
    "post_attention_layernorm": (("ffn_norm",), ("post_attention_norm",), ("attn_norm",)),
    "attention_out_norm": (("post_attention_norm",),),
    "mlp_out_norm": (("post_ffw_norm",),),
    "self_attn.qkv_proj": (("attn_qkv",), ("attn_q", "attn_k", "attn_v")),
    "self_attn.o_proj": (("attn_output",),),
    "self_attn.q_norm": (("attn_q_norm",),),
    "self_attn.k_norm": (("attn_k_norm",),),
    "mlp.gate_up_proj": (("ffn_gate", "ffn_up"), ("ffn_up",)),
    "mlp.up_proj": (("ffn_up",),),
    "mlp.down_proj": (("ffn_down",),),
    "mlp.gate": (("ffn_gate_inp",),),
    "mlp.experts.gate_up_proj": (("ffn_gate_up_exps.#",), ("ffn_gate_exps.#", "ffn_up_exps.#")),
    "mlp.experts.up_proj": (("ffn_up_exps.#",),),
    "mlp.experts.down_proj": (("ffn_down_exps.#",),),
    "mlp.shared_expert.gate_up_proj": (("ffn_gate_shexp", "ffn_up_shexp"), ("ffn_up_shexp",)),
    "mlp.shared_expert.up_proj": (("ffn_up_shexp",),),
    "mlp.shared_expert.down_proj": (("ffn_down_shexp",),),
    "mlp.shared_expert_gate": (("ffn_gate_inp_shexp",),),
    "mlp.latent_in": (("ffn_latent_down",),),
    "mlp.latent_out": (("ffn_latent_up",),),
    "mixer.conv": (("ssm_conv1d",), ("shortconv.conv",)),
    "mixer.in_proj": (("ssm_in",), ("shortconv.in_proj",), ("attn_qkv", "attn_gate")),
    "mixer.rates_proj": (("ssm_ba",), ("ssm_beta", "ssm_alpha")),
    "mixer.norm": (("ssm_norm",),),
    "mixer.out_proj": (("ssm_out",), ("shortconv.out_proj",)),
}
"""Layer within a decoder layer -> names of the tensors that fill it, in files; the first names that the file has
count."""
_RENAMED: Final = {
    "model.layers.*.mixer.A_log": "blk.*.ssm_a",
    "model.layers.*.mixer.D": "blk.*.ssm_d",
    "model.layers.*.mixer.dt_bias": "blk.*.ssm_dt.bias",
    "model.layers.*.mixer.conv": "blk.*.ssm_conv1d.weight",
    "model.layers.*.mixer.decay_log": "blk.*.ssm_a",
    "model.layers.*.mixer.step_bias": "blk.*.ssm_dt.bias",
    "model.layers.*.self_attn.sinks": "blk.*.attn_sinks.weight",
    "model.layers.*.mlp.gate.e_score_correction_bias": "blk.*.exp_probs_b.bias",
}


def gguf_naming(model: GGUFModel, config: NetworkConfig, family: GGUFFamily) -> Naming:
    """How the GGUF file ``model`` names and arranges the weights of the network ``config``."""

    def names(layer: str) -> tuple[str, ...]:
        inner = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", layer)
        if inner is None:
            known = _OUTER.get(layer, (layer,))
            return next(((name,) for name in known if f"{name}.weight" in model), known[:1])
        choices = _LAYER.get(inner[2], ((inner[2],),))
        first = (f"blk.{inner[1]}.{choice[0].removesuffix('.#')}" for choice in choices)
        held = (f"{name}.weight" in model or name in model for name in first)
        found = next((choice for choice, has in zip(choices, held, strict=True) if has), choices[0])
        return tuple(f"blk.*.{name}" for name in found)

    return _naming(names, config, model.metadata["general.architecture"])


def adapter_naming(
    shapes: Mapping[str, tuple[int, ...]], config: NetworkConfig, rows: Mapping[str, int], architecture: str
) -> Naming:
    """How a GGUF adapter of this ``general.architecture`` names the weights of the network ``config`` that it changes.

    ``shapes`` maps name of a weight, without its ending -> shape of its matrix B, with its rows in the last dimension
    but one. ``rows`` maps name of a layer -> number of rows of its weight, or of one expert's. An adapter may have only
    some of the tensors that fill a layer, so their rows tell whether a tensor is the whole layer.
    """

    def names(layer: str) -> tuple[str, ...]:
        inner = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", layer)
        if inner is None:
            return _OUTER.get(layer, (layer,))[:1]
        choices = _LAYER.get(inner[2], ((inner[2],),))
        fitting = []
        for choice in choices:
            held = [shapes.get(f"blk.{inner[1]}.{name.removesuffix('.#')}") for name in choice]
            found = [shape[-2] for shape in held if shape is not None and len(shape) > 1]
            if found and (found[0] == rows.get(layer)) == (len(choice) == 1):
                fitting.append(choice)
        return tuple(f"blk.*.{name}" for name in (fitting or choices)[0])

    return _naming(names, config, architecture)


def _naming(names: Callable[[str], tuple[str, ...]], config: NetworkConfig, architecture: str) -> Naming:
    def stored(layer: str) -> list[StoredPart]:
        inner = re.fullmatch(r"model\.layers\.(\d+)\.mixer\.(\w+)", layer)
        net = config.mixer(int(inner[1])) if inner else None
        if inner is None or not isinstance(net, DeltaNetConfig):
            return []
        if inner[2] == "in_proj":
            return [(net.channels, ()), (net.value_heads * net.value_dim, ())]
        return net.stored(inner[2])

    interleaved = architecture in NEIGHBOURS
    return Naming(names=names, renamed=_RENAMED, interleaved=interleaved, stored=stored)
