"""Times of steps, for the cost model, the governor and the comparison with the machine's limits."""

from __future__ import annotations

from chairlift.core.scheduler.batch import Batch
from chairlift.core.scheduler.costs import Costs
from chairlift.core.scheduler.governor_loop import GovernorLoop
from chairlift.core.scheduler.output import StepResult
from chairlift.core.scheduler.scheduler import Scheduler
from chairlift.engine.collective_share import CollectiveShare
from chairlift.engine.flight import Flight
from chairlift.engine.floor_share import FloorShare
from chairlift.engine.step_log import StepRecord

__all__ = ["CoreTimes", "decode_seconds"]


def decode_seconds(batch: Batch, costs: Costs) -> float | None:
    """Seconds that a decode step of the running requests takes, according to the cost model; None if no request
    runs."""
    if not batch.running:
        return None
    return costs.model.step_seconds(batch.features(len(batch.running)))


class CoreTimes:
    """Measures the steps of a core."""

    def __init__(self, scheduler: Scheduler, costs: Costs, governor: GovernorLoop | None) -> None:
        self._scheduler = scheduler
        self._costs = costs
        self._governor = governor
        self.floor: FloorShare | None = None
        """Compares step times with the limits of this machine; None if the limits were not measured."""
        self.collectives: CollectiveShare | None = None
        """Share of step time in which the model's processes wait for each other; None for a model on one process."""
        self._landed_at = self._drafted_seconds = 0.0

    def landed(self, flight: Flight, result: StepResult, record: StepRecord) -> None:
        """Learn from the oldest step in flight, which has ended."""
        out = flight.out
        start = flight.start
        end = record.end
        costs = self._costs
        # With look-ahead, a step is scheduled early, but begins only when the previous step has ended.
        since = max(start, self._landed_at)
        drafting = self._drafting_seconds()
        if self._governor is not None:
            self._governor.window.saw(out, result, end - since, end)
        drafts = self._scheduler.drafts
        if result.sampled and (costs.wants(out) or (drafts is not None and drafts.measures())):
            costs.observe(record.features, end - since - drafting - flight.mask_seconds, costs.num_copied(out))
        was_busy = out.num_decodes > 0 or len(out.chunks) > len(out.joined)
        if was_busy and not out.swap_out and not out.swap_in:
            costs.passed(record.features, end - since, end - self._landed_at)
        if self.floor is not None:
            sampled = out.num_decodes + sum(chunk.samples for chunk in out.chunks)
            begin = self._landed_at if was_busy else since
            self.floor.landed(record.features, sampled, out.num_held, end - begin)
        if self.collectives is not None:
            self.collectives.landed(end - since)
        self._landed_at = end

    def _drafting_seconds(self) -> float:
        """Seconds that making drafts took since the last call. Call this for every step: the drafter measures this
        time itself, so that it must not count as part of a step."""
        drafts = self._scheduler.drafts
        before = self._drafted_seconds
        self._drafted_seconds = drafts.speculator.drafting_seconds if drafts else 0.0
        return max(0.0, self._drafted_seconds - before)
