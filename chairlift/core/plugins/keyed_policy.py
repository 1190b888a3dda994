"""Base of policies that order requests by a key of their own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import copy

from chairlift.core.request import Request
from chairlift.core.scheduler.policy import FirstComeFirstServed, Policy
from chairlift.core.scheduler.view import View

__all__ = ["KeyedPolicy"]


class KeyedPolicy(FirstComeFirstServed):
    """The request with the smallest :meth:`key` goes first, ties by arrival.

    The key of a request is computed once, when it first waits. With ``changes``, the keys of all waiting requests are
    computed again at each step in which one of them may join. All attributes but ``view`` and ``waiting`` are copied to
    a fork, so they must not hold requests.
    """

    name = "keyed"
    changes = False

    def __init__(self, view: View | None = None) -> None:
        self.view = view or View()
        self.keys: dict[str, tuple[float, ...]] = {}
        """Id of a request that has not ended -> its key."""
        self.waiting: dict[str, Request] = {}

    def key(self, request: Request) -> tuple[float, ...]:
        """Key of a request that waits."""
        return ()

    def new_keys(self) -> Mapping[str, tuple[float, ...]]:
        """Keys of all waiting requests, by id. Overridden if the keys depend on each other."""
        return {name: self.key(request) for name, request in self.waiting.items()}

    def fork(self) -> Policy:
        twin = type(self)()
        twin.catch_up(self)
        return twin

    def catch_up(self, original: Policy) -> None:
        for name in vars(self).keys() - {"view", "waiting"}:
            setattr(self, name, copy(getattr(original, name)))

    def order(self, request: Request) -> tuple[float, ...]:
        return (*self.keys[request.request_id], request.sequence)

    def moved(self) -> Iterable[Request]:
        if not (self.changes and self.waiting and (self.preemptive or self.view.free_rows)):
            return ()
        keys = self.new_keys()
        moved = [self.waiting[name] for name, key in keys.items() if key != self.keys[name]]
        self.keys |= keys
        return moved

    def queued(self, request: Request, now: float) -> None:
        self.waiting[request.request_id] = request
        if request.request_id not in self.keys:
            self.keys[request.request_id] = self.key(request)

    def joined(self, request: Request) -> None:
        self.waiting.pop(request.request_id, None)

    def forgotten(self, request: Request) -> None:
        self.waiting.pop(request.request_id, None)
        self.keys.pop(request.request_id, None)
