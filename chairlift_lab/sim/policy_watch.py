"""Checks every value that a scheduling policy returns against the rules of the ``Policy`` protocol."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any

from chairlift.core.request import Request, RequestStatus
from chairlift.core.scheduler.policy import Policy, Resource
from chairlift.core.scheduler.view import View

__all__ = ["PROMISES", "PolicyWatch", "Violation"]

PROMISES = {
    "exceptions": "no method raises",
    "order": "order() is a tuple of numbers, and stays as it is while the request waits in one place",
    "lane": "lane() is hashable, and stays as it is while the request waits in one place",
    "rank": "rank() is a tuple of numbers",
    "share": "share() gives each request at most once, no more than it needs, no more than the budget, and not nothing",
    "victim": "victim() is one of the candidates, or None",
    "yields": "no two running requests yield to each other",
    "budget": "budget() is a whole number",
    "admits": "admits() is True or False",
    "late": "late() and moved() report requests that have not ended; late() reports each at most once",
    "hooks": "queued, joined, left and forgotten follow the life of every request",
    "front": "preempted requests wait before requests of the same lane that have not started",
    "determinism": "equal seeds give equal executions",
    "engine": "answers are right, budgets and blocks add up, and every request comes to an end",
}
"""Rules that are checked for a policy: name -> meaning. They are called promises: what a policy promises the engine."""

_MAX_IDLE_SHARES = 1
"""Maximum number of consecutive steps in which the policy may give no tokens to any request. After a second such step
with nothing else running, the scheduler reports that it is stalled."""


class Violation(Exception):
    """Raised when a check of a simulated world fails. ``promise`` is the broken rule, a key of :data:`PROMISES`."""

    def __init__(self, message: str, promise: str = "engine") -> None:
        super().__init__(message)
        self.promise = promise


class PolicyWatch:
    """A policy that forwards every call to ``policy`` and checks the result.

    Raises Violation at the first result that breaks a rule of :data:`PROMISES`. ``checked`` maps the name of a rule to
    the number of its checks.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.checked: Counter[str] = Counter()
        self.name = policy.name
        self.preemptive = policy.preemptive
        for hook in ("budget", "admits"):  # the scheduler asks only policies that have them
            if hasattr(policy, hook):
                setattr(self, hook, getattr(self, f"_{hook}"))
        self._stages: dict[str, str] = {}
        self._places: dict[str, tuple[Hashable, tuple[float, ...]]] = {}
        self._reported: set[str] = set()
        self._idle_shares = 0

    def __getattr__(self, name: str) -> Any:
        if name == "policy":  # __init__ has not set the attribute yet, as while unpickling
            raise AttributeError(name)
        return getattr(self.policy, name)

    # -- questions -----------------------------------------------------------------------------------------------

    def fork(self) -> Policy:
        return self.policy.fork()

    def catch_up(self, original: Policy) -> None:
        """Do nothing. The method is never called, because :meth:`fork` returns a fork of the wrapped policy."""

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
        choices = list(candidates)
        chosen: Request | None = self._ask("victim", choices)
        known = chosen is None or any(chosen is one for one in choices)
        self._expect("victim", known, "victim() chose {!r}, which is not one of {!r}", chosen, choices)
        return chosen

    def share(self, needs: Sequence[tuple[Request, int]], budget: int) -> list[tuple[Request, int]]:
        shares = list(self._each("share", needs, budget))
        needed_tokens = {request.request_id: num_tokens for request, num_tokens in needs}
        for request, num_tokens in shares:
            need = needed_tokens.pop(request.request_id, -1)
            self._expect("share", need >= 0, "share() gave {!r} tokens twice, or it needs none", request)
            self._expect(
                "share", 0 <= num_tokens <= need, "share() gave {} of {} tokens to {!r}", num_tokens, need, request
            )
        given = sum(num_tokens for _, num_tokens in shares)
        self._expect("share", given <= max(0, budget), "share() gave {} tokens of a budget of {}", given, budget)
        self._idle_shares = self._idle_shares + 1 if budget > 0 and not given else 0
        idle = self._idle_shares > _MAX_IDLE_SHARES
        self._expect("share", not idle, "share() gave no tokens to any request in {} steps in a row", self._idle_shares)
        return shares

    def _budget(self, view: View) -> int:
        tokens: int = self._ask("budget", view)
        self._expect("budget", type(tokens) is int, "budget() gave {!r}, which is not a whole number", tokens)
        return tokens

    def _admits(self, request: Request, view: View) -> bool:
        answer: bool = self._ask("admits", request, view)
        self._expect("admits", type(answer) is bool, "admits() gave {!r}, which is not True or False", answer)
        return answer

    def observe(self, running: Iterable[Request], now: float) -> None:
        self._ask("observe", running, now)

    def may_stay(self, request: Request) -> bool:
        return bool(self._ask("may_stay", request))

    def late(self, now: float) -> Iterator[Request]:
        for request in self._each("late", now):
            name = request.request_id
            known = name in self._stages and name not in self._reported
            self._expect("late", known, "late() reported {!r}, which has ended or was reported before", request)
            self._reported.add(name)
            self._places.pop(name, None)
            yield request

    def moved(self) -> Iterator[Request]:
        for request in self._each("moved"):
            known = request.request_id in self._stages
            self._expect("late", known, "moved() reported {!r}, which has ended", request)
            self._places.pop(request.request_id, None)
            yield request

    # -- hooks ---------------------------------------------------------------------------------------------------

    def queued(self, request: Request, now: float) -> None:
        self._follows(request, "queued", (None, "left"))
        self._ask("queued", request, now)
        self._places[request.request_id] = (self.lane(request), self.order(request))

    def joined(self, request: Request) -> None:
        self._follows(request, "joined", ("queued", "left"))  # "left", if the request kept its row while preempted
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
        """Check, after a step, that the policy's values ``lane()`` and ``order()`` of waiting requests have not
        changed, and that preempted requests wait before requests that have not started."""
        begun: set[Hashable] = set()
        heads: set[Hashable] = set()
        for request in waiting:
            lane = self.lane(request)
            order = self.order(request)
            before = self._places.setdefault(request.request_id, (lane, order))
            self._expect("order", order == before[1], "order() of {!r} went from {} to {}", request, before[1], order)
            self._expect("lane", lane == before[0], "lane() of {!r} went from {!r} to {!r}", request, before[0], lane)
            fresh = request.status is RequestStatus.WAITING
            in_front = fresh or lane not in begun
            self._expect("front", in_front, "{!r} waits behind a request that has not started", request)
            begun.update([lane] * fresh)
            if lane not in heads:  # the scheduler ranks the first requests of lanes only if there are several lanes
                heads.add(lane)
                self.rank(request, now - request.arrival_time, now)

    def check_drained(self) -> None:
        """Check, after all requests have ended, that the scheduler has reported the end of each request to the
        policy."""
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
        numbers: tuple[float, ...] = key
        return numbers

    def _follows(self, request: Request, stage: str, allowed: tuple[str | None, ...]) -> None:
        before = self._stages.get(request.request_id)
        self._expect("hooks", before in allowed, "{}() of {!r} came after {}", stage, request, before or "nothing")
        self._stages[request.request_id] = stage
