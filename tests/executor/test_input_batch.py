"""Rows that live as long as their requests, and the flat arrays a step is made of."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np
import pytest

from chairlift.base.sampling_params import SamplingParams
from chairlift.base.sampling_row import SamplingRow
from chairlift.core.kv_cache.manager import NewBlocks
from chairlift.core.scheduler.output import Chunk, NewRow, SchedulerOutput
from chairlift.executor.input_batch import InputBatch

BLOCK = 4


def batch(num_slots: int = 4, num_groups: int = 1) -> InputBatch:
    return InputBatch(num_slots, 32, BLOCK, num_groups)


def sampling(**params: Any) -> SamplingRow:
    return SamplingRow(SamplingParams(**params), seed=1, num_prompt_tokens=6)


def row(slot: int, tokens: list[int], *tables: list[int], computed: int = 0, **params: Any) -> NewRow:
    return NewRow(slot, f"r{slot}", tokens, len(tokens), computed, list(tables), sampling(**params))


def chunk(slot: int, start: int, num_tokens: int, samples: bool = True) -> Chunk:
    return Chunk(slot, start, num_tokens, samples, "prefill")


def test_decodes_and_chunks_lie_side_by_side() -> None:
    rows = batch()
    first = rows.apply(SchedulerOutput(1, joined=[row(2, [5, 6, 7, 8, 9], [3, 1])], chunks=[chunk(2, 0, 5)]))
    assert first.token_ids.tolist() == [5, 6, 7, 8, 9]
    assert first.positions.tolist() == [0, 1, 2, 3, 4]
    assert first.slot_mapping[0].tolist() == [12, 13, 14, 15, 4]
    assert (first.cu_seqlens.tolist(), first.seq_lens.tolist()) == ([0, 5], [5])
    assert [history.tolist() for history in first.histories] == [[5, 6, 7, 8, 9]]
    rows.store(first, [50])
    second = rows.apply(
        SchedulerOutput(
            2,
            joined=[row(0, list(range(20, 27)), [7, 5], computed=1)],
            decode_slots=(2,),
            chunks=[chunk(0, 1, 4, samples=False)],
        )
    )
    assert second.token_ids.tolist() == [50, 21, 22, 23, 24]
    assert second.positions.tolist() == [5, 1, 2, 3, 4]
    assert second.slot_mapping[0].tolist() == [5, 29, 30, 31, 20]
    assert second.cu_seqlens.tolist() == [0, 1, 5]
    assert second.seq_lens.tolist() == [6, 5]
    assert second.slots.tolist() == [2, 0]
    assert second.sample_rows.tolist() == [0]
    assert [table[:2].tolist() for table in second.block_tables[0]] == [[3, 1], [7, 5]]
    assert [history.tolist() for history in second.histories] == [[5, 6, 7, 8, 9, 50]]
    for array in (second.token_ids, second.positions, second.cu_seqlens, second.seq_lens, second.slots):
        assert array.dtype == np.int32
    assert second.slot_mapping[0].dtype == np.int64


def test_decode_rows_stay_until_they_are_replaced() -> None:
    rows = batch()
    joined = [row(slot, [slot, slot], [slot + 1]) for slot in range(2)]
    rows.store(rows.apply(SchedulerOutput(1, joined=joined, chunks=[chunk(0, 0, 2), chunk(1, 0, 2)])), [10, 11])
    rows.store(rows.apply(SchedulerOutput(2, decode_slots=(0, 1))), [20, 21])
    third = rows.apply(SchedulerOutput(3))
    assert (third.token_ids.tolist(), third.positions.tolist()) == ([20, 21], [3, 3])
    rows.store(third, [30, 31])
    blocks = [(1, NewBlocks(0, 1, [9]))]
    fourth = rows.apply(SchedulerOutput(4, left=[0], new_blocks=blocks, decode_slots=(1,)))
    assert (fourth.token_ids.tolist(), fourth.slot_mapping[0].tolist()) == ([31], [36])


@pytest.mark.parametrize("seed", range(20))
def test_a_step_of_the_same_decodes_is_as_if_they_were_named_again(seed: int) -> None:
    rng, length = random.Random(seed), 28
    named, silent = batch(num_groups=2), batch(num_groups=2)
    free = rng.sample(range(100), 60)
    tables: dict[int, list[list[int]]] = {}
    joined, chunks = [], []
    for slot in rng.sample(range(4), rng.randint(1, 4)):
        prompt = [rng.randrange(100) for _ in range(rng.randint(1, 9))]
        # What a row will need is there from the start, or comes block by block, per group.
        tables[slot] = [[free.pop() for _ in range(rng.choice((-(-len(prompt) // BLOCK), 7)))] for _ in range(2)]
        joined.append(row(slot, prompt, *([*table] for table in tables[slot])))
        chunks.append(chunk(slot, 0, len(prompt)))
    step = SchedulerOutput(0, joined=joined, chunks=chunks)
    kept: list[bool] = []
    last, order = None, tuple(tables)
    for number in range(1, length - 9):
        one, other = (
            named.apply(step),
            silent.apply(step if number < 3 else dataclasses.replace(step, decode_slots=None)),
        )
        for field in dataclasses.fields(one):
            if field.name != "sampling":
                assert_equal(getattr(one, field.name), getattr(other, field.name))
        assert one.sampling == other.sampling
        kept.append(last is not None and other.sampling is last.sampling)
        token_ids = [rng.randrange(100) for _ in order]
        for rows, done in ((named, one), (silent, other)):
            rows.store(done, token_ids)
        new = []
        for slot, length_now in zip(other.slots.tolist(), other.seq_lens.tolist(), strict=True):
            for group, table in enumerate(tables[slot]):
                if length_now // BLOCK >= len(table):
                    table.append(free.pop())
                    new.append((slot, NewBlocks(group, len(table) - 1, table[-1:])))
        copies = [(0, 1, 2)] if rng.random() < 0.3 else []
        last, step = other, SchedulerOutput(number, new_blocks=new, copies=copies, decode_slots=order)
    assert kept == [False, False] + [True] * (len(kept) - 2)


def assert_equal(one: Any, other: Any) -> None:
    if isinstance(one, np.ndarray):
        assert one.dtype == other.dtype
        assert one.tolist() == other.tolist()
    elif isinstance(one, list) and one and isinstance(one[0], np.ndarray):
        for each, like in zip(one, other, strict=True):
            assert_equal(each, like)
    else:
        assert one == other


def test_a_step_behind_chunks_or_departures_is_laid_out_anew() -> None:
    rows = batch()
    both = [row(0, [1, 2, 3], [1]), row(1, [4, 5], [2])]
    rows.store(rows.apply(SchedulerOutput(1, joined=both, chunks=[chunk(0, 0, 3), chunk(1, 0, 2)])), [6, 7])
    rows.store(rows.apply(SchedulerOutput(2, decode_slots=(0, 1))), [8, 9])
    alone = rows.apply(SchedulerOutput(3, left=[1], decode_slots=(0,)))
    assert (alone.slots.tolist(), alone.positions.tolist()) == ([0], [4])
    rows.store(alone, [10])
    joined = rows.apply(SchedulerOutput(4, joined=[row(1, [11, 12], [3])], chunks=[chunk(1, 0, 1, samples=False)]))
    assert (joined.slots.tolist(), joined.token_ids.tolist()) == ([0, 1], [10, 11])
    rows.store(joined, [13])
    behind = rows.apply(SchedulerOutput(5))
    assert (behind.slots.tolist(), behind.token_ids.tolist(), behind.positions.tolist()) == ([0], [13], [6])
    rows.store(behind, [14])
    again = rows.apply(SchedulerOutput(6, chunks=[chunk(1, 1, 1)]))
    assert (again.slots.tolist(), again.token_ids.tolist(), again.positions.tolist()) == ([0, 1], [14, 12], [7, 1])
    rows.store(again, [15, 16])
    rows.store(rows.apply(SchedulerOutput(7)), [17])
    other = rows.apply(SchedulerOutput(8, left=[0], joined=[row(0, [20, 21], [4], computed=1)]))
    assert (other.slots.tolist(), other.token_ids.tolist(), other.positions.tolist()) == ([0], [21], [1])


@pytest.mark.parametrize("place", ["take", "_join", "_flatten", "_advance"])
@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_steps_behind_one_that_fails_are_as_if_it_had_not(place: str, number: int) -> None:
    """With look-ahead they are scheduled before anybody knows; what they leave out is as in the step that failed."""

    class Failing(InputBatch):
        failing = False

        def __getattribute__(self, name: str) -> Any:
            if name == place and self.failing:
                raise MemoryError
            return super().__getattribute__(name)

    whole, broken = batch(), Failing(4, 32, BLOCK, 1)
    steps = [
        SchedulerOutput(1, joined=[row(0, [1, 2, 3], [1])], chunks=[chunk(0, 0, 3)]),
        SchedulerOutput(2, joined=[row(1, [4, 5], [2])], decode_slots=(0,), chunks=[chunk(1, 0, 2)]),
        SchedulerOutput(3, new_blocks=[(0, NewBlocks(0, 1, [3]))], decode_slots=(0, 1)),
        SchedulerOutput(4),
        SchedulerOutput(5, left=[0], joined=[row(0, [6, 7], [8])], decode_slots=(1,), chunks=[chunk(0, 0, 2)]),
        SchedulerOutput(6, decode_slots=(1, 0)),
    ]
    for step in steps:
        one, broken.failing = whole.apply(step), step.step == number
        try:
            other = broken.apply(step)
        except MemoryError:
            continue
        for field in ("positions", "cu_seqlens", "seq_lens", "slots", "block_tables", "slot_mapping", "sample_rows"):
            assert_equal(getattr(one, field), getattr(other, field))


def test_a_step_of_the_same_decodes_has_its_own_copies() -> None:
    rows = batch()
    rows.store(rows.apply(SchedulerOutput(1, joined=[row(0, [1, 2], [1])], chunks=[chunk(0, 0, 2)])), [3])
    rows.store(rows.apply(SchedulerOutput(2, decode_slots=(0,), copies=[(0, 1, 2)])), [4])
    step = rows.apply(SchedulerOutput(3, swap_out=[(0, 3, 4)], copies=[(0, 5, 6)], swap_in=[(0, 7, 8)]))
    assert (step.swap_out, step.copies, step.swap_in) == ([(0, 3, 4)], [(0, 5, 6)], [(0, 7, 8)])


def test_a_row_keeps_nothing_of_its_last_owner() -> None:
    rows = batch(1, num_groups=2)
    long = row(0, list(range(1, 20)), [1, 2, 3, 4, 5], [6, 7, 8, 9, 10], temperature=0.5)
    rows.store(rows.apply(SchedulerOutput(1, joined=[long], chunks=[chunk(0, 0, 19)])), [1])
    rows.apply(SchedulerOutput(2, left=[0], decode_slots=()))
    assert rows.sampling == [None]
    assert (rows.num_computed[0], rows.num_prompt_tokens[0]) == (0, 0)
    assert not any(table.any() for table in rows.block_tables)
    short = row(0, [7, 8], [11], [12], temperature=0.0)
    flat = rows.apply(SchedulerOutput(3, joined=[short], chunks=[chunk(0, 0, 2)]))
    assert flat.sampling == [short.sampling]
    assert [history.tolist() for history in flat.histories] == [[7, 8]]
    assert [table[0].tolist() for table in rows.block_tables] == [[11] + [0] * 7, [12] + [0] * 7]


def test_a_row_may_be_taken_in_the_step_in_which_it_is_given_up() -> None:
    rows = batch(1)
    rows.apply(SchedulerOutput(1, joined=[row(0, [1, 2, 3], [1])], chunks=[chunk(0, 0, 3)]))
    flat = rows.apply(SchedulerOutput(2, left=[0], joined=[row(0, [9], [2])], chunks=[chunk(0, 0, 1)]))
    assert (flat.token_ids.tolist(), flat.slot_mapping[0].tolist()) == ([9], [8])


def test_groups_have_tables_of_their_own() -> None:
    rows = batch(2, num_groups=2)
    rows.apply(SchedulerOutput(1, joined=[row(0, [1, 2, 3], [1], [5])], chunks=[chunk(0, 0, 3)]))
    flat = rows.apply(SchedulerOutput(2, new_blocks=[(0, NewBlocks(1, 1, [6]))], chunks=[chunk(0, 3, 1)]))
    assert [mapping.tolist() for mapping in flat.slot_mapping] == [[7], [23]]
    assert [table.tolist() for table in flat.block_tables] == [[[1]], [[5]]]


def test_a_failed_row_stores_a_harmless_id() -> None:
    rows = batch()
    joined = [row(slot, [3, 4], [slot + 1]) for slot in range(2)]
    flat = rows.apply(SchedulerOutput(1, joined=joined, chunks=[chunk(0, 0, 2), chunk(1, 0, 2)]))
    rows.store(flat, [-1, 8])
    after = rows.apply(SchedulerOutput(2, decode_slots=(0, 1)))
    assert after.token_ids.tolist() == [0, 8]


def test_a_chunk_with_several_sample_positions_goes_on_with_the_last_token() -> None:
    rows = batch()
    new = [row(slot, [5, 6, 7, 8], [slot + 1]) for slot in range(2)]
    rows.store(rows.apply(SchedulerOutput(1, joined=new[:1], chunks=[chunk(0, 0, 4)])), [9])
    chunks = [Chunk(1, 1, 3, 3, "prefill")]
    step = rows.apply(SchedulerOutput(2, joined=[dataclasses.replace(new[1])], decode_slots=(0,), chunks=chunks))
    assert (step.sample_rows.tolist(), step.sample_tokens.tolist()) == ([0, 1, 1, 1], [0, 1, 2, 3])
    assert (step.sample_slots.tolist(), step.sample_lengths.tolist()) == ([0, 1, 1, 1], [5, 2, 3, 4])
    assert [history.tolist() for history in step.histories][1:] == [[5, 6], [5, 6, 7], [5, 6, 7, 8]]
    rows.arrived(rows.expect(step), [10, 11, 12, 13])
    assert rows.tokens[:2, :6].tolist() == [[5, 6, 7, 8, 9, 10], [5, 6, 7, 8, 13, 0]]
    rows.store(step, [14, 15, 16, 17])
    assert rows.tokens[:2, :6].tolist() == [[5, 6, 7, 8, 9, 14], [5, 6, 7, 8, 17, 0]]


@pytest.mark.parametrize(("start", "asked"), [(0, True), (2, True), (4, True), (5, False)])
def test_prompt_logprobs_are_asked_for_chunks_with_a_next_prompt_token(start: int, asked: bool) -> None:
    rows = batch()
    new = row(0, [1, 2, 3, 4, 5, 6], [1, 2], computed=start, prompt_logprobs=0)
    flat = rows.apply(SchedulerOutput(1, joined=[new], chunks=[chunk(0, start, 1)]))
    assert [(r, first, known.tolist()) for r, first, known in flat.prompt_rows] == (
        [(0, start, [1, 2, 3, 4, 5, 6])] if asked else []
    )
