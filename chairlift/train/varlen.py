"""Attention inside the sequences of a pack, and Hugging Face models that use it.

On a GPU this is FlashAttention's variable-length kernel (Dao, 2023), from ``flash-attn`` or PyTorch. PyTorch has none
for the CPU: there, every sequence is a call of its own to the fused kernel, or shares one with others of its length
(:func:`~chairlift.kernels.sdpa.packed_attention`), and no [T, T] mask is made.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Self, cast, get_args

import numpy as np
import torch
from torch import Tensor, nn

from chairlift.errors import ConfigError
from chairlift.kernels.recurrent import Cell, recur_packed
from chairlift.kernels.sdpa import packed_attention
from chairlift.train.layout import Layout

__all__ = ["Backend", "HFPatch", "VarlenContext", "attend", "patch_hf"]

Backend = Literal["auto", "flash", "torch", "segments"]
"""``flash``: the flash-attn package; ``torch``: ``torch.nn.attention.varlen``; ``segments``: one fused call per
sequence; ``auto``: the first of them that takes these tensors."""

_NAMES = itertools.count(1)
_KINDS = frozenset({"full_attention", "sliding_attention"})
_REFUSED = {
    "softcap": "caps its scores",
    "s_aux": "has attention sinks",
    "position_bias": "adds a position bias",
    "cache": "reads a paged KV cache",
}
"""Arguments of attention functions that :func:`attend` has no equivalent for."""


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

    One floating dtype, one device; differentiable. Hq must be a multiple of Hkv (grouped-query attention). ``scale``
    multiplies the scores (default: 1 / sqrt(Dh)); a query sees at most the ``window`` newest tokens of its sequence,
    itself included; ``dropout`` is the share of attention weights dropped. A score s becomes ``cap`` tanh(s / ``cap``)
    (Gemma 2), ``sinks`` [Hq] are one more logit in each head's softmax (gpt-oss): both by ``segments`` only. Raises
    ConfigError for shapes that do not fit each other or the layout, and for a backend that cannot run on these tensors.
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
    chosen = ("segments" if shaped else _choose(q, v, dropout)) if backend == "auto" else backend
    if chosen == "segments":
        given: dict[str, Any] = {"scale": scale, "window": window, "cap": cap, "sinks": sinks}
        return packed_attention(q, k, v, layout.cu_seqlens, dropout=dropout, **given)
    if shaped:
        raise ConfigError(f"backend {chosen!r} knows neither cap nor sinks; use backend='segments' or 'auto'")
    if not q.is_cuda or (chosen == "torch" and dropout):
        raise ConfigError(
            f"backend {chosen!r} runs on CUDA tensors{', without dropout' if chosen == 'torch' else ''}; "
            f"got {q.device} and dropout {dropout}: use backend='auto'"
        )
    offsets = _device_offsets(layout.cu_seqlens, q.device)
    # Both kernels count the tokens to the left of the query, without the query itself.
    sides = (-1 if window is None else window - 1, 0)
    lengths = (offsets, offsets, layout.max_seqlen, layout.max_seqlen)
    if chosen == "flash":
        flash = _flash_attn()
        if flash is None:
            raise ConfigError("backend 'flash' needs the flash-attn package; install it, or use backend='auto'")
        out = flash(q, k, v, *lengths, dropout_p=dropout, softmax_scale=scale, causal=True, window_size=sides)
    else:
        from torch.nn.attention.varlen import varlen_attn

        gqa = q.shape[1] != k.shape[1]
        out = varlen_attn(q, k, v, *lengths, scale=scale, window_size=sides, enable_gqa=gqa)
    return cast(Tensor, out)


def _choose(q: Tensor, v: Tensor, dropout: float) -> Backend:
    """The fastest backend for these tensors. The GPU kernels take 16-bit floats and at most 256 numbers per head."""
    if not q.is_cuda or q.dtype not in (torch.float16, torch.bfloat16) or not q.shape[2] == v.shape[2] <= 256:
        return "segments"
    if _flash_attn() is not None:
        return "flash"
    return "segments" if dropout or not hasattr(torch.ops.aten, "_flash_attention_forward") else "torch"


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
    """int32 [N + 1] on the device: all layers of a forward pass share one copy."""
    return torch.tensor(cu_seqlens, dtype=torch.int32, device=device)


@dataclasses.dataclass(slots=True)
class VarlenContext:
    """Attention of a pack in Chairlift's own models (an :class:`~chairlift.models.context.AttentionContext`)."""

    cu_seqlens: Sequence[int]
    """[N + 1] offsets of the sequences in the flat batch; the last is T. Empty sequences take no part."""
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
        """Attend inside each sequence: q [T, Hq, Dh], k and v [T, Hkv, Dh] -> [T, Hq, Dh], one dtype."""
        return attend(q, k, v, self.layout, scale=scale, window=window, cap=cap, sinks=sinks)

    def recur(self, layer: int, cell: Cell, *inputs: Tensor) -> Tensor:
        """Run a recurrent layer over each sequence from a state of zeros: inputs [T, ...] -> [T, width]."""
        return recur_packed(cell, inputs, self.layout.cu_seqlens)


class HFPatch:
    """A Hugging Face model whose packed rows run through :func:`attend`; made by :func:`patch_hf`.

    A context manager: leaving it undoes the patch, as :meth:`remove` does. A deep copy of the model (an average of its
    weights, a reference) is patched too, and stays so.
    """

    def __init__(self, model: Any, backend: Backend) -> None:
        from transformers.masking_utils import AttentionMaskInterface
        from transformers.modeling_utils import AttentionInterface

        self._refuse(model, backend)
        self.model = model
        self.backend = backend
        self.name = f"chairlift-packed-{next(_NAMES)}"
        self.layout: Layout | None = None
        """Layout of the running forward pass; None when it is not packed."""
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
        """Raise ConfigError for models that cannot be patched."""
        name = type(model).__name__
        if backend not in get_args(Backend):
            raise ConfigError(f"backend must be one of {', '.join(get_args(Backend))}, got {backend!r}")
        if not hasattr(model, "config") or not hasattr(model, "_can_set_attn_implementation"):
            raise ConfigError(f"patch_hf takes a transformers model (5.0 or later), got {name}")
        if not model._can_set_attn_implementation():
            raise ConfigError(f"{name} does not let others attend for it (no AttentionInterface); train it unpacked")
        if str(model.config._attn_implementation).startswith("chairlift-packed-"):
            raise ConfigError(f"this {name} is patched already; call remove() of the earlier patch first")
        kinds = getattr(model.config.get_text_config(), "layer_types", None) or ()
        for index, kind in enumerate(kinds):
            if kind not in _KINDS:
                raise ConfigError(
                    f"layer {index} of {name} is of kind {kind}, whose state would run on from one sequence into the "
                    f"next; only {' and '.join(sorted(_KINDS))} can be packed: train it unpacked"
                )
        if getattr(model, "_is_stateful", False):  # not every version of transformers names the kinds of its layers
            raise ConfigError(
                f"{name} has a state that would run on from one sequence into the next; train it unpacked"
            )

    def remove(self) -> None:
        """Undo the patch. Safe to call twice."""
        from transformers.masking_utils import AttentionMaskInterface
        from transformers.modeling_utils import AttentionInterface

        for hook in self._hooks:
            hook.remove()
        for config, before in self._before:
            config._attn_implementation_internal = before
        if not self._copied:
            AttentionInterface._global_mapping.pop(self.name, None)
            AttentionMaskInterface._global_mapping.pop(self.name, None)
        self._hooks, self._before = [], []

    def __deepcopy__(self, memo: Any) -> Self:
        """Hooks of a copied model call this object too: its state is of one forward pass, of either model."""
        self._copied = True
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Hook before a forward pass: find the layout, once for all layers."""
        names, takes_more = self._parameters
        self.layout = _layout_of({**dict(zip(names, args, strict=False)), **kwargs})
        self._running, self._calls = True, 0
        self._windows, self._mask_windows = set(), set()
        if takes_more:
            # Travels to the layers with the call, so that a layer computed again in the backward pass (gradient
            # checkpointing) sees the layout of its own forward pass and not that of a later one.
            kwargs = {**kwargs, "packed_layout": self.layout}
        return args, kwargs

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Hook after a forward pass: check that :func:`attend` computed the attention of every layer."""
        packed = self.layout is not None and output is not None  # None: the forward pass has raised
        self.layout, self._running = None, False
        name = type(module).__name__
        if packed and not self._calls:
            raise ConfigError(f"no layer of {name} used its attention interface, so its sequences may not be apart")
        if packed and self._mask_windows - self._windows:
            raise ConfigError(
                f"{name} hides tokens behind a window of {sorted(self._mask_windows)} by its mask, and its layers name "
                f"windows {sorted(w for w in self._windows if w)}; it cannot be patched: train it unpacked"
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
        if "packed_layout" in kwargs:
            layout = kwargs.pop("packed_layout")
        elif not self._running or getattr(self.model, "is_gradient_checkpointing", False):
            raise ConfigError(f"{layer} ran outside a forward pass of the patched model; call the patched model itself")
        else:
            layout = self.layout
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

    def _mask(self, *args: Any, **kwargs: Any) -> Any:
        """transformers' mask function: packed rows need none."""
        if not self._running:
            raise ConfigError("a part of the patched model was called by itself; call the patched model")
        if self.layout is None:
            from transformers.masking_utils import sdpa_mask

            return sdpa_mask(*args, **kwargs)
        if kwargs.get("use_vmap") or "allow_is_bidirectional_skip" in kwargs:
            raise ConfigError(f"{type(self.model).__name__} asks for more than a causal mask; train it unpacked")
        if kwargs.get("local_size") is not None:
            self._mask_windows.add(kwargs["local_size"])
        return None


def patch_hf(model: Any, backend: Backend = "auto") -> HFPatch:
    """Let a transformers model (5.0 or later) attend by :func:`attend` where a row [1, T] is packed.

    Where the sequences lie is read once per forward pass: from ``cu_seq_lens_q`` (or ``cu_seqlens``) if given, else
    from ``position_ids`` that restart at 0. Other batches (several rows, a padding mask, decoding with a cache) run by
    PyTorch's scaled-dot-product attention as before. Sliding windows are honoured.

    Returns the patch: ``remove()`` undoes it, and it is a context manager. Raises ConfigError for models that cannot be
    packed; and when the model runs, for layers that need more than causal attention (named in the message), for an
    ``attention_mask`` beside several sequences (transformers drops the boundaries then), for several packed rows, and
    for positions that do not restart at 0. Use :func:`~chairlift.train.isolation.check_isolation` to be sure.
    """
    return HFPatch(model, backend)


def _parameters(model: nn.Module) -> tuple[list[str], bool]:
    """Names of the parameters of ``forward`` in order, and whether it takes others by keyword."""
    import inspect

    parameters = inspect.signature(model.forward).parameters
    more = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    return list(parameters), more


def _subconfigs(config: Any) -> list[Any]:
    found = [getattr(config, name, None) for name in getattr(config, "sub_configs", ())]
    return [sub for sub in found if sub is not None]


def _layout_of(given: Mapping[str, Any]) -> Layout | None:
    """Layout of this call's sequences; None if it is no packed row. Raises ConfigError if that is unclear."""
    tokens = given.get("input_ids")
    tokens = given.get("inputs_embeds") if tokens is None else tokens
    cache = given.get("cache") or given.get("past_key_values")  # until transformers 5.24
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
        if (np.diff(kept) == 1).all():  # one sequence, and padding
            return None
    if ids[0, starts].any():
        raise ConfigError(f"positions jump at tokens {starts[1:9]} without restarting at 0; every sequence starts at 0")
    if padded:
        raise ConfigError(
            f"an attention_mask beside {len(starts)} packed sequences: transformers drops their boundaries then, even "
            "for a mask of ones; leave the mask away"
        )
    layout = Layout((*starts, length))
    if offsets is not None and tuple(int(x) for x in offsets) != layout.cu_seqlens:
        raise ConfigError(f"cu_seqlens and position_ids disagree: {offsets}, but positions restart at {starts}")
    return layout
