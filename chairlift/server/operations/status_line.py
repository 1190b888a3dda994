"""Log lines about a busy server: its state at regular intervals, and a warning if many sequences are preempted and
recomputed."""

from __future__ import annotations

import dataclasses
import math
from typing import Final

from chairlift.engine.info import EngineInfo
from chairlift.metrics.stats import EngineStats, RequestStats

__all__ = ["PreemptionAlarm", "StatusLine"]

_WATCH: Final = 0.02
_TOO_MANY: Final = 0.05
"""Limit for the fraction of finished sequences that were preempted. A warning is logged above this limit."""
_QUIET_SECONDS: Final = 60.0
_MARGIN: Final = 0.9
"""Recommended number of sequences divided by the number that fits in the KV cache now. It is below 1, because
sequences grow while they run."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Counts:
    """Counters at one point in time. A status line reports by how much they increased over an interval."""

    prompt: int
    """Number of computed prompt tokens: all computed tokens minus output tokens and recomputed tokens."""
    delivered: int
    queries: int
    hits: int
    finished: int
    rejected: int
    restarts: int

    @classmethod
    def of(cls, stats: RequestStats) -> _Counts:
        engine = stats.engine
        decoded = sum(stats.inter_token.counts)
        return cls(
            prompt=engine.num_computed_tokens - engine.num_recomputed_tokens - stats.overrun_tokens - decoded,
            delivered=decoded + sum(stats.ttft.counts),
            queries=engine.prefix_cache_queries,
            hits=engine.prefix_cache_hits,
            finished=stats.finished.total(),
            rejected=stats.rejected.total(),
            restarts=stats.num_restarts,
        )


class StatusLine:
    """Makes status lines. Each line covers the time since the previous line."""

    def __init__(self, stats: RequestStats, now: float) -> None:
        self._before = _Counts.of(stats)
        self._time = now

    def next(self, stats: RequestStats, *, num_waiting: int, now: float) -> str | None:
        """The line for the interval that ends at ``now`` (seconds); None when nothing happened.

        ``num_waiting`` is the number of requests that have not been in a step. The line has a mark if 2 % or more of
        the sequences that finished in the last 60 s were preempted.
        """
        counts = _Counts.of(stats)
        before = self._before
        seconds = max(now - self._time, 1e-3)
        self._before = counts
        self._time = now
        if counts == before and not stats.engine.num_running and not num_waiting:
            return None
        engine = stats.engine
        num_blocks = engine.used_blocks + engine.cached_blocks + engine.free_blocks
        tokens_in = max(0, counts.prompt - before.prompt) / seconds
        tokens_out = (counts.delivered - before.delivered) / seconds
        parts = [
            f"{engine.num_running} running, {num_waiting} waiting",
            f"tokens/s: {tokens_in:,.0f} in, {tokens_out:,.0f} out",
            f"KV cache {engine.used_blocks / max(1, num_blocks):.0%}",
        ]
        if queries := counts.queries - before.queries:
            parts.append(f"prefix hits {(counts.hits - before.hits) / queries:.0%}")
        parts.append(f"preempted {engine.preemption_rate:.1%} ({_mark(engine.preemption_rate)})")
        if rejected := counts.rejected - before.rejected:
            parts.append(f"{rejected} rejected")
        if restarts := counts.restarts - before.restarts:
            parts.append(f"engine restarted {'once' if restarts == 1 else f'{restarts} times'}")
        return "; ".join(parts)


def _mark(rate: float) -> str:
    if rate < _WATCH:
        return "healthy"
    if rate <= _TOO_MANY:
        return "watch"
    return "too many"


class PreemptionAlarm:
    """Logs a warning, at most once a minute, if too many sequences are preempted. The warning says what to change."""

    def __init__(self) -> None:
        self._quiet_until = -math.inf
        self._num_steps = 0

    def next(self, stats: RequestStats, info: EngineInfo, *, now: float) -> str | None:
        """The warning, if more than 5 % of the sequences that finished in the last 60 s were preempted; otherwise
        None."""
        engine = stats.engine
        stands_still = engine.num_steps == self._num_steps
        self._num_steps = engine.num_steps
        if stands_still or engine.preemption_rate <= _TOO_MANY or now < self._quiet_until:
            return None
        self._quiet_until = now + _QUIET_SECONDS
        return (
            f"{engine.preemption_rate:.1%} of the sequences that finished in the last minute were preempted, and work"
            f" is done twice; {_remedy(engine, info)}"
        )


def _remedy(engine: EngineStats, info: EngineInfo) -> str:
    """Text that recommends a setting, computed from the number of sequences of the current size that fit in the KV
    cache."""
    max_seqs = info.max_num_seqs
    if not engine.num_running or not engine.used_blocks:
        return "raise --kv-cache-memory-bytes, or lower --max-num-seqs"
    fits = info.num_blocks * engine.num_running / engine.used_blocks
    if fits > max_seqs / _MARGIN:
        return (
            f"the KV cache has room for {fits:,.0f} of them, so rows are what was short: raise --max-num-seqs from"
            f" {max_seqs:,}, or send less that displaces others"
        )
    fits = min(max_seqs, fits)
    fewer = max(1, int(_MARGIN * fits))
    lower = f"lower --max-num-seqs from {max_seqs:,} to {fewer:,}"
    raise_ = f"raise --kv-cache-memory-bytes to {max_seqs / fewer:.1f} times what it is"
    first, second = (lower, raise_) if fewer * 2 >= max_seqs else (raise_, lower)
    return (
        f"about {fits:,.0f} sequences of {engine.used_blocks / engine.num_running:,.0f} blocks fit into the KV cache,"
        f" and {max_seqs:,} may run: best {first}, or else {second}"
    )
