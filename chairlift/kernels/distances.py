"""Attention in both directions with a bias on each score for the distance of the two tokens (Raffel et al., 2020)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

__all__ = ["biased_attention", "distance_classes"]

_FAR = 128
"""Distance from which on all tokens have the class of the most distant ones."""


def distance_classes(length: int, classes: int, device: torch.device | None = None) -> Tensor:
    """int64 [length, length]: class of the distance from each token (row) to each other token (column). Half of the
    classes are for later tokens. In each half, the first half are for single distances, the others grow with the
    logarithm of the distance."""
    places = torch.arange(length, device=device)
    step = places[None] - places[:, None]
    half = classes // 2
    exact = half // 2
    away = step.abs()
    share = torch.log(away.clamp_min(1).float() / exact) / math.log(_FAR / exact)
    grown = (exact + (share * (half - exact)).long()).clamp_max(half - 1)
    return torch.where(away < exact, away, grown) + half * (step > 0)


def biased_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Sequence[int], biases: Tensor, *, scale: float
) -> Tensor:
    """q, k, v [T, H, Dh] -> [T, H, Dh]. Text i has rows ``cu_seqlens[i]`` to ``cu_seqlens[i + 1]``, and its tokens
    attend to each other.

    ``biases`` [classes, H] are added to the scores, after their multiplication by ``scale``. Each text is computed
    apart, so its bits do not depend on others.
    """
    out = torch.empty_like(v)
    for start, end in pairwise(cu_seqlens):
        one, two, three = (each[start:end].transpose(0, 1) for each in (q, k, v))
        bias = biases[distance_classes(end - start, len(biases), q.device)].permute(2, 0, 1).to(q.dtype)
        found = scaled_dot_product_attention(one, two, three, attn_mask=bias.contiguous(), scale=scale)
        out[start:end] = found.transpose(0, 1)
    return out
