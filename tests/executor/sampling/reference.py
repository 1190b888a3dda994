"""A simple, slow sampler for comparisons: it processes one row at a time, in plain Python and float64."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from chairlift.base.sampling_params import SamplingParams

__all__ = ["gumbel", "nucleus", "philox", "reshape", "top_ids", "truncate"]

_M = (0xD2511F53, 0xCD9E8D57)
_W = (0x9E3779B9, 0xBB67AE85)
_32 = 0xFFFFFFFF


def philox(counter: Sequence[int], key: Sequence[int]) -> list[int]:
    c, k = list(counter), list(key)
    for _ in range(10):
        first, second = _M[0] * c[0], _M[1] * c[2]
        c = [(second >> 32) ^ c[1] ^ k[0], second & _32, (first >> 32) ^ c[3] ^ k[1], first & _32]
        k = [(k[0] + _W[0]) & _32, (k[1] + _W[1]) & _32]
    return c


def gumbel(seed: int, position: int, token_id: int) -> float:
    word = philox((token_id >> 2, position, 0, 0), (seed & _32, seed >> 32))[token_id & 3]
    return -math.log(-math.log((word + 0.5) / 2**32))


def top_ids(logits: Sequence[float], k: int) -> list[int]:
    return sorted(range(len(logits)), key=lambda i: (-logits[i], i))[:k]


def nucleus(logits: Sequence[float], top_p: float) -> list[int]:
    highest = max(logits)
    weights = [math.exp(x - highest) for x in logits]
    total, kept, mass = math.fsum(weights), [], 0.0
    for i in top_ids(logits, len(logits)):
        if mass >= top_p * total:
            break
        kept.append(i)
        mass += weights[i]
    return kept


def keep(logits: Sequence[float], ids: Iterable[int]) -> list[float]:
    chosen = set(ids)
    return [x if i in chosen else -math.inf for i, x in enumerate(logits)]


def reshape(
    logits: Sequence[float],
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    stop_token_ids: Sequence[int] = (),
    bad_word_ids: Sequence[Sequence[int]] = (),
) -> list[float]:
    out = list(logits)
    if params.allowed_token_ids:
        out = keep(out, params.allowed_token_ids)
    for token_id, bias in (params.logit_bias or {}).items():
        out[token_id] += bias
    for word in bad_word_ids:
        start = len(output) - (len(word) - 1)
        if start >= 0 and list(output[start:]) == list(word[:-1]):
            out[word[-1]] = -math.inf
    if len(output) < params.min_tokens:
        for token_id in stop_token_ids:
            out[token_id] = -math.inf
    for token_id in set(prompt) | set(output):
        r = params.repetition_penalty
        out[token_id] = out[token_id] / r if out[token_id] > 0 else out[token_id] * r
    for token_id in set(output):
        out[token_id] -= params.frequency_penalty * list(output).count(token_id)
        out[token_id] -= params.presence_penalty
    return out


def truncate(logits: Sequence[float], params: SamplingParams) -> list[float]:
    out = [x / params.temperature for x in logits]
    if params.min_p > 0:
        bar = max(out) + math.log(params.min_p)
        out = [x if x >= bar else -math.inf for x in out]
    if 0 < params.top_k < len(out):
        out = keep(out, top_ids(out, params.top_k))
    if params.top_p < 1:
        out = keep(out, nucleus(out, params.top_p))
    return out
