"""The loop that rebuilds the batch at every step (iteration-level scheduling; Orca, OSDI 2022).

A step takes, in this order: the decode rows, one token each; chunks of running requests that have more than one token
to compute (Sarathi-Serve's stall-free mix, OSDI 2024); and waiting requests, as long as budget, rows and blocks last.

Steady decode costs the brain next to nothing. All decoding requests advance with one shared beat; a timing wheel names
those that need a block, or end, at a given beat. A step in which nobody joins, leaves or needs a block touches no
request at all, and its update only appends the tokens.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from chairlift.errors import PromptTooLongError, RequestError
from chairlift.kv_cache.manager import KVCacheManager
from chairlift.outputs import FinishReason
from chairlift.request import Request, RequestStatus
from chairlift.scheduler.admission import WaitingQueue
from chairlift.scheduler.decode_rows import DecodeRows, receivers
from chairlift.scheduler.invariants import check_scheduler
from chairlift.scheduler.membership import Membership, membership_from_name
from chairlift.scheduler.output import FAILED_ROW, Chunk, NewRow, SchedulerOutput, StepResult
from chairlift.scheduler.policy import FCFS, Policy
from chairlift.scheduler.preemption import PreemptionRate, candidates, is_pinned

__all__ = ["Scheduler"]


@dataclasses.dataclass(slots=True)
class _InFlight:
    """What update() must know of a step that was scheduled."""

    sampled: Sequence[Request | None]
    appends: Sequence[Callable[[int], Any]]
    chunks: list[tuple[Request, Chunk]]
    finals: list[Request]
    epoch: int


class Scheduler:
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
        membership: Membership | None = None,
        watermark: float = 0.01,
        look_ahead: int = 8,
        max_times_passed: int = 16,
        max_preemptions: int = 8,
    ) -> None:
        self.kv = kv
        self.max_num_batched_tokens = max_num_batched_tokens
        # Every running request must be able to take one token in every step, or decodes could starve each other.
        self.max_running = min(max_num_seqs, max_num_batched_tokens)
        self.max_model_len = max_model_len
        self.policy = policy
        self.membership = membership or membership_from_name("continuous")
        self.watermark = watermark
        self.max_preemptions = max_preemptions
        self.waiting = WaitingQueue(policy, look_ahead, max_times_passed)
        self.running: dict[str, Request] = {}
        self.requests: dict[str, Request] = {}
        self.step = 0
        """Number of the last step that had something to execute."""
        self.num_late = 0
        self.num_preemptions = 0
        self.preemption_rate = PreemptionRate()
        self._arrivals = 0
        self.free_slots = list(range(self.max_running - 1, -1, -1))
        self._left: list[int] = []
        self._catching_up: list[Request] = []
        self.decodes = DecodeRows(kv.block_size)
        """Rows that take one token in every step."""
        self._sent_slots: tuple[int, ...] = ()
        self.retiring: list[Request] = []
        """Decode rows whose last step is in flight."""
        self._stops: Counter[int] = Counter({FAILED_ROW: 1})
        self._epoch = 0
        self.num_computed_tokens = 0
        """Positions computed of all running requests."""
        self._flights: dict[int, _InFlight] = {}

    # -- requests ------------------------------------------------------------------------------------------------

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
        request.sequence = self._arrivals
        source = None if self.membership.closed else request.source  # a closed batch takes all answers together
        if source is not None and not source.is_finished and source.num_computed_tokens < source.num_prompt_tokens:
            source.siblings.append(request)
        else:
            self.waiting.add(request)

    @property
    def has_unfinished(self) -> bool:
        return bool(self.requests)

    def next_event(self, now: float) -> float | None:
        """When :meth:`schedule` has something to do again if nobody comes or goes; None if only then."""
        if self.running or self._flights:
            return now
        if not self.waiting:
            return None
        return self.membership.fires_at(self.waiting, len(self.free_slots))

    # -- schedule ------------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> SchedulerOutput:
        """The next step. An output with ``num_tokens == 0`` must not be executed or updated."""
        out = SchedulerOutput(self.step + 1)
        flight = _InFlight((), (), [], [], 0)
        self._run_decodes(out, flight)
        budget = self._run_chunks(out, flight, self.max_num_batched_tokens - len(self.decodes.requests))
        if self.waiting and not out.preempted:  # what was just taken from one is not given to another
            self._admit(out, flight, budget, now)
        self._seal(out, flight)
        return out

    def _run_decodes(self, out: SchedulerOutput, flight: _InFlight) -> None:
        for request in self.retiring:
            if request.decoding:
                self.decodes.stop(request)
        self.retiring.clear()
        stalled = [request for request in self.decodes.due() if not self._attend(request, out, flight)]
        self._catching_up[:0] = [request for request in stalled if request.slot >= 0]
        if self.decodes.stale:
            self.decodes.rebuild()
        if self.decodes.requests:
            self.decodes.tick()
            self.num_computed_tokens += len(self.decodes.requests)

    def _attend(self, request: Request, out: SchedulerOutput, flight: _InFlight) -> bool:
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
            self.retiring.append(request)
        else:
            self.decodes.watch(request, position + 1, 1)
        return True

    def _run_chunks(self, out: SchedulerOutput, flight: _InFlight, budget: int) -> int:
        for request in tuple(self._catching_up):
            if request.slot < 0:  # preempted a moment ago, for the one before it
                continue
            if budget <= 0:
                break
            num_tokens = min(request.num_tokens - request.num_computed_tokens, budget)
            if self._make_room(request, request.num_computed_tokens + num_tokens, out, flight):
                budget -= num_tokens
                self._take_chunk(request, num_tokens, out, flight)
        return budget

    def _admit(self, out: SchedulerOutput, flight: _InFlight, budget: int, now: float) -> None:
        waiting = self.waiting
        places = self.membership.places(waiting, len(self.running), len(self.free_slots), now)
        if not places or budget < self.membership.needs_budget():
            return
        batch = waiting.first(places)
        self.membership.prepare(batch[:places], min(self.max_model_len - 1, self.kv.capacity_tokens))
        passed: list[Request] = []
        for request in batch:
            if not places or budget < self.membership.needs_budget():
                break
            if not self._try_admit(request, out):
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

    def _try_admit(self, request: Request, out: SchedulerOutput) -> bool:
        pinned = is_pinned(request, self.max_preemptions)
        reserve = request.limit if pinned else self.membership.reserve(request)
        watermark = self.watermark if self.running else 0.0
        admission = self.kv.admit(request, reserve, watermark, share=not pinned)
        if admission is None:
            return False
        self.waiting.remove(request)
        if not request.num_preemptions:
            request.num_cached_tokens = admission.num_computed_tokens
        request.move_to(RequestStatus.RUNNING)
        request.slot = self.free_slots.pop()
        request.admitted_at_step = out.step
        request.progress_mark = len(request.token_ids)
        request.num_computed_tokens = admission.num_computed_tokens
        self.num_computed_tokens += admission.num_computed_tokens
        self.running[request.request_id] = request
        self._stops.update(request.stop_token_ids)
        self._catching_up.append(request)
        out.copies += admission.copies
        tokens, tables = list(request.token_ids), [list(table) for table in request.block_ids]
        computed = admission.num_computed_tokens
        out.joined.append(
            NewRow(
                request.slot, request.request_id, tokens, request.num_prompt_tokens, computed, tables, request.sampling
            )
        )
        return True

    def _take_chunk(self, request: Request, num_tokens: int, out: SchedulerOutput, flight: _InFlight) -> None:
        start = request.num_computed_tokens
        end = start + num_tokens
        samples = end == request.num_tokens
        why = "stalled" if start >= request.progress_mark else "recompute" if request.num_preemptions else "prefill"
        chunk = Chunk(request.slot, start, num_tokens, samples, why)
        out.chunks.append(chunk)
        flight.chunks.append((request, chunk))
        request.num_computed_tokens = end
        self.num_computed_tokens += num_tokens
        if samples:
            self._catching_up.remove(request)
            if end == request.max_total_tokens - 1:
                flight.finals.append(request)

    def _make_room(self, request: Request, num_tokens: int, out: SchedulerOutput, flight: _InFlight) -> bool:
        """Blocks for the request's first ``num_tokens`` positions, preempting others if need be."""
        while True:
            grown = self.kv.extend(request, num_tokens, self.step)
            if grown is not None:
                out.new_blocks += [(request.slot, blocks) for blocks in grown]
                return True
            if not self.kv.missing(request, num_tokens):
                return False  # steps in flight still hold what was freed; it is there in the next step
            victims = candidates(self.running.values(), request, self.policy, self.max_preemptions)
            victim = self.policy.victim(victims)
            if victim is None:
                return False
            self._preempt(victim, out, flight)
            if victim is request:
                return False

    def _seal(self, out: SchedulerOutput, flight: _InFlight) -> None:
        """Freeze the step's rows, and let those whose chunk ends here join the beat for the next one."""
        decodes = self.decodes
        if decodes.stale:
            decodes.rebuild()
        out.num_decodes = len(decodes.requests)
        out.num_tokens = out.num_decodes + sum(chunk.num_tokens for chunk in out.chunks)
        if not out.num_tokens:
            if not self._flights and not self.membership.held:
                self._break_stall()
            return
        self.step = out.step
        out.left, self._left = self._left, []
        if decodes.slots is not self._sent_slots:
            out.decode_slots = self._sent_slots = decodes.slots
        flight.sampled, flight.appends, flight.epoch = decodes.sampled, decodes.appends, self._epoch
        self._describe(out, flight)
        samples = [request for request, chunk in flight.chunks if chunk.samples]
        if samples:
            sampled, appends = receivers(samples)
            flight.sampled, flight.appends = decodes.sampled + sampled, decodes.appends + appends
            decodes.start([request for request in samples if request.num_computed_tokens < request.limit])
        self._flights[out.step] = flight

    def _break_stall(self) -> None:
        """Everybody waits for blocks that prefix sharing keeps taken: the last in line gives its own back."""
        able = [r for r in self.running.values() if r.finish_reason is None and not is_pinned(r, self.max_preemptions)]
        if able:
            self._preempt(max(able, key=self.policy.order), None, None)

    def _describe(self, out: SchedulerOutput, flight: _InFlight) -> None:
        out.decode_rows = self.decodes.ids
        out.chunk_ids = [request.request_id for request, _ in flight.chunks]
        out.num_waiting = len(self.waiting)
        out.num_held = self.decodes.num_held
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
            if request.slot >= 0 and request.admitted_at_step <= out.step:
                # A held row computes beyond what it knows.
                self.kv.publish(request, min(chunk.end, len(request.token_ids)))
                if chunk.end >= request.num_prompt_tokens:
                    self._release_siblings(request)
        for request, token in hits:
            if token in request.stop_token_ids and request.finish_reason is None:
                finished += self._end(request, FinishReason.STOP, token, now)
        for request in flight.finals:
            if request.slot >= 0 and request.admitted_at_step <= out.step and request.finish_reason is None:
                finished += self._end(request, FinishReason.LENGTH, None, now)
        return StepResult(sampled, finished)

    def fail_step(self, out: SchedulerOutput, now: float) -> StepResult:
        """Step ``out`` did not run: every request in it ends with an error, and none of its KV is shared."""
        flight = self._flights.pop(out.step)
        self.kv.step_done(out.step)
        rows = [*(r for r in flight.sampled if r is not None), *(request for request, _ in flight.chunks)]
        finished: list[Request] = []
        for request in rows:
            if request.slot >= 0 and request.admitted_at_step <= out.step and request.finish_reason is None:
                self.kv.forget(request)
                finished += self._end(request, FinishReason.ERROR, None, now)
        return StepResult([], finished)

    def _accept_some(self, out: SchedulerOutput, flight: _InFlight, tokens: Sequence[int]) -> list[Request | None]:
        """Somebody left while the step was in flight: what was sampled for them is dropped."""
        accepted: list[Request | None] = []
        for request, token in zip(flight.sampled, tokens, strict=True):
            if request is None or request.finish_reason is not None or request.slot < 0:
                self.num_late += request is not None
                accepted.append(None)
            elif request.admitted_at_step > out.step:
                self.num_late += 1
                accepted.append(None)
            else:
                request.token_ids.append(token)
                accepted.append(request)
        return accepted

    # -- comings and goings --------------------------------------------------------------------------------------

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

    def preempt(self, request_id: str) -> bool:
        """Preempt by recompute between two steps, as if blocks had run short. False when it may not be preempted."""
        request = self.running.get(request_id)
        if request is None or self.membership.held:
            return False
        if request not in candidates([request], request, self.policy, self.max_preemptions):
            return False
        self._preempt(request, None, None)
        return True

    def _preempt(self, request: Request, out: SchedulerOutput | None, flight: _InFlight | None) -> None:
        if out is not None and flight is not None:
            out.new_blocks = [entry for entry in out.new_blocks if entry[0] != request.slot]
            out.chunks = [chunk for chunk in out.chunks if chunk.slot != request.slot]
            flight.chunks = [entry for entry in flight.chunks if entry[0] is not request]
            flight.finals = [other for other in flight.finals if other is not request]
            out.preempted.append(request.request_id)
        request.num_preemptions += 1
        self.num_preemptions += 1
        self._vacate(request)
        request.move_to(RequestStatus.PREEMPTED)
        self.waiting.add(request)

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
        elif request.source is not None and request in request.source.siblings:
            request.source.siblings.remove(request)
        else:
            self.waiting.remove(request)
        request.move_to(RequestStatus.FINISHED)
        del self.requests[request.request_id]
        self.preemption_rate.finished(request, now)
        self._release_siblings(request)

    def _vacate(self, request: Request) -> None:
        """Give up row and blocks. Blocks stay taken until the last step in flight that may touch them has run."""
        if request.finish_reason is not FinishReason.ERROR:
            self._publish_confirmed(request)
        self.num_computed_tokens -= request.num_computed_tokens
        if request.decoding:
            self.decodes.stop(request)
        elif request in self._catching_up:
            self._catching_up.remove(request)
        request.num_computed_tokens = 0
        self.kv.free(request, self.step)
        self.free_slots.append(request.slot)
        self._left.append(request.slot)
        request.slot = -1
        del self.running[request.request_id]
        for token in request.stop_token_ids:
            self._stops[token] -= 1
            if not self._stops[token]:
                del self._stops[token]
        self._epoch += 1

    def _publish_confirmed(self, request: Request) -> None:
        """Offer what steps that have landed computed: all but the newest token, once there is one since admission."""
        if len(request.token_ids) > request.progress_mark:
            self.kv.publish(request, len(request.token_ids) - 1)

    def _release_siblings(self, request: Request) -> None:
        """Let the other samples of the prompt in: its KV is there to fork from, or never will be."""
        for sibling in request.siblings:
            self.waiting.add(sibling)
        request.siblings = []

    def check_invariants(self) -> None:
        """Raise InvariantError unless every request is in exactly one place and all counts agree."""
        check_scheduler(self)
