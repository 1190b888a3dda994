"""Attention whose scores are more than scaled products: soft caps (Gemma 2) and sinks (gpt-oss), in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["scored_attention"]

_QUERY_TILE = 256
"""Most query rows whose scores are in memory at once."""


def scored_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    window: int | None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of the newest tokens of one sequence over all of it.

    ``q`` is [n, Hq, Dk], ``k`` [m, Hkv, Dk] and ``v`` [m, Hkv, Dv], with n <= m; returns [n, Hq, Dv] of ``q``'s dtype.
    Scores are computed in float32. ``softcap`` c makes c tanh(s / c) of each score s before the mask. ``sinks`` [Hq] is
    one more score per query head, which takes its share of the softmax and has no value.
    """
    num_heads, num_kv_heads, num_keys = q.shape[1], k.shape[1], k.shape[0]
    group = num_heads // num_kv_heads
    keys = k.float().permute(1, 2, 0).unsqueeze(1)  # [Hkv, 1, Dk, m]
    values = v.float().transpose(0, 1).unsqueeze(1)  # [Hkv, 1, m, Dv]
    places = torch.arange(num_keys, device=q.device)
    tiles: list[Tensor] = []
    for start in range(0, q.shape[0], _QUERY_TILE):
        queries = q[start : start + _QUERY_TILE].float()
        count = queries.shape[0]
        grouped = queries.view(count, num_kv_heads, group, -1).permute(1, 2, 0, 3)
        scores = torch.matmul(grouped, keys) * scale  # [Hkv, group, count, m]
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        own = torch.arange(count, device=q.device).unsqueeze(1) + (num_keys - q.shape[0] + start)
        hidden = places > own
        if window is not None:
            hidden |= places <= own - window
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            more = sinks.float().view(num_kv_heads, group, 1, 1).expand(-1, -1, count, 1)
            scores = torch.cat((scores, more), dim=-1)
        weights = scores.softmax(-1)[..., :num_keys]
        out = torch.matmul(weights, values).permute(2, 0, 1, 3).reshape(count, num_heads, -1)
        tiles.append(out.to(q.dtype))
    return tiles[0] if len(tiles) == 1 else torch.cat(tiles)
