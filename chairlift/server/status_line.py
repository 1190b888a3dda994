"""One line per interval about how the server is doing, and none when it has nothing to do."""

from __future__ import annotations

import dataclasses
import logging
from typing import Final

from chairlift.metrics.stats import RequestStats

__all__ = ["StatusLine"]

_WATCH: Final = 0.02
_TOO_MANY: Final = 0.05
"""Shares of finished sequences that were preempted."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Counts:
    """Counters whose growth over an interval is of interest."""

    prompt: int
    """Prompt tokens computed: what remains of all computed tokens without those known to be others."""
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
    """Remembers the counters of the last line, so that each line tells of the time since."""

    def __init__(self, stats: RequestStats, now: float) -> None:
        self._before = _Counts.of(stats)
        self._time = now

    def next(self, stats: RequestStats, *, num_waiting: int, now: float) -> tuple[int, str] | None:
        """The logging level and the line for the interval that ends ``now`` (seconds); None when nothing happened.

        ``num_waiting`` counts requests that wait for a step. The level is WARNING when more than 5 % of the sequences
        that finished in the last 60 s were preempted, else INFO.
        """
        counts, before = _Counts.of(stats), self._before
        seconds = max(now - self._time, 1e-3)
        self._before, self._time = counts, now
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
        level = logging.WARNING if engine.preemption_rate > _TOO_MANY else logging.INFO
        return level, "; ".join(parts)


def _mark(rate: float) -> str:
    if rate < _WATCH:
        return "healthy"
    if rate <= _TOO_MANY:
        return "watch"
    return "too many: raise --kv-cache-memory-bytes or lower --max-num-seqs"
