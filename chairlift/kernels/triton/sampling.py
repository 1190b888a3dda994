# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator"
"""Sampling on the device: the arg max, or a draw with counter-based Gumbel noise, optionally after min-p, top-k and
top-p.

:mod:`chairlift.executor.sampling.gumbel` and :mod:`chairlift.executor.sampling.logits` define the results. Imagine the
ids of a row sorted by descending score (ties: ascending id). min-p, top-k and top-p each keep the first ids of this
order, so the last kept id and its score define the kept set. The code does not sort: it finds this score bit by bit, by
computing the number of ids (or the probability) at or above a candidate score. Usually two passes over the row first
find and copy the few ids that can matter, and the search reads only those.

**Determinism.** Each row is computed separately and in a fixed order, so its token does not depend on the other rows.
The random words equal the CPU's to the last bit. Noise is first computed in float32, for chunks of ids. Chunks without
kept ids get no noise, and neither do chunks whose highest score is so low that the largest possible noise could not
help. Then only ids that can still be the maximum of their row get the float64 noise of the definition. One difference
to the CPU remains: probabilities are added in another order. A kept set whose probability is within a few 1e-7 of
``top_p`` may therefore have one id more or less.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl
from torch import Tensor

from chairlift.kernels.triton.launch import (
    CONCURRENT_CHUNKS,
    DRAW_CHUNK,
    SAMPLING_WARPS,
    SEARCH_BLOCK,
    SEARCH_ROOM,
    power_of_2,
)

__all__ = ["Kept", "SamplingSettings", "kept_ids", "sample"]

_NO_ID = tl.constexpr(0x7FFFFFFF)
_ALL_IDS = tl.constexpr(0x7FFFFFFE)
_MOST_NOISE = tl.constexpr(22.875)
"""More than the largest possible noise: that of the word 2^32 - 1, which is 33 log(2), in float64 and in float32."""


@dataclasses.dataclass(frozen=True, slots=True)
class SamplingSettings:
    """Sampling parameters of S slots: one-dimensional tensors, which may be views of the decode state."""

    seeds: Tensor
    """int64 [S], the seed of each slot; its bits are those of the unsigned 64-bit seed."""
    temperature: Tensor
    """float32 [S], the temperature; 0 means arg max, and the other parameters of the slot are then ignored."""
    log_min_p: Tensor
    """float32 [S], ``log(min_p)``; -inf means that the slot does not use min-p."""
    top_k: Tensor
    """int32 [S], top-k; 0 means that the slot does not use it."""
    top_p: Tensor
    """float64 [S], top-p; 1 means that the slot does not use it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Kept:
    """Set of ids that min-p, top-k and top-p keep in each row: ids with a score above ``bar``, and ids with that score
    up to ``last_id``."""

    bar: Tensor
    """float32 [R], the lowest score that is kept in each row."""
    last_id: Tensor
    """int32 [R], the last kept id among ids with the lowest kept score."""


@triton.jit
def _order(x: tl.tensor) -> tl.tensor:
    """Sort key of float32 ``x``: a uint32. Keys have the same order as the numbers. -0 must have been replaced by 0
    before."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True)


@triton.jit
def _unorder(order: tl.tensor) -> tl.tensor:
    """The float32 number that :func:`_order` maps to the sort key ``order``."""
    bits = order.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ -2147483648, ~bits).to(tl.float32, bitcast=True)


@triton.jit
def _scores(raw: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    """Scores of the raw logits: float32 logits divided by the temperature, with IEEE rounding. No score is -0."""
    scores = tl.div_rn(raw, temperature)
    return tl.where(scores == 0.0, 0.0, scores)


@triton.jit
def _load(row_ptr: tl.tensor, ids: tl.tensor, vocab: tl.tensor) -> tl.tensor:
    """Logits of ``ids`` in float32; -inf for ids past the vocabulary."""
    return tl.load(row_ptr + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)


@triton.jit
def _weight_from(
    bar: tl.tensor, row_ptr: tl.tensor, vocab: tl.tensor, temperature: tl.tensor, kept: tl.tensor, last_id: tl.tensor,
    best: tl.tensor, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """float64: number of ids in a kept set whose sort key is at least ``bar``. With ``WEIGHTED``: sum of the
    probabilities of these ids, each divided by the probability of the best id."""
    parts = tl.zeros([BLOCK], dtype=tl.float64)
    for at in range(0, vocab, BLOCK):
        ids = at + tl.arange(0, BLOCK)
        order = _order(_scores(_load(row_ptr, ids, vocab), temperature))
        inside = (ids < vocab) & (order >= bar) & ((order > kept) | ((order == kept) & (ids <= last_id)))
        weight = tl.exp(_unorder(order) - best) if WEIGHTED else 1.0
        parts += tl.where(inside, weight, 0.0).to(tl.float64)
    return tl.sum(parts, axis=0)


@triton.jit
def _beginning(
    goal: tl.tensor, row_ptr: tl.tensor, vocab: tl.tensor, temperature: tl.tensor, kept: tl.tensor,
    last_id: tl.tensor, best: tl.tensor, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """(sort key of the last score, last id) of the shortest prefix of a kept set whose weight reaches ``goal``.

    The first loop finds, bit by bit, the highest score with enough weight at or above it. Then the number of needed ids
    with exactly that score is computed, and the second loop finds the last of these ids.
    """
    found = tl.full([], 0, dtype=tl.uint32)
    for bit in range(32):
        candidate = found | (tl.full([], 0x80000000, dtype=tl.uint32) >> bit)
        reached = _weight_from(candidate, row_ptr, vocab, temperature, kept, last_id, best, WEIGHTED, BLOCK)
        found = tl.where(reached >= goal, candidate, found)

    above = _weight_from(found + 1, row_ptr, vocab, temperature, kept, last_id, best, WEIGHTED, BLOCK)
    each = tl.full([], 1.0, dtype=tl.float64)
    if WEIGHTED:
        each = tl.exp(_unorder(found) - best).to(tl.float64)
    # Ids with equal scores are added one by one until the weight reaches the goal. If each has weight 0, all of them
    # are added.
    needed = tl.where(each > 0.0, tl.ceil((goal - above) / tl.where(each > 0.0, each, 1.0)), 1.0e9)
    needed = tl.maximum(tl.minimum(needed, 1.0e9), 1.0).to(tl.int32)

    passed = tl.full([], 0, dtype=tl.int32)
    end = tl.full([], _ALL_IDS, dtype=tl.int32)
    for at in range(0, vocab, BLOCK):
        ids = at + tl.arange(0, BLOCK)
        order = _order(_scores(_load(row_ptr, ids, vocab), temperature))
        equal = ((order == found) & (ids < vocab)).to(tl.int32)
        rank = passed + tl.cumsum(equal, axis=0)
        end = tl.minimum(end, tl.min(tl.where((equal > 0) & (rank == needed), ids, _ALL_IDS), axis=0))
        passed += tl.sum(equal, axis=0)
    return found, end


@triton.jit
def _gather(
    few_ptr: tl.tensor, few_ids_ptr: tl.tensor, bar: tl.tensor, row_ptr: tl.tensor, vocab: tl.tensor,
    temperature: tl.tensor, BLOCK: tl.constexpr, ROOM: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Copy the logits with a sort key of at least ``bar`` into a buffer, in ascending order of their ids, until it is
    full. Returns the number of such logits in the row, even if not all of them fit."""
    count = tl.full([], 0, dtype=tl.int32)
    for at in range(0, vocab, BLOCK):
        ids = at + tl.arange(0, BLOCK)
        raw = _load(row_ptr, ids, vocab)
        high = (_order(_scores(raw, temperature)) >= bar) & (ids < vocab)
        found = tl.sum(high.to(tl.int32), axis=0)
        if found > 0:
            place = count + tl.cumsum(high.to(tl.int32), axis=0) - 1
            tl.store(few_ptr + place, raw.to(few_ptr.dtype.element_ty), mask=high & (place < ROOM))
            tl.store(few_ids_ptr + place, ids, mask=high & (place < ROOM))
        count += found
    tl.debug_barrier()  # threads read what other threads have written
    return count


@triton.jit
def _kept_ids(
    bar_ptr: tl.tensor, last_id_ptr: tl.tensor, few_ptr: tl.tensor, few_ids_ptr: tl.tensor, logits_ptr: tl.tensor,
    temperature_ptr: tl.tensor, log_min_p_ptr: tl.tensor, top_k_ptr: tl.tensor, top_p_ptr: tl.tensor,
    slots_ptr: tl.tensor, vocab: tl.tensor, logits_stride: tl.tensor, BLOCK: tl.constexpr, ROOM: tl.constexpr,
) -> None:  # fmt: skip
    """One program per row: min-p, then top-k of the kept ids, then top-p of the ids that remain.

    The ids are divided into BLOCK sets, and ``peaks`` are the highest scores of the sets. At least n ids therefore have
    a score at or above the n-th highest peak, and for small n hardly more than n. These ids are copied and searched
    instead of the vocabulary, if they are enough and fit into the buffer. Without top-k, n is 63/64 of the sets, which
    gives about four ids per set.
    """
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row)
    temperature = tl.load(temperature_ptr + slot, mask=slot >= 0, other=0.0)
    log_min_p = tl.load(log_min_p_ptr + slot, mask=slot >= 0, other=0.0)
    top_k = tl.load(top_k_ptr + slot, mask=slot >= 0, other=0)
    top_p = tl.load(top_p_ptr + slot, mask=slot >= 0, other=1.0)
    row_ptr = logits_ptr + row.to(tl.int64) * logits_stride
    size = vocab
    kept = tl.full([], 0, dtype=tl.uint32)
    last_id = tl.full([], _ALL_IDS, dtype=tl.int32)
    with_min_p = log_min_p > float("-inf")
    with_top_k = (top_k > 0) & (top_k < vocab)
    with_top_p = top_p < 1.0
    if (temperature > 0.0) & (with_min_p | with_top_k | with_top_p):
        peaks = tl.full([BLOCK], 0, dtype=tl.uint32)
        for at in range(0, vocab, BLOCK):
            raw = _load(row_ptr, at + tl.arange(0, BLOCK), vocab)
            peaks = tl.maximum(peaks, _order(_scores(raw, temperature)))
        best = _unorder(tl.max(peaks, axis=0))
        if with_min_p:
            bar = best + log_min_p
            kept = _order(tl.where(bar == 0.0, 0.0, bar))
        if with_top_k | with_top_p:
            few_ptr = few_ptr + row * ROOM
            few_ids_ptr = few_ids_ptr + row * ROOM
            wanted = tl.where(with_top_k, tl.minimum(top_k, BLOCK * 63 // 64), BLOCK * 63 // 64)
            peak = tl.full([], 0, dtype=tl.uint32)
            for bit in range(32):
                candidate = peak | (tl.full([], 0x80000000, dtype=tl.uint32) >> bit)
                peak = tl.where(tl.sum((peaks >= candidate).to(tl.int32), axis=0) >= wanted, candidate, peak)
            few = _gather(few_ptr, few_ids_ptr, tl.maximum(peak, kept), row_ptr, vocab, temperature, BLOCK, ROOM)
            goal = top_k.to(tl.float64)
            # If min-p's bar is at or above the peak, the copied ids are all ids that min-p keeps.
            enough = (few <= ROOM) & ((few >= goal) | (kept >= peak))
            if not with_top_k:
                goal = top_p * _weight_from(kept, row_ptr, vocab, temperature, kept, last_id, best, True, BLOCK)
                read = tl.minimum(few, ROOM)
                held = _weight_from(kept, few_ptr, read, temperature, kept, last_id, best, True, BLOCK)
                enough = (few <= ROOM) & (held >= goal)
            if enough:
                # from here on ids are indices into the copy
                row_ptr = few_ptr
                size = few
            if with_top_k:
                zero = tl.full([], 0, dtype=tl.uint32)
                last, end = _beginning(goal, row_ptr, size, temperature, zero, last_id, best, False, BLOCK)
                last_id = tl.where(last >= kept, end, last_id)
                kept = tl.maximum(kept, last)
                goal = top_p * _weight_from(kept, row_ptr, size, temperature, kept, last_id, best, True, BLOCK)
            if with_top_p:
                last, end = _beginning(goal, row_ptr, size, temperature, kept, last_id, best, True, BLOCK)
                last_id = tl.where(last > kept, end, tl.minimum(end, last_id))
                kept = tl.maximum(kept, last)
            if enough & (last_id < few):
                last_id = tl.load(few_ids_ptr + last_id)
        tl.store(bar_ptr + row, _unorder(kept))
        tl.store(last_id_ptr + row, last_id)
    else:
        tl.store(bar_ptr + row, float("-inf"))
        tl.store(last_id_ptr + row, _ALL_IDS)


@triton.jit
def _words(seed: tl.tensor, position: tl.tensor, first_id: tl.tensor, NUM_IDS: tl.constexpr) -> tl.tensor:
    """Random words, uint32, for ``NUM_IDS`` ids from ``first_id`` (a multiple of 4) on. Four ids share a counter."""
    counter = (first_id // 4 + tl.arange(0, NUM_IDS // 4)).to(tl.uint32)
    zero = tl.zeros([NUM_IDS // 4], dtype=tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, counter, zero + position.to(tl.uint32), zero, zero)
    return tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))


@triton.jit
def _rough_noise(words: tl.tensor) -> tl.tensor:
    """Approximate Gumbel noise in float32, with an error below 1e-4, from random ``words``. For u near 1, ``-log(u)``
    is computed as a series in ``v = 1 - u``, because rounding u would cause too large an error."""
    u = (words.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    v = ((words ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    series = v * (1.0 + v * (0.5 + v * (0.33333334 + v * (0.25 + v * (0.2 + v * 0.16666667)))))
    return -tl.log(tl.where(v < 0.0625, series, -tl.log(tl.minimum(u, 0.99))))


@triton.jit
def _cut(top: tl.tensor) -> tl.tensor:
    """The lowest sum of score and approximate noise with which an id can still win, if ``top`` is the highest such sum.
    Twice the error of the noise is below 2e-4; the sums are rounded to float32."""
    return top - (2e-3 + tl.abs(top) * 9.5367431640625e-07)


@triton.jit
def _kept_scores(
    raw: tl.tensor, ids: tl.tensor, temperature: tl.tensor, row: tl.tensor, bar_ptr: tl.tensor, last_id_ptr: tl.tensor
) -> tl.tensor:
    """Scores of the raw logits; -inf for ids that are not in the row's kept set."""
    scores = _scores(raw, temperature)
    if bar_ptr is not None:
        bar = tl.load(bar_ptr + row)
        last_id = tl.load(last_id_ptr + row)
        scores = tl.where((scores > bar) | ((scores == bar) & (ids <= last_id)), scores, float("-inf"))
    return scores


@triton.jit
def _choose(
    value_ptr: tl.tensor, id_ptr: tl.tensor, highest_ptr: tl.tensor, reached_ptr: tl.tensor, logits_ptr: tl.tensor,
    seeds_ptr: tl.tensor, temperature_ptr: tl.tensor, positions_ptr: tl.tensor, slots_ptr: tl.tensor,
    bar_ptr: tl.tensor, last_id_ptr: tl.tensor, vocab: tl.tensor, logits_stride: tl.tensor, CHUNK: tl.constexpr,
) -> None:  # fmt: skip
    """Kernel for one row and one chunk of ids per program. It finds the chunk's highest raw logit (NaN if a logit is
    NaN), and its highest sum of score and approximate noise, or for arg max its best id.

    ``reached`` has for each row the highest sum of the programs that have ended. Which have is not known, but it does
    not matter: a chunk is skipped only if it cannot win.
    """
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    slot = tl.load(slots_ptr + row)
    if slot < 0:
        return
    first_id = chunk * CHUNK
    ids = first_id + tl.arange(0, CHUNK)
    raw = _load(logits_ptr + row.to(tl.int64) * logits_stride, ids, vocab)
    highest = tl.max(raw, axis=0)
    broken = tl.max((raw != raw).to(tl.int32), axis=0) > 0
    place = row * tl.num_programs(1) + chunk
    tl.store(highest_ptr + place, tl.where(broken, float("nan"), highest))
    temperature = tl.load(temperature_ptr + slot)
    if temperature > 0.0:
        scores = _kept_scores(raw, ids, temperature, row, bar_ptr, last_id_ptr)
        value = tl.max(scores, axis=0)
        needed = float("-inf")
        if reached_ptr is not None:
            needed = _cut(tl.load(reached_ptr + row, volatile=True))
        if (value > float("-inf")) & (value + _MOST_NOISE >= needed):
            words = _words(tl.load(seeds_ptr + slot), tl.load(positions_ptr + row), first_id, CHUNK)
            value = tl.max(scores + _rough_noise(words), axis=0)
            if reached_ptr is not None:
                tl.atomic_max(reached_ptr + row, value, sem="relaxed")
        else:
            value = float("-inf")
        tl.store(value_ptr + place, value)
    else:
        tl.store(value_ptr + place, highest)
        tl.store(id_ptr + place, tl.min(tl.where(raw == highest, ids, _NO_ID), axis=0))


@triton.jit
def _winner(
    value: tl.tensor, best: tl.tensor, row_ptr: tl.tensor, row: tl.tensor, temperature: tl.tensor, seed: tl.tensor,
    position: tl.tensor, bar_ptr: tl.tensor, last_id_ptr: tl.tensor, vocab: tl.tensor, PAD: tl.constexpr,
    CHUNK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The id with the highest score plus noise, with the float64 noise of the definition. ``value`` [PAD] has each
    chunk's highest sum with approximate noise, and ``best`` is the highest of these. Usually one chunk is computed."""
    needed = _cut(best)
    c = tl.arange(0, PAD)
    near = (value >= needed) & (value > float("-inf"))
    chunk = tl.min(tl.where(near, c, PAD), axis=0)
    won = tl.full([], float("-inf"), dtype=tl.float32)
    token = tl.full([], _NO_ID, dtype=tl.int32)
    while chunk < PAD:
        first_id = chunk * CHUNK
        ids = first_id + tl.arange(0, CHUNK)
        scores = _kept_scores(_load(row_ptr, ids, vocab), ids, temperature, row, bar_ptr, last_id_ptr)
        words = _words(seed, position, first_id, CHUNK)
        left = (scores + _rough_noise(words) >= needed) & (scores > float("-inf"))
        pick = tl.min(tl.where(left, ids, _NO_ID), axis=0)
        while pick < _NO_ID:
            word = tl.sum(tl.where(ids == pick, words.to(tl.int64), 0), axis=0)
            u = (word.to(tl.float64) + 0.5) * 2.3283064365386963e-10
            noise = (-tl.log(-tl.log(u))).to(tl.float32)
            total = tl.max(tl.where(ids == pick, scores, float("-inf")), axis=0) + noise
            token = tl.where(total > won, pick, token)  # ids rise, so the lowest of equal ids stays
            won = tl.maximum(won, total)
            left = left & (ids > pick)
            pick = tl.min(tl.where(left, ids, _NO_ID), axis=0)
        near = near & (c > chunk)
        chunk = tl.min(tl.where(near, c, PAD), axis=0)
    return token


@triton.jit
def _settle(
    token_ptr: tl.tensor, failing_ptr: tl.tensor, value_ptr: tl.tensor, id_ptr: tl.tensor, highest_ptr: tl.tensor,
    logits_ptr: tl.tensor, seeds_ptr: tl.tensor, temperature_ptr: tl.tensor, positions_ptr: tl.tensor,
    slots_ptr: tl.tensor, bar_ptr: tl.tensor, last_id_ptr: tl.tensor, vocab: tl.tensor, logits_stride: tl.tensor,
    NUM_CHUNKS: tl.constexpr, PAD: tl.constexpr, CHUNK: tl.constexpr,
) -> None:  # fmt: skip
    """Kernel for one row per program. It stores the best id over all chunks, or -1 if the logits allow no id."""
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row)
    if slot < 0:
        tl.store(token_ptr + row, -1)
        tl.store(failing_ptr + 2 * row + tl.arange(0, 2), tl.zeros([2], dtype=tl.float32))
        return
    c = tl.arange(0, PAD)
    place = row * NUM_CHUNKS + c
    inside = c < NUM_CHUNKS
    highest = tl.load(highest_ptr + place, mask=inside, other=float("-inf"))
    broken = tl.max((highest != highest).to(tl.int32), axis=0) > 0
    raw = tl.where(broken, float("nan"), tl.max(highest, axis=0))
    temperature = tl.load(temperature_ptr + slot)
    shaped = tl.where(temperature > 0.0, tl.div_rn(raw, tl.where(temperature > 0.0, temperature, 1.0)), raw)
    value = tl.load(value_ptr + place, mask=inside, other=float("-inf"))
    best = tl.max(tl.where(value == value, value, float("-inf")), axis=0)
    if temperature > 0.0:
        token = _winner(
            value, best, logits_ptr + row.to(tl.int64) * logits_stride, row, temperature, tl.load(seeds_ptr + slot),
            tl.load(positions_ptr + row), bar_ptr, last_id_ptr, vocab, PAD, CHUNK,
        )  # fmt: skip
    else:
        chosen = tl.load(id_ptr + place, mask=inside, other=_NO_ID)
        token = tl.min(tl.where(inside & (value == best), chosen, _NO_ID), axis=0)
    finite = tl.abs(shaped) < float("inf")  # false for NaN
    tl.store(token_ptr + row, tl.where(finite & (token != _NO_ID), token, -1))
    tl.store(failing_ptr + 2 * row, raw)
    tl.store(failing_ptr + 2 * row + 1, shaped)


def kept_ids(logits: Tensor, settings: SamplingSettings, slots: Tensor, *, block: int = SEARCH_BLOCK) -> Kept:
    """Ids that min-p, top-k and top-p keep in each row. Needed only if a row uses one of them.

    Args:
        logits: [R, V], rows contiguous, any float dtype; grammar, bias and penalties have been applied.
        settings: sampling parameters of each slot.
        slots: int32 [R], the slot of each row; -1: a padding row.
        block: number of token ids that are read at a time, a power of 2.
    """
    num_rows, vocab = logits.shape
    bar = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    last_id = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    room = SEARCH_ROOM * block
    few = logits.new_empty((num_rows, room))
    few_ids = last_id.new_empty((num_rows, room))
    if num_rows:
        _kept_ids[(num_rows,)](
            bar, last_id, few, few_ids, logits, settings.temperature, settings.log_min_p, settings.top_k,
            settings.top_p, slots, vocab, logits.stride(0), BLOCK=block, ROOM=room, num_warps=SAMPLING_WARPS,
        )  # fmt: skip
    return Kept(bar, last_id)


def sample(
    logits: Tensor,
    settings: SamplingSettings,
    slots: Tensor,
    positions: Tensor,
    kept: Kept | None = None,
    *,
    chunk: int = DRAW_CHUNK,
) -> tuple[Tensor, Tensor]:
    """Sample one token per row: the argmax if the temperature is 0, otherwise a Gumbel-max draw from
    softmax(logits / temperature).

    Args:
        logits: [R, V], rows contiguous, any float dtype.
        settings: sampling parameters of each slot.
        slots: int32 [R], the slot of each row; -1: a padding row, which gets token -1.
        positions: int32 [R], the index that each row's new token will have.
        kept: result of :func:`kept_ids`; None if no row has min-p, top-k or top-p.
        chunk: number of token ids from which one program chooses, a power of 2 and at least 4.

    Returns:
        (int32 [R], the tokens; float32 [R, 2], highest logit and highest score). Of ids with equal scores the lowest is
        chosen. The token is -1 if no token could be chosen. Then one of the row's two float32 values is not finite,
        and :mod:`chairlift.base.row_failures` gives the reason. They are NaN if a logit is NaN, and 0 in padding rows.
    """
    num_rows, vocab = logits.shape
    num_chunks = -(-vocab // chunk)
    tokens = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    failing = torch.empty((num_rows, 2), dtype=torch.float32, device=logits.device)
    if num_rows == 0:
        return tokens, failing
    # Two separate allocations are used. Halves of one allocation could have any alignment, and Triton compiles another
    # kernel for each alignment.
    value, highest = (torch.empty((num_rows, num_chunks), dtype=torch.float32, device=logits.device) for _ in range(2))
    ids = torch.empty((num_rows, num_chunks), dtype=torch.int32, device=logits.device)
    reached = None
    if num_rows * num_chunks > CONCURRENT_CHUNKS:
        reached = torch.full((num_rows,), float("-inf"), dtype=torch.float32, device=logits.device)
    bar, last_id = (None, None) if kept is None else (kept.bar, kept.last_id)
    row = (settings.seeds, settings.temperature, positions, slots, bar, last_id, vocab, logits.stride(0))
    _choose[(num_rows, num_chunks)](value, ids, highest, reached, logits, *row, CHUNK=chunk, num_warps=SAMPLING_WARPS)
    _settle[(num_rows,)](
        tokens, failing, value, ids, highest, logits, *row, NUM_CHUNKS=num_chunks, PAD=power_of_2(num_chunks),
        CHUNK=chunk, num_warps=SAMPLING_WARPS,
    )  # fmt: skip
    return tokens, failing
