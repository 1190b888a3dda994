"""Messages of the engine's process reach the requests that they are for."""

from __future__ import annotations

import asyncio
import logging

import pytest

from chairlift.engine.core_outputs import CoreOutputs
from chairlift.engine.info import EngineInfo
from chairlift.engine.process.messages import Loading, Log, Refused, Step, Watched
from chairlift.engine.process.process_client import ProcessClient
from chairlift.metrics.stats import EngineStats


class Events:
    """Notes what it hears."""

    num_requests = 0

    def __init__(self) -> None:
        self.heard: list[object] = []

    def on_progress(self, label: str, share: float) -> None:
        self.heard.append((label, share))

    def on_step(self, step: Step) -> None:
        self.heard.append(step)

    def on_refused(self, refused: Refused) -> None:
        self.heard.append(refused)

    def on_watched(self, lines: bytes) -> None:
        self.heard.append(lines)

    def on_updated(self, info: EngineInfo) -> None:
        self.heard.append(info)


def test_every_message_is_handed_on(caplog: pytest.LogCaptureFixture) -> None:
    step, refused = Step(CoreOutputs(), EngineStats()), Refused("a", False, "no")

    async def test() -> None:
        events = Events()
        client = ProcessClient({}, events)
        for message in (step, refused, Watched(b"{}"), Loading("weights", 0.5), Log(logging.ERROR, "chairlift.x", "!")):
            client.take(message)
        assert events.heard == [step, refused, b"{}", ("weights", 0.5)]

    asyncio.run(test())
    assert [(each.name, each.levelname, each.message) for each in caplog.records] == [("chairlift.x", "ERROR", "!")]


def test_the_engine_counts_as_silent_only_while_requests_wait_for_it() -> None:
    async def test() -> None:
        events = Events()
        client = ProcessClient({}, events)
        assert client.silent_since is None
        for waiting in (1, 0):
            events.num_requests = waiting
            client.take(Step(CoreOutputs(), EngineStats()))
            assert (client.silent_since is not None) == bool(waiting)

    asyncio.run(test())
