"""Attention of a drafting layer that is unrolled over several drafts, as it runs when it drafts (EAGLE-3's
training-time test; Li et al., 2025).

Every token t of a pack is taken as the newest position that the served model has computed. In the first step the layer
computes position t from the served model's hidden states. In step i it computes position t + i from its own result of
step i - 1. So the query of step i attends to the first step's keys up to position t, and to its own keys of the steps 1
to i. Row t of every tensor belongs to token t, in every step, so the keys of later steps are in the query's own row.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from chairlift.errors import InvariantError
from chairlift.kernels.recurrent import Cell
from chairlift_train.varlen import VarlenContext

__all__ = ["UnrolledContext", "unrolled_attention"]

_TILE: Final = 256
"""Maximum number of queries whose scores are in one tensor."""


class UnrolledContext:
    """Context of one pack for a network with one attention layer, which runs once per step (an
    :class:`~chairlift.models.context.AttentionContext`).

    Args:
        cu_seqlens: [N + 1] offsets of the sequences in the flat batch; the last offset is T.
    """

    def __init__(self, cu_seqlens: Sequence[int]) -> None:
        self._packed = VarlenContext(cu_seqlens)
        self._first: tuple[Tensor, Tensor] | None = None
        self._later: list[tuple[Tensor, Tensor]] = []

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
        """Attention of the next step: q [T, Hq, Dh], k and v [T, Hkv, Dh] -> [T, Hq, Dh]."""
        if layer or window is not None or cap is not None or sinks is not None:
            raise InvariantError("only one layer with plain attention to all earlier tokens can be unrolled")
        if self._first is None:
            self._first = (k, v)
            return self._packed.attend(layer, q, k, v, scale=scale, window=window)
        self._later.append((k, v))
        return unrolled_attention(q, self._first, self._later, self._packed.layout.cu_seqlens, scale)

    def recur(self, layer: int, cell: Cell, *inputs: Tensor) -> Tensor:
        """Raises InvariantError: a drafting layer has no recurrent states."""
        raise InvariantError("a layer with recurrent states cannot be unrolled")


def unrolled_attention(
    q: Tensor,
    first: tuple[Tensor, Tensor],
    later: Sequence[tuple[Tensor, Tensor]],
    cu_seqlens: Sequence[int],
    scale: float,
) -> Tensor:
    """Attention of one later step: q [T, Hq, Dh] -> [T, Hq, Dh], computed in float32.

    Args:
        first: Keys and values [T, Hkv, Dh] of the first step. Query t attends to the rows of its sequence up to t.
        later: Keys and values of the steps after it, up to the query's. Query t attends to row t of each.
        cu_seqlens: [N + 1] offsets of the sequences.
        scale: Factor of the scores.
    """
    num_heads = q.shape[1]
    num_kv_heads = first[0].shape[1]
    queries = q.float().view(len(q), num_kv_heads, num_heads // num_kv_heads, q.shape[2])
    keys, values = (each.float() for each in first)
    own_keys, own_values = (torch.stack([pair[at] for pair in later], dim=1).float() for at in range(2))
    own_scores = torch.einsum("thgd,tnhd->thgn", queries, own_keys) * scale
    outputs: list[Tensor] = []
    for begin, end in itertools.pairwise(cu_seqlens):
        for start in range(begin, end, _TILE):
            stop = min(start + _TILE, end)
            seen = torch.einsum("thgd,shd->thgs", queries[start:stop], keys[begin:stop]) * scale
            hidden = torch.ones(stop - start, stop - begin, dtype=torch.bool, device=q.device).triu_(start - begin + 1)
            seen = seen.masked_fill(hidden[:, None, None], float("-inf"))
            weights = torch.cat((seen, own_scores[start:stop]), dim=-1).softmax(-1)
            shared, own = torch.split(weights, [stop - begin, len(later)], dim=-1)
            out = torch.einsum("thgs,shd->thgd", shared, values[begin:stop])
            outputs.append(out + torch.einsum("thgn,tnhd->thgd", own, own_values[start:stop]))
    return torch.cat(outputs).flatten(1, 2).to(q.dtype)
