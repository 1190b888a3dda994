"""Who is where: every live request waits, runs, or hangs on a sibling, and this is where it moves."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

from chairlift.errors import PromptTooLongError, RequestError
from chairlift.kv_cache.manager import KVCacheManager
from chairlift.kv_cache.tables import Admission
from chairlift.outputs import FinishReason
from chairlift.request import SIZE_UNKNOWN, Request, RequestStatus
from chairlift.scheduler.admission import WaitingQueue
from chairlift.scheduler.decode_rows import DecodeRows
from chairlift.scheduler.membership import Membership
from chairlift.scheduler.output import FAILED_ROW, Chunk, NewRow, SchedulerOutput
from chairlift.scheduler.policy import Policy
from chairlift.scheduler.preemption import PreemptionMode, PreemptionRate, is_pinned
from chairlift.scheduler.prompt_share import PromptShare

__all__ = ["InFlight", "Population"]


@dataclasses.dataclass(slots=True)
class InFlight:
    """What must be known of a step that was scheduled when its tokens come."""

    runs_decodes: bool = False
    sampled: Sequence[Request | None] = ()
    appends: Sequence[Callable[[int], Any]] = ()
    chunks: list[tuple[Request, Chunk]] = dataclasses.field(default_factory=list)
    passed: list[Request] = dataclasses.field(default_factory=list)
    """Waiting requests that did not fit when they were tried."""
    finals: list[Request] = dataclasses.field(default_factory=list)
    """Requests whose last token this step samples."""
    epoch: int = 0
    carried: float = 0.0
    """Part of a token that the policy side of the prompt budget was owed before this step."""


class Population:
    """All requests of a scheduler, their rows and their blocks. The step loop on top is :class:`Scheduler`."""

    def __init__(
        self,
        kv: KVCacheManager,
        policy: Policy,
        membership: Membership,
        waiting: WaitingQueue,
        *,
        max_running: int,
        max_num_batched_tokens: int,
        watermark: float,
        max_preemptions: int,
        preemption: PreemptionMode,
        policy_share: float,
    ) -> None:
        self.kv = kv
        self.policy = policy
        self.membership = membership
        self.max_running = max_running
        """Rows."""
        self.running_limit = max_running
        """Of these, how many may be taken; may be changed between steps, and nobody leaves for a lower one."""
        self.watermark = watermark
        self.prompt_share = PromptShare(1.0 if membership.closed else policy_share)
        """A closed batch is a baseline: it prefills in policy order."""
        self.reserve: dict[str, Request] = {}
        """Short requests that run in reserved rows and blocks."""
        self.token_budget = max_num_batched_tokens
        """Tokens of a step; may be lowered between steps. Every running request gets its one token in any case."""
        self.preemption = preemption
        self.max_preemptions = 0 if preemption.never else max_preemptions
        self.waiting = waiting
        self.running: dict[str, Request] = {}
        self.requests: dict[str, Request] = {}
        self.step = 0
        """Number of the last step that had something to execute."""
        self.now = 0.0
        """When the newest step was scheduled."""
        self.num_preemptions = 0
        self.num_swaps = self.num_tails = 0
        """Of the preemptions, those that kept the KV in host memory, and those that dropped only its end."""
        self.preemption_rate = PreemptionRate()
        self.paced: dict[str, float] = {}
        """Seconds per token that running requests were promised, of those that were."""
        self.free_slots = list(range(max_running - 1, -1, -1))
        self.decodes = DecodeRows(kv.block_size)
        """Rows that take one token in every step."""
        self.num_computed_tokens = 0
        """Positions computed of all running requests."""
        self._arrivals = 0
        self._left: list[int] = []
        self._swap_out: list[tuple[int, int, int]] = []
        self._preempted_for: dict[str, str] = {}
        self._catching_up: list[Request] = []
        self._stops: Counter[int] = Counter({FAILED_ROW: 1})
        self._epoch = 0
        self._num_vacated = 0
        """Rows given up so far."""
        self._turned_away: tuple[int, int] | None = None
        """Who had come and gone when the first in line outranked nobody in a full batch; None when it did."""

    # -- in ------------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestError for a known id, PromptTooLongError for what could never fit."""
        if request.request_id in self.requests:
            raise RequestError(f"request id {request.request_id!r} is already in use; choose another")
        if not self.kv.fits_when_empty(request.limit):
            raise PromptTooLongError(
                f"the request needs KV room for {request.limit} tokens ({request.num_prompt_tokens} of the prompt and"
                f" {request.limit - request.num_prompt_tokens} generated), but the whole cache holds"
                f" {self.kv.capacity_tokens}; shorten the prompt, lower max_tokens, or raise kv_cache_memory_bytes"
            )
        self.requests[request.request_id] = request
        self._arrivals += 1
        request.sequence = request.sequence or self._arrivals  # a copy stands where its original does
        source = None if self.membership.closed else request.source  # a closed batch takes all answers together
        if source is not None and not source.is_finished and source.num_computed_tokens < source.num_prompt_tokens:
            source.siblings.append(request)
        else:
            self._wait(request, request.arrival_time)

    @property
    def has_unfinished(self) -> bool:
        return bool(self.requests)

    @property
    def free_rows(self) -> int:
        """How many more may run."""
        return max(0, self.running_limit - len(self.running))

    @property
    def open_rows(self) -> int:
        """How many more may run without a reserved row."""
        return max(0, self.free_rows - self._unused_rows)

    @property
    def _unused_rows(self) -> int:
        return max(0, self.prompt_share.reserved_rows(self.running_limit) - len(self.reserve))

    def _unused_blocks(self) -> float:
        """Share of the blocks that is reserved and not taken: nobody else may have it when joining."""
        share = self.prompt_share.reserved_blocks(self.running_limit)
        if share and self.reserve:
            pools = enumerate(self.kv.pools)
            share -= max(
                sum(len(short.block_ids[group]) for short in self.reserve.values()) / pool.capacity
                for group, pool in pools
            )
        return max(0.0, share)

    def may_use_reserve(self, request: Request) -> bool:
        """Whether a waiting request is short, and the reserve has a row and blocks for it."""
        if not self.free_rows or not self._unused_rows:
            return False
        if request.size > self.prompt_share.short_tokens(self.token_budget):
            return False
        num_blocks = -(-request.size // self.kv.block_size) + 1
        return num_blocks <= self._unused_blocks() * min(pool.capacity for pool in self.kv.pools)

    @property
    def has_prefill_work(self) -> bool:
        """Whether a prompt is under way, or could be begun as far as rows go."""
        prompts = any(request.num_computed_tokens < request.progress_mark for request in self._catching_up)
        return prompts or bool(self.waiting and self.free_rows)

    def num_prefill_tokens(self, most: int) -> int:
        """Known tokens that want to be computed, of prompts under way and of those first in line, up to ``most``."""
        total = sum(request.num_tokens - request.num_computed_tokens for request in self._catching_up)
        if self.free_rows and total < most:
            for request in islice(self.waiting, self.free_rows):
                total += len(request.token_ids)
                if total >= most:
                    break
        return min(total, most)

    def _wait(self, request: Request, now: float) -> None:
        request.is_guaranteed = self.membership.closed or is_pinned(request, self.max_preemptions)
        self.policy.queued(request, now)
        if request.size == SIZE_UNKNOWN:
            request.size = len(request.token_ids) - self.kv.num_shared(request)
        self.waiting.add(request)

    def _try_admit(self, request: Request, out: SchedulerOutput, *, reserved: bool = False) -> bool:
        """Give a waiting request a row and blocks, or nothing; ``reserved`` ones if so."""
        pinned = is_pinned(request, self.max_preemptions)
        if pinned and not self.policy.may_stay(request):
            out.held_up_by = out.held_up_by or "reservation"
            return False
        watermark = self._watermark(reserved) if self.running else 0.0
        share = not pinned or self.preemption.never
        if request.status is RequestStatus.SWAPPED:
            admission = self.kv.swap_in(request, request.reserve, watermark, out.step, share=share)
        else:
            admission = self.kv.admit(request, request.reserve, watermark, share=share)
        if admission is not None:
            self._seat(request, admission, out, reserved)
        return admission is not None

    def _watermark(self, reserved: bool = False) -> float:
        """Share of each block pool that stays free when a request joins running ones."""
        return self.watermark + (0.0 if reserved else self._unused_blocks())

    def _seat(self, request: Request, admission: Admission, out: SchedulerOutput, reserved: bool) -> None:
        """Give a waiting request, which has its blocks, a row."""
        self.waiting.remove(request, self.now)
        if not request.has_given_way:
            request.num_cached_tokens = admission.num_computed_tokens
        request.move_to(RequestStatus.RUNNING)
        if reserved:
            self.reserve[request.request_id] = request
        request.size = len(request.token_ids) - admission.num_computed_tokens
        request.slot = self.free_slots.pop()
        request.admitted_at_step = request.resumed_at_step = out.step
        request.progress_mark = len(request.token_ids)
        request.num_computed_tokens = admission.num_computed_tokens
        self.num_computed_tokens += admission.num_computed_tokens
        self.running[request.request_id] = request
        self._stops.update(request.stop_token_ids)
        if request.service.seconds_per_token < math.inf:
            self.paced[request.request_id] = request.service.seconds_per_token
        self._catching_up.append(request)
        self.policy.joined(request)
        out.copies += admission.copies
        out.swap_in += admission.swap_in
        tokens, tables = list(request.token_ids), [list(table) for table in request.block_ids]
        computed, prompt = admission.num_computed_tokens, request.num_prompt_tokens
        out.joined.append(NewRow(request.slot, request.request_id, tokens, prompt, computed, tables, request.sampling))

    def adopt(
        self,
        request: Request,
        original: Request,
        begins: int | None,
        twins: Sequence[dict[int, int]],
        now: float,
        num_in_flight: int,
        reserved: bool = False,
    ) -> None:
        """Take in the copy of a request that runs in another scheduler, as far as it is there without the
        ``num_in_flight`` steps in flight; ``begins`` is where their chunks of it begin, if they have any. ``twins``
        has, per cache group, the blocks here that stand for blocks there. ``reserved``: its row is a reserved one."""
        self.now = now
        self.add(request)
        known, computed = len(request.token_ids), original.num_computed_tokens if begins is None else begins
        decodes = begins is None and (original.decoding or computed >= known)
        held = request.finish_reason is not None  # one that is held computes beyond what it knows, up to its limit
        if held and original.decoding:
            computed = max(known - 1, computed - num_in_flight)
        request.num_computed_tokens = computed if held else min(computed, known - 1)
        request.short_of_blocks = original.short_of_blocks
        self.kv.adopt(request, original, twins)
        self._seat(request, Admission(request.num_computed_tokens, []), SchedulerOutput(self.step), reserved)
        request.num_charged_tokens = original.num_charged_tokens
        request.size = original.size
        request.progress_mark = original.progress_mark
        if held or decodes:
            self._catching_up.remove(request)
        if decodes and not (held and computed >= request.limit):
            self.decodes.start([request])

    # -- out ---------------------------------------------------------------------------------------------------------

    def _vacate(self, request: Request) -> None:
        """Give up row and blocks. Blocks stay taken until the last step in flight that may touch them has run."""
        self._num_vacated += 1
        if request.finish_reason is not FinishReason.ERROR:
            self._publish_confirmed(request)
        self.policy.left(request)
        self.num_computed_tokens -= request.num_computed_tokens
        request.short_of_blocks = False
        if request.decoding:
            self.decodes.stop(request)
        elif request in self._catching_up:
            self._catching_up.remove(request)
        request.num_computed_tokens = 0
        self.kv.free(request, self.step)
        self.reserve.pop(request.request_id, None)
        request.size = SIZE_UNKNOWN
        self.free_slots.append(request.slot)
        self._left.append(request.slot)
        request.slot = -1
        del self.running[request.request_id]
        self.paced.pop(request.request_id, None)
        for token in request.stop_token_ids:
            self._stops[token] -= 1
            if not self._stops[token]:
                del self._stops[token]
        self._epoch += 1

    def finish(
        self, request_id: str, reason: FinishReason, stop_reason: int | str | None = None, now: float = 0.0
    ) -> list[Request]:
        """End a request for a reason found outside: its caller left, a stop string, an error.

        Returns the requests that have now left for good: none when the id is unknown, has ended already, or belongs
        to a static batch that has not; several when this was the last one such a batch waited for.
        """
        request = self.requests.get(request_id)
        if request is None or (request.finish_reason is not None and reason is not FinishReason.ABORT):
            return []
        return self._end(request, reason, stop_reason, now)

    def abort(self, request_id: str, now: float = 0.0) -> list[Request]:
        """End a request in any state, at once; nothing happens when the id is unknown or has ended."""
        return self.finish(request_id, FinishReason.ABORT, None, now)

    def _end(self, request: Request, reason: FinishReason, stop_reason: int | str | None, now: float) -> list[Request]:
        """Finish a request; in a held batch it stays until all its mates are finished too."""
        if request.finish_reason is None:
            request.finish_reason, request.stop_reason = reason, stop_reason
        leaving = [request]
        if self.membership.held and request.slot >= 0 and reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._epoch += 1
            self.decodes.stale = True
            leaving = []
        for leaver in leaving:
            self._remove(leaver, now)
        if self.membership.held and all(mate.finish_reason is not None for mate in self.running.values()):
            mates = list(self.running.values())
            for mate in mates:
                self._remove(mate, now)
            leaving += mates
        return leaving

    def _remove(self, request: Request, now: float) -> None:
        if request.slot >= 0:
            self._vacate(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        elif request.source is not None:
            request.source.siblings.remove(request)
        self.kv.drop_swapped(request)
        request.move_to(RequestStatus.FINISHED)
        del self.requests[request.request_id]
        self.policy.forgotten(request)
        self.preemption_rate.finished(request, now)
        self._release_siblings(request, now)

    def _publish_confirmed(self, request: Request) -> None:
        """Offer what steps that have landed computed: all but the newest token, once there is one since admission."""
        if request.block_ids and len(request.token_ids) > request.progress_mark:
            self.kv.publish(request, len(request.token_ids) - 1)

    def _release_siblings(self, request: Request, now: float) -> None:
        """Let the other samples of the prompt in: its KV is there to fork from, or never will be."""
        for sibling in request.siblings:
            self._wait(sibling, now)
        request.siblings = []
