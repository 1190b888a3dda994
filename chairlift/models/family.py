"""Data of a family of models, and a function that reads its ``config.json``.

Each family has one file beside this one. No other code depends on ``model_type``. Needs no torch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from chairlift.errors import ModelLoadError
from chairlift.kernels.routing import Routing

__all__ = [
    "EXPERT_KEYS",
    "EXPERT_NAMES",
    "MAX_CONTEXT",
    "ROPE_TYPES",
    "SPLIT_NAMES",
    "ExpertLayers",
    "Family",
    "Fields",
    "every_nth",
    "inner_names",
    "layer_types",
    "layer_windows",
    "pattern_windows",
    "read_experts",
    "sparse_layers",
]

MAX_CONTEXT = 2**27

ROPE_TYPES: Mapping[str, str] = {name: name for name in ("default", "dynamic", "linear", "llama3", "yarn")}
"""Values of ``rope_type`` in most families -> names here."""

SPLIT_NAMES: Mapping[str, tuple[str, ...]] = {
    "model.layers.*.self_attn.qkv_proj": tuple(f"model.layers.*.self_attn.{name}_proj" for name in "qkv"),
    "model.layers.*.mlp.gate_up_proj": ("model.layers.*.mlp.gate_proj", "model.layers.*.mlp.up_proj"),
}
"""Tensor names of checkpoints like Llama's: each projection is a tensor, and all other names are the same as here."""


def inner_names(prefix: str, *more: str) -> dict[str, tuple[str, ...]]:
    """Tensor names of a text model like Llama inside a larger one: ``model.`` is ``prefix``. ``more`` are layers of a
    decoder layer that Llama lacks."""
    own = ("input_layernorm", "post_attention_layernorm", "self_attn.o_proj", "mlp.down_proj", *more)
    whole = ("model.embed_tokens", "model.norm", *(f"model.layers.*.{name}" for name in own))
    found = {**SPLIT_NAMES, **{name: (name,) for name in whole}}
    return {layer: tuple(prefix + name.removeprefix("model.") for name in names) for layer, names in found.items()}


EXPERT_NAMES: Mapping[str, tuple[str, ...]] = {
    **SPLIT_NAMES,
    "model.layers.*.mlp.experts.gate_up_proj": (
        "model.layers.*.mlp.experts.#.gate_proj",
        "model.layers.*.mlp.experts.#.up_proj",
    ),
    "model.layers.*.mlp.experts.down_proj": ("model.layers.*.mlp.experts.#.down_proj",),
}
"""Tensor names with experts. ``#`` is the number of an expert; each of its projections is a tensor."""

EXPERT_KEYS = ("num_experts", "num_local_experts", "num_experts_per_tok")
"""Keys of ``config.json`` with the number of experts (two names), and the number per token."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLayers:
    """Layers that have experts instead of one MLP."""

    routing: Routing
    layers: tuple[bool, ...]
    """Per layer, whether it has experts."""
    intermediate_size: int
    """Inner width of an expert."""
    shared_size: int = 0
    """Inner width of an expert for all tokens; 0: there is none."""
    shared_gate: bool = False
    """Whether the result of that expert is multiplied by the sigmoid of a product (Qwen2-MoE)."""
    correction: bool = False
    """Whether a bias is added to the scores for the choice of experts, but not to their weights (DeepSeek-V3)."""
    bias: bool = False
    """Whether the router and the products of experts have biases (gpt-oss)."""
    clamp: tuple[float, float] | None = None
    """(alpha, limit) of clamped gates; see :func:`chairlift.kernels.experts.experts` (gpt-oss)."""


class Fields:
    """Checked access to the keys of a JSON object. Every error names the file, the key, the value and the range.

    ``defaults`` are used for keys that the file leaves out. ``names`` are the file's names of keys, where they differ.
    """

    def __init__(
        self,
        raw: Mapping[str, Any],
        where: str,
        defaults: Mapping[str, Any] | None = None,
        names: Mapping[str, str] | None = None,
    ) -> None:
        self.where = where
        self.raw: Mapping[str, Any] = raw
        """The file's own keys, without the defaults."""
        self._raw = {**(defaults or {}), **raw}
        self._names = names or {}

    def fail(self, problem: str) -> NoReturn:
        raise ModelLoadError(f"{self.where}: {problem}; the file is damaged or not a model that Chairlift supports")

    def name(self, key: str) -> str:
        """The file's name of a key."""
        return self._names.get(key, key)

    def get(self, key: str) -> Any:
        """The unchecked value; None if it is missing or null."""
        return self._raw.get(self.name(key))

    def integer(self, key: str, low: int, high: int, *, default: int | None = None) -> int:
        """An integer. ``default`` is used for a missing or null value; without it the key is required."""
        value = default if self.get(key) is None else self.get(key)
        if value is None:
            self.fail(f"{self.name(key)} is missing")
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            self.fail(f"{self.name(key)} must be a whole number from {low} to {high}, got {value!r:.80}")
        return int(value)

    def optional_integer(self, key: str, low: int, high: int) -> int | None:
        return None if self.get(key) is None else self.integer(key, low, high)

    def number(self, key: str, low: float, high: float, *, default: float | None = None) -> float:
        """A finite number above ``low`` and at most ``high``."""
        value = default if self.get(key) is None else self.get(key)
        if value is None:
            self.fail(f"{self.name(key)} is missing")
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or not low < value <= high:
            self.fail(f"{self.name(key)} must be a number above {low:g} and up to {high:g}, got {value!r:.80}")
        return float(value)

    def optional_number(self, key: str, low: float, high: float) -> float | None:
        return None if self.get(key) is None else self.number(key, low, high)

    def boolean(self, key: str, default: bool) -> bool:
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.fail(f"{self.name(key)} must be true or false, got {value!r:.80}")
        return bool(value)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Everything that is specific to one ``model_type``."""

    model_type: str
    architecture: str
    """Name of its class in transformers, for configs that Chairlift writes."""
    read: Callable[[Fields, int], Mapping[str, Any]]
    """(``config.json``, number of layers) -> fields of ModelConfig that differ between families."""
    defaults: Mapping[str, Any]
    """Defaults of transformers for keys that ``config.json`` leaves out."""
    models: str = ""
    """Names of published models, for ``docs/models.md``."""
    differences: str = ""
    """Differences from Llama, for ``docs/models.md``."""
    called_out: str = ""
    """Operations that have no native kernel, so that PyTorch computes them, for ``docs/models.md``."""
    keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Llama's names of keys -> the family's, where they differ."""
    activations: Mapping[str, str] = dataclasses.field(default_factory=lambda: {"silu": "swiglu", "swish": "swiglu"})
    """Values of ``hidden_act`` -> :attr:`ModelConfig.mlp`."""
    own_keys: tuple[str, ...] = ()
    """Keys that :attr:`read` uses. In the ``config.json`` of other families they are refused."""
    known_code: tuple[str, ...] = ()
    """Values of ``AutoModelForCausalLM`` in ``auto_map``: code that the family's checkpoints carry, and that computes
    what transformers' own class computes. It is never run, and neither is any other, which a note at load says."""
    rotary: bool = True
    """Whether q and k are rotated."""
    rope_types: Mapping[str, str] = dataclasses.field(default_factory=lambda: ROPE_TYPES)
    """Values of ``rope_type`` -> names here."""
    rope_keys: tuple[str, ...] = ()
    """Rotary parameters that only this family has."""
    rope_sections: tuple[int, ...] = ()
    """Numbers of frequencies for positions in time, height and width; a file's ``mrope_section`` replaces them. Empty:
    tokens have one position."""
    interleaved_sections: bool = False
    """Whether the frequencies of the three take turns."""
    partial_rotary: bool = False
    """Whether ``partial_rotary_factor`` is read: only the first dimensions of a head are rotated."""
    interleaved: bool = False
    """Whether a checkpoint pairs neighbouring dimensions of a head for the rotation, (0, 1), (2, 3), ..., instead of
    its halves. Rows of q and k are then reordered as they are read."""
    window_rope: bool = False
    """Whether ``rope_parameters`` are by layer type, and ``rope_scaling`` applies to full attention only."""
    tensors: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=lambda: SPLIT_NAMES)
    """Layers here (``*`` is a number) -> their names in a checkpoint, where they differ. Several names share the rows
    of one layer.

    A name with ``#``, the number of an expert, exists for each expert. Without it, stacked weights are one tensor [E,
    out, in].
    """
    qkv_by_head: bool = False
    """Whether q, k and v are one tensor with the rows of q, k and v of the first head, then of the second, ..."""
    transposed: tuple[str, ...] = ()
    """Last names of layers whose weights are stored as [in, out], or [E, in, out] if they are stacked."""
    paired_gates: bool = False
    """Whether stacked weights of gate and up have the rows of gate and up alternating."""
    renamed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Parameters here (``*`` is a number) -> their names in a checkpoint, if these are not a layer's name and
    ``.weight`` or ``.bias``."""
    encoder: str = ""
    """Image encoder in ``vision_config``: ``tiles`` (Idefics 3), ``patches`` (Qwen2.5-VL) or ``deep_patches``
    (Qwen3-VL). Empty: the family reads texts only."""
    text_type: str = ""
    """``model_type`` in ``text_config``, which has the keys of the text model. Empty: ``config.json`` has them."""
    flat_text: bool = False
    """Whether older files have the keys of the text model beside ``vision_config``."""
    other_names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Beginnings of tensor names in checkpoints of other versions -> those of :attr:`tensors`."""
    ignored_tensors: str = r"rotary_emb\.inv_freq"
    """Regular expression of tensors in old checkpoints that are computed and so not needed."""

    @property
    def sees_images(self) -> bool:
        """Whether the family has an image encoder."""
        return bool(self.encoder)


def every_nth(fields: Fields, layers: int) -> list[str]:
    """Layer types in which each ``sliding_window_pattern``-th layer has full attention, and the others have a
    window."""
    interval = fields.integer("sliding_window_pattern", 1, 1_024, default=4)
    return ["sliding_attention" if (layer + 1) % interval else "full_attention" for layer in range(layers)]


def layer_types(fields: Fields, layers: int) -> list[str] | None:
    """The checked value of ``layer_types``; None if it is missing."""
    kinds = fields.get("layer_types")
    if kinds is None:
        return None
    known = isinstance(kinds, list) and all(kind in ("full_attention", "sliding_attention") for kind in kinds)
    if not known or len(kinds) != layers:
        fields.fail(f"layer_types must name full_attention or sliding_attention for each of {layers} layers")
    return list(kinds)


def layer_windows(fields: Fields, layers: int, window: int | None, first: int) -> tuple[int | None, ...]:
    """``window`` for layers that ``layer_types`` calls sliding; without that key, for layers from ``first`` on."""
    kinds = layer_types(fields, layers)
    if kinds is None:
        return tuple(window if layer >= first else None for layer in range(layers))
    if window is None and "sliding_attention" in kinds:
        fields.fail("layer_types has sliding_attention, but use_sliding_window or sliding_window is not set")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def pattern_windows(fields: Fields, layers: int, window: int | None, pattern: list[str]) -> tuple[int | None, ...]:
    """``window`` for layers that ``layer_types`` calls sliding. ``pattern`` is used if the file has no such key."""
    kinds = layer_types(fields, layers) or pattern
    if window is None and "sliding_attention" in kinds:
        fields.fail("sliding_window is not set, but layer_types, or what stands in for it, has sliding_attention")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def sparse_layers(fields: Fields, layers: int) -> tuple[bool, ...]:
    """Per layer, whether it has experts: each ``decoder_sparse_step``-th, except those in ``mlp_only_layers``."""
    step = fields.integer("decoder_sparse_step", 1, 1_024, default=1)
    dense = fields.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(isinstance(each, bool) or not isinstance(each, int) for each in dense):
        fields.fail(f"mlp_only_layers must be a list of layer numbers, got {dense!r:.80}")
    return tuple((layer + 1) % step == 0 and layer not in dense for layer in range(layers))


def read_experts(
    fields: Fields,
    layers: tuple[bool, ...],
    size: int,
    *,
    count_keys: tuple[str, ...] = ("num_experts", "num_local_experts"),
    shared_size: int = 0,
    shared_gate: bool = False,
    correction: bool = False,
    bias: bool = False,
    clamp: tuple[float, float] | None = None,
    **routing: Any,
) -> ExpertLayers:
    """Experts of inner width ``size`` in these ``layers``. Their number is the first of ``count_keys`` that the file
    has.

    ``routing`` are fields of :class:`~chairlift.kernels.routing.Routing`. Raises
    :class:`~chairlift.errors.ModelLoadError` for numbers that do not fit together.
    """
    key = next((key for key in count_keys if fields.raw.get(key) is not None), count_keys[0])
    count = fields.integer(key, 1, 4_096)
    try:
        found = Routing(num_experts=count, top_k=fields.integer("num_experts_per_tok", 1, count), **routing)
    except ValueError as error:
        fields.fail(str(error))
    return ExpertLayers(
        routing=found,
        layers=layers,
        intermediate_size=size,
        shared_size=shared_size,
        shared_gate=shared_gate,
        correction=correction,
        bias=bias,
        clamp=clamp,
    )
