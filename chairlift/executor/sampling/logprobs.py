"""Log-probabilities of logits. Those of the raw logits are before bias, penalties, temperature and masks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from chairlift.executor.sampling.logits import rank_token_ids

__all__ = ["TokenLogprobs", "token_logprobs"]

_VALUES_PER_SLICE = 1 << 20  # 8 MiB of float64 at a time


@dataclasses.dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position of the text: of the token at the position, and of the most likely tokens."""

    token_ids: npt.NDArray[np.int32]
    """``[1 + N]``: the token itself, then the N most likely tokens, best first (of equal ones the lowest id first)."""
    logprobs: npt.NDArray[np.float32]
    """``[1 + N]``: natural logarithms of the probabilities, in the same order as ``token_ids``."""
    rank: int
    """Rank of the token itself: 1 plus the number of tokens that are strictly more likely. So a greedy token always has
    rank 1. (The N most likely tokens have ranks 1 to N by their order.)"""


def token_logprobs(logits: Tensor, token_ids: Sequence[int], num_logprobs: Sequence[int]) -> list[TokenLogprobs]:
    """Log-probabilities of one given token per row, and of the most likely tokens of the row.

    For generated text, pass the rows that were sampled and the sampled tokens. For prompt log-probabilities, pass the
    rows of prompt positions 0 to n - 2, and the prompt's tokens 1 to n - 1.

    Args:
        logits: raw logits ``[R, V]`` in any floating dtype. Work is done in slices of rows, so memory beyond the
            input stays bounded; sums are float64.
        token_ids: the R tokens.
        num_logprobs: number of most likely tokens that each row reports, 0 or more.

    Raises:
        ValueError: the three do not have the same length.
    """
    if not len(logits) == len(token_ids) == len(num_logprobs):
        raise ValueError(
            f"{len(logits)} rows of logits, {len(token_ids)} tokens, {len(num_logprobs)} counts: must agree"
        )
    out: list[TokenLogprobs] = []
    step = max(1, _VALUES_PER_SLICE // logits.shape[1])
    for start in range(0, len(token_ids), step):
        part = slice(start, start + step)
        out += _slice_logprobs(logits[part], token_ids[part], num_logprobs[part])
    return out


def _slice_logprobs(logits: Tensor, token_ids: Sequence[int], num_logprobs: Sequence[int]) -> list[TokenLogprobs]:
    raw = logits.to(torch.float32)
    # A float32 sum over 150,000 almost equal logits has an error of 1e-4 on processors with short vector registers.
    logprobs = torch.log_softmax(raw, dim=-1, dtype=torch.float64)
    chosen = torch.tensor(token_ids, dtype=torch.int64, device=logits.device).unsqueeze(-1)
    # Ranks compare logits, because rounding can give the same log-probability to two different logits.
    ranks = (raw > raw.gather(-1, chosen)).sum(dim=-1, dtype=torch.int32) + 1
    best = rank_token_ids(raw, max(num_logprobs))[1]
    ids = torch.cat((chosen, best), dim=-1)
    values = logprobs.gather(-1, ids).to(torch.float32).cpu().numpy()
    ids_array = ids.to(torch.int32).cpu().numpy()
    return [
        TokenLogprobs(ids_array[i, : 1 + count].copy(), values[i, : 1 + count].copy(), rank)
        for i, (count, rank) in enumerate(zip(num_logprobs, ranks.tolist(), strict=True))
    ]
