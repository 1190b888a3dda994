"""Lanes give every token once, in order, and say exactly where a state begins and where it goes on."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.errors import ConfigError
from chairlift_train.lanes import LaneBatch, Lanes


def documents(lengths: Sequence[int], seed: int = 0) -> list[Any]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 50, length).astype(np.int32) for length in lengths]


def follow(batches: Sequence[LaneBatch]) -> dict[int, list[tuple[int, int, int]]]:
    """Per document its (position, token, target), put together by the ids and offsets that the batches tell."""
    found: dict[int, list[tuple[int, int, int]]] = {}
    for batch in batches:
        for row in range(len(batch.tokens)):
            pieces = zip(itertools.pairwise(batch.cu_seqlens[row]), batch.ids[row], batch.offsets[row], strict=True)
            for (start, end), document, offset in pieces:
                for place in range(start, end):
                    assert batch.positions[row, place] == offset + place - start
                    if document >= 0:
                        here = (offset + place - start, int(batch.tokens[row, place]), int(batch.targets[row, place]))
                        found.setdefault(document, []).append(here)
                    else:
                        assert batch.weights[row, place] == 0 and batch.targets[row, place] == -100
    return found


@given(
    st.lists(st.integers(1, 40), max_size=20),
    st.integers(1, 5),
    st.integers(1, 16),
    st.sampled_from(["now", "boundary"]),
)
@settings(deadline=None, max_examples=60)
def test_every_token_is_given_once_with_its_successor_as_the_target(
    lengths: list[int], lanes: int, chunk: int, refill: Literal["now", "boundary"]
) -> None:
    source = documents(lengths)
    batches = list(Lanes(source, lanes, chunk, refill=refill))
    expected = {
        index: [
            (at, int(token), int(after)) for at, (token, after) in enumerate(zip(row, [*row[1:], -100], strict=True))
        ]
        for index, row in enumerate(source)
    }
    assert follow(batches) == expected
    assert sum(int((batch.weights > 0).sum()) for batch in batches) == sum(length - 1 for length in lengths)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=20), st.sampled_from(["now", "boundary"]))
@settings(deadline=None, max_examples=40)
def test_a_state_carries_over_exactly_where_a_document_goes_on(
    lengths: list[int], refill: Literal["now", "boundary"]
) -> None:
    batches = list(Lanes(documents(lengths), 3, 8, refill=refill))
    for batch, after in itertools.pairwise(batches):
        for row in range(3):
            goes_on = batch.ids[row][-1] >= 0 and batch.ids[row][-1] == after.ids[row][0]
            assert batch.carry[row] == goes_on == (not after.reset[row, 0])
    assert not batches[-1].carry.any()


def test_with_boundary_refill_documents_begin_at_borders_only() -> None:
    batches = list(Lanes(documents([5, 9, 20, 3, 3, 17, 8]), 2, 8, refill="boundary"))
    for batch in batches:
        assert all(sum(document >= 0 for document in ids) <= 1 and ids[0] == max(ids) for ids in batch.ids)


@torch.no_grad()
def test_a_recurrent_net_by_lanes_equals_one_document_at_a_time() -> None:
    torch.manual_seed(0)
    cell, embed, head = torch.nn.GRUCell(16, 24), torch.nn.Embedding(50, 16), torch.nn.Linear(24, 50)
    source = documents(np.random.default_rng(1).integers(1, 90, 40).tolist())

    def step(tokens: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        new: torch.Tensor = cell(embed(tokens), state)
        return new

    alone: dict[tuple[int, int], float] = {}
    for index, row in enumerate(source):
        state = torch.zeros(1, 24)
        for at, (token, target) in enumerate(itertools.pairwise(torch.from_numpy(row).long())):
            state = step(token[None], state)
            alone[index, at] = float(torch.nn.functional.cross_entropy(head(state)[0], target))

    state = torch.zeros(4, 24)
    by_lanes: dict[tuple[int, int], float] = {}
    for batch in Lanes(source, lanes=4, chunk=16):
        made = batch.tensors()
        for at in range(16):
            state = step(made["tokens"][:, at], state * ~made["reset"][:, at, None])
            losses = torch.nn.functional.cross_entropy(head(state), made["targets"][:, at], reduction="none")
            for row in range(4):
                segment = int(np.searchsorted(batch.cu_seqlens[row], at, side="right")) - 1
                if made["weights"][row, at]:
                    by_lanes[batch.ids[row][segment], int(made["positions"][row, at])] = float(losses[row])
    assert by_lanes.keys() == alone.keys()
    assert max(abs(by_lanes[key] - alone[key]) for key in alone) <= 1e-6


def test_a_long_stream_leaves_hardly_a_place_empty() -> None:
    lengths = np.random.default_rng(0).lognormal(6, 1, 40_000).astype(int).clip(1, 8_000)
    lanes = Lanes(documents(lengths.tolist()), lanes=8, chunk=512)
    held = sum(
        int(sum(np.diff(batch.cu_seqlens[r])[np.array(batch.ids[r]) >= 0].sum() for r in range(8))) for batch in lanes
    )
    stats = lanes.stats()
    assert held == stats["tokens"] == lengths.sum()
    assert stats["documents"] == 40_000
    assert stats["used"] == held / (stats["batches"] * 8 * 512)
    assert stats["used"] >= 0.999


@pytest.mark.parametrize("kind", ["indexed", "iterable"])
def test_resuming_after_any_batch_gives_the_same_rest(kind: str) -> None:
    rows = documents([30, 3, 70, 1, 12, 9, 40, 5, 5, 5, 22])

    class Stream:
        def set_epoch(self, epoch: int) -> None:
            raise AssertionError("lanes are one pass, which is the first")

        def __iter__(self) -> Any:
            return iter(rows)

    def source() -> Any:
        return rows if kind == "indexed" else Stream()

    whole = list(Lanes(source(), 2, 16))
    for killed in range(len(whole) + 1):
        first = Lanes(source(), 2, 16)
        for _ in range(killed):
            next(first)
        state = copy.deepcopy(first.state_dict())
        list(first)  # what a state holds must not change when the lanes go on
        second = Lanes(source(), 2, 16)
        second.load_state_dict(state)
        rest = list(second)
        assert len(rest) == len(whole) - killed
        for left, right in zip(rest, whole[killed:], strict=True):
            for name in ("tokens", "targets", "weights", "positions", "carry"):
                np.testing.assert_array_equal(getattr(left, name), getattr(right, name))
            assert (left.cu_seqlens, left.ids) == (right.cu_seqlens, right.ids)
        assert second.stats() == first.stats()


def test_a_state_does_not_move_with_the_lanes_it_was_taken_from() -> None:
    lanes = Lanes(documents([100, 100]), 2, 16)
    next(lanes)
    state = lanes.state_dict()
    kept = copy.deepcopy(state["slots"])
    list(lanes)
    assert [slot["done"] for slot in state["slots"]] == [slot["done"] for slot in kept] == [16, 16]


def test_loss_weights_are_those_of_the_target() -> None:
    (batch,) = Lanes([{"input_ids": [7, 8, 9, 10], "loss_weight": [1.0, 0.0, 0.5, 2.0], "weight": 3.0}], 1, 4)
    assert batch.weights.tolist() == [[0.0, 1.5, 6.0, 0.0]]
    assert batch.targets.tolist() == [[-100, 9, 10, -100]]


def test_the_layout_covers_the_whole_batch() -> None:
    batch = next(Lanes(documents([5, 6, 30]), 2, 8))
    assert batch.layout.num_tokens == 16
    starts = np.flatnonzero(batch.layout.positions == 0)
    assert set(np.flatnonzero(batch.reset.ravel())) <= set(starts.tolist())


def test_a_bad_document_is_named_and_costs_nothing_else() -> None:
    rows: list[Any] = [*documents([20, 20, 20]), [], *documents([20, 20])]
    lanes, batches, errors = Lanes(rows, 2, 16), [], []
    while True:
        try:
            batches.append(next(lanes))
        except ConfigError as error:
            errors.append(str(error))
        except StopIteration:
            break
    assert len(errors) == 1 and "sequence 3" in errors[0]
    assert {index: len(found) for index, found in follow(batches).items()} == dict.fromkeys([0, 1, 2, 4, 5], 20)


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="lanes=0"):
        Lanes([[1]], lanes=0)
    with pytest.raises(ConfigError, match="'later'"):
        Lanes([[1]], refill="later")  # type: ignore[arg-type]
    state = Lanes([[1, 2]], 2, 4).state_dict()
    with pytest.raises(ConfigError, match="'chunk': 4"):
        Lanes([[1, 2]], 2, 8).load_state_dict(state)
