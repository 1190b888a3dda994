"""Summary of a run's outcomes: figures, the record with vLLM's keys, lines of text, ratios.

Averages exclude requests that failed, that the client left as the trace says, or that Ctrl-C cut off.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from chairlift.errors import ConfigError
from chairlift.workbench.bench.serve_run import Outcome, ServeRun

__all__ = [
    "COMPARED",
    "Figures",
    "Ratio",
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
_RESAMPLES: Final = 10_000


def parse_goodput(items: Sequence[str]) -> dict[str, float]:
    """``ttft:500 tpot:80``, as vLLM spells it, or with commas: limits in ms by name. Raises ConfigError."""
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
    """Statistics of a time in ms, over requests; of the time between events with tokens, over all events."""

    mean: float
    median: float
    std: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Stats | None:
        """Percentiles are interpolated between the nearest values; None without values."""
        if not seconds:
            return None
        values = np.asarray(seconds) * 1000
        p50, p90, p99 = np.percentile(values, [50, 90, 99]).tolist()
        return cls(float(values.mean()), p50, float(values.std()), p50, p90, p99)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Figures of one run. Rates are per second of the whole run."""

    completed: int
    failed: int
    cancelled: int
    unfinished: int
    seconds: float
    input_tokens: int
    output_tokens: int
    cached_tokens: int | None
    """Prompt tokens from the server's prefix cache; None if it does not report them."""
    request_throughput: float
    output_throughput: float
    total_token_throughput: float
    max_output_tokens_per_s: float
    """Output tokens in the busiest second; seconds are counted from the start."""
    max_concurrent_requests: int
    goodput: float | None
    """Requests per second within all limits; None without limits."""
    good: int
    times: Mapping[str, Stats | None]
    """Times by vLLM's names (ttft, tpot, itl, e2el), and ``queueing`` (until the reply's headers) and
    ``server_queue``."""
    counted: bool
    """Whether the time between events is the time between tokens. Otherwise events have several tokens, or an unknown
    number."""
    whole: int
    """Answers of several tokens that came whole, and so have no time per token."""
    shorter: int
    """Answers that ended before the requested length."""
    preemption_rate: float | None
    """Share of the completed requests that were preempted at least once; None if the server does not report it."""
    lateness: Stats | None
    """Time from when a request was due to its sending, for requests that nothing held back. None without a client."""
    cpu_share: float | None
    errors: Sequence[tuple[str, int, str]]
    """Kind, how many, and one example of its message; the most frequent first."""

    def doubts(self, run: ServeRun) -> Iterator[str]:
        """Warnings to read before the figures are believed."""
        late, paced = self.lateness, bool(run.load.requests) and run.load.requests[-1].arrival > 0
        if paced and late is not None and late.p99 > _LATE_MS:
            yield (
                f"the client was late: 1 % of the requests left {late.p99:.0f} ms or more after they were due; "
                "run it on an idle machine, or send fewer"
            )
        if self.cpu_share is not None and self.cpu_share > _BUSY:
            yield f"the client took {self.cpu_share:.0%} of a processor: it may be what limits these figures"
        if run.load.max_concurrency is not None:
            yield (
                f"closed loop: at most {run.load.max_concurrency:,} requests are under way, so a slow one is asked "
                "less often, and time in its queue stays hidden"
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
            yield f"{self.shorter:,} of {self.completed:,} answers ended before the length that was asked for{hint}"
        if self.unfinished:
            yield f"stopped early: {self.unfinished:,} requests were not answered yet, and are not counted"


def latencies(run: ServeRun) -> dict[str, list[float]]:
    """Seconds of all completed requests, by the names of :attr:`Figures.times`."""
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
    """Add up a run. ``slo``: limits in ms as :func:`parse_goodput` gives them; none means no goodput."""
    done, seconds = _completed(run), run.seconds
    status = Counter(each.status for each in run.outcomes)
    read, written = sum(each.prompt_tokens for each in done), sum(each.output_tokens for each in done)
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
    )


def is_good(outcome: Outcome, slo: Mapping[str, float]) -> bool:
    """Whether a completed request kept all limits. An answer of one token has no TPOT, and keeps its limit."""
    seen = {"ttft": outcome.ttft, "tpot": outcome.tpot or 0.0, "e2el": outcome.e2el}
    return all(seen[name] * 1000 <= limit for name, limit in slo.items())


def peak_of(spans: Sequence[tuple[float, float]]) -> int:
    """The most spans that cover one moment; one that ends when another begins does not meet it."""
    events = sorted([(start, 1) for start, _ in spans] + [(end, -1) for _, end in spans])
    return max(np.cumsum([change for _, change in events]).tolist(), default=0)


def tokens_per_second(run: ServeRun) -> list[int]:
    """Output tokens of each second of the run, of completed requests."""
    bins = [0] * (math.ceil(run.seconds) + 1)
    for outcome in _completed(run):
        for when, count in zip(outcome.times, outcome.counts, strict=True):
            bins[int(when - run.begin)] += count
    return bins


def _completed(run: ServeRun) -> list[Outcome]:
    return [each for each in run.outcomes if each.status == "completed"]


# --- two servers -----------------------------------------------------------------------------------------------------

COMPARED: Final = (
    *("request_throughput", "output_throughput", "total_token_throughput", "request_goodput"),
    *(f"{stat}_{name}_ms" for name in ("ttft", "tpot", "itl", "e2el") for stat in ("mean", "p50", "p99")),
)
"""Keys of the records whose ratios are taken."""


@dataclasses.dataclass(frozen=True, slots=True)
class Ratio:
    """Second server's value divided by the first's."""

    ratio: float
    """Geometric mean over the rounds."""
    low: float | None
    """With ``high`` the 95 % bootstrap interval over rounds; None with one round."""
    high: float | None
    per_round: tuple[float, ...]


def compare(first: Sequence[Mapping[str, Any]], second: Sequence[Mapping[str, Any]]) -> dict[str, Ratio]:
    """Ratios by key, of the records of the same rounds; a figure that a round lacks, or that is 0, is left out."""
    found = {}
    rng = np.random.default_rng(0)
    for key in COMPARED:
        pairs = [(one.get(key) or 0.0, other.get(key) or 0.0) for one, other in zip(first, second, strict=True)]
        if not pairs or 0.0 in {value for pair in pairs for value in pair}:
            continue
        logs = np.log([other / one for one, other in pairs])
        low = high = None
        if len(logs) > 1:
            means = rng.choice(logs, (_RESAMPLES, len(logs))).mean(axis=1)
            low, high = np.exp(np.percentile(means, [2.5, 97.5])).tolist()
        found[key] = Ratio(float(np.exp(logs.mean())), low, high, tuple(np.exp(logs).tolist()))
    return found
