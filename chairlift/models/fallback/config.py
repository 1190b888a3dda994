"""Reads ``config.json`` of models that run through transformers. Importing the module does not import torch.

transformers' own class parses the file. This module checks the facts that Chairlift needs, and refuses what it cannot
serve.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Final

from chairlift.errors import ModelLoadError
from chairlift.models.fallback.families import ALIASES, ALLOWED, INSIDE, REFUSED, refusal
from chairlift.models.family import MAX_CONTEXT, Fields
from chairlift.models.hf_config import common_fields, generation_notes, read_hf_files
from chairlift.models.registry import FAMILIES

__all__ = ["TransformersConfig", "hf_config", "read_transformers_config", "reads_key"]

_LAYER_TYPES: Final = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
_CONTEXT_KEYS: Final = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length")
_FLAGS: Final = {
    "add_cross_attention": (False, "attends to another sequence"),
    "is_causal": (True, "lets tokens see later ones"),
    "is_encoder_decoder": (False, "has an encoder"),
    "use_bidirectional_attention": (False, "lets tokens see later ones"),
}
"""Key of ``config.json`` -> (supported value, text for the error message that says what any other value does)."""
_LEAST_CONTEXT: Final = 32
_QUIET: Final = {"return_dict": True, "use_cache": False}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TransformersConfig:
    """Facts about a network that transformers computes. The fields have the names of
    :class:`~chairlift.models.hf_config.NetworkConfig`."""

    model_impl: ClassVar[str] = "transformers"
    model_type: str
    architecture: str
    """Name of the model class in transformers."""
    raw: Mapping[str, Any] = dataclasses.field(hash=False)
    """``config.json`` without its quantisation settings, because quantised weights are converted to floats as they are
    read."""
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    max_model_len: int
    """Maximum length of a sequence in tokens."""
    dtype: str | None = None
    eos_token_ids: tuple[int, ...] = ()
    sampling_defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    generation_unapplied: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    inner: bool = False
    """Whether the checkpoint holds a larger model, whose text model is served alone."""
    first_chunk: bool = False
    """Whether :attr:`max_model_len` is the length up to which attention in chunks is plain attention."""
    lacking: str = ""
    """What the native family lacks for this model, if it has a native family."""
    stretched: str = ""
    """Type of rotary scaling that limits :attr:`max_model_len`: for longer texts the rotary frequencies would depend on
    the longest text in the batch. Empty if there is none."""

    def for_length(self, max_model_len: int) -> TransformersConfig:
        """Return this object unchanged: transformers itself adapts the network to the length of texts."""
        return self

    @property
    def usual_model_len(self) -> int:
        """Maximum length of a sequence by default."""
        return self.max_model_len

    @property
    def shortest_prompt(self) -> int:
        """Minimum number of tokens of a prompt."""
        return 1

    def step_bytes(self, itemsize: int) -> int:
        """Estimated bytes per token of the largest intermediate results. The estimate is higher than for native layers,
        because transformers keeps more tensors alive."""
        return 64 * self.hidden_size * itemsize

    def notes(self, with_generation_config: bool = True) -> list[str]:
        """Differences between this server's outputs and those of transformers with the same files, one per line."""
        found = []
        if self.lacking:
            found.append(f"transformers computes this model: {self.lacking.partition(';')[0]} natively")
        if self.first_chunk:
            found.append(
                f"attention is chunked in some layers: within the first chunk, of {self.max_model_len:,} tokens, it is"
                " plain attention, so that is the longest text here"
            )
        if self.stretched:
            found.append(
                f"rope_type is {self.stretched!r}, of which transformers takes other frequencies for all requests of a"
                f" batch once one is longer than {self.max_model_len:,} tokens; so that is the longest here"
            )
        return [*found, *generation_notes(self.generation_unapplied if with_generation_config else {})]


def read_transformers_config(model_dir: Path) -> TransformersConfig:
    """Read ``config.json`` and ``generation_config.json`` of a model directory.

    Raises :class:`~chairlift.errors.ModelLoadError` when a file is missing or damaged, when transformers is not
    installed or does not know the model, and for unsupported models: a ``model_type`` that is not in the allow-list,
    code in the directory, layers that are neither full nor sliding attention, cross attention.
    """
    raw, generation, where = read_hf_files(model_dir)
    model_type = raw.get("model_type")
    inner = isinstance(model_type, str) and model_type in INSIDE
    if inner:
        model_type, raw = INSIDE[str(model_type)], _text_part(raw, where)
    elif isinstance(model_type, str) and model_type in ALIASES:
        model_type = ALIASES[model_type]
        raw = {**raw, "model_type": model_type}
    if not isinstance(model_type, str) or model_type not in ALLOWED:
        # The format of a model whose family is its format comes first, as with other weights that are not read.
        first = "BitNet weights are not read: " if REFUSED.get(str(model_type)) == "rounds" else ""
        raise ModelLoadError(f"{first}{where}: {refusal(model_type)}")
    architecture = _architecture(model_type, where)
    _check_code(raw, architecture, where)
    raw = {
        key: value for key, value in raw.items() if key not in ("quantization_config", "compression_config", "auto_map")
    }
    config = _parse(model_type, raw, where)
    for key, (served, meaning) in _FLAGS.items():
        if getattr(config, key, None) not in (None, served):
            raise ModelLoadError(
                f"{where}: {key} is {getattr(config, key)!r}: the model {meaning}; use one that is not"
            )
    _check_layer_types(config, where)
    fields = Fields({key: getattr(config, key, None) for key in (*_CONTEXT_KEYS, *_SIZES)}, where)
    context, stretched = _context(config, fields)
    chunk = _first_chunk(config, where)
    return TransformersConfig(
        model_type=model_type,
        architecture=architecture,
        raw=raw,
        vocab_size=fields.integer("vocab_size", 1, 2**22),
        hidden_size=fields.integer("hidden_size", 1, 65_536),
        num_hidden_layers=fields.integer("num_hidden_layers", 1, 1_024),
        max_model_len=min(context, chunk or context),
        inner=inner,
        first_chunk=chunk is not None and chunk < context,
        stretched=stretched,
        **common_fields({**raw, "eos_token_id": getattr(config, "eos_token_id", None)}, generation, context, where),
    )


def _text_part(raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    """``text_config`` of a larger model's ``config.json``, and the keys that hold for the whole model."""
    text = raw.get("text_config")
    if not isinstance(text, Mapping):
        raise ModelLoadError(f"{where}: text_config must describe the text model, got {text!r:.80}; download it again")
    outer = ("dtype", "torch_dtype", "eos_token_id", "tie_word_embeddings")
    left_out = ("architectures", "auto_map", "model_type", *(key for key in outer if text.get(key) is None))
    known = {key: raw[key] for key in outer if raw.get(key) is not None}
    return {**known, **{key: value for key, value in text.items() if key not in left_out}}


_SIZES: Final = ("vocab_size", "hidden_size", "num_hidden_layers")


def _architecture(model_type: str, where: str) -> str:
    """Name of the model class in transformers for this ``model_type``."""
    if importlib.util.find_spec("transformers") is None:
        raise ModelLoadError(
            f"{where}: model_type {model_type!r} runs through transformers, which is not installed;"
            " pip install 'chairlift[hf]'"
        )
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
    if not isinstance(name, str) or getattr(transformers, name, None) is None:
        raise ModelLoadError(
            f"{where}: transformers {transformers.__version__} does not have model_type {model_type!r}; install another"
            " version"
        )
    return name


def _check_code(raw: Mapping[str, Any], architecture: str, where: str) -> None:
    """Refuse a model directory that contains Python code, because Chairlift never runs such code. Code whose class has
    the name of transformers' class is allowed: transformers' class was made from it."""
    auto_map = raw.get("auto_map")
    code = auto_map.get("AutoModelForCausalLM") if isinstance(auto_map, Mapping) else None
    family = FAMILIES.get(str(raw.get("model_type")))
    known = {architecture.lower(), *([family.architecture.lower()] if family else [])}
    if code is not None and str(code).rpartition(".")[2].lower() not in known:
        raise ModelLoadError(
            f"{where}: the model needs code from its own directory (auto_map: {code!r:.80}), which Chairlift never"
            f" runs, and transformers has {architecture}; use a version of the model in a standard format"
        )
    named = raw.get("architectures") or [architecture]
    if not isinstance(named, list) or known.isdisjoint(str(each).lower() for each in named):
        raise ModelLoadError(f"{where}: architectures {named!r:.80} has no {architecture}; use a text-generation model")


def hf_config(config: TransformersConfig) -> Any:
    """Configuration object of transformers for the network that ``config`` describes."""
    parsed = _parse(config.model_type, config.raw, config.model_type)
    if "chunked_attention" in (getattr(parsed, "layer_types", None) or ()):
        parsed.attn_temperature_tuning = False  # no text is long enough for it; see _first_chunk
    return parsed


def reads_key(config: TransformersConfig, key: str) -> bool:
    """Whether transformers' configuration class has the setting ``key``. Other keys of a file have no effect there."""
    parsed = hf_config(config)
    return key in type(parsed).__dataclass_fields__ or key in type(parsed).attribute_map


def _parse(model_type: str, raw: Mapping[str, Any], where: str) -> Any:
    """Parse ``raw`` to transformers' configuration object, and set this object to return only the last hidden
    states."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    try:
        config = CONFIG_MAPPING[model_type].from_dict({**raw, **_QUIET})
    except Exception as error:  # errors of huggingface_hub's validation, or of a class that reads an unexpected value
        reason = " ".join(str(error).split())[:300]
        raise ModelLoadError(f"{where}: transformers does not accept it ({type(error).__name__}: {reason})") from None
    for name in ("output_router_logits", "output_attentions", "output_hidden_states"):
        if getattr(config, name, False):
            setattr(config, name, False)
    return config


def _first_chunk(config: Any, where: str) -> int | None:
    """Length of texts in which attention in chunks is plain attention; None if no layer attends in chunks.

    Llama 4 also multiplies queries by a factor that grows from position ``floor_scale`` - 1 on. transformers counts
    the positions of this factor from the start of the batch, so texts end before it grows.
    """
    kinds = getattr(config, "layer_types", None) or ()
    if "chunked_attention" not in kinds:
        return None
    chunk = Fields({"attention_chunk_size": config.attention_chunk_size}, where)
    longest = chunk.integer("attention_chunk_size", _LEAST_CONTEXT, MAX_CONTEXT)
    if getattr(config, "attn_temperature_tuning", False):
        scale = Fields({"floor_scale": config.floor_scale}, where)
        longest = min(longest, scale.integer("floor_scale", _LEAST_CONTEXT + 1, MAX_CONTEXT) - 1)
    return longest


def _check_layer_types(config: Any, where: str) -> None:
    kinds = getattr(config, "layer_types", None) or ()
    other = sorted({str(kind) for kind in kinds} - _LAYER_TYPES)
    if other:
        raise ModelLoadError(
            f"{where}: layer_types has {', '.join(other)}; only {' and '.join(sorted(_LAYER_TYPES))} run through"
            " transformers, for others keep a state, or see others than the newest tokens"
        )


def _context(config: Any, fields: Fields) -> tuple[int, str]:
    """(maximum length of a sequence, type of rotary scaling that forbids longer ones or "").

    The frequencies of ``dynamic`` and ``longrope`` depend on the longest text of the batch. Up to the original training
    length they are constant.
    """
    key = next((each for each in _CONTEXT_KEYS if fields.get(each) is not None), _CONTEXT_KEYS[0])
    context = fields.integer(key, _LEAST_CONTEXT, MAX_CONTEXT)
    ropes = getattr(config, "rope_parameters", None) or {}
    nested = [each for each in ropes.values() if isinstance(each, Mapping)]
    for rope in nested or [ropes]:
        kind = rope.get("rope_type")
        if kind in ("dynamic", "longrope"):
            original = rope.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", None
            )
            if kind == "longrope" and original is None:
                fields.fail("rope_type is 'longrope', and original_max_position_embeddings is missing")
            longest = context if original is None else min(context, int(original))
            return longest, str(kind) if kind == "dynamic" or longest < context else ""
    return context, ""
