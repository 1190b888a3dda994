"""Paged and packed attention with torch's fused scaled-dot-product attention.

Two properties of that kernel are used. It accepts any strides, so a group of query heads shares its KV head through a
stride of zero instead of a copy. It reads only the tensors passed to it, so keys outside a sequence or before its
window are excluded by slicing. A mask is needed only for rows that start in the middle of their sequence, for at most
:data:`QUERY_TILE` rows at a time. The kernel supports neither capped scores nor sinks; layers with these use attention
in plain torch.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

__all__ = [
    "QUERY_TILE",
    "PagedRow",
    "bidirectional_attention",
    "packed_attention",
    "paged_attention",
    "plan_rows",
]

QUERY_TILE = 256
"""Maximum number of query rows for which one attention mask is made."""
SHORT = 64
"""Maximum length of a short segment, in tokens. Short segments of similar length share a call; longer ones share it
only if their lengths are equal."""
_STEP = 8
"""The lengths of the segments that share a call differ by less than this number of tokens."""
_COPY = 128
"""Cost of one call of torch's attention, given as the number of rows that could be copied in the same time. It decides
whether rows are copied to save calls."""


@dataclasses.dataclass(frozen=True, slots=True)
class PagedRow:
    """One sequence in a step: its queries, and the blocks with the keys that they need.

    It is created once per step and cache group, and used by every layer of the group.
    """

    start: int
    """Index of the sequence's first query in the flat batch."""
    num_queries: int
    """Number of queries. They are the newest tokens of the sequence."""
    num_keys: int
    """Number of keys that the queries need: all keys of the sequence, except those before the first query's window."""
    skip: int
    """Number of keys in the first gathered block that are before the window."""
    block_ids: Tensor
    """int64 [blocks], ids of the blocks that hold the keys that the queries need."""


def plan_rows(
    cu_seqlens: Sequence[int], seq_lens: Sequence[int], block_table: Tensor, block_size: int, window: int | None
) -> list[PagedRow]:
    """Turn a step's offsets, lengths and block table [N, max_blocks] into one :class:`PagedRow` per sequence."""
    rows: list[PagedRow] = []
    start = cu_seqlens[0]
    for i, (end, seq_len) in enumerate(zip(cu_seqlens[1:], seq_lens, strict=True)):
        num_queries = end - start
        if num_queries:
            low = 0 if window is None else max(0, seq_len - num_queries - window + 1)
            first_block = low // block_size
            ids = block_table[i, first_block : -(-seq_len // block_size)]
            rows.append(PagedRow(start, num_queries, seq_len - low, low - first_block * block_size, ids))
        start = end
    return rows


def paged_attention(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    rows: Sequence[PagedRow],
    *,
    scale: float,
    window: int | None,
    cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of each row's queries over its blocks (PagedAttention: Kwon et al., 2023).

    ``q`` is [T, Hq, Dh], the caches [blocks, block_size, Hkv, Dh]; returns [T, Hq, Dh]. If values have another width
    than keys, the result has the width of the values. The new keys and values must have been written. A score s becomes
    ``cap`` tanh(s / ``cap``) (Gemma 2). ``sinks`` [Hq] adds one logit to the softmax of each head; this logit has no
    value vector (gpt-oss). Not differentiable.
    """
    shape = _Shape(scale, window, cap, sinks)
    num_heads, head_dim = q.shape[1:]
    num_kv_heads, value_dim = value_cache.shape[2:]
    group = num_heads // num_kv_heads
    width = num_kv_heads * head_dim
    value_width = num_kv_heads * value_dim
    # A query row is viewed as [1, Hkv, group, Dh]: the query heads that share a KV head are the rows of one small
    # matmul.
    decode_rows = q.reshape(-1, 1, num_kv_heads, group, head_dim)
    strides = (0, head_dim, width, 1)
    value_strides = (0, value_dim, value_width, 1)
    outputs: list[Tensor] = []
    for row in rows:
        # The gathered keys are newly allocated, contiguous memory, so that a single as_strided can view, slice and
        # transpose them.
        size = (1, num_kv_heads, row.num_keys)
        keys = key_cache.index_select(0, row.block_ids).as_strided((*size, head_dim), strides, row.skip * width)
        values = value_cache.index_select(0, row.block_ids)
        values = values.as_strided((*size, value_dim), value_strides, row.skip * value_width)
        if row.num_queries == 1 and shape.plain:
            outputs.append(scaled_dot_product_attention(decode_rows[row.start], keys, values, scale=scale))
        else:
            queries = q[row.start : row.start + row.num_queries]
            chunk = _attend_chunk(queries, keys, values, shape).view(-1, num_kv_heads, group, value_dim)
            # A weight of zero times NaN or infinity is NaN. The bad value may be at a position that some rows must not
            # attend to, so each row is computed again over only the keys that it may attend to.
            if not chunk.isfinite().all():
                for i in range(row.num_queries):
                    high = row.num_keys - row.num_queries + i + 1
                    seen = slice(0 if window is None else max(0, high - window), high)
                    alone = _attend_chunk(queries[i : i + 1], keys[:, :, seen], values[:, :, seen], shape)
                    chunk[i] = alone.view(chunk[i].shape)
            outputs.append(chunk)
    return torch.cat(outputs).view(-1, num_heads, value_dim)


def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Sequence[int],
    *,
    scale: float,
    window: int | None,
    cap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Causal attention inside each segment of a packed batch: q [T, Hq, Dh], k and v [T, Hkv, Dh] -> [T, Hq, Dh].

    For ``cap`` and ``sinks`` see :func:`paged_attention`. Differentiable. Segments never attend to each other, because
    each segment is a separate call or one row of a shared call. Neighbouring segments of equal length share a call. If
    there are many short segments, segments of similar length share a call wherever they are in the batch.
    """
    shape = _Shape(scale, window, cap, sinks)
    plan = _plan(tuple(cu_seqlens), window, q.device)
    if plan.order is not None:
        index, inverse, filling = plan.order
        q, k, v = (_reorder(x, index, inverse, None) for x in (q, k, v))
    # torch.split is used instead of slices. The gradient of n slices is the sum of n tensors of full size; the gradient
    # of a split is a single tensor.
    sizes = [count * length for count, length in plan.calls]
    split = [[x] if len(sizes) == 1 else torch.split_with_sizes(x, sizes) for x in (q, k, v)]
    outputs: list[Tensor] = []
    for (count, length), queries, keys, values in zip(plan.calls, *split, strict=True):
        if count > 1 and shape.plain:
            outputs.append(_attend_equal(queries, keys, values, length, scale=scale, dropout=dropout))
            continue
        for segment in zip(*(x.split(length) for x in (queries, keys, values)), strict=True):
            one, *both = segment
            one_keys, one_values = (x.transpose(0, 1).unsqueeze(0) for x in both)
            outputs.append(_attend_chunk(one, one_keys, one_values, shape, dropout))
    out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return out if plan.order is None else _reorder(out, inverse, index, filling)


def bidirectional_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Sequence[int], *, scale: float, window: int | None
) -> Tensor:
    """Attention in both directions inside each segment of a packed batch: ``q`` [T, Hq, Dh], ``k`` and ``v``
    [T, Hkv, Dh] -> [T, Hq, Dh].

    A token attends to itself and at most ``window`` tokens on each side; None: to all tokens of its segment. Each
    segment is a separate call, so that its bits do not depend on the other segments.
    """
    out = torch.empty_like(q)
    how: dict[str, Any] = {"scale": scale, "enable_gqa": q.shape[1] != k.shape[1]}
    for start, end in itertools.pairwise(cu_seqlens):
        queries, keys, values = (x[start:end].transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        length = end - start
        if window is None or length <= window + 1:
            whole = scaled_dot_product_attention(queries, keys, values, **how)
            out[start:end] = whole[0].transpose(0, 1)
            continue
        for first in range(0, length, QUERY_TILE):
            last = min(first + QUERY_TILE, length)
            low, high = max(0, first - window), min(length, last + window)
            rows, columns = torch.arange(first, last, device=q.device), torch.arange(low, high, device=q.device)
            seen = (rows[:, None] - columns).abs() <= window
            near = (keys[:, :, low:high], values[:, :, low:high])
            tile = scaled_dot_product_attention(queries[:, :, first:last], *near, attn_mask=seen, **how)
            out[start + first : start + last] = tile[0].transpose(0, 1)
    return out


@dataclasses.dataclass(frozen=True, slots=True)
class _Plan:
    """How the segments of a packed batch are divided into calls of torch's attention."""

    calls: list[tuple[int, int]]
    """(number of segments in the call, rows of each segment) per call."""
    order: tuple[Tensor, Tensor, Tensor] | None = None
    """None if the rows of the calls, one call after another, are the rows of the batch. Otherwise three int64 tensors.
    - [P]: index of the batch's row for each row of the calls.
    - [T]: index among the rows of the calls for each row of the batch.
    - Indices of the padding rows in the calls. Padding follows the tokens of a segment,
      so causal attention does not read it.
    """


@functools.lru_cache(maxsize=64)
@torch.inference_mode(
    False
)  # training may reuse the tensors of a plan that evaluation made, and saves them for gradients
def _plan(cu_seqlens: tuple[int, ...], window: int | None, device: torch.device) -> _Plan:
    """Divide the segments into few calls with few copied rows. The plan is made once per batch and used by all
    layers."""
    spans = [(start, end) for start, end in itertools.pairwise(cu_seqlens) if end > start]

    def kind(span: tuple[int, int], step: int) -> tuple[int, int]:
        """Key of a segment; segments with equal keys may share a call. A segment longer than the window needs a mask,
        and gets a call of its own."""
        start = span[0]
        length = span[1] - span[0]
        if window is not None and length > window:
            return length, start
        return (length if length > SHORT else -(-length // step)), -1

    runs = [list(run) for _, run in itertools.groupby(spans, lambda span: kind(span, 1))]
    groups: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for span in spans:
        groups.setdefault(kind(span, _STEP), []).append(span)
    if (len(runs) - len(groups)) * _COPY < cu_seqlens[-1]:
        return _Plan([(len(run), run[0][1] - run[0][0]) for run in runs])
    calls: list[tuple[int, int]] = []
    index: list[int] = []
    filling: list[int] = []
    inverse = [0] * cu_seqlens[-1]
    for members in groups.values():
        width = max(end - start for start, end in members)
        calls.append((len(members), width))
        for start, end in members:
            inverse[start:end] = range(len(index), len(index) + end - start)
            index += range(start, end)
            filling += range(len(index), len(index) + width - (end - start))
            index += [end - 1] * (width - (end - start))
    order = [torch.tensor(rows, dtype=torch.int64, device=device) for rows in (index, inverse, filling)]
    return _Plan(calls, (order[0], order[1], order[2]))


class _Reorder(torch.autograd.Function):
    """Select the rows of ``x`` at ``index``. Rows may repeat, but only one of several equal rows has a gradient, so the
    backward pass needs no sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, inverse: Tensor, filling: Tensor | None) -> Tensor:
        """Select the rows of ``x`` at ``index``. In the backward pass, the gradient of row i of ``x`` is row
        ``inverse[i]`` of the result's gradient. The rows ``filling`` of ``x`` are padding, and their gradient is 0."""
        ctx.save_for_backward(inverse, filling)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        inverse, filling = ctx.saved_tensors
        grad = grads[0].index_select(0, inverse)
        if filling is not None:
            grad.index_fill_(0, filling, 0)
        return grad, None, None, None


def _reorder(x: Tensor, index: Tensor, inverse: Tensor, filling: Tensor | None) -> Tensor:
    return cast(Tensor, _Reorder.apply(x, index, inverse, filling))  # type: ignore[no-untyped-call]


def _attend_equal(q: Tensor, k: Tensor, v: Tensor, length: int, *, scale: float, dropout: float) -> Tensor:
    """Attention for segments of one length: q [n * length, Hq, Dh], k and v [n * length, Hkv, Dh] -> [n * length, Hq,
    Dh]."""
    queries, keys, values = (x.view(-1, length, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
    gqa = q.shape[1] != k.shape[1]
    out = scaled_dot_product_attention(
        queries, keys, values, is_causal=True, scale=scale, dropout_p=dropout, enable_gqa=gqa
    )
    return out.transpose(1, 2).flatten(0, 1)


@dataclasses.dataclass(frozen=True, slots=True)
class _Shape:
    """Settings of attention scores: scale, window, cap and sinks."""

    scale: float
    window: int | None
    cap: float | None
    sinks: Tensor | None

    @property
    def plain(self) -> bool:
        """Whether torch's attention kernel supports these settings: no cap and no sinks."""
        return self.cap is None and self.sinks is None


def _attend_written_out(queries: Tensor, keys: Tensor, values: Tensor, shape: _Shape, dropout: float) -> Tensor:
    """Attention in plain torch: the newest queries [Hkv, group, n, Dh] over keys and values [Hkv, m, Dh] -> [Hkv,
    group, n, Dh], in float32."""
    rows = queries.shape[2]
    num_keys = keys.shape[1]
    scores = queries.float() @ keys.float().unsqueeze(1).mT * shape.scale
    if shape.cap is not None:
        scores = shape.cap * torch.tanh(scores / shape.cap)
    scores = scores + _tile_mask(rows, num_keys, shape.window, scores.dtype, scores.device)
    if shape.sinks is not None:
        sinks = shape.sinks.float().view(*queries.shape[:2], 1, 1).expand(-1, -1, rows, 1)
        scores = torch.cat((scores, sinks), dim=-1)
    weights = torch.nn.functional.dropout(scores.softmax(-1)[..., :num_keys], dropout)
    return (weights @ values.float().unsqueeze(1)).to(queries.dtype)


def _attend_chunk(q: Tensor, keys: Tensor, values: Tensor, shape: _Shape, dropout: float = 0.0) -> Tensor:
    """Attention of queries [n, Hq, Dh], the newest tokens of ``keys`` and ``values`` [1, Hkv, m, Dh] -> [n, Hq, Dh],
    contiguous."""
    scale = shape.scale
    window = shape.window
    num_queries, num_heads = q.shape[:2]
    num_kv_heads = keys.shape[1]
    num_keys = keys.shape[2]
    group = num_heads // num_kv_heads
    head_dim = values.shape[3]
    if group == 1 and shape.plain:  # in their layout, so that the output has the required layout
        queries = q.transpose(0, 1).unsqueeze(0)
    else:  # The batch dimension is the KV heads. A group of query heads reads the same keys through a zero stride.
        queries = q.view(num_queries, num_kv_heads, group, -1).permute(1, 2, 0, 3)
        keys = keys.transpose(0, 1).expand(-1, group, -1, -1)
        values = values.transpose(0, 1).expand(-1, group, -1, -1)
    if shape.plain and num_queries == num_keys and (window is None or num_keys <= window):
        out = scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=scale, dropout_p=dropout)
        return out.permute(2, 0, 1, 3).reshape(num_queries, num_heads, head_dim)
    cached = num_keys - num_queries
    tiles: list[Tensor] = []
    for start in range(0, num_queries, QUERY_TILE):
        end = min(start + QUERY_TILE, num_queries)
        low = 0 if window is None else max(0, cached + start - window + 1)
        high = cached + end
        if not shape.plain:
            part = queries[:, :, start:end], keys[:, 0, low:high], values[:, 0, low:high]
            tile = _attend_written_out(*part, shape, dropout)
            tiles.append(tile.permute(2, 0, 1, 3).reshape(end - start, num_heads, head_dim))
            continue
        mask = _tile_mask(end - start, high - low, window, q.dtype, q.device)
        tile = scaled_dot_product_attention(
            queries[:, :, start:end],
            keys[:, :, low:high],
            values[:, :, low:high],
            attn_mask=mask,
            scale=scale,
            dropout_p=dropout,
        )
        tiles.append(tile.permute(2, 0, 1, 3).reshape(end - start, num_heads, head_dim))
    return tiles[0] if len(tiles) == 1 else torch.cat(tiles)


def _tile_mask(rows: int, keys: int, window: int | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Additive mask [rows, keys] for the newest ``rows`` of ``keys`` tokens: 0 where a row may attend, otherwise
    -inf."""
    offset = keys - rows
    mask = torch.full((rows, keys), float("-inf"), dtype=dtype, device=device).triu_(offset + 1)
    if window is not None and keys > window:
        behind = torch.full((rows, keys), float("-inf"), dtype=dtype, device=device).tril_(offset - window)
        mask += behind
    return mask
