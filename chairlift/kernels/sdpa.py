"""Paged and packed attention through torch's fused scaled-dot-product attention.

Two facts of that kernel are used. It takes any strides, so a KV head is shared by its group of query heads through a
stride of zero instead of a copy. And it never looks beyond the tensors it is given, so keys outside a sequence or
behind a window are left out by slicing; a mask is built only for rows that start in the middle of their sequence, for
at most :data:`QUERY_TILE` rows at a time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

__all__ = ["QUERY_TILE", "PagedRow", "packed_attention", "paged_attention", "plan_rows"]

QUERY_TILE = 256
"""Most query rows that share one mask, so that no mask is larger than [256, keys]."""


@dataclasses.dataclass(frozen=True, slots=True)
class PagedRow:
    """One sequence in a step: which queries it owns and which blocks hold the keys they need.

    Made once per step and cache group, and used by every layer of the group.
    """

    start: int
    """First query row in the flat batch."""
    num_queries: int
    """Queries of this row; they are the newest tokens of the sequence."""
    num_keys: int
    """Keys the queries need: all of the sequence, less those behind the first query's window."""
    skip: int
    """Keys in the first gathered block that lie behind the window."""
    block_ids: Tensor
    """int64 [blocks]: only blocks that hold needed keys."""


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
    q: Tensor, key_cache: Tensor, value_cache: Tensor, rows: Sequence[PagedRow], *, scale: float, window: int | None
) -> Tensor:
    """Causal attention of each row's queries over its blocks (PagedAttention: Kwon et al., 2023).

    ``q`` is [T, Hq, Dh], the caches [blocks, block_size, Hkv, Dh]; returns [T, Hq, Dh]. The new keys and values must
    have been written. Not differentiable.
    """
    num_heads, head_dim = q.shape[1:]
    num_kv_heads = key_cache.shape[2]
    group = num_heads // num_kv_heads
    width = num_kv_heads * head_dim
    # A query row as [1, Hkv, group, Dh]: the heads that share a KV head become the rows of one small product.
    decode_rows = q.reshape(-1, 1, num_kv_heads, group, head_dim)
    strides = (0, head_dim, width, 1)
    outputs: list[Tensor] = []
    for row in rows:
        # A gather makes fresh, contiguous memory, so one as_strided does for view, slice and transpose.
        shape, offset = (1, num_kv_heads, row.num_keys, head_dim), row.skip * width
        keys = key_cache.index_select(0, row.block_ids).as_strided(shape, strides, offset)
        values = value_cache.index_select(0, row.block_ids).as_strided(shape, strides, offset)
        if row.num_queries == 1:
            outputs.append(scaled_dot_product_attention(decode_rows[row.start], keys, values, scale=scale))
        else:
            queries = q[row.start : row.start + row.num_queries]
            chunk = _attend_chunk(queries, keys, values, scale=scale, window=window)
            outputs.append(chunk.view(-1, num_kv_heads, group, head_dim))
    return torch.cat(outputs).view(-1, num_heads, head_dim)


def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Sequence[int], *, scale: float, window: int | None
) -> Tensor:
    """Causal attention inside each segment of a packed batch: q [T, Hq, Dh], k and v [T, Hkv, Dh] -> [T, Hq, Dh].

    Differentiable. Segments never see each other because each is a call of its own.
    """
    outputs: list[Tensor] = []
    start = cu_seqlens[0]
    for end in cu_seqlens[1:]:
        if end > start:
            keys, values = (x[start:end].transpose(0, 1).unsqueeze(0) for x in (k, v))
            outputs.append(_attend_chunk(q[start:end], keys, values, scale=scale, window=window))
        start = end
    return torch.cat(outputs)


def _attend_chunk(q: Tensor, keys: Tensor, values: Tensor, *, scale: float, window: int | None) -> Tensor:
    """Queries [n, Hq, Dh], the newest of ``keys`` and ``values`` [1, Hkv, m, Dh] -> [n, Hq, Dh], contiguous."""
    num_queries, num_heads, head_dim = q.shape
    num_kv_heads, num_keys = keys.shape[1], keys.shape[2]
    group = num_heads // num_kv_heads
    # Batch over KV heads; the group of query heads reads the same keys through a zero stride.
    queries = q.view(num_queries, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)
    keys = keys.transpose(0, 1).expand(-1, group, -1, -1)
    values = values.transpose(0, 1).expand(-1, group, -1, -1)
    if num_queries == num_keys and (window is None or num_keys <= window):
        out = scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=scale)
        return out.permute(2, 0, 1, 3).reshape(num_queries, num_heads, head_dim)
    cached = num_keys - num_queries
    tiles: list[Tensor] = []
    for start in range(0, num_queries, QUERY_TILE):
        end = min(start + QUERY_TILE, num_queries)
        low = 0 if window is None else max(0, cached + start - window + 1)
        high = cached + end
        mask = _tile_mask(end - start, high - low, window, q.dtype, q.device)
        tile = scaled_dot_product_attention(
            queries[:, :, start:end], keys[:, :, low:high], values[:, :, low:high], attn_mask=mask, scale=scale
        )
        tiles.append(tile.permute(2, 0, 1, 3).reshape(end - start, num_heads, head_dim))
    return tiles[0] if len(tiles) == 1 else torch.cat(tiles)


def _tile_mask(rows: int, keys: int, window: int | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Additive mask [rows, keys] for the newest ``rows`` of ``keys`` tokens: 0 where row may look, else -inf."""
    offset = keys - rows
    mask = torch.full((rows, keys), float("-inf"), dtype=dtype, device=device).triu_(offset + 1)
    if window is not None and keys > window:
        behind = torch.full((rows, keys), float("-inf"), dtype=dtype, device=device).tril_(offset - window)
        mask += behind
    return mask
