"""Policies decide which request is next, which request is preempted, and how the tokens of a step are divided.

:class:`Policy` is the public interface for custom policies (``--scheduling-policy module:Class``). Derive a class from
:class:`FirstComeFirstServed`, override the methods that differ, and run ``chairlift sim gate module:Class`` before you
use it for real traffic.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Literal, Protocol

from chairlift.core.request import Request

__all__ = ["FCFS", "FirstComeFirstServed", "Policy", "Resource"]

Resource = Literal["slots", "blocks", "tokens"]
"""Resource that two requests can compete for: a row, KV blocks, or tokens of the step's budget."""


class Policy(Protocol):
    """Interface of a scheduling policy. ``now`` is in seconds on the engine's clock.

    The scheduler guarantees the following, whatever a policy returns: no request is preempted too often, or twice
    without progress in between; no request starves because another one does not fit; budgets are respected.
    """

    name: str
    preemptive: bool
    """Whether :meth:`outranks` can return true. If not, it is never called, and running requests are preempted only for
    blocks that other running requests need."""

    def fork(self) -> Policy:
        """A policy with the same settings that has seen no request, for forecasts on a copy of the scheduler."""
        ...

    def catch_up(self, original: Policy) -> None:
        """Copy the history of ``original``. Called on a fork after all requests were added to the fork."""
        ...

    def order(self, request: Request) -> tuple[float, ...]:
        """Sort key of a request among the requests of its lane. The request with the smaller key goes first. When
        running requests lack blocks, the request with the smaller key keeps its blocks. The key must not change while
        the request waits in the queue."""
        ...

    def lane(self, request: Request) -> Hashable:
        """Lane (group of waiting requests) to which a request belongs. Requests of one lane are sorted by
        :meth:`order`; lanes are sorted by :meth:`rank`."""
        ...

    def rank(self, head: Request, waited: float, now: float) -> tuple[float, ...]:
        """Sort key of a lane. ``head`` is its first request. ``waited`` is the number of seconds since a request of the
        lane last joined, or since ``head`` arrived. The key may change between two calls."""
        ...

    def outranks(self, request: Request, running: Request, resource: Resource, now: float) -> bool:
        """Whether ``request``, which waits or prefills, may take ``resource`` from ``running``."""
        ...

    def yields(self, running: Request, needy: Request) -> bool:
        """Whether ``running`` may be preempted for blocks that another running request, ``needy``, needs. The relation
        must have no cycle."""
        ...

    def victim(self, candidates: Iterable[Request]) -> Request | None:
        """Choose the request to preempt; None: preempt none. ``candidates`` include the running request that needs
        blocks. If the result is None or the request that needs blocks, that request waits."""
        ...

    def share(self, needs: Sequence[tuple[Request, int]], budget: int) -> Iterable[tuple[Request, int]]:
        """Divide a step's token budget between requests with several tokens to compute.

        ``needs`` has (request, tokens to compute) in order of admission. The result has (request, assigned tokens). It
        has each request at most once, and at most ``budget`` tokens in total.
        """
        ...

    def standing(self, request: Request) -> tuple[float, ...]:
        """A part of a step's prompt budget goes to the smallest requests. This sort key takes precedence over their
        size.

        The request with the smaller key goes first. The key must not change while the request waits in the queue.
        """
        ...

    def reserved_tokens(self, needs: Sequence[tuple[Request, int]]) -> int:
        """Number of tokens of a step that the policy reserves for some requests of ``needs`` (as in :meth:`share`).
        They are always assigned in policy order."""
        ...

    def observe(self, running: Iterable[Request], now: float) -> None:
        """Update the policy from the running requests. Called before waiting requests are compared with running
        requests."""
        ...

    def may_stay(self, request: Request) -> bool:
        """Whether a waiting request that was preempted the maximum number of times may join now. It then keeps its row
        to the end."""
        ...

    def late(self, now: float) -> Iterable[Request]:
        """Requests that cannot meet their deadline any more. Each is reported once."""
        ...

    def moved(self) -> Iterable[Request]:
        """Waiting requests whose lane or order has changed, and running requests that others outrank from now on, once
        for every change. Called at each step, after :meth:`late`."""
        ...

    def queued(self, request: Request, now: float) -> None:
        """Called when a request begins to wait: it has arrived, or was preempted."""
        ...

    def joined(self, request: Request) -> None:
        """Called when a request gets a row."""
        ...

    def left(self, request: Request) -> None:
        """Called when a request leaves its row. Its number of computed tokens is still set."""
        ...

    def forgotten(self, request: Request) -> None:
        """Called when a request has ended, whether it ran or waited."""
        ...


class FirstComeFirstServed:
    """Order of arrival; the latest arrival is preempted first (the order of vLLM and Orca)."""

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
            assigned = min(num_tokens, budget)
            budget -= assigned
            yield request, assigned

    def _chunk_order(self, need: tuple[Request, int]) -> tuple[float, ...]:
        request = need[0]
        return (request.num_computed_tokens < request.progress_mark, *self.order(request))  # stalled requests first

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
