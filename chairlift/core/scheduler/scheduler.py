"""Builds a new batch for every step (iteration-level scheduling; Orca, OSDI 2022).

A step has, in this order: the decode rows, with one token each; chunks of running requests that have more than one
token to compute (Sarathi-Serve's stall-free mix, OSDI 2024); and waiting requests, while there are tokens, rows and
blocks.

Steady decoding costs the scheduler almost nothing. All decoding requests advance with one shared clock. A timing wheel
finds the requests that need a block, or end, at a given tick. If no request joins, leaves or needs a block, scheduling
a step reads no request, and its update only appends the tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from chairlift.base.outputs import FinishReason
from chairlift.core.kv_cache.manager import KVCacheManager
from chairlift.core.kv_cache.tables import Admission
from chairlift.core.request import Request, RequestStatus
from chairlift.core.rows.kind import RowKind
from chairlift.core.scheduler.admission import WaitingQueue
from chairlift.core.scheduler.answer_lengths import AnswerLengths
from chairlift.core.scheduler.batch import Batch
from chairlift.core.scheduler.costs import Costs
from chairlift.core.scheduler.decode_rows import DecodeRows, receivers
from chairlift.core.scheduler.drafts import Drafts, Guide, Speculator
from chairlift.core.scheduler.invariants import check_batch
from chairlift.core.scheduler.membership import Membership, membership_from_name
from chairlift.core.scheduler.output import FAILED_ROW, SchedulerOutput, StepResult
from chairlift.core.scheduler.policy import FCFS, Policy
from chairlift.core.scheduler.preemption import RECOMPUTE, PreemptionMode, PreemptionRate, may_be_preempted
from chairlift.core.scheduler.preemptor import Preemptor
from chairlift.core.scheduler.prefill_mode import MIXED, PrefillMode, Turn
from chairlift.core.scheduler.prompt_budget import PromptBudget
from chairlift.core.scheduler.prompt_share import DEFAULT_POLICY_SHARE
from chairlift.core.scheduler.step import ScheduledStep
from chairlift.core.scheduler.view import View
from chairlift.errors import PromptTooLongError, RequestError

__all__ = ["Scheduler"]


class Scheduler:
    """Decides which tokens each step computes.

    Callers ``add`` and ``abort`` requests. They call ``schedule`` for a step, run the step, and call ``update`` with
    the sampled tokens. ``schedule`` may be called again before ``update`` (look-ahead), because positions advance
    already when they are scheduled. A token for a request that has left meanwhile is dropped and counted in
    ``num_late``.
    """

    def __init__(
        self,
        kv: KVCacheManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        policy: Policy = FCFS,
        prefill_mode: PrefillMode = MIXED,
        membership: Membership | None = None,
        watermark: float = 0.01,
        look_ahead: int = 8,
        max_times_passed: int = 16,
        max_preemptions: int = 8,
        drop_late: bool = False,
        preemption: PreemptionMode = RECOMPUTE,
        costs: Costs | None = None,
        answer_lengths: AnswerLengths | None = None,
        policy_share: float = DEFAULT_POLICY_SHARE,
        speculator: Speculator | None = None,
        guide: Guide | None = None,
        kinds: Sequence[RowKind] = (),
        reads_shared_once: bool = False,
    ) -> None:
        self.batch = batch = Batch(
            kv,
            policy,
            membership or membership_from_name("continuous"),
            WaitingQueue(policy, look_ahead, max_times_passed),
            # Every running request must be able to take one token in every step; otherwise some decodes could starve.
            max_running=min(max_num_seqs, max_num_batched_tokens),
            token_budget=max_num_batched_tokens,
            watermark=watermark,
            max_preemptions=max_preemptions,
            preemption=preemption,
            policy_share=policy_share,
            kinds=kinds,
        )
        batch.reads_shared_once = reads_shared_once
        self.kv = kv
        self.policy = policy
        self.membership = batch.membership
        self.requests = batch.requests
        self.running = batch.running
        self.waiting = batch.waiting
        self.decodes = batch.decodes
        self.preemptor = Preemptor(batch)
        self.prompts = PromptBudget(batch, self.preemptor, max_model_len)
        self.drafts = None if speculator is None else Drafts(batch, speculator, guide)
        """Speculative decoding; None if it is off. With drafts, a step must be updated before the next one is
        scheduled."""
        self.preemption_rate = PreemptionRate()
        self.prefill_mode = prefill_mode
        self.drop_late = drop_late
        self.costs = costs
        self.answer_lengths = answer_lengths
        batch.view.attach(batch, costs, answer_lengths)
        self._budget_of: Callable[[View], int] | None = getattr(policy, "budget", None)
        self.num_late = 0
        self.num_past_deadline = 0
        """Number of requests that were found to miss their deadline in any case."""
        self.dropped: list[Request] = []
        """Late requests that were ended. The caller of :meth:`schedule` must take them from this list."""
        self._no_decodes = DecodeRows(kv.block_size)
        self._sent_slots: tuple[int, ...] = ()
        self._flights: dict[int, ScheduledStep] = {}
        self._arrivals = 0

    def twin(self, kv: KVCacheManager, policy: Policy) -> Scheduler:
        """Return an empty scheduler with the same limits and rules, for another KV cache.

        Its division of the prompt budget starts as it was before the steps in flight. It does not swap, and its prefill
        mode is ``mixed``.
        """
        batch = self.batch
        waiting = self.waiting
        twin = Scheduler(
            kv,
            max_num_seqs=batch.max_running,
            max_num_batched_tokens=max(batch.max_running, batch.token_budget),
            max_model_len=self.prompts.max_model_len,
            policy=policy,
            membership=self.membership,
            watermark=batch.watermark,
            look_ahead=waiting.look_ahead,
            max_times_passed=waiting.max_times_passed,
            max_preemptions=batch.max_preemptions,
            drop_late=self.drop_late,
            preemption=batch.preemption if batch.preemption.never else RECOMPUTE,
            costs=self.costs,
            answer_lengths=self.answer_lengths,
            policy_share=batch.prompt_share.fraction,
            kinds=[twin for kind in batch.kinds if (twin := kind.twin()) is not None],
            reads_shared_once=batch.reads_shared_once,
        )
        twin._arrivals = self._arrivals
        twin.batch.running_limit = batch.running_limit
        twin.batch.token_budget = batch.token_budget
        oldest = next(iter(self._flights.values()), None)
        twin.batch.prompt_share.carried = batch.prompt_share.carried if oldest is None else oldest.carried
        return twin

    @property
    def step(self) -> int:
        """Index of the last step that had something to execute."""
        return self.batch.step

    @property
    def num_preemptions(self) -> int:
        return self.preemptor.num_preemptions

    @property
    def num_in_flight(self) -> int:
        """Number of steps that were scheduled and not updated yet."""
        return len(self._flights)

    def chunks_in_flight(self) -> dict[str, int]:
        """Id of each request with a chunk in the steps in flight -> first position of its first chunk there."""
        begins: dict[str, int] = {}
        for step, flight in self._flights.items():
            for request, chunk in flight.chunks:
                if request.resumed_at_step <= step:
                    begins.setdefault(request.request_id, chunk.start)
        return begins

    @property
    def has_unfinished(self) -> bool:
        return bool(self.requests)

    def next_event(self, now: float) -> float | None:
        """Time at which :meth:`schedule` next has work if no request arrives before that time; None if it will have no
        work."""
        if self._flights or len(self.running) > len(self.batch.unready_rows):
            return now
        if self.batch.in_flight.has_released:
            return now
        if not self.waiting or self.running:
            return None
        fires = self.membership.fires_at(self.waiting, self.batch.free_rows)
        droppable = self.waiting if self.drop_late else ()
        deadlines = [t for r in droppable for t in (r.service.first_token_by, r.service.finish_by)]
        # A late request is dropped by the first step after its deadline, so the returned time must be later than the
        # deadline.
        return min([fires, *(math.nextafter(t, math.inf) for t in deadlines if t >= self.batch.now)])

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises RequestError for an id that is in use, and PromptTooLongError if the request does not fit into the empty
        cache.
        """
        if request.request_id in self.requests:
            raise RequestError(f"request id {request.request_id!r} is already in use; choose another")
        if not self.kv.fits_when_empty(request.limit):
            raise PromptTooLongError(
                f"the request needs KV room for {request.limit} tokens ({request.num_prompt_tokens} of the prompt and"
                f" {request.limit - request.num_prompt_tokens} generated), but the whole cache holds"
                f" {self.kv.capacity_tokens}; shorten the prompt, lower max_tokens, or raise kv_cache_memory_bytes"
            )
        self.requests[request.request_id] = request
        if self.batch.kinds:
            request.kinds = tuple([kind for kind in self.batch.kinds if kind.has(request)])
            for kind in request.kinds:
                kind.added(request)
        if self.drafts is not None:
            self.drafts.added(request)
        self._arrivals += 1
        request.sequence = request.sequence or self._arrivals  # a copy keeps the number of its original
        source = None if self.membership.closed else request.source  # in a closed batch all answers join together
        if source is not None and not source.is_finished and source.num_computed_tokens < source.num_prompt_tokens:
            source.siblings.append(request)
        else:
            self.batch.wait(request, request.arrival_time)

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
        """Give a row to ``request``, the copy of a request (``original``) that runs in another scheduler.

        The copy gets the state before the ``num_in_flight`` steps in flight of the other scheduler. ``begins`` is the
        first position of the request's chunks in these steps; None if it has none. ``twins`` has, per cache group, a
        map from block ids of the other scheduler to block ids of this one. With ``reserved`` the row is a row reserved
        for short requests.
        """
        self.batch.now = now
        self.add(request)
        known = len(request.token_ids)
        computed = original.num_computed_tokens if begins is None else begins
        decodes = begins is None and (original.decoding or computed >= known)
        is_held = request.finish_reason is not None  # a held row computes beyond its known tokens, up to its limit
        if is_held and original.decoding:
            computed = max(known - 1, computed - num_in_flight)
        request.num_computed_tokens = computed if is_held else min(computed, known - 1)
        request.short_of_blocks = original.short_of_blocks
        self.kv.tables.adopt(request, original, twins)
        self.batch.seat(request, Admission(request.num_computed_tokens, []), SchedulerOutput(self.batch.step), reserved)
        request.num_charged_tokens = original.num_charged_tokens
        request.size = original.size
        request.progress_mark = original.progress_mark
        if is_held or decodes:
            self.batch.catching_up.remove(request)
        if decodes and not (is_held and computed >= request.limit):
            self.decodes.start([request])

    def schedule(self, now: float) -> SchedulerOutput:
        """Return the next step. If its ``num_tokens`` is 0, it must be neither executed nor updated."""
        self.batch.now = self.kv.eviction.now = now
        for request in list(self.decodes.retiring):
            self.decodes.stop(request)
        for request in self.policy.late(now):
            self._is_late(request)
        for request in self.policy.moved():
            self.batch.refile(request)
        out = SchedulerOutput(self.batch.step + 1)
        self.batch.in_flight.begin(out.step, self.batch.running_limit + self.waiting.look_ahead)
        step = ScheduledStep(out, self.batch.prompt_share.carried)
        turn = self.prefill_mode.turn(self.batch)
        if turn is not Turn.PREFILL:
            self._run_decodes(step)
        if turn is Turn.DECODE and not self.decodes.count:  # no decode row remains
            turn = Turn.MIXED
        budget = max(self.batch.token_budget, len(self.running)) - out.num_decodes
        if self.batch.paced and self.costs is not None and budget > 1:
            limit = min(self.batch.paced.values()) - self.costs.host_seconds
            begin = max([request.num_computed_tokens for request in self.batch.catching_up], default=0)
            budget = self.costs.chunk_budget(self.batch.features(out.num_decodes), limit, budget, begin=begin)
        if self._budget_of is not None and budget > 1 and (self.waiting or self.batch.catching_up):
            budget = min(budget, max(1, self._budget_of(self.batch.view)))
        for kind in self.batch.kinds:
            kind.begin(out.num_decodes)
        ahead = self.policy.preemptive and turn is not Turn.DECODE and not self.membership.closed
        if ahead and self.waiting and not out.preempted and self.batch.is_open:
            self.preemptor.admit_ahead(step, budget)
        self.prompts.run(step, budget, turn)
        if turn is Turn.PREFILL and not out.chunks:  # no request could join
            self._run_decodes(step)
        if self.drafts is not None and not self.preemptor.swap_out:
            self.drafts.add(step)
        self._seal(step)
        if not self.waiting:
            out.held_up_by = self.batch.unready_for
        elif not out.held_up_by:
            if not self.batch.open_rows:
                out.held_up_by = "slots"
            elif out.preempted:
                out.held_up_by = "blocks"
            else:
                out.held_up_by = "tokens"
        if self.preemptor.preempted_for:
            out.preempted_for = self.preemptor.preempted_for
            self.preemptor.preempted_for = {}
        return out

    def _is_late(self, request: Request) -> None:
        if request.finish_reason is not None:  # it has ended in time, and only waits for its static batch
            return
        self.num_past_deadline += 1
        if self.drop_late:
            self.dropped += self._end(request, FinishReason.DEADLINE, None, self.batch.now)
        else:
            self.batch.refile(request)

    def _run_decodes(self, step: ScheduledStep) -> None:
        stalled = [request for request in self.decodes.due() if not self._prepare_next_position(request, step)]
        # A stalled request that has also lost blocks is in ``catching_up`` already.
        self.batch.catching_up[:0] = [r for r in stalled if r.slot >= 0 and r not in self.batch.catching_up]
        if stalled:
            step.out.stalled = tuple([request.request_id for request in stalled])
        if self.decodes.stale:
            self.decodes.rebuild()
        if self.decodes.requests:
            self.decodes.tick()
            self.batch.num_computed_tokens += len(self.decodes.requests)
        step.out.num_decodes = len(self.decodes.requests)
        step.runs_decodes = True

    def _prepare_next_position(self, request: Request, step: ScheduledStep) -> bool:
        """Get a block for a decoding request that needs one, and note if its last token comes next. Returns False if it
        has to wait for a block."""
        if not request.decoding:  # this step has just preempted it for another request
            return True
        request.due_at = -1
        position = request.num_computed_tokens
        if position % self.kv.block_size == 0:
            self.kv.publish_confirmed(request)
            if not self.preemptor.make_room(request, position + 1, step):
                if request.decoding:
                    self.decodes.stop(request)
                return False
        if position == request.max_total_tokens - 2:
            step.finals.append(request)
        if position == request.limit - 1:
            self.decodes.retiring.append(request)
        else:
            self.decodes.watch(request, position + 1, 1)
        return True

    def _seal(self, step: ScheduledStep) -> None:
        """Complete the description of the step. Requests whose chunk ends with their last known token decode from the
        next step on."""
        out = step.out
        if self.decodes.stale:
            self.decodes.rebuild()
        decodes = self.decodes if step.runs_decodes else self._no_decodes
        out.num_decodes = len(decodes.requests)
        out.num_tokens = out.num_decodes + sum(chunk.num_tokens for chunk in out.chunks)
        if not out.num_tokens:
            for row in out.joined:  # this step is not executed, so the executor does not know these rows
                self.batch.put_back(self.running[row.request_id])
            if not self._flights and not self.membership.held and not self.batch.unready_rows:
                self.preemptor.break_stall()
            return
        self.batch.step = out.step
        out.left = self.batch.left
        self.batch.left = []
        if self.drafts is not None:
            out.new_blocks += self.drafts.take_restored()
        out.swap_out = self.preemptor.swap_out + self.kv.scheduled(out.step)
        self.preemptor.swap_out = []
        if decodes.slots is not self._sent_slots:
            out.decode_slots = self._sent_slots = decodes.slots
        out.decode_rows = decodes.ids
        out.num_held = decodes.num_held
        step.sampled = decodes.sampled
        step.appends = decodes.appends
        step.epoch = self.batch.epoch
        self._describe(step)
        samples: list[Request | None] = []
        for request, chunk in step.chunks:
            if chunk.samples:
                taker = None if chunk.drafts else request  # the number of accepted drafts is not known yet
                samples += [*[None] * (chunk.samples - 1), taker]  # tokens of earlier sample positions are dropped
        if samples:
            sampled, appends = receivers(samples)
            step.sampled = decodes.sampled + sampled
            step.appends = decodes.appends + appends
            self.decodes.start([r for r in samples if r is not None and r.num_computed_tokens < r.limit])
        self._flights[out.step] = step

    def _describe(self, step: ScheduledStep) -> None:
        out = step.out
        out.chunk_ids = [request.request_id for request, _ in step.chunks]
        out.kind_bytes = self.batch.kind_bytes(step.chunks, with_decodes=out.num_decodes > 0)
        if out.num_decodes:
            aside = self.batch.catching_up + [r for r, chunk in step.chunks if chunk.samples and not chunk.drafts]
            for number, older in self._flights.items():
                # These rows have computed all positions, and wait for their last token.
                aside += [r for r in older.finals if r.slot >= 0 and r.resumed_at_step <= number and not r.decoding]
            out.context_tokens = self.batch.num_computed_tokens - sum([r.num_computed_tokens for r in aside])
            out.shared_tokens = min(out.context_tokens, self.batch.shared_tokens(aside))
        out.num_waiting = self.batch.num_waiting
        out.blocks = self.kv.counts()
        num_groups = sum(kind.stores_positions for kind in self.kv.layout.kinds)
        out.unused_slots = self.kv.tables.held_blocks * self.kv.block_size - self.batch.num_computed_tokens * num_groups
        longest = max((chunk.num_tokens for chunk in out.chunks), default=1)
        out.padding_avoided = longest * (out.num_decodes + len(out.chunks)) - out.num_tokens

    def update(self, out: SchedulerOutput, tokens: Sequence[int], now: float) -> StepResult:
        """Store the tokens that step ``out`` sampled. Steps must be updated in the order in which they were
        scheduled."""
        flight = self._flights.pop(out.step)
        self.kv.step_done(out.step)
        sampled = flight.sampled
        if flight.epoch == self.batch.epoch:
            for append, token in zip(flight.appends, tokens, strict=True):
                append(token)
        else:
            sampled = self._accept_some(flight, tokens)
        finished: list[Request] = []
        stopped = not self.batch.stops.keys().isdisjoint(tokens)  # FAILED_ROW is one of the stops
        if stopped and FAILED_ROW in tokens:
            for request, token, taker in zip(flight.computed or flight.sampled, tokens, sampled, strict=True):
                if token == FAILED_ROW and request is not None and taker is None:  # preempted since, or withdrawn
                    finished += self.fail_row(request.request_id, out.step, now)
        if flight.verifies and self.drafts is not None:
            sampled = self.drafts.accept(flight, tokens, sampled)
        hits: list[tuple[Request, int]] = []
        if stopped:
            hits = [(r, t) for r, t in zip(sampled, tokens, strict=True) if r is not None and t in self.batch.stops]
        for request, token in hits:
            if token == FAILED_ROW:
                request.token_ids.pop()
                self.kv.forget(request)
                finished += self._end(request, FinishReason.ERROR, None, now)
        for request, chunk in flight.chunks:
            if request.slot >= 0 and request.resumed_at_step <= out.step:
                # A chunk with drafts ends after the drafts, but rejected drafts do not count as computed. A held row of
                # a static batch computes beyond its known tokens.
                end = chunk.end
                if chunk.drafts or request in flight.withdrawn:
                    end = request.num_computed_tokens
                self.kv.publish(request, min(end, len(request.token_ids)))
                self.batch.in_flight.published(request)
                if chunk.end >= request.num_prompt_tokens:
                    self.batch.release_siblings(request, now)
        for request, token in hits:
            if token in request.stop_token_ids and request.finish_reason is None:
                finished += self._end(request, FinishReason.STOP, token, now)
        for request in flight.finals:
            if request.slot >= 0 and request.resumed_at_step <= out.step and request.finish_reason is None:
                finished += self._end(request, FinishReason.LENGTH, None, now)
        if flight.verifies and self.drafts is not None:
            self.drafts.rejoin(flight)
        return StepResult(sampled, finished)

    def fail_step(self, out: SchedulerOutput, now: float) -> StepResult:
        """Handle a step that failed: every request in it ends with an error, and its KV is not shared."""
        flight = self._flights.pop(out.step)
        self.kv.step_done(out.step)
        rows = [*(r for r in flight.sampled if r is not None), *(request for request, _ in flight.chunks)]
        finished: list[Request] = []
        if self.drafts is not None:
            self.drafts.failed(flight)
        self.kv.copies_lost(out.step)
        for request_id in self.kv.swapped_since(out.step):
            self._lose_saved(self.requests[request_id])
        for request in rows:  # also requests that lost their last blocks: this step computed their other blocks
            if request.slot >= 0 and request.admitted_at_step <= out.step and request.finish_reason is None:
                self.kv.forget(request)
                finished += self._end(request, FinishReason.ERROR, None, now)
        for request in [each for each in self.running.values() if each.admitted_at_step == out.step]:
            self.batch.put_back(request)  # it computed no token in this step, but its first blocks were not copied
        return StepResult([], finished)

    def fail_row(self, request_id: str, step: int, now: float) -> list[Request]:
        """Handle a step that failed for one request only. Returns the requests that end with an error.

        The request ends if it still has the blocks that the step should have filled. If it was preempted since, it has
        lost these blocks; only KV that was saved from them must be dropped.
        """
        request = self.requests.get(request_id)
        if request is None or request.finish_reason is not None:
            return []
        if request.slot >= 0 and request.admitted_at_step <= step:
            self.kv.forget(request)
            return self._end(request, FinishReason.ERROR, None, now)
        if request_id in self.kv.swapped_since(step):
            self._lose_saved(request)
        return []

    def _lose_saved(self, request: Request) -> None:
        """Drop the KV of a swapped request. It is computed again."""
        self.kv.drop_swapped(request)
        request.move_to(RequestStatus.PREEMPTED)

    def _accept_some(self, flight: ScheduledStep, tokens: Sequence[int]) -> list[Request | None]:
        """Append the sampled tokens to their requests, and drop the tokens of requests that left while the step was in
        flight."""
        accepted: list[Request | None] = []
        for request, token in zip(flight.sampled, tokens, strict=True):
            if request is None or request.finish_reason is not None or request.slot < 0:
                self.num_late += request is not None
                accepted.append(None)
            elif request.resumed_at_step > flight.out.step:
                self.num_late += 1
                accepted.append(None)
            else:
                request.token_ids.append(token)
                accepted.append(request)
        return accepted

    def finish(
        self, request_id: str, reason: FinishReason, stop_reason: int | str | None = None, now: float = 0.0
    ) -> list[Request]:
        """End a request for a reason that the scheduler cannot see: its caller left, a stop string was found, or an
        error occurred.

        Returns the requests that have left. The list is empty if the id is unknown, if the request has ended already,
        or if it belongs to a static batch that still runs. It has several requests if a static batch ends with this
        request.
        """
        request = self.requests.get(request_id)
        if request is None or (request.finish_reason is not None and reason is not FinishReason.ABORT):
            return []
        return self._end(request, reason, stop_reason, now)

    def unready(self, request: Request) -> None:
        """Let no further step compute a running request until :meth:`ready` is called. It keeps its row; the step in
        flight that computes it goes on. Does nothing if no step would compute it."""
        if request.slot < 0 or request.finish_reason is not None or request.num_computed_tokens >= request.limit:
            return
        if request.decoding:
            self.decodes.stop(request)
        if request not in self.batch.catching_up:
            self.batch.catching_up.append(request)
        request.is_ready = False
        self.batch.unready_rows[request.request_id] = request
        self.batch.in_flight.gone(request)

    def withdraw(self, out: SchedulerOutput, requests: Sequence[Request]) -> None:
        """Drop the tokens that step ``out`` samples for these requests, and let no further step compute them until
        :meth:`ready` is called. Then their newest known token is computed again.

        The step must be the newest one. A recurrent state cannot go back, so this needs a cache of keys and values.
        """
        flight = self._flights[out.step]
        for request in requests:
            if request.slot < 0 or request.finish_reason is not None:
                continue
            flight.withdrawn.append(request)
            flight.finals = [other for other in flight.finals if other is not request]
            if request.decoding:
                self.decodes.stop(request)
            request.num_computed_tokens -= 1
            self.batch.num_computed_tokens -= 1
            self.unready(request)
        computed = list(flight.sampled)
        position = len(flight.sampled) - sum(c.samples for _, c in flight.verifies)
        for request, chunk in flight.verifies:
            computed[position] = request if request in flight.withdrawn else None
            position += chunk.samples
        flight.computed = computed
        kept = [None if request in flight.withdrawn else request for request in flight.sampled]
        flight.sampled, flight.appends = receivers(kept)

    def ready(self, request: Request, now: float) -> None:
        """Queue a request that has become ready (see :attr:`Request.is_ready`), or let steps compute it again if it has
        a row. Does nothing if it has left."""
        request.is_ready = True
        self.batch.unready_rows.pop(request.request_id, None)
        if self.batch.unready.pop(request.request_id, None) is not None:
            self.batch.wait(request, now)

    def abort(self, request_id: str, now: float = 0.0) -> list[Request]:
        """End a request in any state, at once. Does nothing if the id is unknown or the request has ended."""
        return self.finish(request_id, FinishReason.ABORT, None, now)

    def _end(self, request: Request, reason: FinishReason, stop_reason: int | str | None, now: float) -> list[Request]:
        """Finish a request. In a static batch its row stays until all rows have finished. Returns the requests that
        leave now."""
        if request.finish_reason is None:
            request.finish_reason = reason
            request.stop_reason = stop_reason
        is_static = self.membership.held
        leaving = [request]
        if is_static and request.slot >= 0 and reason in (FinishReason.STOP, FinishReason.LENGTH):
            self.batch.epoch += 1
            self.decodes.stale = True
            leaving = []
        if is_static and all(mate.finish_reason is not None for mate in self.running.values()):
            leaving += [mate for mate in self.running.values() if mate not in leaving]
        for leaver in leaving:
            self.batch.remove(leaver, now)
            if self.drafts is not None:
                self.drafts.left(leaver)
            self.preemption_rate.finished(leaver, now)
        return leaving

    def preempt(self, request_id: str) -> bool:
        """Preempt a request by recompute between two steps, as if there were too few blocks. Returns False if it may
        not be preempted."""
        request = self.running.get(request_id)
        if request is None or self.membership.held:
            return False
        if not may_be_preempted(request, self.batch.max_preemptions, self.batch.step + 1):
            return False
        self.preemptor.preempt(request, None)
        return True

    def forget_kv(self, *, recompute: bool) -> None:
        """Stop sharing the KV computed so far. With ``recompute``, running requests compute their KV again.

        No step may be in flight. KV in host memory is always computed again.
        """
        self.kv.forget_all(self.running.values())
        self.batch.in_flight.clear()
        for request in [self.requests[request_id] for request_id in self.kv.swapped]:
            self.kv.drop_swapped(request)
            request.move_to(RequestStatus.PREEMPTED)
        for request in list(self.running.values()) if recompute else ():
            self.preemptor.preempted_for.setdefault(request.request_id, "")
            request.num_ever_computed = max(request.num_ever_computed, request.num_computed_tokens)
            self.batch.vacate(request)  # not counted as a preemption: no request took its row
            request.move_to(RequestStatus.PREEMPTED)
            self.batch.wait(request, self.batch.now)

    def check_invariants(self) -> None:
        """Raise InvariantError unless every request is in exactly one state and all counters are right."""
        check_batch(self.batch)
