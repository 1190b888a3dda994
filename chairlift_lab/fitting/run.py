"""One run of an engine, as its log or a benchmark's record describes it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from chairlift.core.scheduler.cost_model import StepFeatures
from chairlift.errors import ConfigError
from chairlift_lab.replay.traced_request import TracedRequest

__all__ = ["MeasuredRequest", "Run", "TimedStep"]

TimedStep = tuple[StepFeatures, float]
"""(features of a step, its seconds)."""


@dataclasses.dataclass(frozen=True, slots=True)
class MeasuredRequest:
    """A request of a benchmark, and the times of its tokens. Times are seconds from the first request of the run."""

    start: float
    """Time at which the client sent the request."""
    prompt_tokens: int
    output_tokens: int
    times: tuple[float, ...]
    """Time of each event with a token, ascending. An answer may end with a token that has no event."""

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.times[0] - self.start

    @property
    def tpot(self) -> float:
        """Seconds per token after the first; 0 if there is only one."""
        count = len(self.times) - 1
        return (self.times[-1] - self.times[0]) / count if count else 0.0

    @property
    def e2e(self) -> float:
        """Seconds to the last token."""
        return self.times[-1] - self.start


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The steps of a run, or its requests, or both. All requests of a run were served with the same settings."""

    name: str
    source: str
    """Kind of file, in words."""
    steps: Sequence[TimedStep] = ()
    """Logged steps."""
    requests: Sequence[MeasuredRequest] = ()
    """Completed requests, in the order of sending."""
    max_concurrency: int | None = None
    """Largest number of requests in flight that the client allowed."""
    all_at_once: bool = False
    """Whether the client sent requests as fast as ``max_concurrency`` allowed."""
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Settings of the engine that differ from those of the other runs."""
    unknown: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Term of the cost model that the file cannot determine -> why."""
    notes: Sequence[str] = ()
    """Sentences for the user about what the file lacks."""

    def trace(self) -> list[TracedRequest]:
        """The requests as traffic for a simulation."""
        return [
            TracedRequest(
                arrival=0.0 if self.all_at_once else request.start,
                prompt_tokens=request.prompt_tokens,
                output_tokens=request.output_tokens,
            )
            for request in self.requests
        ]

    @property
    def lengths(self) -> list[tuple[int, int]]:
        """(prompt tokens, output tokens) of each request."""
        return [(request.prompt_tokens, request.output_tokens) for request in self.requests]


def number(value: Any, what: str, most: float = 1e12) -> float:
    """``value`` as a number from 0 to ``most``. Raises ConfigError that names ``what``."""
    if type(value) not in (int, float) or not 0 <= value <= most:  # this excludes NaN, too
        raise ConfigError(f"{what} must be a number from 0 to {most:g}, got {value!r:.40}")
    return float(value)
