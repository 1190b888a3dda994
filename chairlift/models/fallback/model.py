"""A causal language model of transformers with the interface of :class:`~chairlift.models.causal_lm.CausalLM`.

Its layers run transformers' code over one flat batch [1, T] of several requests. The layers call an attention function
of this module, registered through transformers' ``AttentionInterface``, and this function uses the context of the step.
vLLM's Transformers backend works in the same way. The step's context is stored in a context variable, because some
models do not pass extra arguments on to attention.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn

from chairlift.errors import InvariantError, ModelLoadError
from chairlift.models.context import LayerCache, PagedContext
from chairlift.models.fallback.config import TransformersConfig

__all__ = [
    "ATTENTION",
    "AttentionCall",
    "TransformersLM",
    "attending",
    "body_of",
    "register_attention",
    "use_attention",
]

ATTENTION: Final = "chairlift"
"""Name under which Chairlift's attention function is registered with transformers."""

_HARMLESS: Final = frozenset(
    {
        *("cache_position", "cache", "is_causal", "logits_to_keep", "output_attentions", "output_hidden_states"),
        *("output_router_logits", "past_key_value", "past_key_values", "position_embeddings", "position_ids"),
        *("return_dict", "use_cache"),
    }
)
"""Names of arguments that models pass to attention and that do not change its result."""


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionCall:
    """One checked attention call of a layer: queries [T, Hq, Dk], keys [T, Hkv, Dk], values [T, Hkv, Dv]."""

    layer: int
    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    softcap: float | None
    sinks: Tensor | None
    mask: Tensor | None
    window: int | None
    """Sliding window that the layer passes as an argument, in tokens. Some layers pass no window although their mask
    has one."""


class Attends(Protocol):
    """Interface of an object that computes the attention calls of a forward pass; the result of each is [T, Hq, Dv]."""

    def attend(self, call: AttentionCall) -> Tensor: ...


_NOW: contextvars.ContextVar[Attends | Tensor | None] = contextvars.ContextVar("chairlift_transformers", default=None)
"""During a forward pass, the object that computes attention; during a projection to logits, the hidden states [1, R,
D]."""


@contextlib.contextmanager
def attending(who: Attends | Tensor) -> Iterator[None]:
    """Inside the ``with`` block, use ``who`` to compute the attention calls."""
    token = _NOW.set(who)
    try:
        yield
    finally:
        _NOW.reset(token)


def register_attention() -> None:
    """Register the attention function with transformers. Repeated calls change nothing."""
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(ATTENTION, _attention)


def use_attention(model: Any, name: str) -> None:
    """Set the attention function of all layers of a transformers model by its registered name."""
    for config in {id(each.config): each.config for each in model.modules() if hasattr(each, "config")}.values():
        config._attn_implementation_internal = name


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: query [1, Hq, T, Dk], key [1, Hkv, T, Dk], value [1, Hkv, T, Dv] -> [1, T, Hq,
    Dv]. Raises ModelLoadError for arguments that it does not support."""
    who = _NOW.get()
    name = type(module).__name__
    if who is None or isinstance(who, Tensor):
        raise InvariantError(f"{name} attends outside a step")
    unknown = sorted(key for key, given in kwargs.items() if given is not None and key not in _HARMLESS)
    if unknown or dropout or kwargs.get("is_causal") is False:
        settings = unknown or (["dropout"] if dropout else ["is_causal=False"])
        raise ModelLoadError(f"{name} calls attention with {', '.join(settings)}, which Chairlift does not support")
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int) or query.shape[0] != 1 or key.shape[2] != query.shape[2]:
        shapes = f"queries {list(query.shape)} and keys {list(key.shape)}"
        raise ModelLoadError(f"{name} (layer {layer}) attends with {shapes}; both must be of the same tokens, [1, T]")
    q, k, v = (each[0].transpose(0, 1) for each in (query, key, value))
    scale = float(q.shape[2] ** -0.5 if scaling is None else scaling)
    call = AttentionCall(layer, q, k.to(q.dtype), v.to(q.dtype), scale, softcap, s_aux, attention_mask, sliding_window)
    return who.attend(call).contiguous().unsqueeze(0), None


@dataclasses.dataclass(slots=True)
class _Step:
    """Computes the attention calls of one step with the step's context. Each layer must call once, in layer order."""

    ctx: PagedContext
    layers: list[LayerCache]
    done: int = 0

    def attend(self, call: AttentionCall) -> Tensor:
        if call.layer != self.done or call.layer >= len(self.layers):
            raise InvariantError(f"layer {call.layer} attends where layer {self.done} of {len(self.layers)} should")
        self.done += 1
        return self.ctx.attend(
            call.layer,
            call.q,
            call.k,
            call.v,
            scale=call.scale,
            window=self.layers[call.layer].window,
            cap=call.softcap,
            sinks=call.sinks,
        )


def body_of(hf: Any) -> Any:
    """The part of a transformers model that computes the input of the output head."""
    base = hf.model if hf.base_model is hf else hf.base_model  # Llama 4's class names a prefix that it does not have
    return getattr(base, "decoder", base)


class TransformersLM(nn.Module):
    """``model(token_ids[T], positions[T], ctx) -> hidden[T, D]`` and ``compute_logits(hidden[R, D]) -> [R, V]``.

    ``hf`` is a model of transformers with its weights. ``layers`` are the shapes of each layer's K and V per token.
    ``added_bytes`` are the bytes of second, packed copies of weights.
    """

    quantization: str | None = None
    rounds_floats = False
    """Whether numbers of the checkpoint were rounded to the model's dtype when they were loaded."""

    def __init__(self, config: TransformersConfig, hf: Any, layers: list[LayerCache], added_bytes: int = 0) -> None:
        super().__init__()
        self.config = config
        self.hf = hf
        self.layers = layers
        self._added_bytes = added_bytes
        self._body = body_of(hf)
        self._output_type: Any = None
        forward = self._body.forward

        def body(*args: Any, **kwargs: Any) -> Any:
            given = _NOW.get()
            return self._output_type(last_hidden_state=given) if isinstance(given, Tensor) else forward(*args, **kwargs)

        # Some classes change the logits after the head (caps, factors) in the forward pass of the whole model. Logits
        # are therefore computed by that forward pass, with a body that returns the given hidden states.
        self._body.forward = body

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of weights and hidden states."""
        found: torch.dtype = self.hf.dtype
        return found

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights. A tied head that has a second copy in memory is counted twice."""
        once = sum(parameter.nbytes for parameter in {id(each): each for each in self.parameters()}.values())
        return once + self._added_bytes

    def run(self, token_ids: Tensor, positions: Tensor, who: Attends) -> Tensor:
        """Hidden states [T, D] of a flat batch. ``who`` computes the attention calls."""
        with attending(who):
            out = self._body(input_ids=token_ids[None], position_ids=positions[None], use_cache=False)
        self._output_type = type(out)
        hidden: Tensor = out.last_hidden_state[0]
        return hidden

    def forward(self, token_ids: Tensor, positions: Tensor, ctx: PagedContext) -> Tensor:
        """Hidden states of all tokens of a step. ``token_ids`` and ``positions`` are int64."""
        step = _Step(ctx, self.layers)
        hidden = self.run(token_ids, positions, step)
        if step.done != len(self.layers):
            raise InvariantError(f"{step.done} of {len(self.layers)} layers attended")
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Logits of the next token, [R, V], computed from hidden states ``hidden`` [R, D]."""
        ids = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
        with attending(hidden[None]):
            logits: Tensor = self.hf(input_ids=ids, use_cache=False).logits[0]
        return logits

    def kv_cache_spec(self) -> list[LayerCache]:
        """Per layer, the shape of its K and V per token."""
        return self.layers
