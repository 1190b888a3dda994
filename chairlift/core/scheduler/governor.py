"""A governor changes three settings while the engine runs: number of rows, tokens per step, and fraction of blocks that
stays free at admission.

About once a second, between two steps, it gets measurements since the last call and proposes settings. It never ends or
preempts a request: a lower limit takes effect when requests leave.
:class:`~chairlift.core.scheduler.governor_loop.GovernorLoop` limits its proposals.

:class:`RuleGovernor` aims at fewer than 2 % preempted requests, and at latency targets if there are any. It forecasts
the memory that the running requests need if prompts and answers are as long as recent ones (the idea of LightLLM's
Past-Future scheduler, ASPLOS 2025, with means instead of distributions). It corrects errors of the forecast as TCP
corrects its window: it increases the limit slowly while memory is free and requests wait, and decreases it by a factor
when requests are preempted.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Protocol

from chairlift.core.scheduler.cost_model import StepFeatures
from chairlift.core.scheduler.costs import Costs

__all__ = [
    "Bounds",
    "Governor",
    "Observation",
    "Proposal",
    "RuleGovernor",
    "Settings",
    "Targets",
    "expected_growth",
    "rows_in_time",
    "rows_that_fit",
    "tokens_for_throughput",
    "tokens_in_time",
]

_MARGIN = 4.5
_NEARLY_FREE = 1.25
HEALTHY = 0.02
UNHEALTHY = 0.05
"""Fractions of requests that are preempted at least once. Below the first value the engine is healthy, above the second
it is not."""


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """The settings that a governor may change while the engine runs."""

    running: int
    """Maximum number of running requests."""
    tokens: int
    """Token budget of a step, at least ``running``."""
    watermark: float
    """Fraction of the KV blocks that stays free when a request joins a running batch."""


@dataclasses.dataclass(frozen=True, slots=True)
class Bounds:
    """Lowest and highest allowed settings, both inclusive."""

    least: Settings
    most: Settings

    def clamp(self, wanted: Settings) -> Settings:
        """The settings nearest to ``wanted`` that are within the bounds and have at least one token per row."""
        running = max(self.least.running, min(wanted.running, self.most.running))
        tokens = max(self.least.tokens, running, min(wanted.tokens, self.most.tokens))
        watermark = max(self.least.watermark, min(wanted.watermark, self.most.watermark))
        return Settings(running, tokens, watermark)


@dataclasses.dataclass(frozen=True, slots=True)
class Targets:
    """Target latencies in seconds. Infinite means that there is no target."""

    ttft: float = math.inf
    """Target for the time from arrival to the first token."""
    tpot: float = math.inf
    """Target for the time per token after the first."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """Measurements since the governor was last called. Times are in seconds; 0 means that nothing was measured."""

    settings: Settings
    """Settings in use now."""
    seconds: float
    """Length of the measured interval."""
    running: int
    """Number of requests that run now."""
    waiting: int
    """Number of requests that wait now."""
    oldest_wait: float
    """Waiting time of the oldest waiting request."""
    kv_use: float
    """Largest fraction of the KV blocks that requests used at once during the interval."""
    capacity_tokens: int
    """Number of positions that fit into the KV cache, for requests of recent lengths."""
    preemption_rate: float
    """Requests preempted for the first time divided by finished requests, over about the last hundred finished
    requests."""
    finished: int
    preempted: int
    """Number of requests preempted for the first time."""
    prompt_length: float
    """Mean number of prompt tokens of recent requests, without tokens from the prefix cache."""
    answer_length: float
    """Generated tokens divided by finished requests. The tokens of running requests are included."""
    context_length: float
    """Mean number of computed positions of running requests."""
    shared_length: float = 0.0
    """Mean number of positions of running requests whose KV a step reads only for another row."""
    prefill_share: float
    """Fraction of the computed tokens that belong to prompts."""
    tokens_per_second: float
    """Generated tokens per second."""
    step_p50: float
    step_p99: float
    ttft: float
    """Mean time to first token."""
    tpot: float
    """Mean time between two tokens of a request."""


@dataclasses.dataclass(frozen=True, slots=True)
class Proposal:
    """Settings that a governor proposes, and the reason as text."""

    settings: Settings
    why: str


class Governor(Protocol):
    """Proposes settings. It uses neither a clock nor randomness: equal observations give equal proposals."""

    @property
    def name(self) -> str: ...

    def decide(self, now: float, seen: Observation) -> Proposal | None:
        """Proposed settings, or None to keep the present settings. ``now`` is in seconds on the engine's clock."""
        ...


# --- forecasts -------------------------------------------------------------------------------------------------------


def rows_that_fit(seen: Observation) -> float:
    """Number of requests of recent lengths that fit into the KV cache at the same time.

    The result counts the mean answer length per request. If lengths vary as in chats, a running answer has about this
    length at a random time, because long answers run longer.
    """
    return seen.capacity_tokens / max(1.0, seen.prompt_length + seen.answer_length)


def expected_growth(seen: Observation) -> float:
    """Largest additional fraction of the KV cache that the running requests will need at once.

    Assume that each step ends a fixed fraction of the answers. Then n requests with mean context c and mean answer
    length r hold n (c + t) exp(-t / r) positions after t more steps, with the maximum at t = r - c. This is a mean
    value: the first request leaves after r / n steps on average, while all requests together grow by r. A margin of a
    few r covers the case that it leaves later.
    """
    mean = seen.answer_length
    context = seen.context_length
    growth = seen.running * (mean * math.exp(context / mean - 1) - context) if mean > context else 0.0
    return (growth + _MARGIN * mean) / seen.capacity_tokens


def _decodes(seen: Observation, rows: int) -> StepFeatures:
    """Features of a step with this number of decode rows, which are as long, and share as much, as the running
    requests."""
    return StepFeatures(rows, int(rows * seen.context_length), shared_tokens=int(rows * seen.shared_length))


def rows_in_time(seen: Observation, costs: Costs, seconds: float, limit: int) -> int:
    """Maximum number of rows, at least 1, with which a decode step takes at most ``seconds``."""
    low, high = 1, max(1, limit)
    while low < high:
        middle = (low + high + 1) // 2
        step = _decodes(seen, middle)
        low, high = (middle, high) if costs.model.step_seconds(step) <= seconds else (low, middle - 1)
    return low


def tokens_in_time(seen: Observation, costs: Costs, seconds: float, limit: int) -> int:
    """Maximum token budget with which a step takes at most ``seconds``. The decode rows of the running requests are
    part of the step."""
    rows = min(seen.running, limit - 1)
    return rows + costs.chunk_budget(_decodes(seen, rows), seconds, max(1, limit - rows))


def tokens_for_throughput(seen: Observation, costs: Costs, limit: int) -> int:
    """Token budget of a step with which prompts delay running requests least.

    A step reads all weights in any case, so prompt tokens cost almost nothing until computing takes longer than reading
    (SARATHI, 2023). The budget must also have room for the prompts of the requests that replace ended ones. A larger
    budget would only make some steps long, while other steps read the weights only for decodes.
    """
    rows = min(seen.running, limit - 1)
    decodes = _decodes(seen, rows)
    decode_seconds = costs.model.step_seconds(decodes._replace(num_decodes=max(1, rows)))
    free = costs.chunk_budget(decodes, _NEARLY_FREE * decode_seconds, max(1, limit - rows))
    steady = 1.25 * rows * seen.prompt_length / max(1.0, seen.answer_length)
    return min(limit, rows + int(max(free, steady)))


# --- rules -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(slots=True)
class _Round:
    """Sums of the observations since the governor last changed its correction factor."""

    finished: int = 0
    preempted: int = 0
    kv_use: float = 0.0
    waited: bool = False

    def add(self, seen: Observation) -> None:
        self.finished += seen.finished
        self.preempted += seen.preempted
        self.kv_use = max(self.kv_use, seen.kv_use)
        self.waited |= seen.waiting > 0


class RuleGovernor:
    """Governor with fixed rules: it forecasts how many requests fit, and corrects the forecast."""

    name = "rules"

    def __init__(self, bounds: Bounds, targets: Targets, costs: Costs) -> None:
        self._bounds = bounds
        self._targets = targets
        self._costs = costs
        self._factor = 1.0
        """Factor by which the forecast number of rows is multiplied, to correct errors of the forecast."""
        self._round = _Round()
        self._slack = 1.0
        """Limit for the time of a step with prompts, as a multiple of the target time per token. It is above 1 while
        requests wait and the measured time per token is below its target."""

    def decide(self, now: float, seen: Observation) -> Proposal | None:
        upper = self._bounds.most
        target = self._targets.tpot
        because = self._correct(seen)
        fit = rows_that_fit(seen) * self._factor
        running = int(min(fit, upper.running))
        whys = [f"{because}; {fit:.1f} requests fit"]
        if target < math.inf:
            in_time = rows_in_time(seen, self._costs, target, upper.running)
            running = min(running, in_time)
            whys.append(f"{in_time} keep the pace")
        watermark = max(self._bounds.least.watermark, expected_growth(seen) / self._factor)
        tokens = tokens_for_throughput(seen, self._costs, upper.tokens)
        if target < math.inf:
            self._pace(seen)
            tokens = tokens_in_time(seen, self._costs, target * self._slack, upper.tokens)
        return Proposal(Settings(running, tokens, watermark), ", ".join(whys))

    def _correct(self, seen: Observation) -> str:
        """Update the correction factor, and return the reason as text.

        The factor is increased in small steps and decreased more strongly (Chiu and Jain, 1989), at most once per
        generation of requests: the effect is visible only when the requests that were admitted with it have ended.
        """
        self._round.add(seen)
        turn = self._round
        rate = seen.preemption_rate
        if turn.preempted and rate > HEALTHY and turn.preempted >= 0.1 * seen.running:
            sharply = rate > UNHEALTHY
            self._factor *= 0.9 if sharply else 0.95
            why = f"{rate:.1%} of the requests preempted, down{' sharply' if sharply else ''}"
        elif turn.finished < max(8, seen.running):
            return "as before"
        elif turn.waited and not turn.preempted and (self._factor < 1 or (turn.kv_use < 0.95 and rate < HEALTHY / 2)):
            self._factor *= 1.05
            why = f"work waits and {1 - turn.kv_use:.0%} of the memory stayed free, up"
        else:
            why = "as before"
        self._factor = max(0.75, min(self._factor, 1.1))
        self._round = _Round()
        return why

    def _pace(self, seen: Observation) -> None:
        if seen.tpot > self._targets.tpot:
            self._slack = max(1.0, self._slack * 0.9)
        elif seen.tpot < 0.9 * self._targets.tpot and (seen.waiting or seen.ttft > self._targets.ttft):
            self._slack = min(8.0, self._slack * 1.1)
