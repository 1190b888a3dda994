"""The staleness gate: random events against books of the test's own, planted faults, and what each policy does."""

from __future__ import annotations

import collections
import copy
from collections.abc import Sequence
from typing import Any

import pytest

from chairlift.errors import ConfigError
from chairlift_train.staleness import Finished, StalenessGate, StalenessPolicy
from tests.sweep import sweep
from tests.train.staleness_books import POLICIES, World, explore, steady


@pytest.mark.parametrize("policy", POLICIES)
def test_random_events_keep_the_rules_of_the_gate(request: pytest.FixtureRequest, policy: StalenessPolicy) -> None:
    sweep(request, 25, lambda seed: explore(policy, seed, 1000))


@pytest.mark.nightly
@pytest.mark.parametrize("policy", POLICIES)
def test_long_runs_of_random_events_keep_the_rules_of_the_gate(
    request: pytest.FixtureRequest, policy: StalenessPolicy
) -> None:
    sweep(request, 100, lambda seed: explore(policy, seed, 10_000))


class TrainsOnWhatIsThere(StalenessGate):
    """Overlooks that long rollouts are overtaken."""

    def _can_keep_up(self, left: Sequence[Finished], taken: int, *, at: int | None = None) -> bool:
        return True


class KeepsWhatIsOld(StalenessGate):
    def publish(self, version: int | None = None) -> None:
        kept = list(self._waiting)
        super().publish(version)
        self._waiting, self._num_dropped = kept, 0


class CountsOnlyWhatRuns(StalenessGate):
    @property
    def capacity(self) -> int:
        return max(0, (self.bound + self.version + 1) * self.batch - self._num_consumed - len(self._running))


class TakesTheNewest(StalenessGate):
    def select(self, k: int | None = None) -> Any:
        self._waiting.reverse()
        try:
            return super().select(k)
        finally:
            self._waiting.sort()


@pytest.mark.planted("test_random_events_keep_the_rules_of_the_gate")
@pytest.mark.parametrize(
    ("gate", "policy"),
    [
        (TrainsOnWhatIsThere, "wait"),
        (KeepsWhatIsOld, "drop"),
        (CountsOnlyWhatRuns, "drop"),
        (CountsOnlyWhatRuns, "wait"),
        (TakesTheNewest, "reweight"),
    ],
)
def test_planted_faults_are_found(gate: type[StalenessGate], policy: StalenessPolicy) -> None:
    with pytest.raises((AssertionError, ConfigError)):
        collections.deque((explore(policy, seed, 1000, gate) for seed in range(25)), maxlen=0)


# -- what the policies do -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bound", [0, 1, 2])
def test_wait_has_no_bias_against_long_samples(bound: int) -> None:
    stats = steady("wait", bound)
    assert stats.consumed > 1000
    assert abs(stats.length_bias) <= 0.02
    for size, produced in stats.lengths_produced.items():
        assert abs(stats.lengths_consumed.get(size, 0) - produced) <= (bound + 1) * 16
    assert stats.dropped == 0


def test_drop_has_a_bias_against_long_samples() -> None:
    """Else the test above shows nothing."""
    stats = steady("drop", 1)
    assert stats.dropped > 0
    assert stats.length_bias < -0.05


def test_figures_of_a_gate_that_has_seen_nothing_are_0() -> None:
    stats = StalenessGate(1, 2).stats()
    assert (stats.staleness_p50, stats.staleness_max, stats.length_bias, stats.staleness) == (0, 0, 0.0, {})


def finished(gate: StalenessGate, *versions: int) -> None:
    for version in versions:
        (ticket,) = gate.admit()
        gate.tag(ticket, version, ticket, length=4)


def test_reweight_and_lr_scale_weaken_stale_samples() -> None:
    weighted = StalenessGate(2, 2, "reweight")
    halved = StalenessGate(2, 2, "reweight", reweight=lambda staleness: 0.5**staleness)
    slowed, plain = StalenessGate(2, 2, "lr_scale"), StalenessGate(2, 2)
    for gate in (weighted, halved, slowed, plain):
        finished(gate, 0, 0, 0, 0)
        assert gate.select().lr_scale == 1.0
        gate.publish()
        gate.publish()
    selections = [gate.select() for gate in (weighted, halved, slowed, plain)]
    assert all(selection.staleness == (2, 2) for selection in selections)
    assert [selection.weights[0] for selection in selections] == [1 / 3, 1 / 4, 1.0, 1.0]
    assert [selection.lr_scale for selection in selections] == [1.0, 1.0, 0.5, 1.0]


def test_wait_holds_back_for_a_late_rollout() -> None:
    gate = StalenessGate(1, 2, "wait")
    slow = gate.admit(4)
    for ticket in slow[1:]:
        gate.tag(ticket, 0, ticket, length=1)
    assert gate.select()
    gate.publish()
    assert gate.admit(2)
    assert not gate.admit(1)
    for ticket in (4, 5):
        gate.tag(ticket, 1, ticket, length=1)
    assert not gate.select(), "rollout 0 would be two versions old in the next step"
    gate.tag(0, 0, 0, length=100)
    assert sorted(gate.select().samples) == [0, slow[3]]
    assert gate.stats().refused == 1


def test_wait_refuses_a_version_that_would_be_too_much() -> None:
    gate = StalenessGate(1, 2, "wait")
    gate.admit(4)
    with pytest.raises(ConfigError, match=r"version 1 would let samples become older than 1 versions.*0 were"):
        gate.publish()
    assert gate.version == 0
    empty = StalenessGate(1, 2, "wait")
    empty.publish()  # nothing is under way: nothing can become too old
    assert empty.capacity == 4, "but what version 0 was not trained on cannot be made up for"


def test_bad_arguments_are_refused() -> None:
    for bound, batch in ((-1, 1), (0, 0)):
        with pytest.raises(ConfigError, match=f"got {bound} and {batch}"):
            StalenessGate(bound, batch)
    with pytest.raises(ConfigError, match="policy must be one of drop, wait, reweight, lr_scale, got 'never'"):
        StalenessGate(1, 1, "never")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="needs policy='reweight', got policy='drop'"):
        StalenessGate(1, 1, reweight=lambda staleness: 1.0)
    gate = StalenessGate(1, 1)
    for call in (gate.admit, gate.select):
        with pytest.raises(ConfigError, match="got 0"):
            call(0)
    with pytest.raises(ConfigError, match="ticket 7"):
        gate.tag(7, 0)
    (ticket,) = gate.admit()
    with pytest.raises(ConfigError, match="is tagged with version 1, but it was admitted at version 0"):
        gate.tag(ticket, 1)
    with pytest.raises(ConfigError, match="the version after 0 is 1, got 2"):
        gate.publish(2)
    gate.publish(1)
    assert gate.version == 1
    gate.cancel(ticket)
    with pytest.raises(ConfigError, match="ticket 0"):
        gate.cancel(ticket)


# -- resume ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_a_restored_gate_goes_on_as_if_nothing_had_happened(policy: StalenessPolicy) -> None:
    world = World(StalenessGate(2, 4, policy), 3)
    for _ in range(20):
        world.run(50)
        twin = copy.deepcopy(world)
        twin.gate = StalenessGate(2, 4, policy)
        twin.gate.load_state_dict(world.gate.state_dict())
        assert twin.run(200) == copy.deepcopy(world).run(200)
    assert world.consumed > 0


def test_a_state_of_other_settings_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"\[1, 2, 'drop'\], but this one has \[1, 3, 'drop'\]"):
        StalenessGate(1, 3).load_state_dict(StalenessGate(1, 2).state_dict())
