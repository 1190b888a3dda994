"""Prompts in flight: a waiting request waits for blocks that a running request is computing, and then shares them.

A block enters the prefix cache after the step that computes it. So prompts that begin alike and arrive together would
each compute the same beginning. Here the first of them leads: the others wait until its blocks are published, for at
most the steps that computing the blocks themselves would take. SGLang's radix cache and vLLM's prefix cache share only
what earlier steps have computed.

The cost of a step does not grow with the number of requests that wait. A waiting request finds its leader by hashes of
its own beginning, whatever the number of leaders. A step takes only a limited number of requests from the queue, and
puts only as many back, because no more could join in it.
"""

from __future__ import annotations

import dataclasses
import heapq
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
LEAST_MOVES = 64
"""Minimum of the number of requests that a step takes from the queue, and of the number that it puts back."""


@dataclasses.dataclass(slots=True)
class _Follower:
    request: Request
    leader: Request
    num_tokens: int
    """Number of leading positions that the leader has to publish."""
    last_step: int
    """Index of the last step that the follower waits for."""
    num_known: int = 0
    """Number of leading positions that the follower can share when it is released, if that is known; otherwise 0."""


class PromptsInFlight:
    """The prompts that running requests compute now, and the waiting requests that wait for their blocks.

    A leader is a running request with positions that are not published yet. It leads until it has published all tokens
    that it had at its admission, or until it loses its row or its blocks.
    """

    def __init__(self, kv: KVCacheManager, wait: Callable[[Request, int], None]) -> None:
        self._kv = kv
        self._min_tokens = MIN_BLOCKS * kv.block_size
        self._wait = wait
        """Puts a released follower into the waiting queue again. Called with the number of leading positions that it
        can share; 0 if that is not known."""
        self._leaders: dict[int, dict[str, Request]] = {}
        """Hash of the first blocks of a prompt, for each number of blocks -> id -> leader whose prompt has them."""
        self._keys: dict[str, list[int]] = {}
        """Id of a leader -> its hashes, one per block."""
        self._followers: dict[str, _Follower] = {}
        self._followers_of: dict[str, dict[str, _Follower]] = {}
        """Id of a leader -> id of a follower -> the follower."""
        self._last_steps: list[tuple[int, int, _Follower]] = []
        """A heap of (last step, number of the wait, follower). It may have followers that were released since."""
        self._released: dict[str, _Follower] = {}
        """Request id -> follower that waits no more, and is not in the queue yet."""
        self._num_left = LEAST_MOVES
        """Number of requests that may still be taken from the queue in this step."""
        self._num_waits: dict[str, int] = {}
        """Id of a request -> number of times that it has waited."""
        self._count = 0
        self.num_followed = 0
        """Counter: requests that waited for blocks of another request."""

    def __len__(self) -> int:
        return len(self._followers) + len(self._released)

    def __contains__(self, request: Request) -> bool:
        return request.request_id in self._followers or request.request_id in self._released

    def __iter__(self) -> Iterator[Request]:
        """Iterate over the requests that are outside the queue: they wait for blocks of another request, or will be in
        the queue in a later step."""
        return (follower.request for each in (self._released, self._followers) for follower in each.values())

    @property
    def has_released(self) -> bool:
        """Whether a request waits no more, and will be in the queue in the next step."""
        return bool(self._released)

    @property
    def may_follow(self) -> bool:
        """Whether this step may take more requests from the queue."""
        return self._num_left > 0

    def shares(self) -> Iterator[tuple[Request, int]]:
        """(request, number of leading positions that it will share) for each request that is outside the queue."""
        both = (self._released, self._followers)
        return ((follower.request, follower.num_tokens) for each in both for follower in each.values())

    def begun(self, request: Request) -> None:
        """Note that a request got a row. It becomes a leader if it has enough positions to compute."""
        remaining = len(request.token_ids) - request.num_computed_tokens
        if self._kv.prefix_cache is None or remaining < self._min_tokens:
            return
        if not request.may_share or request.num_published == NEVER:
            return
        keys = list(self._kv.prefix_cache.hashes(request, len(request.token_ids) // self._kv.block_size))
        self._keys[request.request_id] = keys
        for key in keys:
            self._leaders.setdefault(key, {})[request.request_id] = request

    def follow(self, request: Request, step: int, max_step_tokens: int) -> bool:
        """Let a waiting request wait for a leader, if that saves at least :data:`MIN_BLOCKS` blocks.

        ``step`` is the step that is being scheduled. A step computes at most ``max_step_tokens`` tokens. If it returns
        True, the request waits, and the caller must take it from the waiting queue.
        """
        if not self._leaders or request.was_preempted or not request.may_share:
            return False
        num_waits = self._num_waits.get(request.request_id, 0)
        leader = self._leader_of(request) if num_waits < MAX_WAITS else None
        if leader is None:
            return False
        most = self._kv.num_common(request, leader, leader.progress_mark)
        saved = most - self._kv.num_shared(request) if most >= self._min_tokens else 0
        if saved < self._min_tokens:
            return False
        # The leader shares each step's tokens with other prompts, so it may need twice as many steps as alone. Two more
        # steps may be in flight.
        num_steps = 2 + 2 * -(-saved // max_step_tokens)
        self._num_waits[request.request_id] = num_waits + 1
        follower = _Follower(request, leader, most, step + num_steps)
        self._followers[request.request_id] = follower
        self._followers_of.setdefault(leader.request_id, {})[request.request_id] = follower
        self._count += 1
        heapq.heappush(self._last_steps, (follower.last_step, self._count, follower))
        self._num_left -= 1
        self.num_followed += not num_waits
        return True

    def _leader_of(self, request: Request) -> Request | None:
        """The oldest of the leaders that have most leading blocks in common with the request; None if there are none.
        Hashes may collide, so the caller must compare the blocks."""
        if self._kv.prefix_cache is None:
            return None
        found: dict[str, Request] = {}
        for key in self._kv.prefix_cache.hashes(request, (len(request.token_ids) - 1) // self._kv.block_size):
            leaders = self._leaders.get(key)
            if leaders is None:
                break
            found = leaders
        return next(iter(found.values()), None)

    def published(self, leader: Request) -> None:
        """Release the followers whose blocks the leader has published by now."""
        if leader.request_id not in self._keys:
            return
        num_tokens = leader.num_published * self._kv.block_size
        if num_tokens >= leader.progress_mark // self._kv.block_size * self._kv.block_size:
            self._end(leader, num_tokens)
            return
        followers = self._followers_of.get(leader.request_id, {}).values()
        self._release([each for each in followers if each.num_tokens <= num_tokens], num_tokens)

    def gone(self, leader: Request) -> None:
        """Note that a request leads no more, because it has lost its row or its blocks. Releases its followers."""
        self._end(leader, 0)

    def _end(self, leader: Request, num_published: int) -> None:
        keys = self._keys.pop(leader.request_id, None)
        if keys is None:
            return
        for key in keys:
            leaders = self._leaders[key]
            leaders.pop(leader.request_id, None)  # two of its hashes may be equal
            if not leaders:
                self._leaders.pop(key)
        self._release(list(self._followers_of.get(leader.request_id, {}).values()), num_published)

    def begin(self, step: int, num_rows: int) -> None:
        """Begin to schedule a step: release the followers that may not wait for it, and put released ones into the
        queue. The step takes as many requests from the queue as it needs to fill ``num_rows`` rows, and
        puts at most as many back."""
        self._num_left = max(LEAST_MOVES, num_rows)
        self.expire(step)
        self._queue(self._num_left)

    def expire(self, step: int) -> None:
        """Release the followers that may not wait for ``step``. They do not wait again."""
        while self._last_steps and self._last_steps[0][0] < step:
            _, _, follower = heapq.heappop(self._last_steps)
            if self._followers.get(follower.request.request_id) is follower:
                self._num_waits[follower.request.request_id] = MAX_WAITS
                self._release([follower], 0)

    def clear(self) -> None:
        """Release all followers, because nothing computed so far is shared any more."""
        self._leaders.clear()
        self._keys.clear()
        self._release(list(self._followers.values()), 0)
        for follower in self._released.values():
            follower.num_known = 0

    def remove(self, request: Request) -> None:
        """Forget a request that has left the scheduler for good."""
        follower = self._followers.pop(request.request_id, None)
        if follower is not None:
            self._forget_follower(follower)
        self._released.pop(request.request_id, None)
        self._num_waits.pop(request.request_id, None)

    def _forget_follower(self, follower: _Follower) -> None:
        name = follower.leader.request_id
        others = self._followers_of[name]
        del others[follower.request.request_id]
        if not others:
            del self._followers_of[name]

    def _release(self, followers: list[_Follower], num_published: int) -> None:
        """Let followers wait no more. Their leaders have published ``num_published`` positions; 0 if that is not
        known."""
        for follower in followers:
            del self._followers[follower.request.request_id]
            self._forget_follower(follower)
            follower.num_known = min(follower.num_tokens, num_published)
            self._released[follower.request.request_id] = follower
        if len(self._released) <= LEAST_MOVES:
            self._queue(LEAST_MOVES)

    def _queue(self, most: int) -> None:
        """Put up to ``most`` released followers into the queue, those that waited first."""
        while self._released and most > 0:
            most -= 1
            follower = self._released.pop(next(iter(self._released)))
            self._wait(follower.request, follower.num_known)

    def check_invariants(self, running: dict[str, Request], step: int) -> None:
        """Raise InvariantError if a request waits for one that computes nothing for it, or longer than it may."""
        for leaders in self._leaders.values():
            for leader in leaders.values():
                if running.get(leader.request_id) is not leader:
                    raise InvariantError(f"{leader!r} has no row, and others may wait for its prompt")
        if self._followers.keys() & self._released.keys():
            raise InvariantError("a request waits for a leader, and is released too")
        followed = sum(map(len, self._followers_of.values()))
        if followed != len(self._followers) or not all(self._followers_of.values()):
            raise InvariantError(f"leaders have {followed} followers, but {len(self._followers)} wait")
        for follower in self._followers.values():
            if follower.leader.request_id not in self._keys or follower.leader.num_published == NEVER:
                raise InvariantError(f"{follower.request!r} waits for {follower.leader!r}, which publishes nothing")
            if follower.last_step < step:
                raise InvariantError(f"{follower.request!r} waits since too many steps for {follower.leader!r}")
