"""Sessions at the door: a conversation goes back to the replica that has its blocks, and its name gives no access."""

from __future__ import annotations

import pytest

from chairlift.core.request import Request, Service
from chairlift.fleet.door import Door
from chairlift.fleet.routing import PREFIX_BLOCK, PrefixIndex, prefix_keys
from tests.fleet.test_door import fleet, names

TURN = list(range(8 * PREFIX_BLOCK))


def ask(door: Door, name: str, tokens: list[int], session: str = "", salt: str = "") -> list[tuple[str, int]]:
    """Send a request to a fleet that is idle afterwards."""
    request = Request(name, tokens, max_tokens=9, service=Service(session=session), cache_salt=salt)
    door.add(request, prefix_keys(tokens, salt), 0.0)
    sent = names(door.send(0.0))
    door.begun(name)
    door.ended(name, 1)
    return sent


def flood(door: Door) -> None:
    """Send prompts to each replica until the door has forgotten all others."""
    for number in range(20):
        tokens = [1000 * number + place for place in range(8 * PREFIX_BLOCK)]
        for replica in door.replicas:
            replica.prefixes.add(prefix_keys(tokens, f"{replica.index}"))


@pytest.mark.parametrize("routing", ["prefix", "forecast"])
@pytest.mark.parametrize(("session", "replica"), [("chat", 1), ("", 0), ("other", 0)])
def test_a_session_returns_after_a_flood(routing: str, session: str, replica: int) -> None:
    door = fleet(2, routing)
    door.replicas[0].accepting = False
    assert ask(door, "first", TURN, "chat") == [("first", 1)]
    door.replicas[0].accepting = True
    flood(door)
    assert ask(door, "second", [*TURN, *range(PREFIX_BLOCK)], session) == [("second", replica)]


def test_the_name_of_a_foreign_session_leads_nowhere() -> None:
    door = fleet(2, "prefix")
    door.replicas[0].accepting = False
    ask(door, "first", TURN, "chat", "mine")
    door.replicas[0].accepting = True
    flood(door)
    assert ask(door, "thief", TURN, "chat", "yours") == [("thief", 0)]
    assert ask(door, "owner", TURN, "chat", "mine") == [("owner", 1)]


def test_a_dead_replica_is_forgotten_with_its_sessions() -> None:
    door = fleet(2, "prefix")
    door.replicas[0].accepting = False
    ask(door, "first", TURN, "chat")
    door.lose(door.replicas[1])
    for replica in door.replicas:
        replica.accepting = True
    assert ask(door, "second", TURN, "chat") == [("second", 0)]


def test_only_the_common_beginning_is_recalled() -> None:
    index = PrefixIndex(100)
    index.remember(("", "chat"), [1, 2, 3, 4])
    index.recall(("", "chat"), [1, 2, 9, 4])
    assert index.matched([1, 2, 3, 4]) == 2
    index.recall(("", "chat"), [7, 2, 3])
    assert index.matched([7]) == 0


def test_as_many_keys_are_remembered_as_the_cache_has_blocks() -> None:
    index = PrefixIndex(10)
    for number in range(5):
        index.remember(("", f"{number}"), [10 * number + at for at in range(4)])
    index.remember(("", "4"), [40, 41])
    for number in range(5):
        index.recall(("", f"{number}"), [10 * number + at for at in range(4)])
    assert [index.matched([10 * number]) for number in range(5)] == [0, 0, 0, 1, 1]
