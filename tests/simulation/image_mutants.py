"""Bugs of serving images, injected one at a time. The simulator's worlds with images must detect every one of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from chairlift.base.image_spans import ImageTile, cut_by
from chairlift.core.kv_cache import manager
from chairlift.core.request import Request
from chairlift.core.rows.images import ImageRows
from chairlift.core.scheduler import preemptor
from chairlift.core.scheduler.batch import Batch
from chairlift.core.scheduler.output import Chunk, NewRow, SchedulerOutput
from chairlift.core.scheduler.preemptor import Preemptor
from chairlift.core.scheduler.prompt_budget import PromptBudget
from chairlift.core.scheduler.step import ScheduledStep
from chairlift.engine import images
from chairlift.engine.core import EngineCore
from chairlift.engine.images import Images
from chairlift.executor.input_batch import InputBatch
from tests.simulation.mutants import Patch

__all__ = ["IMAGE_MUTANTS"]

IMAGE_MUTANTS: dict[str, Callable[[Patch], None]] = {}


def mutant(plant: Callable[[Patch], None]) -> Callable[[Patch], None]:
    IMAGE_MUTANTS[plant.__name__] = plant
    return plant


def _with_rows(change: Callable[[int, int, bytes, int], tuple[int, int, bytes, int]]) -> Callable[[Patch], None]:
    """Make a bug in which ``change`` alters each (index in the batch, count, key, first row) of the batch's image
    rows."""
    image_rows = InputBatch._image_rows

    def wrong(self: InputBatch, chunks: list[Chunk], at: int) -> list[tuple[int, int, bytes, int]]:
        return [change(*each) for each in image_rows(self, chunks, at)]

    return lambda patch: patch(InputBatch, "_image_rows", wrong)


@mutant
def rows_shifted_by_one(patch: Patch) -> None:
    _with_rows(lambda index, count, key, row: (index, count, key, row + 1))(patch)


@mutant
def every_chunk_begins_at_the_first_row(patch: Patch) -> None:
    _with_rows(lambda index, count, key, row: (index, count, key, 0))(patch)


@mutant
def last_row_of_a_tile_lost(patch: Patch) -> None:
    _with_rows(lambda index, count, key, row: (index, count - 1, key, row))(patch)


@mutant
def only_the_first_image_of_a_prompt_read(patch: Patch) -> None:
    join = InputBatch._join
    patch(InputBatch, "_join", lambda self, row: join(self, dataclasses.replace(row, images=row.images[:1])))


@mutant
def images_of_the_row_before_kept(patch: Patch) -> None:
    join = InputBatch._join

    def wrong(self: InputBatch, row: NewRow) -> None:
        before = self.images.get(row.slot)
        join(self, row)
        if before is not None:
            self.images.setdefault(row.slot, before)

    clear = InputBatch._clear

    def keeping(self: InputBatch, slot: int) -> None:
        before = self.images.get(slot)
        clear(self, slot)
        if before is not None:
            self.images[slot] = before

    patch(InputBatch, "_join", wrong)
    patch(InputBatch, "_clear", keeping)


@mutant
def images_lost_when_a_preempted_request_joins_again(patch: Patch) -> None:
    seat = Batch.seat

    def wrong(self: Batch, request: Request, *args: Any) -> None:
        images = request.images
        if request.num_preemptions:
            request.images = ()
        seat(self, request, *args)
        request.images = images

    patch(Batch, "seat", wrong)


@mutant
def placeholders_alone_identify_a_block(patch: Patch) -> None:
    patch(ImageRows, "marks", lambda self, request, start, end: b"")


@mutant
def request_ready_after_its_first_tile(patch: Patch) -> None:
    end = Images._end

    def wrong(self: Images, key: bytes, error: str) -> None:
        for each in self._waiting.values():
            if key in each.missing:
                each.missing = {key}
        end(self, key, error)

    patch(Images, "_end", wrong)


@mutant
def rows_dropped_while_another_request_uses_them(patch: Patch) -> None:
    forget = Images.forget

    def wrong(self: Images, request: Request) -> None:
        keys = self._of.get(request.request_id, ())
        forget(self, request)
        for key in keys:
            if self._memory is not None and self._memory.holds(key) and key not in self._unused:
                self._memory.drop(key)

    patch(Images, "forget", wrong)


@mutant
def unused_rows_still_counted_after_they_are_used_again(patch: Patch) -> None:
    add = Images.add

    def wrong(self: Images, requests: Sequence[Request], tiles: Sequence[ImageTile]) -> None:
        unused = self._unused.copy()
        add(self, requests, tiles)
        self._unused = unused

    patch(Images, "add", wrong)


@mutant
def aborted_request_keeps_its_tiles(patch: Patch) -> None:
    patch(Images, "forget", lambda self, request: self._waiting.pop(request.request_id, None))


@mutant
def broken_image_fails_one_request_and_the_others_wait(patch: Patch) -> None:
    end = Images._end

    def wrong(self: Images, key: bytes, error: str) -> None:
        if error:
            others = [each for each in self._waiting.values() if key in each.missing][1:]
            for each in others:
                each.missing.discard(key)
                each.missing.add(b"never")
        end(self, key, error)

    patch(Images, "_end", wrong)


@mutant
def broken_image_taken_for_an_empty_one(patch: Patch) -> None:
    end = Images._end
    patch(Images, "_end", lambda self, key, error: end(self, key, ""))


@mutant
def later_answers_of_a_prompt_do_not_wait(patch: Patch) -> None:
    add = Images.add

    def wrong(self: Images, requests: Sequence[Request], tiles: Sequence[ImageTile]) -> None:
        add(self, requests, tiles)
        for request in requests[1:]:
            request.is_ready = True

    patch(Images, "add", wrong)


@mutant
def ready_requests_told_only_once_all_are_encoded(patch: Patch) -> None:
    """Bug: a request waits for other requests' images too, and waits for ever if one of these images is lost."""
    take_ready = Images.take_ready

    def wrong(self: Images) -> Any:
        if self._ready and len(self._waiting) > 1:
            self._ready.clear()
        return take_ready(self)

    patch(Images, "take_ready", wrong)


@mutant
def chunk_after_an_image_reads_it_again(patch: Patch) -> None:
    image_rows = InputBatch._image_rows

    def wrong(self: InputBatch, chunks: list[Chunk], at: int) -> list[tuple[int, int, bytes, int]]:
        found = image_rows(self, chunks, at)
        for chunk in chunks:
            spans = self.images.get(chunk.slot, ())
            if spans and spans[-1].end <= chunk.start:
                found.append((at, 1, spans[-1].key, 0))
            at += chunk.num_tokens
        return found

    patch(InputBatch, "_image_rows", wrong)


@mutant
def scheduler_sends_images_of_the_first_of_several_joined_rows(patch: Patch) -> None:
    schedule = EngineCore._launch

    def wrong(self: EngineCore, out: SchedulerOutput, now: float) -> None:
        if len(out.joined) > 1:
            images = out.joined[0].images
            out.joined = [dataclasses.replace(row, images=images) for row in out.joined]
        schedule(self, out, now)

    patch(EngineCore, "_launch", wrong)


@mutant
def chunk_cuts_an_image_that_must_be_whole(patch: Patch) -> None:
    patch(PromptBudget, "_uncut", lambda self, request, num_tokens, step: num_tokens)


@mutant
def prefix_hit_ends_inside_an_image_that_must_be_whole(patch: Patch) -> None:
    patch(manager, "whole_before", lambda request, index: index)


def _cuts_images(patch: Patch, name: str) -> None:
    """Make a bug in which one method of the preemptor does not see that it cuts an image."""
    method = getattr(Preemptor, name)

    def wrong(*args: Any) -> Any:
        with pytest.MonkeyPatch.context() as planted:
            planted.setattr(preemptor, "whole_before", lambda request, index: index)
            return method(*args)

    patch(Preemptor, name, wrong)


@mutant
def lost_blocks_begin_inside_an_image_that_must_be_whole(patch: Patch) -> None:
    _cuts_images(patch, "_drop_tail")


@mutant
def saved_blocks_end_inside_an_image_that_must_be_whole(patch: Patch) -> None:
    _cuts_images(patch, "_swap")


@mutant
def image_that_must_be_whole_waits_for_ever(patch: Patch) -> None:
    """Bug: an image that must be computed in one step may not exceed the prompt budget, so a large image waits for
    ever."""

    def wrong(self: PromptBudget, request: Request, num_tokens: int, step: ScheduledStep) -> int:
        start = request.num_computed_tokens
        span = cut_by(request.images, start + num_tokens)
        return num_tokens if span is None else span.position - start

    patch(PromptBudget, "_uncut", wrong)


@mutant
def prompts_with_images_as_long_as_others_beside_decodes(patch: Patch) -> None:
    reads = ImageRows._reads
    patch(ImageRows, "_reads", staticmethod(lambda request: reads(request) and not request.slot))


@mutant
def each_prompt_with_images_gets_the_tokens_of_all(patch: Patch) -> None:
    patch(ImageRows, "spent", lambda self, request, num_tokens: None)


@mutant
def rows_given_up_and_still_referenced(patch: Patch) -> None:
    give_up = Images._give_up

    def wrong(self: Images, key: bytes) -> None:
        with pytest.MonkeyPatch.context() as planted:
            planted.setattr(Images, "_note_rows", lambda self, request: None)
            give_up(self, key)

    patch(Images, "_give_up", wrong)


@mutant
def rows_given_up_are_not_dropped(patch: Patch) -> None:
    """Bug: rows stay in memory although their bytes count as free."""

    def wrong(self: Images, key: bytes) -> None:
        self.num_bytes -= self._sizes[key]

    patch(Images, "_drop", wrong)


@mutant
def rows_of_earlier_requests_given_up(patch: Patch) -> None:
    """Bug: requests may take each other's rows in turns."""
    held_rows = Images._held_rows

    def wrong(self: Images, needy: Request) -> Any:
        sequence, needy.sequence = needy.sequence, -1
        found = list(held_rows(self, needy))
        needy.sequence = sequence
        return found

    patch(Images, "_held_rows", wrong)


@mutant
def rows_that_a_running_request_must_read_given_up(patch: Patch) -> None:
    held_rows = Images._held_rows
    patch(
        Images,
        "_held_rows",
        lambda self, needy: [dataclasses.replace(rows, may_go=True) for rows in held_rows(self, needy)],
    )


@mutant
def given_up_rows_never_encoded_again(patch: Patch) -> None:
    patch(Images, "encode_again", lambda self, request: None)


@mutant
def rows_in_memory_encoded_again(patch: Patch) -> None:
    def wrong(self: Images, request: Request) -> None:
        missing = {span.key for span in request.images}
        for key in missing:
            self._queue.setdefault(key, self._tiles[key])
        self._wait(request, missing)

    patch(Images, "encode_again", wrong)


@mutant
def request_joins_without_its_rows(patch: Patch) -> None:
    patch(ImageRows, "obstacle", lambda self, request: False)


@mutant
def blocks_of_positions_without_rows_lost(patch: Patch) -> None:
    """Bug: a request keeps its row when it loses the KV of images whose rows were given up."""
    drop_tail = Preemptor._drop_tail

    def wrong(self: Preemptor, request: Request, *args: Any) -> bool:
        end, request.rows_lost_until = request.rows_lost_until, 0
        dropped = drop_tail(self, request, *args)
        request.rows_lost_until = end
        return dropped

    patch(Preemptor, "_drop_tail", wrong)


@mutant
def policy_told_twice_of_one_wait(patch: Patch) -> None:
    wait = Batch.wait

    def wrong(self: Batch, request: Request, now: float) -> None:
        request.is_queued = False
        wait(self, request, now)

    patch(Batch, "wait", wrong)


@mutant
def next_tile_waits_for_room_for_ever(patch: Patch) -> None:
    patch(images, "rows_to_give_up", lambda *args: [])
