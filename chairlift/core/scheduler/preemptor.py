"""Preemption of running requests, for other running requests that need blocks or for waiting requests that outrank
them."""

from __future__ import annotations

from chairlift.core.request import Request, RequestStatus
from chairlift.core.rows.kind import whole_before
from chairlift.core.scheduler.batch import Batch
from chairlift.core.scheduler.policy import Resource
from chairlift.core.scheduler.preemption import candidates, is_pinned, may_be_preempted
from chairlift.core.scheduler.step import ScheduledStep

__all__ = ["Preemptor"]

_ASK_AGAIN_STEPS = 4
"""Number of steps between two comparisons of the queue with a full batch, if no request came or left. Meanwhile only
the passing of time can change the order."""


class Preemptor:
    """Preempts running requests of ``batch`` as :class:`~chairlift.core.scheduler.preemption.PreemptionMode` says: by
    recompute, by swap, or by dropping only the last blocks of their KV."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.kv = batch.kv
        self.policy = batch.policy
        self.membership = batch.membership
        self.running = batch.running
        self.waiting = batch.waiting
        self.num_preemptions = 0
        self.num_swaps = self.num_tails = 0
        """Counters: preemptions that saved the KV in host memory; preemptions that dropped only the last blocks of the
        KV."""
        self.preempted_for: dict[str, str] = {}
        """Id of a request preempted since the newest step -> id of the request that needed its blocks or row; "" if
        there is none."""
        self.swap_out: list[tuple[int, int, int]] = []
        """One entry per block that the next step must save in host memory: (cache group, block, host block)."""
        self._refused_state: tuple[int, int] | None = None
        """(number of changes of the queue, number of vacated rows) when the first waiting request last outranked no
        running request. While both numbers stay the same, the comparison is skipped for some steps. None: compare
        again."""
        self._compared_at = 0
        """Index of the step in which waiting requests were last compared with a full batch."""

    def make_room(self, request: Request, num_tokens: int, step: ScheduledStep) -> bool:
        """Get blocks for the request's first ``num_tokens`` positions, and preempt other requests if necessary. Returns
        whether the request got the blocks."""
        while True:
            grown = self.kv.tables.extend(request, num_tokens, self.batch.step)
            if grown is not None:
                step.out.new_blocks += [(request.slot, blocks) for blocks in grown]
                return True
            if self.membership.closed or not self.kv.tables.num_missing(request, num_tokens):
                return False  # steps in flight still use the blocks; the request gets them in the next step
            victims = candidates(self.running.values(), request, self.policy, self.batch.max_preemptions, step.out.step)
            victim = self.policy.victim(victims)
            if victim is None or victim is request:  # the weakest request waits, and keeps its blocks
                return False
            self.preempted_for[victim.request_id] = request.request_id
            num_blocks = self.kv.tables.num_missing(request, num_tokens)
            if self._swap_is_cheaper(victim, num_blocks) or not self._drop_tail(victim, num_blocks, step):
                self.preempt(victim, step)

    def admit_ahead(self, step: ScheduledStep, budget: int) -> None:
        """Before the token budget is assigned, admit waiting requests that may take rows and blocks from running
        requests."""
        state = (self.waiting.num_changes, self.batch.num_vacated)
        if (
            not self.batch.free_rows
            and state == self._refused_state
            and step.out.step < self._compared_at + _ASK_AGAIN_STEPS
        ):
            return
        self._refused_state = state
        self._compared_at = step.out.step
        self.policy.observe(self.running.values(), self.batch.now)
        while self.waiting:
            head = next(self.waiting.line(self.batch.now))
            if self._admit_or_displace(head, step, budget):
                continue
            # A request that is first only because it waited long takes no row from others. The request that would be
            # first if waiting time did not count may take one.
            other = head if self.batch.free_rows else self.waiting.first_but_for_age(self.batch.now)
            if other is head or not self._admit_or_displace(other, step, budget):
                return

    def _admit_or_displace(self, head: Request, step: ScheduledStep, budget: int) -> bool:
        ahead = [r for r in self.batch.catching_up if not self.policy.outranks(head, r, "tokens", self.batch.now)]
        if sum(request.num_tokens - request.num_computed_tokens for request in ahead) >= budget:
            self._refused_state = None
            return False
        if obstacle := self.batch.obstacle(head):
            step.out.held_up_by = step.out.held_up_by or obstacle
            return False
        if not self.batch.in_flight.may_follow:
            return False
        if self.batch.follow(head, step.out):
            return True
        let_in = self.batch.open_rows > 0 and self.batch.admit(head, step.out)
        return let_in or (self._displace(head, step) and self.batch.admit(head, step.out))

    def _displace(self, head: Request, step: ScheduledStep) -> bool:
        """Preempt running requests for a waiting request, but only if it can then join as soon as the steps in flight
        have ended. Returns whether the preemptions were made."""
        outranks = self.policy.outranks
        now = self.batch.now

        def able(resource: Resource) -> list[Request]:
            lower = [running for running in self.running.values() if outranks(head, running, resource, now)]
            if lower:  # a request that may not be preempted now may be in the next step
                self._refused_state = None
            return [
                running for running in lower if may_be_preempted(running, self.batch.max_preemptions, step.out.step)
            ]

        evicted = None
        if not self.batch.open_rows:
            evicted = self.policy.victim(able("slots"))
            if evicted is None:
                return False
            if self.batch.free_rows:  # a free row reserved for short requests is taken before a row in use
                evicted = None
        reserve = head.reserve
        leaving = able("blocks")
        if evicted is not None and evicted not in leaving:
            leaving.append(evicted)  # its blocks come free with its row
        if self.kv.lacks(head, reserve, self.batch.free_fraction(), leaving):
            return False
        head.times_passed = self.waiting.max_times_passed  # no other request may take the blocks freed for this one
        if evicted is not None:
            self.preempted_for[evicted.request_id] = head.request_id
            self.preempt(evicted, step)
        while self.kv.lacks(head, reserve, self.batch.free_fraction()):
            victim = self.policy.victim(able("blocks"))
            if victim is None:
                return False
            self.preempted_for[victim.request_id] = head.request_id
            self.preempt(victim, step)
        return True

    def preempt(self, request: Request, step: ScheduledStep | None) -> None:
        """Take row and blocks from a running request, and put it into the queue again.

        ``step`` is the step that is being scheduled, or None between two steps.
        """
        self.preempted_for.setdefault(request.request_id, "")
        done = self._computed_before(request, step)
        if step is not None:
            step.out.new_blocks = [entry for entry in step.out.new_blocks if entry[0] != request.slot]
            self._take_from(request, step, done)
        self._count_preemption(request, done)
        saved = self._swap(request, done)
        self.batch.vacate(request)
        request.move_to(RequestStatus.SWAPPED if saved else RequestStatus.PREEMPTED)
        self.batch.wait(request, self.batch.now)

    @staticmethod
    def _computed_before(request: Request, step: ScheduledStep | None) -> int:
        """Number of positions of the request that are computed before the step that is being scheduled."""
        done = request.num_computed_tokens
        if step is not None:
            done -= sum(chunk.num_tokens for other, chunk in step.chunks if other is request)
            done -= request.decoding and step.runs_decodes
        return done

    def _count_preemption(self, request: Request, done: int) -> None:
        request.num_ever_computed = max(request.num_ever_computed, done)
        if not request.short_of_blocks:  # otherwise this continues a preemption that was counted before
            request.num_preemptions += 1
            self.num_preemptions += 1

    def _take_from(self, request: Request, step: ScheduledStep, done: int) -> None:
        """Remove the request from the step that is being scheduled. ``done`` is the number of its positions that
        earlier steps compute."""
        out = step.out
        out.chunks = [chunk for chunk in out.chunks if chunk.slot != request.slot]
        step.chunks = [entry for entry in step.chunks if entry[0] is not request]
        step.finals = [other for other in step.finals if other is not request]
        out.preempted.append(request.request_id)
        if request.decoding:
            self.batch.decodes.stop(request)
        if request not in self.batch.catching_up:  # it was decoding, or only waited for its last token
            self.batch.catching_up.append(request)
        self.batch.num_computed_tokens -= request.num_computed_tokens - done
        request.num_computed_tokens = done

    def _swap_is_cheaper(self, request: Request, num_blocks: int) -> bool:
        """Whether swapping all of a request's KV costs less than recomputing its last ``num_blocks`` blocks."""
        room = all(len(table) <= self.kv.swap_pool.num_free(group) for group, table in enumerate(request.block_ids))
        return room and self.batch.preemption.saves(request, num_blocks * self.kv.block_size)

    def _swap(self, request: Request, done: int) -> bool:
        """Save the KV of a preempted request in host memory, if the preemption mode says so and there is room. Returns
        whether it was saved."""
        # At least one token must be computed again, so that the next token can be sampled.
        num_tokens = whole_before(request, min(done, len(request.token_ids) - 1))
        # The KV of a prompt whose log-probabilities were requested is computed again, because the log-probabilities
        # that a step in flight reports are dropped.
        if num_tokens <= 0 or not request.may_share or not self.batch.preemption.saves(request, num_tokens):
            return False
        self.kv.publish_confirmed(request)
        copies = self.kv.swap_out(request, num_tokens, self.batch.step)
        if copies is None:
            return False
        self.swap_out += copies
        self.num_swaps += not request.short_of_blocks  # otherwise it was counted when it lost its last blocks
        return True

    def _drop_tail(self, request: Request, num_blocks: int, step: ScheduledStep) -> bool:
        """Take the last ``num_blocks`` blocks from a running request. It stays in its row and waits until it gets new
        blocks.

        The blocks that it keeps need no recompute. Returns False if no block would remain, or if none may be taken.
        """
        done = self._computed_before(request, step)
        # The last known token must be computed again, so that the next token can be sampled. Results of steps in flight
        # are dropped.
        remaining = self.kv.tables.num_remaining(request, num_blocks, min(done, len(request.token_ids) - 1))
        may_resume = all(kind.may_resume(request, remaining) for kind in request.kinds)
        if not may_resume or whole_before(request, remaining) < remaining:
            return False
        last = (
            request.num_preemptions + 1 >= self.batch.max_preemptions
        )  # a pinned request must not hold blocks while it waits
        if remaining <= 0 or last or not (self.batch.preemption.drops_tails and request.may_share):
            return False
        self.kv.publish_confirmed(request)
        if not self.kv.tables.shrink(request, remaining, self.batch.step):
            return False
        self._take_from(request, step, done)
        self.num_tails += not request.short_of_blocks
        self._count_preemption(request, done)
        self.batch.in_flight.gone(request)
        self.policy.left(request)
        self.batch.num_computed_tokens -= request.num_computed_tokens - remaining
        request.num_computed_tokens = remaining
        request.progress_mark = len(request.token_ids)
        request.resumed_at_step = step.out.step
        request.short_of_blocks = True
        self.policy.joined(request)
        self.batch.epoch += 1
        return True

    def break_stall(self) -> None:
        """Preempt the weakest request. Called when all requests wait for blocks that stay in use because prefixes are
        shared."""
        able = [
            r for r in self.running.values() if r.finish_reason is None and not is_pinned(r, self.batch.max_preemptions)
        ]
        if able:
            progressed = [r for r in able if may_be_preempted(r, self.batch.max_preemptions, self.batch.step + 1)]
            self.preempt(max(progressed or able, key=self.policy.order), None)
