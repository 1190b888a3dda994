"""Summarises a trace: number of requests, rate, burstiness, lengths, and repetition of prompts."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

import numpy as np

from chairlift_lab.replay.traced_request import TracedRequest

__all__ = ["LengthFacts", "TraceFacts", "summarise"]


@dataclasses.dataclass(frozen=True, slots=True)
class LengthFacts:
    """Statistics of the lengths of prompts or answers, in tokens."""

    total: int
    mean: float
    p50: float
    p90: float
    p99: float
    most: int

    @classmethod
    def of(cls, lengths: Sequence[int]) -> LengthFacts:
        p50, p90, p99 = np.percentile(lengths, [50, 90, 99]).tolist()
        return cls(sum(lengths), sum(lengths) / len(lengths), p50, p90, p99, max(lengths))


@dataclasses.dataclass(frozen=True, slots=True)
class TraceFacts:
    """Statistics of a trace."""

    requests: int
    sessions: int
    """Number of chats. Requests without a session are not counted."""
    seconds: float
    """Time from the first arrival to the last arrival."""
    rate: float | None
    """Number of requests per second. None if all requests arrive at once."""
    burstiness: float | None
    """Standard deviation of the gaps between arrivals, divided by the mean gap. It is 1 for a Poisson process and
    larger for bursts. None if there are fewer than two gaps."""
    prompts: LengthFacts
    outputs: LengthFacts
    repeated: float | None
    """Fraction of the prompt tokens that repeat the beginning of an earlier prompt. None if the trace has no prefix
    ids."""
    cancels: int
    """Number of requests whose client disconnects early."""
    classes: list[tuple[TracedRequest, int]]
    """(example request, number of requests) for each combination of tenant, priority, tier and latency targets; the
    most frequent combination first."""


def summarise(trace: Sequence[TracedRequest]) -> TraceFacts:
    """Summarise a trace of at least one request. The requests must be in order of arrival."""
    seconds = trace[-1].arrival - trace[0].arrival
    gaps = np.diff([request.arrival for request in trace])
    classes: dict[tuple[object, ...], tuple[TracedRequest, int]] = {}
    for request in trace:
        promises = (request.ttft_ms, request.tpot_ms, request.deadline_ms)
        key = (request.tenant, request.priority, request.service_tier, *promises)
        classes[key] = (request, classes[key][1] + 1 if key in classes else 1)
    return TraceFacts(
        requests=len(trace),
        sessions=len({request.session for request in trace if request.session}),
        seconds=seconds,
        rate=(len(trace) - 1) / seconds if seconds else None,
        burstiness=float(np.std(gaps) / np.mean(gaps)) if seconds and len(gaps) > 1 else None,
        prompts=LengthFacts.of([request.prompt_tokens for request in trace]),
        outputs=LengthFacts.of([request.output_tokens for request in trace]),
        repeated=_repeated(trace),
        cancels=sum(request.cancel_ms is not None for request in trace),
        classes=sorted(classes.values(), key=lambda each: -each[1]),
    )


def _repeated(trace: Sequence[TracedRequest]) -> float | None:
    """Compute ``TraceFacts.repeated`` with a tree of blocks.

    A block repeats an earlier block if all blocks before it are equal, too. A partial block repeats only the tokens
    that the earlier block has.
    """
    if not any(request.prefix_ids for request in trace):
        return None
    nodes: dict[tuple[int, int], int] = {}
    filled: dict[int, int] = collections.defaultdict(int)
    repeated = 0
    for request in trace:
        node = -request.prefix_block
        remaining = request.prompt_tokens
        for number in request.prefix_ids:
            node = nodes.setdefault((node, number), len(nodes) + 1)
            block_tokens = min(remaining, request.prefix_block)
            repeated += min(block_tokens, filled[node])
            filled[node] = max(filled[node], block_tokens)
            remaining -= block_tokens
    return repeated / sum(request.prompt_tokens for request in trace)
