"""The training service after kill -9: no step is applied twice, and none is lost that was acknowledged."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from chairlift.errors import EngineDeadError
from chairlift_train.service.compute.calls import AdapterConfig
from chairlift_train.service.host import Order, WorkResult
from chairlift_train.service.log.records import CallAnswer, ModelRecord
from tests.server.harness import run
from tests.train.service.fake_trainer import FakeCompute
from tests.train.service.wire_client import MODEL, Bench, pass_body

SESSION = "s"
RUN = ModelRecord(f"{SESSION}:train:0", SESSION, "", MODEL, AdapterConfig(8, 3), "null", 1.0)
CREATE = {"session_id": SESSION, "model_seq_id": 0, "base_model": MODEL, "lora_config": {"rank": 8, "seed": 3}}


def step(rate: float) -> bytes:
    return json.dumps({"adam_params": {"learning_rate": rate}}).encode()


SCRIPT: list[tuple[str, bytes]] = [
    ("create", json.dumps(CREATE).encode()),
    ("pass", pass_body(RUN.model_id, 1, [[1, 2, 3], [4, 5]])),
    ("pass", pass_body(RUN.model_id, 2, [[7] * 200] * 4)),
    ("optim_step", step(0.1)),
    ("save", b'{"path": "one"}'),
    ("pass", pass_body(RUN.model_id, 5, [[8, 9]])),
    ("optim_step", step(0.2)),
    ("pass", pass_body(RUN.model_id, 7, [[3, 3, 3]])),
    ("load", json.dumps({"path": f"tinker://{RUN.model_id}/weights/one", "optimizer": True}).encode()),
    ("pass", pass_body(RUN.model_id, 9, [[2, 4]])),
    ("optim_step", step(0.3)),
]
"""Calls by their seq id."""


class KillPoints:
    """Moments at which a process may be killed: before and after each order to the trainer, and before and after each
    use of the log. From the chosen one on, nothing happens any more."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.passed = 0
        self.died: asyncio.Event = asyncio.Event()

    async def here(self) -> None:
        self.passed += 1
        if self.passed == self.at:
            self.died.set()
        if self.died.is_set():
            await asyncio.Event().wait()


class MortalCompute(FakeCompute):
    points: KillPoints

    async def run(self, order: Order) -> WorkResult:
        await self.points.here()
        result = await super().run(order)
        await self.points.here()
        return result


class MortalLog:
    """A log whose process may be killed."""

    def __init__(self, inner: Any, points: KillPoints) -> None:
        self._inner, self._points = inner, points

    async def __call__(self, work: Any) -> Any:
        await self._points.here()
        found = await self._inner(work)
        await self._points.here()
        return found


@contextlib.asynccontextmanager
async def living(directory: Path, points: KillPoints, state_seconds: float) -> AsyncIterator[Bench]:
    """A service without its endpoints, until the block ends."""
    bench = Bench(directory, state_seconds=state_seconds)
    inner = bench.runs.log
    bench.runs.log = MortalLog(inner, points)  # type: ignore[assignment]
    bench.runs.compute = compute = MortalCompute(bench.compute.trainer)
    compute.points = points
    work = asyncio.ensure_future(bench.service._work())
    try:
        yield bench
    finally:
        tasks = [work, *bench.runs._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        inner.close()


async def client(bench: Bench) -> list[CallAnswer | None]:
    """Send all calls, as a client that repeats those whose answer it did not get. Returns their answers."""
    for seq_id, (kind, body) in enumerate(SCRIPT):
        await bench.runs.accept(RUN, seq_id, kind, body)
    return [await bench.runs.answer(RUN.model_id, seq_id, 60) for seq_id in range(len(SCRIPT))]


async def lives(directory: Path, kills: list[int], state_seconds: float) -> tuple[float, list[Any], int]:
    """(weight at the end, answers, number of kill points of the last life) of a server that is killed so often."""
    before: dict[int, CallAnswer] = {}
    for at in [*kills, 0]:
        points = KillPoints(at)
        async with living(directory, points, state_seconds) as bench:
            script = asyncio.ensure_future(client(bench))
            died = asyncio.ensure_future(points.died.wait())
            await asyncio.wait({script, died}, return_when=asyncio.FIRST_COMPLETED)
            died.cancel()
            script.cancel()
            await asyncio.gather(script, return_exceptions=True)
            for call in bench.runs.log._inner.log.calls_after(RUN.model_id, -1):  # type: ignore[attr-defined]
                if call.answer is not None:
                    assert before.setdefault(call.seq_id, call.answer) == call.answer, "an answer has changed"
            if at == 0:
                return bench.compute.trainer.adapters[RUN.model_id].weight, script.result(), points.passed
    raise AssertionError("the last life did not end")


def play(directory: Path, kills: list[int], state_seconds: float = 60.0) -> tuple[float, list[Any], int]:
    found: list[tuple[float, list[Any], int]] = []

    async def test() -> None:
        found.append(await asyncio.wait_for(lives(directory, kills, state_seconds), 60))

    run(test())
    return found[0]


@pytest.mark.parametrize("state_seconds", [60.0, -1.0], ids=["computed again", "state after each step"])
def test_a_kill_at_any_point_changes_nothing(tmp_path: Path, state_seconds: float) -> None:
    weight, answers, passed = play(tmp_path / "alone", [], state_seconds)
    assert passed >= 60 and all(answer.form != "error" for answer in answers)
    for at in range(1, passed + 1, 3 if state_seconds > 0 else 5):
        assert play(tmp_path / str(at), [at], state_seconds)[:2] == (weight, answers), f"killed at point {at}"


@pytest.mark.nightly
@pytest.mark.parametrize("state_seconds", [60.0, -1.0])
def test_a_kill_at_every_point_changes_nothing(tmp_path: Path, state_seconds: float) -> None:
    weight, answers, passed = play(tmp_path / "alone", [], state_seconds)
    for at in range(1, passed + 1):
        assert play(tmp_path / str(at), [at], state_seconds)[:2] == (weight, answers), f"killed at point {at}"


def test_kills_one_after_another_change_nothing(tmp_path: Path) -> None:
    weight, answers, _ = play(tmp_path / "alone", [])
    assert play(tmp_path / "often", [9, 33, 24, 55, 41])[:2] == (weight, answers)


@pytest.mark.planted("test_a_kill_at_any_point_changes_nothing")
def test_a_restart_that_does_not_compute_again_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from chairlift_train.service.steps import StepRunner

    async def nothing(self: Any, model: Any, call: Any) -> None:
        pass

    weight, _, passed = play(tmp_path / "alone", [])
    monkeypatch.setattr(StepRunner, "repeat", nothing)
    assert play(tmp_path / "killed", [passed - 12])[0] != weight


async def ended(bench: Bench, deaths: int) -> tuple[float, list[CallAnswer | None]]:
    bench.compute.deaths = 0
    for seq_id, (kind, body) in enumerate(SCRIPT[:4]):
        if seq_id == 3:
            bench.compute.deaths = deaths
        await bench.runs.accept(RUN, seq_id, kind, body)
        await bench.runs.answer(RUN.model_id, seq_id, 60)
    answers = [await bench.runs.answer(RUN.model_id, seq_id, 60) for seq_id in range(4)]
    return bench.compute.trainer.adapters[RUN.model_id].weight, answers


def test_the_death_of_the_trainer_alone_changes_nothing(tmp_path: Path) -> None:
    found = []

    async def test() -> None:
        for deaths in (0, 1, 2):
            bench = Bench(tmp_path / str(deaths))
            async with bench.service.running():
                found.append(await ended(bench, deaths))

    run(test())
    assert found[0] == found[1] == found[2]


def test_a_call_that_kills_the_trainer_again_and_again_fails(tmp_path: Path) -> None:
    async def test() -> None:
        bench = Bench(tmp_path)
        real = bench.compute.host.run

        def deadly(order: Order) -> Any:
            if any(part.seq_id == 1 for part in getattr(order, "parts", ())):
                raise EngineDeadError("the trainer's process was killed")
            return real(order)

        bench.compute.host.run = deadly  # type: ignore[method-assign]
        async with bench.service.running():
            for seq_id, (kind, body) in enumerate(SCRIPT[:3]):
                await bench.runs.accept(RUN, seq_id, kind, body)
            answers = [await bench.runs.answer(RUN.model_id, seq_id, 60) for seq_id in range(3)]
        assert [None if each is None else each.form for each in answers] == ["json", "error", "proto"]
        assert answers[1] is not None and b"died several times" in answers[1].payload

    run(test())
