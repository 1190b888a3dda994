"""Attention inside the sequences of a pack, and a patch that makes Hugging Face models use it.

On a GPU, the variable-length kernel of FlashAttention (Dao, 2023) is used, from ``flash-attn`` or from PyTorch. PyTorch
has no such kernel for the CPU. There, the fused kernel is called once for each sequence, or for several sequences of
equal length (:func:`~chairlift.kernels.sdpa.packed_attention`). A [T, T] mask is never made.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Self, cast, get_args

import numpy as np
import torch
from torch import Tensor, nn

from chairlift.errors import ConfigError
from chairlift.kernels.recurrent import Cell, recur_packed
from chairlift.kernels.sdpa import packed_attention
from chairlift_train.layout import Layout

__all__ = ["Backend", "HFPatch", "VarlenContext", "attend", "patch_hf"]

Backend = Literal["auto", "flash", "torch", "segments"]
"""``flash``: the flash-attn package; ``torch``: ``torch.nn.attention.varlen``; ``segments``: one fused call per
sequence; ``auto``: the first of these that supports the given tensors."""

_NAMES = itertools.count(1)
_KINDS = frozenset({"full_attention", "sliding_attention"})
_REFUSED = {
    "softcap": "caps its scores",
    "s_aux": "has attention sinks",
    "position_bias": "adds a position bias",
    "cache": "reads a paged KV cache",
}
"""Argument of an attention function that :func:`attend` does not support -> what the layer does, for errors."""


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout,
    *,
    scale: float | None = None,
    window: int | None = None,
    cap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
    backend: Backend = "auto",
) -> Tensor:
    """Causal attention inside each sequence: ``q`` [T, Hq, Dh], ``k`` and ``v`` [T, Hkv, Dh] -> [T, Hq, Dh].

    The tensors have one floating-point dtype and one device. The result is differentiable. Hq must be a multiple of Hkv
    (grouped-query attention).

    - ``scale`` multiplies the scores (default: 1 / sqrt(Dh)).
    - ``window``: a query attends to at most this many tokens of its sequence, the newest ones, including its own.
    - ``cap``: a score s becomes ``cap`` * tanh(s / ``cap``), as in Gemma 2.
    - ``sinks`` [Hq]: an additional logit in the softmax of each head, as in gpt-oss.
    - ``dropout``: fraction of the attention weights that is dropped.

    Only the backend ``segments`` supports ``cap`` and ``sinks``. Raises ConfigError if the shapes do not match each
    other or the layout, and if the backend does not support these tensors.
    """
    if q.ndim != 3 or k.ndim != 3 or k.shape[:2] != v.shape[:2] or q.shape[0] != k.shape[0] or q.shape[1] % k.shape[1]:
        raise ConfigError(
            "attend takes q [T, Hq, Dh], k and v [T, Hkv, Dh] with Hq a multiple of Hkv, "
            f"got {list(q.shape)}, {list(k.shape)}, {list(v.shape)}"
        )
    if layout.num_tokens != q.shape[0]:
        raise ConfigError(f"the layout is for {layout.num_tokens} tokens, q has {q.shape[0]}")
    if window is not None and window < 1:
        raise ConfigError(f"window must be at least 1 token (the query's own), or None for all, got {window}")
    if backend not in get_args(Backend):
        raise ConfigError(f"backend must be one of {', '.join(get_args(Backend))}, got {backend!r}")
    scale = q.shape[2] ** -0.5 if scale is None else scale
    shaped = cap is not None or sinks is not None
    chosen = backend
    if backend == "auto":
        chosen = "segments" if shaped else _choose(q, v, dropout)
    if chosen == "segments":
        given: dict[str, Any] = {"scale": scale, "window": window, "cap": cap, "sinks": sinks}
        return packed_attention(q, k, v, layout.cu_seqlens, dropout=dropout, **given)
    if shaped:
        raise ConfigError(f"backend {chosen!r} supports neither cap nor sinks; use backend='segments' or 'auto'")
    if not q.is_cuda or (chosen == "torch" and dropout):
        raise ConfigError(
            f"backend {chosen!r} runs on CUDA tensors{', without dropout' if chosen == 'torch' else ''}; "
            f"got {q.device} and dropout {dropout}: use backend='auto'"
        )
    offsets = _device_offsets(layout.cu_seqlens, q.device)
    # For both GPU kernels, the window is the number of tokens before the query, without the query itself.
    sides = (-1 if window is None else window - 1, 0)
    lengths = (offsets, offsets, layout.max_seqlen, layout.max_seqlen)
    if chosen == "flash":
        flash = _flash_attn()
        if flash is None:
            raise ConfigError("backend 'flash' needs the flash-attn package; install it, or use backend='auto'")
        out = flash(q, k, v, *lengths, dropout_p=dropout, softmax_scale=scale, causal=True, window_size=sides)
    else:
        from torch.nn.attention.varlen import varlen_attn

        # PyTorch 2.11 has no such argument, and always lets several query heads share a key head.
        gqa: dict[str, Any] = {"enable_gqa": q.shape[1] != k.shape[1]} if _asks_for_gqa() else {}
        out = varlen_attn(q, k, v, *lengths, scale=scale, window_size=sides, **gqa)
    return cast(Tensor, out)


def _choose(q: Tensor, v: Tensor, dropout: float) -> Backend:
    """The fastest backend for these tensors. The GPU kernels support 16-bit floats and head sizes up to 256."""
    if not q.is_cuda or q.dtype not in (torch.float16, torch.bfloat16) or not q.shape[2] == v.shape[2] <= 256:
        return "segments"
    if _flash_attn() is not None:
        return "flash"
    return "segments" if dropout or not hasattr(torch.ops.aten, "_flash_attention_forward") else "torch"


@functools.cache
def _asks_for_gqa() -> bool:
    """Whether ``varlen_attn`` of this PyTorch must be told that several query heads share a key head."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


@functools.cache
def _flash_attn() -> Callable[..., Any] | None:
    try:
        found: Callable[..., Any] = importlib.import_module("flash_attn").flash_attn_varlen_func
    except (ImportError, AttributeError):
        return None
    return found


@functools.lru_cache(maxsize=16)
@torch.inference_mode(False)
def _device_offsets(cu_seqlens: tuple[int, ...], device: torch.device) -> Tensor:
    """Copy ``cu_seqlens`` to the device, as an int32 tensor [N + 1]. The result is cached, so that all layers of a
    forward pass share it."""
    return torch.tensor(cu_seqlens, dtype=torch.int32, device=device)


@dataclasses.dataclass(slots=True)
class VarlenContext:
    """Context with which Chairlift's own models compute the attention of a pack (an
    :class:`~chairlift.models.context.AttentionContext`)."""

    cu_seqlens: Sequence[int]
    """[N + 1] offsets of the sequences in the flat batch; the last offset is T. Empty sequences are ignored."""
    layout: Layout = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.layout = Layout(tuple(sorted(set(self.cu_seqlens))))

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        window: int | None,
        cap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attention inside each sequence: q [T, Hq, Dh], k and v [T, Hkv, Dh] -> [T, Hq, Dh], all of one dtype."""
        return attend(q, k, v, self.layout, scale=scale, window=window, cap=cap, sinks=sinks)

    def recur(self, layer: int, cell: Cell, *inputs: Tensor) -> Tensor:
        """Run a recurrent layer separately over each sequence, beginning with a zero state: inputs [T, ...] -> [T,
        width]."""
        return recur_packed(cell, inputs, self.layout.cu_seqlens)


class HFPatch:
    """Patch of a Hugging Face model that makes packed rows use :func:`attend`. Created by :func:`patch_hf`.

    The patch is a context manager: leaving the context undoes the patch, as :meth:`remove` does. A deep copy of the
    model, such as an average of its weights or a reference model, is patched too, and remains patched.
    """

    def __init__(self, model: Any, backend: Backend) -> None:
        from transformers.masking_utils import AttentionMaskInterface
        from transformers.modeling_utils import AttentionInterface

        self._refuse(model, backend)
        self.model = model
        self.backend = backend
        self.name = f"chairlift-packed-{next(_NAMES)}"
        self.layout: Layout | None = None
        """Layout of the sequences in the current forward pass. None if the row is not packed."""
        self._running = False
        self._copied = False
        self._calls = 0
        self._windows: set[int | None] = set()
        self._mask_windows: set[int] = set()
        self._layer_names = {module: name for name, module in model.named_modules()}
        self._parameters = _parameters(model)
        configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
        configs |= {id(sub): sub for c in list(configs.values()) for sub in _subconfigs(c)}
        self._before = [(config, config._attn_implementation_internal) for config in configs.values()]
        AttentionInterface.register(self.name, self._attention)
        AttentionMaskInterface.register(self.name, self._mask)
        for config in configs.values():
            config._attn_implementation_internal = self.name
        self._hooks = [
            model.register_forward_pre_hook(self._enter, with_kwargs=True),
            model.register_forward_hook(self._leave, with_kwargs=True, always_call=True),
        ]

    @staticmethod
    def _refuse(model: Any, backend: str) -> None:
        """Raise ConfigError if the model cannot be patched."""
        name = type(model).__name__
        if backend not in get_args(Backend):
            raise ConfigError(f"backend must be one of {', '.join(get_args(Backend))}, got {backend!r}")
        if not hasattr(model, "config") or not hasattr(model, "_can_set_attn_implementation"):
            raise ConfigError(f"patch_hf takes a transformers model (5.0 or later), got {name}")
        if not model._can_set_attn_implementation():
            raise ConfigError(f"{name} has no AttentionInterface for other attention functions; train it unpacked")
        if str(model.config._attn_implementation).startswith("chairlift-packed-"):
            raise ConfigError(f"this {name} is patched already; call remove() of the earlier patch first")
        kinds = getattr(model.config.get_text_config(), "layer_types", None) or ()
        for index, kind in enumerate(kinds):
            if kind not in _KINDS:
                raise ConfigError(
                    f"layer {index} of {name} is of kind {kind}, whose state would pass from one sequence into the "
                    f"next; only {' and '.join(sorted(_KINDS))} can be packed: train it unpacked"
                )
        if getattr(model, "_is_stateful", False):  # some versions of transformers have no layer_types
            raise ConfigError(
                f"{name} has a state that would be carried from one sequence into the next; train it unpacked"
            )

    def remove(self) -> None:
        """Undo the patch. A second call does nothing."""
        from transformers.masking_utils import AttentionMaskInterface
        from transformers.modeling_utils import AttentionInterface

        for hook in self._hooks:
            hook.remove()
        for config, before in self._before:
            config._attn_implementation_internal = before
        if not self._copied:
            AttentionInterface._global_mapping.pop(self.name, None)
            AttentionMaskInterface._global_mapping.pop(self.name, None)
        self._hooks = []
        self._before = []

    def __deepcopy__(self, memo: Any) -> Self:
        """Return this object itself: the hooks of a copied model use the same patch as the original model."""
        self._copied = True
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Hook before a forward pass: determine the layout of the packed sequences, once for all layers."""
        names, takes_more = self._parameters
        self.layout = _layout_of({**dict(zip(names, args, strict=False)), **kwargs})
        self._running = True
        self._calls = 0
        self._windows = set()
        self._mask_windows = set()
        if takes_more:
            # The layout is passed to the layers as an argument. With gradient checkpointing, a layer is computed again
            # in the backward pass, and must see the layout of its own forward pass, not of a later one.
            kwargs = {**kwargs, "packed_layout": self.layout}
        return args, kwargs

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Hook after a forward pass: check that :func:`attend` computed the attention of every layer."""
        packed = self.layout is not None and output is not None  # the output is None if the forward pass raised
        self.layout = None
        self._running = False
        name = type(module).__name__
        if packed and not self._calls:
            raise ConfigError(f"no layer of {name} used its attention interface, so its sequences may not be separated")
        if packed and self._mask_windows - self._windows:
            raise ConfigError(
                f"{name} has a window of {sorted(self._mask_windows)} in its mask, but its layers have the windows "
                f"{sorted(w for w in self._windows if w)}; it cannot be patched: train it unpacked"
            )

    def _attention(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        sliding_window: int | None = None,
        is_causal: bool | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """transformers' attention function: query [B, Hq, T, Dh], key and value [B, Hkv, T, Dh] -> [B, T, Hq, Dh]."""
        layer = self._layer_names.get(module, type(module).__name__)
        layout = self._layout_for(layer, query, kwargs)
        if layout is None:
            from transformers.integrations.sdpa_attention import sdpa_attention_forward

            return sdpa_attention_forward(
                module, query, key, value, attention_mask, dropout, scaling, is_causal, **kwargs
            )
        for name, reason in _REFUSED.items():
            if kwargs.get(name) is not None:
                raise ConfigError(f"{layer} {reason}, which packed attention cannot do; train this model unpacked")
        causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
        if not causal or kwargs.get("output_attentions"):
            what = "returns its attention weights" if causal else "is not causal"
            raise ConfigError(f"{layer} {what}, which packed attention cannot do; train this model unpacked")
        if attention_mask is not None or query.shape[0] != 1 or key.shape[2] != query.shape[2]:
            raise ConfigError(
                f"{layer} got queries {list(query.shape)}, keys {list(key.shape)} and "
                f"{'a' if attention_mask is not None else 'no'} mask; a packed row is [1, T] without mask and cache"
            )
        self._calls += 1
        self._windows.add(sliding_window)
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        out = attend(q, k, v, layout, scale=scaling, window=sliding_window, dropout=dropout, backend=self.backend)
        return out.unsqueeze(0), None

    def _layout_for(self, layer: str, query: Tensor, kwargs: dict[str, Any]) -> Layout | None:
        """Layout of the packed sequences for an attention call. None if the batch is not a packed row.

        With gradient checkpointing the call may belong to an earlier forward pass. If the model does not pass
        ``packed_layout`` to its layers, the layout then comes from the position ids among the layer's arguments, which
        the checkpoint keeps. They must agree with the layout of the forward pass while that runs.
        """
        if "packed_layout" in kwargs:
            given: Layout | None = kwargs.pop("packed_layout")
            return given
        kind = "activation" if hasattr(type(self.model), "is_activation_checkpointing") else "gradient"  # until 5.23
        recomputes = getattr(self.model, f"is_{kind}_checkpointing", False)
        if self._running and not recomputes:
            return self.layout
        positions = kwargs.get("position_ids") if recomputes else None
        found = None if positions is None else _layout_of({"input_ids": query[:, 0], "position_ids": positions})
        if found is None or (self._running and found != self.layout):
            raise ConfigError(f"{layer} ran outside a forward pass of the patched model; call the patched model itself")
        return found

    def _mask(self, *args: Any, **kwargs: Any) -> Any:
        """transformers' mask function: returns None for packed rows, which need no mask."""
        if not self._running:
            raise ConfigError("a part of the patched model was called outside its forward pass; call the patched model")
        if self.layout is None:
            from transformers.masking_utils import sdpa_mask

            return sdpa_mask(*args, **kwargs)
        if kwargs.get("use_vmap") or "allow_is_bidirectional_skip" in kwargs:
            raise ConfigError(f"{type(self.model).__name__} asks for more than a causal mask; train it unpacked")
        if kwargs.get("local_size") is not None:
            self._mask_windows.add(kwargs["local_size"])
        return None


def patch_hf(model: Any, backend: Backend = "auto") -> HFPatch:
    """Make a transformers model (5.0 or later) use :func:`attend` for packed rows [1, T].

    The boundaries of the sequences are read once per forward pass, from ``position_ids`` that restart at 0, and must
    agree with ``cu_seq_lens_q`` (or ``cu_seqlens``) if given. Other batches (several rows, a padding mask, decoding
    with a cache) use PyTorch's scaled-dot-product attention. Sliding windows are supported.

    Returns the patch, which is a context manager; ``remove()`` undoes it. Raises ConfigError for models that cannot be
    patched. When the model runs, ConfigError is raised in these cases:

    - a layer needs more than causal attention (the message names it),
    - an ``attention_mask`` is given with several sequences, because transformers then ignores the boundaries,
    - there are several packed rows,
    - positions do not restart at 0.

    :func:`~chairlift_train.isolation.check_isolation` tests that no sequence affects another.
    """
    return HFPatch(model, backend)


def _parameters(model: nn.Module) -> tuple[list[str], bool]:
    """Inspect the model's ``forward``. Returns (names of its parameters in order, whether it accepts other keyword
    arguments)."""
    import inspect

    parameters = inspect.signature(model.forward).parameters
    more = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    return list(parameters), more


def _subconfigs(config: Any) -> list[Any]:
    found = [getattr(config, name, None) for name in getattr(config, "sub_configs", ())]
    return [sub for sub in found if sub is not None]


def _layout_of(given: Mapping[str, Any]) -> Layout | None:
    """Layout of the sequences in the arguments of a forward pass. None if the arguments are not a packed row.

    Raises ConfigError if the boundaries are unclear.
    """
    tokens = given.get("input_ids")
    tokens = given.get("inputs_embeds") if tokens is None else tokens
    cache = given.get("cache") or given.get("past_key_values")  # the name until transformers 5.24
    if tokens is None or (cache is not None and cache.get_seq_length() > 0):
        return None
    rows, length = tokens.shape[:2]
    offsets = given.get("cu_seq_lens_q")
    offsets = given.get("cu_seqlens") if offsets is None else offsets
    positions = given.get("position_ids")
    if positions is None:
        if offsets is not None and len(offsets) > 2:
            raise ConfigError("cu_seqlens without position_ids: pass position_ids [1, T] that restart at 0 as well")
        return None
    if positions.ndim != 2:
        raise ConfigError(
            f"a packed row has position_ids [1, T], got {list(positions.shape)}; positions of several axes (M-RoPE) do "
            "not say where sequences begin: train unpacked"
        )
    ids = positions.cpu().numpy()
    jumps = np.diff(ids) != 1
    padded = given.get("attention_mask") is not None
    if rows > 1 or ids.shape[0] > 1:
        if jumps.any() and not padded:
            raise ConfigError(f"{rows} rows with restarting positions; join packed rows into one row [1, T]")
        return None
    starts = [0, *(np.flatnonzero(jumps[0]) + 1).tolist()]
    if len(starts) == 1:
        return None if padded else Layout.of([length])
    mask = given.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.ndim == 2 and not mask.all():
        kept = ids[0, mask[0, -length:].bool().cpu().numpy()] if mask.shape[1] >= length else ids[0]
        if (np.diff(kept) == 1).all():  # a single sequence with padding
            return None
    if ids[0, starts].any():
        raise ConfigError(f"positions jump at tokens {starts[1:9]} without restarting at 0; every sequence starts at 0")
    if padded:
        raise ConfigError(
            f"an attention_mask with {len(starts)} packed sequences: transformers then ignores their boundaries, even "
            "for a mask of ones; pass no mask"
        )
    layout = Layout((*starts, length))
    if offsets is not None and tuple(int(x) for x in offsets) != layout.cu_seqlens:
        raise ConfigError(f"cu_seqlens and position_ids disagree: {offsets}, but positions restart at {starts}")
    return layout
