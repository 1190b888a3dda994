"""Gumbel noise from a fixed counter-based generator, and the arg max over noisy scores.

Sampling from ``softmax(score)`` is ``argmax(score + G)`` with independent Gumbel noise ``G`` (the Gumbel-max trick).
Here ``G`` is a pure function of ``(seed, position, token id)``, so the drawn token depends on nothing else. The
complete definition, for implementations in other languages, is as follows; all integers are unsigned::

    key      = (seed mod 2^32, seed div 2^32)                          seed has 64 bits
    counter  = (id div 4, position mod 2^32, 0, 0)
    word     = Philox4x32-10(counter, key)[id mod 4]                   Salmon et al., SC'11 (Random123)
    u        = (word + 0.5) * 2^-32                                    exact in float64, never 0 or 1
    G        = float32(-log(-log(u)))                                  logarithms in float64, rounded once, at the end
    token    = argmax over ids of float32(score + G)                   lowest id on a tie

``G`` is rounded only once, from float64, so it hardly depends on the mathematical library: two libraries with an error
of at most one unit in the last place give different float32 values about once in 10^8 values, and then they differ only
in the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["gumbel_argmax", "gumbel_noise", "philox4x32"]

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_COUNTERS_PER_CHUNK = 1 << 15
"""Number of counters per chunk: 1.5 MiB of temporary tensors. Up to this size torch uses a single thread, so no
operation waits for other threads."""


def philox4x32(counter: tuple[Tensor, ...], key: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ten rounds of Philox4x32 on 32-bit words held in int64 tensors.

    Args:
        counter: four int64 tensors of one shape, values in [0, 2^32).
        key: two int64 tensors of that shape, values in [0, 2^32).

    Returns:
        Four int64 tensors of that shape: random words in [0, 2^32).
    """
    c0, c1, c2, c3, k0, k1 = (word.clone(memory_format=torch.contiguous_format) for word in (*counter, *key))
    for _ in range(_ROUNDS):
        # The products wrap modulo 2^64, which keeps all their bits. c1 and c3 may have wrong bits above bit 31, but
        # these bits are masked after the exclusive or.
        p0 = c0 * _MULTIPLIERS[0]
        p1 = c2 * _MULTIPLIERS[1]
        torch.bitwise_right_shift(p1, 32, out=c0).bitwise_xor_(c1).bitwise_xor_(k0).bitwise_and_(_MASK)
        torch.bitwise_right_shift(p0, 32, out=c2).bitwise_xor_(c3).bitwise_xor_(k1).bitwise_and_(_MASK)
        c1 = p1
        c3 = p0
        k0.add_(_WEYL[0])
        k1.add_(_WEYL[1])
    return c0, c1 & _MASK, c2, c3 & _MASK


def gumbel_noise(seeds: Sequence[int], positions: Sequence[int], token_ids: Tensor) -> Tensor:
    """Noise of every given token id in every row: float32 ``[R, K]`` for int64 ``token_ids`` ``[R, K]`` or ``[K]``.

    ``seeds`` are the rows' unsigned 64-bit seeds, ``positions`` the index each row's new token will have.
    """
    shape = (len(seeds), token_ids.shape[-1])
    k0, k1, position = (word.expand(shape) for word in _row_words(seeds, positions, token_ids.device))
    zero = torch.zeros_like(position)
    words = torch.stack(philox4x32(((token_ids >> 2).expand(shape), position, zero, zero), (k0, k1)), dim=-1)
    lanes = (token_ids & 3).expand(shape).unsqueeze(-1)
    return _to_gumbel(words.gather(-1, lanes).squeeze(-1))


def gumbel_argmax(scores: Tensor, seeds: Sequence[int], positions: Sequence[int]) -> Tensor:
    """Draw one token id per row from ``softmax(scores)``: ``argmax(scores + G)``, lowest id on a tie.

    Args:
        scores: float32 ``[R, V]``, logits over temperature; -inf for ids that are not allowed. The maximum of each row
            must be finite.
        seeds: R unsigned 64-bit seeds.
        positions: R positions.

    Returns:
        int64 ``[R]``.

    Only ids that can still win get noise, and the answer is exactly that of the full row. Let ``v = 1 - u``. From
    ``-log(1 - v) >= v`` follows ``G <= -log(v)``, so an id can beat a noisy score ``L`` of another id only if ``v <=
    exp(score - L)``. Every ``v`` is at least 2^-33, which rules out most ids of a peaked row before any noise is made;
    the random words then rule out all but a few ids, and only for these the logarithms are computed.
    """
    if scores.shape[1] % 4:
        scores = torch.nn.functional.pad(scores, (0, -scores.shape[1] % 4), value=-math.inf)
    top, top_id = scores.max(dim=-1)
    reached = top + gumbel_noise(seeds, positions, top_id.unsqueeze(-1)).squeeze(-1)
    # The tolerance covers every float32 rounding below. A larger tolerance keeps more ids, and never changes the
    # result.
    bar = reached - (1e-3 + reached.abs() * 2.0**-20)
    possible = scores >= (bar - 33 * math.log(2)).unsqueeze(-1)
    rows, groups = possible.view(torch.int32).nonzero(as_tuple=True)  # four ids share a counter

    k0, k1, position = (words.squeeze(-1) for words in _row_words(seeds, positions, scores.device))
    grouped = scores.view(scores.shape[0], -1, 4)
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    for start in range(0, len(rows), _COUNTERS_PER_CHUNK):
        row = rows[start : start + _COUNTERS_PER_CHUNK]
        group = groups[start : start + _COUNTERS_PER_CHUNK]
        zero = torch.zeros_like(row)
        words = torch.stack(philox4x32((group, position[row], zero, zero), (k0[row], k1[row])), dim=-1)
        v = (0x100000000 - words).to(torch.float32).mul_(2.0**-32)
        largest = torch.exp(grouped[row, group] - bar[row].unsqueeze(-1))
        index, lane = (v <= largest).nonzero(as_tuple=True)
        found.append((row[index], group[index] * 4 + lane, words[index, lane]))
    row, token_id, word = (torch.cat(parts) for parts in zip(*found, strict=True))

    score = scores[row, token_id] + _to_gumbel(word)
    best = torch.full_like(top, -math.inf).scatter_reduce_(0, row, score, "amax")
    winners = score == best[row]
    return torch.full_like(top_id, scores.shape[1]).scatter_reduce_(0, row[winners], token_id[winners], "amin")


def _row_words(seeds: Sequence[int], positions: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs of the counter-based random generator for each row: low and high 32 bits of the seed (the key), and low 32
    bits of the position (part of the counter). Each is int64 ``[R, 1]``."""
    words = [
        (seed & _MASK, seed >> 32 & _MASK, position & _MASK) for seed, position in zip(seeds, positions, strict=True)
    ]
    table = torch.tensor(words, dtype=torch.int64).reshape(-1, 3).to(device)
    return table[:, 0:1], table[:, 1:2], table[:, 2:3]


def _to_gumbel(words: Tensor) -> Tensor:
    u = words.to(torch.float64).add_(0.5).mul_(2.0**-32)
    return u.log_().neg_().log_().neg_().to(torch.float32)
