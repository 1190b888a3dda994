"""Computes the minimum time (the floor) of a workload on a machine.

A kernel cannot be faster than the machine's memory and instructions allow. Each token of a request needs the token
before it, so an engine cannot be faster than the sum of its steps. The fraction of this limit that an engine reaches
can be compared between machines.
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
"""Numbers of tokens per step to try. In a large step more tokens share one read of the weights, but a long step delays
the requests that decode."""

GPU_BUDGETS: Final = (1024, 4096, 16384)
"""Numbers of tokens per step to try on a GPU. Only large steps are efficient there, because a GPU computes many tokens
in the time that it needs to read the weights."""


@dataclasses.dataclass(frozen=True, slots=True)
class Floor:
    """Minimum time for a workload."""

    seconds: float
    steps: int
    token_budget: int
    """Maximum number of tokens per step with which the minimum time was reached."""


@dataclasses.dataclass(slots=True)
class _Sequence:
    prompt: int
    """Number of prompt tokens of the request that are not computed yet."""
    output: int
    """Number of output tokens of the request that are not generated yet."""
    context: int = 0


def workload_floor(
    requests: Iterable[tuple[int, int]],
    cost: ModelCost,
    roof: Roof,
    *,
    max_num_seqs: int = 128,
    budgets: Sequence[int] = BUDGETS,
) -> Floor:
    """Floor of requests that all arrive at once, given as (prompt tokens, output tokens), for the best of ``budgets``.

    The time of a step has two parts. The first part is reading the weights or computing with them, whichever takes
    longer. The second part is reading the cached K and V of all decoding sequences. Attention within prompts,
    activations, sampling and everything else count as free.
    """
    lengths = list(requests)
    return min(
        (_walk(lengths, cost, roof, max_num_seqs, budget) for budget in budgets), key=lambda floor: floor.seconds
    )


def _walk(lengths: Sequence[tuple[int, int]], cost: ModelCost, roof: Roof, max_num_seqs: int, budget: int) -> Floor:
    waiting = collections.deque(_Sequence(prompt, output) for prompt, output in lengths)
    prefilling: collections.deque[_Sequence] = collections.deque()
    decoding: list[_Sequence] = []
    seconds = 0.0
    steps = 0
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
