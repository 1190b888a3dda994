"""Prompts in flight: a waiting request waits for blocks that a running request is computing, and then shares them.

A block enters the prefix cache after the step that computes it. So prompts that begin alike and arrive together would
each compute the same beginning. Here the first of them leads: the others wait until its blocks are published, for at
most the steps that computing the blocks themselves would take. SGLang's radix cache and vLLM's prefix cache share only
what earlier steps have computed.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from chairlift.core.kv_cache.manager import KVCacheManager
from chairlift.core.kv_cache.prefix_cache import NEVER
from chairlift.core.request import Request
from chairlift.errors import InvariantError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["PromptsInFlight"]

MIN_BLOCKS = 4
"""Minimum number of blocks that a request saves by waiting. With 16 tokens per block, a step costs about as much as
their computation, so for fewer blocks it is faster to compute them in this step."""
MAX_WAITS = 4
"""Maximum number of times that one request waits. It may find a longer common beginning each time."""


@dataclasses.dataclass(slots=True)
class _Follower:
    request: Request
    leader: Request
    num_tokens: int
    """Number of leading positions that the leader has to publish."""
    last_step: int
    """Index of the last step that the follower waits for."""


class PromptsInFlight:
    """The prompts that running requests compute now, and the waiting requests that wait for their blocks.

    A leader is a running request with positions that are not published yet. It leads until it has published all tokens
    that it had at its admission, or until it loses its row or its blocks.
    """

    def __init__(self, kv: KVCacheManager, wait: Callable[[Request], None]) -> None:
        self._kv = kv
        self._min_tokens = MIN_BLOCKS * kv.block_size
        self._wait = wait
        """Puts a released follower into the waiting queue again."""
        self._leaders: dict[int, list[Request]] = {}
        """Hash of a prompt's first block -> its leaders."""
        self._keys: dict[str, int] = {}
        """Id of a leader -> hash of its first block."""
        self._followers: dict[str, _Follower] = {}
        self._num_waits: dict[str, int] = {}
        """Id of a request -> number of times that it has waited."""
        self.num_followed = 0
        """Counter: requests that waited for blocks of another request."""

    def __len__(self) -> int:
        return len(self._followers)

    def __contains__(self, request: Request) -> bool:
        return request.request_id in self._followers

    def __iter__(self) -> Iterator[Request]:
        """Iterate over the requests that wait for blocks of another request."""
        return (follower.request for follower in self._followers.values())

    def shares(self) -> Iterator[tuple[Request, int]]:
        """(request, number of leading positions that it will share) for each request that waits."""
        return ((follower.request, follower.num_tokens) for follower in self._followers.values())

    def begun(self, request: Request) -> None:
        """Note that a request got a row. It becomes a leader if it has enough positions to compute."""
        remaining = len(request.token_ids) - request.num_computed_tokens
        if self._kv.prefix_cache is None or remaining < self._min_tokens:
            return
        if not request.may_share or request.num_published == NEVER:
            return
        key = self._key(request)
        self._keys[request.request_id] = key
        self._leaders.setdefault(key, []).append(request)

    def follow(self, request: Request, step: int, max_step_tokens: int) -> bool:
        """Let a waiting request wait for a leader, if that saves at least :data:`MIN_BLOCKS` blocks.

        ``step`` is the step that is being scheduled. A step computes at most ``max_step_tokens`` tokens. If it returns
        True, the request waits, and the caller must take it from the waiting queue.
        """
        if not self._leaders or request.was_preempted or not request.may_share:
            return False
        leaders = self._leaders.get(self._key(request))
        num_waits = self._num_waits.get(request.request_id, 0)
        if not leaders or num_waits >= MAX_WAITS:
            return False
        common = [(self._kv.num_common(request, leader, leader.progress_mark), leader) for leader in leaders]
        most, leader = max(common, key=lambda each: each[0])
        saved = most - self._kv.num_shared(request) if most >= self._min_tokens else 0
        if saved < self._min_tokens:
            return False
        # The leader shares each step's tokens with other prompts, so it may need twice as many steps as alone. Two more
        # steps may be in flight.
        num_steps = 2 + 2 * -(-saved // max_step_tokens)
        self._num_waits[request.request_id] = num_waits + 1
        self._followers[request.request_id] = _Follower(request, leader, most, step + num_steps)
        self.num_followed += not num_waits
        return True

    def published(self, leader: Request) -> None:
        """Release the followers whose blocks the leader has published by now."""
        if leader.request_id not in self._keys:
            return
        num_tokens = leader.num_published * self._kv.block_size
        if num_tokens >= leader.progress_mark // self._kv.block_size * self._kv.block_size:
            self.gone(leader)
            return
        ready = [each for each in self._followers.values() if each.leader is leader and each.num_tokens <= num_tokens]
        self._release(ready)

    def gone(self, leader: Request) -> None:
        """Note that a request leads no more: it has published its prompt, or it will not. Releases its followers."""
        key = self._keys.pop(leader.request_id, None)
        if key is None:
            return
        leaders = self._leaders[key]
        leaders.remove(leader)
        if not leaders:
            del self._leaders[key]
        self._release([each for each in self._followers.values() if each.leader is leader])

    def expire(self, step: int) -> None:
        """Release the followers that may not wait for ``step``. They do not wait again."""
        late = [each for each in self._followers.values() if each.last_step < step]
        for follower in late:
            self._num_waits[follower.request.request_id] = MAX_WAITS
        self._release(late)

    def clear(self) -> None:
        """Release all followers, because nothing computed so far is shared any more."""
        self._leaders.clear()
        self._keys.clear()
        self._release(list(self._followers.values()))

    def remove(self, request: Request) -> None:
        """Forget a request that has left the scheduler for good."""
        self._followers.pop(request.request_id, None)
        self._num_waits.pop(request.request_id, None)

    def _release(self, followers: list[_Follower]) -> None:
        for follower in followers:
            del self._followers[follower.request.request_id]
            self._wait(follower.request)

    def _key(self, request: Request) -> int:
        # A hash only finds candidates; num_common() compares them.
        return hash((request.cache_salt, tuple(request.token_ids[: self._kv.block_size])))

    def check_invariants(self, running: dict[str, Request], step: int) -> None:
        """Raise InvariantError if a request waits for one that computes nothing for it, or longer than it may."""
        for leaders in self._leaders.values():
            for leader in leaders:
                if running.get(leader.request_id) is not leader:
                    raise InvariantError(f"{leader!r} has no row, and others may wait for its prompt")
        for follower in self._followers.values():
            if follower.leader.request_id not in self._keys or follower.leader.num_published == NEVER:
                raise InvariantError(f"{follower.request!r} waits for {follower.leader!r}, which publishes nothing")
            if follower.last_step < step:
                raise InvariantError(f"{follower.request!r} waits since too many steps for {follower.leader!r}")
