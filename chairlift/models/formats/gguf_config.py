"""Converts the metadata of a GGUF file to the ``config.json`` of its original model. The module does not import torch.

A missing key has the value that llama.cpp's loader (``src/llama-model.cpp``) gives it, also where the default of the
original ``config.json`` differs. A key that would change the results, and has no counterpart here, is an error.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Final

import numpy as np

from chairlift.errors import ModelLoadError
from chairlift.models.formats.gguf.reader import GGUFModel
from chairlift.models.formats.gguf.special_tokens import end_tokens, special_ids
from chairlift.models.formats.gguf_encoders import GGUF_ENCODERS, OTHER_ENCODERS
from chairlift.models.formats.gguf_families import EXPERT_ARCHITECTURES, GGUF_FAMILIES, ROPE_FACTORS
from chairlift.models.formats.gguf_metadata import GGUFMetadata
from chairlift.models.formats.gguf_projector import Projector, with_images
from chairlift.models.hf_config import NetworkConfig, parse_config
from chairlift.models.registry import FAMILIES

__all__ = ["FREQUENCY_DIVISORS", "gguf_config", "gguf_config_json"]

FREQUENCY_DIVISORS: Final = "rope_freqs.weight"
"""Name of a tensor with the divisor of each rotary frequency (Llama 3.1 and later)."""


_OTHER_KINDS: Final = ("adapter", "mmproj")
"""Values of ``general.type`` of files that are no model of their own."""


def gguf_config(model: GGUFModel, projector: Projector | None = None) -> NetworkConfig:
    """Read a model's shape from GGUF metadata, with its image encoder if ``projector`` is given. Raises
    :class:`~chairlift.errors.ModelLoadError`.

    The dtype is bfloat16 unless all weights are float32. For weights of 8 bits or fewer, bfloat16 loses no relevant
    precision, and float16 has no native kernels.
    """
    architecture = model.metadata.get("general.architecture")
    kind = model.metadata.get("general.type", "model")
    if not isinstance(architecture, str) or architecture not in GGUF_FAMILIES or kind in _OTHER_KINDS:
        raise ModelLoadError(_unknown(model, architecture))
    metadata = GGUFMetadata(model)
    raw = _as_config_json(metadata, architecture)
    raw = raw if projector is None else with_images(raw, model, projector)
    config = parse_config(raw, {"eos_token_id": end_tokens(model.metadata)}, where=str(model.path))
    turned = metadata.number("rope.dimension_count", config.head_dim)
    if config.rope is not None and turned != (config.rope.dim or config.head_dim):
        metadata.fail("rope.dimension_count", f"is {turned} of {config.head_dim} dimensions, which is not supported")
    if FREQUENCY_DIVISORS in model and config.rope is not None:
        divisors = model.read(FREQUENCY_DIVISORS, 0, 1)[0]
        if len(divisors) != config.head_dim // 2 or not (np.isfinite(divisors) & (divisors > 0)).all():
            raise ModelLoadError(f"{model.path}: {FREQUENCY_DIVISORS} must be {config.head_dim // 2} positive numbers")
        if config.rope.rope_type not in ("default", "linear"):
            metadata.fail("rope.scaling.type", f"is {config.rope.rope_type}, beside a tensor {FREQUENCY_DIVISORS}")
        # Linear scaling divides every frequency by the factor, which is 1 without scaling.
        rope = dataclasses.replace(config.rope, divisors=tuple(float(each) * config.rope.factor for each in divisors))
        config = dataclasses.replace(config, rope=rope)
    return config


def _unknown(model: GGUFModel, architecture: object) -> str:
    """Message about an architecture that is not read, with what else can be done."""
    if architecture in GGUF_ENCODERS:
        return (
            f"{model.path}: architecture {architecture!r} is an encoder, which generates no text; use runner 'pooling'"
        )
    if architecture in OTHER_ENCODERS:
        return (
            f"{model.path}: architecture {architecture!r} is an encoder that is not supported in GGUF files; use the"
            " original model's safetensors, or a file of the architecture 'bert' (bge, e5, MiniLM), 'modern-bert' or"
            " 'nomic-bert'"
        )
    kind = model.metadata.get("general.type")
    if architecture == "clip" or kind == "mmproj":
        return (
            f"{model.path} is the image encoder of another GGUF file; give the model's own file, and this one with"
            f" mmproj: --mmproj {model.path.name}"
        )
    if kind == "adapter":
        return (
            f"{model.path} is a LoRA adapter, not a model; give it beside its model: --enable-lora --lora-modules"
            f" NAME={model.path.name}"
        )
    return (
        f"{model.path}: architecture {architecture!r:.80} is not supported in general.architecture; use the original"
        " model's safetensors, which transformers may compute (docs/models.md), or a model of a supported architecture:"
        f" {', '.join(GGUF_FAMILIES)}"
    )


def gguf_config_json(model: GGUFModel) -> dict[str, Any]:
    """``config.json`` for a directory that holds the model's weights. :func:`gguf_config` must be able to read the same
    file.

    Raises :class:`~chairlift.errors.ModelLoadError` for a model that ``config.json`` cannot describe.
    """
    if FREQUENCY_DIVISORS in model:
        raise ModelLoadError(
            f"{model.path}: {FREQUENCY_DIVISORS} divides each rotary frequency by a number of its own, which"
            " config.json cannot say; use the original model's safetensors"
        )
    raw = _as_config_json(GGUFMetadata(model), model.metadata["general.architecture"])
    ends = end_tokens(model.metadata)
    first = special_ids(model.metadata).get("bos_token_id")
    found = {"architectures": [FAMILIES[raw["model_type"]].architecture], **raw}
    if ends:
        found["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    return found | ({"bos_token_id": first} if isinstance(first, int) else {})


def _as_config_json(metadata: GGUFMetadata, architecture: str) -> dict[str, Any]:
    """The ``config.json`` of the original model."""
    model = metadata.model
    family = GGUF_FAMILIES[architecture]
    ours = FAMILIES[family.model_type]
    layers = metadata.layers()
    hidden = metadata.need("embedding_length")
    heads = metadata.number("attention.head_count") or metadata.number("ssm.time_step_rank", 0)
    if not isinstance(heads, int) or heads < 1:
        metadata.fail("attention.head_count", f"is {heads!r:.40}; it must be a positive number")
    _refuse_unread(metadata, architecture)
    eps = metadata.number("attention.layer_norm_rms_epsilon", metadata.number("attention.layer_norm_epsilon"))
    if eps is None:
        metadata.fail("attention.layer_norm_rms_epsilon", "is missing")
    raw: dict[str, Any] = {
        "model_type": family.model_type,
        "vocab_size": metadata.shape("token_embd.weight")[0],
        "hidden_size": hidden,
        "intermediate_size": metadata.number("feed_forward_length", 0) or None,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "rms_norm_eps": eps,
        "max_position_embeddings": metadata.need("context_length"),
        "tie_word_embeddings": "output.weight" not in model,
        "torch_dtype": "float32" if all(model.info(name).type.name == "F32" for name in model) else "bfloat16",
    }
    # The original families have other defaults, such as 128 in Qwen3.
    raw["head_dim"] = head_dim = metadata.number("attention.key_length", hidden // heads)
    raw["num_key_value_heads"] = _kv_heads(metadata, heads, head_dim)
    for key in ("value_length", "key_length_swa", "value_length_swa"):
        if metadata.number(f"attention.{key}", head_dim) != head_dim:
            metadata.fail(f"attention.{key}", f"differs from key_length {head_dim}, which is not supported")
    if ours.rotary:
        raw |= _rotary(metadata, longrope=family.long_rope)
        turned = metadata.number("rope.dimension_count", head_dim)
        if ours.partial_rotary:
            raw["partial_rotary_factor"] = turned / head_dim
    raw |= family.read(metadata, raw)
    names = FAMILIES[raw["model_type"]].keys
    return {names.get(key, key): value for key, value in raw.items() if value is not None or key == "sliding_window"}


def _kv_heads(metadata: GGUFMetadata, heads: int, head_dim: int) -> int:
    """Number of heads of K and V. Files of hybrid models have one number per layer; if all are zeros, the first layer
    with attention decides."""
    found = metadata.number("attention.head_count_kv", 0)
    first = next(filter(metadata.has, (f"blk.{layer}.attn_k.weight" for layer in range(metadata.layers()))), None)
    if not found and metadata.per_layer("attention.head_count_kv") and first is not None:
        found = metadata.shape(first)[0] // head_dim
    return int(found or heads)


def _refuse_unread(metadata: GGUFMetadata, architecture: str) -> None:
    """Raise ModelLoadError for keys and tensors that would change the results, and that are not read."""
    family = GGUF_FAMILIES[architecture]
    window = metadata.number("attention.sliding_window", 0)
    if window and not family.windows:
        metadata.fail("attention.sliding_window", f"is {window}: which layers have it, the file does not say")
    reads_experts = architecture in EXPERT_ARCHITECTURES
    if metadata.number("expert_count", 0) and not reads_experts:
        metadata.fail("expert_count", "says that the model has experts, which this architecture cannot have")
    gating = metadata.number("expert_gating_func", 0)
    if gating and gating != family.gating:
        metadata.fail("expert_gating_func", f"is {gating}, which {family.model_type} models do not compute")
    if metadata.number("rope.scaling.yarn_log_multiplier", 0) and architecture != "mistral3":
        metadata.fail("rope.scaling.yarn_log_multiplier", "changes the magnitude of YaRN, which is not supported")
    if metadata.model.metadata.get(f"{architecture}.attention.causal", True) is not True:
        metadata.fail("attention.causal", "is false: the model reads texts in both directions and generates none")
    turned = metadata.number("rope.dimension_count")
    if metadata.number("rope.dimension_count_swa", turned) != turned:
        metadata.fail("rope.dimension_count_swa", f"differs from dimension_count {turned}, which is not supported")
    if not family.long_rope and any(name in metadata.model for name in ROPE_FACTORS.values()):
        metadata.fail("rope.scaling", "has factors for each frequency (LongRoPE), which is not supported for it")


def _rotary(metadata: GGUFMetadata, *, longrope: bool) -> dict[str, Any]:
    """Keys of the rotation. A file that names a factor without its type scales linearly, as llama.cpp does: old files
    have ``rope.scale_linear`` alone. ``longrope`` says whether the architecture has LongRoPE, whose keys it reads
    itself."""
    found: dict[str, Any] = {"rope_theta": metadata.number("rope.freq_base", 10_000.0)}
    kind = metadata.text("rope.scaling.type", "linear")
    factor = metadata.number("rope.scaling.factor", metadata.number("rope.scale_linear", 0.0)) or 1.0
    magnitude = metadata.number("rope.scaling.attn_factor", 1.0)
    if kind not in ("none", "linear", "yarn", *(("longrope",) if longrope else ())):
        metadata.fail("rope.scaling.type", f"{kind!r:.40} is not supported; none, linear and yarn are")
    if kind == "yarn" and factor != 1.0:
        return found | {"rope_scaling": _yarn(metadata, factor, magnitude)}
    if magnitude != 1.0 and not longrope:
        metadata.fail("rope.scaling.attn_factor", f"is {magnitude}, which is supported with the type yarn only")
    if kind == "longrope" and factor != 1.0:
        metadata.fail("rope.scaling.factor", f"is {factor}, beside the type longrope, which is not supported")
    if kind == "linear" and factor != 1.0:
        found["rope_scaling"] = {"rope_type": "linear", "factor": factor}
    return found


def _yarn(metadata: GGUFMetadata, factor: float, magnitude: float) -> dict[str, Any]:
    """Keys of YaRN. llama.cpp's converter writes the keys that begin with ``yarn_`` where the original model has
    values of its own."""
    found: dict[str, Any] = {"rope_type": "yarn", "factor": factor}
    original = metadata.number("rope.scaling.original_context_length")
    if original is not None:
        found["original_max_position_embeddings"] = original
    extrapolation = metadata.number("rope.scaling.yarn_ext_factor", 1.0)
    if extrapolation not in (1.0, -1.0):  # llama.cpp replaces -1 by 1
        metadata.fail("rope.scaling.yarn_ext_factor", f"is {extrapolation}, which is not supported; only 1 is")
    for key in ("beta_fast", "beta_slow"):
        if (beta := metadata.number(f"rope.scaling.yarn_{key}")) is not None:
            found[key] = beta
    attention = metadata.number("rope.scaling.yarn_attn_factor")
    if attention is not None or magnitude != 1.0:
        usual = 1.0 + 0.1 * math.log(factor) if factor > 1.0 else 1.0
        found["attention_factor"] = magnitude * (usual if attention is None else attention)
    return found
