"""The requests of a scheduler: waiting requests, running requests with their rows, and the methods that move requests
between the two."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from chairlift.base.outputs import FinishReason
from chairlift.core.kv_cache.manager import KVCacheManager
from chairlift.core.kv_cache.tables import Admission
from chairlift.core.request import SIZE_UNKNOWN, Request, RequestStatus
from chairlift.core.rows.kind import RowKind
from chairlift.core.scheduler.admission import WaitingQueue
from chairlift.core.scheduler.cost_model import StepFeatures
from chairlift.core.scheduler.decode_rows import DecodeRows
from chairlift.core.scheduler.membership import Membership
from chairlift.core.scheduler.output import FAILED_ROW, Chunk, NewRow, SchedulerOutput
from chairlift.core.scheduler.policy import Policy
from chairlift.core.scheduler.preemption import PreemptionMode, is_pinned
from chairlift.core.scheduler.prompt_share import PromptShare
from chairlift.core.scheduler.prompts_in_flight import PromptsInFlight
from chairlift.core.scheduler.view import View

__all__ = ["Batch"]


class Batch:
    """All unfinished requests, with the rows and blocks of the running ones.

    A request is in one of five states: it waits in the queue; it runs in a row; it waits for its source request to
    compute their common prompt; it waits for blocks that another request is computing; or it is not ready yet.
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
        kinds: Sequence[RowKind] = (),
    ) -> None:
        self.kv = kv
        self.policy = policy
        self.membership = membership
        self.waiting = waiting
        self.max_running = max_running
        """Maximum number of running requests; each has a row."""
        self.running_limit = max_running
        """Number of rows that may be used now. It may change between steps; a lower limit preempts no request."""
        self.max_tokens = token_budget
        """Maximum number of tokens in any step."""
        self.token_budget = token_budget
        """Maximum number of tokens in a step; may be lowered between steps. Each running request gets at least one."""
        self.watermark = watermark
        """Fraction of each block pool that stays free at admissions, in addition to reserved blocks."""
        self.prompt_share = PromptShare(1.0 if membership.closed else policy_share)
        """Divides each step's prompt tokens between requests in policy order and the smallest requests. A closed batch
        (static batching, the baseline) uses policy order only."""
        self.preemption = preemption
        self.max_preemptions = 0 if preemption.never else max_preemptions
        self.kinds = tuple(kinds)
        """The kinds that requests of this batch may have."""
        self.num_looked_past = max((kind.num_looked_past for kind in kinds), default=0)
        """Number of additional waiting requests that a step looks at, because a kind may skip its requests."""
        self.reads_shared_once = False
        """Whether decode rows that share blocks read them together: the executor reads the K and V of a shared block
        once per step. Otherwise it reads them once per row."""
        self.view: View = getattr(policy, "view", None) or View()
        """What the policy sees of this batch."""
        self.admits: Callable[[Request, View], bool] | None = getattr(policy, "admits", None)
        """The policy's own limit of the batch; None for most policies."""
        self.requests: dict[str, Request] = {}
        self.running: dict[str, Request] = {}
        self.unready: dict[str, Request] = {}
        """Request id -> request that is being prepared, and is not in the queue yet."""
        self.unready_rows: dict[str, Request] = {}
        """Request id -> running request that is not ready for its next step. It keeps its row and its blocks."""
        self.reserve: dict[str, Request] = {}
        """Request id -> short request that runs in a reserved row with reserved blocks."""
        self.paced: dict[str, float] = {}
        """Request id -> maximum seconds per token, for running requests with such a limit."""
        self.in_flight = PromptsInFlight(kv, self._wait_again)
        """The prompts that are being computed, and the requests that wait to share them."""
        self.decodes = DecodeRows(kv.block_size)
        """The running requests that compute one token in every step."""
        self.catching_up: list[Request] = []
        """Running requests with more than one token to compute."""
        self.stops: Counter[int] = Counter({FAILED_ROW: 1})
        """Stop token -> number of running requests that it ends."""
        self._begin_steps()
        for kind in self.kinds:
            kind.attach(self)

    def _begin_steps(self) -> None:
        """Initialise the fields that change from step to step."""
        self.step = 0
        """Index of the last step that had something to execute."""
        self.now = 0.0
        """Time at which the newest step was scheduled."""
        self.num_computed_tokens = 0
        """Number of computed positions, summed over all running requests."""
        self.free_slots = list(range(self.max_running - 1, -1, -1))
        self.left: list[int] = []
        """Rows from which requests were removed since the newest step was scheduled."""
        self.num_vacated = 0
        """Number of times that a request left its row."""
        self.epoch = 0
        """Counter that grows when tokens of steps in flight may have to be dropped, for example because a request left
        its row."""

    @property
    def num_waiting(self) -> int:
        """Number of requests without a row, also those that are being prepared or wait for blocks of another prompt."""
        return len(self.waiting) + len(self.unready) + len(self.in_flight)

    @property
    def unready_for(self) -> str:
        """What the first request outside the queue waits for: a grammar, the name of a kind
        (:attr:`Request.waits_for`), or ``prefix``. Empty if there is none."""
        if self.unready:
            return next(iter(self.unready.values())).waits_for or "grammar"
        return "prefix" if self.in_flight else ""

    @property
    def free_rows(self) -> int:
        """Number of additional requests that may join now."""
        return max(0, self.running_limit - len(self.running))

    @property
    def is_open(self) -> bool:
        """Whether waiting requests may join the batch now, if there is room for them."""
        return self.membership.opens(self.waiting, len(self.running), self.free_rows, self.now)

    @property
    def open_rows(self) -> int:
        """Number of additional requests that may join now without a reserved row."""
        return max(0, self.free_rows - self._unused_rows)

    @property
    def _unused_rows(self) -> int:
        return max(0, self.prompt_share.reserved_rows(self.running_limit) - len(self.reserve))

    def _unused_blocks(self) -> float:
        """Fraction of all blocks that is reserved for short requests and not used by short requests now."""
        share = self.prompt_share.reserved_blocks(self.running_limit)
        if share and self.reserve:
            pools = enumerate(zip(self.kv.pools, self.kv.layout.kinds, strict=True))
            used = [
                sum(len(short.block_ids[group]) for short in self.reserve.values()) / pool.capacity
                for group, (pool, kind) in pools
                if kind.grows
            ]
            share -= max(used, default=0.0)
        return max(0.0, share)

    def may_use_reserve(self, request: Request) -> bool:
        """Whether a waiting request is short, and a reserved row and reserved blocks are free for it."""
        if not self.free_rows or not self._unused_rows:
            return False
        if request.size > self.prompt_share.short_tokens(self.token_budget):
            return False
        pools = zip(self.kv.pools, self.kv.layout.kinds, strict=True)
        share = self._unused_blocks()
        return all(kind.num_entries(request.size) + 1 <= share * pool.capacity for pool, kind in pools if kind.grows)

    @property
    def has_prefill_work(self) -> bool:
        """Whether a prompt is being computed, or a waiting request could get a free row."""
        prompts = any(request.num_computed_tokens < request.progress_mark for request in self.computable())
        return prompts or bool(self.waiting and self.free_rows)

    def computable(self) -> list[Request]:
        """The requests of :attr:`catching_up` that are ready."""
        if not self.unready_rows:
            return list(self.catching_up)
        return [request for request in self.catching_up if request.is_ready]

    def num_prefill_tokens(self, limit: int) -> int:
        """Number of known tokens that the running requests and the first waiting requests still have to compute. The
        count stops at ``limit``."""
        total = sum(request.num_tokens - request.num_computed_tokens for request in self.computable())
        if self.free_rows and total < limit:
            for request in islice(self.waiting, self.free_rows):
                total += len(request.token_ids)
                if total >= limit:
                    break
        return min(total, limit)

    def wait(self, request: Request, now: float) -> None:
        """Add a request to the waiting queue: it has arrived, or it has lost its row. A request that is not ready is
        queued later."""
        if not request.is_ready:
            self.unready[request.request_id] = request
            return
        request.is_guaranteed = self.membership.closed or is_pinned(request, self.max_preemptions)
        if request.size == SIZE_UNKNOWN:
            request.size = len(request.token_ids) - self.kv.arrived(request)
        if not request.is_queued:
            request.is_queued = True
            self.policy.queued(request, now)
        self.waiting.add(request)

    def hold_back(self, request: Request) -> None:
        """Take a waiting request out of the queue until it is ready again, because it must be prepared again. For the
        policy it goes on waiting."""
        self.waiting.remove(request)
        request.is_ready = False
        self.unready[request.request_id] = request

    def follow(self, request: Request, out: SchedulerOutput) -> bool:
        """Take a waiting request out of the queue if a running request computes a prompt that begins alike, until it
        can share the blocks. Returns whether the request was taken out. For the policy it goes on waiting.

        A step that has taken out so many that it ``may_follow`` no more must not look at further requests.
        """
        if self.membership.closed or not self.in_flight.follow(request, out.step, self.token_budget):
            return False
        self.waiting.remove(request)
        out.held_up_by = out.held_up_by or "prefix"
        return True

    def _wait_again(self, request: Request, num_known: int) -> None:
        # It has fewer tokens to compute now.
        request.size = len(request.token_ids) - num_known if num_known else SIZE_UNKNOWN
        self.wait(request, self.now)

    def num_known(self, request: Request) -> int:
        """Number of leading positions of a request whose KV exists: a running request has computed them, and a waiting
        request would not compute them if it joined now."""
        if request.slot >= 0:
            return request.num_computed_tokens
        share = not is_pinned(request, self.max_preemptions) or self.preemption.never
        return self.kv.num_shared(request) if share or request.status is RequestStatus.SWAPPED else 0

    def refile(self, request: Request) -> None:
        """Move a waiting request to its new position in the queue, after its sort key has changed. If the rank of a
        running request has changed, compare the queue with it again."""
        if request in self.waiting:
            self.waiting.remove(request)
            self.waiting.add(request)
        else:
            self.waiting.num_changes += 1

    def shared_tokens(self, aside: Iterable[Request] = ()) -> int:
        """Number of computed positions of the running requests whose KV a step reads only for another row: the
        positions that the rows read, minus the different ones among them. The requests ``aside``, which are not in the
        step, do not count.

        The result comes from counters. It is exact if no request that shared blocks with one of ``aside`` has left
        since.
        """
        if not self.reads_shared_once:
            return 0
        tables = self.kv.tables
        num_blocks = tables.num_shares
        if num_blocks:
            num_blocks -= sum(request.num_shared_blocks for request in aside)
        return tables.num_positions(max(0, num_blocks))

    def features(self, num_rows: int) -> StepFeatures:
        """Features of a step in which ``num_rows`` rows attend to all positions that the running requests have
        computed."""
        context = self.num_computed_tokens
        return StepFeatures(num_rows, context, shared_tokens=min(context, self.shared_tokens()))

    def kind_bytes(self, chunks: Iterable[tuple[Request, Chunk]], *, with_decodes: bool) -> int:
        """Number of bytes that a step with these chunks, and perhaps all decode rows, reads because of the kinds of its
        requests."""
        if not self.kinds:
            return 0
        rows = [request for request, _ in chunks]
        decodes = self.decodes.requests if with_decodes else []
        return sum([kind.num_bytes(rows, decodes) for kind in self.kinds])

    def obstacle(self, request: Request) -> str:
        """Name of the kind that keeps a waiting request from the next step, whatever rows and blocks are free, or
        ``policy`` if the policy does; empty if nothing does. The policy is asked only while requests run, so that it
        cannot stop the engine."""
        for kind in request.kinds:
            if kind.obstacle(request):
                return kind.name
        if self.admits is not None and self.running and not self.admits(request, self.view):
            return "policy"
        return ""

    def admit(self, request: Request, out: SchedulerOutput, *, reserved: bool = False) -> bool:
        """Give a waiting request a row and blocks. Returns False, and changes nothing, if it does not fit. With
        ``reserved``, the request gets a row and blocks that are reserved for short requests."""
        if obstacle := self.obstacle(request):
            out.held_up_by = out.held_up_by or obstacle
            return False
        pinned = is_pinned(request, self.max_preemptions)
        if pinned and not self.policy.may_stay(request):
            out.held_up_by = out.held_up_by or "reservation"
            return False
        watermark = self.free_fraction(reserved) if self.running else 0.0
        share = not pinned or self.preemption.never
        if request.status is RequestStatus.SWAPPED:
            admission = self.kv.swap_in(request, request.reserve, watermark, out.step, share=share)
        else:
            admission = self.kv.admit(request, request.reserve, watermark, share=share)
        if admission is not None:
            self.seat(request, admission, out, reserved)
        return admission is not None

    def _note_sources(self, request: Request, admission: Admission, out: SchedulerOutput) -> None:
        """Note where the KV of the request's first tokens came from."""
        known = request.num_cached_tokens = admission.num_computed_tokens
        copied = Counter(group for group, _, _ in admission.swap_in)
        host = max((count * self.kv.layout.kinds[group].span for group, count in copied.items()), default=0)
        request.num_host_tokens = min(known, host)
        request.num_disk_tokens = min(known - request.num_host_tokens, request.num_disk_tokens)
        if known:
            out.num_cached_tokens += known
            out.num_host_tokens += request.num_host_tokens
            out.num_disk_tokens += request.num_disk_tokens

    def free_fraction(self, reserved: bool = False) -> float:
        """Fraction of each block pool that must stay free when a request joins a batch that has running requests."""
        return self.watermark + (0.0 if reserved else self._unused_blocks())

    def seat(self, request: Request, admission: Admission, out: SchedulerOutput, reserved: bool) -> None:
        """Give a row to a waiting request that has got its blocks."""
        self.waiting.remove(request, self.now)
        if not request.was_preempted:
            self._note_sources(request, admission, out)
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
        for kind in request.kinds:
            kind.joined(request)
        self.stops.update(request.stop_token_ids)
        if request.service.seconds_per_token < math.inf:
            self.paced[request.request_id] = request.service.seconds_per_token
        self.catching_up.append(request)
        self.in_flight.begun(request)
        request.is_queued = False
        self.policy.joined(request)
        out.copies += admission.copies
        out.swap_in += admission.swap_in
        out.joined.append(NewRow.of(request))

    def put_back(self, request: Request) -> None:
        """Undo the admission of a request for which nothing was computed yet."""
        self.vacate(request)
        request.move_to(RequestStatus.PREEMPTED if request.num_preemptions else RequestStatus.WAITING)
        self.wait(request, self.now)

    def vacate(self, request: Request) -> None:
        """Take row and blocks from a running request. The blocks become free after the last step in flight that may use
        them."""
        self.num_vacated += 1
        if request.finish_reason is not FinishReason.ERROR:
            self.kv.publish_confirmed(request)
            self.kv.fill_holes(request)
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
        self.unready_rows.pop(request.request_id, None)
        request.size = SIZE_UNKNOWN
        self.free_slots.append(request.slot)
        self.left.append(request.slot)
        request.slot = -1
        del self.running[request.request_id]
        for kind in request.kinds:
            kind.left(request)
        self.in_flight.gone(request)
        self.paced.pop(request.request_id, None)
        for token in request.stop_token_ids:
            self.stops[token] -= 1
            if not self.stops[token]:
                del self.stops[token]
        self.epoch += 1

    def remove(self, request: Request, now: float) -> None:
        """Remove a request for good, whether it waits in the queue, runs, waits for its source request, or is not
        ready."""
        if request.slot >= 0:
            self.vacate(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        elif request.request_id in self.unready:
            del self.unready[request.request_id]
        elif request.source is not None and request in request.source.siblings:
            request.source.siblings.remove(request)
        self.in_flight.remove(request)
        self.kv.drop_swapped(request)
        request.move_to(RequestStatus.FINISHED)
        del self.requests[request.request_id]
        for kind in request.kinds:
            kind.ended(request)
        self.policy.forgotten(request)
        self.release_siblings(request, now)

    def release_siblings(self, request: Request, now: float) -> None:
        """Queue the requests that wait until this request has computed their common prompt. They can share its blocks
        now, unless it has ended."""
        for sibling in request.siblings:
            self.wait(sibling, now)
        request.siblings = []
