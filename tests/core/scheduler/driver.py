"""A scheduler without an executor. Every sampled row gets the next token of a script."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from chairlift.config import CacheGroup
from chairlift.core.kv_cache.manager import KVCacheManager
from chairlift.core.request import Request
from chairlift.core.scheduler.membership import membership_from_name
from chairlift.core.scheduler.output import SchedulerOutput, StepResult
from chairlift.core.scheduler.scheduler import Scheduler

__all__ = ["BLOCK", "Driver", "request"]

BLOCK = 4


def request(name: str, prompt: int | list[int], max_tokens: int = 4, **settings: Any) -> Request:
    """Create a request. ``prompt`` is token ids, or their number. Given a number, the function makes token ids that
    differ between requests."""
    ids = [100 * ord(name[-1]) + i for i in range(prompt)] if isinstance(prompt, int) else prompt
    return Request(name, ids, max_tokens=max_tokens, **settings)


class Driver:
    """Schedules steps, and calls ``update`` for each step ``depth`` steps later. Invariants are checked after each
    step."""

    def __init__(
        self,
        *,
        num_blocks: int = 65,
        num_host_blocks: int = 0,
        windows: tuple[int | None, ...] = (None,),
        batching: str = "continuous",
        batch_wait_ms: float = 0.0,
        preferred_sizes: tuple[int, ...] = (),
        depth: int = 0,
        caching: bool = False,
        offload: bool = False,
        tokens: Callable[[str], int] = lambda name: 7,
        **settings: Any,
    ) -> None:
        budget = settings.get("max_num_batched_tokens", 64)
        groups = [CacheGroup(num_blocks, window, num_host_blocks) for window in windows]
        self.kv = KVCacheManager(
            groups, BLOCK, max_step_tokens=budget, enable_prefix_caching=caching, prefix_offload=offload
        )
        defaults = {"max_num_seqs": 8, "max_num_batched_tokens": budget, "max_model_len": 128, "watermark": 0.0}
        membership = membership_from_name(batching, batch_wait_ms, preferred_sizes)
        self.scheduler = Scheduler(self.kv, membership=membership, **{**defaults, **settings})
        self.depth = depth
        self.failing = -1
        self.tokens = tokens
        self.now = 0.0
        self.slots: dict[int, str] = {}
        self.decodes: tuple[int, ...] = ()
        self.flights: deque[tuple[SchedulerOutput, list[int]]] = deque()
        self.finished: list[str] = []
        self.results: list[StepResult] = []

    def add(self, *requests: Request) -> None:
        for one in requests:
            self.scheduler.add(one)

    def step(self, *, fail: bool = False) -> SchedulerOutput:
        """Schedule one step, and update the scheduler with an earlier step. With ``fail``, the newly scheduled step
        fails."""
        out = self.scheduler.schedule(self.now)
        if out.num_tokens:
            self.flights.append((out, self._tokens(out)))
            if fail:
                self.failing = out.step
        if self.flights and (len(self.flights) > self.depth or not out.num_tokens):
            self.land()
        self.scheduler.check_invariants()
        return out

    def land(self) -> None:
        out, tokens = self.flights.popleft()
        if out.step == self.failing:
            result = self.scheduler.fail_step(out, self.now)
        else:
            result = self.scheduler.update(out, tokens, self.now)
        self.results.append(result)
        self.finished += [one.request_id for one in result.finished]

    def run(self, most: int = 500) -> list[SchedulerOutput]:
        """Run until all requests have ended, for at most ``most`` steps. Returns the scheduler's outputs."""
        outs = []
        while self.scheduler.has_unfinished or self.flights:
            outs.append(self.step())
            assert len(outs) < most, "the requests do not come to an end"
            if not outs[-1].num_tokens and not self.flights:
                self.now = max(self.now, self.scheduler.next_event(self.now) or self.now)
        assert self.kv.counts().used == 0
        return outs

    def _tokens(self, out: SchedulerOutput) -> list[int]:
        """Tokens of the rows in the executor's order. The order is computed only from the differences that an executor
        receives."""
        for row in out.joined:
            self.slots[row.slot] = row.request_id
        if out.decode_slots is not None:
            self.decodes = out.decode_slots
        assert len(self.decodes) == out.num_decodes
        rows = [*self.decodes, *(chunk.slot for chunk in out.chunks if chunk.samples)]
        return [self.tokens(self.slots[slot]) for slot in rows]
