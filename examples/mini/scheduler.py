"""File 3 of 8. The scheduler builds a new batch for every step (*continuous batching*).

A step is one run of the model. In *static* batching a group of requests is computed until the longest answer ends;
finished rows stay empty, and a new request waits for all of them. Here the batch is rebuilt at every step: a finished
request leaves at once, and a waiting request takes its row in the next step.

A step has a *token budget* (``max_num_batched_tokens``). First, each generating request gets its one token, so that no
answer stalls. Prompts get the rest. A prompt that is longer than the rest is computed in *chunks*, over several steps.

The engine's version is ``chairlift/core/scheduler/scheduler.py``, with the same two methods, ``schedule`` and
``update``.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Sequence

from kv_cache import KVCacheManager
from request import Request, RequestStatus

__all__ = ["Chunk", "Scheduler", "SchedulerOutput"]


@dataclasses.dataclass(frozen=True)
class Chunk:
    """The part of one request that a step computes: ``num_tokens`` tokens from position ``start`` on."""

    slot: int
    """The request's row of the batch."""
    request: Request
    start: int
    num_tokens: int
    samples: bool
    """Whether the step samples a token for the request: the chunk ends with the last known token."""

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


@dataclasses.dataclass
class SchedulerOutput:
    """One step: which tokens of which requests the model computes. The other fields are for people."""

    step: int
    chunks: list[Chunk] = dataclasses.field(default_factory=list)
    """Decode rows first (chunks of one token), then parts of prompts. At most one entry per request."""
    num_decodes: int = 0
    joined: list[tuple[int, Request]] = dataclasses.field(default_factory=list)
    """(row, request) of each request that got a row in this step."""
    preempted: list[Request] = dataclasses.field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks)


class Scheduler:
    """Decides what each step computes. A caller repeats: ``schedule``, run the step, ``update`` with its tokens.

    With ``batching="static"`` requests join only while no request runs, as many as there are rows.
    """

    def __init__(
        self, kv: KVCacheManager, *, max_num_seqs: int, max_num_batched_tokens: int, batching: str = "continuous"
    ) -> None:
        if batching not in ("continuous", "static"):
            raise ValueError(f"batching is {batching!r}; it must be 'continuous' or 'static'")
        if max_num_seqs < 1 or max_num_batched_tokens < 1:
            raise ValueError("max_num_seqs and max_num_batched_tokens must be at least 1")
        self.kv = kv
        self.batching = batching
        self.token_budget = max_num_batched_tokens
        # Each running request must be able to take one token in every step. Otherwise an answer could stall.
        self.max_running = min(max_num_seqs, max_num_batched_tokens)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        """In the order of arrival. A preempted request is always the newest one, so it rejoins at the end."""
        self.step = 0
        self.num_preemptions = 0

    @property
    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        """Queue a request. Raises ValueError if it could never run."""
        if not request.token_ids:
            raise ValueError("the prompt has no tokens; give at least one")
        if request.params.max_tokens < 1:
            raise ValueError(f"max_tokens is {request.params.max_tokens}; it must be at least 1")
        if not self.kv.fits_when_empty(request.limit):
            raise ValueError(
                f"the request needs KV for {request.limit} tokens, but the whole cache holds"
                f" {self.kv.pool.num_blocks * self.kv.block_size}; use a shorter prompt, fewer tokens or more blocks"
            )
        self.waiting.append(request)

    def schedule(self) -> SchedulerOutput:
        """Return the next step. Positions advance here already: after this call, the KV of the step counts as
        computed."""
        self.step += 1
        out = SchedulerOutput(self.step)
        may_join = self.batching == "continuous" or not self.running
        self._run_decodes(out)
        self._continue_prompts(out)
        if may_join and not out.preempted:  # after a preemption, the free blocks are for those that run
            self._admit(out)
        return out

    def _run_decodes(self, out: SchedulerOutput) -> None:
        """One token for each request that generates."""
        for request in list(self.running):
            if request.status is not RequestStatus.RUNNING:  # it was preempted for an older request in this loop
                continue
            if request.num_tokens - request.num_computed_tokens == 1 and self._make_room(request, out):
                self._compute(request, 1, out)
                out.num_decodes += 1

    def _continue_prompts(self, out: SchedulerOutput) -> None:
        """The next chunk of each running request whose prompt is not computed."""
        for request in self.running:
            self._compute(request, request.num_tokens - request.num_computed_tokens, out)

    def _admit(self, out: SchedulerOutput) -> None:
        """Let waiting requests join, in order, while there are rows, tokens and blocks."""
        while self.waiting and len(self.running) < self.max_running:
            if out.num_tokens == self.token_budget and self.batching == "continuous":
                return
            request = self.waiting[0]
            if not self.kv.admit(request):  # no later request passes it, so that a long prompt does not wait forever
                return
            self.waiting.popleft()
            used = {mate.slot for mate in self.running}
            request.slot = min(set(range(self.max_running)) - used)
            request.status = RequestStatus.RUNNING
            self.running.append(request)
            out.joined.append((request.slot, request))
            self._compute(request, request.num_tokens - request.num_computed_tokens, out)

    def _compute(self, request: Request, num_tokens: int, out: SchedulerOutput) -> None:
        """Add a chunk of at most ``num_tokens`` tokens to the step: as many as its budget still has."""
        num_tokens = min(num_tokens, self.token_budget - out.num_tokens)
        if num_tokens:  # 0: the budget is spent, or the request is a decode row of this step already
            start = request.num_computed_tokens
            request.num_computed_tokens += num_tokens
            samples = request.num_computed_tokens == request.num_tokens
            out.chunks.append(Chunk(request.slot, request, start, num_tokens, samples))

    def _make_room(self, request: Request, out: SchedulerOutput) -> bool:
        """Find a block for the request's next position. While there is none, preempt the newest running request.

        Returns False if the request itself was the newest. The oldest request is never preempted by another one and
        fits into the empty cache, so it always makes progress, and then the next oldest one.
        """
        while not self.kv.extend(request, request.num_computed_tokens + 1):
            victim = self.running[-1]
            self._preempt(victim, out)
            if victim is request:
                return False
        return True

    def _preempt(self, victim: Request, out: SchedulerOutput) -> None:
        """Take the row and all blocks of a request. It keeps its tokens, and computes their KV again when it rejoins
        (*recompute*). Sampling depends on tokens and seed only, so its answer stays the same."""
        self._leave(victim, RequestStatus.PREEMPTED)
        victim.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(victim)
        out.preempted.append(victim)

    def _leave(self, request: Request, status: RequestStatus) -> None:
        self.running.remove(request)
        self.kv.free(request)
        request.slot = -1
        request.status = status

    def update(self, out: SchedulerOutput, tokens: Sequence[int]) -> list[Request]:
        """Store the sampled tokens of a step: one for each chunk that samples, in order. Returns the requests that
        have finished; their rows and blocks are free for the next step."""
        finished: list[Request] = []
        for chunk in out.chunks:
            self.kv.publish(chunk.request)
        takers = [chunk.request for chunk in out.chunks if chunk.samples]
        for request, token in zip(takers, tokens, strict=True):
            request.token_ids.append(token)
            if token in request.params.stop_token_ids:
                request.finish_reason = "stop"
            elif len(request.output_token_ids) == request.params.max_tokens:
                request.finish_reason = "length"
            if request.finish_reason is not None:
                self._leave(request, RequestStatus.FINISHED)
                finished.append(request)
        return finished
