"""Draws a smaller trace from a large trace, with similar lengths and the same rate."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from chairlift.errors import ConfigError
from chairlift_lab.replay.traced_request import TracedRequest

__all__ = ["sample_trace"]


def sample_trace(
    trace: Sequence[TracedRequest],
    count: int | None = None,
    seed: int = 0,
    *,
    rate: float | None = None,
    window: bool = False,
) -> list[TracedRequest]:
    """Draw ``count`` requests of a trace, or all requests if ``count`` is None.

    The result is in order of arrival; the first request arrives at 0.

    By default requests are drawn at random from the whole trace, so that all hours contribute lengths. Sessions are
    drawn as a whole, which may give slightly more than ``count`` requests. To keep the request rate, the start times of
    sessions are multiplied by the drawn fraction of the trace. Pauses within a session do not change. The sample has
    smoother bursts and fewer repeated prefixes than the trace.

    With ``window``, the sample is a run of consecutive requests that begins at a random request. This preserves bursts
    and repeated prefixes, but cuts sessions, and the lengths may be typical of one hour only.

    ``rate``, in requests per second, rescales the start times. Raises ConfigError when there are too few requests, or
    when ``rate`` is given and all requests arrive at once.
    """
    if count is not None and not 1 <= count <= len(trace):
        raise ConfigError(
            f"the trace has {len(trace):,} requests, so a sample has from 1 to {len(trace):,} requests, not {count:,};"
            " leave the number out to take the whole trace"
        )
    rng = np.random.default_rng(seed)
    scale = 1.0
    if count is None:
        chosen = list(trace)
    elif window:
        first = int(rng.integers(0, len(trace) - count + 1))
        chosen = list(trace[first : first + count])
    else:
        chosen = _whole_sessions(trace, count, rng)
        scale = len(chosen) / len(trace)
    starts: dict[str, float] = {}
    for request in chosen:
        if request.session:
            starts.setdefault(request.session, request.arrival)
    begins = [starts.get(request.session, request.arrival) for request in chosen]
    if rate is not None:
        scale = _scale_for(rate, begins, len(starts) + sum(not request.session for request in chosen))
    origin = min(begins)
    moved = [
        dataclasses.replace(request, arrival=(begin - origin) * scale + request.arrival - begin)
        for request, begin in zip(chosen, begins, strict=True)
    ]
    return sorted(moved, key=lambda request: request.arrival)


def _whole_sessions(trace: Sequence[TracedRequest], count: int, rng: np.random.Generator) -> list[TracedRequest]:
    sessions: dict[str | int, list[int]] = {}
    for index, request in enumerate(trace):
        sessions.setdefault(request.session or index, []).append(index)
    units = list(sessions.values())
    indices: list[int] = []
    for number in rng.permutation(len(units)):
        indices += units[number]
        if len(indices) >= count:
            break
    return [trace[index] for index in sorted(indices)]


def _scale_for(rate: float, begins: Sequence[float], sessions: int) -> float:
    """Factor for the start times of sessions that gives ``rate`` requests per second."""
    seconds = max(begins) - min(begins)
    if not 1e-6 <= rate <= 1e9:
        raise ConfigError(f"rate must be from 0.000001 to 1,000,000,000 requests per second, got {rate}")
    if sessions < 2 or seconds == 0:
        raise ConfigError("all requests arrive at once, so there is no rate to change; draw the trace with arrivals")
    return len(begins) / sessions * (sessions - 1) / seconds / rate
