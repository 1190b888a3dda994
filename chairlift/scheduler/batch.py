"""The requests of a scheduler: the waiting ones, the running ones with their rows, and moves between both."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import islice

from chairlift.kv_cache.manager import KVCacheManager
from chairlift.kv_cache.tables import Admission
from chairlift.outputs import FinishReason
from chairlift.request import SIZE_UNKNOWN, Request, RequestStatus
from chairlift.scheduler.admission import WaitingQueue
from chairlift.scheduler.decode_rows import DecodeRows
from chairlift.scheduler.membership import Membership
from chairlift.scheduler.output import FAILED_ROW, Chunk, NewRow, SchedulerOutput
from chairlift.scheduler.policy import Policy
from chairlift.scheduler.preemption import PreemptionMode, is_pinned
from chairlift.scheduler.prompt_share import PromptShare

__all__ = ["Batch"]


class Batch:
    """Rows and blocks of all requests.

    A request is in one of four states: it waits, it runs in a row, it is a sibling that waits for the prompt of the
    request it forks from, or it is not ready yet.
    """

    def __init__(
        self,
        kv: KVCacheManager,
        policy: Policy,
        membership: Membership,
        waiting: WaitingQueue,
        *,
        max_running: int,
        token_budget: int,
        watermark: float,
        max_preemptions: int,
        preemption: PreemptionMode,
        policy_share: float,
        max_loras: int = 0,
    ) -> None:
        self.kv, self.policy, self.membership, self.waiting = kv, policy, membership, waiting
        self.max_running = max_running
        """Number of rows."""
        self.running_limit = max_running
        """Rows that may be taken. It may change between steps; a lower limit preempts no request."""
        self.token_budget = token_budget
        """Most tokens of a step. It may be lowered between steps. Every running request gets one token in any case."""
        self.watermark = watermark
        """Share of each block pool that stays free when a request joins running ones, beside what is reserved."""
        self.prompt_share = PromptShare(1.0 if membership.closed else policy_share)
        """Whether the batch is closed to newcomers (static batching, the baseline). It prefills in policy order."""
        self.preemption = preemption
        self.max_preemptions = 0 if preemption.never else max_preemptions
        self.max_loras = max_loras
        """Most different adapters of running requests; 0: any number."""
        self.adapters: Counter[int] = Counter()
        """Adapters of running requests -> how many of them have it."""
        self.adapter_sizes: Mapping[int, int] = {}
        """Adapter -> its bytes. The owner of the adapters sets it; one that is missing costs nothing."""
        self.requests: dict[str, Request] = {}
        self.running: dict[str, Request] = {}
        self.unready: dict[str, Request] = {}
        """Requests whose grammar is being compiled, or whose adapter is read. They take their place in the waiting
        queue when they are ready."""
        self.reserve: dict[str, Request] = {}
        """Short requests that run in reserved rows and blocks."""
        self.paced: dict[str, float] = {}
        """Request id -> longest seconds per token, for running requests that have such a limit."""
        self.decodes = DecodeRows(kv.block_size)
        """Rows that take one token in every step."""
        self.catching_up: list[Request] = []
        """Running requests with more than one token to compute."""
        self.stops: Counter[int] = Counter({FAILED_ROW: 1})
        """Stop token -> number of running requests that it ends."""
        self.step = 0
        """Number of the last step that had something to execute."""
        self.now = 0.0
        """Time at which the newest step was scheduled."""
        self.num_computed_tokens = 0
        """Computed positions of all running requests together."""
        self.free_slots = list(range(max_running - 1, -1, -1))
        self.left: list[int] = []
        """Rows given up since the newest step."""
        self.num_vacated = 0
        """Number of rows released so far."""
        self.epoch = 0
        """Changes whenever tokens of steps in flight may have lost their request."""

    @property
    def unready_for(self) -> str:
        """Missing part of the first request that is not ready: ``grammar`` or ``adapter``; empty without one."""
        return next(iter(self.unready.values())).waits_for or "grammar" if self.unready else ""

    @property
    def free_rows(self) -> int:
        """Number of requests that may still join."""
        return max(0, self.running_limit - len(self.running))

    @property
    def open_rows(self) -> int:
        """Number of requests that may still join without using a reserved row."""
        return max(0, self.free_rows - self._unused_rows)

    @property
    def _unused_rows(self) -> int:
        return max(0, self.prompt_share.reserved_rows(self.running_limit) - len(self.reserve))

    def _unused_blocks(self) -> float:
        """Share of the blocks that is reserved and not taken. Only short requests may join with these."""
        share = self.prompt_share.reserved_blocks(self.running_limit)
        if share and self.reserve:
            pools = enumerate(zip(self.kv.pools, self.kv.layout.kinds, strict=True))
            taken = [
                sum(len(short.block_ids[group]) for short in self.reserve.values()) / pool.capacity
                for group, (pool, kind) in pools
                if kind.grows
            ]
            share -= max(taken, default=0.0)
        return max(0.0, share)

    def may_use_reserve(self, request: Request) -> bool:
        """Whether a waiting request is short, and the reserve has a row and blocks for it."""
        if not self.free_rows or not self._unused_rows:
            return False
        if request.size > self.prompt_share.short_tokens(self.token_budget):
            return False
        pools, share = zip(self.kv.pools, self.kv.layout.kinds, strict=True), self._unused_blocks()
        return all(kind.num_entries(request.size) + 1 <= share * pool.capacity for pool, kind in pools if kind.grows)

    @property
    def has_prefill_work(self) -> bool:
        """Whether a prompt is being computed, or a waiting request has a free row."""
        prompts = any(request.num_computed_tokens < request.progress_mark for request in self.catching_up)
        return prompts or bool(self.waiting and self.free_rows)

    def num_prefill_tokens(self, most: int) -> int:
        """Known tokens that are not computed, of running requests and of those first in line, at most ``most``."""
        total = sum(request.num_tokens - request.num_computed_tokens for request in self.catching_up)
        if self.free_rows and total < most:
            for request in islice(self.waiting, self.free_rows):
                total += len(request.token_ids)
                if total >= most:
                    break
        return min(total, most)

    def wait(self, request: Request, now: float) -> None:
        """Queue a request that has arrived or has lost its row. A request that is not ready is queued later."""
        if not request.is_ready:
            self.unready[request.request_id] = request
            return
        request.is_guaranteed = self.membership.closed or is_pinned(request, self.max_preemptions)
        self.policy.queued(request, now)
        if request.size == SIZE_UNKNOWN:
            request.size = len(request.token_ids) - self.kv.num_shared(request)
        self.waiting.add(request)

    def refile(self, request: Request) -> None:
        """Move a waiting request to its new place, after its order has changed."""
        if request in self.waiting:
            self.waiting.remove(request)
            self.waiting.add(request)

    def adapter_bytes(self, chunks: Iterable[tuple[Request, Chunk]], *, with_decodes: bool) -> int:
        """Bytes of the adapters of a step with these chunks, each counted once; ``with_decodes``: and all decode
        rows."""
        if not self.adapters:
            return 0
        used = {request.adapter_id for request, _ in chunks}
        if with_decodes:
            used |= self.decodes.adapters
        return sum([self.adapter_sizes.get(adapter, 0) for adapter in used])

    def has_adapter_room(self, request: Request) -> bool:
        """Whether a waiting request's adapter fits beside the adapters of running requests. True for a request without
        one."""
        adapter = request.adapter_id
        if not adapter or not self.max_loras or adapter in self.adapters:
            return True
        return len(self.adapters) < self.max_loras

    def admit(self, request: Request, out: SchedulerOutput, *, reserved: bool = False) -> bool:
        """Give a waiting request a row and blocks, or nothing. With ``reserved`` both come from the reserve."""
        if not self.has_adapter_room(request):
            out.held_up_by = out.held_up_by or "adapter"
            return False
        pinned = is_pinned(request, self.max_preemptions)
        if pinned and not self.policy.may_stay(request):
            out.held_up_by = out.held_up_by or "reservation"
            return False
        watermark = self.kept_free(reserved) if self.running else 0.0
        share = not pinned or self.preemption.never
        if request.status is RequestStatus.SWAPPED:
            admission = self.kv.swap_in(request, request.reserve, watermark, out.step, share=share)
        else:
            admission = self.kv.admit(request, request.reserve, watermark, share=share)
        if admission is not None:
            self.seat(request, admission, out, reserved)
        return admission is not None

    def kept_free(self, reserved: bool = False) -> float:
        """Share of each block pool that stays free when a request joins running ones."""
        return self.watermark + (0.0 if reserved else self._unused_blocks())

    def seat(self, request: Request, admission: Admission, out: SchedulerOutput, reserved: bool) -> None:
        """Give a row to a waiting request that has its blocks."""
        self.waiting.remove(request, self.now)
        if not request.was_preempted:
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
        if request.adapter_id:
            self.adapters[request.adapter_id] += 1
        self.stops.update(request.stop_token_ids)
        if request.service.seconds_per_token < math.inf:
            self.paced[request.request_id] = request.service.seconds_per_token
        self.catching_up.append(request)
        self.policy.joined(request)
        out.copies += admission.copies
        out.swap_in += admission.swap_in
        tokens, tables = list(request.token_ids), [list(table) for table in request.block_ids]
        computed, prompt = admission.num_computed_tokens, request.num_prompt_tokens
        how = request.sampling, request.adapter_id, request.images
        out.joined.append(NewRow(request.slot, request.request_id, tokens, prompt, computed, tables, *how))

    def put_back(self, request: Request) -> None:
        """Undo an admission before anything was computed for it."""
        self.vacate(request)
        request.move_to(RequestStatus.PREEMPTED if request.num_preemptions else RequestStatus.WAITING)
        self.wait(request, self.now)

    def vacate(self, request: Request) -> None:
        """Give up row and blocks. Blocks stay taken until the last step in flight that may touch them has run."""
        self.num_vacated += 1
        if request.finish_reason is not FinishReason.ERROR:
            self.kv.publish_confirmed(request)
        self.policy.left(request)
        self.num_computed_tokens -= request.num_computed_tokens
        request.short_of_blocks = False
        if request.decoding:
            self.decodes.stop(request)
        elif request in self.catching_up:
            self.catching_up.remove(request)
        request.num_computed_tokens = 0
        self.kv.tables.free(request, self.step)
        self.reserve.pop(request.request_id, None)
        request.size = SIZE_UNKNOWN
        self.free_slots.append(request.slot)
        self.left.append(request.slot)
        request.slot = -1
        del self.running[request.request_id]
        if request.adapter_id:
            self.adapters[request.adapter_id] -= 1
            if not self.adapters[request.adapter_id]:
                del self.adapters[request.adapter_id]
        self.paced.pop(request.request_id, None)
        for token in request.stop_token_ids:
            self.stops[token] -= 1
            if not self.stops[token]:
                del self.stops[token]
        self.epoch += 1

    def remove(self, request: Request, now: float) -> None:
        """Take a request out for good, wherever it is."""
        if request.slot >= 0:
            self.vacate(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        elif request.request_id in self.unready:
            del self.unready[request.request_id]
        elif request.source is not None:
            request.source.siblings.remove(request)
        self.kv.drop_swapped(request)
        request.move_to(RequestStatus.FINISHED)
        del self.requests[request.request_id]
        self.policy.forgotten(request)
        self.release_siblings(request, now)

    def release_siblings(self, request: Request, now: float) -> None:
        """Queue the other answers of the prompt. Its KV can be forked now, or never will be."""
        for sibling in request.siblings:
            self.wait(sibling, now)
        request.siblings = []
