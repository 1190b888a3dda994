"""Bugs in the handling of late masks, injected one at a time. The worlds with late masks must detect each of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from chairlift.core.request import Request
from chairlift.core.scheduler.batch import Batch
from chairlift.core.scheduler.output import SchedulerOutput
from chairlift.core.scheduler.scheduler import Scheduler
from chairlift.core.scheduler.step import ScheduledStep
from chairlift.engine.grammars import GrammarRow, Grammars, SamplePlace
from chairlift.engine.mask_limits import MaskLedger
from chairlift.engine.mask_work import MaskJob
from chairlift.engine.step_masks import StepMasks
from chairlift_lab.sim.grammars import LateMasks
from tests.simulation.mutants import Patch

MASK_MUTANTS: dict[str, Callable[[Patch], None]] = {}


def mutant(plant: Callable[[Patch], None]) -> Callable[[Patch], None]:
    MASK_MUTANTS[plant.__name__] = plant
    return plant


@mutant
def late_row_sampled_with_the_mask_of_an_earlier_token(patch: Patch) -> None:
    original = Grammars.masks_of

    def masks_of(self: Grammars, filling: Any, rows: Sequence[SamplePlace], bound: float | None) -> Any:
        made = [place.row.made for place in rows]
        found = original(self, filling, rows, bound)
        for place, job in zip(rows, made, strict=True):
            place.row.made = job
        return found

    patch(Grammars, "masks_of", masks_of)
    patch(Grammars, "_is_made", staticmethod(lambda place: place.row.made is not None and not place.drafts))


@mutant
def late_row_sampled_without_a_mask(patch: Patch) -> None:
    original = Grammars.masks_of

    def masks_of(self: Grammars, *args: Any) -> Any:
        masks, late = original(self, *args)
        for request in late:
            row = self._rows[request.request_id]
            row.job, row.waits = None, False
        return masks, []

    patch(Grammars, "masks_of", masks_of)


@mutant
def late_row_never_rejoins(patch: Patch) -> None:
    original = Scheduler.ready

    def ready(self: Scheduler, request: Request, now: float) -> None:
        if request.slot < 0:
            original(self, request, now)

    patch(Scheduler, "ready", ready)


@mutant
def late_row_blocks_its_neighbours(patch: Patch) -> None:
    original = Scheduler._run_decodes

    def run_decodes(self: Scheduler, step: ScheduledStep) -> None:
        if not self.batch.unready_rows:
            original(self, step)

    patch(Scheduler, "_run_decodes", run_decodes)


@mutant
def mask_of_an_aborted_row_goes_to_the_next_owner_of_its_slot(patch: Patch) -> None:
    later, slots = LateMasks.later, dict[MaskJob, int]()

    def remember(self: LateMasks, job: MaskJob) -> None:
        slots[job] = job.place.row.request.slot
        later(self, job)

    def forget(self: Grammars, request: Request) -> None:
        self._rows.pop(request.request_id, None)

    def take_masks(self: Grammars) -> list[Request]:
        ready = []
        for job in self.masks.take_done():
            owners = [row for row in self._rows.values() if row.request.slot == slots[job]]
            for row in owners or [job.place.row]:
                job.at = row.request.num_output_tokens
                row.job, row.made, row.waits = None, job, False
                ready.append(row.request)
        return [request for request in ready if not request.is_finished]

    patch(LateMasks, "later", remember)
    patch(Grammars, "forget", forget)
    patch(Grammars, "_take_masks", take_masks)


@mutant
def token_of_a_withdrawn_row_kept(patch: Patch) -> None:
    original = Scheduler.withdraw

    def withdraw(self: Scheduler, out: SchedulerOutput, requests: Sequence[Request]) -> None:
        flight = self._flights[out.step]
        before = flight.sampled, flight.appends
        original(self, out, requests)
        flight.sampled, flight.appends = before

    patch(Scheduler, "withdraw", withdraw)


@mutant
def position_of_a_withdrawn_row_counts_as_computed(patch: Patch) -> None:
    original = Scheduler.unready

    def unready(self: Scheduler, request: Request) -> None:
        if request.slot >= 0 and not request.decoding and any(request in f.withdrawn for f in self._flights.values()):
            request.num_computed_tokens += 1
            self.batch.num_computed_tokens += 1
        original(self, request)

    patch(Scheduler, "unready", unready)


@mutant
def last_token_of_a_withdrawn_row_taken_for_sampled(patch: Patch) -> None:
    original = Scheduler.withdraw

    def withdraw(self: Scheduler, out: SchedulerOutput, requests: Sequence[Request]) -> None:
        finals = self._flights[out.step].finals
        original(self, out, requests)
        self._flights[out.step].finals = finals

    patch(Scheduler, "withdraw", withdraw)


@mutant
def drafts_of_a_withdrawn_row_accepted(patch: Patch) -> None:
    original = Scheduler.withdraw

    def withdraw(self: Scheduler, out: SchedulerOutput, requests: Sequence[Request]) -> None:
        original(self, out, requests)
        flight = self._flights[out.step]
        verified = [request for request, _ in flight.verifies]
        flight.withdrawn = [request for request in flight.withdrawn if request not in verified]

    patch(Scheduler, "withdraw", withdraw)


@mutant
def matcher_followed_while_its_mask_is_made(patch: Patch) -> None:
    original = Grammars.landed

    def landed(self: Grammars, rows: Sequence[SamplePlace], step: int, tokens: Any) -> None:
        for place in rows:
            if place.row.job is not None:
                place.row.matcher.rewind(0)
        original(self, rows, step, tokens)

    patch(Grammars, "landed", landed)


@mutant
def mask_made_before_the_newest_token_is_known(patch: Patch) -> None:
    original = StepMasks._leave_slow

    def leave_slow(self: StepMasks, rows: Sequence[SamplePlace], seconds: float) -> None:
        original(self, rows, seconds)
        for place in rows:
            row: GrammarRow = place.row
            self._grammars.work_ahead(row)
            if row.job is not None:
                row.job.at += 1

    patch(StepMasks, "_leave_slow", leave_slow)


@mutant
def masks_of_a_request_have_no_limit(patch: Patch) -> None:
    patch(MaskLedger, "_request_error", lambda self, budget: "")


@mutant
def limit_of_a_tenant_ends_its_cheapest_request(patch: Patch) -> None:
    def end(self: MaskLedger, account: Any) -> None:
        running = [each for each in account.of if each.num_answers and not each.error]
        if running:
            worst = min(running, key=lambda each: account.of[each])
            worst.error = self._tenant_error(account, worst)

    patch(MaskLedger, "_end_most_expensive", end)


@mutant
def answer_that_reached_a_limit_keeps_its_row(patch: Patch) -> None:
    original = Grammars._take_masks

    def take_masks(self: Grammars) -> list[Request]:
        self.masks.done = deque(job for job in self.masks.done if not job.place.budget.error)
        return original(self)

    patch(Grammars, "_take_masks", take_masks)


@mutant
def row_with_a_recurrent_state_withdrawn(patch: Patch) -> None:
    original = StepMasks._filled

    def filled(self: StepMasks, flight: Any) -> Any:
        self._grammars.made_ahead = False
        return original(self, flight)

    patch(StepMasks, "_filled", filled)


@mutant
def preempted_row_joins_before_its_mask_is_made(patch: Patch) -> None:
    original = Batch.vacate

    def vacate(self: Batch, request: Request) -> None:
        request.is_ready = True
        original(self, request)

    patch(Batch, "vacate", vacate)
