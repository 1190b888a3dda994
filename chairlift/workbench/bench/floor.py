"""Least time of a workload on a machine: every step reads the weights once, or computes with them.

A kernel cannot be faster than memory and instructions allow. An engine cannot be faster than the sum over steps in
which a request waits for its previous token. The share of this limit that an engine reaches can be compared between
machines.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Final

from chairlift.kernels.roof import Roof
from chairlift.models.step_cost import ModelCost

__all__ = ["BUDGETS", "GPU_BUDGETS", "Floor", "workload_floor"]

BUDGETS: Final = (192, 256, 384, 512, 1024)
"""Candidate numbers of tokens per step for the floor. Large steps share one read of the weights; small ones waste no
place."""

GPU_BUDGETS: Final = (1024, 4096, 16384)
"""Token budgets to try on a GPU. It computes so much while it reads the weights that only large steps are efficient."""


@dataclasses.dataclass(frozen=True, slots=True)
class Floor:
    """The least time for a workload."""

    seconds: float
    steps: int
    token_budget: int
    """Tokens per step at which it was least."""


@dataclasses.dataclass(slots=True)
class _Sequence:
    prompt: int
    """Prompt tokens not computed yet."""
    output: int
    """Tokens not generated yet."""
    context: int = 0


def workload_floor(
    requests: Iterable[tuple[int, int]],
    cost: ModelCost,
    roof: Roof,
    *,
    max_num_seqs: int = 128,
    budgets: Sequence[int] = BUDGETS,
) -> Floor:
    """The floor of requests of (prompt, output) lengths that all arrive at once, with the best of a few token budgets.

    Of each step: the weights are read or computed with, whichever takes longer, and the cached K and V of every
    decoding sequence are read. Attention within prompts, activations, sampling and everything else are free.
    """
    lengths = list(requests)
    return min(
        (_walk(lengths, cost, roof, max_num_seqs, budget) for budget in budgets), key=lambda floor: floor.seconds
    )


def _walk(lengths: Sequence[tuple[int, int]], cost: ModelCost, roof: Roof, max_num_seqs: int, budget: int) -> Floor:
    waiting = collections.deque(_Sequence(prompt, output) for prompt, output in lengths)
    prefilling: collections.deque[_Sequence] = collections.deque()
    decoding: list[_Sequence] = []
    seconds, steps = 0.0, 0
    while waiting or prefilling or decoding:
        kv_bytes = sum(cost.kv_read(sequence.context) for sequence in decoding)
        tokens = sampled = len(decoding)
        for sequence in decoding:
            sequence.context += 1
            sequence.output -= 1
        while tokens < budget:
            if not prefilling:
                if not waiting or len(decoding) >= max_num_seqs:
                    break
                prefilling.append(waiting.popleft())
            first = prefilling[0]
            chunk = min(budget - tokens, first.prompt)
            first.prompt -= chunk
            first.context += chunk
            tokens += chunk
            if first.prompt == 0:
                first.output -= 1
                sampled += 1
                decoding.append(prefilling.popleft())
        seconds += cost.least_seconds(roof, tokens, sampled, kv_bytes)
        steps += 1
        decoding = [sequence for sequence in decoding if sequence.output > 0]
    return Floor(seconds, steps, budget)
