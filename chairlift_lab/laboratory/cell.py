"""One cell of the table: a policy, a trace, a machine, a load and a seed, simulated in a process of its own."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from chairlift.config import EngineConfig
from chairlift.engine.core import EngineCore
from chairlift.engine.input_processor import ModelLimits
from chairlift.errors import ConfigError
from chairlift_lab.laboratory.figures import CellFigures, MeasuredWindow, figures_of, window_of
from chairlift_lab.laboratory.knots import TraceKnots
from chairlift_lab.laboratory.targets import STRICT, LabTargets, targets_of
from chairlift_lab.replay.machines import Deployment
from chairlift_lab.replay.replay import RequestTiming, serve_trace, simulated_core
from chairlift_lab.replay.traced_request import TracedRequest
from chairlift_lab.workload.sample import sample_trace
from chairlift_lab.workload.trace import read_trace

__all__ = ["CellTask", "LabMachine", "LabTrace", "RateTask", "find_capacity", "fitting_scale", "run_cell", "serve_cell"]

_TARGET_SEED: Final = 1_000_003
"""Seed of the requests from which targets and capacity follow. No cell has it."""
_QUEUE: Final = 400
_STEADY: Final = (0.35, 0.95)
_ROOM: Final = 8
"""The KV cache holds at least so many long requests: otherwise the lengths of the trace are scaled down."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LabTrace:
    """A trace to draw from: knots, or a file of recorded requests."""

    name: str
    knots: TraceKnots | None = None
    file: Path | None = None

    def draw(self, count: int, rate: float, seed: int) -> list[TracedRequest]:
        """``count`` requests at ``rate`` requests per second. A file gives consecutive requests from a random place."""
        if self.knots is not None:
            return self.knots.draw(count, rate, seed)
        if self.file is None:
            raise ConfigError(f"the trace {self.name} has neither knots nor a file")
        trace = _read_once(self.file)
        return sample_trace(trace, min(count, len(trace)), seed, rate=rate, window=True)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LabMachine:
    """A machine with its model, and the share of its KV memory that is used."""

    name: str
    deployment: Deployment
    memory: float = 1.0

    @property
    def kv_bytes(self) -> int:
        return max(1, int(self.deployment.kv_memory_bytes * self.memory))

    @property
    def kv_tokens(self) -> int:
        """Number of tokens that the KV cache holds."""
        return self.kv_bytes // self.deployment.kv_bytes_per_token


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RateTask:
    """A trace on a machine, of which the capacity is to be found."""

    trace: LabTrace
    machine: LabMachine
    scale: float
    count: int
    settings: dict[str, Any]

    def requests(self, rate: float, seed: int) -> list[TracedRequest]:
        """The requests of a seed, with lengths that fit the machine."""
        most = self.machine.deployment.max_model_len
        return [_scaled(request, self.scale, most) for request in self.trace.draw(self.count, rate, seed)]

    def config(self, more: dict[str, Any]) -> EngineConfig:
        """The engine's settings: the given ones, the memory of the machine, and ``more``."""
        return EngineConfig.from_flat(self.settings | {"kv_cache_memory_bytes": self.machine.kv_bytes} | more)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CellTask:
    """What one process needs to run one cell. ``window``: that of the baseline; None for the baseline itself."""

    of: RateTask
    policy: dict[str, Any]
    rate: float
    seed: int
    targets: LabTargets
    window: MeasuredWindow | None = None

    def requests(self) -> list[TracedRequest]:
        """The requests of the seed, with the strict targets as their own, for policies that know of targets."""
        ttft, tpot = (STRICT * idle * 1000 for idle in (self.targets.idle_ttft, self.targets.idle_tpot))
        more: dict[str, Any] = {"ttft_ms": ttft, "tpot_ms": tpot or None}
        return [dataclasses.replace(request, **more) for request in self.of.requests(self.rate, self.seed)]


@functools.lru_cache(maxsize=2)
def _read_once(file: Path) -> list[TracedRequest]:
    return read_trace(file)


def fitting_scale(trace: Sequence[TracedRequest], machine: LabMachine) -> float:
    """Factor for all lengths of a trace, at most 1, so that its long requests (the 99th percentile) fit the model, and
    eight of them fit the KV cache."""
    totals = sorted(request.prompt_tokens + request.output_tokens for request in trace)
    long = totals[min(len(totals) - 1, int(0.99 * len(totals)))]
    room = min(0.9 * machine.deployment.max_model_len, machine.kv_tokens / _ROOM)
    scale = min(1.0, room / long)
    return float(f"{scale:.2g}")


def _scaled(request: TracedRequest, scale: float, most: int) -> TracedRequest:
    """The request with its lengths times ``scale``, cut to ``most`` tokens. Common beginnings stay common."""
    prompt = max(1, round(request.prompt_tokens * scale))
    output = max(1, round(request.output_tokens * scale))
    output = min(output, max(1, most // 2))
    prompt = min(prompt, most - output)
    block = max(16, round(request.prefix_block * scale))
    ids = request.prefix_ids[: -(-prompt // block)]
    return dataclasses.replace(request, prompt_tokens=prompt, output_tokens=output, prefix_block=block, prefix_ids=ids)


def find_capacity(task: RateTask) -> tuple[float, LabTargets]:
    """(highest rate that the baseline sustains, targets of this trace on this machine).

    No queue can grow slower than it is served. So the capacity is the rate at which requests start while a queue never
    empties: all requests arrive at once, and the starts count from the 35th to the 95th of each 100, when the first
    batch is gone and the last has not begun to drain.
    """
    config = task.config({"scheduling_policy": "fcfs"})
    deployment = task.machine.deployment
    many = dataclasses.replace(task, count=max(task.count, _QUEUE))
    trace = many.requests(task.trace.knots.rate if task.trace.knots else 1.0, _TARGET_SEED)
    targets = targets_of(trace, deployment.cost, config.scheduler.max_num_batched_tokens)
    queue = [dataclasses.replace(request, arrival=0.0, session="", turn=0) for request in trace]
    core, limits = simulated_core(deployment, config)
    timings: list[RequestTiming] = []
    serve_trace(core, queue, limits, timings)
    starts = sorted(timing.started for timing in timings)
    first, last = (int(share * len(starts)) for share in _STEADY)
    seconds = starts[last] - starts[first]
    if seconds <= 0:  # all requests fit into one batch
        first, last, seconds = 0, len(starts), core.clock.now()
    return float(f"{(last - first) / seconds:.3g}"), targets


def run_cell(task: CellTask) -> tuple[CellFigures, MeasuredWindow]:
    """Simulate a cell. Equal tasks give equal figures. Raises ChairliftError if the policy cannot serve the trace."""
    config = task.of.config(task.policy)
    core, limits = simulated_core(task.of.machine.deployment, config)
    return serve_cell(core, limits, task.requests(), task, config.scheduler.max_num_batched_tokens)


def serve_cell(
    core: EngineCore, limits: ModelLimits, requests: Sequence[TracedRequest], task: CellTask, budget: int
) -> tuple[CellFigures, MeasuredWindow]:
    """Serve the requests of a cell with a simulated or a real engine: (figures, window).

    ``budget``: prompt tokens of a step.
    """
    timings: list[RequestTiming] = []
    before = core.stats()
    begin = core.clock.now()
    delay = task.of.machine.deployment.request_seconds
    serve_trace(core, requests, limits, timings, request_seconds=delay)
    after = core.stats()
    window = task.window or window_of(timings, begin)
    figures = figures_of(
        timings,
        window,
        task.targets,
        task.of.machine.deployment.cost,
        budget,
        preemptions=after.num_preemptions - before.num_preemptions,
        wasted_tokens=after.num_recomputed_tokens - before.num_recomputed_tokens,
        begin=begin,
    )
    return figures, window
