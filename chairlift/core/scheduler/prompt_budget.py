"""Assigns the prompt tokens of a step to running and waiting requests."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterable
from itertools import islice

from chairlift.core.request import Request, RequestStatus
from chairlift.core.rows.kind import whole_after, whole_before
from chairlift.core.scheduler.batch import Batch
from chairlift.core.scheduler.output import Chunk
from chairlift.core.scheduler.preemptor import Preemptor
from chairlift.core.scheduler.prefill_mode import Turn
from chairlift.core.scheduler.step import ScheduledStep

__all__ = ["PromptBudget"]


class PromptBudget:
    """Assigns the token budget that decodes leave: to chunks of running requests, and to waiting requests that join."""

    def __init__(self, batch: Batch, preemptor: Preemptor, max_model_len: int) -> None:
        self.batch = batch
        self.preemptor = preemptor
        self.kv = batch.kv
        self.policy = batch.policy
        self.membership = batch.membership
        self.running = batch.running
        self.waiting = batch.waiting
        self.max_model_len = max_model_len

    def run(self, step: ScheduledStep, budget: int, turn: Turn) -> None:
        """Assign the prompt budget: a fraction in policy order, then the rest to the smallest requests.

        Both parts go to running and to waiting requests. Tokens that one part cannot use are added to the other part.
        """
        out = step.out
        rows = self.batch.computable()
        rest = 0
        if turn is Turn.DECODE:  # chunks only for stalled decodes
            self._run_chunks(step, budget, [r for r in rows if r.num_computed_tokens >= r.progress_mark])
            return
        younger: list[Request] = []
        if self.batch.prompt_share.by_size and budget > 0 and (rows or self.waiting):
            part = self.batch.prompt_share.split(budget, self.policy.reserved_tokens(self._needs(rows)))
            rest = budget - part
            budget = part
            rows, younger = self._split_at_first_waiting(rows)
        budget = self._run_younger(step, budget, rows, younger) if younger else self._run_chunks(step, budget, rows)
        budget = self._admit(step, budget)
        if rest or (younger and budget):
            budget = self._run_smallest(step, budget + rest)
            if budget and self.waiting:
                if out.held_up_by == "tokens":
                    out.held_up_by = ""
                self._admit(step, budget)
        if not out.chunks:
            self.batch.prompt_share.carried = step.carried

    def _run_younger(self, step: ScheduledStep, budget: int, rows: list[Request], younger: list[Request]) -> int:
        """Assign the budget to ``rows``, then to ``younger`` requests and to waiting requests between these, in policy
        order. Tokens that the policy reserves for later rows stay for them. Returns the remaining budget."""
        needs = self._needs([*rows, *younger])
        reserved_tokens = self.policy.reserved_tokens
        reserved = reserved_tokens(needs)

        def kept(number: int) -> int:
            """Number of tokens of the budget to keep for the rows that come after the first ``number`` rows."""
            return max(0, min(budget, reserved - reserved_tokens(needs[:number]))) if budget and reserved else 0

        later = kept(len(rows))
        budget = self._run_chunks(step, budget - later, rows) + later
        for number, row in enumerate(younger, start=len(rows)):
            later = kept(number)
            budget = self._admit(step, budget - later, row) + later
            later = kept(number + 1)
            budget = self._run_chunks(step, budget - later, [row]) + later
        return budget

    def _split_at_first_waiting(self, rows: list[Request]) -> tuple[list[Request], list[Request]]:
        """(running requests before the first waiting request in policy order, running requests after it). Requests of
        the second list joined early because they are small."""
        if not (self.waiting and rows):
            return rows, []
        order = self.policy.order
        first_order = self._first_waiting_order()
        younger = [r for r in rows if r.num_computed_tokens < r.progress_mark and order(r) > first_order]
        if not younger:
            return rows, []
        return [r for r in rows if r not in younger], sorted(younger, key=order)

    def _first_waiting_order(self) -> tuple[float, ...]:
        """The smallest key in policy order among the waiting requests. Preempted requests are first in the line, also
        those whose keys are larger than the first newcomer's."""
        orders = []
        for request in self.waiting.line(self.batch.now):
            orders.append(self.policy.order(request))
            if request.status is RequestStatus.WAITING:
                break
        return min(orders)

    @staticmethod
    def _needs(rows: Iterable[Request]) -> list[tuple[Request, int]]:
        return [(request, request.num_tokens - request.num_computed_tokens) for request in rows]

    def _run_smallest(self, step: ScheduledStep, budget: int) -> int:
        """Assign the rest of the budget to the smallest requests that run or may join. Returns the remaining budget."""

        def order(request: Request) -> tuple[bool, tuple[float, ...]]:
            return request.num_computed_tokens < request.progress_mark, size_order(request)

        size_order = self.waiting.size_order
        begun = {request.request_id for request, _ in step.chunks}
        rows = deque(sorted(self.batch.computable(), key=order))
        newcomer = self._smallest_newcomer(step)
        while budget > 0 and (rows or newcomer):
            if newcomer and not (rows and size_order(rows[0]) < size_order(newcomer)):
                request = newcomer
                newcomer = None
                if self._admit_smallest(request, step):
                    # The size of the request is known only now: the request that it forks from, or a cached prefix, may
                    # be gone.
                    insort(rows, request, key=order)
                    newcomer = self._smallest_newcomer(step)
                continue
            request = rows.popleft()
            if request.slot < 0:  # this step has just preempted it
                continue
            num_tokens = min(request.num_tokens - request.num_computed_tokens, budget)
            had = self._take_back_chunk(request, step) if request.request_id in begun else 0
            num_tokens = self._uncut(request, had + num_tokens, step) - had
            if num_tokens > 0 and self.preemptor.make_room(request, self._upto(request, had + num_tokens), step):
                budget -= num_tokens
                had += num_tokens
            if had:
                self._take_chunk(request, had, step)
        return budget

    def _smallest_newcomer(self, step: ScheduledStep) -> Request | None:
        """The smallest waiting request that may join and has the same :meth:`Policy.standing` as the first request in
        policy order; None if there is none."""
        if step.out.preempted or not self.waiting or not self.batch.free_rows or not self.batch.is_open:
            return None
        self._look_past()
        while (found := self._smallest_to_try(step)) is not None:
            if not self.batch.follow(found, step.out):
                return found
            if not self.waiting:
                return None
            self._look_past()
        return None

    def _smallest_to_try(self, step: ScheduledStep) -> Request | None:
        """The smallest waiting request that may join, unless it follows another request."""
        if not self.batch.in_flight.may_follow:
            return None
        may_pass = self._may_pass(step)
        for request in self.waiting.smallest(self.batch.now):
            if request in step.passed or any(kind.skips(request) for kind in request.kinds):
                continue
            if (self.batch.open_rows and may_pass) or self.batch.may_use_reserve(request):
                return request
        return None

    def _may_pass(self, step: ScheduledStep) -> bool:
        """Whether a small request may join before the first waiting request and before requests that did not fit in
        this step."""
        head = next(self.waiting.line(self.batch.now))
        if head.times_passed >= self.waiting.max_times_passed:
            return False
        return not step.passed or self.waiting.may_pass(step.passed)

    def _admit_smallest(self, request: Request, step: ScheduledStep) -> bool:
        """Admit the smallest waiting request. It gets an ordinary row and blocks; if there are none and it is short, a
        reserved row and reserved blocks.

        Returns False if it does not fit, or if this step has preempted a request since ``request`` was chosen.
        """
        out = step.out
        if out.preempted:
            return False
        if self.batch.open_rows and self._may_pass(step) and self.batch.admit(request, out):
            for other in step.passed:
                other.times_passed += 1
            for kind in request.kinds:
                kind.passed(request)
            return True
        if self.batch.may_use_reserve(request) and self.batch.admit(request, out, reserved=True):
            for kind in request.kinds:
                kind.passed(request)
            return True
        return False

    def _look_past(self) -> None:
        """Tell the kinds which of the first waiting requests the smallest one may pass."""
        if not self.batch.num_looked_past:
            return
        for kind in self.batch.kinds:
            kind.begin_pass()
        for request in islice(self.waiting.line(self.batch.now), self.batch.num_looked_past):
            for kind in request.kinds:
                kind.skipped(request)

    @staticmethod
    def _upto(request: Request, num_tokens: int) -> int:
        """Number of leading positions for which the request needs blocks before its next ``num_tokens`` tokens are
        computed. A request that lost blocks resumes only with blocks for all its known tokens, as if it joined
        again."""
        return request.num_tokens if request.short_of_blocks else request.num_computed_tokens + num_tokens

    def _run_chunks(self, step: ScheduledStep, budget: int, rows: list[Request]) -> int:
        """Divide the budget between running requests with more than one token to compute. Returns the remaining
        budget."""
        rows = [r for r in rows if r.slot >= 0]
        short = True
        while rows and budget > 0 and short:
            short = False
            needs = self._needs(rows)
            for request, num_tokens in list(self.policy.share(needs, budget)):
                num_tokens = self._uncut(request, min(num_tokens, budget), step)
                if num_tokens <= 0 or request.slot < 0:  # this step has just preempted it for an earlier request
                    continue
                rows.remove(request)
                if self.preemptor.make_room(request, self._upto(request, num_tokens), step):
                    budget -= num_tokens
                    self._take_chunk(request, num_tokens, step)
                else:  # its tokens go to the other requests, whose windows may release blocks
                    short = True
            rows = [r for r in rows if r.slot >= 0]
        return budget

    def _admit(self, step: ScheduledStep, budget: int, before: Request | None = None) -> int:
        """Admit waiting requests in policy order while there are tokens, rows and blocks. Returns the remaining budget.

        With ``before``, only preempted requests and those before this running request in policy order are admitted.
        """
        out = step.out
        waiting = self.waiting
        if not waiting or out.preempted:  # no newcomer may take the row and blocks of a preempted request
            return budget
        if step.passed and not waiting.may_pass(step.passed):
            return budget
        num_places = self.membership.places(waiting, len(self.running), self.batch.open_rows, self.batch.now)
        if not num_places or budget < self.membership.needs_budget():
            out.held_up_by = out.held_up_by or self.membership.lacks(num_places)
            return budget
        closed = self.membership.closed
        looked_at = num_places + (0 if closed else waiting.look_ahead + self.batch.num_looked_past)
        batch: Iterable[Request] = islice(waiting.line(self.batch.now), looked_at)
        if closed:  # the length of each row depends on all requests that join, so they must be known now
            batch = list(batch)
            self.membership.prepare(batch, min(self.max_model_len - 1, self.kv.capacity_tokens))
        for kind in self.batch.kinds:
            kind.begin_pass()
        passed = step.passed
        for request in batch:
            if (
                before is not None
                and request.status is RequestStatus.WAITING
                and self.policy.order(request) > self.policy.order(before)
            ):
                break
            if request in passed:
                continue
            if not num_places or budget < self.membership.needs_budget():
                out.held_up_by = out.held_up_by or self.membership.lacks(num_places)
                break
            if request.kinds and not closed and self._is_skipped(request, step):
                continue
            if not self.batch.in_flight.may_follow:
                break
            if self.batch.follow(request, out):
                continue
            if not self.batch.admit(request, out):
                out.held_up_by = out.held_up_by or "blocks"
                passed.append(request)
                if not waiting.may_pass(passed):
                    break
                continue
            num_places -= 1
            for other in passed:
                other.times_passed += 1
            for kind in request.kinds:
                kind.passed(request)
            num_tokens = min(request.num_tokens - request.num_computed_tokens, budget)
            num_tokens = self._uncut(request, num_tokens, step)
            if num_tokens:
                budget -= num_tokens
                self._take_chunk(request, num_tokens, step)
        return budget

    @staticmethod
    def _is_skipped(request: Request, step: ScheduledStep) -> bool:
        """Whether a kind skips a waiting request."""
        for kind in request.kinds:
            if kind.skips(request):
                kind.skipped(request)
                step.out.held_up_by = step.out.held_up_by or kind.name
                return True
        return False

    def _uncut(self, request: Request, num_tokens: int, step: ScheduledStep) -> int:
        """Number of the request's next tokens to compute: about ``num_tokens``, but not more than its kinds allow, and
        the chunk must not end inside positions that one step must compute together.

        If the chunk would end inside such positions, all of them are computed if the step has room for them, even
        beyond its budget for prompts. Otherwise the chunk ends before them, and has perhaps no token.
        """
        if not request.kinds:
            return num_tokens
        for kind in request.kinds:
            num_tokens = kind.room(request, num_tokens)
        start = request.num_computed_tokens
        end = start + num_tokens
        before = whole_before(request, end)
        if before == end:
            return num_tokens
        room = self.batch.max_tokens - self.batch.decodes.count - sum(chunk.num_tokens for chunk in step.out.chunks)
        after = whole_after(request, end)
        return (after if after - start <= room else before) - start

    def _take_chunk(self, request: Request, num_tokens: int, step: ScheduledStep) -> None:
        start = request.num_computed_tokens
        for kind in request.kinds:
            kind.spent(request, num_tokens)
        end = start + num_tokens
        samples = min(request.num_sample_positions, num_tokens) if end == request.num_tokens else 0
        if start >= request.progress_mark:
            why = "stalled"
        elif request.was_preempted:
            why = "recompute"
        else:
            why = "prefill"
        chunk = Chunk(request.slot, start, num_tokens, samples, why)
        step.out.chunks.append(chunk)
        step.chunks.append((request, chunk))
        request.num_computed_tokens = end
        request.short_of_blocks = False
        step.out.num_recomputed += max(0, min(end, request.num_ever_computed) - start)
        self.batch.num_computed_tokens += num_tokens
        if samples:
            self.batch.catching_up.remove(request)
            if end == request.max_total_tokens - 1:
                step.finals.append(request)

    def _take_back_chunk(self, request: Request, step: ScheduledStep) -> int:
        """Undo the chunk that a request has in this step, so that it can get a longer chunk. Returns the number of its
        tokens, or 0.

        A row has only one chunk per step, because the blocks that its sliding window has passed must stay until the
        whole chunk is computed.
        """
        index = next((i for i, (other, _) in enumerate(step.chunks) if other is request), None)
        if index is None:
            return 0
        del step.chunks[index]
        chunk = step.out.chunks.pop(index)
        request.num_computed_tokens = chunk.start
        for kind in request.kinds:
            kind.spent(request, -chunk.num_tokens)
        self.batch.num_computed_tokens -= chunk.num_tokens
        step.out.num_recomputed -= max(0, min(chunk.end, request.num_ever_computed) - chunk.start)
        return chunk.num_tokens
