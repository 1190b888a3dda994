"""Keys of ``config.json`` for GGUF files of models with recurrent layers. The module does not import torch.

The tensors in a file say which of its layers are recurrent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from chairlift.models.formats.gguf_metadata import GGUFMetadata

__all__ = [
    "read_delta_net",
    "read_falcon_h1",
    "read_granite_hybrid",
    "read_lfm2",
    "read_mamba2",
    "read_nemotron_h",
]

_Raw = Mapping[str, Any]
_PARTS: Final = {"ssm_in": "M", "attn_q": "*", "ffn_gate_inp": "E", "ffn_up": "-"}
"""Tensor of a layer of Nemotron-H -> letter of the layer in ``hybrid_override_pattern``."""


def _with(metadata: GGUFMetadata, tensor: str) -> list[bool]:
    """Per layer, whether it has the tensor ``tensor``."""
    return [metadata.has(f"blk.{layer}.{tensor}.weight") for layer in range(metadata.layers())]


def _first(metadata: GGUFMetadata, tensor: str) -> str:
    """Name of the tensor ``tensor`` in the first layer that has it, or in layer 0."""
    found = _with(metadata, tensor)
    return f"blk.{found.index(True) if True in found else 0}.{tensor}"


def _mamba(metadata: GGUFMetadata) -> dict[str, Any]:
    """Sizes of Mamba-2 layers, by the names that most families have after their prefix."""
    heads = metadata.need("ssm.time_step_rank")
    inner = metadata.need("ssm.inner_size")
    if heads < 1 or inner % heads:
        metadata.fail("ssm.time_step_rank", f"is {heads} heads for an inner width of {inner}")
    return {
        "d_conv": metadata.need("ssm.conv_kernel"),
        "d_head": inner // heads,
        "d_state": metadata.need("ssm.state_size"),
        "n_groups": metadata.number("ssm.group_count", 1),
        "n_heads": heads,
        "conv_bias": metadata.has(f"{_first(metadata, 'ssm_conv1d')}.bias"),
        "proj_bias": metadata.has(f"{_first(metadata, 'ssm_in')}.bias"),
    }


def read_mamba2(metadata: GGUFMetadata, raw: _Raw) -> dict[str, Any]:
    """Keys of Mamba-2, which has no attention."""
    sizes = _mamba(metadata)
    return {
        "conv_kernel": sizes["d_conv"],
        "expand": metadata.need("ssm.inner_size") / raw["hidden_size"],
        "head_dim": sizes["d_head"],
        "n_groups": sizes["n_groups"],
        "num_heads": sizes["n_heads"],
        "state_size": sizes["d_state"],
        "use_bias": sizes["proj_bias"],
        "use_conv_bias": sizes["conv_bias"],
    }


def read_granite_hybrid(metadata: GGUFMetadata, raw: _Raw) -> dict[str, Any]:
    """Keys of Granite 4. Its layers rotate if ``rope.scaling.finetuned`` says so, which is the default."""
    mixed = _with(metadata, "ssm_in")
    found = metadata.granite_factors(raw)
    if any(mixed):
        found |= {f"mamba_{name}": value for name, value in _mamba(metadata).items()}
        found["mamba_expand"] = metadata.need("ssm.inner_size") / raw["hidden_size"]
    else:  # the sizes have no effect, but they must fit together
        found |= {"mamba_expand": 1, "mamba_n_heads": raw["num_attention_heads"]}
        found["mamba_d_head"] = raw["hidden_size"] // raw["num_attention_heads"]
    experts = metadata.number("expert_count", 0)
    if experts:
        found |= {"num_local_experts": experts, "num_experts_per_tok": metadata.need("expert_used_count")}
        width = metadata.need("expert_shared_feed_forward_length")
    else:
        found["num_local_experts"] = 0
        width = metadata.shape("blk.0.ffn_up.weight")[0]
    return found | {
        "attention_bias": metadata.has(f"{_first(metadata, 'attn_q')}.bias"),
        "layer_types": ["mamba" if each else "attention" for each in mixed],
        "position_embedding_type": "rope" if metadata.flag("rope.scaling.finetuned", True) else "nope",
        "shared_intermediate_size": width,
    }


def read_nemotron_h(metadata: GGUFMetadata, raw: _Raw) -> dict[str, Any]:
    """Keys of Nemotron-H, whose layers have one part each."""
    sizes = _mamba(metadata)
    pattern = ""
    for layer in range(metadata.layers()):
        part = next((part for part in _PARTS if metadata.has(f"blk.{layer}.{part}.weight")), None)
        pattern += _PARTS.get(part or "", "?")
    found: dict[str, Any] = {
        "conv_kernel": sizes["d_conv"],
        "expand": metadata.need("ssm.inner_size") / raw["hidden_size"],
        "hybrid_override_pattern": pattern,
        "mamba_head_dim": sizes["d_head"],
        "mamba_num_heads": sizes["n_heads"],
        "mlp_bias": metadata.has(f"{_first(metadata, 'ffn_up')}.bias"),
        "n_groups": sizes["n_groups"],
        "ssm_state_size": sizes["d_state"],
        "use_bias": sizes["proj_bias"],
        "use_conv_bias": sizes["conv_bias"],
    }
    if "-" in pattern:
        found["intermediate_size"] = metadata.shape(f"{_first(metadata, 'ffn_up')}.weight")[0]
    if "E" in pattern:
        found |= {
            "moe_intermediate_size": metadata.need("expert_feed_forward_length"),
            "moe_latent_size": metadata.number("moe_latent_size", 0) or None,
            "moe_shared_expert_intermediate_size": metadata.need("expert_shared_feed_forward_length"),
            "n_group": metadata.number("expert_group_count", 1),
            "n_routed_experts": metadata.need("expert_count"),
            "norm_topk_prob": metadata.flag("expert_weights_norm", False),
            "num_experts_per_tok": metadata.need("expert_used_count"),
            "routed_scaling_factor": metadata.number("expert_weights_scale", 1.0) or 1.0,
            "topk_group": metadata.number("expert_group_used_count", 1),
        }
    return found


def read_falcon_h1(metadata: GGUFMetadata, raw: _Raw) -> dict[str, Any]:
    """Keys of Falcon-H1. All its factors are 1, because llama.cpp's converter multiplies the weights by them."""
    found = {f"mamba_{name}": value for name, value in _mamba(metadata).items()}
    return found | {
        "attention_bias": metadata.has("blk.0.attn_q.bias"),
        "mamba_d_ssm": metadata.need("ssm.inner_size"),
        "mamba_norm_before_gate": False,
        "mamba_rms_norm": metadata.has("blk.0.ssm_norm.weight"),
        "mlp_bias": metadata.has("blk.0.ffn_gate.bias"),
        "projectors_bias": metadata.has("blk.0.ssm_out.bias"),
    }


def read_lfm2(metadata: GGUFMetadata, raw: _Raw) -> dict[str, Any]:
    """Keys of LFM2, in which most layers are short convolutions."""
    conv = _with(metadata, "shortconv.in_proj")
    return {
        "block_auto_adjust_ff_dim": False,
        "conv_L_cache": metadata.need("shortconv.l_cache"),
        "conv_bias": metadata.has(f"{_first(metadata, 'shortconv.in_proj')}.bias"),
        "layer_types": ["conv" if each else "full_attention" for each in conv],
    }


def read_delta_net(metadata: GGUFMetadata, raw: _Raw) -> dict[str, Any]:
    """Keys of delta nets (Qwen3-Next, Qwen3.5)."""
    heads = metadata.need("ssm.time_step_rank")
    inner = metadata.need("ssm.inner_size")
    if heads < 1 or inner % heads:
        metadata.fail("ssm.time_step_rank", f"is {heads} heads for an inner width of {inner}")
    nets = _with(metadata, "ssm_conv1d")
    return {
        "layer_types": ["linear_attention" if each else "full_attention" for each in nets],
        "linear_conv_kernel_dim": metadata.need("ssm.conv_kernel"),
        "linear_key_head_dim": metadata.need("ssm.state_size"),
        "linear_num_key_heads": metadata.need("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_value_head_dim": inner // heads,
    }
