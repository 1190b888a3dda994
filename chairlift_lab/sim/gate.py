"""Tests a scheduling policy in many simulated worlds: ``chairlift sim gate module:Class``.

In every world, the policy must follow the rules of the :class:`~chairlift.core.scheduler.policy.Policy` protocol, and
the engine's own checks must pass. A prefill mode or a batch membership of your own is tested with the worlds' policies.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from chairlift.base.plugins import load_named
from chairlift.core.scheduler.membership import Membership, membership_from_name
from chairlift.core.scheduler.policies import load_policy
from chairlift.core.scheduler.policy import Policy
from chairlift.core.scheduler.prefill_mode import prefill_mode_from_name
from chairlift_lab.sim.minimise import minimise
from chairlift_lab.sim.policy_watch import PROMISES, Violation
from chairlift_lab.sim.simulator import Simulation
from chairlift_lab.sim.world import Event, World, make_world

__all__ = ["BrokenRule", "GateReport", "check_class", "check_policy", "run_gate"]

MakePolicy = Callable[[], Policy | None]
"""Function that returns a new policy in its initial state, or None for the policy of the world."""


@dataclasses.dataclass(frozen=True, slots=True)
class BrokenRule:
    """The first rule that the policy broke, and how to reproduce the failure."""

    promise: str
    """Name of the broken rule, a key of :data:`~chairlift_lab.sim.policy_watch.PROMISES`."""
    seed: int
    message: str
    events: tuple[Event, ...]
    """Events of the world that are needed for the failure. For ``determinism``: all events of the world."""
    replay: str
    """Command that reproduces the failure."""


@dataclasses.dataclass(frozen=True, slots=True)
class GateReport:
    """Result of checking a policy. ``str()`` gives a report in text."""

    policy: str
    num_seeds: int
    """Number of worlds that were run, the failed world included. Each world is run twice."""
    num_steps: int
    checked: dict[str, int]
    """Name of a rule -> number of times that the rule was checked."""
    broken: BrokenRule | None

    @property
    def passed(self) -> bool:
        return self.broken is None

    def __str__(self) -> str:
        broken = self.broken
        verdict = "passes" if broken is None else f"breaks a promise in seed {broken.seed}"
        lines = [f"{self.policy} {verdict} ({self.num_seeds} worlds, {self.num_steps} steps)"]
        for promise, meaning in PROMISES.items():
            mark = "BROKEN" if broken is not None and broken.promise == promise else f"{self.checked[promise]:,}"
            lines.append(f"{mark:>12}  {promise}: {meaning}")
        if broken is not None:
            lines += [broken.message, *(f"  {event}" for event in broken.events), f"replay: {broken.replay}"]
        return "\n".join(lines)


def check_policy(
    make_policy: MakePolicy, seeds: Sequence[int], *, path: str = "", settings: Mapping[str, Any] | None = None
) -> GateReport:
    """Run the world of each seed twice, up to the first world in which a check fails.

    ``make_policy`` is called once per run; if it returns None, the policy of the world is used. ``path`` is the
    ``module:Class`` of the policy, shown in the replay command. ``settings`` replace those of the worlds' schedulers.
    """
    name = path or f"{make_policy.__module__}:{make_policy.__qualname__}"
    checked: Counter[str] = Counter(dict.fromkeys(PROMISES, 0))
    num_seeds = num_steps = 0
    broken = None
    for seed in seeds:
        world = make_world(seed)
        world = dataclasses.replace(world, scheduler={**world.scheduler, **(settings or {})})
        num_seeds += 1
        violation, steps = _run(make_policy, world, checked)
        num_steps += steps
        if violation is not None:
            broken = _reduced(make_policy, world, violation, name)
            break
    return GateReport(name, num_seeds, num_steps, dict(checked), broken)


def _run(make_policy: MakePolicy, world: World, checked: Counter[str]) -> tuple[Violation | None, int]:
    """Run a world twice. Returns (violation or None, number of steps of both runs)."""
    traces = []
    steps = 0
    for _ in range(2):
        try:
            simulation = Simulation(world, make_policy())
        except Exception as error:
            return Violation(f"it cannot be made: {type(error).__name__}: {error}", "exceptions"), steps
        violation: Violation | None = None
        try:
            simulation.run()
        except Violation as found:
            violation = found
        steps += simulation.num_steps
        checked.update(simulation.policy.checked)
        checked["engine"] += simulation.num_steps
        traces.append((simulation.trace, str(violation)))
        if violation is not None and violation.promise != "engine":
            return violation, steps
    checked["determinism"] += 1
    if traces[0] != traces[1]:
        return Violation("two runs of one world differ", "determinism"), steps
    return violation, steps


def _reduced(make_policy: MakePolicy, world: World, violation: Violation, path: str) -> BrokenRule:
    """Describe the violation with the events that it needs: all events if the policy is not deterministic."""

    def fails(fewer: World) -> Violation | None:
        found, _ = _run(make_policy, fewer, Counter())
        return found if found is not None and found.promise == violation.promise else None

    small = world if violation.promise == "determinism" else minimise(world, fails)
    found = fails(small) or violation
    replay = f"chairlift sim gate {path} --seed {world.seed}"
    return BrokenRule(violation.promise, world.seed, str(found), small.events, replay)


def run_gate(path: str, seeds: Sequence[int]) -> int:
    """Check the class ``module:Class`` and print the report. Returns 0 if it passes, otherwise 1. Raises ConfigError if
    no object of the class can be made."""
    report = check_class(path, seeds)
    print(report)
    return 0 if report.passed else 1


def check_class(path: str, seeds: Sequence[int], settings: Mapping[str, Any] | None = None) -> GateReport:
    """Check the policy, prefill mode or batch membership ``module:Class``. ``settings`` replace those of the worlds'
    schedulers. Raises ConfigError if no object of the class can be made."""
    found = load_named("scheduling_policy", path)
    settings = dict(settings or {})
    if isinstance(found, type) and issubclass(found, Membership):
        membership_from_name(path)
        return check_policy(lambda: None, seeds, path=path, settings={**settings, "batching": path})
    if hasattr(found, "turn"):
        prefill_mode_from_name(path)
        return check_policy(lambda: None, seeds, path=path, settings={**settings, "prefill_mode": path})
    load_policy(path)
    return check_policy(lambda: load_policy(path), seeds, path=path, settings=settings)
