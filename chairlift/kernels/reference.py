"""Attention and its cache in plain torch: the reference for tests of faster kernels.

Speed does not matter here. Attention is written as its definition, in float32 and one query row at a time. It uses no
tiles, masks or grouping of heads, so that a mistake in the tested implementations is unlikely to be repeated here.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = [
    "apply_rotary",
    "copy_blocks",
    "packed_attention",
    "paged_attention",
    "write_kv",
]


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding (Su et al., 2021). Dimension i of the first half of a head is paired with dimension i
    of the second half.

    ``x`` is [T, H, Dh]; ``cos`` and ``sin`` are [T, 1, Dh/2] in ``x``'s dtype.
    """
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def write_kv(key_cache: Tensor, value_cache: Tensor, slots: Tensor, key: Tensor, value: Tensor) -> None:
    """Store ``key`` and ``value`` [T, Hkv, Dh] at positions ``slots`` [T], the flat indices ``block * size + offset``
    into the caches [blocks, size, Hkv, Dh]."""
    key_cache.view(-1, *key_cache.shape[2:]).index_copy_(0, slots, key)
    value_cache.view(-1, *value_cache.shape[2:]).index_copy_(0, slots, value)


def copy_blocks(cache: Tensor, src_ids: Tensor, dst_ids: Tensor) -> None:
    """``cache[dst] = cache[src]`` for whole blocks (dim 0). All sources are read before any destination is written."""
    cache.index_copy_(0, dst_ids, cache.index_select(0, src_ids))


def _attend_row(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, cap: float | None, sinks: Tensor | None
) -> Tensor:
    """Attention of one query [Hq, Dh] over keys and values [n, Hkv, Dh] -> [Hq, Dh], in float32."""
    num_heads, head_dim = query.shape
    group = num_heads // keys.shape[1]
    wide_keys = keys.float().repeat_interleave(group, dim=1)
    wide_values = values.float().repeat_interleave(group, dim=1)
    scores = torch.einsum("hd,nhd->hn", query.float(), wide_keys) * scale
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    if sinks is not None:
        scores = torch.cat((scores, sinks.float()[:, None]), dim=-1)
    weights = scores.softmax(-1)[:, : len(keys)]
    return torch.einsum("hn,nhd->hd", weights, wide_values).reshape(num_heads, head_dim)


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
) -> Tensor:
    """Causal attention inside each segment of a packed batch: q [T, Hq, Dh], k and v [T, Hkv, Dh] -> [T, Hq, Dh].

    For ``cap`` and ``sinks`` see :func:`paged_attention`.
    """
    rows: list[Tensor] = []
    for start, end in itertools.pairwise(cu_seqlens):
        for row in range(start, end):
            low = start if window is None else max(start, row - window + 1)
            rows.append(_attend_row(q[row], k[low : row + 1], v[low : row + 1], scale, cap, sinks))
    return torch.stack(rows).to(q.dtype)


def paged_attention(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    cu_seqlens: Sequence[int],
    seq_lens: Sequence[int],
    block_table: Tensor,
    *,
    scale: float,
    window: int | None,
    cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of each row's newest tokens over its blocks: q [T, Hq, Dh] -> [T, Hq, Dh].

    Row ``i`` has the queries ``cu_seqlens[i]`` to ``cu_seqlens[i + 1]``, which are the last of ``seq_lens[i]`` tokens.
    Its keys are in the blocks ``block_table[i]`` of the caches [blocks, block_size, Hkv, Dh]. A score s becomes ``cap``
    tanh(s / ``cap``) (Gemma 2). ``sinks`` [Hq] adds one logit to the softmax of each head; this logit has no value
    vector (gpt-oss).
    """
    block_size = key_cache.shape[1]
    rows: list[Tensor] = []
    for i, seq_len in enumerate(seq_lens):
        start, end = cu_seqlens[i], cu_seqlens[i + 1]
        for row in range(start, end):
            position = seq_len - (end - row)
            low = 0 if window is None else max(0, position - window + 1)
            where = torch.arange(low, position + 1, device=q.device)
            blocks = block_table[i][where // block_size]
            keys, values = key_cache[blocks, where % block_size], value_cache[blocks, where % block_size]
            rows.append(_attend_row(q[row], keys, values, scale, cap, sinks))
    return torch.stack(rows).to(q.dtype)
