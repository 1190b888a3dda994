"""The loop that rebuilds the batch at every step (iteration-level scheduling; Orca, OSDI 2022).

A step takes, in this order: the decode rows, one token each; chunks of running requests that have more than one token
to compute (Sarathi-Serve's stall-free mix, OSDI 2024); and waiting requests, as long as budget, rows and blocks last.

Steady decode costs the brain next to nothing. All decoding requests advance with one shared beat; a timing wheel names
those that need a block, or end, at a given beat. A step in which nobody joins, leaves or needs a block touches no
request at all, and its update only appends the tokens.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

from chairlift.kv_cache.manager import KVCacheManager
from chairlift.outputs import FinishReason
from chairlift.request import Request, RequestStatus
from chairlift.scheduler.admission import WaitingQueue
from chairlift.scheduler.costs import Costs
from chairlift.scheduler.decode_rows import DecodeRows, receivers
from chairlift.scheduler.giving_way import GivingWay
from chairlift.scheduler.invariants import check_scheduler
from chairlift.scheduler.membership import Membership, membership_from_name
from chairlift.scheduler.output import FAILED_ROW, Chunk, SchedulerOutput, StepResult
from chairlift.scheduler.policy import FCFS, Policy
from chairlift.scheduler.population import InFlight
from chairlift.scheduler.preemption import RECOMPUTE, PreemptionMode
from chairlift.scheduler.prefill_mode import MIXED, PrefillMode, Turn
from chairlift.scheduler.prompt_share import DEFAULT_POLICY_SHARE

__all__ = ["Scheduler"]

_ASK_AGAIN_STEPS = 4
"""While nobody comes or goes, time alone changes who outranks whom: a full batch is asked again this seldom."""


class Scheduler(GivingWay):
    """``add`` and ``abort`` requests; ``schedule`` a step, run it, and ``update`` with the tokens it sampled.

    ``schedule`` may be called again before ``update`` (look-ahead): positions advance when they are scheduled, and a
    result that arrives for a request that has left meanwhile is dropped and counted in ``num_late``.
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
        policy_share: float = DEFAULT_POLICY_SHARE,
    ) -> None:
        self._settings: dict[str, Any] = {
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens,
            "max_model_len": max_model_len,
            "membership": membership,
            "look_ahead": look_ahead,
            "max_times_passed": max_times_passed,
            "max_preemptions": max_preemptions,
            "drop_late": drop_late,
            "costs": costs,
            "policy_share": policy_share,
        }
        super().__init__(
            kv,
            policy,
            membership or membership_from_name("continuous"),
            WaitingQueue(policy, look_ahead, max_times_passed),
            # Every running request must be able to take one token in every step, or decodes could starve each other.
            max_running=min(max_num_seqs, max_num_batched_tokens),
            max_num_batched_tokens=max_num_batched_tokens,
            watermark=watermark,
            max_preemptions=max_preemptions,
            preemption=preemption,
            policy_share=policy_share,
        )
        self.max_model_len = max_model_len
        self.prefill_mode = prefill_mode
        self.drop_late = drop_late
        self.costs = costs
        self.num_late = 0
        self.num_past_deadline = 0
        """Requests that could not keep their deadline any more."""
        self.dropped: list[Request] = []
        """Those among them that were ended for it; whoever runs the steps takes them from here."""
        self._no_decodes = DecodeRows(kv.block_size)
        self._sent_slots: tuple[int, ...] = ()
        self._flights: dict[int, InFlight] = {}
        self._asked_at = 0
        """Step in which the waiting were last compared with a full batch."""

    def twin(self, kv: KVCacheManager, policy: Policy) -> Scheduler:
        """An empty scheduler over another memory, with the settings that this one had before the steps in flight. It
        swaps nothing, and prefills as ``mixed`` does."""
        preemption = self.preemption if self.preemption.never else RECOMPUTE
        twin = Scheduler(kv, policy=policy, watermark=self.watermark, preemption=preemption, **self._settings)
        twin._arrivals = self._arrivals
        twin.running_limit, twin.token_budget = self.running_limit, self.token_budget
        oldest = next(iter(self._flights.values()), None)
        twin.prompt_share.carried = self.prompt_share.carried if oldest is None else oldest.carried
        return twin

    @property
    def num_in_flight(self) -> int:
        """Steps that were scheduled and not yet updated."""
        return len(self._flights)

    def chunks_in_flight(self) -> dict[str, int]:
        """Where the steps in flight began with the chunks of each request that has some in them."""
        begins: dict[str, int] = {}
        for step, flight in self._flights.items():
            for request, chunk in flight.chunks:
                if request.resumed_at_step <= step:
                    begins.setdefault(request.request_id, chunk.start)
        return begins

    # -- schedule ------------------------------------------------------------------------------------------------

    def next_event(self, now: float) -> float | None:
        """When :meth:`schedule` has something to do again if nobody comes or goes; None if only then."""
        if self.running or self._flights:
            return now
        if not self.waiting:
            return None
        fires, told = self.membership.fires_at(self.waiting, self.free_rows), self.waiting if self.drop_late else ()
        dues = [due for r in told for due in (r.service.first_token_by, r.service.finish_by) if due >= self.now]
        # Just past a deadline, also one that passed since the policy was last asked, it is asked who is late.
        return min([fires, *(math.nextafter(due, math.inf) for due in dues)])

    def schedule(self, now: float) -> SchedulerOutput:
        """The next step. An output with ``num_tokens == 0`` must not be executed or updated."""
        self.now = now
        for request in list(self.decodes.retiring):
            self.decodes.stop(request)
        for request in self.policy.late(now):
            self._is_late(request)
        for request in self.policy.moved():
            self._file_anew(request)
        out = SchedulerOutput(self.step + 1)
        flight = InFlight(carried=self.prompt_share.carried)
        turn = self.prefill_mode.turn(self)
        if turn is not Turn.PREFILL:
            self._run_decodes(out, flight)
        if turn is Turn.DECODE and not self.decodes.count:  # all of them had to give way
            turn = Turn.MIXED
        budget = max(self.token_budget, len(self.running)) - out.num_decodes
        if self.paced and self.costs is not None and budget > 1:
            limit = min(self.paced.values()) - self.costs.host_seconds
            budget = self.costs.chunk_budget(out.num_decodes, self.num_computed_tokens, limit, budget)
        ahead = self.policy.preemptive and turn is not Turn.DECODE and not self.membership.closed
        if ahead and self.waiting and not out.preempted:
            self._admit_ahead(out, flight, budget)
        self._run_prompts(out, flight, budget, turn)
        if turn is Turn.PREFILL and not out.chunks:  # nobody could be let in
            self._run_decodes(out, flight)
        self._seal(out, flight)
        if not self.waiting:
            out.held_up_by = ""
        elif not out.held_up_by:
            out.held_up_by = "slots" if not self.open_rows else "blocks" if out.preempted else "tokens"
        if self._preempted_for:
            out.preempted_for, self._preempted_for = self._preempted_for, {}
        return out

    def _is_late(self, request: Request) -> None:
        if request.finish_reason is not None:  # it made it, and only waits for its static batch
            return
        self.num_past_deadline += 1
        if self.drop_late:
            self.dropped += self._end(request, FinishReason.DEADLINE, None, self.now)
        else:
            self._file_anew(request)

    def _file_anew(self, request: Request) -> None:
        """Its place in the line has changed."""
        if request in self.waiting:
            self.waiting.remove(request)
            self.waiting.add(request)

    def _run_decodes(self, out: SchedulerOutput, flight: InFlight) -> None:
        stalled = [request for request in self.decodes.due() if not self._attend(request, out, flight)]
        # One that has also given blocks away since is among them already.
        self._catching_up[:0] = [r for r in stalled if r.slot >= 0 and r not in self._catching_up]
        if stalled:
            out.stalled = tuple([request.request_id for request in stalled])
        if self.decodes.stale:
            self.decodes.rebuild()
        if self.decodes.requests:
            self.decodes.tick()
            self.num_computed_tokens += len(self.decodes.requests)
        out.num_decodes = len(self.decodes.requests)
        flight.runs_decodes = True

    def _attend(self, request: Request, out: SchedulerOutput, flight: InFlight) -> bool:
        """A decoding request whose next position opens a block, or is its last. False when it has to wait."""
        if not request.decoding:  # preempted a moment ago, for another request of this beat
            return True
        request.due_at = -1
        position = request.num_computed_tokens
        if position % self.kv.block_size == 0:
            self._publish_confirmed(request)
            if not self._make_room(request, position + 1, out, flight):
                if request.decoding:
                    self.decodes.stop(request)
                return False
        if position == request.max_total_tokens - 2:
            flight.finals.append(request)
        if position == request.limit - 1:
            self.decodes.retiring.append(request)
        else:
            self.decodes.watch(request, position + 1, 1)
        return True

    def _run_prompts(self, out: SchedulerOutput, flight: InFlight, budget: int, turn: Turn) -> None:
        """Hand out the prompt budget: a fraction in policy order, whether a request runs or waits, then the rest to the
        smallest requests. What one side cannot use passes to the other."""
        rows, rest = list(self._catching_up), 0
        if turn is Turn.DECODE:  # only for those that stalled
            self._run_chunks(out, flight, budget, [r for r in rows if r.num_computed_tokens >= r.progress_mark])
            return
        younger: list[Request] = []
        if self.prompt_share.by_size and budget > 0 and (rows or self.waiting):
            part = self.prompt_share.split(budget, self.policy.reserved_tokens(self._needs(rows)))
            rest, budget = budget - part, part
            rows, younger = self._split_at_the_line(rows)
        kept = min(budget, self.policy.reserved_tokens(self._needs(younger))) if younger else 0
        budget = self._run_chunks(out, flight, budget - kept, rows) + kept
        for row in younger:
            budget = self._admit(out, flight, budget, row)
            budget = self._run_chunks(out, flight, budget, [row])
        budget = self._admit(out, flight, budget)
        if rest:
            budget = self._run_smallest(out, flight, budget + rest)
            if budget and self.waiting:
                if out.held_up_by == "tokens":
                    out.held_up_by = ""
                self._admit(out, flight, budget)
        if not out.chunks:
            self.prompt_share.carried = flight.carried

    def _split_at_the_line(self, rows: list[Request]) -> tuple[list[Request], list[Request]]:
        """Those before the first in line, and those behind it, who joined for their size, in policy order."""
        head = next(self.waiting.line(self.now)) if self.waiting and rows else None
        if head is None:
            return rows, []
        order, place = self.policy.order, self.policy.order(head)
        younger = [r for r in rows if r.num_computed_tokens < r.progress_mark and order(r) > place]
        if not younger:
            return rows, []
        return [r for r in rows if r not in younger], sorted(younger, key=order)

    @staticmethod
    def _needs(rows: Iterable[Request]) -> list[tuple[Request, int]]:
        return [(request, request.num_tokens - request.num_computed_tokens) for request in rows]

    def _run_smallest(self, out: SchedulerOutput, flight: InFlight, budget: int) -> int:
        """Hand out the rest of the budget to the smallest requests, of those that run and those that may join. Returns
        what is left."""
        size_order = self.waiting.size_order
        begun = {request.request_id for request, _ in flight.chunks}
        rows = deque(sorted(self._catching_up, key=lambda r: (r.num_computed_tokens < r.progress_mark, size_order(r))))
        newcomer = self._smallest_newcomer(out, flight)
        while budget > 0 and (rows or newcomer):
            if newcomer and not (rows and size_order(rows[0]) < size_order(newcomer)):
                request, newcomer = newcomer, None
                if not self._lets_in(request, out, flight):
                    continue
                newcomer = self._smallest_newcomer(out, flight)
            else:
                request = rows.popleft()
                if request.slot < 0:  # preempted a moment ago
                    continue
            num_tokens = min(request.num_tokens - request.num_computed_tokens, budget)
            had = self._take_back_chunk(request, out, flight) if request.request_id in begun else 0
            if num_tokens > 0 and self._make_room(request, self._upto(request, had + num_tokens), out, flight):
                budget -= num_tokens
                had += num_tokens
            if had:
                self._take_chunk(request, had, out, flight)
        return budget

    def _smallest_newcomer(self, out: SchedulerOutput, flight: InFlight) -> Request | None:
        """The smallest waiting request that may have a row, of those that stand as high as the first in line."""
        if out.preempted or not self.waiting or not self.free_rows:
            return None
        may_pass = self._may_pass(flight)
        for request in self.waiting.smallest(self.now):
            if request not in flight.passed and ((self.open_rows and may_pass) or self.may_use_reserve(request)):
                return request
        return None

    def _may_pass(self, flight: InFlight) -> bool:
        """Whether requests may join before the first in line, and before those that did not fit in this step."""
        head = next(self.waiting.line(self.now))
        if head.times_passed >= self.waiting.max_times_passed:
            return False
        return not flight.passed or self.waiting.may_pass(flight.passed)

    def _lets_in(self, request: Request, out: SchedulerOutput, flight: InFlight) -> bool:
        """Give the smallest newcomer a row and blocks: open ones, else those of the reserve, which nobody before it
        could have. Nobody, when this step has preempted a request since the newcomer was chosen."""
        if out.preempted:
            return False
        if self.open_rows and self._may_pass(flight) and self._try_admit(request, out):
            for other in flight.passed:
                other.times_passed += 1
            return True
        return self.may_use_reserve(request) and self._try_admit(request, out, reserved=True)

    @staticmethod
    def _upto(request: Request, num_tokens: int) -> int:
        """Positions that need blocks before the next ``num_tokens`` of the request are computed: one that gave blocks
        away resumes with all it will need, as if it joined anew."""
        return request.num_tokens if request.short_of_blocks else request.num_computed_tokens + num_tokens

    def _run_chunks(self, out: SchedulerOutput, flight: InFlight, budget: int, rows: list[Request]) -> int:
        """Divide the budget between running requests that have more than one token to compute. Returns what is left."""
        rows, short = [r for r in rows if r.slot >= 0], True
        while rows and budget > 0 and short:
            short, needs = False, self._needs(rows)
            for request, num_tokens in list(self.policy.share(needs, budget)):
                num_tokens = min(num_tokens, budget)
                if num_tokens <= 0 or request.slot < 0:  # preempted a moment ago, for the one before it
                    continue
                rows.remove(request)
                if self._make_room(request, self._upto(request, num_tokens), out, flight):
                    budget -= num_tokens
                    self._take_chunk(request, num_tokens, out, flight)
                else:  # its share is for who got nothing: only that may bring blocks back
                    short = True
            rows = [r for r in rows if r.slot >= 0]
        return budget

    def _admit_ahead(self, out: SchedulerOutput, flight: InFlight, budget: int) -> None:
        """Let in, before the budget is spent, those who may take from running work what they need."""
        crowd = (self.waiting.num_changes, self._num_vacated)
        if not self.free_rows and crowd == self._turned_away and out.step < self._asked_at + _ASK_AGAIN_STEPS:
            return
        self._turned_away, self._asked_at = crowd, out.step
        self.policy.observe(self.running.values(), self.now)
        while self.waiting:
            head = next(self.waiting.line(self.now))
            if self._takes_its_place(head, out, flight, budget):
                continue
            # Who is first for its age can take nobody's row, and must not stand in the way of those who can.
            other = head if self.free_rows else self.waiting.first_but_for_age(self.now)
            if other is head or not self._takes_its_place(other, out, flight, budget):
                return

    def _takes_its_place(self, head: Request, out: SchedulerOutput, flight: InFlight, budget: int) -> bool:
        ahead = [r for r in self._catching_up if not self.policy.outranks(head, r, "tokens", self.now)]
        if sum(request.num_tokens - request.num_computed_tokens for request in ahead) >= budget:
            self._turned_away = None
            return False
        let_in = self.open_rows > 0 and self._try_admit(head, out)
        return let_in or (self._displace(head, out, flight) and self._try_admit(head, out))

    def _admit(self, out: SchedulerOutput, flight: InFlight, budget: int, before: Request | None = None) -> int:
        """Let waiting requests in, in policy order and those ``before`` a running one, while budget, rows and blocks
        last. Returns the budget left."""
        waiting = self.waiting
        if not waiting or out.preempted:  # what was taken is not given to another
            return budget
        if flight.passed and not waiting.may_pass(flight.passed):
            return budget
        places = self.membership.places(waiting, len(self.running), self.open_rows, self.now)
        if not places or budget < self.membership.needs_budget():
            out.held_up_by = out.held_up_by or self.membership.lacks(places)
            return budget
        closed = self.membership.closed
        batch: Iterable[Request] = islice(waiting.line(self.now), places + (0 if closed else waiting.look_ahead))
        if closed:  # those who may join, and nobody else: how long each row computes is decided for them together
            batch = list(batch)
            self.membership.prepare(batch, min(self.max_model_len - 1, self.kv.capacity_tokens))
        passed = flight.passed
        for request in batch:
            if before is not None and self.policy.order(request) > self.policy.order(before):
                break
            if request in passed:
                continue
            if not places or budget < self.membership.needs_budget():
                out.held_up_by = out.held_up_by or self.membership.lacks(places)
                break
            if not self._try_admit(request, out):
                out.held_up_by = out.held_up_by or "blocks"
                passed.append(request)
                if not waiting.may_pass(passed):
                    break
                continue
            places -= 1
            for other in passed:
                other.times_passed += 1
            num_tokens = min(request.num_tokens - request.num_computed_tokens, budget)
            if num_tokens:
                budget -= num_tokens
                self._take_chunk(request, num_tokens, out, flight)
        return budget

    def _take_chunk(self, request: Request, num_tokens: int, out: SchedulerOutput, flight: InFlight) -> None:
        start = request.num_computed_tokens
        end = start + num_tokens
        samples = min(request.num_sample_positions, num_tokens) if end == request.num_tokens else 0
        why = "stalled" if start >= request.progress_mark else "recompute" if request.has_given_way else "prefill"
        chunk = Chunk(request.slot, start, num_tokens, samples, why)
        out.chunks.append(chunk)
        flight.chunks.append((request, chunk))
        request.num_computed_tokens = end
        request.short_of_blocks = False
        out.num_recomputed += max(0, min(end, request.num_ever_computed) - start)
        self.num_computed_tokens += num_tokens
        if samples:
            self._catching_up.remove(request)
            if end == request.max_total_tokens - 1:
                flight.finals.append(request)

    def _take_back_chunk(self, request: Request, out: SchedulerOutput, flight: InFlight) -> int:
        """Undo the chunk that a request has in this step, if it still has it, to give it a longer one: a row has one
        chunk, and blocks behind its window stay while that is computed. Returns its tokens."""
        index = next((i for i, (other, _) in enumerate(flight.chunks) if other is request), None)
        if index is None:
            return 0
        del flight.chunks[index]
        chunk = out.chunks.pop(index)
        request.num_computed_tokens = chunk.start
        self.num_computed_tokens -= chunk.num_tokens
        out.num_recomputed -= max(0, min(chunk.end, request.num_ever_computed) - chunk.start)
        return chunk.num_tokens

    def _seal(self, out: SchedulerOutput, flight: InFlight) -> None:
        """Freeze the step's rows, and let those whose chunk ends here join the beat for the next one."""
        if self.decodes.stale:
            self.decodes.rebuild()
        decodes = self.decodes if flight.runs_decodes else self._no_decodes
        out.num_decodes = len(decodes.requests)
        out.num_tokens = out.num_decodes + sum(chunk.num_tokens for chunk in out.chunks)
        if not out.num_tokens:
            for row in out.joined:  # this step is not executed, so the executor will not hear of it
                self._put_back(self.running[row.request_id])
            if not self._flights and not self.membership.held:
                self._break_stall()
            return
        self.step = out.step
        out.left, self._left = self._left, []
        out.swap_out, self._swap_out = self._swap_out + self.kv.scheduled(out.step), []
        if decodes.slots is not self._sent_slots:
            out.decode_slots = self._sent_slots = decodes.slots
        out.decode_rows, out.num_held = decodes.ids, decodes.num_held
        flight.sampled, flight.appends, flight.epoch = decodes.sampled, decodes.appends, self._epoch
        self._describe(out, flight)
        samples: list[Request | None] = []
        for request, chunk in flight.chunks:
            if chunk.samples:
                samples += [*[None] * (chunk.samples - 1), request]  # nobody takes the tokens of the others
        if samples:
            sampled, appends = receivers(samples)
            flight.sampled, flight.appends = decodes.sampled + sampled, decodes.appends + appends
            self.decodes.start([r for r in samples if r is not None and r.num_computed_tokens < r.limit])
        self._flights[out.step] = flight

    def _describe(self, out: SchedulerOutput, flight: InFlight) -> None:
        out.chunk_ids = [request.request_id for request, _ in flight.chunks]
        if out.num_decodes:
            prompts = sum(request.num_computed_tokens for request in self._catching_up)
            prompts += sum(chunk.end for chunk in out.chunks if chunk.samples)
            for step, older in self._flights.items():  # rows that only wait for their last token
                last = [r for r in older.finals if r.slot >= 0 and r.resumed_at_step <= step and not r.decoding]
                prompts += sum(request.num_computed_tokens for request in last)
            out.context_tokens = self.num_computed_tokens - prompts
        out.num_waiting = len(self.waiting)
        out.blocks = self.kv.counts()
        out.unused_slots = self.kv.held_blocks * self.kv.block_size - self.num_computed_tokens * len(self.kv.groups)
        longest = max((chunk.num_tokens for chunk in out.chunks), default=1)
        out.padding_avoided = longest * (out.num_decodes + len(out.chunks)) - out.num_tokens

    # -- update --------------------------------------------------------------------------------------------------

    def update(self, out: SchedulerOutput, tokens: Sequence[int], now: float) -> StepResult:
        """Take the tokens that step ``out`` sampled; steps are updated in the order in which they were scheduled."""
        flight = self._flights.pop(out.step)
        self.kv.step_done(out.step)
        sampled = flight.sampled
        if flight.epoch == self._epoch:
            for append, token in zip(flight.appends, tokens, strict=True):
                append(token)
        else:
            sampled = self._accept_some(out, flight, tokens)
        finished: list[Request] = []
        hits: list[tuple[Request, int]] = []
        if not self._stops.keys().isdisjoint(tokens):
            hits = [(r, t) for r, t in zip(sampled, tokens, strict=True) if r is not None and t in self._stops]
        for request, token in hits:
            if token == FAILED_ROW:
                request.token_ids.pop()
                self.kv.forget(request)
                finished += self._end(request, FinishReason.ERROR, None, now)
        for request, chunk in flight.chunks:
            if request.slot >= 0 and request.resumed_at_step <= out.step:
                # A held row computes beyond what it knows.
                self.kv.publish(request, min(chunk.end, len(request.token_ids)))
                if chunk.end >= request.num_prompt_tokens:
                    self._release_siblings(request, now)
        for request, token in hits:
            if token in request.stop_token_ids and request.finish_reason is None:
                finished += self._end(request, FinishReason.STOP, token, now)
        for request in flight.finals:
            if request.slot >= 0 and request.resumed_at_step <= out.step and request.finish_reason is None:
                finished += self._end(request, FinishReason.LENGTH, None, now)
        return StepResult(sampled, finished)

    def fail_step(self, out: SchedulerOutput, now: float) -> StepResult:
        """Step ``out`` did not run: every request in it ends with an error, and none of its KV is shared."""
        flight = self._flights.pop(out.step)
        self.kv.step_done(out.step)
        rows = [*(r for r in flight.sampled if r is not None), *(request for request, _ in flight.chunks)]
        finished: list[Request] = []
        self.kv.copies_lost(out.step)
        for request_id in self.kv.swapped_since(out.step):
            self.kv.drop_swapped(self.requests[request_id])
            self.requests[request_id].move_to(RequestStatus.PREEMPTED)
        for request in rows:  # also those that have given blocks away since: what they kept was computed here
            if request.slot >= 0 and request.admitted_at_step <= out.step and request.finish_reason is None:
                self.kv.forget(request)
                finished += self._end(request, FinishReason.ERROR, None, now)
        for request in [each for each in self.running.values() if each.admitted_at_step == out.step]:
            self._put_back(request)  # it had no token in this step, but what it begins with was not copied either
        return StepResult([], finished)

    def _accept_some(self, out: SchedulerOutput, flight: InFlight, tokens: Sequence[int]) -> list[Request | None]:
        """Somebody left while the step was in flight: what was sampled for them is dropped."""
        accepted: list[Request | None] = []
        for request, token in zip(flight.sampled, tokens, strict=True):
            if request is None or request.finish_reason is not None or request.slot < 0:
                self.num_late += request is not None
                accepted.append(None)
            elif request.resumed_at_step > out.step:
                self.num_late += 1
                accepted.append(None)
            else:
                request.token_ids.append(token)
                accepted.append(request)
        return accepted

    def check_invariants(self) -> None:
        """Raise InvariantError unless every request is in exactly one place and all counts agree."""
        check_scheduler(self)
