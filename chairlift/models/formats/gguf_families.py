"""Properties of GGUF files by architecture: values that the metadata does not contain, and those with other names.

Values that llama.cpp keeps in its code instead of in the file come from its ``src/models``. The module does not import
torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Final

from chairlift.models.formats.gguf_metadata import GGUFMetadata
from chairlift.models.formats.gguf_recurrent import (
    read_delta_net,
    read_falcon_h1,
    read_granite_hybrid,
    read_lfm2,
    read_mamba2,
    read_nemotron_h,
)

__all__ = ["EXPERT_ARCHITECTURES", "GGUF_FAMILIES", "NEIGHBOURS", "ROPE_FACTORS", "GGUFFamily"]

ROPE_FACTORS: Final = {"long_factor": "rope_factors_long.weight", "short_factor": "rope_factors_short.weight"}
"""LongRoPE's keys -> the tensors that hold their values: the divisor of each rotary frequency, for long and for short
texts (Phi-3)."""
NEIGHBOURS: Final = frozenset(
    [
        *("arcee", "chatglm", "cohere2", "command-r", "ernie4_5", "glm4", "granite", "granitehybrid", "granitemoe"),
        *("llama", "mistral3", "smollm3"),
    ]
)
"""Architectures whose files store the two rows of q or k that are rotated together as neighbours. In all other files
they are in the two halves of a head."""
EXPERT_ARCHITECTURES: Final = frozenset(
    [
        *("bailingmoe2", "glm4moe", "gpt-oss", "granitehybrid", "granitemoe", "lfm2moe", "llama", "nemotron_h"),
        *("nemotron_h_moe", "olmoe", "qwen2moe", "qwen35moe", "qwen3moe", "qwen3next", "qwen3vlmoe"),
    ]
)
"""Architectures whose files may have experts."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GGUFFamily:
    """How GGUF files with one value of ``general.architecture`` are read."""

    model_type: str
    read: Callable[[GGUFMetadata, Mapping[str, Any]], Mapping[str, Any]] = lambda metadata, raw: {}
    """Function from (metadata, keys of ``config.json`` found so far) to the additional keys that only this architecture
    has."""
    norm_offset: float = 0.0
    """Number that llama.cpp added to the weights of norms when it wrote the file."""
    windows: bool = False
    """Whether the reader knows to which layers the file's ``sliding_window`` applies. If not, a file with this key is
    refused."""
    long_rope: bool = False
    """Whether the file's LongRoPE divisors are read, from the tensors in :data:`ROPE_FACTORS`."""
    gating: int = 1
    """Value of ``expert_gating_func`` that the family computes: 1 is a softmax over all experts, 2 a sigmoid, 3 a
    softmax over the chosen ones."""
    tiled_heads: bool = False
    """Whether the file repeats the value heads of delta nets in llama.cpp's order."""
    also: tuple[str, ...] = ()
    """Further values of ``model_type`` whose weights llama.cpp's converter writes under this architecture, in the same
    order of rows."""
    plain_weights: bool = True
    """Whether the converter only renames and reorders the weights of linear layers. If not, an adapter for the weights
    of the file is not one for the original weights."""


def _biased(metadata: GGUFMetadata) -> dict[str, Any]:
    return {"attention_bias": metadata.has("blk.0.attn_q.bias") or metadata.has("blk.0.attn_qkv.bias")}


def _llama(metadata: GGUFMetadata, raw: Mapping[str, Any]) -> dict[str, Any]:
    window = metadata.number("attention.sliding_window", 0)
    found: dict[str, Any] = {**_biased(metadata), "mlp_bias": metadata.has("blk.0.ffn_gate.bias")}
    if metadata.number("expert_count", 0):
        return _experts(metadata) | {"model_type": "mixtral", "sliding_window": window or None}
    return found | ({"model_type": "mistral", "sliding_window": window} if window else {})


def _experts(metadata: GGUFMetadata) -> dict[str, Any]:
    """Keys of experts. Their inner width has a key of its own, except in old files."""
    size = metadata.number("expert_feed_forward_length", metadata.number("feed_forward_length"))
    return {
        "num_local_experts": metadata.need("expert_count"),
        "num_experts_per_tok": metadata.need("expert_used_count"),
        "intermediate_size": size,
        "moe_intermediate_size": size,
    }


def _dense_layers(metadata: GGUFMetadata, raw: Mapping[str, Any]) -> list[int]:
    """Numbers of the layers that have one MLP in place of experts."""
    return [layer for layer in range(metadata.layers()) if not metadata.has(f"blk.{layer}.ffn_gate_inp.weight")]


def _qwen_moe(*, normalised: bool, shared: bool) -> Callable[[GGUFMetadata, Mapping[str, Any]], dict[str, Any]]:
    def read(metadata: GGUFMetadata, raw: Mapping[str, Any]) -> dict[str, Any]:
        found = _biased(metadata) | _experts(metadata)
        found |= {"norm_topk_prob": normalised, "mlp_only_layers": _dense_layers(metadata, raw)}
        found["intermediate_size"] = metadata.number("feed_forward_length", found["moe_intermediate_size"])
        if shared:
            size = metadata.number("expert_shared_feed_forward_length")
            size = size or metadata.shape("blk.0.ffn_up_shexp.weight")[0]
            found["shared_expert_intermediate_size"] = size
        return found

    return read


def _qwen3_next(metadata: GGUFMetadata, raw: Mapping[str, Any]) -> dict[str, Any]:
    found = _qwen_moe(normalised=True, shared=True)(metadata, raw)
    return found | read_delta_net(metadata, raw)


def _qwen3_5(metadata: GGUFMetadata, raw: Mapping[str, Any]) -> dict[str, Any]:
    return _biased(metadata) | read_delta_net(metadata, raw)


def _glm4_moe(metadata: GGUFMetadata, raw: Mapping[str, Any]) -> dict[str, Any]:
    found = _experts(metadata) | _biased(metadata)
    return found | {
        "intermediate_size": metadata.need("feed_forward_length"),
        "first_k_dense_replace": metadata.number("leading_dense_block_count", 0),
        "n_shared_experts": metadata.need("expert_shared_count"),
        "n_group": metadata.number("expert_group_count", 1),
        "topk_group": metadata.number("expert_group_used_count", 1),
        "norm_topk_prob": metadata.flag("expert_weights_norm", False),
        "routed_scaling_factor": metadata.number("expert_weights_scale", 1.0) or 1.0,
        "use_qk_norm": metadata.has("blk.0.attn_q_norm.weight"),
    }


def _corrected(metadata: GGUFMetadata) -> bool:
    """Whether experts are chosen with a correction of their scores."""
    return any(metadata.has(f"blk.{layer}.exp_probs_b.bias") for layer in range(metadata.layers()))


def _bailing_moe(metadata: GGUFMetadata, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of Ling 2. Files of the first Ling have another architecture."""
    found = _experts(metadata)
    count = found.pop("num_local_experts")
    return found | {
        "first_k_dense_replace": metadata.number("leading_dense_block_count", 0),
        "intermediate_size": metadata.number("feed_forward_length", 0) or None,
        "moe_router_enable_expert_bias": _corrected(metadata),
        "n_group": metadata.number("expert_group_count", 1),
        "num_experts": count,
        "num_shared_experts": metadata.number("expert_shared_count", 0),
        "routed_scaling_factor": metadata.number("expert_weights_scale", 1.0) or 1.0,
        "score_function": "sigmoid",
        "topk_group": metadata.number("expert_group_used_count", 1),
        "use_bias": metadata.has("blk.0.attn_output.bias"),
        "use_qk_norm": metadata.has("blk.0.attn_q_norm.weight"),
        "use_qkv_bias": metadata.has("blk.0.attn_qkv.bias"),
    }


def _lfm2_moe(metadata: GGUFMetadata, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of LFM2 with experts, whose weights llama.cpp always makes sum to one."""
    found = {key: value for key, value in read_lfm2(metadata, raw).items() if key != "block_auto_adjust_ff_dim"}
    found |= _experts(metadata) | {"intermediate_size": metadata.need("feed_forward_length")}
    return found | {
        "norm_topk_prob": True,
        "num_dense_layers": metadata.number("leading_dense_block_count", 0),
        "routed_scaling_factor": metadata.number("expert_weights_scale", 1.0) or 1.0,
        "use_expert_bias": _corrected(metadata),
    }


def _gpt_oss(metadata: GGUFMetadata, raw: Mapping[str, Any]) -> dict[str, Any]:
    found = _experts(metadata) | _biased(metadata)
    found |= {
        "layer_types": metadata.windowed(raw["num_hidden_layers"], 2),
        "sliding_window": metadata.need("attention.sliding_window"),
    }
    if "rope_scaling" in raw:
        found["rope_scaling"] = {**raw["rope_scaling"], "truncate": False}
    return found


def _scored(raw: Mapping[str, Any], largest: int) -> dict[str, Any]:
    """Key with the divisor of the attention scores, which the file does not contain.

    The divisor is the head width, except in the 27B models, which have ``largest`` layers: there it is the hidden size
    divided by the number of heads.
    """
    by_hidden = raw["num_hidden_layers"] == largest
    return {"query_pre_attn_scalar": raw["hidden_size"] // raw["num_attention_heads"] if by_hidden else raw["head_dim"]}


def _one_base(metadata: GGUFMetadata, raw: Mapping[str, Any]) -> None:
    """Raise ModelLoadError for layers with windows that rotate with another base."""
    if metadata.number("rope.freq_base_swa", raw["rope_theta"]) != raw["rope_theta"]:
        metadata.fail("rope.freq_base_swa", f"differs from freq_base {raw['rope_theta']}, which is not supported")


def _gemma2(metadata: GGUFMetadata, raw: Mapping[str, Any]) -> dict[str, Any]:
    _one_base(metadata, raw)
    return _scored(raw, 46) | {
        "sliding_window": metadata.number("attention.sliding_window", 4096),
        "layer_types": metadata.windowed(raw["num_hidden_layers"], 2),
        "attn_logit_softcapping": metadata.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": metadata.number("final_logit_softcapping", 30.0),
    }


def _gemma3(metadata: GGUFMetadata, raw: Mapping[str, Any]) -> dict[str, Any]:
    found = _scored(raw, 62)
    layers = raw["num_hidden_layers"]
    if window := metadata.number("attention.sliding_window", 0):
        found |= {"sliding_window": window, "layer_types": metadata.windowed(layers, 6)}
    else:  # a file without windows has one kind of layers
        found |= {"sliding_window": None, "layer_types": metadata.windowed(layers, 1)}
    found["rope_local_base_freq"] = metadata.number("rope.freq_base_swa", 10_000.0)
    if cap := metadata.number("final_logit_softcapping"):
        found["final_logit_softcapping"] = cap  # which the family refuses
    return found


def _phi3(metadata: GGUFMetadata, raw: Mapping[str, Any]) -> dict[str, Any]:
    original = metadata.number("rope.scaling.original_context_length", raw["max_position_embeddings"])
    found = {
        "sliding_window": metadata.number("attention.sliding_window", 0) or None,
        "original_max_position_embeddings": original,
    }
    if any(map(metadata.has, ROPE_FACTORS.values())):
        if "rope_scaling" in raw:
            metadata.fail("rope.scaling.factor", "scales a model that has a divisor for each frequency (LongRoPE)")
        factors: dict[str, Any] = {key: metadata.row(name) for key, name in ROPE_FACTORS.items()}
        factors["attention_factor"] = metadata.number("rope.scaling.attn_factor", 1.0)
        found["rope_scaling"] = {"rope_type": "longrope", **factors}
    return found


def _granite(metadata: GGUFMetadata, raw: Mapping[str, Any]) -> dict[str, Any]:
    if not metadata.flag("rope.scaling.finetuned", True):
        metadata.fail("rope.scaling.finetuned", "is false: layers do not rotate, which this family cannot do")
    return metadata.granite_factors(raw) | _biased(metadata) | {"mlp_bias": metadata.has("blk.0.ffn_gate.bias")}


def _granite_moe(metadata: GGUFMetadata, raw: Mapping[str, Any]) -> dict[str, Any]:
    return _granite(metadata, raw) | _experts(metadata) | {"mlp_bias": False}


def _cohere2(metadata: GGUFMetadata, raw: Mapping[str, Any]) -> dict[str, Any]:
    _one_base(metadata, raw)
    return _biased(metadata) | {
        "logit_scale": metadata.need("logit_scale"),
        "sliding_window": metadata.need("attention.sliding_window"),
        "layer_types": metadata.windowed(raw["num_hidden_layers"], 4),
    }


def _command_r(metadata: GGUFMetadata, raw: Mapping[str, Any]) -> dict[str, Any]:
    normed = metadata.has("blk.0.attn_q_norm.weight")
    return _biased(metadata) | {"logit_scale": metadata.number("logit_scale", 0.0) or 1.0, "use_qk_norm": normed}


def _falcon(metadata: GGUFMetadata, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of Falcon. Only models with several heads of k and v have the layers of 40B."""
    grouped = raw["num_key_value_heads"] not in (1, raw["num_attention_heads"])
    two = metadata.has("blk.0.attn_norm_2.weight")
    return {
        "bias": metadata.has("blk.0.attn_output.bias"),
        "intermediate_size": metadata.shape("blk.0.ffn_up.weight")[0],
        "multi_query": raw["num_key_value_heads"] == 1,
        "new_decoder_architecture": grouped or two,
        "num_ln_in_parallel_attn": 2 if two else 1,
    }


def _mixed_windows(metadata: GGUFMetadata, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of models in which every fourth layer has full attention, if the file has a window at all."""
    window = metadata.number("attention.sliding_window", 0)
    if not window:
        return {"sliding_window": None}
    return {"sliding_window": window, "layer_types": metadata.windowed(raw["num_hidden_layers"], 4)}


def _exaone4(metadata: GGUFMetadata, raw: Mapping[str, Any]) -> dict[str, Any]:
    _one_base(metadata, raw)
    if raw["num_hidden_layers"] == 64 and not metadata.number("attention.sliding_window"):
        layers = metadata.windowed(raw["num_hidden_layers"], 4)
        return {"sliding_window": 4096, "layer_types": layers}  # the 32B model
    return _mixed_windows(metadata, raw)


def _olmo2(metadata: GGUFMetadata, raw: Mapping[str, Any]) -> dict[str, Any]:
    found = _mixed_windows(metadata, raw) | _biased(metadata)
    if not found["sliding_window"]:
        return found | {"model_type": "olmo2"}
    _one_base(metadata, raw)
    whole = {**raw.get("rope_scaling", {"rope_type": "default"}), "rope_theta": raw["rope_theta"]}
    plain = {"rope_type": "default", "rope_theta": raw["rope_theta"]}
    ropes = {"full_attention": whole, "sliding_attention": plain}
    return found | {"model_type": "olmo3", "rope_parameters": ropes, "rope_scaling": None, "rope_theta": None}


def _mistral3(metadata: GGUFMetadata, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of Ministral 3. Queries grow with the position if the file has a scale for this; the length at which they
    begin to is that of texts before YaRN."""
    found: dict[str, Any] = {"sliding_window": metadata.number("attention.sliding_window", 0) or None}
    rope = dict(raw.get("rope_scaling", {"rope_type": "default"}))
    if (multiplier := metadata.number("rope.scaling.yarn_log_multiplier", 0.0)) and "factor" in rope:
        rope |= {"mscale": 1.0, "mscale_all_dim": multiplier}
    if scale := metadata.number("attention.temperature_scale", 0.0):
        rope["llama_4_scaling_beta"] = scale
        rope.setdefault("original_max_position_embeddings", metadata.need("rope.scaling.original_context_length"))
    return found | {"rope_scaling": None, "rope_parameters": {**rope, "rope_theta": raw["rope_theta"]}}


def _ernie(metadata: GGUFMetadata, raw: Mapping[str, Any]) -> dict[str, Any]:
    return {"use_bias": metadata.has("blk.0.attn_output.bias")}


def _stablelm(metadata: GGUFMetadata, raw: Mapping[str, Any]) -> dict[str, Any]:
    parallel = not metadata.has("blk.0.ffn_norm.weight")
    return {"use_qkv_bias": metadata.has("blk.0.attn_q.bias"), "use_parallel_residual": parallel}


def _seed_oss(metadata: GGUFMetadata, raw: Mapping[str, Any]) -> dict[str, Any]:
    return _biased(metadata) | {"attention_out_bias": metadata.has("blk.0.attn_output.bias")}


def _gpt2(metadata: GGUFMetadata, raw: Mapping[str, Any]) -> dict[str, Any]:
    return {"n_inner": metadata.shape("blk.0.ffn_up.weight")[0]}


def _gpt_neox(metadata: GGUFMetadata, raw: Mapping[str, Any]) -> dict[str, Any]:
    return {"use_parallel_residual": metadata.flag("use_parallel_residual", True)}


def _phi2(metadata: GGUFMetadata, raw: Mapping[str, Any]) -> dict[str, Any]:
    return {"hidden_act": "gelu_new", "intermediate_size": metadata.shape("blk.0.ffn_up.weight")[0]}


GGUF_FAMILIES: Final[Mapping[str, GGUFFamily]] = {
    "arcee": GGUFFamily(model_type="arcee", read=lambda metadata, raw: _biased(metadata)),
    "bailingmoe2": GGUFFamily(model_type="bailing_moe_v2", read=_bailing_moe, gating=2, also=("bailing_moe",)),
    "chatglm": GGUFFamily(model_type="glm", read=lambda metadata, raw: _biased(metadata)),
    "cohere2": GGUFFamily(model_type="cohere2", read=_cohere2, windows=True),
    "command-r": GGUFFamily(model_type="cohere", read=_command_r),
    "ernie4_5": GGUFFamily(model_type="ernie4_5", read=_ernie),
    "exaone": GGUFFamily(model_type="exaone"),
    "exaone4": GGUFFamily(model_type="exaone4", read=_exaone4, windows=True),
    "falcon": GGUFFamily(model_type="falcon", read=_falcon),
    "falcon-h1": GGUFFamily(model_type="falcon_h1", read=read_falcon_h1, plain_weights=False),
    "gemma": GGUFFamily(model_type="gemma", norm_offset=1.0),
    "gemma2": GGUFFamily(model_type="gemma2", read=_gemma2, norm_offset=1.0, windows=True),
    "gemma3": GGUFFamily(model_type="gemma3_text", read=_gemma3, norm_offset=1.0, windows=True, also=("gemma3",)),
    "glm4": GGUFFamily(model_type="glm4", read=lambda metadata, raw: _biased(metadata)),
    "glm4moe": GGUFFamily(model_type="glm4_moe", read=_glm4_moe, gating=2),
    "gpt-oss": GGUFFamily(model_type="gpt_oss", read=_gpt_oss, windows=True, gating=3),
    "gpt2": GGUFFamily(model_type="gpt2", read=_gpt2),
    "gptneox": GGUFFamily(model_type="gpt_neox", read=_gpt_neox),
    "granite": GGUFFamily(model_type="granite", read=_granite),
    "granitehybrid": GGUFFamily(model_type="granitemoehybrid", read=read_granite_hybrid),
    "granitemoe": GGUFFamily(model_type="granitemoe", read=_granite_moe),
    "hunyuan-dense": GGUFFamily(model_type="hunyuan_v1_dense", read=lambda metadata, raw: _biased(metadata)),
    "lfm2": GGUFFamily(model_type="lfm2", read=read_lfm2),
    "lfm2moe": GGUFFamily(model_type="lfm2_moe", read=_lfm2_moe, gating=2),
    "llama": GGUFFamily(
        model_type="llama",
        read=_llama,
        windows=True,
        also=("idefics3", "internlm3", "mistral", "mistral3", "mixtral", "smolvlm"),
    ),
    "mamba2": GGUFFamily(model_type="mamba2", read=read_mamba2),
    "mistral3": GGUFFamily(model_type="ministral3", read=_mistral3, windows=True, also=("mistral3",)),
    "nemotron_h": GGUFFamily(model_type="nemotron_h", read=read_nemotron_h, gating=2, plain_weights=False),
    "nemotron_h_moe": GGUFFamily(model_type="nemotron_h", read=read_nemotron_h, gating=2, plain_weights=False),
    "olmo2": GGUFFamily(model_type="olmo2", read=_olmo2, windows=True, also=("olmo3",)),
    "olmoe": GGUFFamily(model_type="olmoe", read=lambda metadata, raw: _biased(metadata) | _experts(metadata)),
    "phi2": GGUFFamily(model_type="phi", read=_phi2),
    "phi3": GGUFFamily(model_type="phi3", read=_phi3, windows=True, long_rope=True),
    "qwen2": GGUFFamily(model_type="qwen2", also=("internvl",)),
    "qwen2vl": GGUFFamily(model_type="qwen2", also=("qwen2_5_vl", "qwen2_vl")),
    "qwen2moe": GGUFFamily(model_type="qwen2_moe", read=_qwen_moe(normalised=False, shared=True)),
    "qwen3": GGUFFamily(model_type="qwen3", read=lambda metadata, raw: _biased(metadata), also=("internvl",)),
    "qwen3vl": GGUFFamily(model_type="qwen3", read=lambda metadata, raw: _biased(metadata), also=("qwen3_vl",)),
    "qwen35": GGUFFamily(model_type="qwen3_5_text", read=_qwen3_5, norm_offset=1.0, tiled_heads=True),
    "qwen35moe": GGUFFamily(model_type="qwen3_5_moe_text", read=_qwen3_next, norm_offset=1.0, tiled_heads=True),
    "qwen3moe": GGUFFamily(model_type="qwen3_moe", read=_qwen_moe(normalised=True, shared=False)),
    "qwen3vlmoe": GGUFFamily(model_type="qwen3_moe", read=_qwen_moe(normalised=True, shared=False)),
    "qwen3next": GGUFFamily(model_type="qwen3_next", read=_qwen3_next, norm_offset=1.0),
    "seed_oss": GGUFFamily(model_type="seed_oss", read=_seed_oss),
    "smollm3": GGUFFamily(model_type="smollm3", read=lambda metadata, raw: _biased(metadata)),
    "stablelm": GGUFFamily(model_type="stablelm", read=_stablelm),
    "starcoder2": GGUFFamily(
        model_type="starcoder2", read=lambda metadata, raw: {"use_bias": metadata.has("blk.0.attn_q.bias")}
    ),
}
"""Value of ``general.architecture`` -> properties of its files."""
