"""Interface between a model and its caller: the flat batch.

A model is a function ``model(token_ids[T], positions[T], ctx) -> hidden[T, D]``. The tokens of all sequences form one
flat batch: there is no batch dimension and no padding. The model does not know which token belongs to which sequence.
It passes queries, keys and values to ``ctx``, which knows. In serving, ``ctx`` is a :class:`PagedContext` with block
tables (PagedAttention, Kwon et al., 2023); in training, a :class:`PackedContext` that separates the sequences of a
pack. Serving and training use the same model code.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from chairlift.errors import InvariantError
from chairlift.kernels import ops
from chairlift.kernels.recurrent import Cell, StatePart, StatePiece, plan_pieces, recur_packed, recur_paged

__all__ = ["AttentionContext", "BothWaysContext", "LayerCache", "LayerState", "PackedContext", "PagedContext"]


@dataclasses.dataclass(frozen=True, slots=True)
class LayerCache:
    """Shape of one attention layer's cache. Per token, K has ``num_kv_heads * head_dim`` elements, and so has V unless
    ``value_dim`` is set."""

    num_kv_heads: int
    head_dim: int
    window: int | None
    """Number of newest tokens that a query attends to, itself included (sliding window); None: all earlier tokens.
    Blocks with older tokens may be reused."""
    value_dim: int | None = None
    """Number of elements of one head of V, if it differs from ``head_dim``."""

    def token_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of one token's K and V in this layer, if they are stored as ``dtype``. In int8, each head also has a
        float32 scale and minimum."""
        extra = 8 if dtype == torch.int8 else 0
        widths = (self.head_dim, self.head_dim if self.value_dim is None else self.value_dim)
        return self.num_kv_heads * sum(width * dtype.itemsize + extra for width in widths)


@dataclasses.dataclass(frozen=True, slots=True)
class LayerState:
    """Shape of the state of one recurrent layer. The state's size per request does not depend on the length of the
    text."""

    parts: tuple[StatePart, ...]

    def part_bytes(self, dtype: torch.dtype) -> list[int]:
        """One entry per part of the state: bytes of this part, in a model of ``dtype``."""
        return [math.prod(part.shape) * (part.dtype or dtype).itemsize for part in self.parts]


class AttentionContext(Protocol):
    """Interface that a model calls for attention and recurrent layers. It knows which tokens of the flat batch belong
    to which sequence."""

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
        """Causal attention: ``q`` [T, Hq, Dh], ``k`` and ``v`` [T, Hkv, Dh] -> [T, Hq, Dh], all of one dtype.

        ``scale`` multiplies the scores. With ``cap``, a scaled score s becomes cap * tanh(s / cap). A query sees at
        most the ``window`` newest tokens, itself included. ``sinks`` [Hq] adds one logit to each head's softmax; this
        logit has no value vector.
        """
        ...

    def recur(self, layer: int, cell: Cell, *inputs: Tensor) -> Tensor:
        """Run ``cell`` of a recurrent layer over the new tokens of each sequence, starting from the sequence's state:
        inputs [T, ...] -> [T, width]."""
        ...


@dataclasses.dataclass(slots=True)
class PagedContext:
    """One serving step: N rows, each with the newest tokens of a sequence whose K and V are in blocks.

    Offsets and lengths are host integers, so that no layer waits for the device. A context serves one step only.
    """

    cu_seqlens: list[int]
    """[N + 1] offsets of the rows in the flat batch; the last is T."""
    seq_lens: list[int]
    """[N] number of tokens in the sequence of each row after this step (cached and new)."""
    block_tables: Tensor
    """int64 [groups, N, max_blocks]. Entries after a sequence's last block or before its sliding window are never
    read."""
    slot_mapping: Tensor
    """int64 [groups, T]: position in the cache, ``block * block_size + offset``, where each token's K and V are
    written."""
    kv_caches: Sequence[tuple[Tensor, ...]]
    """Per layer, its cache tensors: K and V, each [num_blocks, block_size, Hkv, Dh], where V may have another head
    width. A recurrent layer has the parts of its states instead, each [num_blocks, ...]."""
    layer_groups: list[int]
    """Layer index -> index of its cache group."""
    state_spans: Sequence[int | None] = ()
    """Per cache group, the number of positions that one block-table entry covers, for groups of recurrent states; None
    for other groups. See :class:`~chairlift.config.CacheGroup`."""
    _plans: dict[tuple[int, int | None], list[ops.PagedRow]] = dataclasses.field(default_factory=dict, init=False)
    _pieces: dict[int, list[StatePiece]] = dataclasses.field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        if len(self.cu_seqlens) != len(self.seq_lens) + 1 or self.cu_seqlens[0] != 0:
            raise InvariantError(f"cu_seqlens {self.cu_seqlens} must start at 0 and have one entry more than seq_lens")
        if len(self.kv_caches) != len(self.layer_groups):
            raise InvariantError(f"{len(self.kv_caches)} KV caches for {len(self.layer_groups)} layer groups")

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
        """Write K and V to their slots, then let each row attend to its own blocks. See :class:`AttentionContext`."""
        group = self.layer_groups[layer]
        key_cache, value_cache = self.kv_caches[layer]
        plan = self._plans.get((group, window))
        if plan is None:
            table = self.block_tables[group]
            block_size = key_cache.shape[1]
            plan = ops.plan_rows(self.cu_seqlens, self.seq_lens, table, block_size, window)
            self._plans[(group, window)] = plan
        ops.write_kv(key_cache, value_cache, self.slot_mapping[group], k, v)
        return ops.paged_attention(q, key_cache, value_cache, plan, scale=scale, window=window, cap=cap, sinks=sinks)

    def recur(self, layer: int, cell: Cell, *inputs: Tensor) -> Tensor:
        """Run ``cell`` from each row's cached state, and write the newest state to the row's block. See
        :class:`AttentionContext`."""
        group = self.layer_groups[layer]
        pieces = self._pieces.get(group)
        span = self.state_spans[group]
        if span is None:
            raise InvariantError(f"layer {layer} is recurrent, but its cache group {group} holds no states")
        if pieces is None:
            tables = self.block_tables[group].tolist()
            pieces = self._pieces[group] = plan_pieces(self.cu_seqlens, self.seq_lens, tables, span)
        return recur_paged(cell, inputs, self.kv_caches[layer], pieces)


@dataclasses.dataclass(slots=True)
class PackedContext:
    """A pack of whole sequences side by side, without a cache, for training, scoring and tests. Differentiable."""

    cu_seqlens: list[int]
    """[N + 1] offsets of the sequences in the flat batch; the last is T. Positions restart at 0 in each."""

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
        """Attend inside each sequence. See :class:`AttentionContext`."""
        return ops.packed_attention(q, k, v, self.cu_seqlens, scale=scale, window=window, cap=cap, sinks=sinks)

    def recur(self, layer: int, cell: Cell, *inputs: Tensor) -> Tensor:
        """Run ``cell`` over each sequence, starting from a state of zeros. See :class:`AttentionContext`."""
        return recur_packed(cell, inputs, self.cu_seqlens)


class BothWaysContext(PackedContext):
    """Whole texts side by side, as in :class:`PackedContext`, whose tokens also attend to later tokens."""

    __slots__ = ()

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
        """Attend inside each text. ``window`` is the number of tokens on each side, the query itself included; see
        :class:`AttentionContext`. Raises InvariantError for a cap or sinks, which no such model has."""
        if cap is not None or sinks is not None:
            raise InvariantError(f"layer {layer} sees later tokens and has a cap or sinks")
        sides = None if window is None else window - 1
        return ops.bidirectional_attention(q, k, v, self.cu_seqlens, scale=scale, window=sides)
