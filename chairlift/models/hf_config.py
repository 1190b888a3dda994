"""Read ``config.json`` as Hugging Face writes it, and refuse what we would compute wrongly.

Two dialects are read: transformers 5 (``rope_parameters``, ``dtype``) and older (``rope_theta`` with ``rope_scaling``,
``torch_dtype``). What differs from family to family is in :mod:`chairlift.models.family`. Every number is checked
against a range, so that a hostile file costs an error message and not memory. Needs no torch.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chairlift.errors import ModelLoadError
from chairlift.models.family import MAX_CONTEXT, Family, Fields
from chairlift.models.registry import FAMILIES

__all__ = ["ModelConfig", "RopeConfig", "parse_config", "read_hf_config", "read_json"]

_MAX_JSON_BYTES = 64 * 2**20
_INT32_MAX = 2**31 - 1
_ROPE_TYPES = ("default", "dynamic", "linear", "llama3", "yarn")
_GENERATES = ("ForCausalLM", "LMHeadModel")
"""Ends of the names of classes in transformers that generate text."""
_DTYPES = ("float32", "bfloat16", "float16")
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_GENERATION_APPLIED = {*_SAMPLING, "eos_token_id", "do_sample"}
_GENERATION_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "early_stopping": (False,),
    "encoder_repetition_penalty": (1,),
    "guidance_scale": (1,),
    "length_penalty": (1,),
    "num_beam_groups": (1,),
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "top_h": (1,),
    "typical_p": (1,),
}
"""Values, beside false, 0 and empty ones, with which a setting of ``generation_config.json`` changes nothing."""
_GENERATION_HARMLESS = (
    *(
        "_commit_hash",
        "_from_model_config",
        "bos_token_id",
        "decoder_start_token_id",
        "pad_token_id",
        "transformers_version",
        "use_cache",
    ),
    *("cache_config", "cache_implementation", "compile_config", "continuous_batching_config", "disable_compile"),
    *("is_assistant", "low_memory", "max_cache_len", "max_matching_ngram_size", "prefill_chunk_size"),
    *("prompt_lookup_num_tokens", "return_dict_in_generate", "return_legacy_cache", "speculation_type"),
    *("target_lookbehind", "trust_remote_code", "use_model_defaults", "use_mtp"),
)
_GENERATION_HARMLESS_STARTS = ("assistant_", "num_assistant_tokens", "output_")
"""Settings that change how transformers computes an answer, but not which."""
_GENERATION_PARAMETERS = {
    "bad_words_ids": "bad_words",
    "max_length": "max_tokens",
    "max_new_tokens": "max_tokens",
    "min_length": "min_tokens",
    "min_new_tokens": "min_tokens",
    "num_return_sequences": "n",
    "sequence_bias": "logit_bias",
    "stop_strings": "stop",
    "suppress_tokens": "logit_bias",
}
"""What a request can say instead."""
# Keys by which other architectures change the maths of a layer. A config that sets one is not what it says it is.
_FOREIGN_KEYS = (
    "add_cross_attention",
    "alibi",
    "attention_chunk_size",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "kv_lora_rank",
    "n_routed_experts",
    "no_rope_layers",
    "num_experts",
    "num_local_experts",
    "query_pre_attn_scalar",
    "use_mrope",
)
_FOREIGN_FACTORS = (
    "attention_multiplier",
    "embedding_multiplier",
    "logit_scale",
    "logits_scaling",
    "residual_multiplier",
)
_ROPE_NUMBERS = (
    "factor",
    "original_max_position_embeddings",
    "low_freq_factor",
    "high_freq_factor",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
)
_ROPE_OR_ZERO = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")
"""Where zero is the same as leaving them out, as in transformers."""
_ROPE_KEYS = {*_ROPE_NUMBERS, "rope_type", "type", "rope_theta", "truncate", "partial_rotary_factor", "finetuned"}


@dataclasses.dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding: the base and how it is stretched. Names are transformers' ``rope_parameters``."""

    rope_type: str = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    original_max_position_embeddings: int = 2048
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    divisors: tuple[float, ...] = ()
    """What each frequency is divided by, [head_dim / 2], where a file says it outright; empty elsewhere."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """What a network looks like. Names are Hugging Face's; the last group spells out what they leave to the class."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    norm_eps: float = 1e-6
    max_position_embeddings: int
    rope: RopeConfig | None = RopeConfig()
    """None: q and k are not rotated."""
    tie_word_embeddings: bool = False
    dtype: str | None = None
    """``float32``, ``bfloat16`` or ``float16`` as the config says; None where it is silent."""
    eos_token_ids: tuple[int, ...] = ()
    """Tokens that end an answer: those of ``generation_config.json`` where it names any, else of ``config.json``."""
    sampling_defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    """What ``generation_config.json`` says of sampling, by the names of SamplingParams, unchecked."""
    generation_unapplied: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    """What else it says that would change answers, and that nobody here applies."""

    layer_windows: tuple[int | None, ...]
    """Per layer, how many tokens a query sees (itself included); None sees all."""
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    norm: str = "rms"
    """``rms`` (RMSNorm) or ``layer`` (LayerNorm with a bias)."""
    mlp: str = "swiglu"
    """``swiglu`` (gated), or ``gelu_tanh`` between two products."""
    learned_positions: bool = False
    """A vector per position is added to the embedding."""
    layer_scales: tuple[float, ...]
    """Per layer, what scores are multiplied by."""

    def notes(self, with_generation_config: bool = True) -> list[str]:
        """Where answers differ from those of transformers for what the model's files say, a line each."""
        found = []
        if self.rope is not None and self.rope.rope_type == "dynamic":
            found.append(
                f"rope_type is 'dynamic': positions are scaled for {self.max_model_len:,} tokens from the first on, as"
                f" in vLLM, while transformers scales them only past {self.rope.original_max_position_embeddings:,};"
                " answers to shorter texts differ from those of transformers"
            )
        if self.generation_unapplied and with_generation_config:
            listed = ", ".join(f"{name} {str(value)[:60]}" for name, value in self.generation_unapplied.items())
            instead = dict.fromkeys(filter(None, map(_GENERATION_PARAMETERS.get, self.generation_unapplied)))
            hint = f"; requests can say so themselves: {', '.join(instead)}" if instead else ""
            found.append(f"generation_config.json says what is not applied: {listed}{hint}")
        return found

    @property
    def max_model_len(self) -> int:
        """The longest sequence in tokens the positions are good for, with any rotary scaling counted in."""
        if self.rope is None:
            return self.max_position_embeddings
        if self.rope.rope_type in ("linear", "dynamic"):
            return int(self.max_position_embeddings * self.rope.factor)
        if self.rope.rope_type == "yarn":
            stretched = int(self.rope.original_max_position_embeddings * self.rope.factor)
            return max(self.max_position_embeddings, stretched)
        return self.max_position_embeddings


def read_hf_config(model_dir: Path) -> ModelConfig:
    """Read ``config.json`` and, where present, ``generation_config.json`` from a model directory.

    Raises :class:`~chairlift.errors.ModelLoadError` when a file is missing, damaged or asks for the unsupported.
    """
    path = model_dir / "config.json"
    if not path.is_file():
        raise ModelLoadError(
            f"{model_dir} has no config.json, so it is not a Hugging Face model directory; "
            "give the directory that holds config.json, *.safetensors and tokenizer.json"
        )
    generation_path = model_dir / "generation_config.json"
    generation = read_json(generation_path) if generation_path.is_file() else {}
    return parse_config(read_json(path), generation, where=str(path))


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object, bounded in size; :class:`~chairlift.errors.ModelLoadError` names what is wrong with it."""
    try:
        with path.open("rb") as file:
            raw = file.read(_MAX_JSON_BYTES + 1)
    except OSError as error:
        raise ModelLoadError(f"cannot read {path}: {error.strerror or error}") from None
    if len(raw) > _MAX_JSON_BYTES:
        raise ModelLoadError(f"{path} is larger than {_MAX_JSON_BYTES >> 20} MiB; download the model again")
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} is not valid JSON ({error}); download the model again") from None
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path} must hold a JSON object, not a {type(content).__name__}; download it again")
    return content


def parse_config(
    raw: Mapping[str, Any], generation: Mapping[str, Any] | None = None, *, where: str = "config"
) -> ModelConfig:
    """Turn the content of ``config.json`` (and ``generation_config.json``) into a checked :class:`ModelConfig`.

    ``where`` names the source in error messages. Raises :class:`~chairlift.errors.ModelLoadError`.
    """
    model_type = raw.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        supported = ", ".join(sorted(FAMILIES))
        raise ModelLoadError(f"{where}: model_type {model_type!r:.80} is not supported; supported: {supported}")
    fields = Fields(raw, where, family.defaults, family.keys)
    _refuse_foreign(fields, raw, family, where)
    hidden_size = fields.integer("hidden_size", 1, 65_536)
    heads = fields.integer("num_attention_heads", 1, 1_024)
    kv_heads = fields.integer("num_key_value_heads", 1, 1_024, default=heads)
    if heads % kv_heads:
        fields.fail(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    if fields.get("head_dim") is None and hidden_size % heads:
        names = fields.name("hidden_size"), fields.name("num_attention_heads")
        fields.fail(f"{names[0]} {hidden_size} is not a multiple of {names[1]} {heads}")
    head_dim = fields.integer("head_dim", 2, 1_024, default=hidden_size // heads)
    if head_dim % 2 and family.rotary:
        fields.fail(f"head_dim {head_dim} is odd, but rotary embedding needs pairs")
    layers = fields.integer("num_hidden_layers", 1, 1_024)
    context, generation = _context(fields), generation or {}
    eos = generation.get("eos_token_id")
    values: dict[str, Any] = {
        "model_type": model_type,
        "vocab_size": fields.integer("vocab_size", 1, 2**22),
        "hidden_size": hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "norm_eps": fields.number("rms_norm_eps", 0.0, 1.0),
        "max_position_embeddings": context,
        "rope": _rope(raw, context, head_dim, where) if family.rotary else None,
        "tie_word_embeddings": fields.boolean("tie_word_embeddings", False),
        "dtype": _dtype(raw, where),
        "eos_token_ids": _token_ids(fields.get("eos_token_id") if eos is None else eos, where),
        "sampling_defaults": _sampling_defaults(generation, where),
        "generation_unapplied": _generation_unapplied(generation, context),
        "layer_scales": (head_dim**-0.5,) * layers,
        "mlp": family.activations[fields.get("hidden_act")],
        **family.read(fields, layers),
    }
    if "intermediate_size" not in values:
        values["intermediate_size"] = fields.integer("intermediate_size", 1, 2**20)
    return ModelConfig(**values)


def _context(fields: Fields) -> int:
    """Positions that the model was made for, before any rotary scaling."""
    context = fields.integer("max_position_embeddings", 1, MAX_CONTEXT)
    chunked = fields.get("dual_chunk_attention_config")
    if not chunked:
        return context
    # Qwen's models for 1M tokens: the first chunk is as usual.
    chunks = Fields(chunked if isinstance(chunked, Mapping) else {}, f"{fields.where}: dual_chunk_attention_config")
    size = chunks.integer("chunk_size", 1, MAX_CONTEXT)
    return min(context, size - chunks.integer("local_size", 0, size - 1))


def _refuse_foreign(fields: Fields, raw: Mapping[str, Any], family: Family, where: str) -> None:
    """Refuse a config that asks for maths we do not do, rather than answer with the wrong numbers."""
    activation = fields.get("hidden_act")
    if not isinstance(activation, str) or activation not in family.activations:
        supported = ", ".join(family.activations)
        name = fields.name("hidden_act")
        raise ModelLoadError(f"{where}: {name} {activation!r:.80} is not supported; supported: {supported}")
    for key in (*_FOREIGN_KEYS, *_FOREIGN_FACTORS):
        value = raw.get(key)
        if value and not (key in _FOREIGN_FACTORS and value == 1):
            raise ModelLoadError(
                f"{where}: {key} = {value!r:.80} is not supported for model_type {raw['model_type']!r}; "
                "use a model without it"
            )
    architectures = raw.get("architectures") or [family.architecture]
    if not isinstance(architectures, list) or not any(str(name).endswith(_GENERATES) for name in architectures):
        raise ModelLoadError(
            f"{where}: architectures {architectures!r:.80} has no ...{' or ...'.join(_GENERATES)}; "
            "use a text-generation model"
        )
    if raw.get("is_causal") is False:
        raise ModelLoadError(f"{where}: is_causal is false, so tokens see later ones; use a text-generation model")
    auto_map = raw.get("auto_map")
    if isinstance(auto_map, Mapping) and "AutoModelForCausalLM" in auto_map:
        raise ModelLoadError(
            f"{where}: the model needs code from its own directory (auto_map), which Chairlift never runs; "
            "use a version of the model in a standard format"
        )


def _dtype(raw: Mapping[str, Any], where: str) -> str | None:
    value = raw.get("dtype") if raw.get("dtype") is not None else raw.get("torch_dtype")
    if value is None:
        return None
    name = str(value).removeprefix("torch.")
    if name not in _DTYPES:
        raise ModelLoadError(f"{where}: dtype {name!r:.80} is not supported; supported: {', '.join(_DTYPES)}")
    return name


def _token_ids(value: Any, where: str) -> tuple[int, ...]:
    ids = [] if value is None else value if isinstance(value, list) else [value]
    for item in ids:
        if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item <= _INT32_MAX:
            raise ModelLoadError(f"{where}: eos_token_id must be a token id or a list of them, got {value!r:.80}")
    return tuple(dict.fromkeys(ids))


def _sampling_defaults(generation: Mapping[str, Any], where: str) -> dict[str, Any]:
    """By the names of SamplingParams. Without ``do_sample`` the others count, as in vLLM; with false none is drawn."""
    found = {name: value for name in _SAMPLING if (value := generation.get(name)) is not None}
    if Fields(generation, f"{where}: generation_config.json").boolean("do_sample", True):
        return found
    return {"temperature": 0.0, **{name: found[name] for name in ("repetition_penalty",) if name in found}}


def _generation_unapplied(generation: Mapping[str, Any], context: int) -> dict[str, Any]:
    found = {}
    for name, value in sorted(generation.items()):
        known = name in _GENERATION_APPLIED or name in _GENERATION_HARMLESS
        if known or name.startswith(_GENERATION_HARMLESS_STARTS) or not value:
            continue
        longest = name in ("max_length", "max_new_tokens") and isinstance(value, int) and value >= context
        if not longest and value not in _GENERATION_NEUTRAL.get(name, ()):
            found[name] = value
    return found


def _rope(raw: Mapping[str, Any], context: int, head_dim: int, where: str) -> RopeConfig:
    given = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(given, Mapping) or not _ROPE_KEYS.issuperset(given):
        known = ", ".join(sorted(_ROPE_KEYS))
        raise ModelLoadError(f"{where}: rope parameters {given!r:.160} are not supported; known keys: {known}")
    parameters: dict[str, Any] = {"rope_theta": 10_000.0}
    parameters.update({k: raw[k] for k in ("rope_theta", "partial_rotary_factor") if raw.get(k) is not None})
    absent = {key for key, value in given.items() if value is None or (key in _ROPE_OR_ZERO and value == 0)}
    parameters.update({key: value for key, value in given.items() if key not in absent})
    rope_type = parameters.get("rope_type", parameters.get("type", "default"))
    if rope_type not in _ROPE_TYPES:
        supported = ", ".join(_ROPE_TYPES)
        raise ModelLoadError(f"{where}: rope_type {rope_type!r:.80} is not supported; supported: {supported}")
    if raw.get("original_max_position_embeddings") is not None:
        parameters["original_max_position_embeddings"] = raw["original_max_position_embeddings"]
    fields = Fields(parameters, f"{where}: rope parameters")
    if fields.number("partial_rotary_factor", 0.0, 1.0, default=1.0) != 1.0:
        fields.fail(f"partial_rotary_factor {parameters['partial_rotary_factor']} is not supported")
    theta = fields.number("rope_theta", 1.0, 1e15)
    if rope_type == "default":
        return RopeConfig(theta=theta, original_max_position_embeddings=context)
    if rope_type == "dynamic" and head_dim == 2:
        fields.fail("rope_type 'dynamic' needs a head_dim above 2")
    original = fields.integer("original_max_position_embeddings", 1, MAX_CONTEXT, default=context)
    rope = RopeConfig(
        rope_type=rope_type,
        theta=theta,
        factor=fields.number("factor", 0.0, 1e6, default=context / original if rope_type == "yarn" else None),
        original_max_position_embeddings=original,
        low_freq_factor=fields.number("low_freq_factor", 0.0, 1e6, default=None if rope_type == "llama3" else 1.0),
        high_freq_factor=fields.number("high_freq_factor", 0.0, 1e6, default=None if rope_type == "llama3" else 4.0),
        attention_factor=fields.optional_number("attention_factor", 0.0, 1e6),
        beta_fast=fields.number("beta_fast", 0.0, 1e6, default=32.0),
        beta_slow=fields.number("beta_slow", 0.0, 1e6, default=1.0),
        mscale=fields.optional_number("mscale", 0.0, 1e6),
        mscale_all_dim=fields.optional_number("mscale_all_dim", 0.0, 1e6),
        truncate="truncate" not in absent and fields.boolean("truncate", True),  # null is false in transformers
    )
    if rope.high_freq_factor <= rope.low_freq_factor:
        fields.fail(f"high_freq_factor {rope.high_freq_factor} must be above low_freq_factor {rope.low_freq_factor}")
    return rope
