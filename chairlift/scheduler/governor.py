"""A governor moves three settings while the engine runs: rows, tokens of a step, and blocks kept free at admission.

It is asked about once a second, between steps, what the settings should be, given plain numbers about the time since it
was last asked. It never touches a request: a lower limit takes effect as requests leave. What may become of its answers
is not its own affair: :class:`~chairlift.scheduler.governor_loop.GovernorLoop` keeps them within guard rails.

:class:`RuleGovernor` aims at fewer than 2 % of the requests being preempted, and at latency targets if there are any.
Before anything goes wrong it goes by a forecast: requests with prompts and answers as long as the recent ones take so
much memory when they are answered side by side (the idea of LightLLM's Past-Future scheduler, ASPLOS 2025, with means
in place of distributions). What the forecast gets wrong is corrected as TCP corrects its window: up slowly while memory
is free and work waits, down by a factor when requests are preempted.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Protocol

from chairlift.scheduler.cost_model import StepFeatures
from chairlift.scheduler.costs import Costs

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
HEALTHY, UNHEALTHY = 0.02, 0.05
"""Shares of requests preempted at least once: below the first all is well, above the second something must be done."""


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """What a governor moves."""

    running: int
    """Most requests that run."""
    tokens: int
    """Token budget of a step; no less than ``running``."""
    watermark: float
    """Share of the KV blocks kept free when a request joins a running batch."""


@dataclasses.dataclass(frozen=True, slots=True)
class Bounds:
    """How far settings may go, both ends included."""

    least: Settings
    most: Settings

    def clamp(self, wanted: Settings) -> Settings:
        """The nearest settings within the bounds whose budget has a token for every row."""
        running = max(self.least.running, min(wanted.running, self.most.running))
        tokens = max(self.least.tokens, running, min(wanted.tokens, self.most.tokens))
        watermark = max(self.least.watermark, min(wanted.watermark, self.most.watermark))
        return Settings(running, tokens, watermark)


@dataclasses.dataclass(frozen=True, slots=True)
class Targets:
    """Latencies that are aimed at, in seconds; infinite where none is."""

    ttft: float = math.inf
    """To the first token, from arrival."""
    tpot: float = math.inf
    """Per token after it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What happened since the governor was last asked. Times in seconds; zeros where there was nothing to measure."""

    settings: Settings
    """In force."""
    seconds: float
    """Since then."""
    running: int
    """Now, and so are the next two."""
    waiting: int
    oldest_wait: float
    """Of those that wait, how long the first to come has waited."""
    kv_use: float
    """Share of the KV blocks that requests held, at most."""
    capacity_tokens: int
    """Positions that the KV cache has room for, in requests like the recent ones."""
    preemption_rate: float
    """Requests preempted for the first time / requests finished, over the last hundred or so."""
    finished: int
    preempted: int
    """For the first time."""
    prompt_length: float
    """Mean of recent requests, in tokens that were not in the prefix cache."""
    answer_length: float
    """Mean, in tokens: generated tokens per finished request, those of requests still running included."""
    context_length: float
    """Mean positions computed of those that run."""
    prefill_share: float
    """Of the tokens computed, those of prompts."""
    tokens_per_second: float
    """Tokens of answers."""
    step_p50: float
    step_p99: float
    ttft: float
    """Mean of the first tokens."""
    tpot: float
    """Mean gap between tokens."""


@dataclasses.dataclass(frozen=True, slots=True)
class Proposal:
    """What a governor wants, and why, in words."""

    settings: Settings
    why: str


class Governor(Protocol):
    """A value with a memory of its own. No clock, no chance: equal observations bring equal proposals."""

    @property
    def name(self) -> str: ...

    def decide(self, now: float, seen: Observation) -> Proposal | None:
        """What the settings should be; None when they may stay. ``now`` is in seconds on the engine's clock."""
        ...


# --- forecasts -------------------------------------------------------------------------------------------------------


def rows_that_fit(seen: Observation) -> float:
    """Requests like the recent ones that can be answered side by side without running out of memory.

    Seen at any moment, a running answer is long already (long ones are there more often), about as long as the mean
    answer when lengths are spread as in chat.
    """
    return seen.capacity_tokens / max(1.0, seen.prompt_length + seen.answer_length)


def expected_growth(seen: Observation) -> float:
    """Share of the KV cache that those who run will want on top of what they have, when they want most.

    If each step ends a fixed share of the answers, n requests of mean length c and mean answer r hold n (c + t)
    exp(-t / r) positions after t more steps, which is most at t = r - c. That is the mean; it takes r / n steps until
    the first of them leaves, in which they grow by r, and a margin of a few times that covers when it takes longer.
    """
    mean, context = seen.answer_length, seen.context_length
    growth = seen.running * (mean * math.exp(context / mean - 1) - context) if mean > context else 0.0
    return (growth + _MARGIN * mean) / seen.capacity_tokens


def rows_in_time(seen: Observation, costs: Costs, seconds: float, most: int) -> int:
    """The most rows, at least 1, that decode in steps of at most so many seconds."""
    low, high = 1, max(1, most)
    while low < high:
        middle = (low + high + 1) // 2
        step = StepFeatures(middle, int(middle * seen.context_length))
        low, high = (middle, high) if costs.model.step_seconds(step) <= seconds else (low, middle - 1)
    return low


def tokens_in_time(seen: Observation, costs: Costs, seconds: float, most: int) -> int:
    """The largest token budget with which a step of the rows that run takes at most so many seconds."""
    rows = min(seen.running, most - 1)
    return rows + costs.chunk_budget(rows, int(rows * seen.context_length), seconds, max(1, most - rows))


def tokens_for_throughput(seen: Observation, costs: Costs, most: int) -> int:
    """The token budget with which prompts cost others least.

    Prompt tokens are nearly free in a step that reads the weights anyway, up to the ridge of the roofline (SARATHI,
    2023); and there must be room for as many as the rows that end will be replaced by. More would only make some
    steps long, while the others read the weights for decodes alone.
    """
    rows = min(seen.running, most - 1)
    context = int(rows * seen.context_length)
    alone = costs.model.step_seconds(StepFeatures(max(1, rows), context))
    free = costs.chunk_budget(rows, context, _NEARLY_FREE * alone, max(1, most - rows))
    steady = 1.25 * rows * seen.prompt_length / max(1.0, seen.answer_length)
    return min(most, rows + int(max(free, steady)))


# --- rules -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(slots=True)
class _Round:
    """Since the last correction."""

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
    """Forecast and correction, by rules that can be said in words."""

    name = "rules"

    def __init__(self, bounds: Bounds, targets: Targets, costs: Costs) -> None:
        self._bounds, self._targets, self._costs = bounds, targets, costs
        self._factor = 1.0
        """By how much the forecast of rows that fit is corrected."""
        self._round = _Round()
        self._slack = 1.0
        """How much longer than the target a step with prompts may take, as steps without them take less."""

    def decide(self, now: float, seen: Observation) -> Proposal | None:
        most, target = self._bounds.most, self._targets.tpot
        because = self._correct(seen)
        fit = rows_that_fit(seen) * self._factor
        running = int(min(fit, most.running))
        whys = [f"{because}; {fit:.1f} requests fit"]
        if target < math.inf:
            in_time = rows_in_time(seen, self._costs, target, most.running)
            running = min(running, in_time)
            whys.append(f"{in_time} keep the pace")
        watermark = max(self._bounds.least.watermark, expected_growth(seen) / self._factor)
        tokens = tokens_for_throughput(seen, self._costs, most.tokens)
        if target < math.inf:
            self._pace(seen)
            tokens = tokens_in_time(seen, self._costs, target * self._slack, most.tokens)
        return Proposal(Settings(running, tokens, watermark), ", ".join(whys))

    def _correct(self, seen: Observation) -> str:
        """Additive increase, multiplicative decrease (Chiu and Jain, 1989), once per generation of requests: what a
        change does is not seen before those that it let in have ended."""
        self._round.add(seen)
        turn, rate = self._round, seen.preemption_rate
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
