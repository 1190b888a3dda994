"""Reads Hugging Face's ``config.json``, and refuses models that this package cannot compute correctly.

Both the keys of transformers 5 (``rope_parameters``, ``dtype``) and older keys (``rope_theta`` with ``rope_scaling``,
``torch_dtype``) are read. :mod:`chairlift.models.family` has the differences between families. Every number is checked
against a range, so that a malicious file causes an error message instead of a huge allocation. The module does not
import torch.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from chairlift.base.mistaken_models import check_content, of_directory
from chairlift.base.sampling_params import PARAMETERS
from chairlift.errors import ModelLoadError
from chairlift.models.family import MAX_CONTEXT, ExpertLayers, Family, Fields, NotNative
from chairlift.models.mixers import MixerConfig
from chairlift.models.registry import FAMILIES
from chairlift.models.rope_config import RopeConfig, read_ropes
from chairlift.models.vision.vision_config import PatchConfig, SquareConfig, read_vision

__all__ = [
    "NetworkConfig",
    "RopeConfig",
    "common_fields",
    "generation_notes",
    "parse_config",
    "read_dtype",
    "read_hf_config",
    "read_hf_files",
    "read_json",
]

_MAX_JSON_BYTES = 64 * 2**20
_INT32_MAX = 2**31 - 1
_GENERATES = ("ForCausalLM", "Model")
"""Suffixes of names of classes in transformers that generate text, or that generate text after an output head is
added."""
_DTYPES = ("float32", "bfloat16", "float16")
_SAMPLING = tuple(name for name, each in PARAMETERS.items() if each.in_files)
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
"""Setting of ``generation_config.json`` -> values that have no effect. False, 0 and empty values never have an
effect."""
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
"""Prefixes of settings of ``generation_config.json`` that change how transformers computes an output, but not the
output itself."""
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
"""Setting of ``generation_config.json`` -> request parameter with the same purpose."""
# Keys of other architectures that change the computation of a layer. A config with one of them is refused.
_FOREIGN_KEYS = (
    "add_cross_attention",
    "alibi",
    "attention_chunk_size",
    "attn_logit_softcapping",
    "clip_qkv",
    "final_logit_softcapping",
    "kv_lora_rank",
    "n_routed_experts",
    "no_rope_layers",
    "num_experts",
    "num_experts_per_tok",
    "num_local_experts",
    "query_pre_attn_scalar",
    "qk_layernorm",
    "use_bidirectional_attention",
    "use_mrope",
)
_FOREIGN_FACTORS = (
    "attention_multiplier",
    "embedding_multiplier",
    "logit_scale",
    "logits_scaling",
    "residual_multiplier",
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NetworkConfig:
    """Shape of a network. Names are Hugging Face's. The last group of fields holds what Hugging Face's classes define
    in code."""

    model_impl: ClassVar[str] = "native"
    """Name of the implementation that computes the layers."""

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
    rope: RopeConfig | None
    """Rotation of q and k; None if they are not rotated."""
    window_rope: RopeConfig | None = None
    """Rotation of q and k in layers with a sliding window, if it differs from :attr:`rope`."""
    rope_layers: tuple[bool, ...] = ()
    """Per layer, whether q and k are rotated. Empty: in all layers."""
    tie_word_embeddings: bool = False
    dtype: str | None = None
    """``float32``, ``bfloat16`` or ``float16`` from the config; None if the config has no dtype."""
    eos_token_ids: tuple[int, ...] = ()
    """Ids of the tokens that end generation: from ``generation_config.json`` if it has any, otherwise from
    ``config.json``."""
    sampling_defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    """Sampling parameters in ``generation_config.json``: name in SamplingParams -> unchecked value."""
    generation_unapplied: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    """Settings of ``generation_config.json`` that would change the generated text, but are not applied."""
    unused_code: str | None = None
    """The class that ``auto_map`` names. It is never run: the family's own implementation takes its place."""

    layer_windows: tuple[int | None, ...]
    """Per layer, the number of newest tokens that a query attends to (itself included); None: all earlier tokens."""
    both_ways: bool = False
    """Whether tokens also attend to later tokens, in a model for embeddings or classes. Windows then hold the nearest
    tokens on each side."""
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    qk_norm: str | None = None
    """Norm (RMSNorm) of q and k: ``head`` (each head separately), ``rotated`` (each head separately, after the
    rotation) or ``all`` (all heads together)."""
    norm: str = "rms"
    """``rms`` (RMSNorm), ``rms_offset`` (times 1 + weight), ``layer`` (LayerNorm with a bias) or ``layer_no_bias``."""
    block: str = "pre"
    """Positions of the norms in a layer: ``pre`` (before attention and MLP), ``post`` (after them, before the
    addition), ``both``, ``post_sum`` (after the addition, but not after the last layer), ``parallel`` (attention and
    MLP read the same norm), ``parallel_two`` (one norm for each) or ``chain`` (no norms and no additions: the result of
    a layer is the input of the next)."""
    mlp: str = "swiglu"
    """Type of the MLP: ``swiglu`` or ``geglu_tanh`` (gated); or ``gelu``, ``gelu_tanh``, ``relu`` or ``relu2`` between
    two linear layers."""
    embedding_scale: float = 1.0
    rounds_embedding_scale: bool = False
    """Whether the embedding's scale is rounded to the model's dtype."""
    residual_scale: float = 1.0
    """Factor by which the results of attention and MLP are multiplied before they are added to the residual stream."""
    logit_scale: float = 1.0
    score_cap: float | None = None
    """Cap c on attention scores: a score s becomes c tanh(s / c) before the softmax (Gemma 2). None: no cap."""
    logit_cap: float | None = None
    """Cap c on logits: a logit s becomes c tanh(s / c), before penalties and temperature. None: no cap."""
    sinks: bool = False
    """Whether the softmax of each head has one extra logit without a value vector (gpt-oss)."""
    output_gate: bool = False
    """Whether each head's attention result is multiplied by a gate: the sigmoid of a linear layer (Qwen3-Next)."""
    query_scaling: tuple[float, int] | None = None
    """(beta, n): a query at position p is multiplied by 1 + beta ln(1 + floor(p / n)), as in Llama 4."""
    learned_positions: bool = False
    """Whether a learned vector per position is added to the embedding."""
    first_position_row: int = 0
    """Row of the position table that belongs to position 0."""
    embedding_width: int | None = None
    """Width of the embedding and of the head's input, if linear layers convert it to ``hidden_size`` and back;
    otherwise None."""
    layer_scales: tuple[float, ...]
    """Per layer, the factor by which attention scores are multiplied."""
    qkv_clip: float | None = None
    """Limit x: values of q, k and v are clipped to -x..x before the rotation. None: no limit."""
    experts: ExpertLayers | None = None
    """Settings of the layers that have experts in place of one MLP; None if the model has no such layers."""
    vision: SquareConfig | PatchConfig | None = None
    """Shape of the image encoder; None if the model reads only text."""
    mixers: tuple[MixerConfig | None, ...] = ()
    """Per layer, its recurrent mixer, or None. Empty: no layer has a mixer."""

    attention_layers: tuple[bool, ...] = ()
    """Per layer, whether it has attention. Empty: exactly the layers without a mixer have attention. A layer with both
    adds their results."""

    mlp_layers: tuple[bool, ...] = ()
    """Per layer, whether an MLP or experts follow attention or the mixer. Empty: in all layers."""

    mixer_scales: tuple[float, float] = (1.0, 1.0)
    """Factors of recurrent mixers (Falcon-H1): (factor of the input, factor of the result)."""
    attention_scales: tuple[float, float] = (1.0, 1.0)
    """Factors of attention: (factor of the input, factor of the result)."""
    mlp_scales: tuple[float, float] = (1.0, 1.0)
    """Factors of MLPs: (factor of the activation's input, factor of the MLP's result)."""

    def has_mlp(self, layer: int) -> bool:
        """Whether this layer has an MLP or experts."""
        return not self.mlp_layers or self.mlp_layers[layer]

    def mixer(self, layer: int) -> MixerConfig | None:
        """Settings of this layer's recurrent mixer; None if it has none."""
        return self.mixers[layer] if self.mixers else None

    def attends_in(self, layer: int) -> bool:
        """Whether this layer has attention."""
        return self.attention_layers[layer] if self.attention_layers else self.mixer(layer) is None

    def cache_number(self, layer: int, *, state: bool) -> int:
        """Index of this layer's state (``state``) or of its K and V in the list of the caches of all layers, which is
        in layer order. In a layer with both, K and V come before the state."""
        kept = sum(self.attends_in(each) + (self.mixer(each) is not None) for each in range(layer))
        return kept + (state and self.attends_in(layer))

    @property
    def recurrent(self) -> bool:
        """Whether at least one layer has a recurrent state."""
        return any(mixer is not None for mixer in self.mixers)

    @property
    def attends(self) -> bool:
        """Whether at least one layer has attention."""
        return any(map(self.attends_in, range(self.num_hidden_layers)))

    @property
    def gated(self) -> bool:
        """Whether the model's MLP has a gate."""
        return self.mlp in ("swiglu", "geglu_tanh")

    def has_experts(self, layer: int) -> bool:
        """Whether this layer has experts instead of one MLP."""
        return self.experts is not None and self.experts.layers[layer]

    @property
    def norm_offset(self) -> float:
        """Number added to the weights of an RMSNorm."""
        return 1.0 if self.norm == "rms_offset" else 0.0

    @property
    def layer_ropes(self) -> tuple[RopeConfig | None, ...]:
        """Per layer, the rotation of q and k; None if the layer does not rotate them."""
        rotated = self.rope_layers or (True,) * self.num_hidden_layers
        ropes = (self.rope if window is None else self.window_rope or self.rope for window in self.layer_windows)
        return tuple(rope if turned else None for rope, turned in zip(ropes, rotated, strict=True))

    def step_bytes(self, itemsize: int) -> int:
        """Bytes per token of the intermediate results in the layer with the largest results. ``itemsize`` is the number
        of bytes of one element."""
        heads = 2 * (self.num_attention_heads + self.num_key_value_heads) * self.head_dim
        heads += 2 * self.num_attention_heads * self.head_dim * self.output_gate
        mixing = max([heads * itemsize, *(self._mixer_bytes(each, itemsize) for each in self.mixers if each)])
        count = mixing + (3 * self.intermediate_size + 4 * self.hidden_size) * itemsize
        if self.experts is not None:  # results of each chosen expert, and three times the inner width of one
            chosen = self.experts.routing.top_k * self.hidden_size
            inner = max(self.experts.intermediate_size, self.experts.shared_size)
            count += (4 * inner + 2 * chosen) * itemsize + 8 * inner + 4 * self.hidden_size
        return count

    def _mixer_bytes(self, mixer: MixerConfig, itemsize: int) -> int:
        """Bytes per token of the intermediate results of a recurrent layer: the results of its linear layers, and those
        of its convolution and of its scan, which may be float32."""
        before, after = mixer.products(self.hidden_size)
        given = sum(outs for outs, _ in before)
        inner = sum(ins for _, ins in after)
        return (given + inner) * (itemsize + 4)

    @property
    def rotates_apart(self) -> bool:
        """Whether the rotation is a separate operation. This is the case if a norm follows the rotation."""
        return self.qk_norm == "rotated" and any(rope is not None for rope in self.layer_ropes)

    def for_length(self, longest: int) -> NetworkConfig:
        """The network for texts of at most ``longest`` tokens. Only the rotations LongRoPE and ``dynamic`` depend on
        the length."""
        rope, window_rope = (each and each.for_length(longest) for each in (self.rope, self.window_rope))
        if (rope, window_rope) == (self.rope, self.window_rope):
            return self
        return dataclasses.replace(self, rope=rope, window_rope=window_rope)

    def notes(self, with_generation_config: bool = True) -> list[str]:
        """Differences between this server's outputs and those of transformers with the same files, one per line."""
        found = []
        if self.unused_code is not None:
            found.append(
                f"auto_map in config.json names {self.unused_code!r}, code in the model's directory: it is not run, and"
                f" the model is computed as {self.model_type!r}, as in transformers without trust_remote_code"
            )
        if self.rope is not None and self.rope.rope_type == "dynamic":
            original = f"{self.rope.original_max_position_embeddings:,}"
            found.append(
                f"rope_type is 'dynamic': positions are scaled for {self.max_model_len:,} tokens from the first token"
                f" on, as in vLLM, while transformers scales them only past {original}; outputs for shorter texts"
                f" differ from those of transformers; set max_model_len to {original} or less for positions without"
                " scaling"
            )
        if self.rope is not None and self.rope.rope_type == "longrope":
            original = f"{self.rope.original_max_position_embeddings:,}"
            found.append(
                "rope_type is 'longrope': the factors for short texts are used, as in transformers, because no text is"
                f" longer than original_max_position_embeddings {original}"
                if self.rope.divisors == self.rope.short_divisors
                else "rope_type is 'longrope': the factors for long texts are used, so prompts must be longer than"
                f" original_max_position_embeddings {original}, as transformers takes other factors for the others; set"
                f" max_model_len to {original} or less, or leave it out, for the factors for short texts"
            )
        return [*found, *generation_notes(self.generation_unapplied if with_generation_config else {})]

    @property
    def usual_model_len(self) -> int:
        """Maximum length of a sequence by default. Up to it, rotations do not depend on the length of a text."""
        if self.rope is not None and self.rope.rope_type in ("longrope", "dynamic"):
            return min(self.max_model_len, self.rope.original_max_position_embeddings)
        return self.max_model_len

    @property
    def shortest_prompt(self) -> int:
        """Minimum number of tokens of a prompt. With LongRoPE's factors for long texts, shorter prompts would get other
        rotations than in transformers. Divisors of Llama 3's GGUF files are one list, for texts of any length."""
        if self.rope is None or self.rope.rope_type != "longrope" or self.rope.divisors == self.rope.short_divisors:
            return 1
        return self.rope.original_max_position_embeddings + 1

    @property
    def max_model_len(self) -> int:
        """Maximum length of a sequence in tokens that the positions support, including rotary scaling."""
        if self.rope is None:
            return self.max_position_embeddings
        if self.rope.rope_type in ("linear", "dynamic"):
            return int(self.max_position_embeddings * self.rope.factor)
        if self.rope.rope_type == "yarn":
            stretched = int(self.rope.original_max_position_embeddings * self.rope.factor)
            return max(self.max_position_embeddings, stretched)
        return self.max_position_embeddings


def generation_notes(unapplied: Mapping[str, Any]) -> list[str]:
    """Names of the settings in ``generation_config.json`` that are not applied, in one line."""
    if not unapplied:
        return []
    listed = ", ".join(f"{name} {str(value)[:60]}" for name, value in unapplied.items())
    instead = dict.fromkeys(filter(None, map(_GENERATION_PARAMETERS.get, unapplied)))
    hint = f"; requests can set these parameters instead: {', '.join(instead)}" if instead else ""
    return [f"generation_config.json has settings that are not applied: {listed}{hint}"]


def read_hf_config(model_dir: Path) -> NetworkConfig:
    """Read ``config.json`` and, where present, ``generation_config.json`` from a model directory.

    Raises :class:`~chairlift.errors.ModelLoadError` when a file is missing or damaged, or needs an unsupported feature.
    """
    raw, generation, where = read_hf_files(model_dir)
    return parse_config(raw, generation, where=where)


def read_hf_files(model_dir: Path) -> tuple[dict[str, Any], dict[str, Any], str]:
    """Contents of ``config.json`` and of ``generation_config.json``, and the path of the former.

    Raises :class:`~chairlift.errors.ModelLoadError` when a file is missing or damaged.
    """
    path = model_dir / "config.json"
    if not path.is_file():
        raise ModelLoadError(of_directory(model_dir))
    generation_path = model_dir / "generation_config.json"
    generation = read_json(generation_path) if generation_path.is_file() else {}
    return read_json(path), generation, str(path)


def read_json(path: Path, whole: type = dict) -> Any:
    """Read a JSON object of limited size. ``whole`` is the expected type: dict or list.

    Raises :class:`~chairlift.errors.ModelLoadError` that describes the problem.
    """
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
        check_content(path)
        raise ModelLoadError(f"{path} is not valid JSON ({error}); download the model again") from None
    if not isinstance(content, whole):
        kind = "object" if whole is dict else whole.__name__
        raise ModelLoadError(f"{path} must hold a JSON {kind}, not a {type(content).__name__}; download it again")
    return content


def parse_config(
    raw: Mapping[str, Any],
    generation: Mapping[str, Any] | None = None,
    *,
    where: str = "config",
    pooled: bool = False,
) -> NetworkConfig:
    """Turn the content of ``config.json`` (and ``generation_config.json``) into a checked :class:`NetworkConfig`.

    ``where`` names the source in error messages. With ``pooled`` the network computes embeddings or classes, so it need
    not be able to generate text. Raises :class:`~chairlift.errors.ModelLoadError`.
    """
    model_type = raw.get("model_type")
    family = _family(raw.get("model_type"), where)
    text = raw.get("text_config")
    family = family.text_variants.get(str(text.get("model_type")), family) if isinstance(text, Mapping) else family
    raw = _text_part(whole := raw, family, where)
    fields = Fields(raw, where, family.defaults, family.keys, either=family.either_key)
    _refuse_foreign(fields, raw, family, where, pooled)
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
    context = _context(fields)
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
        **read_ropes(fields, family, context, head_dim),
        "tie_word_embeddings": fields.boolean("tie_word_embeddings", False),
        **common_fields({**raw, "eos_token_id": fields.get("eos_token_id")}, generation or {}, context, where),
        "layer_scales": (head_dim**-0.5,) * layers,
        "mlp": family.activations[fields.get("hidden_act")],
        "unused_code": _unused_code(raw, family),
        **family.read(fields, layers),
        "vision": read_vision(family.encoder, whole, where, hidden_size) if family.encoder else None,
    }
    if "intermediate_size" not in values:
        values["intermediate_size"] = fields.integer("intermediate_size", 1, 2**20)
    if _sees_later(raw):
        values |= _both_ways(raw, values["layer_windows"])
    config = NetworkConfig(**values)
    if config.both_ways and (config.sinks or config.score_cap is not None):
        fields.fail(f"tokens see later ones, which is not supported for model_type {model_type!r}")
    if pooled and config.recurrent:
        raise ModelLoadError(
            f"{where}: model_type {model_type!r} keeps recurrent states, and embeddings or classes of such models are"
            " not supported; use a model that attends in all layers"
        )
    return config


def _family(model_type: Any, where: str) -> Family:
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        supported = ", ".join(sorted(FAMILIES))
        raise ModelLoadError(
            f"{where}: model_type {model_type!r:.80} is not supported; supported: {supported}; use a model of one of"
            " these, or one that transformers runs (docs/models.md)"
        )
    return family


def _text_part(raw: Mapping[str, Any], family: Family, where: str) -> Mapping[str, Any]:
    """The keys of the text model: ``raw`` itself, or its ``text_config`` plus the keys that hold for the whole
    model."""
    if not family.text_type:
        return raw
    usual = family.defaults.get("tie_word_embeddings", False)
    inner = raw.get("text_config")
    tied = raw.get("tie_word_embeddings", usual)
    if inner is None and family.flat_text:
        inner = {key: value for key, value in raw.items() if key != "vision_config"}
    if not isinstance(inner, Mapping) or inner.get("model_type", family.text_type) not in (
        family.text_type,
        family.model_type,
    ):
        raise ModelLoadError(
            f"{where}: text_config must describe a model of type {family.text_type!r}, got {inner!r:.80}"
        )
    outer = ("model_type", "architectures", "auto_map", "dtype", "torch_dtype", "quantization_config")
    known = {key: raw[key] for key in outer if raw.get(key) is not None}
    if inner.get("eos_token_id") is None and raw.get("eos_token_id") is not None:
        known["eos_token_id"] = raw["eos_token_id"]
    architectures = {"architectures": [family.architecture]}
    tied = tied or (family.flat_text and inner.get("tie_word_embeddings", False))
    return {**inner, **architectures, **known, "tie_word_embeddings": tied}


def common_fields(raw: Mapping[str, Any], generation: Mapping[str, Any], context: int, where: str) -> dict[str, Any]:
    """Fields of :class:`NetworkConfig` that are read in the same way for every family, whether native or served by
    transformers."""
    eos = generation.get("eos_token_id")
    return {
        "dtype": read_dtype(raw, where),
        "eos_token_ids": _token_ids(raw.get("eos_token_id") if eos is None else eos, where),
        "sampling_defaults": _sampling_defaults(generation, where),
        "generation_unapplied": _generation_unapplied(generation, context),
    }


def _context(fields: Fields) -> int:
    """Number of positions that the model was trained for, before any rotary scaling."""
    context = fields.integer("max_position_embeddings", 1, MAX_CONTEXT)
    chunked = fields.get("dual_chunk_attention_config")
    if not chunked:
        return context
    # Qwen's models for 1M tokens use attention in chunks. Within the first chunk it equals normal attention.
    chunks = Fields(chunked if isinstance(chunked, Mapping) else {}, f"{fields.where}: dual_chunk_attention_config")
    size = chunks.integer("chunk_size", 1, MAX_CONTEXT)
    return min(context, size - chunks.integer("local_size", 0, size - 1))


def _refuse_foreign(fields: Fields, raw: Mapping[str, Any], family: Family, where: str, pooled: bool) -> None:
    """Raise an error if the config needs a computation that is not supported. Otherwise the results would be wrong."""
    activation = fields.get("hidden_act")
    if not isinstance(activation, str) or activation not in family.activations:
        supported = ", ".join(family.activations)
        name = fields.name("hidden_act")
        raise NotNative(f"{where}: {name} {activation!r:.80} is not supported; supported: {supported}")
    if _sees_later(raw) and not pooled:
        raise ModelLoadError(
            f"{where}: tokens see later ones (is_causal, use_bidirectional_attention), so the model computes embeddings"
            " and no text; use runner pooling, or a text-generation model"
        )
    for key in (*_FOREIGN_KEYS, *_FOREIGN_FACTORS):
        value = raw.get(key)
        if value and key not in family.own_keys and not (key in _FOREIGN_FACTORS and value == 1):
            raise NotNative(
                f"{where}: {key} = {value!r:.80} is not supported for model_type {raw['model_type']!r}; "
                "use a model without it",
                key,
            )
    architectures = raw.get("architectures") or [family.architecture]
    generates = isinstance(architectures, list) and any(
        str(name).endswith(_GENERATES) or name == family.architecture for name in architectures
    )
    if not generates and not pooled:
        raise ModelLoadError(
            f"{where}: architectures {architectures!r:.80} has no ...{' or ...'.join(_GENERATES)}; "
            "use a text-generation model"
        )


def _sees_later(raw: Mapping[str, Any]) -> bool:
    return raw.get("is_causal") is False or raw.get("use_bidirectional_attention") is True


def _both_ways(raw: Mapping[str, Any], windows: tuple[int | None, ...]) -> dict[str, Any]:
    """Fields of a network whose tokens see later ones. Half of Gemma's window is on each side; another window is on
    each side as a whole."""
    halved = raw.get("use_bidirectional_attention") is True
    sides = tuple(None if each is None else 1 + (each // 2 if halved else each) for each in windows)
    return {"both_ways": True, "layer_windows": sides}


def _unused_code(raw: Mapping[str, Any], family: Family) -> str | None:
    """Class in the model's directory that is not run, unless it is known to compute the same as the native
    implementation. None if there is no such class."""
    auto_map = raw.get("auto_map")
    code = auto_map.get("AutoModelForCausalLM") if isinstance(auto_map, Mapping) else None
    return None if code is None or str(code).rpartition("--")[2] in family.known_code else str(code)[:200]


def read_dtype(raw: Mapping[str, Any], where: str) -> str | None:
    """Dtype that the content of a ``config.json`` names; None if it names none. Raises ModelLoadError for unsupported
    dtypes."""
    value = raw.get("dtype") if raw.get("dtype") is not None else raw.get("torch_dtype")
    if value is None:
        return None
    name = str(value).removeprefix("torch.")
    if name not in _DTYPES:
        raise ModelLoadError(f"{where}: dtype {name!r:.80} is not supported; supported: {', '.join(_DTYPES)}")
    return name


def _token_ids(value: Any, where: str) -> tuple[int, ...]:
    if value is None:
        ids = []
    elif isinstance(value, list):
        ids = value
    else:
        ids = [value]
    for item in ids:
        if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item <= _INT32_MAX:
            raise ModelLoadError(f"{where}: eos_token_id must be a token id or a list of them, got {value!r:.80}")
    return tuple(dict.fromkeys(ids))


def _sampling_defaults(generation: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Sampling parameters, by the names of SamplingParams. If ``do_sample`` is present and false, decoding is greedy
    instead, as in vLLM."""
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
