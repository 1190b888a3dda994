"""Summarises the outcomes of a run of ``bench serve``, and compares the runs of two servers.

Averages exclude requests that failed, requests that the client cancelled because the trace says so, and requests that
Ctrl-C interrupted.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from chairlift.errors import ConfigError
from chairlift_lab.bench.serve_run import LoadOutcome, ServeRun
from chairlift_lab.bench.verdict import Ratio, RunSample

__all__ = [
    "COMPARED",
    "Figures",
    "Stats",
    "compare",
    "figures_of",
    "is_good",
    "latencies",
    "parse_goodput",
    "peak_of",
    "tokens_per_second",
]

_SLO_NAMES: Final = ("ttft", "tpot", "e2el")
_LATE_MS: Final = 10.0
_BUSY: Final = 0.8


def parse_goodput(items: Sequence[str]) -> dict[str, float]:
    """Parse limits such as ``ttft:500 tpot:80`` (vLLM's format) or ``ttft:500,tpot:80`` into name -> ms.

    Raises ConfigError for an unknown name or an invalid number.
    """
    limits: dict[str, float] = {}
    for item in ",".join(items).split(","):
        name, _, number = item.strip().partition(":")
        try:
            limits[name] = float(number)
        except ValueError:
            limits[name] = math.nan
        if name not in _SLO_NAMES or not 0 < limits[name] < math.inf:
            raise ConfigError(f"goodput wants limits in ms like ttft:500 tpot:80 e2el:10000, got {item!r:.60}")
    return limits


@dataclasses.dataclass(frozen=True, slots=True)
class Stats:
    """Statistics of a measured time, in ms. There is one value per request; for inter-token latency, one value per
    event."""

    mean: float
    median: float
    std: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Stats | None:
        """Statistics of times in seconds. Percentiles are interpolated. Returns None if there are no times."""
        if not seconds:
            return None
        values = np.asarray(seconds) * 1000
        p50, p90, p99 = np.percentile(values, [50, 90, 99]).tolist()
        return cls(float(values.mean()), p50, float(values.std()), p50, p90, p99)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Measured values of one run. Throughputs are averages over the whole run, per second."""

    completed: int
    failed: int
    cancelled: int
    unfinished: int
    seconds: float
    input_tokens: int
    output_tokens: int
    cached_tokens: int | None
    """Number of prompt tokens that the server found in its prefix cache. None if the server does not report it."""
    request_throughput: float
    output_throughput: float
    total_token_throughput: float
    max_output_tokens_per_s: float
    """Number of output tokens in the busiest second. Seconds are counted from the start of the run."""
    max_concurrent_requests: int
    goodput: float | None
    """Number of requests per second that met all latency limits. None if there are no limits."""
    good: int
    times: Mapping[str, Stats | None]
    """Name of a time -> statistics. The names are vLLM's (``ttft``, ``tpot``, ``itl``, ``e2el``), ``queueing`` (until
    the response headers) and ``server_queue`` (as the server reports it)."""
    counted: bool
    """Whether every event has one token, so that the time between events is the time between tokens."""
    whole: int
    """Number of answers whose tokens all came in one event, so that the time per token is unknown."""
    shorter: int
    """Number of answers that ended before the requested length."""
    preemption_rate: float | None
    """Fraction of the completed requests that were preempted at least once. None if the server does not report it."""
    lateness: Stats | None
    """Delay between the planned and the actual sending of a request, without requests that waited for a free slot or an
    earlier turn. None if the engine runs in the measuring process."""
    cpu_share: float | None
    errors: Sequence[tuple[str, int, str]]
    """(kind of error, number of requests, example of a message); the most frequent kind comes first."""
    busy: float = 0.0
    """Share of this machine that other programs used, see :attr:`ServeRun.busy`."""
    collective_share: float | None = None
    """Share of time in which processes of a model waited for each other, see :attr:`ServeRun.collective_share`."""

    @property
    def throughput(self) -> RunSample:
        """Output tokens per second, with the circumstances of the run."""
        return RunSample(self.output_throughput, self.seconds, self.busy)

    def doubts(self, run: ServeRun) -> Iterator[str]:
        """Reasons why the measured values may be misleading, as sentences for the user."""
        late = self.lateness
        paced = bool(run.load.requests) and run.load.requests[-1].arrival > 0
        if paced and late is not None and late.p99 > _LATE_MS:
            yield (
                f"the client was late: 1 % of the requests left {late.p99:.0f} ms or more after they were due; "
                "run it on an idle machine, or send fewer"
            )
        if self.cpu_share is not None and self.cpu_share > _BUSY:
            yield f"the client took {self.cpu_share:.0%} of a processor: it may be what limits these figures"
        if run.load.max_concurrency is not None:
            yield (
                f"closed loop: at most {run.load.max_concurrency:,} requests are in flight, so a slow server gets "
                "fewer requests, and time in its queue stays hidden"
            )
        if self.completed and not self.counted:
            yield (
                "an event may have several tokens: ITL is the time between events, one gap for each, as vllm bench"
                " serve counts it"
            )
        if self.whole:
            yield f"{self.whole:,} of {self.completed:,} answers came whole: they have no TPOT and no ITL"
        if self.shorter:
            hint = "" if run.server.dialect.ignore_eos else "; --ignore-eos asks for exact lengths"
            yield f"{self.shorter:,} of {self.completed:,} answers ended before the requested length{hint}"
        if self.unfinished:
            yield f"stopped early: {self.unfinished:,} requests were not answered yet, and are not counted"


def latencies(run: ServeRun) -> dict[str, list[float]]:
    """Name of a time, as in :attr:`Figures.times` -> its values in seconds, over all completed requests."""
    done = _completed(run)
    return {
        "ttft": [each.ttft for each in done],
        "tpot": [tpot for each in done if (tpot := each.tpot) is not None],
        "itl": [gap for each in done for gap in each.itls],
        "e2el": [each.e2el for each in done],
        "queueing": [each.headers - each.start for each in done],
        "server_queue": [each.server_queue_ms / 1000 for each in done if each.server_queue_ms is not None],
    }


def figures_of(run: ServeRun, slo: Mapping[str, float]) -> Figures:
    """Compute the measured values of a run. ``slo``: limits from :func:`parse_goodput`; if it is empty, goodput is
    None."""
    done = _completed(run)
    seconds = run.seconds
    status = Counter(each.status for each in run.outcomes)
    read = sum(each.prompt_tokens for each in done)
    written = sum(each.output_tokens for each in done)
    cached = [each.cached_tokens for each in done if each.cached_tokens is not None]
    preempted = [each.preempted for each in done if each.preempted is not None]
    good = sum(is_good(each, slo) for each in done)
    messages = {each.kind: each.message for each in reversed(run.outcomes) if each.status == "failed"}
    kinds = Counter(each.kind for each in run.outcomes if each.status == "failed").most_common()
    late = [max(0.0, each.start - each.scheduled) for each in run.outcomes if each.start and not each.held]
    late = [] if run.cpu_share is None else late
    return Figures(
        completed=len(done),
        failed=status["failed"],
        cancelled=status["cancelled"],
        unfinished=status["unfinished"],
        seconds=seconds,
        input_tokens=read,
        output_tokens=written,
        cached_tokens=sum(cached) if cached else None,
        request_throughput=len(done) / seconds,
        output_throughput=written / seconds,
        total_token_throughput=(read + written) / seconds,
        max_output_tokens_per_s=float(max(tokens_per_second(run), default=0)),
        max_concurrent_requests=peak_of([(each.start, each.end) for each in run.outcomes if each.start]),
        goodput=good / seconds if slo else None,
        good=good,
        times={name: Stats.of(values) for name, values in latencies(run).items()},
        counted=all(each.counted for each in done),
        whole=sum(each.came_whole for each in done),
        shorter=sum(each.output_tokens < each.wanted_tokens for each in done),
        preemption_rate=sum(preempted) / len(preempted) if preempted else None,
        lateness=Stats.of(late),
        cpu_share=run.cpu_share,
        errors=[(kind, count, messages[kind]) for kind, count in kinds],
        busy=run.busy,
        collective_share=run.collective_share,
    )


def is_good(outcome: LoadOutcome, slo: Mapping[str, float]) -> bool:
    """Whether a completed request met all latency limits in ``slo``. An answer of one token always meets the TPOT
    limit."""
    seconds = {"ttft": outcome.ttft, "tpot": outcome.tpot or 0.0, "e2el": outcome.e2el}
    return all(seconds[name] * 1000 <= limit for name, limit in slo.items())


def peak_of(spans: Sequence[tuple[float, float]]) -> int:
    """Largest number of time spans (start, end) that overlap at one moment. Spans that only touch do not overlap."""
    events = sorted([(start, 1) for start, _ in spans] + [(end, -1) for _, end in spans])
    return max(np.cumsum([change for _, change in events]).tolist(), default=0)


def tokens_per_second(run: ServeRun) -> list[int]:
    """Number of output tokens in each second of the run. Only completed requests are counted."""
    bins = [0] * (math.ceil(run.seconds) + 1)
    for outcome in _completed(run):
        for when, count in zip(outcome.times, outcome.counts, strict=True):
            bins[int(when - run.begin)] += count
    return bins


def _completed(run: ServeRun) -> list[LoadOutcome]:
    return [each for each in run.outcomes if each.status == "completed"]


# --- two servers -----------------------------------------------------------------------------------------------------

COMPARED: Final = (
    *("request_throughput", "output_throughput", "total_token_throughput", "request_goodput"),
    *(f"{stat}_{name}_ms" for name in ("ttft", "tpot", "itl", "e2el") for stat in ("mean", "p50", "p99")),
)
"""Keys of the values in a JSON record that :func:`compare` compares."""


def compare(first: Sequence[Mapping[str, Any]], second: Sequence[Mapping[str, Any]]) -> dict[str, Ratio]:
    """Compare the records of two servers, which must have the same rounds. Returns key -> ratio of the second server's
    value to the first's.

    A key is left out if its value is missing or 0 in any round.
    """
    found = {}
    for key in COMPARED:
        sides = [[record.get(key) or 0.0 for record in side] for side in (first, second)]
        if sides[0] and 0.0 not in [*sides[0], *sides[1]]:
            ours, theirs = (
                [RunSample(value, record["duration"], record["chairlift"]["busy"]) for value, record in pairs]
                for pairs in (zip(sides[1], second, strict=True), zip(sides[0], first, strict=True))
            )
            found[key] = Ratio.of(ours, theirs)
    return found
