"""A stream loses and repeats nothing: whatever the source, the settings, the ranks, and where it was stopped."""

from __future__ import annotations

import asyncio
import copy
import itertools
import json
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from chairlift.errors import ConfigError
from chairlift_train import stream as stream_module
from chairlift_train.balance import Cost
from chairlift_train.layout import Pack
from chairlift_train.pack import pack_indices
from chairlift_train.sequences import read_sample
from chairlift_train.stream import PackStream
from tests.sweep import sweep
from tests.train.mixes import MIXES

CAPACITY = 64


def rows(count: int, seed: int = 0, longest: int = CAPACITY) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(1000) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def described(count: int, seed: int = 0, longest: int = CAPACITY) -> list[dict[str, Any]]:
    """Rows with weights, masks, keys and something else."""
    rng = random.Random(seed)
    made: list[dict[str, Any]] = []
    for index, ids in enumerate(rows(count, seed, longest)):
        item: dict[str, Any] = {"input_ids": ids, "name": f"row {index}", "domain": rng.choice("ab")}
        if rng.random() < 0.3:
            item["completion_mask"] = [rng.randint(0, 1) for _ in ids]
        if rng.random() < 0.3:
            item["weight"] = rng.random()
        made.append(item)
    return made


def same(a: Pack, b: Pack) -> bool:
    plain = all(
        getattr(a, name) == getattr(b, name)
        for name in ("lengths", "ids", "meta", "step", "last_of_step", "step_weight", "step_sequences", "filler")
    )
    return plain and np.array_equal(a.tokens, b.tokens) and np.array_equal(a.weights, b.weights)


def all_same(a: list[Pack], b: list[Pack]) -> bool:
    return len(a) == len(b) and all(map(same, a, b))


def content(packs: list[Pack]) -> Counter[tuple[int, tuple[int, ...]]]:
    """The sequences of the packs, without fillers: (id, tokens) -> how often it occurs."""
    pieces: Counter[tuple[int, tuple[int, ...]]] = Counter()
    for pack in packs:
        for index, start in enumerate(pack.layout.cu_seqlens[:-1]):
            if not pack.filler:
                pieces[pack.ids[index], tuple(pack.tokens[start : start + pack.lengths[index]].tolist())] += 1
    return pieces


# ---- what is in a pack


def test_a_pack_has_tokens_ids_weights_and_meta() -> None:
    source = [
        {"input_ids": [5, 6, 7], "labels": [-100, -100, 7], "name": "a"},
        [8, 9],
        {"input_ids": np.array([1, 2, 3]), "completion_mask": [0, 1, 1], "weight": 0.5},
    ]
    (pack,) = PackStream(source, 9)
    assert pack.ids == (0, 2, 1)
    assert pack.tokens.tolist() == [5, 6, 7, 1, 2, 3, 8, 9]
    assert pack.tokens.dtype == np.int32 and pack.weights.dtype == np.float32
    assert pack.weights.tolist() == [0, 0, 1, 0, 0.5, 0.5, 0, 1]
    assert pack.meta == ({"name": "a"}, {}, {})
    assert (pack.step_weight, pack.step_sequences, pack.last_of_step, pack.filler) == (3.0, 3, True, False)


@pytest.mark.parametrize(
    "item",
    [
        [3, 4, 5],
        (3, 4, 5),
        np.array([3, 4, 5], np.uint16),
        torch.tensor([3, 4, 5]),
        {"input_ids": torch.tensor([3, 4, 5])},
        {"input_ids": [3, 4, 5, 0], "attention_mask": [1, 1, 1, 0]},
        {"input_ids": [0, 3, 4, 5], "attention_mask": [0, 1, 1, 1], "labels": [-100, -100, 4, 5]},
    ],
)
def test_token_ids_come_as_lists_arrays_and_tensors(item: Any) -> None:
    (pack,) = PackStream([item], 8)
    assert pack.tokens.tolist() == [3, 4, 5]
    assert pack.weights.tolist() == [0, 1, 1]


def test_packs_do_not_share_the_buffer_of_their_source() -> None:
    def reuse() -> Iterator[np.ndarray[Any, Any]]:
        buffer = np.zeros(3, np.int32)
        for value in range(4):
            buffer[:] = value
            yield buffer

    (pack,) = PackStream(reuse(), 12)
    assert sorted(pack.tokens.tolist()) == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([], "at least one"),
        ([1, -2], "-2"),
        ([1, 2.5], r"\[1, 2\.5\]"),
        (["a"], "not a row"),
        ("text", "not a row"),
        (None, "not a row"),
        (7, "not a row"),
        ([2**31], "2147483648"),
        ([[1], [2, 3]], r"\[\[1\], \[2, 3\]\]"),
        (np.array([2**40]), str(2**40)),
        (np.zeros((2, 2), np.int64), r"\[0 0\]"),
        (np.array([1.0, 2.0]), r"\[1\. 2\.\]"),
        ({"text": "a"}, "input_ids"),
        ({"input_ids": [1, 2], "labels": [2, -100]}, "shift"),
        ({"input_ids": [1, 2], "completion_mask": [1]}, "completion_mask"),
        ({"input_ids": [1, 2], "weight": float("nan")}, "finite"),
        ({"input_ids": [1, 2], "attention_mask": [0, 0]}, "padding"),
        ([1] * 65, "65 tokens"),
    ],
)
@pytest.mark.parametrize("arrays", [False, True], ids=["lists", "arrays"])
def test_a_bad_item_is_named_and_can_be_passed(bad: Any, message: str, arrays: bool) -> None:
    good = rows(50)
    if arrays:
        good = [np.array(row) for row in good]  # type: ignore[misc]
    stream, packs, errors = PackStream([*good[:20], bad, *good[20:]], CAPACITY, pool=8), [], []
    while True:
        try:
            packs.append(next(stream))
        except ConfigError as error:
            errors.append(str(error))
        except StopIteration:
            break
    assert len(errors) == 1 and re.match(f"sequence 20 .*{message}", errors[0])
    ids = [*range(20), *range(21, 51)]
    assert content(packs) == Counter((position, tuple(row)) for position, row in zip(ids, good, strict=True))


@pytest.mark.parametrize("dtypes", [[np.int32], [np.int64], [np.uint16], [np.int32, np.int64, np.uint8]])
def test_a_list_of_arrays_gives_the_packs_of_a_list_of_lists(dtypes: list[Any]) -> None:
    plain = rows(300)
    mixed = [np.array([token % 256 for token in row], dtypes[0]) for row in plain]
    mixed = [row.astype(dtypes[index // 70 % len(dtypes)]) for index, row in enumerate(mixed)]
    expected = list(PackStream([row.tolist() for row in mixed], CAPACITY, pool=10))
    for cut in range(0, len(expected), 7):
        first = PackStream(mixed, CAPACITY, pool=10)
        packs = list(itertools.islice(first, cut))
        second = PackStream(mixed, CAPACITY, pool=10)
        list(itertools.islice(second, 3))  # has read ahead of where it is told to go
        second.load_state_dict(through_json(first.state_dict()))
        assert all_same([*packs, *second], expected)


@pytest.mark.parametrize("source", [{"input_ids": [1]}, "text", 7, None])
def test_a_wrong_source_is_refused(source: Any) -> None:
    with pytest.raises(ConfigError, match="source"):
        PackStream(source)


@pytest.mark.parametrize(
    "wrong",
    [
        {"capacity": 0},
        {"pool": 0},
        {"align": 7},
        {"max_sequences": 0},
        {"overflow": "wrap"},
        {"order": "random"},
        {"ranks": 0},
        {"ranks": 2, "rank": 2},
        {"ranks": 3, "balance": Cost.tokens()},
        {"ranks": 3, "order": "shuffled"},
        {"ranks": 2, "step": "packs:3"},
        {"step": "tokens:0"},
        {"step": "tokens:1.5M"},
        {"step": "epochs:1"},
        {"ranks": 2, "flush_after": 1.0},
        {"capacity": "a"},
        {"capacity": None},
        {"capacity": 64.0},
        {"pool": None},
        {"seed": True},
        {"step": 5},
        {"balance": "tokens"},
    ],
)
def test_settings_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        PackStream([[1]], **{"capacity": 64, **wrong})


def test_settings_may_be_numbers_of_numpy() -> None:
    assert all_same(list(PackStream(rows(99), np.int64(64), pool=np.int32(9))), list(PackStream(rows(99), 64, pool=9)))


# ---- packing


def test_packs_are_those_of_the_offline_twin() -> None:
    source = rows(500)
    packs = list(PackStream(source, CAPACITY, pool=16))
    assert [list(pack.ids) for pack in packs] == pack_indices([len(row) for row in source], CAPACITY, pool=16)


@pytest.mark.parametrize("overflow", ["split", "truncate", "drop", "own_pack"])
def test_sequences_that_are_too_long_are_cut_split_or_dropped_as_asked(overflow: Any) -> None:
    source = described(300, longest=200)
    stream = PackStream(source, CAPACITY, pool=16, overflow=overflow)
    packs = list(stream)
    long = [position for position, item in enumerate(source) if len(item["input_ids"]) > CAPACITY]
    found: dict[int, list[int]] = {}
    for (position, tokens), count in sorted(content(packs).items()):
        assert count == 1
        found.setdefault(position, []).append(len(tokens))
    for position, item in enumerate(source):
        length = len(item["input_ids"])
        expected = [length]
        if position in long:
            pieces = [min(CAPACITY, length - start) for start in range(0, length, CAPACITY)]
            pieces = [size for i, size in enumerate(pieces) if teaches(item, i * CAPACITY, size)]
            first = [CAPACITY] if teaches(item, 0, CAPACITY) else []
            expected = {"split": pieces, "truncate": first, "drop": [], "own_pack": [length]}[overflow]
        assert sorted(found.get(position, [])) == sorted(expected)
    stats = stream.stats()
    counted = {"split": stats.split, "truncate": stats.truncated, "drop": stats.dropped, "own_pack": 0}
    assert counted[overflow] == (0 if overflow == "own_pack" else len(long))
    for pack in packs:
        assert pack.num_tokens <= CAPACITY or (overflow == "own_pack" and len(pack.ids) == 1)
        assert all(pack.weights[start] == 0 for start in pack.layout.cu_seqlens[:-1])


def teaches(item: dict[str, Any], start: int, size: int) -> bool:
    """Whether a piece of a described row has a target, as far as the row says what its targets are."""
    if "completion_mask" in item:
        return any(item["completion_mask"][start + 1 : start + size])
    return size > 1 or "weight" not in item


def prompted(prompt: int, answer: int, **fields: Any) -> dict[str, Any]:
    mask = [0] * prompt + [1] * answer
    return {"input_ids": list(range(prompt + answer)), "completion_mask": mask, **fields}


def test_a_truncated_sequence_without_a_target_is_left_out_and_counted_by_source() -> None:
    """Its prompt alone fills the pack: to compute it teaches nothing."""
    items = [prompted(20, 5), prompted(4, 3), prompted(6, 10, source="a"), prompted(16, 1, source="a@0"), [1, 2, 3]]
    stream = PackStream(items, 8, overflow="truncate")
    packs = list(stream)
    assert sorted(i for pack in packs for i in pack.ids) == [1, 2, 4]
    assert all((pack.weights != 0).any() for pack in packs)
    stats = stream.stats()
    assert stats.truncated == 3
    data, a = stats.cut["data"], stats.cut["a"]
    assert (data.sequences, data.tokens, data.targets, data.left_out) == (1, 25, 5, 1)
    assert (a.sequences, a.tokens, a.targets, a.left_out) == (2, 8 + 17, 8 + 1, 1)
    again = PackStream(items, 8, overflow="truncate")
    again.load_state_dict(stream.state_dict())
    assert again.stats() == stats


def test_pieces_of_a_split_prompt_are_left_out() -> None:
    stream = PackStream([prompted(20, 5), prompted(3, 9)], 8, overflow="split")
    packs = list(stream)
    found = [(i, length) for pack in packs for i, length in zip(pack.ids, pack.lengths, strict=True)]
    assert sorted(found) == [(0, 8), (1, 4), (1, 8)]
    assert {name: (cut.sequences, cut.tokens, cut.left_out) for name, cut in stream.stats().cut.items()} == {
        "data": (1, 17, 0)
    }


@pytest.mark.parametrize("overflow", ["truncate", "drop"])
def test_an_endless_source_of_which_nothing_is_left_is_not_read_for_ever(
    overflow: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_module, "_MAX_LEFT_OUT", 50)
    stream = PackStream(itertools.repeat(prompted(20, 5)), 8, overflow=overflow)
    with pytest.raises(ConfigError, match=r"the last 50 sequences are all longer than a pack \(8 tokens\)"):
        next(iter(stream))


def test_pieces_have_the_tokens_and_weights_of_the_whole() -> None:
    item = {"input_ids": list(range(10)), "loss_weight": [float(i) for i in range(10)], "name": "n"}
    packs = list(PackStream([item], 4, overflow="split"))
    assert [pack.tokens.tolist() for pack in packs] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert [pack.weights.tolist() for pack in packs] == [[0, 1, 2, 3], [0, 5, 6, 7], [0, 9]]
    assert [(pack.ids, pack.meta) for pack in packs] == [((0,), ({"name": "n"},))] * 3


def test_alignment_fills_up_with_tokens_of_weight_0() -> None:
    stream = PackStream([[1, 2, 3], {"input_ids": [4], "weight": 2.0}, [5] * 8], 20, align=4, pad_id=9)
    (pack,) = stream
    assert pack.lengths == (4, 8, 4)
    assert pack.tokens.tolist() == [1, 2, 3, 9, *[5] * 8, 4, 9, 9, 9]
    assert pack.weights.tolist() == [0, 1, 1, 0, 0, *[1] * 7, 0, 0, 0, 0]
    assert (pack.step_weight, pack.step_sequences) == (9.0, 2)


@pytest.mark.parametrize("key", ["domain", lambda item: item["domain"]])
def test_keys_never_share_a_pack(key: Any) -> None:
    source = described(200)
    packs = list(PackStream(source, CAPACITY, key=key, max_sequences=3))
    assert len(content(packs)) == 200
    for pack in packs:
        assert len({source[position]["domain"] for position in pack.ids}) == 1
        assert len(pack.ids) <= 3


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"topic": "a"}, r"sequence 1 of the source has the fields \['input_ids', 'topic'\]; give it the key 'domain'"),
        ({"domain": ["a"]}, r"sequence 1 of the source has the key \['a'\]; give it a string or a whole number"),
    ],
)
def test_a_sequence_without_its_key_is_a_bad_one_and_passed(fields: dict[str, Any], message: str) -> None:
    rows = [{"input_ids": [position, 7], "domain": "a"} for position in range(3)]
    rows[1] = {"input_ids": [1, 7], **fields}
    stream = PackStream(rows, CAPACITY, key="domain")
    with pytest.raises(ConfigError, match=message):
        next(stream)
    assert [pack.ids for pack in stream] == [(0, 2)]


def test_arrays_of_a_list_have_keys_too() -> None:
    source = [np.array([number % 3, 7], np.int32) for number in range(40)]
    packs = list(PackStream(source, CAPACITY, key=lambda ids: int(ids[0])))
    assert [set(pack.tokens[::2].tolist()) for pack in packs] == [{0}, {1}, {2}]


# ---- steps and ranks


def every_rank(make: Callable[[int], PackStream], ranks: int) -> list[list[Pack]]:
    return [list(make(rank)) for rank in range(ranks)]


@pytest.mark.parametrize("step", [None, "tokens:600", "sequences:40", "packs:16"])
@pytest.mark.parametrize("arrange", [{}, {"balance": Cost(1.0, 0.1)}, {"order": "shuffled"}])
def test_ranks_take_equally_many_of_the_same_packs(step: str | None, arrange: dict[str, Any]) -> None:
    source = described(333)
    expected: list[list[int]] | None = None
    for ranks in (1, 2, 4, 8):
        by_rank = every_rank(
            lambda rank, ranks=ranks: PackStream(  # type: ignore[misc]
                source, CAPACITY, pool=16, ranks=ranks, rank=rank, window=32, step=step, **arrange
            ),
            ranks,
        )
        assert len({len(packs) for packs in by_rank}) == 1
        for together in zip(*by_rank, strict=True):
            assert len({(p.step, p.last_of_step, p.step_weight, p.step_sequences) for p in together}) == 1
        packs = [pack for packs in by_rank for pack in packs]
        assert sum(pack.filler for pack in packs) < ranks
        plans = sorted(list(pack.ids) for pack in packs if not pack.filler)
        expected = expected or plans
        assert plans == expected
        for number in range(max(pack.step for pack in packs) + 1):
            members = [pack for pack in packs if pack.step == number]
            assert sum(float(pack.weights.sum()) for pack in members) == pytest.approx(members[0].step_weight)
            targets = sum(bool(part.any()) for p in members for part in np.split(p.weights, p.layout.cu_seqlens[1:-1]))
            assert targets == members[0].step_sequences
            assert [pack.last_of_step for pack in by_rank[0] if pack.step == number].count(True) == 1


@pytest.mark.parametrize(("unit", "target"), [("tokens", 1000), ("sequences", 30), ("packs", 12)])
def test_steps_close_on_what_was_asked_for(unit: str, target: int) -> None:
    streams = [
        PackStream(rows(2000), CAPACITY, ranks=4, rank=rank, step=f"{unit}:{target}", balance=Cost(1.0, 1.0))
        for rank in range(4)
    ]
    sizes = []
    for together in zip(*(stream.steps() for stream in streams), strict=True):
        packs = [pack for packs in together for pack in packs]
        amount = {
            "tokens": sum(pack.num_tokens for pack in packs),
            "sequences": sum(len(pack.ids) for pack in packs),
            "packs": len(packs),
        }
        sizes.append(amount[unit])
    row = {"tokens": 4 * CAPACITY, "sequences": 60, "packs": 0}[unit]
    assert all(target - row <= size <= target + row for size in sizes[:-1])
    assert sum(sizes[:-1]) / len(sizes[:-1]) == pytest.approx(target, rel=0.01)


def test_balanced_rows_leave_ranks_idle_for_little() -> None:
    rng = random.Random(0)
    source = [np.zeros(MIXES["chat"](rng, 2048), np.int32) for _ in range(4000)]
    cost = Cost.transformer(64)
    in_order = PackStream(source, 2048, ranks=8, balance=cost, window=8)
    balanced = PackStream(source, 2048, ranks=8, balance=cost, window=256)
    stepwise = PackStream(source, 2048, ranks=8, balance=cost, window=256, step="packs:64")
    for stream in (in_order, balanced, stepwise):
        list(stream)
    assert balanced.stats().idle <= 0.05 < 0.2 < in_order.stats().idle
    assert stepwise.stats().idle_step <= 0.02
    assert balanced.stats().waste == in_order.stats().waste
    assert balanced.stats().cost_cv > 0.1


def test_shuffling_depends_on_the_seed_only() -> None:
    def ids(seed: int) -> list[tuple[int, ...]]:
        return [pack.ids for pack in PackStream(rows(400), CAPACITY, order="shuffled", window=32, seed=seed)]

    assert ids(1) == ids(1) != ids(2)
    assert sorted(ids(1)) == sorted(ids(2))


def test_iterating_again_is_the_next_epoch() -> None:
    stream = PackStream(rows(100), CAPACITY, step="packs:4")
    first, second = list(stream), list(stream)
    assert [pack.ids for pack in first] == [pack.ids for pack in second]
    assert second[0].step == first[-1].step + 1


# ---- state


SETTINGS: list[dict[str, Any]] = [
    {},
    {"pool": 7, "ranks": 2, "rank": 1, "step": "tokens:500"},
    {"ranks": 2, "balance": Cost(2.0, 0.1), "window": 8, "step": "sequences:20", "key": "domain"},
    {"order": "shuffled", "window": 6, "align": 4, "overflow": "split", "seed": 5},
    {"overflow": "own_pack", "max_sequences": 3, "step": "packs:5"},
    {"overflow": "split", "pool": 2, "ranks": 2, "balance": Cost(2.0, 0.1), "window": 4, "step": "packs:6"},
]


def through_json(state: dict[str, Any]) -> dict[str, Any]:
    """Arrays apart, as a checkpoint would store it."""
    samples = {name: value for name, value in state["samples"].items() if isinstance(value, np.ndarray)}
    rest = {**state, "samples": {n: v for n, v in state["samples"].items() if n not in samples}}
    back: dict[str, Any] = json.loads(json.dumps(rest, allow_nan=False))
    back["samples"].update({name: value.copy() for name, value in samples.items()})
    return back


class Generated:
    """A source that can only be iterated."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)


class Stateful(Generated):
    """As torchdata's and Hugging Face's: the object iterated keeps the place."""

    at = 0
    start = 0

    def __iter__(self) -> Iterator[Any]:
        self.at, self.start = self.start, 0
        while self.at < len(self.items):
            self.at += 1
            yield self.items[self.at - 1]

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["at"]


class WithIteratorState(Generated):
    """As Grain's: the iterator keeps the place."""

    class Place:
        def __init__(self, items: list[Any]) -> None:
            self.items, self.at = items, 0

        def __iter__(self) -> Iterator[Any]:
            return self

        def __next__(self) -> Any:
            if self.at >= len(self.items):
                raise StopIteration
            self.at += 1
            return self.items[self.at - 1]

        def get_state(self) -> dict[str, int]:
            return {"at": self.at}

        def set_state(self, state: dict[str, int]) -> None:
            self.at = state["at"]

    def __iter__(self) -> Iterator[Any]:
        return self.Place(self.items)


class EpochOrder(Stateful):
    """As Hugging Face's: another order in each epoch, and a place belongs to its epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        order = np.random.default_rng(self.epoch).permutation(len(self.items))
        self.at, self.start = self.start, 0
        while self.at < len(self.items):
            self.at += 1
            yield self.items[order[self.at - 1]]

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["at"] if state["epoch"] == self.epoch else 0


class EpochIndex:
    """The same by position."""

    def __init__(self, items: list[Any]) -> None:
        self.items, self.epoch = items, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[np.random.default_rng(self.epoch).permutation(len(self.items))[index]]


@pytest.mark.parametrize("epochs", [0, 2])
@pytest.mark.parametrize("kind", [EpochOrder, EpochIndex])
def test_a_source_that_shuffles_itself_goes_on_in_the_epoch_it_was_in(kind: Any, epochs: int) -> None:
    items = rows(100)
    stream, resumed = (PackStream(kind(items), CAPACITY, pool=8) for _ in range(2))
    for _ in range(epochs):
        list(stream)
    list(itertools.islice(stream, 5))
    resumed.load_state_dict(through_json(stream.state_dict()))
    for _ in range(2):
        assert all_same(list(stream), list(resumed))


@pytest.mark.parametrize("kind", [list, Generated, Stateful, WithIteratorState])
@pytest.mark.parametrize("settings", SETTINGS)
def test_a_stream_killed_after_any_pack_goes_on_bit_equal(kind: Any, settings: dict[str, Any]) -> None:
    items = described(100, longest=300 if "overflow" in settings else CAPACITY)

    def make() -> PackStream:
        return PackStream(kind(items), **{"capacity": CAPACITY, "pool": 10, **settings})

    whole = make()
    expected, final = list(whole), whole.stats()
    for cut in {*range(0, len(expected), max(1, len(expected) // 12)), len(expected)}:
        first = make()
        head = list(itertools.islice(first, cut))
        second = make()
        second.load_state_dict(through_json(first.state_dict()))
        tail = [] if cut == len(expected) else list(second)
        assert all_same(head + tail, expected)
        assert second.stats() == (first.stats() if cut == len(expected) else final)


def test_state_survives_being_killed_again_and_again(request: pytest.FixtureRequest) -> None:
    items = described(400)

    def check(seed: int) -> None:
        rng = random.Random(seed)
        settings = {"capacity": CAPACITY, "pool": 12, **rng.choice(SETTINGS)}
        expected, packs = list(PackStream(items, **settings)), []
        stream = PackStream(items, **settings)
        while len(packs) < len(expected):
            packs += itertools.islice(stream, rng.randint(1, 40))
            state = through_json(stream.state_dict())
            if rng.random() < 0.5:
                list(itertools.islice(stream, rng.randint(0, 9)))  # lost in the crash
            stream = PackStream(items, **settings)
            stream.load_state_dict(state)
        assert all_same(packs, expected)

    sweep(request, 5, check)


@given(st.lists(st.integers(1, 80), max_size=80), st.integers(0, 60), st.sampled_from([1, 2, 4]), st.integers(1, 20))
@hypothesis_settings(deadline=None, max_examples=60)
def test_any_stream_can_be_cut_anywhere(lengths: list[int], cut: int, ranks: int, pool: int) -> None:
    items = [[index % 50] * length for index, length in enumerate(lengths)]

    def make() -> PackStream:
        return PackStream(
            items, 64, pool=pool, ranks=ranks, window=4, step="tokens:200", overflow="split", balance=Cost(1, 1)
        )

    expected, first, second = list(make()), make(), make()
    head = list(itertools.islice(first, cut))
    second.load_state_dict(first.state_dict())
    assert all_same(head + ([] if second._ended and not second._ready else list(second)), expected)


def of_all_ranks(make: Callable[[int], PackStream], ranks: int, state: Any, steps: int) -> tuple[list[Pack], Any]:
    """The packs that all ranks hand out in so many steps, row by row, and the state that one of them is left with."""
    streams = [make(rank) for rank in range(ranks)]
    for stream in streams:
        if state is not None:
            stream.load_state_dict(state)
    if streams[0]._ended and not streams[0]._ready:
        return [], streams[0].state_dict()
    taken = [[pack for step in itertools.islice(stream.steps(), steps) for pack in step] for stream in streams]
    states = [stream.state_dict() for stream in streams]
    assert all(json.dumps(through_json(one)["stats"]) == json.dumps(through_json(states[0])["stats"]) for one in states)
    return [pack for row in zip(*taken, strict=True) for pack in row], states[0]


@given(
    st.lists(st.integers(1, 80), min_size=1, max_size=200),
    st.lists(st.tuples(st.sampled_from([1, 2, 4]), st.integers(0, 4)), max_size=4),
    st.sampled_from(["tokens:200", "sequences:9", "packs:12", None]),
    st.sampled_from([{}, {"balance": Cost(1, 1), "window": 8}, {"order": "shuffled", "window": 12}]),
)
@hypothesis_settings(deadline=None, max_examples=60)
def test_the_number_of_ranks_may_change_between_two_steps(
    lengths: list[int], parts: list[tuple[int, int]], step: str | None, arrange: dict[str, Any]
) -> None:
    items = [[index % 50] * length for index, length in enumerate(lengths)]
    packs: list[Pack] = []
    state = None
    for ranks, steps in [*parts, (1, 10_000)]:

        def make(rank: int, ranks: int = ranks) -> PackStream:
            given = {"pool": 7, "overflow": "split", "ranks": ranks, "rank": rank, "step": step, **arrange}
            return PackStream(items, 64, **given)

        more, state = of_all_ranks(make, ranks, None if state is None else through_json(state), steps)
        packs += more
    whole = list(PackStream(items, 64, pool=7, overflow="split", step=step, **arrange))
    assert content(packs) == content(whole)
    if not arrange:
        assert [pack.ids for pack in packs if not pack.filler] == [pack.ids for pack in whole], "and in its order"
    by_step: dict[int, list[Pack]] = {}
    for pack in packs:
        by_step.setdefault(pack.step, []).append(pack)
    assert list(by_step) == list(range(len(by_step)))
    for together in by_step.values():
        total = sum(float(pack.weights.sum(dtype=np.float64)) for pack in together)
        assert all(pack.step_weight == pytest.approx(total) for pack in together)
    assert state["stats"]["packs"] == len(whole)
    assert state["stats"]["steps"] == len(by_step)


@pytest.mark.parametrize("arrange", [{"balance": Cost(1, 1), "window": 8}, {"order": "shuffled", "window": 32}])
def test_no_step_ends_early_when_the_number_of_ranks_changes(arrange: dict[str, Any]) -> None:
    """Though a part of it, or several, had been dealt to the ranks that there were."""
    packs: list[Pack] = []
    state = None
    for ranks, steps in ((2, 1), (4, 1), (1, 2), (2, 1000)):

        def make(rank: int, ranks: int = ranks) -> PackStream:
            return PackStream(rows(300), CAPACITY, pool=9, ranks=ranks, rank=rank, step="packs:12", **arrange)

        more, state = of_all_ranks(make, ranks, state, steps)
        packs += more
    assert content(packs) == content(list(PackStream(rows(300), CAPACITY, pool=9)))
    assert list(Counter(pack.step for pack in packs).values())[:-1] == [12] * (len(packs) // 12)


def test_the_surplus_of_a_step_is_kept_when_the_number_of_ranks_changes() -> None:
    state, taken = None, 0
    for steps, ranks in enumerate((1, 2, 4, 1, 2, 4, 1, 2), 1):

        def make(rank: int, ranks: int = ranks) -> PackStream:
            return PackStream(rows(400), CAPACITY, pool=9, ranks=ranks, rank=rank, step="tokens:500")

        more, state = of_all_ranks(make, ranks, state, 1)
        taken += sum(pack.num_tokens for pack in more)
        assert 0 <= taken - 500 * steps < ranks * CAPACITY


def test_inside_a_step_the_number_of_ranks_stays() -> None:
    first = PackStream(rows(100), CAPACITY, ranks=2, step="packs:8")
    next(first)
    with pytest.raises(ConfigError, match=r"inside a step of 2 ranks.*between two steps"):
        PackStream(rows(100), CAPACITY, step="packs:8").load_state_dict(first.state_dict())


def test_a_state_does_not_move_with_the_stream_it_was_taken_from() -> None:
    stream = PackStream(rows(200), CAPACITY, pool=9)
    next(stream)
    state = stream.state_dict()
    kept = through_json(state)
    list(stream)
    assert through_json(state)["stats"] == kept["stats"]


def test_one_state_serves_every_rank() -> None:
    def make(rank: int) -> PackStream:
        return PackStream(rows(300), CAPACITY, ranks=4, rank=rank, step="packs:8", balance=Cost(1, 1), window=16)

    saved = make(0)
    list(itertools.islice(saved, 5))
    for rank in range(4):
        resumed = make(rank)
        resumed.load_state_dict(saved.state_dict())
        assert all_same(list(resumed), list(make(rank))[5:])


def test_a_source_or_settings_that_have_changed_are_refused() -> None:
    items = rows(200)
    stream = PackStream(items, CAPACITY, pool=16)
    list(itertools.islice(stream, 20))
    state = stream.state_dict()
    changed = [*items[:16], [1, 2, 3], *items[17:]]
    for source, settings, message in [
        (items[:-1], {}, "199 sequences, but had 200"),
        (changed, {}, "sequence 16 "),
        (Generated(items), {}, "kind indexed"),
        (items, {"seed": 3, "align": 4}, "align was 1 and is 4; seed was 0 and is 3"),
    ]:
        with pytest.raises(ConfigError, match=message):
            PackStream(source, CAPACITY, pool=16, **settings).load_state_dict(state)
    stream = PackStream(Generated(items), CAPACITY, pool=16)
    list(itertools.islice(stream, 20))
    with pytest.raises(ConfigError, match="ended after 3"):
        PackStream(Generated(items[:3]), CAPACITY, pool=16).load_state_dict(stream.state_dict())
    with pytest.raises(ConfigError, match="sequence 16 "):
        PackStream(Generated(changed), CAPACITY, pool=16).load_state_dict(stream.state_dict())
    with pytest.raises(ConfigError, match="version 9"):
        stream.load_state_dict({**state, "version": 9})


# ---- other ways in and out


async def _drain(stream: PackStream) -> list[Pack]:
    return [pack async for pack in stream]


def test_a_queue_gives_the_packs_of_a_list() -> None:
    items = rows(300)

    async def run() -> list[Pack]:
        queue: asyncio.Queue[Any] = asyncio.Queue(4)

        async def produce() -> None:
            for item in [*items, None]:
                await queue.put(item)

        _, packs = await asyncio.gather(produce(), _drain(PackStream(queue, CAPACITY, step="packs:6")))
        return packs

    assert all_same(asyncio.run(run()), list(PackStream(items, CAPACITY, step="packs:6")))


def test_a_stream_from_a_queue_goes_on_with_another_queue() -> None:
    items = rows(300)
    settings: dict[str, Any] = {"pool": 8, "order": "shuffled", "window": 8, "step": "packs:3"}

    def queue_of(rest: list[Any]) -> asyncio.Queue[Any]:
        queue: asyncio.Queue[Any] = asyncio.Queue()
        for item in [*rest, None]:
            queue.put_nowait(item)
        return queue

    async def run(cut: int) -> list[Pack]:
        stream, packs = PackStream(queue_of(items), CAPACITY, **settings), []
        async for pack in stream:
            packs.append(pack)
            if len(packs) == cut:
                break
        state = through_json(stream.state_dict())
        resumed = PackStream(queue_of(items[state["source"]["position"] :]), CAPACITY, **settings)
        resumed.load_state_dict(state)
        return packs + await _drain(resumed)

    for cut in (1, 2, 3, 20):
        assert all_same(asyncio.run(run(cut)), list(PackStream(items, CAPACITY, **settings)))


def test_sequences_that_wait_in_a_queue_for_too_long_are_handed_out() -> None:
    async def run() -> list[Pack]:
        queue: asyncio.Queue[Any] = asyncio.Queue()
        stream = PackStream(queue, CAPACITY, step="packs:100", flush_after=0.01)
        packs: list[Pack] = []
        for item in ([1, 2], [3]):
            queue.put_nowait(item)
        async for pack in stream:  # would wait forever for a third
            packs.append(pack)
            queue.put_nowait([4] if len(packs) == 1 else None)
        return packs

    packs = asyncio.run(asyncio.wait_for(run(), 60))
    assert [sorted(pack.tokens.tolist()) for pack in packs] == [[1, 2, 3], [4]]
    assert all(pack.last_of_step for pack in packs)


def test_the_longest_waiting_sequence_decides_when_all_are_handed_out() -> None:
    """And not the last pack that others filled meanwhile."""

    async def run() -> list[Pack]:
        loop, now, queue = asyncio.get_running_loop(), 0.0, asyncio.Queue[Any]()
        loop.time = lambda: now  # type: ignore[method-assign]
        stream = PackStream(queue, CAPACITY, pool=8, flush_after=1.0)
        packs: list[Pack] = []
        queue.put_nowait([7])
        for number in range(40):
            queue.put_nowait([number] * CAPACITY)
        queue.put_nowait(None)
        async for pack in stream:
            packs.append(pack)
            now += 0.3
        return packs

    packs = asyncio.run(asyncio.wait_for(run(), 60))
    assert 0 in [position for pack in packs[:12] for position in pack.ids]


def test_a_queue_and_a_list_are_read_each_in_its_own_way() -> None:
    with pytest.raises(ConfigError, match="async for"):
        next(PackStream(asyncio.Queue()))
    with pytest.raises(ConfigError, match="for pack in stream"):
        asyncio.run(_drain(PackStream([[1]])))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_loader_gives_the_same_packs_in_the_same_order(workers: int) -> None:
    items = described(200)
    settings: dict[str, Any] = {"pool": 10, "ranks": 2, "rank": 1, "step": "tokens:300"}
    loader = torch.utils.data.DataLoader(
        PackStream(items, CAPACITY, **settings).as_torch(), batch_size=None, num_workers=workers
    )
    expected = list(PackStream(items, CAPACITY, **settings))
    assert all_same(list(loader), expected)
    assert [pack.ids for pack in loader] == [pack.ids for pack in expected]


class Reporting(torch.utils.data.IterableDataset[tuple[int, Pack, dict[str, Any]]]):
    """In each loader process: begins with that process's state, if there is one, and tells its state with each pack."""

    def __init__(self, stream: PackStream, states: dict[int, dict[str, Any]]) -> None:
        self.packs, self.states = stream.as_torch(), states

    def __iter__(self) -> Iterator[tuple[int, Pack, dict[str, Any]]]:
        info = torch.utils.data.get_worker_info()
        worker = 0 if info is None else info.id
        if worker in self.states:
            self.packs.load_state_dict(self.states[worker])
        for pack in self.packs:
            yield worker, pack, self.packs.state_dict()


@pytest.mark.parametrize("workers", [0, 2])
def test_every_loader_process_resumes_from_its_own_state(workers: int) -> None:
    items = described(120)

    def load(states: dict[int, dict[str, Any]]) -> Iterator[tuple[int, Pack, dict[str, Any]]]:
        dataset = Reporting(PackStream(items, CAPACITY, pool=10), states)
        return iter(torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=workers))

    expected = list(PackStream(items, CAPACITY, pool=10))
    packs: list[Pack] = []
    states: dict[int, dict[str, Any]] = {}
    for count in (2, 8, 4, len(expected)):
        for worker, pack, state in itertools.islice(load(states), count):
            packs.append(pack)
            states = {**states, worker: state}
    assert all_same(packs, expected)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_data_loader_resumes(workers: int) -> None:
    loaders = pytest.importorskip("torchdata.stateful_dataloader")
    items = described(120)

    def make() -> Any:
        return loaders.StatefulDataLoader(
            PackStream(items, CAPACITY, pool=10).as_torch(), batch_size=None, num_workers=workers
        )

    expected = list(PackStream(items, CAPACITY, pool=10))
    for cut in (1, 2, 7, len(expected) - 1):
        loader = make()
        head = list(itertools.islice(loader, cut))
        state, loader = loader.state_dict(), make()
        loader.load_state_dict(state)
        assert all_same(head + list(loader), expected)


@pytest.mark.full
@pytest.mark.parametrize("workers", [2, 3])
def test_a_stateful_data_loader_resumes_where_a_pass_ends_and_where_the_next_begins(workers: int) -> None:
    """What the processes say before their first pack is of the new pass; at the end, only one of them has ended."""
    loaders = pytest.importorskip("torchdata.stateful_dataloader")

    def make() -> Any:
        stream = PackStream([[i] * 8 for i in range(10)], 8, pool=1)
        return loaders.StatefulDataLoader(
            stream.as_torch(), batch_size=None, num_workers=workers, persistent_workers=True
        )

    def ids(packs: Iterable[Pack]) -> list[int]:
        return [pack.ids[0] for pack in packs]

    for cut in (0, 1, workers, 10):
        loader = make()
        assert ids(loader) == list(range(10))
        packs = iter(loader)
        head = [next(packs) for _ in range(cut)]
        state, loader = copy.deepcopy(loader.state_dict()), make()
        loader.load_state_dict(state)
        assert ids(head) + ids(loader) == list(range(10))
        assert ids(loader) == list(range(10))


def test_loader_processes_that_live_on_go_on_where_they_were_left() -> None:
    loader = torch.utils.data.DataLoader(
        PackStream([[i] * 8 for i in range(40)], 8, pool=1).as_torch(),
        batch_size=None,
        num_workers=2,
        persistent_workers=True,
    )
    found = [pack.ids[0] for _ in range(3) for pack in itertools.islice(loader, 7)]
    assert len(set(found)) == 21, "a pack came twice"


def test_a_shuffled_hugging_face_stream_loses_nothing() -> None:
    """Its own state leaves out what its buffer holds."""
    datasets = pytest.importorskip("datasets")
    items = [{"input_ids": [i, i]} for i in range(200)]

    def make() -> Any:
        return datasets.Dataset.from_list(items).to_iterable_dataset(num_shards=4).shuffle(seed=1, buffer_size=50)

    expected = list(PackStream(make(), CAPACITY, pool=4))
    stream, resumed = PackStream(make(), CAPACITY, pool=4), PackStream(make(), CAPACITY, pool=4)
    head = list(itertools.islice(stream, 5))
    resumed.load_state_dict(stream.state_dict())
    assert all_same(head + list(resumed), expected)


def test_a_hugging_face_dataset_is_a_source() -> None:
    datasets = pytest.importorskip("datasets")
    items = [{"input_ids": row, "completion_mask": [0, *[1] * (len(row) - 1)], "tags": [1, 2]} for row in rows(100)]
    expected = list(PackStream(items, CAPACITY, pool=8))
    for make in (datasets.Dataset.from_list, lambda rows: datasets.Dataset.from_list(rows).to_iterable_dataset()):
        stream = PackStream(make(items), CAPACITY, pool=8)
        head = list(itertools.islice(stream, 9))
        resumed = PackStream(make(items), CAPACITY, pool=8)
        resumed.load_state_dict(stream.state_dict())
        assert all_same(head + list(resumed), expected)
        assert json.dumps(head[0].meta) == json.dumps(expected[0].meta)


# ---- figures


def test_tokens_that_fill_up_alignment_count_as_waste() -> None:
    """Also of a sequence that waited while the stream was saved."""
    settings = {"capacity": 16, "pool": 4, "align": 4}
    items = [[7] * length for length in [3, 1] * 8]
    stream = PackStream(items, **settings)
    next(stream)
    resumed = PackStream(items, **settings)
    resumed.load_state_dict(stream.state_dict())
    for each in (stream, resumed):
        assert len(list(each)) == 3
        stats = each.stats()
        assert (stats.tokens, stats.packs, stats.waste, stats.excess) == (32, 4, 0.5, 0.0)


@pytest.mark.parametrize("mix", ["chat", "rl"])
def test_stats_say_what_happened(mix: str) -> None:
    rng = random.Random(0)
    lengths = [MIXES[mix](rng, 1024) for _ in range(20_000)]
    stream = PackStream((np.zeros(length, np.int32) for length in lengths), 1024, pool=64)
    packs = list(stream)
    stats = stream.stats()
    assert (stats.sequences, stats.packs, stats.tokens) == (20_000, len(packs), sum(lengths))
    assert stats.waste == pytest.approx(1 - sum(lengths) / len(packs) / 1024)
    bound = max(-(-sum(lengths) // 1024), sum(length > 512 for length in lengths))
    assert stats.excess == pytest.approx(len(packs) / bound - 1)
    assert stats.delay_packs.max <= 64
    where = {position: number for number, pack in enumerate(packs) for position in pack.ids}
    longest_wait = len(where)
    assert stats.delay_packs.p50 <= stats.delay_packs.p99 <= stats.delay_packs.max
    assert 0 < stats.delay_arrivals.max <= longest_wait
    costs = [pack.num_tokens for pack in packs]
    assert stats.cost_cv == pytest.approx(float(np.std(costs) / np.mean(costs)), rel=1e-6)
    assert abs(stats.length_drift) <= stats.length_drift_max < 0.5


@pytest.mark.parametrize("mix", MIXES)
def test_nothing_waits_for_more_packs_than_the_pool_is_large(mix: str) -> None:
    rng = random.Random(1)
    source = [np.zeros(MIXES[mix](rng, 1024), np.int32) for _ in range(10_000)]
    stream = PackStream(source, 1024, pool=32)
    list(stream)
    assert 0 < stream.stats().delay_packs.max <= 32


def test_the_median_and_p99_of_the_wait_are_upper_bounds() -> None:
    stream = PackStream([[1, 2, 3, 4]] * 12, 4, pool=10)
    assert len(list(stream)) == 12
    expected = (5, 9, 9)  # of 0 to 8 of those that came before the end, and three times 9
    for delay in (stream.stats().delay_packs, stream.stats().delay_arrivals):
        assert (delay.p50, delay.p99, delay.max) == expected


def test_the_longest_wait_is_exact() -> None:
    stream = PackStream([[1] * 40, *[[1] * 64] * 201, [1] * 24], 64, pool=200)
    assert max(len(pack.lengths) for pack in stream) == 1
    assert stream.stats().delay_arrivals.max == 199


MEMORY = """
import itertools, random, sys
import numpy as np
from chairlift_train.stream import PackStream
from tests.train.mixes import MIXES

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1])

rng, row = random.Random(0), np.zeros(1024, np.int32)
stream = PackStream((row[: MIXES["chat"](rng, 1024)] for _ in itertools.count()), 1024)
sizes, sequences = [], 0
for pack in stream:
    sequences += len(pack.ids)
    if sequences >= int(sys.argv[1 + len(sizes)]):
        sizes.append(resident())
    if len(sizes) == 2:
        break
print(sizes[1] / sizes[0])
"""


@pytest.mark.full
@pytest.mark.parametrize("count", [100_000, pytest.param(1_000_000, marks=pytest.mark.nightly)])
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_does_not_grow_with_the_stream(count: int) -> None:
    command = [sys.executable, "-c", MEMORY, "10000", str(count)]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert float(run.stdout) <= 1.05


@pytest.mark.nightly
def test_a_stream_of_a_million_is_planned_and_resumed_in_time() -> None:
    row = list(range(100))
    source = [row] * 1_000_000
    stream = PackStream(source, 4096)
    start = time.process_time()
    for _ in itertools.islice(stream, 24_900):
        pass
    assert time.process_time() - start <= 12
    state, resumed = stream.state_dict(), PackStream(source, 4096)
    start = time.process_time()
    resumed.load_state_dict(state)
    assert same(next(resumed), next(stream))
    assert time.process_time() - start <= 1


def test_a_sample_is_read_with_its_weights_and_source() -> None:
    sample = read_sample({"input_ids": [1, 2, 3], "labels": [1, -100, 3], "source": "s"}, 4, "source")
    assert (sample.id, sample.tokens.tolist(), sample.key, sample.total_weight) == (4, [1, 2, 3], "s", 1.0)
    assert sample.weights is not None and sample.weights.tolist() == [0, 0, 1]
