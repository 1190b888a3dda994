"""Policies decide which request is next, which is preempted, and how a step's tokens are divided.

:class:`Policy` is the public interface for policies of one's own (``--scheduling-policy module:Class``). Start from
:class:`FirstComeFirstServed`, override what differs, and run ``chairlift sim gate module:Class`` before it
meets traffic.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Literal, Protocol

from chairlift.request import Request

__all__ = ["FCFS", "FirstComeFirstServed", "Policy", "Resource"]

Resource = Literal["slots", "blocks", "tokens"]
"""What two requests can compete for: a row, KV blocks, a share of the step's token budget."""


class Policy(Protocol):
    """The interface that the scheduler calls. ``now`` is in seconds on the engine's clock.

    The scheduler keeps its invariants whatever a policy answers: no request is preempted twice without progress in
    between or too often, none starves behind one that does not fit, and budgets hold.
    """

    name: str
    preemptive: bool
    """Whether :meth:`outranks` is ever true. If not, it is never called, and running work is only preempted for blocks
    that other running work needs."""

    def fork(self) -> Policy:
        """A policy with the same settings that has seen no request, for forecasts on a copy of the state."""
        ...

    def catch_up(self, original: Policy) -> None:
        """Take the history of ``original``. Called on a fork after all requests were added to it."""
        ...

    def order(self, request: Request) -> tuple[float, ...]:
        """Sort key within a lane. A smaller request goes first, and keeps its blocks when running work is short of
        them. The key must not change while the request waits in one place."""
        ...

    def lane(self, request: Request) -> Hashable:
        """Waiting requests of one lane differ by :meth:`order` only; lanes are compared by :meth:`rank`."""
        ...

    def rank(self, head: Request, waited: float, now: float) -> tuple[float, ...]:
        """Sort key of a lane with first request ``head``. ``waited`` is the time in seconds since a request of the lane
        last joined, or since ``head`` came. The key may change from one call to the next."""
        ...

    def outranks(self, request: Request, running: Request, resource: Resource, now: float) -> bool:
        """Whether ``request``, which waits or prefills, may take ``resource`` from ``running``."""
        ...

    def yields(self, running: Request, needy: Request) -> bool:
        """Whether ``running`` may be preempted for blocks that ``needy``, also running, needs. Never in a circle."""
        ...

    def victim(self, candidates: Iterable[Request]) -> Request | None:
        """The request to preempt, or None. A running request that needs blocks is a candidate too. It waits if the
        result is None or itself."""
        ...

    def share(self, needs: Sequence[tuple[Request, int]], budget: int) -> Iterable[tuple[Request, int]]:
        """Divide a step's token budget between requests with several tokens to compute.

        ``needs`` has (request, tokens to compute) in order of admission. The result has each request at most once, and
        at most ``budget`` tokens in all.
        """
        ...

    def standing(self, request: Request) -> tuple[float, ...]:
        """Sort key that goes before size, when the rest of a step's prompt budget goes to the smallest requests.

        Smaller goes first. The key must not change while the request waits in one place.
        """
        ...

    def reserved_tokens(self, needs: Sequence[tuple[Request, int]]) -> int:
        """Tokens of a step that are reserved for some of ``needs`` (as in :meth:`share`). They never go by size."""
        ...

    def observe(self, running: Iterable[Request], now: float) -> None:
        """Called before waiting requests are compared with running ones."""
        ...

    def may_stay(self, request: Request) -> bool:
        """Whether a waiting request that may not be preempted any more may join now."""
        ...

    def late(self, now: float) -> Iterable[Request]:
        """Requests that cannot keep their deadline any more. Each is reported once."""
        ...

    def moved(self) -> Iterable[Request]:
        """Waiting requests with a changed lane or order, each once for every change. Called after :meth:`late`."""
        ...

    def queued(self, request: Request, now: float) -> None:
        """A request begins to wait: it has arrived, or was preempted."""
        ...

    def joined(self, request: Request) -> None:
        """A request has a row from this step on."""
        ...

    def left(self, request: Request) -> None:
        """A request leaves its row. Its number of computed tokens is still set."""
        ...

    def forgotten(self, request: Request) -> None:
        """A request has ended, whether it ran or waited."""
        ...


class FirstComeFirstServed:
    """Arrival order; the latest arrival is preempted (vLLM's and Orca's order)."""

    name = "fcfs"
    preemptive = False

    def fork(self) -> Policy:
        return type(self)()

    def catch_up(self, original: Policy) -> None:
        pass

    def order(self, request: Request) -> tuple[float, ...]:
        return (request.sequence,)

    def lane(self, request: Request) -> Hashable:
        return None

    def rank(self, head: Request, waited: float, now: float) -> tuple[float, ...]:
        return self.order(head)

    def outranks(self, request: Request, running: Request, resource: Resource, now: float) -> bool:
        return False

    def yields(self, running: Request, needy: Request) -> bool:
        return self.order(running) >= self.order(needy)

    def victim(self, candidates: Iterable[Request]) -> Request | None:
        return max(candidates, key=self.order, default=None)

    def share(self, needs: Sequence[tuple[Request, int]], budget: int) -> Iterable[tuple[Request, int]]:
        for request, num_tokens in sorted(needs, key=self._chunk_order) if len(needs) > 1 else needs:
            if budget <= 0:
                return
            given = min(num_tokens, budget)
            budget -= given
            yield request, given

    def _chunk_order(self, need: tuple[Request, int]) -> tuple[float, ...]:
        request = need[0]
        return (request.num_computed_tokens < request.progress_mark, *self.order(request))  # who stalled goes first

    def standing(self, request: Request) -> tuple[float, ...]:
        return ()

    def reserved_tokens(self, needs: Sequence[tuple[Request, int]]) -> int:
        return 0

    def observe(self, running: Iterable[Request], now: float) -> None:
        pass

    def may_stay(self, request: Request) -> bool:
        return True

    def late(self, now: float) -> Iterable[Request]:
        return ()

    def moved(self) -> Iterable[Request]:
        return ()

    def queued(self, request: Request, now: float) -> None:
        pass

    def joined(self, request: Request) -> None:
        pass

    def left(self, request: Request) -> None:
        pass

    def forgotten(self, request: Request) -> None:
        pass


FCFS: Policy = FirstComeFirstServed()
