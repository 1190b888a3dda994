"""A scheduling policy that prefers requests whose prompt begins like the prompt of a request that runs or just ran.

Load it with ``--scheduling-policy chairlift.core.plugins.longest_prefix:LongestPrefixFirst``. Rows with a common
beginning share its blocks, and decode steps can read it once for all of them. If they run one after another instead,
each may have to compute the beginning again. SGLang's scheduler has such an order (longest prefix match; Zheng et al.,
2024), without a bound. Here a request that has waited for ``ageing_seconds`` goes before all younger ones.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable
from typing import Final

from chairlift.core.request import Request
from chairlift.core.scheduler.policy import FirstComeFirstServed, Policy

__all__ = ["LongestPrefixFirst"]

_MAX_LANES: Final = 32
"""Maximum number of beginnings with a lane of their own. The queue compares all lanes before each request."""


class LongestPrefixFirst(FirstComeFirstServed):
    """Requests that begin like a running request, or like one that has just ended, go first: the longest common prefix
    before shorter ones. Otherwise the order of arrival holds. A subclass can have other ``ageing_seconds``, and another
    number of leading tokens in which prompts must agree."""

    name = "longest_prefix"
    ageing_seconds = 10.0
    beginning_tokens = 64

    def __init__(self) -> None:
        self._begins: dict[str, Hashable] = {}
        self._lanes: dict[str, Hashable] = {}
        self._waiting: defaultdict[Hashable, dict[str, Request]] = defaultdict(dict)
        self._running: defaultdict[Hashable, dict[str, Request]] = defaultdict(dict)
        self._common: dict[Hashable, tuple[str, str, int]] = {}
        """Beginning that has a lane -> (id of a waiting request, id of the request that joined last, length of their
        common prefix) that was compared last."""
        self._newest: dict[Hashable, Request] = {}
        """Beginning -> the request that joined last."""
        self._moved: list[Request] = []

    def fork(self) -> Policy:
        fork = type(self)()
        fork._begins = dict(self._begins)  # the copies of the requests have other tokens
        return fork

    def lane(self, request: Request) -> Hashable:
        return self._lanes[request.request_id]

    def rank(self, head: Request, waited: float, now: float) -> tuple[float, ...]:
        if head.was_preempted or now - head.arrival_time >= self.ageing_seconds:
            return (0.0, 0.0, head.sequence)
        return (1.0, -self._shared(head), head.sequence)

    def _shared(self, head: Request) -> int:
        begin = self._begins[head.request_id]
        if begin not in self._common:
            return 0
        newest = self._newest[begin]
        if self._common[begin][:2] != (head.request_id, newest.request_id):
            self._common[begin] = (head.request_id, newest.request_id, _num_common(head, newest))
        return self._common[begin][2]

    def moved(self) -> Iterable[Request]:
        moved, self._moved = [each for each in self._moved if each.request_id in self._begins], []
        self._lanes |= {request.request_id: self._begins[request.request_id] for request in moved}
        return moved

    def queued(self, request: Request, now: float) -> None:
        if request.request_id not in self._begins:
            self._begins[request.request_id] = _beginning(request, self.beginning_tokens)
        begin = self._begins[request.request_id]
        self._waiting[begin][request.request_id] = request
        self._open_lane(begin)
        self._lanes[request.request_id] = begin if begin in self._common else None

    def joined(self, request: Request) -> None:
        begin = self._begins[request.request_id]
        self._waiting[begin].pop(request.request_id, None)
        self._running[begin][request.request_id] = self._newest[begin] = request
        self._open_lane(begin)

    def _open_lane(self, begin: Hashable) -> None:
        may_open = begin is not None and begin not in self._common and len(self._common) < _MAX_LANES
        if may_open and self._running[begin] and self._waiting[begin]:
            self._common[begin] = ("", "", 0)
            self._moved += self._waiting[begin].values()

    def left(self, request: Request) -> None:
        self._running[self._begins[request.request_id]].pop(request.request_id, None)

    def forgotten(self, request: Request) -> None:
        self._lanes.pop(request.request_id, None)
        begin = self._begins.pop(request.request_id, None)
        self._waiting[begin].pop(request.request_id, None)
        if not self._waiting[begin] and not self._running[begin]:
            for each in (self._waiting, self._running, self._newest, self._common):
                each.pop(begin, None)


def _beginning(request: Request, num_tokens: int) -> Hashable:
    """A value that requests with equal first tokens have in common; None for a shorter request."""
    first = (request.cache_salt, request.adapter_id, *request.token_ids[:num_tokens])
    return None if len(request.token_ids) < num_tokens else hash(first)


def _num_common(one: Request, other: Request) -> int:
    """Number of leading tokens of ``one`` that are equal in ``other``."""
    pairs = enumerate(zip(one.token_ids, other.token_ids, strict=False))
    return next((index for index, (left, right) in pairs if left != right), len(one.token_ids))
