# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator"
"""Routing of tokens to experts on the device, and the order in which a grouped matmul computes them.

The choice and the weights are those of :func:`chairlift.kernels.experts.route`: scores in float64, rounded to float32,
and the lower index among equal scores. NaN is above all numbers there, and so it is here; a row of NaN therefore
chooses experts that exist.

A row that only pads a step chooses no expert: its pairs have the index after the last expert, and belong to no tile.

**Determinism.** A row's choice depends on that row only. Nothing depends on the host, so a captured launch serves any
choice.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from chairlift.errors import InvariantError
from chairlift.kernels.routing import SCORINGS, Routing
from chairlift.kernels.triton.dependent import dependent_launch, wait_for_inputs
from chairlift.kernels.triton.launch import SORT_CHUNK, power_of_2
from chairlift.kernels.triton.norms import add_parts

__all__ = ["SortedPairs", "num_tiles", "route", "sort_pairs"]

_LAST = tl.constexpr(0x7FFFFFFF)
_LOWEST = tl.constexpr(-(2**63))
"""Below the rank of every score."""


@triton.jit
def _ranks(scores: tl.tensor, index: tl.tensor) -> tl.tensor:
    """int64 numbers in the order of (score, then lower index first). NaN is the highest score."""
    bits = tl.where(scores == 0.0, 0.0, scores).to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ _LAST, bits)
    key = tl.where(scores == scores, key, _LAST)
    return (key.to(tl.int64) << 32) + (index ^ _LAST).to(tl.int64)  # _LAST minus the index


@triton.jit
def _score_of(rank: tl.tensor) -> tl.tensor:
    """The score, float32, of a rank."""
    key = (rank >> 32).to(tl.int32)
    return tl.where(key < 0, key ^ _LAST, key).to(tl.float32, bitcast=True)


@triton.jit
def _softmax(logits: tl.tensor, inside: tl.tensor) -> tl.tensor:
    """Softmax over all elements for which ``inside`` is true, computed in float64 and rounded to float32."""
    wide = tl.where(inside, logits, float("-inf")).to(tl.float64)
    powers = tl.where(inside, tl.exp(wide - tl.max(tl.ravel(wide), axis=0)), 0.0)
    return (powers / tl.sum(tl.ravel(powers), axis=0)).to(tl.float32)


@triton.jit
def _within_groups(
    ranks: tl.tensor, index: tl.tensor, inside: tl.tensor, GROUPS: tl.constexpr, GROUPS_PAD: tl.constexpr,
    KEPT: tl.constexpr, BEST_TWO: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """``ranks`` [groups, experts of a group], with the ranks of minus infinity for all experts outside the best
    groups."""
    highest = tl.max(ranks, axis=1)
    total = _score_of(highest)
    if BEST_TWO:
        total += _score_of(tl.max(tl.where(ranks == highest[:, None], _LOWEST, ranks), axis=1))
    group = tl.arange(0, GROUPS_PAD)
    order = tl.where(group < GROUPS, _ranks(total, group), _LOWEST)
    is_kept = group < 0
    for _ in tl.static_range(KEPT):
        best = tl.max(order, axis=0)
        is_kept = is_kept | (order == best)
        order = tl.where(order == best, _LOWEST, order)
    never = _ranks(tl.where(inside, float("-inf"), float("-inf")), index)
    return tl.where(is_kept[:, None] | (inside == 0), ranks, never)


@triton.jit(do_not_specialize=["num_rows"])
def _route(
    weights_ptr: tl.tensor, chosen_ptr: tl.tensor, parts_ptr: tl.tensor, bias_ptr: tl.tensor,
    correction_ptr: tl.tensor, slots_ptr: tl.tensor, num_rows: tl.tensor, scale: tl.tensor, epsilon: tl.tensor,
    SCORING: tl.constexpr, TOP_K: tl.constexpr, TOP_K_PAD: tl.constexpr, NORMALISE: tl.constexpr, GROUPS: tl.constexpr,
    GROUPS_PAD: tl.constexpr, SIZE: tl.constexpr, SIZE_PAD: tl.constexpr, KEPT: tl.constexpr, BEST_TWO: tl.constexpr,
    NUM_SPLITS: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Kernel of :func:`route`. One program per row. The experts are a tile of groups and experts of a group."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS_PAD)[:, None]
    member = tl.arange(0, SIZE_PAD)[None, :]
    index = group * SIZE + member
    inside = (group < GROUPS) & (member < SIZE)
    wait_for_inputs(PDL)
    place = tl.arange(0, TOP_K_PAD)
    if slots_ptr is not None:  # noqa: SIM102 - one is a constant, the other a tensor
        if tl.load(slots_ptr + row) < 0:
            tl.store(weights_ptr + row * TOP_K + place, tl.zeros([TOP_K_PAD], dtype=tl.float32), mask=place < TOP_K)
            nobody = tl.full([TOP_K_PAD], GROUPS * SIZE, dtype=tl.int32)
            tl.store(chosen_ptr + row * TOP_K + place, nobody, mask=place < TOP_K)
            return
    logits = add_parts(parts_ptr, bias_ptr, row, index, inside, num_rows, GROUPS * SIZE, NUM_SPLITS)
    scores = logits
    if SCORING == 0:
        scores = _softmax(logits, inside)
    if SCORING == 2:
        scores = (1.0 / (1.0 + tl.exp(-logits.to(tl.float64)))).to(tl.float32)
    choice = scores
    if correction_ptr is not None:
        choice = scores + tl.load(correction_ptr + index, mask=inside, other=0.0).to(tl.float32)
    ranks = tl.where(inside, _ranks(choice, index), _LOWEST)
    if GROUPS > 1:
        ranks = _within_groups(ranks, index, inside, GROUPS, GROUPS_PAD, KEPT, BEST_TWO)
    chosen = tl.zeros([TOP_K_PAD], dtype=tl.int32)
    weights = tl.zeros([TOP_K_PAD], dtype=tl.float32)
    for i in range(TOP_K):
        best = tl.max(tl.ravel(ranks), axis=0)
        expert = best.to(tl.int32) ^ _LAST  # the lower half of the rank
        score = tl.sum(tl.ravel(tl.where(inside & (index == expert), scores, 0.0)), axis=0)
        chosen = tl.where(place == i, expert, chosen)
        weights = tl.where(place == i, score, weights)
        ranks = tl.where(ranks == best, _LOWEST, ranks)
    if SCORING == 1:
        weights = _softmax(weights, place < TOP_K)
    if NORMALISE:
        total = tl.full([], 0.0, dtype=tl.float32)
        for i in range(TOP_K):
            total += tl.sum(tl.where(place == i, weights, 0.0), axis=0)
        weights = tl.div_rn(weights, tl.zeros([TOP_K_PAD], dtype=tl.float32) + (total + epsilon))
    weights *= scale
    tl.store(weights_ptr + row * TOP_K + place, weights, mask=place < TOP_K)
    tl.store(chosen_ptr + row * TOP_K + place, chosen, mask=place < TOP_K)


def route(
    parts: Tensor,
    routing: Routing,
    correction: Tensor | None = None,
    bias: Tensor | None = None,
    slots: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Weights (float32) and indices (int32) of the experts that each row chooses, both [T, k], best first.

    Args:
        parts: float32 [S, T, E], contiguous: the parts of the router's logits, which are added in order.
        routing: how experts are chosen; see :func:`chairlift.kernels.experts.route`.
        correction: [E], added to the scores when experts are chosen, but not to the weights.
        bias: [E], added to the logits.
        slots: int64 [T], negative in rows that only pad the step. Their indices are E and their weights 0. None: there
            are no such rows.

    Raises:
        InvariantError: the number of experts differs from that of ``routing``.
    """
    splits, num_rows, count = parts.shape
    if count != routing.num_experts or not parts.is_contiguous():
        raise InvariantError(f"parts {list(parts.shape)} are not the logits of {routing.words}, contiguous")
    for name, given in (("correction", correction), ("bias", bias)):
        if given is not None and given.shape != (count,):
            raise InvariantError(f"the {name} {list(given.shape)} must have one number for each of {count} experts")
    weights = torch.empty((num_rows, routing.top_k), dtype=torch.float32, device=parts.device)
    chosen = torch.empty_like(weights, dtype=torch.int32)
    size = count // routing.groups
    if num_rows:
        # Fused multiply-adds are disabled, because they would skip roundings that the definition does.
        _route[(num_rows,)](
            weights, chosen, parts, bias, correction, slots, num_rows, float(routing.scale), float(routing.epsilon),
            SCORING=SCORINGS.index(routing.scoring), TOP_K=routing.top_k, TOP_K_PAD=power_of_2(routing.top_k),
            NORMALISE=routing.normalise, GROUPS=routing.groups, GROUPS_PAD=power_of_2(routing.groups), SIZE=size,
            SIZE_PAD=power_of_2(size), KEPT=routing.kept_groups, BEST_TWO=routing.group_score == "best_two",
            NUM_SPLITS=splits, num_warps=1 if count <= 64 else 4, enable_fp_fusion=False,
            **dependent_launch(parts.device),
        )  # fmt: skip
    return weights, chosen


class SortedPairs(NamedTuple):
    """Pairs of (row, place among its chosen experts), sorted by expert and divided into tiles of one expert each."""

    order: Tensor
    """int32 [tiles, block_m]: a pair is ``row * k + place``. The pairs of an expert are in ascending order; -1 after
    its last pair, and undefined in tiles that are not used."""
    experts: Tensor
    """int32 [tiles]: the expert of each tile; -1: the tile is not used."""


@triton.jit(do_not_specialize=["num_pairs", "num_tiles"])
def _sort_pairs(
    order_ptr: tl.tensor, experts_ptr: tl.tensor, chosen_ptr: tl.tensor, num_pairs: tl.tensor, num_tiles: tl.tensor,
    NUM_EXPERTS: tl.constexpr, BINS: tl.constexpr, BLOCK_M: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Kernel of :func:`sort_pairs`. One program per expert: it counts the pairs of all experts, to find its first tile,
    and then places its own."""
    expert = tl.program_id(0)
    i = tl.arange(0, CHUNK)
    bins = tl.arange(0, BINS)
    counts = tl.zeros([BINS], dtype=tl.int32)
    wait_for_inputs(PDL)
    for start in range(0, num_pairs, CHUNK):  # the last bin belongs to no expert
        found = tl.load(chosen_ptr + start + i, mask=start + i < num_pairs, other=BINS - 1)
        counts += tl.histogram(found, BINS)
    tiles = tl.where(bins < NUM_EXPERTS, (counts + BLOCK_M - 1) // BLOCK_M, 0)
    first = tl.sum(tl.where(bins < expert, tiles, 0), axis=0)
    end = first + tl.sum(tl.where(bins == expert, tiles, 0), axis=0)
    place = first * BLOCK_M
    for start in range(0, num_pairs, CHUNK):
        found = tl.load(chosen_ptr + start + i, mask=start + i < num_pairs, other=BINS - 1)
        own = (found == expert).to(tl.int32)
        tl.store(order_ptr + place + tl.cumsum(own, axis=0) - 1, start + i, mask=own != 0)
        place += tl.sum(own, axis=0)
    empty = place + tl.arange(0, BLOCK_M)
    tl.store(order_ptr + empty, tl.full([BLOCK_M], -1, dtype=tl.int32), mask=empty < end * BLOCK_M)
    for start in range(first, end, CHUNK):
        tl.store(experts_ptr + start + i, tl.zeros([CHUNK], dtype=tl.int32) + expert, mask=start + i < end)
    if expert == NUM_EXPERTS - 1:
        for start in range(end, num_tiles, CHUNK):
            tl.store(experts_ptr + start + i, tl.full([CHUNK], -1, dtype=tl.int32), mask=start + i < num_tiles)


def num_tiles(num_pairs: int, num_experts: int, block_m: int) -> int:
    """The largest number of tiles of ``block_m`` pairs of one expert each, whatever the rows choose."""
    return num_pairs // block_m + min(num_pairs, num_experts)


def sort_pairs(chosen: Tensor, num_experts: int, block_m: int) -> SortedPairs:
    """Sort the pairs of ``chosen`` (int32 [T, k], contiguous) by expert, into tiles of ``block_m`` pairs. Pairs with
    the index ``num_experts`` are left out. The number of tiles depends on shapes only, so a captured launch serves any
    choice."""
    num_pairs = chosen.numel()
    tiles = num_tiles(num_pairs, num_experts, block_m)
    order = torch.empty((tiles, block_m), dtype=torch.int32, device=chosen.device)
    experts = torch.empty(tiles, dtype=torch.int32, device=chosen.device)
    if num_pairs:
        _sort_pairs[(num_experts,)](
            order, experts, chosen, num_pairs, tiles, NUM_EXPERTS=num_experts, BINS=power_of_2(num_experts + 1),
            BLOCK_M=block_m, CHUNK=SORT_CHUNK, **dependent_launch(chosen.device),
        )  # fmt: skip
    return SortedPairs(order, experts)
