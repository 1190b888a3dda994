"""Runs a governor: collects its observations, limits and applies its proposals, and logs both."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections import deque

from chairlift.base.plugins import load_plugin
from chairlift.config import SchedulerConfig
from chairlift.core.scheduler.costs import Costs
from chairlift.core.scheduler.governor import (
    Bounds,
    Governor,
    Observation,
    RuleGovernor,
    Settings,
    Targets,
    expected_growth,
    rows_that_fit,
)
from chairlift.core.scheduler.guard_rails import GuardRails
from chairlift.core.scheduler.output import SchedulerOutput, StepResult
from chairlift.core.scheduler.scheduler import Scheduler

__all__ = ["Decision", "GovernorLoop", "Window", "governor_from_config"]

_USUAL_PROMPT = 64
_USUAL_ANSWER = 160
_USUAL_COUNT = 4
"""Assumed tokens per prompt and per answer, and the number of requests that are assumed to have these lengths at the
start of a window. Real requests soon outweigh them."""

_log = logging.getLogger("chairlift.governor")


@dataclasses.dataclass(frozen=True, slots=True)
class Decision:
    """One entry of the log of a governor's decisions."""

    now: float
    """Time in seconds on the engine's clock."""
    governor: str
    before: Settings
    after: Settings
    why: str
    seen: Observation

    def __str__(self) -> str:
        moves = [
            f"{field.name} {_short(getattr(self.before, field.name))} -> {_short(getattr(self.after, field.name))}"
            for field in dataclasses.fields(Settings)
            if getattr(self.before, field.name) != getattr(self.after, field.name)
        ]
        return f"{self.governor}: {', '.join(moves)}: {self.why}"


def _short(value: float) -> str:
    return f"{value:.3g}" if isinstance(value, float) else f"{value:,}"


# --- observations ----------------------------------------------------------------------------------------------------


class _Ratio:
    """Ratio of two sums that forgets old values: both sums are scaled down so that the denominator is at most
    ``memory``."""

    __slots__ = ("_lower", "_memory", "_upper")

    def __init__(self, memory: float) -> None:
        self._upper = self._lower = 0.0
        self._memory = memory

    def add(self, upper: float, lower: float) -> None:
        self._upper += upper
        self._lower += lower
        if self._lower > self._memory:
            self._upper *= self._memory / self._lower
            self._lower = self._memory

    def value(self, prior: float = 0.0) -> float:
        """The ratio. ``prior`` is added to the denominator, so that the ratio stays small while there are few
        values."""
        lower = self._lower + prior
        return self._upper / lower if lower else 0.0


class Window:
    """Collects the measurements of one observation. A step that only decodes costs a few additions, whatever the number
    of rows."""

    def __init__(self, scheduler: Scheduler, now: float) -> None:
        self._scheduler = scheduler
        self._prompts = _Ratio(64)
        self._answers = _Ratio(64)
        self._preempted = _Ratio(100)
        self._prompts.add(_USUAL_PROMPT, 1)
        self._answers.add(_USUAL_COUNT * _USUAL_ANSWER, _USUAL_COUNT)
        self._num_finished = scheduler.preemption_rate.num_finished
        self._ever_preempted: set[str] = set()
        """Ids of unfinished requests that were preempted at least once."""
        self._begin(now)

    def _begin(self, now: float) -> None:
        self._since = now
        self._steps: list[float] = []
        self._first_tokens: list[float] = []
        self._tokens = self._prefill = self._preemptions = self._gaps = 0
        self._waited = self._kv_use = 0.0
        self._ever_preempted &= self._scheduler.requests.keys()
        self._known = len(self._ever_preempted)

    def saw(self, out: SchedulerOutput, result: StepResult, seconds: float, now: float) -> None:
        """Count a step that took ``seconds`` and ended at ``now``."""
        self._steps.append(seconds)
        self._gaps += out.num_decodes
        self._waited += out.num_decodes * seconds
        self._tokens += len(result.sampled)
        self._prefill += out.num_tokens - out.num_decodes
        if out.blocks is not None:
            whole = out.blocks.free + out.blocks.used + out.blocks.cached
            self._kv_use = max(self._kv_use, out.blocks.used / whole if whole else 0.0)
        if out.preempted:
            self._ever_preempted.update(out.preempted)
            self._preemptions = len(self._ever_preempted) - self._known
        if out.chunks:
            for row in result.sampled[out.num_decodes :]:
                if row is not None and not row.was_preempted:
                    self._first_tokens.append(now - row.arrival_time)
                    self._prompts.add(row.num_prompt_tokens - row.num_cached_tokens, 1)

    def close(self, now: float, settings: Settings) -> Observation:
        """Return the observation for the time since the last call, and begin the next window."""
        scheduler = self._scheduler
        seconds = now - self._since
        finished = scheduler.preemption_rate.num_finished - self._num_finished
        self._num_finished += finished
        self._preempted.add(self._preemptions, finished)
        self._answers.add(self._tokens, finished)
        waiting = len(scheduler.waiting)
        running = len(scheduler.running)
        steps = sorted(self._steps)
        computed = self._tokens + self._prefill
        oldest = scheduler.waiting.oldest_arrival if waiting else now
        kv = scheduler.kv
        length = max(1, round(self._prompts.value() + self._answers.value()))
        # Number of positions per block, for each cache group. A sliding window releases blocks, so a longer request
        # does not need more blocks.
        per_block = [max(kv.block_size, length / kv.layout.blocks_for(group, length)) for group in range(len(kv.pools))]
        seen = Observation(
            settings=settings,
            seconds=seconds,
            running=running,
            waiting=waiting,
            oldest_wait=max(0.0, now - oldest),
            kv_use=self._kv_use,
            capacity_tokens=int(min(p.capacity * tokens for p, tokens in zip(kv.pools, per_block, strict=True))),
            preemption_rate=self._preempted.value(prior=20.0),
            finished=finished,
            preempted=self._preemptions,
            prompt_length=self._prompts.value(),
            answer_length=self._answers.value(),
            context_length=scheduler.batch.num_computed_tokens / running if running else 0.0,
            shared_length=scheduler.batch.shared_tokens() / running if running else 0.0,
            prefill_share=self._prefill / computed if computed else 0.0,
            tokens_per_second=self._tokens / seconds if seconds > 0 else 0.0,
            step_p50=steps[len(steps) // 2] if steps else 0.0,
            step_p99=steps[int(0.99 * len(steps))] if steps else 0.0,
            ttft=sum(self._first_tokens) / len(self._first_tokens) if self._first_tokens else 0.0,
            tpot=self._waited / self._gaps if self._gaps else 0.0,
        )
        self._begin(now)
        return seen


# --- the loop --------------------------------------------------------------------------------------------------------


class GovernorLoop:
    """Calls a governor every ``interval`` seconds and applies its proposals within the limits of the guard rails.

    The first limit of running requests is the number of requests that fit if all have usual lengths. A higher first
    limit could admit too many requests, and a lower limit later would not remove them from the batch. ``decisions`` has
    the last ``capacity`` decisions.
    """

    def __init__(
        self,
        governor: Governor,
        scheduler: Scheduler,
        bounds: Bounds,
        *,
        now: float,
        interval: float = 1.0,
        capacity: int = 1024,
    ) -> None:
        self.governor = governor
        self.interval = interval
        self.decisions: deque[Decision] = deque(maxlen=capacity)
        self.num_decisions = 0
        self._scheduler = scheduler
        self.settings = Settings(scheduler.batch.running_limit, scheduler.batch.token_budget, scheduler.batch.watermark)
        """Settings in use."""
        self.rails = GuardRails(self.settings, bounds)
        self.window = Window(scheduler, now)
        self._due = now + interval
        seen = self.window.close(now, self.settings)
        room = max(self.settings.watermark, expected_growth(seen))
        start = bounds.clamp(Settings(int(rows_that_fit(seen)), self.settings.tokens, room))
        if start != self.settings:  # the guard rails do not count this change, so the next may follow at once
            self._set(now, start, "nothing is known yet", seen)

    def govern(self, now: float) -> None:
        """Call the governor if the interval has passed. Must be called between two steps."""
        if now < self._due:
            return
        self._due = now + self.interval
        seen = self.window.close(now, self.settings)
        harm = self.rails.harmed(now, seen)
        if harm:
            self._apply(now, self.rails.configured, f"guard rail: {harm}", seen)
        elif not self.rails.held(now) and seen.step_p50:
            proposal = self.governor.decide(now, seen)
            if proposal is not None:
                self._apply(now, self.rails.limit(now, self.settings, proposal.settings), proposal.why, seen)

    def _apply(self, now: float, after: Settings, why: str, seen: Observation) -> None:
        if after != self.settings:
            self.rails.moved(now, self.settings, after)
            self._set(now, after, why, seen)

    def _set(self, now: float, after: Settings, why: str, seen: Observation) -> None:
        before = self.settings
        self.settings = after
        batch = self._scheduler.batch
        batch.running_limit, batch.token_budget, batch.watermark = dataclasses.astuple(after)
        decision = Decision(now, self.governor.name, before, after, why, seen)
        self.decisions.append(decision)
        self.num_decisions += 1
        _log.info("%s", decision)


def governor_from_config(
    config: SchedulerConfig, scheduler: Scheduler, costs: Costs, now: float
) -> GovernorLoop | None:
    """The governor loop for these settings; None if the governor is off. Raises ConfigError for a custom governor class
    that cannot be used."""
    if config.governor == "off":
        return None
    max_rows = config.max_running
    reserved = sum(each.min_seqs for each in (config.promises or {}).values())
    # Rows reserved for classes must stay available, and prompts must make progress.
    lowest = Settings(reserved + 1, min(config.max_num_batched_tokens, 64), min(config.admission_watermark, 0.01))
    bounds = Bounds(lowest, Settings(max_rows, config.max_num_batched_tokens, max(config.admission_watermark, 0.4)))
    targets = Targets(
        math.inf if config.governor_ttft_ms is None else config.governor_ttft_ms / 1000,
        math.inf if config.governor_tpot_ms is None else config.governor_tpot_ms / 1000,
    )
    if config.governor == "rules":
        governor: Governor = RuleGovernor(bounds, targets, costs)
    else:
        example = "chairlift.core.scheduler.governor.RuleGovernor"
        governor = load_plugin(
            "governor", config.governor, lambda owner: owner(bounds, targets, costs), ["name", "decide"], example
        )
    return GovernorLoop(governor, scheduler, bounds, now=now)
