"""The resident decode state does what the host's InputBatch does, step after step, from differences alone."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from chairlift.base.sampling_params import SamplingParams
from chairlift.base.sampling_row import SamplingRow
from chairlift.base.step_batch import StepBatch
from chairlift.core.kv_cache.manager import NewBlocks
from chairlift.core.scheduler.output import NewRow, SchedulerOutput
from chairlift.errors import InvariantError
from chairlift.executor.input_batch import InputBatch
from chairlift.kernels.triton.decode_state import DecodeInputs, DecodeState
from tests.kernels.triton.probes import seeds
from tests.sweep import sweep

SLOTS, LENGTH = 5, 40


class Both:
    """The truth and the state under test, driven by the same steps."""

    def __init__(self, draw: random.Random, device: torch.device) -> None:
        self.draw = draw
        self.block_size, self.groups = draw.choice([1, 3, 16]), draw.choice([1, 2])
        self.batch = InputBatch(SLOTS, LENGTH, self.block_size, self.groups)
        self.width = self.batch.block_tables[0].shape[1]
        self.state = DecodeState(
            SLOTS, self.width, self.groups, self.block_size, device, most_differences=draw.choice([8, 1 << 10])
        )
        self.inputs = self.state.inputs(SLOTS)
        self.lengths: dict[int, int] = {}
        self.decodes: list[int] = []

    def step(self, number: int) -> None:
        out = SchedulerOutput(number)
        for slot in [slot for slot in self.lengths if self.draw.random() < 0.2 or self.lengths[slot] == LENGTH - 1]:
            del self.lengths[slot]
            out.left.append(slot)
        free = [slot for slot in range(SLOTS) if slot not in self.lengths]
        for slot in self.draw.sample(free, self.draw.randint(0, len(free))):
            out.joined.append(self.join(slot))
        out.new_blocks = [self.grow(slot, group) for slot in self.lengths for group in range(self.groups)]
        if out.left or out.joined:
            self.decodes = self.draw.sample(list(self.lengths), len(self.lengths))
            out.decode_slots = tuple(self.decodes)
        self.compare(out)

    def join(self, slot: int) -> NewRow:
        known = self.draw.randint(1, 20)
        blocks = -(-known // self.block_size)
        tables = [[self.draw.randint(1, 99) for _ in range(blocks)] for _ in range(self.groups)]
        tokens = [self.draw.randint(0, 999) for _ in range(known)]
        self.lengths[slot] = known
        return NewRow(slot, f"r{slot}", tokens, 1, known - 1, tables, SamplingRow(SamplingParams(), 1, 1))

    def grow(self, slot: int, group: int) -> tuple[int, NewBlocks]:
        """The block that the row's next token needs, on time or early."""
        return slot, NewBlocks(group, (self.lengths[slot] - 1) // self.block_size, [self.draw.randint(1, 99)])

    def send(self, out: SchedulerOutput, truth: StepBatch) -> None:
        state, rows = self.state, np.full(SLOTS, -1)
        for row in out.joined:
            state.note("tokens", np.array([row.slot]), np.array(row.token_ids[-1:]))
        for group, tables in enumerate(truth.block_tables):
            state.note_tables(group, truth.slots, tables)
        rows[: len(truth.slots)] = truth.slots
        state.note("slots", np.arange(SLOTS), rows)
        state.note("num_computed", truth.slots, truth.positions)
        state.flush()
        state.forget(truth.slots)

    def compare(self, out: SchedulerOutput) -> None:
        """Values that the device advanced are not sent again."""
        state, inputs, count = self.state, self.inputs, len(self.decodes)
        truth = self.batch.apply(out)
        self.send(out, truth)
        state.begin_step(inputs)
        state.advanced(truth.slots, truth.seq_lens)
        assert inputs.seq_lens[count:].tolist() == [0] * (SLOTS - count)
        assert (inputs.slot_mapping[:, count:] == -1).all() and (inputs.token_ids[count:] == 0).all()
        sampled = [self.draw.choice([-1, self.draw.randint(0, 999)]) for _ in self.decodes]
        if count:
            for ours, theirs in [
                (inputs.token_ids, truth.token_ids),
                (inputs.positions, truth.positions),
                (inputs.seq_lens, truth.seq_lens),
            ]:
                assert ours[:count].tolist() == theirs.tolist()
            assert inputs.slot_mapping[:, :count].tolist() == [mapping.tolist() for mapping in truth.slot_mapping]
            self.batch.store(truth, sampled)
        filled = torch.tensor(sampled + [5] * (SLOTS - count), dtype=torch.int32, device=state.tokens.device)
        state.store(state.slots, filled)
        for slot in self.decodes:
            self.lengths[slot] += 1


@pytest.mark.parametrize("count", seeds(4))
def test_the_decode_state_equals_the_input_batch(
    request: pytest.FixtureRequest, count: int, device: torch.device
) -> None:
    def check(seed: int) -> None:
        both = Both(random.Random(seed), device)
        for number in range(12):
            both.step(number)

    sweep(request, count, check)


def small(device: torch.device, **settings: Any) -> DecodeState:
    return DecodeState(3, 4, 2, 16, device, **settings)


def ints(*values: Any) -> Any:
    return np.array(values, dtype=np.int32)


def test_later_notes_win_and_nothing_else_changes(device: torch.device) -> None:
    state = small(device, most_differences=5)
    state.note("tokens", ints(0, 1, 2), ints(1, 2, 3))
    state.note_tables(1, ints(2, 1), ints([0, 0], [7, 8]))
    state.note_tables(1, ints(1), ints([7, 8, 9]))
    state.note("tokens", ints(1), ints(20))
    state.note("seeds", ints(2, 1), np.array([6, 2**63 + 5], dtype=np.uint64).view(np.int64))
    state.note("top_p", ints(2), np.array([0.9]))
    state.note("temperature", ints(0), np.array([0.5], dtype=np.float32))
    assert state.tokens.tolist() == [0, 0, 0]
    state.flush()
    assert state.tokens.tolist() == [1, 20, 3]
    assert state.block_tables[1].tolist() == [[0] * 4, [7, 8, 9, 0], [0] * 4] and not state.block_tables[0].any()
    assert state.sampling.seeds.tolist() == [0, 5 - 2**63, 6] and state.sampling.top_p.tolist() == [0, 0, 0.9]
    assert state.sampling.temperature.tolist() == [0.5, 0, 0] and state.slots.tolist() == [-1, -1, -1]


def test_only_what_differs_is_sent(device: torch.device) -> None:
    state, sent = small(device), []
    send = state._send

    def watched(places: Any, words: Any) -> None:
        sent.append(words.tolist())
        send(places, words)

    state._send = watched
    state.note("num_computed", ints(0, 1), ints(3, 4))
    state.flush()
    state.note("num_computed", ints(1, 0, 2), ints(4, 5, 0))
    state.note("slots", ints(0, 1), ints(-1, -1))
    state.flush()
    state.flush()
    state.forget(ints(0, 1))  # the device has, or has not, counted one more
    state.advanced(ints(1), ints(5))
    state.note("num_computed", ints(0, 1), ints(5, 5))
    state.note("tokens", ints(1, 2), ints(0, 0))
    state.flush()
    assert sent == [[3, 4], [5], [0, 5]]  # tokens come first in memory
    assert state.num_computed.tolist() == [5, 4, 0]


def test_a_difference_that_could_not_be_sent_is_sent_later(device: torch.device) -> None:
    state = small(device)
    send, state._send = state._send, None
    state.note("top_k", ints(1), ints(7))
    with pytest.raises(TypeError):
        state.flush()
    state._send = send
    state.note("top_k", ints(1), ints(7))
    state.flush()
    assert state.sampling.top_k.tolist() == [0, 7, 0]


def test_a_row_past_its_table_writes_nowhere(device: torch.device) -> None:
    """It has ended, but the host hears of it one step later."""
    state = small(device)
    state.note("slots", ints(0), ints(1))
    state.note("num_computed", ints(1), ints(64))
    state.flush()
    inputs = state.inputs(2)
    state.begin_step(inputs)
    assert inputs.slot_mapping.tolist() == [[-1, -1], [-1, -1]] and inputs.seq_lens.tolist() == [65, 0]


def test_rows_have_the_adapters_of_their_slots(device: torch.device) -> None:
    state = small(device)
    state.note("slots", ints(0, 1), ints(2, 0))
    state.note("adapters", ints(0, 2), ints(5, 0))
    state.flush()
    inputs = state.inputs(3)
    state.begin_step(inputs)
    assert inputs.adapters.tolist() == [0, 5, -1] and state.adapters.tolist() == [5, -1, 0]


def test_places_outside_the_arrays_are_refused(device: torch.device) -> None:
    state = small(device)
    for name, places in [("tokens", (2, 3)), ("tokens", (-1,)), ("seeds", (3,)), ("top_p", (0, 9))]:
        with pytest.raises(InvariantError, match="are not all within 3 elements"):
            state.note(name, ints(*places), ints(*places))
    with pytest.raises(InvariantError, match="larger than the 3 slots"):
        state.begin_step(DecodeInputs(*[torch.zeros(4, dtype=torch.int32, device=device)] * 5))
    with pytest.raises(InvariantError, match="2\\^31"):
        DecodeState(2**20, 2**12, 1, 16, torch.device("meta"))
