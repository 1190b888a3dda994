"""Logits transforms: one function per transform, each over a batch. Only rows that use the transform are changed.

Every function changes ``logits`` (float32 ``[R, V]``) in place and returns nothing. Settings come as flat tensors, with
one entry per (row, token id) pair, or one per row in ``rows`` (int64, distinct, ascending). No row's result depends on
another row. The sampler applies them in vLLM's order: masks and bias, penalties, temperature, min-p, top-k, top-p. (The
order of masks and bias does not matter, because a masked logit is -inf.)
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = [
    "add_logit_bias",
    "apply_allowed_mask",
    "apply_min_p",
    "apply_presence_and_frequency_penalties",
    "apply_repetition_penalty",
    "apply_temperature",
    "apply_top_k",
    "apply_top_p",
    "keep_only_token_ids",
    "mask_token_ids",
    "rank_token_ids",
]

_NUCLEUS_HEAD = 1024  # top-p searches this many of the best ids; it sorts a whole row only if they do not suffice


def apply_allowed_mask(logits: Tensor, rows: Tensor, allowed: Tensor) -> None:
    """Mask the ids that a grammar forbids in ``rows`` (int64 ``[K]``).

    ``allowed`` is int32 ``[K, ceil(V / 32)]`` with bit ``i % 32`` of word ``i // 32`` set when id ``i`` is allowed.
    """
    bits = torch.arange(32, device=allowed.device, dtype=allowed.dtype)
    forbidden = ((allowed.unsqueeze(-1) >> bits) & 1).view(len(allowed), -1)[:, : logits.shape[1]] == 0
    logits[rows] = logits[rows].masked_fill(forbidden, -math.inf)


def add_logit_bias(logits: Tensor, rows: Tensor, token_ids: Tensor, bias: Tensor) -> None:
    """Add ``bias[i]`` to ``logits[rows[i], token_ids[i]]``; a pair occurs at most once."""
    logits[rows, token_ids] += bias


def keep_only_token_ids(logits: Tensor, restricted: Tensor, rows: Tensor, token_ids: Tensor) -> None:
    """In the rows ``restricted`` (int64 ``[K]``), mask all ids except those in the given (row, token id) pairs."""
    kept_logits = logits[rows, token_ids]
    logits[restricted] = -math.inf
    logits[rows, token_ids] = kept_logits


def mask_token_ids(logits: Tensor, rows: Tensor, token_ids: Tensor) -> None:
    """Mask the given (row, token id) pairs: bad words, and end-of-sequence before ``min_tokens``."""
    logits[rows, token_ids] = -math.inf


def apply_repetition_penalty(logits: Tensor, rows: Tensor, token_ids: Tensor, penalty: Tensor) -> None:
    """Divide positive logits and multiply negative logits of tokens that occurred (CTRL, 2019). A pair occurs at most
    once."""
    value = logits[rows, token_ids]
    logits[rows, token_ids] = torch.where(value > 0, value / penalty, value * penalty)


def apply_presence_and_frequency_penalties(
    logits: Tensor, rows: Tensor, token_ids: Tensor, counts: Tensor, presence: Tensor, frequency: Tensor
) -> None:
    """Subtract ``frequency * count + presence`` from each generated token's logit; a pair occurs at most once.

    ``counts`` (float32, at least 1) has how often each token was generated. The penalties have one float32 value per
    pair.
    """
    logits[rows, token_ids] -= frequency * counts + presence


def apply_temperature(logits: Tensor, temperature: Tensor) -> None:
    """Divide every row by its temperature (float32 ``[R]``, above 0). A temperature of 1 keeps every bit of a row."""
    logits.div_(temperature.unsqueeze(-1))


def apply_min_p(logits: Tensor, rows: Tensor, min_p: Tensor) -> None:
    """Mask ids whose probability is less than ``min_p`` (float32, in (0, 1]) times that of the best id (Nguyen et al.,
    2024)."""
    part = _take(logits, rows)
    # p(id) / p(best) = exp(logit - best logit), so no softmax is needed.
    bar = part.amax(dim=-1) + torch.log(min_p)
    _put(logits, rows, part.masked_fill_(part < bar.unsqueeze(-1), -math.inf))


def apply_top_k(logits: Tensor, rows: Tensor, top_k: list[int]) -> None:
    """Keep exactly the ``top_k`` highest logits of each row in ``rows``. Among equal logits, the lowest ids are
    kept."""
    part = _take(logits, rows)
    values, token_ids = rank_token_ids(part, max(top_k))
    lost = torch.arange(values.shape[1], device=part.device) >= torch.tensor(top_k, device=part.device).unsqueeze(-1)
    _put(logits, rows, part.fill_(-math.inf).scatter_(-1, token_ids, values.masked_fill_(lost, -math.inf)))


def apply_top_p(logits: Tensor, rows: Tensor, top_p: Tensor) -> None:
    """Keep the smallest set of best ids whose probability reaches ``top_p`` (float64, in (0, 1)); at least one.

    This is nucleus sampling (Holtzman et al., 2019); the set is the nucleus. Among equal logits the lowest ids are
    added first. The best 1,024 ids almost always contain the nucleus; only a row with a larger nucleus is sorted
    completely.
    """
    part = _take(logits, rows)
    probs = torch.softmax(part, dim=-1)
    values, token_ids = rank_token_ids(part, _NUCLEUS_HEAD)
    in_nucleus, reached = _nucleus(probs, token_ids, top_p)
    whole = [] if token_ids.shape[1] == part.shape[1] else (~reached).nonzero().squeeze(-1).tolist()
    ranked = {i: torch.sort(part[i], descending=True, stable=True) for i in whole}
    part.fill_(-math.inf).scatter_(-1, token_ids, values.masked_fill_(~in_nucleus, -math.inf))
    for i, (row_values, row_ids) in ranked.items():
        row_kept, _ = _nucleus(probs[i], row_ids, top_p[i])
        part[i].scatter_(-1, row_ids, row_values.masked_fill_(~row_kept, -math.inf))
    _put(logits, rows, part)


def _nucleus(probs: Tensor, token_ids: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """(mask of the ranked ids that are in the nucleus, whether the ranked ids together reach probability ``top_p``)."""
    ranked = probs.gather(-1, token_ids).to(torch.float64)
    total = ranked.cumsum(dim=-1)
    return total - ranked < top_p.unsqueeze(-1), total[..., -1] >= top_p


def _take(logits: Tensor, rows: Tensor) -> Tensor:
    """The rows ``rows`` of ``logits``: ``logits`` itself if these are all its rows (no copy is made), otherwise a
    copy."""
    return logits if len(rows) == len(logits) else logits[rows]


def _put(logits: Tensor, rows: Tensor, part: Tensor) -> None:
    if part is not logits:
        logits[rows] = part


def rank_token_ids(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The ``k`` highest values of each row and their ids, best first. Equal values are ordered by id, lowest first.

    Unlike ``torch.topk``, the order of equal values is fixed. ``values`` is ``[R, V]``; returns ``[R, min(k, V)]``
    values and int64 ids.
    """
    if k == 0:
        return values[:, :0], torch.empty_like(values[:, :0], dtype=torch.int64)
    top, token_ids = values.topk(min(k + 1, values.shape[1]), dim=-1)
    if top.shape[1] > k:
        tied = top[:, k - 1] == top[:, k]  # the last value inside equals the first one outside: take the lowest ids
        top = top[:, :k]
        token_ids = token_ids[:, :k]
        for i in tied.nonzero().squeeze(-1).tolist():
            above = token_ids[i][top[i] > top[i, -1]]
            equal = (values[i] == top[i, -1]).nonzero().squeeze(-1)[: k - len(above)]
            token_ids[i] = torch.cat((above, equal))
    token_ids = token_ids.sort(dim=-1).values
    top, order = values.gather(-1, token_ids).sort(dim=-1, descending=True, stable=True)
    return top, token_ids.gather(-1, order)
