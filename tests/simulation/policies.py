"""Custom policies as users could write them, and broken policies."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

from chairlift.core.plugins.longest_prefix import LongestPrefixFirst
from chairlift.core.request import Request
from chairlift.core.scheduler.fairness import VirtualTokenCounters
from chairlift.core.scheduler.membership import Membership
from chairlift.core.scheduler.policy import FirstComeFirstServed, Resource
from chairlift.core.scheduler.view import View

__all__ = [
    "BROKEN",
    "EarliestDeadlineFirst",
    "FairShares",
    "NeverOpens",
    "ReturnsNoTurn",
    "SeededRandom",
    "ShortBeginnings",
    "ShortestPromptFirst",
]


class EarliestDeadlineFirst(FirstComeFirstServed):
    """Earliest deadline first (EDF; Liu and Layland, 1973). The request with the latest deadline is preempted first."""

    name = "edf"
    preemptive = True

    def order(self, request: Request) -> tuple[float, ...]:
        service = request.service
        return (min(service.first_token_by, service.finish_by), request.sequence)

    def lane(self, request: Request) -> Hashable:
        return None

    def outranks(self, request: Request, running: Request, resource: Resource, now: float) -> bool:
        return self.order(request)[0] < self.order(running)[0]


class ShortestPromptFirst(FirstComeFirstServed):
    """Shortest prompt first (an approximation of SRPT). Requests with longer prompts take precedence after some
    time."""

    name = "srpt"

    def order(self, request: Request) -> tuple[float, ...]:
        return (request.num_prompt_tokens, request.sequence)

    def share(self, needs: Sequence[tuple[Request, int]], budget: int) -> Iterable[tuple[Request, int]]:
        return super().share(sorted(needs, key=lambda need: need[1]), budget)


class FairShares(FirstComeFirstServed):
    """Fair sharing among tenants, with virtual token counters only (VTC; Sheng et al., OSDI 2024)."""

    name = "vtc"

    def __init__(self) -> None:
        self.counters = VirtualTokenCounters()

    def lane(self, request: Request) -> Hashable:
        return request.service.tenant

    def rank(self, head: Request, waited: float, now: float) -> tuple[float, ...]:
        return (self.counters[head.service.tenant], head.sequence)

    def observe(self, running: Iterable[Request], now: float) -> None:
        self.counters.settle(running)

    def queued(self, request: Request, now: float) -> None:
        self.counters.queued(request)

    def joined(self, request: Request) -> None:
        self.counters.joined(request)

    def left(self, request: Request) -> None:
        self.counters.left(request)

    def forgotten(self, request: Request) -> None:
        self.counters.forgotten(request)


class SeededRandom(FirstComeFirstServed):
    """Makes random decisions from a seed, so that every run makes the same decisions."""

    name = "random"
    preemptive = True

    def __init__(self) -> None:
        self._random = random.Random(7)
        self._places: dict[str, float] = {}

    def order(self, request: Request) -> tuple[float, ...]:
        return (self._places[request.request_id], request.sequence)

    def lane(self, request: Request) -> Hashable:
        return request.sequence % 3

    def rank(self, head: Request, waited: float, now: float) -> tuple[float, ...]:
        return (self._random.random(),)

    def outranks(self, request: Request, running: Request, resource: Resource, now: float) -> bool:
        return self._random.random() < 0.5

    def victim(self, candidates: Iterable[Request]) -> Request | None:
        able = list(candidates)
        return self._random.choice(able) if able else None

    def share(self, needs: Sequence[tuple[Request, int]], budget: int) -> Iterable[tuple[Request, int]]:
        shares = []
        for request, num_tokens in self._random.sample(list(needs), len(needs)):
            given = self._random.randint(min(1, budget), min(num_tokens, budget)) if budget > 0 else 0
            budget -= given
            shares.append((request, given))
        return shares

    def queued(self, request: Request, now: float) -> None:
        self._places.setdefault(request.request_id, self._random.random())

    def forgotten(self, request: Request) -> None:
        self._places.pop(request.request_id, None)


class ShortBeginnings(LongestPrefixFirst):
    """The longest prefix first, for the short prompts and the short times of simulated worlds."""

    name = "longest_prefix, short"
    ageing_seconds = 0.1
    beginning_tokens = 3


# -- broken ----------------------------------------------------------------------------------------------------------


class OrderChanges(FirstComeFirstServed):
    def __init__(self) -> None:
        self._count = itertools.count()

    def order(self, request: Request) -> tuple[float, ...]:
        return (next(self._count),)


class OrderIsNoNumber(FirstComeFirstServed):
    def order(self, request: Request) -> tuple[float, ...]:
        return (math.nan,)


class LaneChanges(FirstComeFirstServed):
    now = 0.0

    def lane(self, request: Request) -> Hashable:
        return self.now

    def late(self, now: float) -> Iterable[Request]:
        self.now = now
        return ()


class LaneIsAList(FirstComeFirstServed):
    def lane(self, request: Request) -> Any:
        return [request.priority]


class RankIsOneNumber(FirstComeFirstServed):
    def lane(self, request: Request) -> Hashable:
        return request.sequence % 2

    def rank(self, head: Request, waited: float, now: float) -> Any:
        return waited


class SharesTooMuch(FirstComeFirstServed):
    def share(self, needs: Sequence[tuple[Request, int]], budget: int) -> Iterable[tuple[Request, int]]:
        return needs


class SharesBeyondTheNeed(FirstComeFirstServed):
    def share(self, needs: Sequence[tuple[Request, int]], budget: int) -> Iterable[tuple[Request, int]]:
        return [(needs[0][0], budget)]


class SharesTwice(FirstComeFirstServed):
    def share(self, needs: Sequence[tuple[Request, int]], budget: int) -> Iterable[tuple[Request, int]]:
        return [(needs[0][0], min(1, budget))] * 2


class SharesNothing(FirstComeFirstServed):
    def share(self, needs: Sequence[tuple[Request, int]], budget: int) -> Iterable[tuple[Request, int]]:
        return [(request, 0) for request, _ in needs]


class VictimFromElsewhere(FirstComeFirstServed):
    def __init__(self) -> None:
        self._first: Request | None = None

    def joined(self, request: Request) -> None:
        self._first = self._first or request

    def victim(self, candidates: Iterable[Request]) -> Request | None:
        return self._first


class EverybodyYields(FirstComeFirstServed):
    def yields(self, running: Request, needy: Request) -> bool:
        return True


class LateTwice(FirstComeFirstServed):
    def __init__(self) -> None:
        self._running: dict[str, Request] = {}

    def joined(self, request: Request) -> None:
        self._running[request.request_id] = request

    def left(self, request: Request) -> None:
        del self._running[request.request_id]

    def late(self, now: float) -> Iterable[Request]:
        return list(self._running.values()) if now > 0.3 else ()


class MovesTheGone(FirstComeFirstServed):
    def __init__(self) -> None:
        self._gone: list[Request] = []

    def forgotten(self, request: Request) -> None:
        self._gone.append(request)

    def moved(self) -> Iterable[Request]:
        return self._gone


class LateWithoutADeadline(FirstComeFirstServed):
    def __init__(self) -> None:
        self._new: list[Request] = []

    def queued(self, request: Request, now: float) -> None:
        if not request.num_preemptions:
            self._new.append(request)

    def late(self, now: float) -> Iterable[Request]:
        while self._new:
            request = self._new.pop()
            if not request.is_finished:
                yield request


class FailsNowAndThen(FirstComeFirstServed):
    def forgotten(self, request: Request) -> None:
        if request.num_output_tokens == 5:
            raise KeyError(request.request_id)


class FailsInTheMiddle(FirstComeFirstServed):
    def share(self, needs: Sequence[tuple[Request, int]], budget: int) -> Iterable[tuple[Request, int]]:
        yield from super().share(needs[:1], budget)
        raise ZeroDivisionError("nothing left to divide")


class LetsNobodyBack(FirstComeFirstServed):
    """Broken policy: a request that was preempted too often never gets a row again."""

    def may_stay(self, request: Request) -> bool:
        return False


class DependsOnTheRun(FirstComeFirstServed):
    runs = itertools.count()

    def __init__(self) -> None:
        self._sign = (-1) ** next(self.runs)

    def order(self, request: Request) -> tuple[float, ...]:
        return (self._sign * request.sequence,)


class EatsDeadlines(FirstComeFirstServed):
    """Broken policy: it reports requests as late after it has removed their deadlines."""

    def joined(self, request: Request) -> None:
        request.service = dataclasses.replace(request.service, finish_by=0.0)
        request.token_ids.append(0)


class BudgetIsAFraction(FirstComeFirstServed):
    def budget(self, view: View) -> Any:
        return view.token_budget / 2


class AdmitsANumber(FirstComeFirstServed):
    def admits(self, request: Request, view: View) -> Any:
        return view.free_rows


class NeverOpens(Membership):
    """Broken membership: no request ever joins."""

    def __init__(self, batch_wait: float, preferred_sizes: tuple[int, ...]) -> None:
        super().__init__("never", closed=False, held=False)

    def opens(self, *_: Any) -> bool:
        return False


class ReturnsNoTurn:
    """Broken prefill mode: its answer is no kind of step."""

    name = "no turn"

    def turn(self, view: View) -> Any:
        return "never"


BROKEN: dict[type[FirstComeFirstServed], str] = {
    OrderChanges: "order",
    OrderIsNoNumber: "order",
    LaneChanges: "lane",
    LaneIsAList: "lane",
    RankIsOneNumber: "rank",
    SharesTooMuch: "share",
    SharesBeyondTheNeed: "share",
    SharesTwice: "share",
    SharesNothing: "share",
    VictimFromElsewhere: "victim",
    EverybodyYields: "yields",
    LateTwice: "late",
    MovesTheGone: "late",
    LateWithoutADeadline: "engine",
    BudgetIsAFraction: "budget",
    AdmitsANumber: "admits",
    FailsNowAndThen: "exceptions",
    FailsInTheMiddle: "exceptions",
    LetsNobodyBack: "engine",
    DependsOnTheRun: "determinism",
    EatsDeadlines: "engine",
}
"""Policy that is wrong on purpose -> the rule for policies that it breaks."""
