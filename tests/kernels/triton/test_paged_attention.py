"""Paged attention in Triton: against its definition, and bit for bit whoever else is in the launch."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from chairlift.errors import InvariantError
from chairlift.kernels import reference
from chairlift.kernels.triton import paged_attention as kernels
from chairlift.kernels.triton.launch import AttentionLaunch, attention_launch
from chairlift.kernels.triton.paged_attention import paged_attention
from tests.kernels.triton.probes import TOLERANCE, normal, seeds
from tests.sweep import sweep

HEADS = [(2, 2), (4, 2), (6, 1), (14, 2), (5, 5), (9, 3), (20, 1)]
POISON = 0
"""The number of a block that nobody owns, all NaN. Unused entries of block tables point at it."""


@dataclasses.dataclass
class Case:
    """Rows of (tokens in the sequence, queries), their keys and values scattered in caches that are NaN elsewhere."""

    rows: list[tuple[int, int]]
    block_size: int
    heads: tuple[int, int]
    head_dim: int
    window: int | None
    dtype: torch.dtype
    device: torch.device
    cap: float | None = None
    has_sinks: bool = False

    def __post_init__(self) -> None:
        longest = max((seq_len for seq_len, _ in self.rows), default=1)
        width = -(-longest // self.block_size) + 1
        num_blocks = len(self.rows) * width + 2
        shape = (num_blocks, self.block_size, self.heads[1], self.head_dim)
        self.keys, self.values = (torch.full(shape, float("nan"), dtype=self.dtype) for _ in range(2))
        self.table = torch.full((len(self.rows), width), POISON, dtype=torch.int32)
        free = random.Random(1).sample(range(1, num_blocks), num_blocks - 1)
        for i, (seq_len, queries) in enumerate(self.rows):
            first = 0 if self.window is None else max(0, seq_len - queries - self.window + 1)
            for block in range(first // self.block_size, -(-seq_len // self.block_size)):
                self.table[i, block] = free.pop()
            where = torch.arange(first, seq_len)
            slots = self.table[i].long()[where // self.block_size] * self.block_size + where % self.block_size
            # By the row's own shape, so that the same row holds the same numbers in every batch.
            seed, shape = 1000 * seq_len + queries, (seq_len, self.heads[1], self.head_dim)
            fresh = (normal(*shape, dtype=self.dtype, seed=seed + n, device=slots.device)[first:] for n in (0, 1))
            reference.write_kv(self.keys, self.values, slots, *fresh)
        self.keys, self.values, self.table = (x.to(self.device) for x in (self.keys, self.values, self.table))
        self.cu_seqlens = [0, *itertools.accumulate(queries for _, queries in self.rows)]
        queries = [self.queries(*row) for row in self.rows]
        empty = torch.empty((0, self.heads[0], self.head_dim), dtype=self.dtype, device=self.device)
        self.q = torch.cat([empty, *queries])

    @property
    def more(self) -> dict[str, Any]:
        """Arguments that most models do not have."""
        sinks = normal(self.heads[0], dtype=self.dtype, seed=5, device=self.device) + 1 if self.has_sinks else None
        return {"cap": self.cap, "sinks": sinks}

    def queries(self, seq_len: int, queries: int) -> Tensor:
        shape = (seq_len, self.heads[0], self.head_dim)
        whole = normal(*shape, dtype=self.dtype, seed=7 + seq_len, device=self.device)
        return whole[seq_len - queries :]

    def ints(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def run(self, launch: AttentionLaunch, *, decode: bool = False, slack: int = 0) -> Tensor:
        """The kernel's answer. ``slack``: tokens and rows that only fill up the batch. The table is read indirectly."""
        extra = torch.full((slack, *self.q.shape[1:]), float("nan"), dtype=self.dtype, device=self.device)
        lines = list(range(len(self.rows), 0, -1))
        table = torch.full((len(lines) + 1, self.table.shape[1]), POISON, dtype=torch.int32, device=self.device)
        table[lines] = self.table
        lengths, offsets = [seq_len for seq_len, _ in self.rows] + [0] * slack, self.cu_seqlens[-1:] * slack
        out = paged_attention(
            torch.cat((self.q, extra)),
            self.keys,
            self.values,
            self.ints(lengths),
            table,
            scale=0.3,
            window=self.window,
            launch=launch,
            cu_seqlens=None if decode else self.ints(self.cu_seqlens + offsets),
            table_rows=self.ints(lines + [0] * slack),
            **self.more,
        )
        return out[: len(self.q)]

    def truth(self) -> Tensor:
        lengths = [seq_len for seq_len, _ in self.rows]
        return reference.paged_attention(
            self.q, self.keys, self.values, self.cu_seqlens, lengths, self.table.long(), scale=0.3, window=self.window,
            **self.more,
        )  # fmt: skip


def launches(heads: tuple[int, int], draw: random.Random) -> AttentionLaunch:
    """Any tile sizes that hold the group of heads."""
    block_m = draw.choice([m for m in (16, 32) if m >= heads[0] // heads[1]])
    return AttentionLaunch(block_m, draw.choice([16, 32]), draw.choice([1, 1, 2, 3, 5]), num_warps=4, num_stages=2)


def any_case(seed: int, device: torch.device, *, decode: bool) -> tuple[Case, AttentionLaunch]:
    draw = random.Random(seed)
    rows = []
    for _ in range(draw.randint(1, 3)):
        seq_len = draw.choice([1, 2, 16, 17, 33, 60])
        rows.append((seq_len, 1 if decode else draw.choice([0, 1, min(5, seq_len), min(23, seq_len)])))
    if sum(queries for _, queries in rows) == 0:
        rows.append((3, 2))
    heads = draw.choice(HEADS)
    head_dim = draw.choice([16, 16, 24, 32, 64, 80])
    window = draw.choice([None, None, 1, 7, 40])
    dtype = draw.choice(list(TOLERANCE))
    more: dict[str, Any] = {"cap": draw.choice([None, 0.7, 5.0]), "has_sinks": draw.random() < 0.5}
    case = Case(rows, draw.choice([1, 3, 8, 16, 16, 32]), heads, head_dim, window, dtype, device, **more)
    return case, launches(heads, draw)


@pytest.mark.parametrize("count", seeds(4))
@pytest.mark.parametrize("decode", [False, True], ids=["ragged", "decode"])
def test_paged_attention_equals_its_definition(
    request: pytest.FixtureRequest, count: int, decode: bool, device: torch.device
) -> None:
    def check(seed: int) -> None:
        case, launch = any_case(seed, device, decode=decode)
        ours = case.run(launch, decode=decode, slack=seed % 3)
        torch.testing.assert_close(ours, case.truth(), rtol=0, atol=TOLERANCE[case.dtype])

    sweep(request, count, check)


@pytest.mark.parametrize("count", seeds(1))
@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("decode", [False, True], ids=["ragged", "decode"])
def test_a_row_has_the_same_bits_in_any_company(
    request: pytest.FixtureRequest, count: int, num_splits: int, decode: bool, device: torch.device
) -> None:
    def check(seed: int) -> None:
        draw = random.Random(seed)
        rows = [(draw.randint(90, 130), 1), (draw.randint(2, 40), 1 if decode else 2), (70, 1 if decode else 9)]
        heads, dtype = draw.choice([(3, 1), (7, 1), (4, 2)]), draw.choice(list(TOLERANCE))
        case = Case(rows, 8, heads, 16, draw.choice([None, 60]), dtype, device, draw.choice([None, 2.0]), seed % 2 > 0)
        launch = AttentionLaunch(16, 16, num_splits, num_warps=4, num_stages=2)
        together = case.run(launch, decode=decode, slack=2).split([queries for _, queries in rows])
        for i, row in enumerate(rows[:2]):
            alone = dataclasses.replace(case, rows=[row])
            assert torch.equal(alone.run(launch, decode=decode), together[i])
        last_first = dataclasses.replace(case, rows=rows[::-1])
        turned = last_first.run(launch, decode=decode).split([queries for _, queries in rows[::-1]])
        assert all(torch.equal(a, b) for a, b in zip(together, turned[::-1], strict=True))

    sweep(request, count, check)


@pytest.mark.parametrize("more", [{}, {"cap": 2.0, "has_sinks": True}], ids=["plain", "cap and sinks"])
@pytest.mark.parametrize("window", [None, 9])
def test_without_splits_chunks_do_not_show(window: int | None, more: dict[str, Any], device: torch.device) -> None:
    launch = AttentionLaunch(16, 16, 1, 4, 2)
    whole = Case([(50, 50)], 8, (3, 1), 32, window, torch.bfloat16, device, **more)
    expected = whole.run(launch)
    for seq_len, queries in [(20, 20), (31, 11), (32, 1), (50, 18)]:
        # The same keys and values: the beginning of the whole sequence's blocks.
        out = paged_attention(
            whole.queries(50, 50)[seq_len - queries : seq_len],
            whole.keys,
            whole.values,
            whole.ints([seq_len]),
            whole.table,
            scale=0.3,
            window=window,
            launch=launch,
            cu_seqlens=whole.ints([0, queries]),
            **whole.more,
        )
        assert torch.equal(out, expected[seq_len - queries : seq_len])


def test_a_cap_and_a_sink_far_from_the_scores_leave_what_they_should(device: torch.device) -> None:
    """A cap far above all scores changes little; one far below makes all weights equal. A sink that is minus infinity
    takes no weight; one above all scores takes all of it. Keys that are not seen stay so behind the cap."""
    launch = AttentionLaunch(16, 16, 2, 4, 2)
    plain = Case([(20, 1), (33, 1)], 4, (4, 2), 16, 25, torch.float32, device)
    tiny = dataclasses.replace(plain, cap=1e-6)
    mean = torch.stack(
        [
            values.repeat_interleave(2, dim=1).mean(0)
            for row, (seq_len, _) in enumerate(plain.rows)
            for values in [plain.values[plain.table[row].long()].flatten(0, 1)[max(0, seq_len - 25) : seq_len]]
        ]
    )
    how: dict[str, Any] = {"rtol": 0, "atol": 2e-4}
    torch.testing.assert_close(tiny.run(launch, decode=True), mean, **how)
    expected = plain.run(launch, decode=True)
    torch.testing.assert_close(dataclasses.replace(plain, cap=1e3).run(launch, decode=True), expected, **how)
    args = (plain.q, plain.keys, plain.values, plain.ints([20, 33]), plain.table)
    for sink, factor in ((float("-inf"), 1.0), (1e4, 0.0)):
        sinks = torch.full((4,), sink, device=device)
        out = paged_attention(*args, scale=0.3, window=25, launch=launch, sinks=sinks)
        torch.testing.assert_close(out, expected * factor, **how)


def a_sink_in_each_split(patch: pytest.MonkeyPatch) -> None:
    first = kernels._no_keys
    patch.setattr(kernels, "_no_keys", lambda sinks, head, real, split, *sizes: first(sinks, head, real, 0, *sizes))


def no_cap(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(kernels, "_capped", lambda scores, cap: scores)


def a_cap_half_as_high(patch: pytest.MonkeyPatch) -> None:
    capped = kernels._capped
    patch.setattr(kernels, "_capped", lambda scores, cap: capped(scores, cap / 2))


@pytest.mark.planted("test_paged_attention_equals_its_definition")
@pytest.mark.skipif(torch.cuda.is_available(), reason="only interpreted kernels can be replaced")
@pytest.mark.parametrize("fault", [a_sink_in_each_split, no_cap, a_cap_half_as_high])
def test_mistakes_with_caps_and_sinks_are_noticed(
    fault: Callable[[pytest.MonkeyPatch], None], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case([(40, 1)], 8, (4, 2), 16, None, torch.float32, device, cap=2.0, has_sinks=True)
    launch = AttentionLaunch(16, 16, 3, 4, 2)
    torch.testing.assert_close(case.run(launch, decode=True), case.truth(), rtol=0, atol=1e-5)
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(case.run(launch, decode=True), case.truth(), rtol=0, atol=1e-5)


def test_a_nan_stays_in_its_sequence(device: torch.device) -> None:
    case = Case([(20, 4), (33, 1), (5, 5)], 4, (4, 1), 16, None, torch.float32, device)
    launch = AttentionLaunch(16, 16, 3, 4, 2)
    clean = case.run(launch)
    case.values[case.table[1, 2].long()] = float("nan")
    broken = case.run(launch)
    assert broken[4].isnan().all()
    assert torch.equal(broken[:4], clean[:4]) and torch.equal(broken[5:], clean[5:])


def test_the_table_of_launches_fits_its_cases(device: torch.device) -> None:
    case = Case([(300, 1), (17, 1)], 16, (14, 2), 64, None, torch.bfloat16, device)
    settings = {"head_dim": 64, "group": 7, "num_kv_heads": 2, "max_rows": 2, "num_multiprocessors": 132}
    split, mixed = (attention_launch(**settings, decode_only=decode) for decode in (True, False))
    assert split.num_splits == 16 and mixed.num_splits == 1
    assert attention_launch(**settings | {"max_rows": 256}, decode_only=True).num_splits == 2
    assert attention_launch(**settings | {"max_rows": 1024}, decode_only=True).num_splits == 1
    for launch, decode in ((split, True), (mixed, False)):
        torch.testing.assert_close(case.run(launch, decode=decode), case.truth(), rtol=0, atol=2e-2)


def test_no_tokens_give_an_empty_result(device: torch.device) -> None:
    launch = AttentionLaunch(16, 16, 2, 4, 2)
    assert Case([], 16, (4, 2), 16, None, torch.float32, device).run(launch).shape == (0, 4, 16)
    assert Case([(5, 0)], 16, (4, 2), 16, None, torch.float32, device).run(launch).shape == (0, 4, 16)


def test_blocks_beyond_two_thousand_million_numbers_are_read(device: torch.device) -> None:
    """The memory is only promised by the system: all but two blocks are never touched."""
    num_blocks = 2**31 // (16 * 16) + 3
    cache = torch.empty((num_blocks, 16, 1, 16), dtype=torch.bfloat16, device=device)
    cache[-1] = normal(16, 1, 16, dtype=torch.bfloat16, seed=1, device=device)
    q = normal(1, 2, 16, dtype=torch.bfloat16, seed=2, device=device)
    table = torch.tensor([[num_blocks - 1]], dtype=torch.int32, device=device)
    lengths = torch.tensor([11], dtype=torch.int32, device=device)
    launch = AttentionLaunch(16, 16, 1, 4, 2)
    ours = paged_attention(q, cache, cache, lengths, table, scale=0.3, window=None, launch=launch)
    truth = reference.paged_attention(q, cache, cache, [0, 1], [11], table.long(), scale=0.3, window=None)
    torch.testing.assert_close(ours, truth, rtol=0, atol=2e-2)


@pytest.mark.parametrize(
    ("heads", "head_dim", "what"),
    [((4, 3), 16, "does not go with"), ((4, 2), 8, "from 16 to 256"), ((34, 1), 16, "block_m 16")],
)
def test_shapes_that_do_not_fit_are_refused(
    heads: tuple[int, int], head_dim: int, what: str, device: torch.device
) -> None:
    cache = torch.zeros((2, 16, heads[1], head_dim), device=device)
    q, ints = torch.zeros((1, heads[0], head_dim), device=device), torch.zeros(1, dtype=torch.int32, device=device)
    launch = AttentionLaunch(16, 16, 1, 4, 2)
    with pytest.raises(InvariantError, match=what):
        paged_attention(q, cache, cache, ints, ints[None], scale=1.0, window=None, launch=launch)
    caches = torch.zeros((2, 16, 2, 64), device=device)[..., :16]
    with pytest.raises(InvariantError, match="contiguous"):
        paged_attention(
            q.new_zeros((1, 4, 16)), caches, caches, ints, ints[None], scale=1.0, window=None, launch=launch
        )
    good = torch.zeros((2, 16, 2, 16), device=device)
    with pytest.raises(InvariantError, match=r"sinks \[3\] must be one number for each of 4 heads"):
        paged_attention(
            q.new_zeros((1, 4, 16)), good, good, ints, ints[None], scale=1.0, window=None, launch=launch,
            sinks=torch.zeros(3, device=device),
        )  # fmt: skip
