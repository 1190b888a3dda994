"""What becomes of a trace that an engine core serves: the times of each request, and what they add up to."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from chairlift.engine.core import CoreOutputs, EngineCore, FinishedSequence
from chairlift.errors import RequestError
from chairlift.outputs import FinishReason
from chairlift.replay.traced_request import TracedRequest

__all__ = ["Collector", "Percentiles", "RequestTiming", "ServedTrace", "Watch"]


@dataclasses.dataclass(frozen=True, slots=True)
class Percentiles:
    """Percentiles of times in seconds; zeros where there were none."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float] | NDArray[np.float64]) -> Percentiles:
        """Interpolated between the nearest values."""
        if not len(values):
            return cls(0.0, 0.0, 0.0, 0.0)
        p50, p90, p99 = np.percentile(values, [50, 90, 99]).tolist()
        return cls(float(np.mean(values)), p50, p90, p99)


@dataclasses.dataclass(frozen=True, slots=True)
class ServedTrace:
    """What became of a trace. Times in seconds."""

    requests: int
    """Served to their end."""
    refused: int
    """Turned away at the door, because they could never fit or asked for what the settings do not have."""
    dropped: int
    """Ended because they could not keep their deadline any more."""
    cancelled: int
    """Ended because their client left; they count nowhere else."""
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens read from the prefix cache."""
    output_tokens: int
    seconds: float
    """From the first request that is sent to the last token."""
    requests_per_second: float
    output_tokens_per_second: float
    ttft: Percentiles
    """Time to the first token, from when it is sent. The others per request too, but for the gaps between tokens."""
    tpot: Percentiles
    """Time per output token after the first; says nothing where ``delivered_whole``, as the next."""
    itl: Percentiles
    """Gaps between tokens, over all tokens."""
    e2e: Percentiles
    queue: Percentiles
    """From arrival to the first step."""
    steps: int
    mean_rows: float
    """Requests in a step."""
    utilisation: float
    """Share of the seconds in which a step ran."""
    preemptions: int
    preemption_rate: float
    """Requests preempted at least once / requests that ended."""
    goodput: float | None
    """Share of the requests with a promise (ttft_ms, tpot_ms, deadline_ms) that was kept in full; None without any."""
    delivered_whole: bool = False
    """Whether answers came whole, as those of static batches do: then there is no time between tokens."""


@dataclasses.dataclass(slots=True)
class RequestTiming:
    """One request on its way. Times are on the core's clock; -1 is not yet."""

    request: TracedRequest
    """With the time at which it was sent as its arrival."""
    index: int
    """Place in the trace."""
    started: float = -1.0
    times: list[float] = dataclasses.field(default_factory=list)
    """When its tokens came; of an answer of a static batch, which delivers when all of it has ended, all then."""
    left: float = -1.0
    """When it was over, however it ended; in a static batch that is when the whole batch was."""
    cached_tokens: int = 0
    ended: bool = False
    dropped: bool = False
    cancelled: bool = False
    preempted: bool = False
    error: str = ""
    """Why it was refused at the door, or how it failed."""

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
        """Whether what was promised was kept; None when nothing was."""
        if self.dropped:
            return False
        request, arrival = self.request, self.request.arrival
        promised = [
            (request.ttft_ms, self.first - arrival),
            (request.tpot_ms, self.tpot),
            (request.deadline_ms, self.last - arrival),
        ]
        met = [seconds * 1000 <= limit for limit, seconds in promised if limit is not None]
        return all(met) if met else None


Watch = Callable[[RequestTiming], None]
"""Told of each request twice: when it is sent, and when it is over."""


class Collector:
    """Reads what steps bring, and nothing twice: at many rows it is the most expensive part of a simulated step."""

    def __init__(self, watch: Watch | None, held: bool) -> None:
        """``held``: nothing is delivered before a batch has ended."""
        self.timings: dict[str, RequestTiming] = {}
        self.watch, self._held = watch, held
        self.steps = self.rows = 0
        self.busy = self.busy_until = 0.0
        self._last_step = 0

    def take(self, outputs: CoreOutputs, now: float) -> None:
        timings = self.timings
        for name, cached, when in outputs.joined:
            timings[name].started, timings[name].cached_tokens = when, cached
        for name in outputs.sequence_ids:
            timings[name].times.append(now)
        self.end(outputs.finished, now)

    def end(self, finished: Iterable[FinishedSequence], now: float) -> None:
        """Note who has left. Raises RequestError for one that failed, unless somebody watches."""
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
        """It will not change any more."""
        timing.left = now
        if self._held and timing.ended:
            timing.times = [now] * timing.tokens
        if self.watch is not None:
            self.watch(timing)

    def step(self, core: EngineCore) -> None:
        record = core.step_log[-1] if len(core.step_log) else None
        if record is None or record.step == self._last_step:  # it only told of requests that came too late
            return
        self._last_step = record.step
        self.steps += 1
        self.rows += len(record.decodes) + len(record.chunks)
        self.busy += record.end - max(record.start, self.busy_until)
        self.busy_until = record.end

    def served(self, refused: int, core: EngineCore, preemptions: int) -> ServedTrace:
        done = [timing for timing in self.timings.values() if timing.ended]
        begin = min((timing.request.arrival for timing in self.timings.values()), default=0.0)
        seconds = max((timing.last for timing in done), default=begin) - begin
        tokens = sum(timing.tokens for timing in done)
        over = [timing for timing in self.timings.values() if timing.ended or timing.dropped]
        times = [timing.times for timing in self.timings.values() if timing.times]
        gaps = np.diff(np.fromiter(itertools.chain.from_iterable(times), float))
        between = np.cumsum([len(each) for each in times[:-1]], dtype=int) - 1  # from one request to another
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
            preemptions=core.scheduler.num_preemptions - preemptions,
            preemption_rate=sum(timing.preempted for timing in over) / len(over) if over else 0.0,
            goodput=sum(kept) / len(kept) if kept else None,
            delivered_whole=self._held,
        )
