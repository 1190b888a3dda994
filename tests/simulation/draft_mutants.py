"""Bugs in speculative decoding, injected one at a time. The simulator's worlds with drafts must detect each of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from chairlift.core.kv_cache.block_tables import BlockTables
from chairlift.core.request import Request
from chairlift.core.scheduler.decode_rows import DecodeRows
from chairlift.core.scheduler.drafts import Drafts
from chairlift.core.scheduler.output import FAILED_ROW, Chunk
from chairlift.core.scheduler.step import ScheduledStep
from chairlift.executor.input_batch import InputBatch
from tests.simulation.mutants import Patch

DRAFT_MUTANTS: dict[str, Callable[[Patch], None]] = {}


def mutant(plant: Callable[[Patch], None]) -> Callable[[Patch], None]:
    DRAFT_MUTANTS[plant.__name__] = plant
    return plant


@mutant
def kv_of_the_token_to_come_published(patch: Patch) -> None:
    accept = Drafts.accept

    def wrong(self: Drafts, flight: ScheduledStep, *args: Any) -> list[Request | None]:
        found = accept(self, flight, *args)
        for request, _ in flight.verifies:
            if request.slot >= 0:
                self._kv.publish(request, len(request.token_ids))
        return found

    patch(Drafts, "accept", wrong)


@mutant
def accepted_after_a_mismatch(patch: Patch) -> None:
    patch(Chunk, "num_accepted", lambda self, tokens: len(self.drafts))


@mutant
def one_too_few_accepted(patch: Patch) -> None:
    """Bug: one draft too few is accepted. The output does not change, but a position is computed twice."""
    accepted = Chunk.num_accepted
    settle = InputBatch._settle

    def wrong(self: InputBatch, verifies: Any, token_ids: list[int]) -> None:
        settle(self, verifies, token_ids)
        for first, slot, chunk in verifies:
            if accepted(chunk, token_ids[first : first + chunk.samples]):
                self.num_computed[slot] -= 1

    patch(InputBatch, "_settle", wrong)


@mutant
def executor_does_not_roll_back(patch: Patch) -> None:
    settle = InputBatch._settle

    def wrong(self: InputBatch, verifies: Any, token_ids: list[int]) -> None:
        settle(self, verifies, token_ids)
        for _, slot, chunk in verifies:
            self.num_computed[slot] = chunk.end

    patch(InputBatch, "_settle", wrong)


@mutant
def token_behind_the_accepted_ones_not_stored(patch: Patch) -> None:
    def wrong(self: InputBatch, verifies: Any, token_ids: list[int]) -> None:
        for first, slot, chunk in verifies:
            self.num_computed[slot] = chunk.start + 1 + chunk.num_accepted(token_ids[first : first + chunk.samples])

    patch(InputBatch, "_settle", wrong)


@mutant
def drafts_count_as_computed(patch: Patch) -> None:
    take = Drafts._take

    def wrong(self: Drafts, request: Request, right: Sequence[int], *args: Any) -> None:
        take(self, request, right, *args)
        request.num_computed_tokens += 1
        self._batch.num_computed_tokens += 1

    patch(Drafts, "_take", wrong)


@mutant
def rejected_positions_may_end_a_request(patch: Patch) -> None:
    accept = Drafts.accept

    def wrong(self: Drafts, flight: ScheduledStep, tokens: Sequence[int], sampled: Any) -> list[Request | None]:
        found = accept(self, flight, tokens, sampled)
        place = len(tokens) - sum(chunk.samples for _, chunk in flight.verifies)
        for request, chunk in flight.verifies:
            found[place : place + chunk.samples] = [request] * chunk.samples
            place += chunk.samples
        return found

    patch(Drafts, "accept", wrong)


@mutant
def tokens_behind_a_stop_kept(patch: Patch) -> None:
    def wrong(self: Drafts, request: Request, right: Sequence[int], sampled: Any, place: int) -> None:
        for at, token in enumerate(right):
            request.token_ids.append(token)
            sampled[place + at] = request
        request.num_computed_tokens += len(right) - 1
        self._batch.num_computed_tokens += len(right) - 1

    patch(Drafts, "_take", wrong)


@mutant
def drafts_beyond_the_end_of_the_answer(patch: Patch) -> None:
    most = Drafts._max_drafts
    patch(Drafts, "_max_drafts", staticmethod(lambda request: most(request) + (most(request) > 0)))


@mutant
def window_left_behind_before_it_was_read(patch: Patch) -> None:
    make_room, leave = Drafts._make_room, BlockTables._release_passed

    def wrong(self: Drafts, request: Request, chunk: Chunk, step: ScheduledStep) -> bool:
        def early(tables: BlockTables, group: int, grows: Request, in_flight: int) -> None:
            request.num_computed_tokens = chunk.end
            leave(tables, group, grows, in_flight)
            request.num_computed_tokens = chunk.start

        BlockTables._release_passed = early  # type: ignore[method-assign]
        try:
            return make_room(self, request, chunk, step)
        finally:
            BlockTables._release_passed = leave  # type: ignore[method-assign]

    patch(Drafts, "_make_room", wrong)


@mutant
def row_stays_among_the_decodes(patch: Patch) -> None:
    make_room, stop = Drafts._make_room, DecodeRows.stop

    def wrong(self: Drafts, request: Request, chunk: Chunk, step: ScheduledStep) -> bool:
        made = make_room(self, request, chunk, step)
        self._decodes.start([request])
        return made

    patch(Drafts, "_make_room", wrong)
    assert stop


@mutant
def drafts_beyond_the_budget(patch: Patch) -> None:
    fitting = Drafts._num_fitting

    def wrong(self: Drafts, request: Request, count: int) -> int:
        return fitting(self, request, count + 20)

    def choose(self: Any, rows: Any, step: Any, budget: int) -> Any:
        return [(request, [3] * 24) for request, _ in rows]

    from chairlift_lab.sim.drafts import ScriptedDrafts

    patch(Drafts, "_num_fitting", wrong)
    patch(ScriptedDrafts, "choose", choose)


@mutant
def verified_rows_never_decode_again(patch: Patch) -> None:
    patch(Drafts, "rejoin", lambda self, flight: None)


@mutant
def ended_rows_decode_again(patch: Patch) -> None:
    patch(Drafts, "rejoin", lambda self, flight: self._decodes.start([request for request, _ in flight.verifies]))


@mutant
def blocks_of_drafts_not_sent(patch: Patch) -> None:
    make_room = Drafts._make_room

    def wrong(self: Drafts, request: Request, chunk: Chunk, step: ScheduledStep) -> bool:
        before = list(step.out.new_blocks)
        made = make_room(self, request, chunk, step)
        step.out.new_blocks = before
        return made

    patch(Drafts, "_make_room", wrong)


@mutant
def sample_positions_counted_from_the_first_chunk(patch: Patch) -> None:
    verifies = InputBatch._verifies
    patch(InputBatch, "_verifies", staticmethod(lambda chunks, num_decodes: verifies(chunks, 0)))


@mutant
def longest_answer_not_noticed(patch: Patch) -> None:
    accept = Drafts.accept

    def wrong(self: Drafts, flight: ScheduledStep, *args: Any) -> list[Request | None]:
        finals = list(flight.finals)
        found = accept(self, flight, *args)
        flight.finals = finals
        return found

    patch(Drafts, "accept", wrong)


@mutant
def token_of_the_last_position_taken(patch: Patch) -> None:
    accept = Drafts.accept

    def wrong(self: Drafts, flight: ScheduledStep, tokens: Sequence[int], sampled: Any) -> list[Request | None]:
        given, place = list(tokens), len(tokens) - sum(chunk.samples for _, chunk in flight.verifies)
        for _, chunk in flight.verifies:
            accepted = chunk.num_accepted(given[place : place + chunk.samples])
            given[place + accepted] = given[place + chunk.samples - 1]
            place += chunk.samples
        return accept(self, flight, given, sampled)

    patch(Drafts, "accept", wrong)


@mutant
def failed_position_does_not_end_the_request(patch: Patch) -> None:
    accept = Drafts.accept

    def wrong(self: Drafts, flight: ScheduledStep, tokens: Sequence[int], sampled: Any) -> list[Request | None]:
        found = accept(self, flight, tokens, sampled)
        first = len(tokens) - sum(chunk.samples for _, chunk in flight.verifies)
        late = [place for place in range(first, len(tokens)) if tokens[place] == FAILED_ROW]
        return [None if place in late else each for place, each in enumerate(found)]

    patch(Drafts, "accept", wrong)
