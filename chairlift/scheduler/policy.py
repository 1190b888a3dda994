"""Who is next, who is preempted, and who gets how much of a step: a policy is a value, and the loop never asks which.

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
    """Every question has one caller, the loop; ``now`` is in seconds on the engine's clock.

    The loop keeps its own promises whatever a policy answers: no request is preempted twice without progress in
    between, none too often, none starves behind one that does not fit, and budgets hold.
    """

    name: str
    preemptive: bool
    """Whether :meth:`outranks` is ever true. If not, nobody asks, and running work is only preempted for blocks that
    running work needs."""

    def fork(self) -> Policy:
        """A policy of the same opinion that has seen no request yet, for looking ahead on a copy of the state."""
        ...

    def catch_up(self, original: Policy) -> None:
        """Called on a fork once it was told of all requests: what the original knows of the past, it knows too."""
        ...

    def order(self, request: Request) -> tuple[float, ...]:
        """Standing, as a sort key: who is smaller goes first within a lane, and keeps its blocks when running work is
        short of them. Must not change while the request waits in one place."""
        ...

    def lane(self, request: Request) -> Hashable:
        """Waiting requests of one lane differ by :meth:`order` only; lanes are compared by :meth:`rank`."""
        ...

    def rank(self, head: Request, waited: float, now: float) -> tuple[float, ...]:
        """Sort key of a lane, by its first request and by how long nobody of the lane was let in while it waited.
        May change from one call to the next."""
        ...

    def outranks(self, request: Request, running: Request, resource: Resource, now: float) -> bool:
        """Whether ``request``, which waits or is in its prefill, may take ``resource`` from a running one."""
        ...

    def yields(self, running: Request, needy: Request) -> bool:
        """Whether a running request may be preempted for blocks that another running one needs. Never in a circle."""
        ...

    def victim(self, candidates: Iterable[Request]) -> Request | None:
        """The request to preempt, of those that may be. When running work is in need it is a candidate itself; None
        lets it wait."""
        ...

    def share(self, needs: Sequence[tuple[Request, int]], budget: int) -> Iterable[tuple[Request, int]]:
        """How a step's token budget is divided between requests that have several tokens to compute; ``needs`` has
        how many, in order of admission. Each at most once, and no more in all than the budget."""
        ...

    def standing(self, request: Request) -> tuple[float, ...]:
        """What stands above size when the rest of a step's prompt budget goes to the smallest requests: smaller goes
        first, and among equals the smallest request. Must not change while the request waits in one place."""
        ...

    def reserved_tokens(self, needs: Sequence[tuple[Request, int]]) -> int:
        """Tokens of a step that are promised to some of ``needs``, as in :meth:`share`: they never go by size."""
        ...

    def observe(self, running: Iterable[Request], now: float) -> None:
        """Called before the waiting are compared with those who run."""
        ...

    def may_stay(self, request: Request) -> bool:
        """Whether a waiting request that may not be preempted any more may have a row now."""
        ...

    def late(self, now: float) -> Iterable[Request]:
        """Requests that cannot keep their deadline any more; each is reported once."""
        ...

    def moved(self) -> Iterable[Request]:
        """Waiting requests whose lane or order time has changed; asked after :meth:`late`, and each is reported once
        for every change."""
        ...

    def queued(self, request: Request, now: float) -> None:
        """It begins to wait: it has arrived, or was preempted."""
        ...

    def joined(self, request: Request) -> None:
        """It has a row from this step on."""
        ...

    def left(self, request: Request) -> None:
        """It gives up its row; its computed tokens are still known."""
        ...

    def forgotten(self, request: Request) -> None:
        """It has ended, wherever it was."""
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
