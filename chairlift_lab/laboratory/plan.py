"""What a run of the laboratory compares, and in which order its cells are run."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from chairlift_lab.laboratory.cell import CellTask, LabMachine, LabTrace, RateTask, fitting_scale
from chairlift_lab.laboratory.figures import MeasuredWindow
from chairlift_lab.laboratory.policies import BASELINE, CONTROL, LabPolicy
from chairlift_lab.laboratory.targets import LabTargets

__all__ = ["USUAL_SHARE", "LabGroup", "LabPlan", "PlannedCell"]

USUAL_SHARE: Final = 0.75
"""The engine's default of ``policy_share``. A policy that orders is run with 1, too: otherwise the product's own rule
(a quarter of the prompt tokens for the smallest) would get its credit."""
_SAMPLE: Final = 400
_LOOKS: Final = (3, 5, 8, 12, 16)


@dataclasses.dataclass(frozen=True, slots=True)
class LabGroup:
    """Cells that are compared with each other: one trace, machine, memory and load."""

    trace: LabTrace
    machine: LabMachine
    load: float

    @property
    def rate_key(self) -> str:
        """Name of the trace on the machine, whose capacity and targets hold for all loads."""
        memory = self.machine.memory
        return f"{self.trace.name}|{self.machine.name}|{memory:g}"

    @property
    def key(self) -> str:
        return f"{self.rate_key}|{self.load:g}"


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedCell:
    """One cell, not yet run."""

    group: LabGroup
    policy: LabPolicy
    share: float
    seed: int

    @property
    def is_baseline(self) -> bool:
        return self.policy.name == BASELINE and self.share == USUAL_SHARE

    @property
    def is_reference(self) -> bool:
        """Whether other rows are compared with this one: the baseline, and the control that knows the targets."""
        return self.policy.name in (BASELINE, CONTROL) and self.share == USUAL_SHARE

    @property
    def reference(self) -> str:
        """Name of the row that this row must beat. Every policy but the baseline's is told the targets, so an order is
        compared with the control that is told them, too."""
        told = self.policy.settings.get("scheduling_policy", BASELINE) != BASELINE
        return CONTROL if told and self.policy.name != CONTROL else BASELINE

    @property
    def row(self) -> str:
        """Name of the row: the policy, and its share unless it is the usual one or part of the idea."""
        known = self.share == USUAL_SHARE or "policy_share" in self.policy.settings
        return self.policy.name if known else f"{self.policy.name}, share {self.share:g}"

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the engine that the policy and its share need."""
        return {"policy_share": self.share, **self.policy.settings}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LabPlan:
    """All that is compared."""

    policies: Sequence[LabPolicy]
    traces: Sequence[LabTrace]
    machines: Sequence[LabMachine]
    """Machines, once for each share of memory."""
    loads: Sequence[float]
    """Rates as shares of the capacity, which is the highest rate that the baseline sustains."""
    shares: Sequence[float]
    seeds: int
    requests: int
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Settings of the engine that all cells have."""
    stops_decided: bool = False
    """Whether rows that are decided get no more seeds (:mod:`chairlift_lab.laboratory.racing`)."""
    _tasks: dict[str, RateTask] = dataclasses.field(default_factory=dict, repr=False)
    _digests: dict[str, str] = dataclasses.field(default_factory=dict, repr=False)

    @property
    def looks(self) -> Sequence[int]:
        """Numbers of seeds after which decided rows end."""
        return [look for look in _LOOKS if look < self.seeds] if self.stops_decided else []

    def groups(self) -> Iterator[LabGroup]:
        """Every trace on every machine at every load."""
        for machine in self.machines:
            for load in self.loads:
                for trace in self.traces:
                    yield LabGroup(trace, machine, load)

    def cells(self) -> Iterator[PlannedCell]:
        """Every cell, seed by seed, so that an interrupted run has whole seeds."""
        for seed in range(self.seeds):
            for group in self.groups():
                for policy in self.policies:
                    for share in self._shares_of(policy):
                        yield PlannedCell(group, policy, share, seed)

    def _shares_of(self, policy: LabPolicy) -> Sequence[float]:
        if "policy_share" in policy.settings:
            return [policy.settings["policy_share"]]
        orders = "scheduling_policy" in policy.settings
        return sorted({USUAL_SHARE, *self.shares}) if orders else [USUAL_SHARE]

    def rate_task(self, group: LabGroup) -> RateTask:
        """The trace on the machine, with lengths that fit."""
        if group.rate_key not in self._tasks:
            trace = group.trace
            rate = trace.knots.rate if trace.knots is not None else 1.0
            scale = fitting_scale(trace.draw(_SAMPLE, rate, 0), group.machine)
            self._tasks[group.rate_key] = RateTask(
                trace=trace, machine=group.machine, scale=scale, count=self.requests, settings=dict(self.settings)
            )
        return self._tasks[group.rate_key]

    def cell_task(self, cell: PlannedCell, rates: tuple[float, LabTargets], window: MeasuredWindow | None) -> CellTask:
        """What a process needs to run a cell. ``rates``: (capacity, targets) of its trace on its machine."""
        capacity, targets = rates
        return CellTask(
            of=self.rate_task(cell.group),
            policy=cell.settings,
            rate=capacity * cell.group.load,
            seed=cell.seed,
            targets=targets,
            window=window,
        )

    def digest(self, group: LabGroup) -> str:
        """Digest of what the figures of a group depend on, besides load, policy and seed."""
        if group.rate_key not in self._digests:
            knots = group.trace.knots
            whole = {
                "trace": knots.to_dict() if knots is not None else _file_digest(group.trace),
                "machine": group.machine.deployment.to_dict(),
                "requests": self.requests,
                "settings": dict(self.settings),
            }
            text = json.dumps(whole, sort_keys=True, default=str)
            self._digests[group.rate_key] = hashlib.sha256(text.encode()).hexdigest()[:10]
        return self._digests[group.rate_key]

    def rate_key(self, group: LabGroup) -> str:
        """Name of a trace on a machine in the state file."""
        return f"{group.rate_key}|{self.digest(group)}"

    def key(self, cell: PlannedCell) -> str:
        """Name of a cell in the state file."""
        policy = cell.policy
        if policy.name not in self._digests:  # reads the file of a class
            self._digests[policy.name] = policy.digest
        code = self._digests[policy.name]
        return f"{cell.group.key}|{self.digest(cell.group)}|{policy.name}|{code}|{cell.share:g}|{cell.seed}"


def _file_digest(trace: LabTrace) -> str:
    if trace.file is None:
        return ""
    with trace.file.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
