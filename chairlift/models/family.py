"""Data that describes a family of models, and the function that reads its ``config.json``.

Each family has one file in this directory. No other code depends on ``model_type``. The module does not import torch.
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
    "NotNative",
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
"""Value of ``rope_type`` in most families -> its name in this package."""

SPLIT_NAMES: Mapping[str, tuple[str, ...]] = {
    "model.layers.*.self_attn.qkv_proj": tuple(f"model.layers.*.self_attn.{name}_proj" for name in "qkv"),
    "model.layers.*.mlp.gate_up_proj": ("model.layers.*.mlp.gate_proj", "model.layers.*.mlp.up_proj"),
}
"""Layer name in this package -> tensor names in checkpoints like Llama's, where q, k, v, gate and up are separate
tensors. Layers that are not listed have the same name in the checkpoint."""


def inner_names(prefix: str, *more: str) -> dict[str, tuple[str, ...]]:
    """Tensor names of a Llama-like text model inside a larger model, where ``prefix`` replaces ``model.``. ``more`` are
    names of layers inside a decoder layer that Llama does not have."""
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
"""Like :data:`SPLIT_NAMES`, for models with experts: ``#`` stands for the number of an expert. Each projection of an
expert is a separate tensor."""

EXPERT_KEYS = ("num_experts", "num_local_experts", "num_experts_per_tok")
"""Keys of ``config.json``: two names for the number of experts, then the number of experts per token."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLayers:
    """The layers that have experts instead of one MLP, and the shape of the experts."""

    routing: Routing
    layers: tuple[bool, ...]
    """One entry per layer: whether the layer has experts."""
    intermediate_size: int
    """Inner width of one expert's MLP."""
    shared_size: int = 0
    """Inner width of the shared expert's MLP, which every token passes; 0 if there is no shared expert."""
    shared_gate: bool = False
    """Whether the shared expert's output is multiplied by a gate: the sigmoid of a linear layer (Qwen2-MoE)."""
    correction: bool = False
    """Whether a learned bias is added to the scores when experts are chosen. The bias does not change the experts'
    weights (DeepSeek-V3)."""
    bias: bool = False
    """Whether the router and the experts' linear layers have biases (gpt-oss)."""
    clamp: tuple[float, float] | None = None
    """(alpha, limit) of clamped gates; see :func:`chairlift.kernels.experts.experts` (gpt-oss)."""
    latent_size: int = 0
    """Width of the experts' inputs and results, if two additional linear layers convert the hidden size to this width
    and back (Nemotron 3); 0: the model's hidden size."""


class NotNative(ModelLoadError):
    """``config.json`` asks for a computation that the native family lacks. transformers may have it.

    ``key`` is the key of the file that asks for it, if transformers may ignore this key in some families; otherwise
    None.
    """

    def __init__(self, message: str, key: str | None = None) -> None:
        super().__init__(message)
        self.key = key


class Fields:
    """Checked access to the keys of a JSON object. Every error message names the file, the key, the value and the
    allowed range.

    ``defaults`` are used for keys that the file leaves out. ``names`` maps key -> the file's own name of the key, where
    they differ. With ``either``, a file that has no such name may have the key itself.
    """

    def __init__(
        self,
        raw: Mapping[str, Any],
        where: str,
        defaults: Mapping[str, Any] | None = None,
        names: Mapping[str, str] | None = None,
        *,
        either: bool = False,
    ) -> None:
        self.where = where
        self.raw: Mapping[str, Any] = raw
        """Keys and values that the file itself has, without the defaults."""
        self._raw = {**(defaults or {}), **raw}
        self._names = {
            key: key if either and key in raw and name not in raw else name for key, name in (names or {}).items()
        }

    def fail(self, problem: str) -> NoReturn:
        raise ModelLoadError(f"{self.where}: {problem}; the file is damaged or not a model that Chairlift supports")

    def name(self, key: str) -> str:
        """Name that the file uses for ``key``."""
        return self._names.get(key, key)

    def get(self, key: str) -> Any:
        """The unchecked value of ``key``; None if it is missing or null."""
        return self._raw.get(self.name(key))

    def integer(self, key: str, low: int, high: int, *, default: int | None = None) -> int:
        """Integer value of ``key``, from ``low`` to ``high``. A missing or null value gives ``default``; without a
        default the key is required."""
        value = default if self.get(key) is None else self.get(key)
        if value is None:
            self.fail(f"{self.name(key)} is missing")
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            self.fail(f"{self.name(key)} must be a whole number from {low} to {high}, got {value!r:.80}")
        return int(value)

    def optional_integer(self, key: str, low: int, high: int) -> int | None:
        return None if self.get(key) is None else self.integer(key, low, high)

    def number(self, key: str, low: float, high: float, *, default: float | None = None) -> float:
        """Value of ``key`` as a finite number above ``low`` and at most ``high``."""
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
    """Name of the family's class in transformers. It is written into configs that Chairlift creates."""
    read: Callable[[Fields, int], Mapping[str, Any]]
    """Function from (``config.json``, number of layers) to the fields of ModelConfig that differ between families."""
    defaults: Mapping[str, Any]
    """Key of ``config.json`` -> transformers' default, for keys that a file may leave out."""
    models: str = ""
    """Names of published models of the family. The text appears in ``docs/models.md``."""
    differences: str = ""
    """How the network differs from Llama. The text appears in ``docs/models.md``."""
    called_out: str = ""
    """Names of operations for which there is no native kernel, so that PyTorch computes them. The text appears in
    ``docs/models.md``."""
    keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Llama's key of ``config.json`` -> this family's key, where they differ."""
    either_key: bool = False
    """Whether files may have Llama's keys in place of those in :attr:`keys`, as transformers 5 saves them."""
    activations: Mapping[str, str] = dataclasses.field(default_factory=lambda: {"silu": "swiglu", "swish": "swiglu"})
    """Value of ``hidden_act`` in a ``config.json`` -> value of :attr:`NetworkConfig.mlp`."""
    own_keys: tuple[str, ...] = ()
    """Keys that :attr:`read` uses. They are refused in the ``config.json`` of other families."""
    known_code: tuple[str, ...] = ()
    """Values of ``AutoModelForCausalLM`` in ``auto_map`` that need no note. They name code in the family's checkpoints
    that computes the same as transformers' own class. Code from a checkpoint is never run; for any other value, a note
    at load says this."""
    rotary: bool = True
    """Whether the attention layers rotate q and k."""
    rope_types: Mapping[str, str] = dataclasses.field(default_factory=lambda: ROPE_TYPES)
    """Value of ``rope_type`` in a file -> name of this rotation in this package."""
    rope_keys: tuple[str, ...] = ()
    """Keys of a file's rotary parameters that only this family has."""
    rope_sections: tuple[int, ...] = ()
    """Number of rotary frequencies for each of the positions in time, height and width. ``mrope_section`` in a file
    replaces them. Empty: a token has only one position."""
    interleaved_sections: bool = False
    """Whether the frequencies for time, height and width alternate."""
    partial_rotary: bool = False
    """Whether ``partial_rotary_factor`` is read: only the first dimensions of a head are rotated."""
    interleaved: bool = False
    """Whether a checkpoint pairs neighbouring dimensions of a head for the rotation, (0, 1), (2, 3), ..., instead of
    its halves. If so, the rows of q and k are reordered when the checkpoint is read."""
    window_rope: bool = False
    """Whether ``rope_parameters`` has one entry per layer type, and ``rope_scaling`` applies to full attention only."""
    tensors: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=lambda: SPLIT_NAMES)
    """Layer name in this package (``*`` is a layer number) -> tensor names in a checkpoint, where they differ. Several
    tensors together fill the rows of one layer.

    A name with ``#`` (the number of an expert) means one tensor per expert. Without ``#``, the weights of all experts
    are one tensor [E, out, in].
    """
    block_tensors: Mapping[str, Mapping[str, tuple[str, ...]]] = dataclasses.field(default_factory=dict)
    """Value of :attr:`NetworkConfig.block` -> entries that replace those of :attr:`tensors` in such models."""
    qkv_by_head: bool = False
    """Whether q, k and v are one tensor, ordered by head of k and v: the rows of the queries that share the first head,
    its k and its v, then of the second, and so on."""
    transposed: tuple[str, ...] = ()
    """Last parts of the names of layers whose weights are stored as [in, out], or as [E, in, out] for experts."""
    paired_gates: bool = False
    """Whether the rows of gate and up alternate in the stacked weights of experts."""
    module_prefix: tuple[str, str] = ("", "")
    """(beginning of tensor names in a checkpoint, beginning of the modules' names in transformers' model), where they
    differ. Adapters have the names of modules."""
    renamed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Parameter name in this package (``*`` is a layer number) -> name in a checkpoint. ``.weight`` and ``.bias`` of a
    layer in :attr:`tensors` need no entry."""
    encoder: str = ""
    """Image encoder in ``vision_config``: ``tiles`` (Idefics 3), ``clip`` (LLaVA), ``pooled`` (Gemma 3),
    ``plain_patches`` (Qwen2-VL), ``patches`` (Qwen2.5-VL), ``deep_patches`` (Qwen3-VL) or ``learned_patches``
    (Qwen3.5), ``aspect_tiles``
    (InternVL) or ``lines`` (Mistral 3). Empty: the family has no image encoder."""
    text_type: str = ""
    """``model_type`` of ``text_config``, which holds the text model's keys. Empty: ``config.json`` itself holds
    them."""
    text_variants: Mapping[str, Family] = dataclasses.field(default_factory=dict)
    """Other ``model_type`` of ``text_config`` -> the family as which a config with such a text model is read. The names
    of tensors are those of this family."""
    flat_text: bool = False
    """Whether older ``config.json`` files have the text model's keys at top level, next to ``vision_config``."""
    library_type: str = ""
    """``model_type`` of the family whose names of layers transformers' own class has, if publishers use others.
    Adapters may use both."""
    other_names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Prefix of tensor names in checkpoints of other versions -> the prefix that :attr:`tensors` uses."""
    ignored_tensors: str = r"rotary_emb\.inv_freq"
    """Regular expression of tensor names in old checkpoints that are ignored, because their values are computed
    here."""

    @property
    def sees_images(self) -> bool:
        """Whether the family has an image encoder."""
        return bool(self.encoder)


def every_nth(fields: Fields, layers: int) -> list[str]:
    """Type of each layer: every ``sliding_window_pattern``-th layer has full attention, all other layers have a sliding
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
    """Per layer, ``window`` if ``layer_types`` calls it sliding, otherwise None. Without ``layer_types``, the layers
    from ``first`` on have the window."""
    kinds = layer_types(fields, layers)
    if kinds is None:
        return tuple(window if layer >= first else None for layer in range(layers))
    if window is None and "sliding_attention" in kinds:
        fields.fail("layer_types has sliding_attention, but use_sliding_window or sliding_window is not set")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def pattern_windows(fields: Fields, layers: int, window: int | None, pattern: list[str]) -> tuple[int | None, ...]:
    """Per layer, ``window`` if ``layer_types`` calls it sliding, otherwise None. ``pattern`` replaces the key if the
    file does not have it."""
    kinds = layer_types(fields, layers) or pattern
    if window is None and "sliding_attention" in kinds:
        fields.fail("sliding_window is not set, but layer_types (or its default) has sliding_attention")
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
    latent_size: int = 0,
    **routing: Any,
) -> ExpertLayers:
    """Read the settings of experts of inner width ``size``; ``layers`` says per layer whether it has experts. The
    number of experts is the value of the first of ``count_keys`` that the file has.

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
        latent_size=latent_size,
    )
