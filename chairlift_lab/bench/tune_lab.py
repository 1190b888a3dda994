"""Runs the traffic of a tuning with given settings, in the simulator or on the real engine."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from chairlift.config import EngineConfig
from chairlift.core.scheduler.cost_model import StepFeatures
from chairlift.engine.core import EngineCore
from chairlift.engine.input_processor import ModelLimits
from chairlift.errors import InvariantError
from chairlift_lab.bench.offline import WARM_UP
from chairlift_lab.bench.tune_state import Setting, State, StoredFigures, Trial, keeping_up, kept_latencies
from chairlift_lab.bench.verdict import MIN_SECONDS
from chairlift_lab.replay.calibrate import describe_fit, fit_core, fit_steps
from chairlift_lab.replay.machines import ModelShape
from chairlift_lab.replay.replay import RequestTiming, serve_trace, simulated_core
from chairlift_lab.workload.trace import TracedRequest

__all__ = ["TRUSTED", "Lab", "LabTraffic", "MakeCore"]

MakeCore = Callable[[Mapping[str, Any]], tuple[EngineCore, ModelLimits]]
"""Function from settings to (idle engine with these settings, limits of its model)."""

_SEED: Final = 0
_LONG: Final = 5.0
"""Time over which the requests of a run arrive, as a multiple of the longest latency target. It applies to runs at a
given request rate."""
_MOST_REPEATED: Final = 20_000
_MOST_PASSES: Final = 1000
_OTHER: Final = 0x1E37_79B9_7F4A_7C15
_MAX_ID: Final = 1 << 62
TRUSTED: Final = 0.2
"""Maximum median relative error of a cost model whose simulated results are used."""


@dataclasses.dataclass(frozen=True, slots=True)
class LabTraffic:
    """Requests to serve. ``slo`` has the latency targets: name of a TracedRequest field -> ms."""

    requests: Sequence[TracedRequest] = dataclasses.field(repr=False)
    users: int | None = None
    """Number of users that send the requests in a closed loop. None: an open loop."""
    slo: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        requests = []
        for request in self.requests:
            missing: dict[str, Any] = {name: ms for name, ms in self.slo.items() if getattr(request, name) is None}
            requests.append(dataclasses.replace(request, **missing) if missing else request)
        object.__setattr__(self, "requests", requests)

    @property
    def rate(self) -> float | None:
        """Requests per second of the traffic. None if all requests arrive at once, or in a closed loop."""
        span = self.requests[-1].arrival - self.requests[0].arrival
        return (len(self.requests) - 1) / span if span > 0 and self.users is None else None

    @property
    def crowd(self) -> str:
        """Description of the load in runs without a rate: ``all at once``, or the number of users."""
        return "all at once" if self.users is None else f"{self.users} user{'s' * (self.users > 1)}"

    @property
    def has_promises(self) -> bool:
        """Whether any request of the traffic has a latency target."""
        names = ("ttft_ms", "tpot_ms", "deadline_ms")
        return any(getattr(request, name) is not None for request in self.requests for name in names)

    @property
    def has_sessions(self) -> bool:
        """Whether any request of the traffic is a turn of a chat."""
        return any(request.session for request in self.requests)

    @property
    def longest(self) -> int:
        """Length of the longest prompt plus the longest answer, in tokens. A static batch reserves this for each
        row."""
        return max(each.prompt_tokens for each in self.requests) + max(each.output_tokens for each in self.requests)

    @property
    def longest_promise(self) -> float:
        """Longest target for a first token or a whole request, in seconds. 0.0 if there is no target."""
        targets = (ms for each in self.requests for ms in (each.ttft_ms, each.deadline_ms) if ms is not None)
        return max(targets, default=0.0) / 1000

    def enough(self, rate: float, minimum: int, seconds: float = 0.0) -> int:
        """Number of requests of a run at ``rate``, at least ``minimum``, so that a growing backlog misses a target.

        The requests arrive over several times the longest latency target, and over at least ``seconds``.
        """
        return max(minimum, min(_MOST_REPEATED, math.ceil(rate * max(seconds, _LONG * self.longest_promise)) + 1))

    def at(self, rate: float | None, count: int) -> list[TracedRequest]:
        """The first ``count`` requests, arriving at ``rate`` requests per second. None: all arrive at once.

        All gaps between arrivals are scaled by one factor. Requests without arrival times get those of a Poisson
        process. If the traffic has fewer requests than ``count``, it is repeated with other prompts of the same
        lengths.
        """
        requests = [self._again(index) for index in range(count)] if count > len(self.requests) else self.requests
        requests = requests[:count]
        times = [0.0] * len(requests)
        if rate is not None and len(requests) > 1:
            own = np.array([request.arrival for request in requests])
            if own[-1] == own[0] or self.requests[-1].arrival == self.requests[0].arrival:
                own = np.cumsum(np.random.default_rng(_SEED).exponential(1.0, len(requests)))
            times = ((own - own[0]) * ((len(requests) - 1) / (own[-1] - own[0]) / rate)).tolist()
        return [dataclasses.replace(request, arrival=time) for request, time in zip(requests, times, strict=False)]

    def _again(self, index: int) -> TracedRequest:
        """Request number ``index`` of the traffic, which is repeated as often as needed. Repetitions have other prefix
        ids, so that no prompt of a repetition is found in the prefix cache."""
        turn, at = divmod(index, len(self.requests))
        request = self.requests[at]
        if not turn:
            return request
        span = self.requests[-1].arrival - self.requests[0].arrival
        gap = span / max(1, len(self.requests) - 1)
        return dataclasses.replace(
            request,
            arrival=request.arrival + turn * (span + gap),
            prefix_ids=tuple((each + turn * _OTHER) % _MAX_ID for each in request.prefix_ids),
            session=f"{request.session} again {turn}" if request.session else "",
        )


class Lab:
    """Runs settings on the traffic. A run that was made earlier, also by an earlier command, is not repeated."""

    def __init__(
        self,
        state: State,
        make_core: MakeCore,
        fixed: Mapping[str, Any],
        *,
        max_rows: int,
        on_trial: Callable[[], None],
        other_load: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """Create a lab.

        ``fixed`` has the settings of all runs. ``max_rows`` is the largest max_num_seqs that will be tried.
        ``on_trial`` is called after each new run. ``other_load`` returns the share of the machine that other programs
        used since the previous call.
        """
        self.state = state
        self.deployment = state.deployment
        self._other_load = other_load
        self._make_core = make_core
        self._fixed = dict(fixed)
        self._max_rows = max_rows
        self._on_trial = on_trial
        self.traffic = LabTraffic([])
        self.simulations = self.runs = 0
        self._config = EngineConfig.from_flat(fixed)
        self._steps: list[tuple[StepFeatures, float]] = []
        self._errors: list[float] = []
        self._shape: ModelShape | None = None

    def fit(self, machine: str, shape: ModelShape) -> None:
        """Measure the durations of steps of many sizes on the real engine, and fit a first cost model to them."""
        core, limits = self._make_core({**self._fixed, "max_num_seqs": self._max_rows})
        self.deployment, times = fit_core(core, limits, machine, shape)
        self._steps = times.steps
        self._shape = shape
        core.shutdown()

    def learn(self, settings: Sequence[Setting], count: int) -> None:
        """Serve ``count`` requests of the traffic at once with each setting, and fit the cost model also to the steps
        of these runs."""
        if self.deployment is None:
            raise InvariantError("call fit() before learn(): there is no cost model yet")
        served: list[tuple[StepFeatures, float]] = []
        for setting in settings:
            core, limits = self._make_core({**self._fixed, **setting.flat()})
            serve_trace(core, self.traffic.at(None, count), limits, max_concurrency=self.traffic.users)
            served += _steps_of(core)
            core.shutdown()
        self._steps += served
        cost = fit_steps(self._steps, self._shape)
        validity = describe_fit(cost, self._steps)
        self.deployment = self.state.deployment = dataclasses.replace(self.deployment, cost=cost, validity=validity)
        self._compare(served)
        self.state.save()

    def check(self, setting: Setting, count: int) -> None:
        """Serve some requests to check whether the cost model of an earlier command still fits this machine."""
        core, limits = self._make_core({**self._fixed, **setting.flat()})
        try:
            serve_trace(core, WARM_UP, limits)
            serve_trace(core, self.traffic.at(None, count), limits, max_concurrency=self.traffic.users)
            self._compare(_steps_of(core))
        finally:
            core.shutdown()
        self.state.save()

    def _compare(self, steps: Sequence[tuple[StepFeatures, float]]) -> None:
        """Update ``State.fit_error``: compare the predictions of the cost model with the durations of real
        ``steps``."""
        if self.state.deployment is not None:
            self._errors += self.state.deployment.cost.errors(steps)
            if self._errors:
                self.state.fit_error = statistics.median(self._errors)

    @property
    def trusted(self) -> bool:
        """Whether the cost model fits this machine, or its error is unknown. If False, simulated results are not
        used."""
        return self.state.fit_error is None or self.state.fit_error <= TRUSTED

    def expected_seconds(self, setting: Setting, rate: float | None, count: int) -> float:
        """Expected duration of a real run in seconds: simulated, or estimated from earlier runs if the simulator is not
        trusted. Each run of a round has at least the minimum duration of a claim."""
        if self.trusted:
            return max(self.simulate(setting, rate, count).seconds, MIN_SECONDS if rate is None else 0.0)
        runs = [trial for trial in self.state if trial.round is not None and trial.rate is None]
        known = [trial for trial in runs if trial.setting == setting] or runs
        per_request = max((trial.figures.seconds / trial.count for trial in known), default=0.0)
        return max(count * per_request, 0.0 if rate is None else count / rate)

    def room(self) -> tuple[int, int, int]:
        """Sizes in tokens: (maximum length of a request, capacity of the KV cache, size of a KV block)."""
        core, limits = self._simulated(max_num_seqs=self._max_rows)
        capacity = core.kv.capacity_tokens
        return min(limits.max_model_len, capacity + 1), capacity, core.executor.block_size

    def _simulated(self, **settings: Any) -> tuple[EngineCore, ModelLimits]:
        if self.deployment is None:
            raise InvariantError("a simulation needs a cost model, but no steps were measured yet")
        # Simulated tokens are all the same, so each draft would be right.
        eviction = settings.pop("cache_eviction", self._config.cache.cache_eviction)
        cache = dataclasses.replace(self._config.cache, cache_eviction=eviction)
        scheduler = dataclasses.replace(self._config.scheduler, **{**settings, "speculative_config": ""})
        return simulated_core(self.deployment, dataclasses.replace(self._config, scheduler=scheduler, cache=cache))

    def simulate(self, setting: Setting, rate: float | None, count: int) -> StoredFigures:
        """Simulate the first ``count`` requests with a setting, at a rate per second (None: all at once). Simulations
        make no drafts."""
        known = self.state.find(setting, rate, count, None)
        if known is not None:
            return known.figures
        core, limits = self._simulated(**setting.flat())
        trial = self._serve(core, limits, setting, rate, count, None)
        self.simulations += 1
        self._on_trial()
        return trial.figures

    def measure(self, setting: Setting, rate: float | None, count: int, round_: int = 0) -> StoredFigures:
        """Run the first ``count`` requests with a setting on the real engine, after a warm-up.

        A run of a round in which all requests arrive at once serves them as often as a claim needs, each time with an
        empty prefix cache.
        """
        known = self.state.find(setting, rate, count, round_)
        if known is not None:
            return known.figures
        core, limits = self._make_core({**self._fixed, **setting.flat()})
        try:
            serve_trace(core, WARM_UP, limits)
            shortest = MIN_SECONDS if rate is None and round_ >= 0 else 0.0
            trial = self._serve(core, limits, setting, rate, count, round_, shortest)
            if rate is None:
                self._compare(_steps_of(core))
        finally:
            core.shutdown()
        self.runs += 1
        self._on_trial()
        return trial.figures

    def _serve(
        self,
        core: EngineCore,
        limits: ModelLimits,
        setting: Setting,
        rate: float | None,
        count: int,
        round_: int | None,
        shortest: float = 0.0,
    ) -> Trial:
        timings: list[RequestTiming] = []
        requests = self.traffic.at(rate, count)
        before = _drafted(core)
        passes = list[StoredFigures]()
        seconds = 0.0
        if round_ is not None:
            self._other_load()
        while not passes or (seconds < shortest and len(passes) < _MOST_PASSES):
            core.kv.forget_all(())
            timings = []
            served = serve_trace(core, requests, limits, timings, max_concurrency=self.traffic.users)
            passes.append(StoredFigures.of(served, 1.0 if rate is None else keeping_up(timings, core.clock.now())))
            seconds += served.seconds
        busy = 0.0 if round_ is None else self._other_load()
        rows, accepted = (new - old for new, old in zip(_drafted(core), before, strict=True))
        figures = StoredFigures.together(passes)
        trial = Trial(
            setting=setting,
            rate=rate,
            count=count,
            round=round_,
            figures=dataclasses.replace(figures, accepted_length=1 + accepted / rows if rows else None),
            latencies=[] if round_ is None else kept_latencies(timings),
            busy=busy,
        )
        if self.state.deployment is not None:  # results of the first cost model are not stored
            self.state.add(trial)
        return trial


def _drafted(core: EngineCore) -> tuple[int, int]:
    """(rows with drafts in all steps of the engine so far, their accepted drafts)."""
    drafts = core.scheduler.drafts
    return (0, 0) if drafts is None else (drafts.num_verified, drafts.num_accepted)


def _steps_of(core: EngineCore) -> list[tuple[StepFeatures, float]]:
    """(features, seconds) of each step in the log of an engine that always had work.

    The time of a step runs from the end of the previous step to its own end, so that it includes the work between
    steps.
    """
    return [(each.features, each.end - last.end) for last, each in itertools.pairwise(list(core.step_log))]
