"""Masks of the steps in flight: which sample positions need one, when they are filled, and which rows wait for one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from chairlift.base.outputs import FinishReason
from chairlift.base.step_batch import Masks, SampledTokens
from chairlift.core.request import Request
from chairlift.core.scheduler.costs import Costs
from chairlift.core.scheduler.output import SchedulerOutput
from chairlift.core.scheduler.scheduler import Scheduler
from chairlift.engine.clock import Clock
from chairlift.engine.flight import Flight
from chairlift.engine.grammars import LEAST_MASK_SECONDS, Grammars, SamplePlace
from chairlift.engine.mask_work import Mask
from chairlift.engine.preparers import Preparers
from chairlift.engine.step_times import decode_seconds

__all__ = ["StepMasks"]


class StepMasks:
    """Makes the masks of a core's steps with the grammars of ``preparers``. ``flights`` has the launched steps, oldest
    first."""

    def __init__(
        self, preparers: Preparers, scheduler: Scheduler, costs: Costs, clock: Clock, flights: Collection[Flight]
    ) -> None:
        self._preparers = preparers
        self._scheduler = scheduler
        self._costs = costs
        self._clock = clock
        self._flights = flights
        self.others: Callable[[SchedulerOutput], Masks | None] | None = None
        """Function that returns more masks for a step; called while the model computes the step. None if there are no
        others. When it is called, the tokens of steps in flight are not known."""

    @property
    def _grammars(self) -> Grammars:
        return self._preparers.grammars

    def begin(self, flight: Flight) -> None:
        """Find the sample positions of a step that need a mask, and begin to fill the masks if that is possible.

        If no steps are in flight, all tokens are known, and the masks can be filled while the model runs. Otherwise the
        newest tokens are known only when the steps in flight end, and the model does not wait for that.
        """
        if places := self._grammars.rows_of(flight.out):
            flight.places = places
            if not self._flights:
                flight.filling = self._grammars.begin(places, self._drawn)

    def drop(self, flight: Flight) -> None:
        """Wait for the masks of a step that could not be computed, so that their matchers may be used again."""
        if flight.filling is not None:
            self._grammars.masks_of(flight.filling, flight.places, None)

    def take(self, flight: Flight) -> Masks | None:
        """The masks of a step that the model computes, by sample position; None if there are none."""
        masks = None if self.others is None else self.others(flight.out)
        if flight.places:
            masks = {**(masks or {}), **self._filled(flight)} or None
        return masks

    def _filled(self, flight: Flight) -> dict[int, Mask]:
        """Masks of a step's rows with grammars, by sample position.

        Rows whose mask is late are withdrawn from the step. Rows whose next mask is expected to be slow leave the later
        steps, until their mask is made. The rows of a static batch compute every step together, so its steps wait for
        all masks. With recurrent states, which cannot go back, no row is withdrawn: a step waits for a mask that is
        slow although no mask before was.
        """
        grammars = self._grammars
        places = flight.places
        filling = flight.filling or grammars.begin(places, self._drawn)
        begin = self._clock.now()
        held = self._scheduler.membership.held
        seconds = self._bound()
        waits_for_all = held or grammars.made_ahead
        filled, late = grammars.masks_of(filling, places, None if waits_for_all else seconds)
        flight.mask_seconds = self._clock.now() - begin
        if late:
            self._scheduler.withdraw(flight.out, late)
            flight.places = places = [place for place in places if place.row.request not in late]
        if not held:
            self._leave_slow([place for place in places if not place.drafts], seconds)
        return filled

    def _bound(self) -> float:
        """Maximum number of seconds for which a step waits for its masks."""
        return max(LEAST_MASK_SECONDS, decode_seconds(self._scheduler.batch, self._costs) or 0.0)

    def _leave_slow(self, places: Sequence[SamplePlace], seconds: float) -> None:
        """Let no further step compute the rows whose next masks are not expected within ``seconds``, until these masks
        are made."""
        for place in self._grammars.slow(places, seconds):
            self._scheduler.unready(place.row.request)
            place.row.waits = not place.row.request.is_ready

    def work_ahead(self, flight: Flight) -> None:
        """After a step has ended, begin to make the masks for which its rows wait."""
        if not flight.places:
            return
        with_drafts = [place for place in flight.places if place.drafts]
        if with_drafts and not self._flights:
            alive = [place for place in with_drafts if place.row.request.decoding and place.row.job is None]
            self._leave_slow(alive, self._bound())
        later = {id(place.row) for other in self._flights for place in other.places}
        for place in flight.places:
            if id(place.row) not in later:
                self._grammars.work_ahead(place.row)

    def _drawn(self, request: Request) -> list[int] | None:
        """Tokens that steps in flight have sampled for a request with a grammar, oldest first; None if one of the steps
        failed."""
        drawn: list[int] = []
        for flight in self._flights:
            for place in flight.places:
                if place.row.request is request and request.resumed_at_step <= flight.out.step:
                    try:
                        drawn += place.accepted(flight.tokens().token_ids)
                    except Exception:  # the step failed; its requests end when the step is collected
                        return None
        return drawn

    def landed(self, flight: Flight, tokens: SampledTokens) -> None:
        """Check the tokens of a step before the scheduler gets them. A token that its mask forbids becomes a failed
        token."""
        if flight.places:
            self._grammars.landed(flight.places, flight.out.step, tokens)

    def complete(self, flight: Flight, now: float) -> list[Request]:
        """End answers after which no further token is allowed. Returns the requests that leave now."""
        leaving: list[Request] = []
        if not flight.places:
            return leaving
        for request in self._grammars.complete(flight.places):
            if request.finish_reason is FinishReason.LENGTH:  # the answer was complete at the length limit
                request.finish_reason = FinishReason.STOP
            elif request.finish_reason is None:
                leaving += self._scheduler.finish(request.request_id, FinishReason.STOP, None, now)
        return leaving
