"""A subscriber gets the events that it has methods for, and its faults do not reach the publisher."""

from __future__ import annotations

import pytest

from chairlift.engine.events import Events


class Hearing:
    def __init__(self) -> None:
        self.heard: list[object] = []

    def came(self, who: str) -> None:
        self.heard.append(who)


class Failing(Hearing):
    def came(self, who: str) -> None:
        raise MemoryError

    def missed(self) -> None:
        self.heard.append("nothing")


def test_subscribers_are_told_of_what_they_have_a_method_for() -> None:
    changes: list[bool] = []
    events = Events("came", "left", changed=lambda: changes.append(events.wants("came")))
    events.tell("came", "nobody hears it")
    first, second = Hearing(), Hearing()
    events.subscribe("first", first)
    events.tell("came", "a")
    events.subscribe("second", second)
    events.tell("came", "b")
    events.tell("left", "b")
    events.unsubscribe("first")
    events.unsubscribe("first")
    events.tell("came", "c")
    assert (first.heard, second.heard) == (["a", "b"], ["b", "c"])
    assert not events.wants("left") and list(events.subscribers) == ["second"]
    events.unsubscribe("second")
    assert changes == [True, True, True, False]


def test_a_failing_subscriber_is_told_so_and_the_others_receive_all_events() -> None:
    events, failing, hearing = Events("came"), Failing(), Hearing()
    events.subscribe("failing", failing)
    events.subscribe("hearing", hearing)
    events.tell("came", "a")
    assert (failing.heard, hearing.heard) == (["nothing"], ["a"])


def test_a_subscriber_that_fails_at_every_event_is_logged_a_few_times(caplog: pytest.LogCaptureFixture) -> None:
    events, failing = Events("came"), Failing()
    events.subscribe("failing", failing)
    for _ in range(1500):
        events.tell("came", "a")
    assert len(failing.heard) == 1500
    assert [record.getMessage().split(", ")[1] for record in caplog.records] == [
        f"{count} times so far" for count in (1, 10, 100, 1000)
    ]


def test_an_unknown_event_is_an_error() -> None:
    with pytest.raises(KeyError):
        Events("came").tell("gone")
