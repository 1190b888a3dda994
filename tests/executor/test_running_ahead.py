"""Steps that are launched before the tokens of the one before them are known: the host's part, over HashLM."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import numpy as np
import pytest

from chairlift.base.step_batch import SampledTokens, StepBatch
from chairlift.config import CacheGroup
from chairlift.core.scheduler.output import SchedulerOutput
from chairlift.executor.input_batch import InputBatch
from chairlift.executor.local import LocalExecutor
from chairlift.models.hashlm import HashLM
from chairlift_lab.sim import simulator
from chairlift_lab.sim.world import make_world
from tests.engine.make import alone, drain, greedy, make_engine
from tests.executor.test_input_batch import chunk, row
from tests.sweep import sweep


class Late(HashLM):
    """HashLM as on a device: it keeps the newest token of each slot, and gives tokens back when they are asked for.

    Rows with penalties are drawn when the step is, from what was generated before.
    """

    num_ahead = num_waited = 0

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.newest: dict[int, int] = {}

    def forward(self, batch: StepBatch) -> list[int]:
        late = np.flatnonzero(batch.token_ids < 0)
        ids, ends = batch.token_ids.copy(), (batch.cu_seqlens[1:] - 1).tolist()
        for place in late.tolist():
            ids[place] = self.newest[int(batch.slots[ends.index(place)])]
        Late.num_ahead += len(late) > 0
        return super().forward(dataclasses.replace(batch, token_ids=ids))

    def sample(self, hidden: list[int], batch: StepBatch, masks: Any = None) -> Any:
        rows = [batch.sampling[index] for index in batch.sample_rows]
        waits = any(row.params.presence_penalty for row in rows)
        tokens = super().sample(hidden, batch, masks)
        for slot, token in zip(batch.slots[batch.sample_rows].tolist(), tokens.token_ids, strict=True):
            self.newest[slot] = -9 if waits else max(token, 0)  # who drew on the host has the token there
        Late.num_waited += waits
        return tokens if waits else Pending(tokens)


@dataclasses.dataclass
class Pending:
    tokens: SampledTokens

    def result(self) -> SampledTokens:
        return self.tokens


class LateAndFaulty(Late, simulator._FaultyModel):
    """Faults come in before tokens are kept, as they would on the device."""


@pytest.fixture
def late_worlds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulator, "_FaultyModel", LateAndFaulty)
    monkeypatch.setattr(Late, "num_ahead", 0)
    monkeypatch.setattr(Late, "num_waited", 0)


def run_ahead(seed: int) -> simulator.Simulation:
    world = make_world(seed)
    scheduler = {**world.scheduler, "num_lookahead_steps": 1 + seed % 2}
    simulation = simulator.Simulation(dataclasses.replace(world, scheduler=scheduler))
    simulation.run()
    return simulation


@pytest.mark.nightly
def test_look_ahead_changes_no_token_in_random_worlds(request: pytest.FixtureRequest, late_worlds: None) -> None:
    """Requests join, share, finish, are aborted, preempted and swapped, and steps fail, one or two steps ahead."""
    counts: Counter[str] = Counter(late=0, preempted=0, swapped=0, tails=0, cached=0, offloaded=0, brought_back=0)

    def check(seed: int) -> None:
        simulation = run_ahead(seed)
        scheduler, kv = simulation.engine.scheduler, simulation.engine.kv
        counts.update(
            late=scheduler.num_late, preempted=scheduler.num_preemptions, swapped=scheduler.preemptor.num_swaps
        )
        counts.update(tails=scheduler.preemptor.num_tails, cached=simulation.num_cached_tokens)
        counts.update(offloaded=kv.num_offloaded, brought_back=kv.num_brought_back)

    sweep(request, 100, check)
    if not request.config.getoption("--seeds"):
        assert min(counts.values()) > 0 and Late.num_ahead > 150 and Late.num_waited > 50, counts


@pytest.mark.nightly
def test_look_ahead_changes_no_token_in_many_random_worlds(request: pytest.FixtureRequest, late_worlds: None) -> None:
    sweep(request, 20_000, run_ahead)


@pytest.mark.parametrize("depth", [1, 2])
def test_steps_do_not_wait_for_tokens(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step is launched while ``depth`` others are in flight, until somebody's draw needs what was drawn before."""
    launched: list[int] = []
    engine = make_engine(model=Late, num_lookahead_steps=depth)
    forward = Late.forward

    def watched(self: Late, batch: StepBatch) -> list[int]:
        launched.append(int((batch.token_ids < 0).sum()))
        return forward(self, batch)

    monkeypatch.setattr(Late, "forward", watched)
    plain, careful = greedy(6), greedy(6, presence_penalty=0.5)
    engine.add_request([1, 2], plain, request_id="plain")
    assert drain(engine)["plain"][-1].outputs[0].token_ids == alone([1, 2], plain)
    assert launched[:6] == [0, 1, 1, 1, 1, 1]
    launched.clear()
    engine.add_request([1, 2], plain, request_id="plain")
    engine.add_request([3, 4, 5], careful, request_id="careful")
    done = drain(engine)
    assert done["plain"][-1].outputs[0].token_ids == alone([1, 2], plain)
    assert done["careful"][-1].outputs[0].token_ids == alone([3, 4, 5], careful)
    assert not any(launched)


class Device(Late):
    """Computes while the host prepares the next step."""

    runs_ahead = True


@pytest.mark.parametrize(
    ("model", "asked", "depth"),
    [(HashLM, None, 0), (Device, None, 1), (Device, 0, 0), (Device, 2, 2), (HashLM, 1, 1)],
)
def test_a_device_is_given_one_step_ahead_unless_told_otherwise(
    model: type[HashLM], asked: int | None, depth: int
) -> None:
    engine = make_engine(model=model, num_lookahead_steps=asked)
    assert engine.core.num_lookahead_steps == depth
    engine.add_request([1, 2], greedy(6), request_id="a")
    most = 0
    while engine.has_unfinished:
        engine.step()
        most = max(most, engine.core.num_in_flight)
    assert most == depth


def test_a_late_token_is_stored_only_in_the_row_of_its_request() -> None:
    """A row changed hands while a token was on its way; both owners sample the same place."""
    rows = InputBatch(2, 32, 4, 1)
    old = rows.apply(
        SchedulerOutput(1, joined=[row(0, [5, 6], [1]), row(1, [7, 8], [2])], chunks=[chunk(0, 0, 2), chunk(1, 0, 2)])
    )
    first = rows.expect(old)
    new = rows.apply(
        SchedulerOutput(2, left=[0], joined=[row(0, [8, 9], [3])], decode_slots=(1,), chunks=[chunk(0, 0, 2)])
    )
    assert new.token_ids.tolist() == [first.ticket, 8, 9] and first.ticket < 0
    second = rows.expect(new)
    rows.arrived(first, [50, 51])
    after = rows.apply(SchedulerOutput(3, decode_slots=(1, 0)))
    assert after.token_ids.tolist() == [second.ticket] * 2 and second.ticket not in (first.ticket, 50, 51)
    assert rows.tokens[1, :3].tolist() == [7, 8, 51]
    rows.arrived(second, [60, -1])
    assert rows.tokens[:, 2:4].tolist() == [[0, 0], [51, 60]]


def test_tokens_that_came_are_there_to_be_computed_again() -> None:
    """A row gave the end of its blocks away, and computes its last three tokens once more; one is on its way."""
    executor = LocalExecutor(Late([CacheGroup(9)], 4, 20, 32), num_slots=2, max_model_len=32, block_size=4)
    steps = [SchedulerOutput(1, joined=[row(0, [5, 6], [1, 2])], chunks=[chunk(0, 0, 2)])]
    steps += [SchedulerOutput(2, decode_slots=(0,)), SchedulerOutput(3), SchedulerOutput(4)]
    pending = [executor.sample(executor.execute(step)) for step in steps]
    drawn = [one.result().token_ids[0] for one in pending[:3]]
    again = SchedulerOutput(5, decode_slots=(), chunks=[chunk(0, 2, 4)])
    _, batch = executor.execute(again)
    assert batch.token_ids[:3].tolist() == drawn and batch.token_ids[3] < 0


def test_placeholders_stay_negative() -> None:
    rows = InputBatch(1, 32, 4, 1)
    flat = rows.apply(SchedulerOutput(1, joined=[row(0, [5, 6], [1])], chunks=[chunk(0, 0, 2)]))
    rows._ticket = 2 - 2**30
    assert [rows.expect(flat).ticket for _ in range(4)] == [1 - 2**30, -(2**30), -1, -2]


class Breaking(Late):
    """Its second step's tokens cannot be read."""

    def sample(self, hidden: list[int], batch: StepBatch, masks: Any = None) -> Any:
        tokens = super().sample(hidden, batch, masks)
        self.num_steps = getattr(self, "num_steps", 0) + 1
        return Broken() if self.num_steps == 2 else tokens


class Broken:
    def result(self) -> SampledTokens:
        raise RuntimeError("the copy failed")


def test_tokens_that_cannot_be_read_end_their_requests_only() -> None:
    engine = make_engine(model=Breaking, num_lookahead_steps=1, max_num_seqs=2)
    for name in ("a", "b", "later"):
        engine.add_request([1, len(name)], greedy(6), request_id=name)
    done = drain(engine)
    assert done["a"][-1].error and done["b"][-1].error and "RuntimeError" in done["a"][-1].error
    assert done["later"][-1].outputs[0].token_ids == alone([1, 5], greedy(6))
