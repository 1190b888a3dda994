"""Checks every answer of a policy against its protocol."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any

from chairlift.request import Request, RequestStatus
from chairlift.scheduler.policy import Policy, Resource

__all__ = ["PROMISES", "PolicyWatch", "Violation"]

PROMISES = {
    "exceptions": "no method raises",
    "order": "order() is a tuple of numbers, and stays as it is while the request waits in one place",
    "lane": "lane() is hashable, and stays as it is while the request waits in one place",
    "rank": "rank() is a tuple of numbers",
    "share": "share() gives each request at most once, no more than it needs, no more than the budget, and not nothing",
    "victim": "victim() is one of the candidates, or None",
    "yields": "of two running requests at most one yields to the other",
    "late": "late() and moved() report requests that are there, late() each of them once",
    "hooks": "queued, joined, left and forgotten follow the life of every request",
    "front": "what was preempted waits before those of its lane that have not begun",
    "determinism": "one seed is one execution",
    "engine": "answers are right, budgets and blocks add up, and every request comes to an end",
}
"""Promises that can be found broken: name -> meaning."""

_MOST_IDLE_SHARES = 1
"""Allowed consecutive steps in which the policy gives no request anything. If nothing else runs, the loop takes the
second for a stall."""


class Violation(Exception):
    """A world in which something that must hold did not; ``promise`` is one of :data:`PROMISES`."""

    def __init__(self, message: str, promise: str = "engine") -> None:
        super().__init__(message)
        self.promise = promise


class PolicyWatch:
    """Answers as ``policy`` does. Raises Violation at the first answer that breaks a promise.

    ``checked`` counts the checks of each promise.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.checked: Counter[str] = Counter()
        self.name = policy.name
        self.preemptive = policy.preemptive
        self._stages: dict[str, str] = {}
        self._places: dict[str, tuple[Hashable, tuple[float, ...]]] = {}
        self._reported: set[str] = set()
        self._idle_shares = 0

    def __getattr__(self, name: str) -> Any:
        if name == "policy":  # not there yet
            raise AttributeError(name)
        return getattr(self.policy, name)

    # -- questions -----------------------------------------------------------------------------------------------

    def fork(self) -> Policy:
        return self.policy.fork()

    def catch_up(self, original: Policy) -> None:
        """Never asked: a fork is one of the policy."""

    def order(self, request: Request) -> tuple[float, ...]:
        return self._numbers("order", self._ask("order", request))

    def lane(self, request: Request) -> Hashable:
        name: Hashable = self._ask("lane", request)
        try:
            hash(name)
        except TypeError:
            raise Violation(f"lane() gave {name!r}, which is not hashable", "lane") from None
        return name

    def rank(self, head: Request, waited: float, now: float) -> tuple[float, ...]:
        return self._numbers("rank", self._ask("rank", head, waited, now))

    def outranks(self, request: Request, running: Request, resource: Resource, now: float) -> bool:
        return bool(self._ask("outranks", request, running, resource, now))

    def yields(self, running: Request, needy: Request) -> bool:
        answer = bool(self._ask("yields", running, needy))
        both = answer and running is not needy and self._ask("yields", needy, running)
        self._expect("yields", not both, "{!r} and {!r} yield to each other", running, needy)
        return answer

    def victim(self, candidates: Iterable[Request]) -> Request | None:
        able = list(candidates)
        chosen: Request | None = self._ask("victim", able)
        known = chosen is None or any(chosen is one for one in able)
        self._expect("victim", known, "victim() chose {!r}, which is not one of {!r}", chosen, able)
        return chosen

    def share(self, needs: Sequence[tuple[Request, int]], budget: int) -> list[tuple[Request, int]]:
        shares = list(self._each("share", needs, budget))
        wanted = {request.request_id: num_tokens for request, num_tokens in needs}
        for request, num_tokens in shares:
            most = wanted.pop(request.request_id, -1)
            self._expect("share", most >= 0, "share() gave {!r} tokens twice, or it needs none", request)
            self._expect(
                "share", 0 <= num_tokens <= most, "share() gave {} of {} tokens to {!r}", num_tokens, most, request
            )
        given = sum(num_tokens for _, num_tokens in shares)
        self._expect("share", given <= max(0, budget), "share() gave {} tokens of a budget of {}", given, budget)
        self._idle_shares = self._idle_shares + 1 if budget > 0 and not given else 0
        idle = self._idle_shares > _MOST_IDLE_SHARES
        self._expect("share", not idle, "share() gave nobody anything in {} steps in a row", self._idle_shares)
        return shares

    def observe(self, running: Iterable[Request], now: float) -> None:
        self._ask("observe", running, now)

    def may_stay(self, request: Request) -> bool:
        return bool(self._ask("may_stay", request))

    def late(self, now: float) -> Iterator[Request]:
        for request in self._each("late", now):
            name = request.request_id
            known = name in self._stages and name not in self._reported
            self._expect("late", known, "late() reported {!r}, which has gone or was reported before", request)
            self._reported.add(name)
            self._places.pop(name, None)
            yield request

    def moved(self) -> Iterator[Request]:
        for request in self._each("moved"):
            known = request.request_id in self._stages
            self._expect("late", known, "moved() reported {!r}, which has gone", request)
            self._places.pop(request.request_id, None)
            yield request

    # -- hooks ---------------------------------------------------------------------------------------------------

    def queued(self, request: Request, now: float) -> None:
        self._follows(request, "queued", (None, "left"))
        self._ask("queued", request, now)
        self._places[request.request_id] = (self.lane(request), self.order(request))

    def joined(self, request: Request) -> None:
        self._follows(request, "joined", ("queued", "left"))  # at once after left, where it kept its row
        self._places.pop(request.request_id, None)
        self._ask("joined", request)

    def left(self, request: Request) -> None:
        self._follows(request, "left", ("joined",))
        self._ask("left", request)

    def forgotten(self, request: Request) -> None:
        self._follows(request, "forgotten", (None, "queued", "left"))
        del self._stages[request.request_id]
        self._places.pop(request.request_id, None)
        self._reported.discard(request.request_id)
        self._ask("forgotten", request)

    # -- between steps -------------------------------------------------------------------------------------------

    def check(self, waiting: Iterable[Request], now: float) -> None:
        """After a step, check that waiting requests keep the place where they were filed, and that preempted ones are
        in front."""
        begun: set[Hashable] = set()
        heads: set[Hashable] = set()
        for request in waiting:
            lane, order = self.lane(request), self.order(request)
            before = self._places.setdefault(request.request_id, (lane, order))
            self._expect("order", order == before[1], "order() of {!r} went from {} to {}", request, before[1], order)
            self._expect("lane", lane == before[0], "lane() of {!r} went from {!r} to {!r}", request, before[0], lane)
            fresh = request.status is RequestStatus.WAITING
            self._expect("front", fresh or lane not in begun, "{!r} waits behind one that has not begun", request)
            begun.update([lane] * fresh)
            if lane not in heads:  # the loop asks only if there are several
                heads.add(lane)
                self.rank(request, now - request.arrival_time, now)

    def check_drained(self) -> None:
        """Check at the end that every request has gone."""
        self._expect("hooks", not self._stages, "the policy was not told of the end of {}", sorted(self._stages))

    # -- inside --------------------------------------------------------------------------------------------------

    def _ask(self, method: str, *args: Any) -> Any:
        self.checked["exceptions"] += 1
        try:
            return getattr(self.policy, method)(*args)
        except Exception as error:
            raise Violation(f"{method}() raised {type(error).__name__}: {error}", "exceptions") from error

    def _each(self, method: str, *args: Any) -> Iterator[Any]:
        answers = iter(self._ask(method, *args))
        while True:
            try:
                answer = next(answers)
            except StopIteration:
                return
            except Exception as error:
                raise Violation(f"{method}() raised {type(error).__name__}: {error}", "exceptions") from error
            yield answer

    def _expect(self, promise: str, holds: bool, otherwise: str, *about: Any) -> None:
        self.checked[promise] += 1
        if not holds:
            raise Violation(otherwise.format(*about), promise)

    def _numbers(self, promise: str, key: Any) -> tuple[float, ...]:
        well = isinstance(key, tuple) and all(isinstance(part, (int, float)) and part == part for part in key)
        self._expect(promise, well, "{}() gave {!r}, which is not a tuple of numbers", promise, key)
        made: tuple[float, ...] = key
        return made

    def _follows(self, request: Request, stage: str, allowed: tuple[str | None, ...]) -> None:
        before = self._stages.get(request.request_id)
        self._expect("hooks", before in allowed, "{}() of {!r} came after {}", stage, request, before or "nothing")
        self._stages[request.request_id] = stage
