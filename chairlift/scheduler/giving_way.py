"""Running work gives way: to running work that needs blocks, or to somebody who waits and outranks it."""

from __future__ import annotations

from chairlift.request import Request, RequestStatus
from chairlift.scheduler.output import SchedulerOutput
from chairlift.scheduler.policy import Resource
from chairlift.scheduler.population import InFlight, Population
from chairlift.scheduler.preemption import candidates, is_pinned, may_be_preempted

__all__ = ["GivingWay"]


class GivingWay(Population):
    """Preemption by recompute, by swap, or of the end only: :class:`~chairlift.scheduler.preemption.PreemptionMode`."""

    def _make_room(self, request: Request, num_tokens: int, out: SchedulerOutput, flight: InFlight) -> bool:
        """Blocks for the request's first ``num_tokens`` positions, preempting others if need be."""
        while True:
            grown = self.kv.extend(request, num_tokens, self.step)
            if grown is not None:
                out.new_blocks += [(request.slot, blocks) for blocks in grown]
                return True
            if self.membership.closed or not self.kv.num_missing(request, num_tokens):
                return False  # steps in flight still hold what it has a right to; it is there in the next step
            victims = candidates(self.running.values(), request, self.policy, self.max_preemptions, out.step)
            victim = self.policy.victim(victims)
            if victim is None or victim is request:  # the last in line waits, and keeps what it has
                return False
            self._preempted_for[victim.request_id] = request.request_id
            num_blocks = self.kv.num_missing(request, num_tokens)
            if self._rather_saves(victim, num_blocks) or not self._drop_tail(victim, num_blocks, out, flight):
                self._preempt(victim, out, flight)

    def _displace(self, head: Request, out: SchedulerOutput, flight: InFlight) -> bool:
        """Preempt running work for one that waits; only if that lets it in once steps in flight have landed."""
        outranks, now = self.policy.outranks, self.now

        def able(resource: Resource) -> list[Request]:
            lower = [running for running in self.running.values() if outranks(head, running, resource, now)]
            if lower:  # who may not be preempted now may be in the next step
                self._turned_away = None
            return [running for running in lower if may_be_preempted(running, self.max_preemptions, out.step)]

        evicted = None
        if not self.open_rows:
            rivals = able("slots")
            evicted = self.policy.victim(rivals)
            if evicted is None:
                return False
            if self.free_rows:  # it takes a row that is reserved for short ones before it takes somebody's
                evicted = None
        reserve, leaving = head.reserve, able("blocks")
        if evicted is not None and evicted not in leaving:
            leaving.append(evicted)  # its blocks come free with its row
        if self.kv.lacks(head, reserve, self._watermark(), leaving):
            return False
        head.times_passed = self.waiting.max_times_passed  # what is freed for it goes to nobody it would let past
        if evicted is not None:
            self._preempted_for[evicted.request_id] = head.request_id
            self._preempt(evicted, out, flight)
        while self.kv.lacks(head, reserve, self._watermark()):
            victim = self.policy.victim(able("blocks"))
            if victim is None:
                return False
            self._preempted_for[victim.request_id] = head.request_id
            self._preempt(victim, out, flight)
        return True

    def preempt(self, request_id: str) -> bool:
        """Preempt by recompute between two steps, as if blocks had run short. False when it may not be preempted."""
        request = self.running.get(request_id)
        if request is None or self.membership.held:
            return False
        if not may_be_preempted(request, self.max_preemptions, self.step + 1):
            return False
        self._preempt(request, None, None)
        return True

    def weights_changed(self, *, recompute: bool) -> None:
        """What was computed so far is never shared again; with ``recompute`` it is not read again either.

        No step may be in flight. What lies in host memory is computed again in any case.
        """
        self.kv.forget_all(self.running.values())
        for request in [self.requests[request_id] for request_id in self.kv.swapped]:
            self.kv.drop_swapped(request)
            request.move_to(RequestStatus.PREEMPTED)
        for request in list(self.running.values()) if recompute else ():
            self._preempted_for.setdefault(request.request_id, "")
            request.num_ever_computed = max(request.num_ever_computed, request.num_computed_tokens)
            self._vacate(request)  # it did not give way to anybody: this is not counted as a preemption
            request.move_to(RequestStatus.PREEMPTED)
            self._wait(request, self.now)

    def _preempt(self, request: Request, out: SchedulerOutput | None, flight: InFlight | None) -> None:
        self._preempted_for.setdefault(request.request_id, "")
        done = self._computed_before(request, flight)
        if out is not None and flight is not None:
            out.new_blocks = [entry for entry in out.new_blocks if entry[0] != request.slot]
            self._take_from(request, out, flight, done)
        self._count_preemption(request, done)
        saved = self._swap(request, done)
        self._vacate(request)
        request.move_to(RequestStatus.SWAPPED if saved else RequestStatus.PREEMPTED)
        self._wait(request, self.now)

    @staticmethod
    def _computed_before(request: Request, flight: InFlight | None) -> int:
        """Its computed positions without those of the step that is being put together."""
        done = request.num_computed_tokens
        if flight is not None:
            done -= sum(chunk.num_tokens for other, chunk in flight.chunks if other is request)
            done -= request.decoding and flight.runs_decodes
        return done

    def _count_preemption(self, request: Request, done: int) -> None:
        request.num_ever_computed = max(request.num_ever_computed, done)
        if not request.short_of_blocks:  # else it gives up more for the same shortage
            request.num_preemptions += 1
            self.num_preemptions += 1

    def _take_from(self, request: Request, out: SchedulerOutput, flight: InFlight, done: int) -> None:
        """The step that is being put together computes nothing for the request, which has computed ``done`` before."""
        out.chunks = [chunk for chunk in out.chunks if chunk.slot != request.slot]
        flight.chunks = [entry for entry in flight.chunks if entry[0] is not request]
        flight.finals = [other for other in flight.finals if other is not request]
        out.preempted.append(request.request_id)
        if request.decoding:
            self.decodes.stop(request)
        if request not in self._catching_up:  # it decoded, or only waited for its last token
            self._catching_up.append(request)
        self.num_computed_tokens -= request.num_computed_tokens - done
        request.num_computed_tokens = done

    def _rather_saves(self, request: Request, num_blocks: int) -> bool:
        """Whether to keep all of a request's KV in host memory costs less than to drop so many blocks of its end."""
        room = all(len(table) <= self.kv.swap_pool.num_free(group) for group, table in enumerate(request.block_ids))
        return room and self.preemption.saves(request, num_blocks * self.kv.block_size)

    def _swap(self, request: Request, done: int) -> bool:
        """Keep the KV of a request that is about to leave, if the mode says so and host memory has room."""
        # One token is left to compute, so that the next can be sampled.
        num_tokens = min(done, len(request.token_ids) - 1)
        # A prompt whose log-probabilities are asked for is computed again: a report in flight is dropped.
        if num_tokens <= 0 or not request.may_share or not self.preemption.saves(request, num_tokens):
            return False
        self._publish_confirmed(request)
        copies = self.kv.swap_out(request, num_tokens, self.step)
        if copies is None:
            return False
        self._swap_out += copies
        self.num_swaps += not request.short_of_blocks  # then it is counted with those that gave up their end
        return True

    def _drop_tail(self, request: Request, num_blocks: int, out: SchedulerOutput, flight: InFlight) -> bool:
        """Take blocks of its end from a running request, which waits in its row until there are as many again.

        What it keeps need not be computed again. False where nothing would be left, or may not be taken.
        """
        size = self.kv.block_size
        done = self._computed_before(request, flight)
        # One known token is left to compute, so that the next can be sampled: results of steps in flight are dropped.
        kept = min(min(map(len, request.block_ids)) - num_blocks, min(done, len(request.token_ids) - 1) // size) * size
        last = request.num_preemptions + 1 >= self.max_preemptions  # once pinned, it must not wait holding blocks
        if kept <= 0 or last or not (self.preemption.drops_tails and request.may_share):
            return False
        self._publish_confirmed(request)
        if not self.kv.shrink(request, kept, self.step):
            return False
        self._take_from(request, out, flight, done)
        self.num_tails += not request.short_of_blocks
        self._count_preemption(request, done)
        self.policy.left(request)
        self.num_computed_tokens -= request.num_computed_tokens - kept
        request.num_computed_tokens = kept
        request.progress_mark = len(request.token_ids)
        request.resumed_at_step = out.step
        request.short_of_blocks = True
        self.policy.joined(request)
        self._epoch += 1
        return True

    def _put_back(self, request: Request) -> None:
        """Undo an admission before anything was computed for it."""
        self._vacate(request)
        request.move_to(RequestStatus.PREEMPTED if request.num_preemptions else RequestStatus.WAITING)
        self._wait(request, self.now)

    def _break_stall(self) -> None:
        """Everybody waits for blocks that prefix sharing keeps taken: the last in line gives its own back."""
        able = [r for r in self.running.values() if r.finish_reason is None and not is_pinned(r, self.max_preemptions)]
        if able:
            progressed = [r for r in able if may_be_preempted(r, self.max_preemptions, self.step + 1)]
            self._preempt(max(progressed or able, key=self.policy.order), None, None)
