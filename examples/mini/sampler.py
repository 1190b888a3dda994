"""File 6 of 8. Sampling without random state: the token is a function of logits, seed and position.

To draw from ``softmax(logits / T)``, add Gumbel noise to each ``logit / T`` and take the largest (the Gumbel-max
trick). The noise comes from a *counter-based* generator: Philox4x32-10 turns (seed, position, token id) into a random
number, without any state that must be advanced. So it does not matter in which step, in which row, next to which other
requests, or how often after a preemption a token is drawn. It is always the same token. The tests of this folder
compare the tokens with those of the engine, which uses the same definition.

The engine's version is the folder ``chairlift/executor/sampling/``; ``gumbel.py`` there has the complete definition.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from request import Request, SamplingParams

__all__ = ["gumbel_noise", "philox4x32", "sample", "sample_seed"]

_Floats = npt.NDArray[np.float32]
_Words = npt.NDArray[np.uint64]

_MASK32 = np.uint64(0xFFFFFFFF)
_MASK64 = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15


def sample(logits: _Floats, requests: list[Request]) -> list[int]:
    """One token for each row of logits [P, vocab_size]."""
    return [_sample_row(row, request) for row, request in zip(logits, requests, strict=True)]


def _sample_row(logits: _Floats, request: Request) -> int:
    params = request.params
    if params.temperature == 0.0:
        return int(logits.argmax())
    scores = _truncate(logits / np.float32(params.temperature), params)
    # The new token will have the index num_tokens. The engine hashes the seed in the same way (n > 1 needs it).
    return int((scores + gumbel_noise(sample_seed(params.seed), request.num_tokens, len(scores))).argmax())


def _truncate(scores: _Floats, params: SamplingParams) -> _Floats:
    """Forbid the tokens that top_k and top_p exclude: their scores become -inf."""
    order = np.argsort(-scores, kind="stable")
    if 0 < params.top_k < len(scores):
        scores[order[params.top_k :]] = -np.inf
    if params.top_p < 1.0:
        weights = np.exp(scores - scores.max())
        ranked = (weights / weights.sum())[order].astype(np.float64)
        before = ranked.cumsum() - ranked  # probability of all better tokens together
        scores[order[before >= params.top_p]] = -np.inf
    return scores


def gumbel_noise(seed: int, position: int, vocab_size: int) -> _Floats:
    """The noise of every token id, for the token at ``position``. Each counter gives the words of four ids."""
    groups = np.arange(-(-vocab_size // 4), dtype=np.uint64)
    words = philox4x32(groups, position & 0xFFFFFFFF, seed & 0xFFFFFFFF, seed >> 32)
    uniform = (words.reshape(-1)[:vocab_size].astype(np.float64) + 0.5) * 2.0**-32  # never 0 or 1
    return (-np.log(-np.log(uniform))).astype(np.float32)


def philox4x32(counter0: _Words, counter1: int, key0: int, key1: int) -> _Words:
    """Ten rounds of Philox4x32 (Salmon et al., SC'11) for the counters (counter0[i], counter1, 0, 0).

    Returns [len(counter0), 4] random words of 32 bits.
    """
    c0, c1 = counter0, np.full_like(counter0, counter1)
    c2, c3 = np.zeros_like(counter0), np.zeros_like(counter0)
    for _ in range(10):
        product0 = c0 * np.uint64(0xD2511F53)
        product1 = c2 * np.uint64(0xCD9E8D57)
        c0 = (product1 >> np.uint64(32)) ^ c1 ^ np.uint64(key0)
        c2 = (product0 >> np.uint64(32)) ^ c3 ^ np.uint64(key1)
        c1 = product1 & _MASK32
        c3 = product0 & _MASK32
        key0 = (key0 + 0x9E3779B9) & 0xFFFFFFFF
        key1 = (key1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], axis=-1)


def sample_seed(seed: int, sample_index: int = 0) -> int:
    """Hash a request's seed and the index of its answer to 64 bits (SplitMix64), so that similar seeds give unrelated
    noise."""
    stream = _mix((seed + _GAMMA) & _MASK64)
    return _mix((stream + (sample_index + 1) * _GAMMA) & _MASK64)


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)
