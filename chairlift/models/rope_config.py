"""Rotation of q and k, read from ``config.json`` and checked, for every supported type of transformers.

Both the keys of transformers 5 (``rope_parameters``) and older keys (``rope_theta`` with ``rope_scaling``) are read.
The module does not import torch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from chairlift.errors import ModelLoadError
from chairlift.models.family import MAX_CONTEXT, Family, Fields, NotNative

__all__ = ["WITH_ORIGINAL", "RopeConfig", "original_length", "read_ropes"]

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
"""Keys of rotary scaling for which the value 0 means the same as a missing key, as in transformers."""
WITH_ORIGINAL = ("llama3", "longrope", "yarn")
"""Types that read ``original_max_position_embeddings``. The others ignore the key, as in transformers."""
_AXIS_KEYS = ("mrope_section", "mrope_interleaved")
_ROPE_KEYS = {*_ROPE_NUMBERS, "rope_type", "type", "rope_theta", "truncate", "partial_rotary_factor", "finetuned"}


@dataclasses.dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding: its base and scaling. Names are those of transformers' ``rope_parameters``."""

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
    """Divisor of each rotary frequency, [rotated dimensions / 2], if the file lists divisors; otherwise empty."""
    short_divisors: tuple[float, ...] = ()
    """Divisors for texts of at most ``original_max_position_embeddings`` tokens, if the file has two lists (LongRoPE);
    otherwise empty."""
    dim: int | None = None
    """Number of leading dimensions of a head that are rotated; None: all."""
    interleaved: bool = False
    """Whether a checkpoint pairs neighbouring dimensions for the rotation. In memory, the rows are reordered so that
    the two halves of a head form the pairs."""
    axes: tuple[int, ...] = ()
    """Per rotary frequency, the position that it encodes for tokens of images: time, height or width (0, 1, 2),
    [rotated dimensions / 2]. Empty: a token has only one position."""

    def for_length(self, longest: int) -> RopeConfig:
        """The rotation for texts of at most ``longest`` tokens. LongRoPE has different divisors for short and long
        texts. ``dynamic`` changes nothing up to ``original_max_position_embeddings``, as in transformers."""
        if self.rope_type == "dynamic" and longest <= self.original_max_position_embeddings:
            return dataclasses.replace(self, rope_type="default", factor=1.0)
        if not self.short_divisors or longest > self.original_max_position_embeddings:
            return self
        return dataclasses.replace(self, divisors=self.short_divisors)


def read_ropes(fields: Fields, family: Family, context: int, head_dim: int) -> dict[str, RopeConfig | None]:
    """Read the rotations of q and k. Returns name of a field of ModelConfig -> rotation."""
    if not family.rotary:
        return {"rope": None}
    scaling = fields.raw.get("rope_scaling")
    given = fields.raw.get("rope_parameters")
    if not family.window_rope:
        given = scaling or given or family.defaults.get("rope_parameters") or {}
        return {"rope": _rope(fields, family, given, context, head_dim)}
    kinds = ("full_attention", "sliding_attention")
    nested = _nested(fields, kinds, given or {}, scaling)
    # The file's rope_theta applies to full attention only, as in transformers. Gemma 3 has another key for layers with
    # a sliding window.
    local = fields.get("rope_local_base_freq")
    plain = Fields({} if local is None else {"rope_theta": local}, fields.where, family.defaults)
    whole, window = (
        _rope(each, family, nested.get(kind) or {}, context, head_dim)
        for each, kind in zip((fields, plain), kinds, strict=True)
    )
    return {"rope": whole, "window_rope": None if window == whole else window}


def _nested(fields: Fields, kinds: tuple[str, str], given: Any, scaling: Any) -> Mapping[str, Any]:
    """Rotary parameters per type of layer: ``given`` (``rope_parameters``), with ``scaling`` (``rope_scaling``) added
    to those of full attention.

    Raises :class:`~chairlift.errors.ModelLoadError` for the settings that transformers ignores in such models.
    """
    ignored = f"which transformers ignores for model_type {fields.get('model_type')!r}"
    if not isinstance(given, Mapping) or not set(kinds).issuperset(given):
        fields.fail(f"rope_parameters {given!r:.160} must have {' and '.join(kinds)}, and nothing else")
    whole = given.get(kinds[0]) or {"rope_type": "default"}
    if scaling and isinstance(scaling, Mapping) and isinstance(whole, Mapping):
        named = scaling.get("type")
        used = scaling.get("rope_type", whole.get("rope_type", "default"))
        if named is not None and named != used:
            fields.fail(
                f"rope_scaling has the type {named!r:.80} under the key 'type', {ignored}: it takes {used!r:.80};"
                " write it under the key 'rope_type'"
            )
        whole = {**whole, **scaling}
    elif scaling:
        whole = scaling
    nested = {**given, kinds[0]: whole}
    for kind, rope in nested.items():
        if isinstance(rope, Mapping) and rope.get("truncate") is False:
            fields.fail(
                f"truncate is false in the rope parameters of {kind}, {ignored}; supported: true, or leave it out"
            )
    if (beside := fields.get("original_max_position_embeddings")) is not None:
        fields.fail(
            f"original_max_position_embeddings {beside!r:.80} stands outside the rope parameters, {ignored}; write it"
            " into those of full_attention"
        )
    return nested


def _rope(outer: Fields, family: Family, given: Any, context: int, head_dim: int) -> RopeConfig:
    """Read one rotation. ``given`` are its rotary parameters; ``outer`` has the rotary keys that older files store at
    top level."""
    where = outer.where
    rope_type, absent = _rope_type(family, given, where)
    parameters: dict[str, Any] = {"rope_theta": 10_000.0}
    beside = {key: outer.get(key) for key in ("rope_theta", "partial_rotary_factor")}
    parameters.update({key: value for key, value in beside.items() if value is not None})
    parameters.update({key: value for key, value in given.items() if key not in absent})
    fields = Fields(parameters, f"{where}: rope parameters")
    dim = _rotated(fields, family, head_dim)
    theta = fields.number("rope_theta", 1.0, 1e15)
    common: dict[str, Any] = {"dim": None if dim == head_dim else dim, "interleaved": family.interleaved}
    if family.rope_sections:
        common["axes"] = _axes(fields, family, dim // 2)
    if rope_type == "dynamic" and dim == 2:
        fields.fail("rope_type 'dynamic' needs a head_dim above 2")
    if rope_type == "dynamic" and (alpha := fields.optional_number("alpha", 0.0, 1e6)) is not None:
        # the scaling is static, whatever its name is
        rope_type = "default"
        theta = theta * alpha ** (dim / (dim - 2))
    if rope_type == "default":
        return RopeConfig(theta=theta, original_max_position_embeddings=context, **common)
    original = original_length(outer, fields, context) if rope_type in WITH_ORIGINAL else context
    common |= {"rope_type": rope_type, "theta": theta, "original_max_position_embeddings": original}
    if rope_type == "longrope":
        return RopeConfig(**common, **_longrope(fields, context, original, dim))
    rope = RopeConfig(
        **common,
        factor=fields.number("factor", 0.0, 1e6, default=context / original if rope_type == "yarn" else None),
        low_freq_factor=fields.number("low_freq_factor", 0.0, 1e6, default=None if rope_type == "llama3" else 1.0),
        high_freq_factor=fields.number("high_freq_factor", 0.0, 1e6, default=None if rope_type == "llama3" else 4.0),
        attention_factor=fields.optional_number("attention_factor", 0.0, 1e6),
        beta_fast=fields.number("beta_fast", 0.0, 1e6, default=32.0),
        beta_slow=fields.number("beta_slow", 0.0, 1e6, default=1.0),
        mscale=fields.optional_number("mscale", 0.0, 1e6),
        mscale_all_dim=fields.optional_number("mscale_all_dim", 0.0, 1e6),
        truncate="truncate" not in absent and fields.boolean("truncate", True),  # transformers reads null as false
    )
    if rope.high_freq_factor <= rope.low_freq_factor:
        fields.fail(f"high_freq_factor {rope.high_freq_factor} must be above low_freq_factor {rope.low_freq_factor}")
    return rope


def original_length(outer: Fields, rope: Fields, context: int) -> int:
    """Length of texts before scaling: ``original_max_position_embeddings``. A value beside the rotary parameters
    ``rope`` has priority, as in transformers; by default it is ``context``."""
    key = "original_max_position_embeddings"
    if outer.get(key) is not None:
        return outer.integer(key, 1, MAX_CONTEXT)
    return rope.integer(key, 1, MAX_CONTEXT, default=context)


def _rope_type(family: Family, given: Any, where: str) -> tuple[str, set[str]]:
    """(rotation that the rotary parameters ``given`` name, by its name in this package; keys whose value means the same
    as a missing key). Raises :class:`~chairlift.errors.ModelLoadError` for an unknown type or key."""
    keys = {*_ROPE_KEYS, *family.rope_keys, *(_AXIS_KEYS if family.rope_sections else ())}
    unknown = f"{where}: rope parameters {given!r:.160} are not supported; known keys: {', '.join(sorted(keys))}"
    if not isinstance(given, Mapping):
        raise ModelLoadError(unknown)
    absent = {key for key, value in given.items() if value is None or (key in _ROPE_OR_ZERO and value == 0)}
    named = next((given[key] for key in ("rope_type", "type") if key in given and key not in absent), "default")
    rope_type = family.rope_types.get(named) if isinstance(named, str) else None
    if rope_type is None:
        supported = ", ".join(family.rope_types)
        raise NotNative(
            f"{where}: rope_type {named!r:.80} is not supported for model_type {family.model_type!r}; supported:"
            f" {supported}"
        )
    if not keys.issuperset(given):
        raise ModelLoadError(unknown)
    return rope_type, absent


def _rotated(fields: Fields, family: Family, head_dim: int) -> int:
    """Number of dimensions of a head that are rotated."""
    share = fields.number("partial_rotary_factor", 0.0, 1.0, default=1.0)
    if share != 1.0 and not family.partial_rotary:
        fields.fail(
            f"partial_rotary_factor {share:g} is not supported for model_type {family.model_type!r}, which rotates all"
            " dimensions of a head; supported: 1, or leave it out"
        )
    dim = int(head_dim * share)
    if dim < 2 or dim % 2:
        fields.fail(f"partial_rotary_factor {share:g} of head_dim {head_dim} is {dim} dimensions, which are no pairs")
    return dim


def _axes(fields: Fields, family: Family, count: int) -> tuple[int, ...]:
    """Axis of each of ``count`` frequencies: 0 for time, 1 for height, 2 for width. By default the frequencies of an
    axis are adjacent. With interleaved sections the three axes alternate, until height and width have their numbers of
    frequencies; the remaining frequencies belong to time."""
    given = fields.get("mrope_section")
    sections = given or list(family.rope_sections)
    whole = isinstance(sections, list) and all(type(each) is int and each >= 0 for each in sections)
    cut = not given and family.interleaved_sections  # the default may be longer, as in transformers
    if not whole or len(sections) != 3 or (sum(sections) != count and not cut):
        fields.fail(f"mrope_section must be three numbers with the sum {count}, got {sections!r:.80}")
    if not family.interleaved_sections:
        return tuple(axis for axis, size in enumerate(sections) for _ in range(size))
    return tuple(i % 3 if i < 3 * sections[i % 3] else 0 for i in range(count))


def _longrope(fields: Fields, context: int, original: int, dim: int) -> dict[str, Any]:
    """Read LongRoPE's divisor of each frequency (Ding et al., 2024). The list for long texts is read only if
    ``context`` exceeds ``original``."""
    most = 1e6
    found: dict[str, tuple[float, ...]] = {}
    for key in ("short_factor", "long_factor") if context > original else ("short_factor",):
        divisors = fields.get(key)
        valid = isinstance(divisors, list) and all(type(each) in (int, float) and 0 < each < most for each in divisors)
        if not valid or len(divisors) != dim // 2:
            fields.fail(f"{key} must be {dim // 2} numbers above 0, got {divisors!r:.80}")
        found[key] = tuple(map(float, divisors))
    factor = fields.number("factor", 0.0, most, default=context / original)
    scale = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0
    attention_factor = fields.number("attention_factor", 0.0, most, default=scale)
    short = found["short_factor"]
    numbers: dict[str, Any] = {"factor": factor, "attention_factor": attention_factor}
    return {**numbers, "divisors": found.get("long_factor", short), "short_divisors": short}
