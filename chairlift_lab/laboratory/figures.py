"""Figures of one cell: what a policy did for the requests of one seed, without warm-up and drain."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from chairlift.core.scheduler.cost_model import CostModel
from chairlift_lab.laboratory.statistics import jain, mser
from chairlift_lab.laboratory.targets import LOOSE, STRICT, LabTargets, alone_times
from chairlift_lab.replay.served import RequestTiming, kept_up

__all__ = ["CellFigures", "MeasuredWindow", "figures_of", "service_index", "window_of"]

_TAIL: Final = 0.1
"""Share of the arrivals, at the end, whose requests are left out: nobody arrives behind them."""
_BINS: Final = 200
_ANSWER_WEIGHT: Final = 2.0
"""Weight of an answer token in the service of a tenant, beside 1 for a prompt token (as in VTC, OSDI 2024)."""


@dataclasses.dataclass(frozen=True, slots=True)
class MeasuredWindow:
    """Time from which and up to which arrivals count, in seconds from the first arrival."""

    start: float
    end: float


@dataclasses.dataclass(frozen=True, slots=True)
class CellFigures:
    """Figures of one policy with one seed. Times are in seconds; rates are per second of the window."""

    requests: int
    """Number of requests that arrived within the window."""
    goodput_strict: float
    goodput_loose: float
    """Requests per second that met the targets for TTFT and TPOT. One that failed or was dropped met none."""
    requests_per_second: float
    output_tokens_per_second: float
    ttft_p50: float
    ttft_p99: float
    tpot_p50: float
    tpot_p99: float
    worst_wait: float
    """Longest time from an arrival to the first step of the request."""
    jain: float | None
    """Jain's index over the service of backlogged tenants. None if no two tenants waited at once."""
    worst_slowdown: float
    slowdown_p99: float
    """Time of a request divided by its time alone on the machine."""
    preemptions: int
    wasted_tokens: int
    """Tokens that were computed again after a preemption, or dropped. Like preemptions, over the whole run."""
    cached_share: float
    """Fraction of the prompt tokens that were found in the prefix cache."""
    keeping: float
    """Number of ended requests divided by the number of arrived requests in the second half; below 1 the queue
    grows."""

    def to_dict(self) -> dict[str, Any]:
        """The figures as data for JSON, with six digits."""
        fields = dataclasses.asdict(self)
        return {name: float(f"{value:.6g}") if isinstance(value, float) else value for name, value in fields.items()}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> CellFigures:
        """Figures from the data of :meth:`to_dict`. Raises TypeError for other data."""
        return cls(**fields)


def window_of(timings: Sequence[RequestTiming], begin: float = 0.0) -> MeasuredWindow:
    """Window of a run: MSER cuts the warm-up by the waiting times, and the last tenth of the arrivals is left out.

    The window of the baseline holds for all policies of a seed. ``begin``: time at which the run began.
    """
    ordered = sorted(timings, key=lambda timing: timing.request.arrival)
    waits = [max(0.0, timing.started - timing.request.arrival) for timing in ordered]
    cut = mser(waits)
    last = ordered[max(cut, int(len(ordered) * (1 - _TAIL)) - 1)]
    return MeasuredWindow(ordered[cut].request.arrival - begin, last.request.arrival - begin)


def figures_of(
    timings: Sequence[RequestTiming],
    window: MeasuredWindow,
    targets: LabTargets,
    cost: CostModel,
    budget: int,
    *,
    preemptions: int,
    wasted_tokens: int,
    begin: float = 0.0,
) -> CellFigures:
    """Figures of a served trace. ``budget``: prompt tokens of a step. ``begin``: time at which the run began."""
    start, end = window.start + begin, window.end + begin
    inside = [timing for timing in timings if start <= timing.request.arrival <= end]
    done = [timing for timing in inside if timing.ended]
    seconds = max(end - start, 1e-9)
    ttft = [timing.first - timing.request.arrival for timing in done]
    tpot = [timing.tpot for timing in done if timing.tokens > 1]
    tokens = sum(start <= time <= end for timing in timings for time in timing.times)
    good = {
        times: sum(targets.met(wait, timing.tpot, times) for wait, timing in zip(ttft, done, strict=True))
        for times in (STRICT, LOOSE)
    }
    slowdowns = [
        (timing.last - timing.request.arrival) / alone_times(timing.request, cost, budget).whole for timing in done
    ]
    last = max((timing.left for timing in timings), default=end)
    dropped = sum(timing.tokens for timing in timings if not timing.ended)
    prompts = sum(timing.request.prompt_tokens for timing in inside)
    return CellFigures(
        requests=len(inside),
        goodput_strict=good[STRICT] / seconds,
        goodput_loose=good[LOOSE] / seconds,
        requests_per_second=sum(start <= timing.left <= end for timing in timings if timing.ended) / seconds,
        output_tokens_per_second=tokens / seconds,
        ttft_p50=_percentile(ttft, 50),
        ttft_p99=_percentile(ttft, 99),
        tpot_p50=_percentile(tpot, 50),
        tpot_p99=_percentile(tpot, 99),
        worst_wait=max(
            (timing.started - timing.request.arrival for timing in inside if timing.started >= 0), default=0.0
        ),
        jain=service_index(timings, start, end),
        worst_slowdown=max(slowdowns, default=0.0),
        slowdown_p99=_percentile(slowdowns, 99),
        preemptions=preemptions,
        wasted_tokens=wasted_tokens + dropped,
        cached_share=sum(timing.cached_tokens for timing in inside) / prompts if prompts else 0.0,
        keeping=kept_up([(each.request.arrival, each.last if each.ended else last) for each in timings]),
    )


def _percentile(values: Sequence[float], share: float) -> float:
    return float(np.percentile(values, share)) if values else 0.0


def service_index(timings: Sequence[RequestTiming], start: float, end: float) -> float | None:
    """Jain's index over the tenants' service per second of backlog, in moments at which several tenants waited.

    A tenant is backlogged while one of its requests has arrived and waits for its first step. Service is prompt tokens,
    counted when the first token comes, plus twice the answer tokens.
    """
    if end <= start:
        return None
    names = sorted({timing.request.tenant for timing in timings})
    place = {name: index for index, name in enumerate(names)}
    width = (end - start) / _BINS
    waiting = np.zeros((len(names), _BINS), dtype=bool)
    service = np.zeros((len(names), _BINS))
    for timing in timings:
        row = place[timing.request.tenant]
        begun = timing.started if timing.started >= 0 else end
        first, last = (int((time - start) // width) for time in (timing.request.arrival, begun))
        if last > first:  # a wait within one moment is none
            waiting[row, max(0, first + 1) : max(0, min(_BINS, last))] = True
        for number, time in enumerate(timing.times):
            at = int((time - start) // width)
            if 0 <= at < _BINS:
                service[row, at] += _ANSWER_WEIGHT
                if not number:
                    service[row, at] += timing.request.prompt_tokens - timing.cached_tokens
    several = waiting.sum(axis=0) >= 2
    shares: dict[str, float] = collections.OrderedDict()
    for name, row in place.items():
        backlogged = waiting[row] & several
        if backlogged.any():
            shares[name] = float(service[row][backlogged].sum() / backlogged.sum())
    return jain(list(shares.values()))
