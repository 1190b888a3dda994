"""A smaller trace from a large one, like it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from chairlift.errors import ConfigError
from chairlift.replay.traced_request import TracedRequest

__all__ = ["sample_trace"]


def sample_trace(
    trace: Sequence[TracedRequest],
    count: int | None = None,
    seed: int = 0,
    *,
    rate: float | None = None,
    window: bool = False,
) -> list[TracedRequest]:
    """``count`` requests of a trace in order of arrival, the first at 0; all of them without ``count``.

    They are drawn at random from the whole trace, so that lengths are not those of one hour. Sessions are drawn as a
    whole, which may give a few requests more. To keep the rate, the starts of sessions are moved closer together by the
    drawn share. Pauses within a session are unchanged, so the last of a few long sessions may end late. A sample has
    smoother bursts and fewer repeated prefixes. ``window`` preserves both: it takes neighbouring requests from a random
    place with their times, and cuts sessions at its ends; but lengths in one hour may differ from those of the day.

    ``rate``, in requests per second, stretches the times further. Raises ConfigError when there are too few requests,
    or when all arrive at once and have no rate.
    """
    if count is not None and not 1 <= count <= len(trace):
        raise ConfigError(
            f"the trace has {len(trace):,} requests, so a sample has from 1 to so many, not {count:,}; leave the number"
            " out to take all of them"
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
    for place, request in enumerate(trace):
        sessions.setdefault(request.session or place, []).append(place)
    units = list(sessions.values())
    places: list[int] = []
    for number in rng.permutation(len(units)):
        places += units[number]
        if len(places) >= count:
            break
    return [trace[place] for place in sorted(places)]


def _scale_for(rate: float, begins: Sequence[float], sessions: int) -> float:
    """Factor for the start times of sessions that gives ``rate`` requests per second."""
    seconds = max(begins) - min(begins)
    if not 1e-6 <= rate <= 1e9:
        raise ConfigError(f"rate must be from 0.000001 to 1,000,000,000 requests per second, got {rate}")
    if sessions < 2 or seconds == 0:
        raise ConfigError("all requests come at once, so there is no rate to change; draw the trace with arrivals")
    return len(begins) / sessions * (sessions - 1) / seconds / rate
