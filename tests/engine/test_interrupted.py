"""Ctrl-C while a request is taken in leaves an engine that says so, not one that has lost a request."""

from __future__ import annotations

import pytest

from chairlift.core.request import Request
from chairlift.core.scheduler.admission import WaitingQueue
from chairlift.errors import EngineDeadError
from tests.engine.make import greedy, make_engine


def test_an_interrupt_inside_add_request_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()

    def interrupted(self: WaitingQueue, request: Request) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(WaitingQueue, "add", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.add_request([1, 2], greedy())
    with pytest.raises(EngineDeadError):
        engine.add_request([1, 2], greedy())
    with pytest.raises(EngineDeadError):
        engine.step()
