"""Results of serving a trace: times of each request, and totals."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from chairlift.base.outputs import FinishReason
from chairlift.engine.core import EngineCore
from chairlift.engine.core_outputs import CoreOutputs, FinishedSequence
from chairlift.errors import RequestError
from chairlift_lab.replay.traced_request import TracedRequest

__all__ = ["KEEPING", "Collector", "Percentiles", "RequestTiming", "ServedTrace", "Watch", "kept_up"]


KEEPING: Final = 0.9
"""Smallest value of :func:`kept_up` at which a run kept up with its requests. A lower one means that the backlog
grows."""


def kept_up(pairs: Sequence[tuple[float, float]]) -> float:
    """Number of ended requests divided by the number of arrived requests, in the second half of the arrivals.

    ``pairs`` are (arrival, end) of all requests. In a short run, a growing backlog shows in this ratio before it shows
    in the latencies. Returns 1.0 if all requests arrive at once.
    """
    arrivals = sorted(arrival for arrival, _ in pairs)
    if len(arrivals) < 2 or arrivals[0] == arrivals[-1]:
        return 1.0
    middle = arrivals[len(arrivals) // 2]
    last = arrivals[-1]
    came = sum(middle < arrival <= last for arrival in arrivals)
    ended = sum(middle < over <= last for _, over in pairs)
    return ended / came if came else 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class Percentiles:
    """Mean and percentiles of times in seconds. All are 0 if there are no times."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float] | NDArray[np.float64]) -> Percentiles:
        """Mean and percentiles of ``values``. Percentiles are interpolated between the nearest values."""
        if not len(values):
            return cls(0.0, 0.0, 0.0, 0.0)
        p50, p90, p99 = np.percentile(values, [50, 90, 99]).tolist()
        return cls(float(np.mean(values)), p50, p90, p99)


@dataclasses.dataclass(frozen=True, slots=True)
class ServedTrace:
    """Results of a served trace. Times are in seconds."""

    requests: int
    """Number of requests that were served to their end."""
    refused: int
    """Number of requests that were refused, because they are too large or need a feature that is off."""
    dropped: int
    """Number of requests that were dropped because they could no longer meet their deadline."""
    cancelled: int
    """Number of requests whose client disconnected. They are not counted in any other field."""
    prompt_tokens: int
    cached_tokens: int
    """Number of prompt tokens that were found in the prefix cache."""
    output_tokens: int
    seconds: float
    """Time from sending the first request to the last token of all requests."""
    requests_per_second: float
    output_tokens_per_second: float
    ttft: Percentiles
    """Time from sending a request to its first token: mean and percentiles over the requests."""
    tpot: Percentiles
    """Time per output token after the first token: mean and percentiles over the requests. Not meaningful if
    ``delivered_whole``."""
    itl: Percentiles
    """Time between consecutive tokens of a request: mean and percentiles over all tokens. Not meaningful if
    ``delivered_whole``."""
    e2e: Percentiles
    queue: Percentiles
    """Time from the arrival of a request to its first step: mean and percentiles over the requests."""
    steps: int
    mean_rows: float
    """Mean number of requests in a step."""
    utilisation: float
    """Fraction of the time during which a step ran."""
    preemptions: int
    preemption_rate: float
    """Number of requests that were preempted at least once, divided by the number of requests that ended."""
    goodput: float | None
    """Fraction of the requests with latency targets (ttft_ms, tpot_ms, deadline_ms) that met all of them. None if no
    request has targets."""
    delivered_whole: bool = False
    """Whether all tokens of an answer are delivered at once, as in static batches, so that tokens have no times."""


@dataclasses.dataclass(slots=True)
class RequestTiming:
    """Times of one request on the clock of the engine core. A time of -1 means that the event has not happened yet."""

    request: TracedRequest
    """The request. Its ``arrival`` is the time at which it was sent, on the core's clock."""
    index: int
    """Index of the request in the trace."""
    started: float = -1.0
    times: list[float] = dataclasses.field(default_factory=list)
    """Time at which each token was delivered. A static batch delivers all tokens at its end."""
    left: float = -1.0
    """Time at which the request ended, for any reason. In a static batch, the end of the batch."""
    cached_tokens: int = 0
    ended: bool = False
    dropped: bool = False
    cancelled: bool = False
    preempted: bool = False
    error: str = ""
    """Reason why the request was refused or failed. Empty otherwise."""

    @property
    def tokens(self) -> int:
        return len(self.times)

    @property
    def first(self) -> float:
        return self.times[0] if self.times else -1.0

    @property
    def last(self) -> float:
        return self.times[-1] if self.times else -1.0

    @property
    def tpot(self) -> float:
        return (self.last - self.first) / (self.tokens - 1) if self.tokens > 1 else 0.0

    @property
    def kept(self) -> bool | None:
        """Whether the request met its latency targets. None if it has no targets."""
        if self.dropped:
            return False
        request = self.request
        arrival = self.request.arrival
        targets = [
            (request.ttft_ms, self.first - arrival),
            (request.tpot_ms, self.tpot),
            (request.deadline_ms, self.last - arrival),
        ]
        met = [seconds * 1000 <= limit for limit, seconds in targets if limit is not None]
        return all(met) if met else None


Watch = Callable[[RequestTiming], None]
"""Function that is called twice per request: when the request is sent, and when it has ended."""


class Collector:
    """Collects the results of steps. It does little work per token, because with many rows it takes the largest part of
    the time of a simulated step."""

    def __init__(self, watch: Watch | None, held: bool) -> None:
        """Create a collector. ``held``: whether batches are static, so that all tokens are delivered at the end of a
        batch."""
        self.timings: dict[str, RequestTiming] = {}
        self.watch = watch
        self._held = held
        self.steps = self.rows = 0
        self.busy = self.busy_until = 0.0
        self._last_step = 0

    def take(self, outputs: CoreOutputs, now: float) -> None:
        timings = self.timings
        for name, cached, when in outputs.joined:
            timings[name].started = when
            timings[name].cached_tokens = cached
        for name in outputs.sequence_ids:
            timings[name].times.append(now)
        self.end(outputs.finished, now)

    def end(self, finished: Iterable[FinishedSequence], now: float) -> None:
        """Record requests that have ended. Raises RequestError for a failed request if there is no ``watch``."""
        for ended in finished:
            timing = self.timings[ended.sequence_id]
            timing.ended = ended.finish_reason is FinishReason.LENGTH
            timing.dropped = ended.finish_reason is FinishReason.DEADLINE
            timing.preempted = ended.num_preemptions > 0
            if not timing.ended and not timing.dropped:
                timing.error = str(ended.error or ended.finish_reason)
                if self.watch is None:
                    raise RequestError(f"request {ended.sequence_id} of the trace failed: {timing.error}")
            self.over(timing, now)

    def over(self, timing: RequestTiming, now: float) -> None:
        """Record that a request has ended, and call ``watch``."""
        timing.left = now
        if self._held and timing.ended:
            timing.times = [now] * timing.tokens
        if self.watch is not None:
            self.watch(timing)

    def begin_again(self) -> None:
        """Prepare for the steps of a new core, which numbers its steps from the beginning."""
        self._last_step = 0

    def step(self, core: EngineCore) -> None:
        record = core.step_log[-1] if len(core.step_log) else None
        if record is None or record.step == self._last_step:  # no step was computed
            return
        self._last_step = record.step
        self.steps += 1
        self.rows += len(record.decodes) + len(record.chunks)
        self.busy += record.end - max(record.start, self.busy_until)
        self.busy_until = record.end

    def served(self, refused: int, preemptions: int) -> ServedTrace:
        done = [timing for timing in self.timings.values() if timing.ended]
        begin = min((timing.request.arrival for timing in self.timings.values()), default=0.0)
        seconds = max((timing.last for timing in done), default=begin) - begin
        tokens = sum(timing.tokens for timing in done)
        over = [timing for timing in self.timings.values() if timing.ended or timing.dropped]
        times = [timing.times for timing in self.timings.values() if timing.times]
        gaps = np.diff(np.fromiter(itertools.chain.from_iterable(times), float))
        # Indices of the differences between tokens of two different requests. These differences are removed.
        between = np.cumsum([len(each) for each in times[:-1]], dtype=int) - 1
        kept = [each for each in (timing.kept for timing in over) if each is not None]
        per_second = 1 / seconds if seconds > 0 else 0.0
        return ServedTrace(
            requests=len(done),
            refused=refused,
            dropped=sum(timing.dropped for timing in over),
            cancelled=sum(timing.cancelled for timing in self.timings.values()),
            prompt_tokens=sum(timing.request.prompt_tokens for timing in done),
            cached_tokens=sum(timing.cached_tokens for timing in done),
            output_tokens=tokens,
            seconds=seconds,
            requests_per_second=len(done) * per_second,
            output_tokens_per_second=tokens * per_second,
            ttft=Percentiles.of([timing.first - timing.request.arrival for timing in done]),
            tpot=Percentiles.of([timing.tpot for timing in done if timing.tokens > 1]),
            itl=Percentiles.of(np.delete(gaps, between)),
            e2e=Percentiles.of([timing.last - timing.request.arrival for timing in done]),
            queue=Percentiles.of([timing.started - timing.request.arrival for timing in done]),
            steps=self.steps,
            mean_rows=self.rows / self.steps if self.steps else 0.0,
            utilisation=min(1.0, self.busy * per_second),
            preemptions=preemptions,
            preemption_rate=sum(timing.preempted for timing in over) / len(over) if over else 0.0,
            goodput=sum(kept) / len(kept) if kept else None,
            delivered_whole=self._held,
        )
