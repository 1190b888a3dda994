"""Summary of a trace: size, rate, burstiness, and repetition of prompts."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

import numpy as np

from chairlift.replay.traced_request import TracedRequest

__all__ = ["LengthFacts", "TraceFacts", "summarise"]


@dataclasses.dataclass(frozen=True, slots=True)
class LengthFacts:
    """Lengths of prompts or answers, in tokens."""

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
    """Facts about a trace."""

    requests: int
    sessions: int
    """Chats; requests on their own are none."""
    seconds: float
    """From the first arrival to the last."""
    rate: float | None
    """Requests per second; None when all arrive at once."""
    burstiness: float | None
    """Standard deviation of the gaps between arrivals over their mean: 1 in a Poisson process, above it in bursts.
    None without two gaps."""
    prompts: LengthFacts
    outputs: LengthFacts
    repeated: float | None
    """Share of the prompt tokens that repeat the beginning of an earlier prompt; None if the trace has no prefix
    ids."""
    cancels: int
    """Requests whose client leaves at some time."""
    classes: list[tuple[TracedRequest, int]]
    """One request of each combination of tenant, priority, tier and promises, and how many there are; most first."""


def summarise(trace: Sequence[TracedRequest]) -> TraceFacts:
    """The figures of a trace of at least one request, in order of arrival."""
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
    """The share, from a tree of blocks. A block repeats another if all earlier blocks do, up to the other's length."""
    if not any(request.prefix_ids for request in trace):
        return None
    nodes: dict[tuple[int, int], int] = {}
    filled: dict[int, int] = collections.defaultdict(int)
    repeated = 0
    for request in trace:
        node, left = -request.prefix_block, request.prompt_tokens
        for number in request.prefix_ids:
            node = nodes.setdefault((node, number), len(nodes) + 1)
            here = min(left, request.prefix_block)
            repeated += min(here, filled[node])
            filled[node] = max(filled[node], here)
            left -= here
    return repeated / sum(request.prompt_tokens for request in trace)
