"""Rows that read keys together have the bits that they have alone, in any trees of prefixes."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
import torch
from torch import Tensor

from chairlift.errors import InvariantError
from chairlift.kernels.triton import shared_prefixes
from chairlift.kernels.triton.launch import AttentionLaunch
from chairlift.kernels.triton.paged_attention import SharedTiles, paged_attention
from chairlift.kernels.triton.shared_prefixes import SharedRows, find_shared_tiles, nothing_shared, saved_seconds
from tests.kernels.triton.probes import TOLERANCE, normal, seeds
from tests.sweep import sweep

POISON = 0
"""The number of a block that nobody owns, all NaN. Unused entries of block tables point at it."""


@dataclasses.dataclass
class Tree:
    """Rows whose block tables begin alike, as prompts with common beginnings at several levels have them."""

    lengths: list[int]
    tables: np.ndarray
    num_blocks: int
    block_size: int
    heads: tuple[int, int]
    head_dim: int
    window: int | None
    dtype: torch.dtype
    device: torch.device
    cap: float | None = None
    has_sinks: bool = False

    def __post_init__(self) -> None:
        shape = (self.num_blocks, self.block_size, self.heads[1], self.head_dim)
        self.keys, self.values = (normal(*shape, dtype=self.dtype, seed=n, device=self.device) for n in (1, 2))
        self.keys[POISON] = self.values[POISON] = float("nan")
        self.q = normal(len(self.lengths), self.heads[0], self.head_dim, dtype=self.dtype, seed=3, device=self.device)

    @property
    def group(self) -> int:
        return self.heads[0] // self.heads[1]

    def find(self, launch: AttentionLaunch, rows: list[int] | None = None, slack: int = 0) -> SharedRows | None:
        rows = list(range(len(self.lengths))) if rows is None else rows
        lengths = np.array([self.lengths[row] for row in rows], dtype=np.int32)
        return find_shared_tiles(
            self.tables[rows], lengths, len(rows) + slack, block_size=self.block_size, window=self.window,
            launch=launch, group=self.group,
        )  # fmt: skip

    def run(
        self, launch: AttentionLaunch, rows: list[int], shared: SharedRows | None, slack: int = 0, offsets: bool = False
    ) -> Tensor:
        """The answers of ``rows``. ``slack``: rows that only fill up the batch. The tables are read indirectly."""
        q = torch.cat((self.q[rows], self.q.new_full((slack, *self.q.shape[1:]), float("nan"))))
        tables = torch.from_numpy(self.tables).to(self.device)
        sinks = normal(self.heads[0], dtype=self.dtype, seed=4, device=self.device) if self.has_sinks else None
        tiles = None
        if shared is not None:
            tiles = SharedTiles(self.ints(shared.members), self.ints(shared.ends))
        return paged_attention(
            q, self.keys, self.values, self.ints([self.lengths[row] for row in rows] + [0] * slack), tables, scale=0.3,
            window=self.window, launch=launch, table_rows=self.ints(rows + [0] * slack), shared=tiles,
            cu_seqlens=self.ints(np.arange(len(q) + 1)) if offsets else None, cap=self.cap, sinks=sinks,
        )[: len(rows)]  # fmt: skip

    def ints(self, values: object) -> Tensor:
        return torch.as_tensor(np.array(values, dtype=np.int32), device=self.device)


def grow(
    draw: random.Random, num_rows: int, block_size: int, most: int, window: int | None
) -> tuple[list[int], np.ndarray, int]:
    """(lengths, tables, number of blocks) of rows each of which begins like an earlier row or like none."""
    free = iter(range(1, 10_000))
    owned: list[list[int]] = []
    lengths = []
    for _ in range(num_rows):
        parent = draw.choice([[], *owned, *owned])
        kept = parent[: draw.choice([len(parent), draw.randint(0, len(parent))])]
        length = len(kept) * block_size + draw.choice([1, 1, 7, 30])
        length = min(length, most)
        kept = kept[: (length - 1) // block_size]  # the newest key is in a block of the row's own
        owned.append(kept + [next(free) for _ in range(-(-length // block_size) - len(kept))])
        lengths.append(length)
    tables = np.full((num_rows, max(map(len, owned)) + 1), POISON, dtype=np.int32)
    for row, blocks in enumerate(owned):
        # Blocks before the window may have been released. They are where they were, or nowhere.
        gone = 0 if window is None else max(0, lengths[row] - window) // block_size
        tables[row, : len(blocks)] = blocks
        tables[row, : draw.choice([0, gone])] = POISON
    return lengths, tables, next(free)


def any_tree(seed: int, device: torch.device) -> tuple[Tree, AttentionLaunch]:
    draw = random.Random(seed)
    heads = draw.choice([(2, 2), (4, 2), (6, 2), (7, 1), (8, 1)])
    window = draw.choice([None, None, 40, 90])
    block_size = draw.choice([4, 8, 16, 24])
    lengths, tables, num_blocks = grow(draw, draw.randint(2, 7), block_size, 150, window)
    dtype = draw.choice(list(TOLERANCE))
    launch = AttentionLaunch(draw.choice([16, 16, 32]), 16, draw.choice([1, 1, 2, 3]), num_warps=4, num_stages=2)
    more = (draw.choice([None, 2.0]), draw.random() < 0.5)
    tree = Tree(lengths, tables, num_blocks, block_size, heads, draw.choice([16, 24]), window, dtype, device, *more)
    return tree, launch


@pytest.fixture(autouse=True)
def one_tile_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_prefixes, "LEAST_TILES", 1)


@pytest.mark.parametrize("count", seeds(8))
def test_rows_have_the_same_bits_alone_in_company_and_together(
    request: pytest.FixtureRequest, count: int, device: torch.device
) -> None:
    together = 0

    def check(seed: int) -> None:
        nonlocal together
        draw = random.Random(seed)
        tree, launch = any_tree(seed, device)
        offsets = draw.random() < 0.3
        everyone = list(range(len(tree.lengths)))
        company = tree.run(launch, everyone, None, offsets=offsets)
        assert not company.isnan().any()
        for rows in (everyone, draw.sample(everyone, max(2, len(everyone) - 1))):
            found = tree.find(launch, rows, slack=seed % 3)
            together += found is not None
            ours = tree.run(launch, rows, found, seed % 3, offsets)
            assert torch.equal(ours, company[rows])
        alone = draw.choice(everyone)
        assert torch.equal(tree.run(launch, [alone], None, offsets=offsets)[0], company[alone])

    sweep(request, count, check)
    assert together > count // 2, "too few of the trees have tasks"


def fork(device: torch.device, lengths: list[int], prefix: int = 64, **changes: object) -> Tree:
    """Rows with ``prefix`` tokens in common, in blocks of 16, and two query heads for each of two KV heads."""
    width = -(-max(lengths) // 16)
    tables = np.arange(1, len(lengths) * width + 1, dtype=np.int32).reshape(-1, width)
    tables[:, : prefix // 16] = tables[0, : prefix // 16]
    tree = Tree(lengths, tables, tables.size + 1, 16, (4, 2), 16, None, torch.float32, device)
    return dataclasses.replace(tree, **changes)


LAUNCH = AttentionLaunch(16, 16, 1, num_warps=4, num_stages=2)


def test_tasks_are_runs_of_rows_that_share_the_most(device: torch.device) -> None:
    """Two documents behind one system prompt: each document's rows make a task, which has both levels."""
    tree = fork(device, [100, 101, 102, 103, 20], prefix=16)
    tree.tables[[0, 2], :5] = tree.tables[0, :5]
    tree.tables[[1, 3], 1:6] = tree.tables[1, 1:6]
    found = tree.find(LAUNCH, slack=1)
    assert found is not None
    tasks = {tuple(row for row in task if row >= 0) for task in found.members.tolist()}
    assert tasks == {(0, 2), (1, 3), ()}
    assert found.ends.tolist() == [5, 6, 5, 6, 0, 0]
    pair = tree.find(dataclasses.replace(LAUNCH, block_m=4), [0, 1, 2, 4])
    # The last row of the call is short, and shares the system prompt alone.
    assert pair is not None and sorted(pair.members.tolist()) == [[0, 2], [1, 3]]
    assert pair.ends.tolist() == [5, 1, 5, 1]


def test_only_whole_tiles_of_every_row_are_shared(device: torch.device) -> None:
    tree = fork(device, [63, 64, 65, 100], prefix=48)
    tree.tables[:, 3] = tree.tables[0, 3]
    found = tree.find(LAUNCH)
    assert found is not None and found.ends.tolist() == [3, 3, 3, 3]
    split = tree.find(dataclasses.replace(LAUNCH, num_splits=2))
    # 4, 4, 5 and 7 tiles: two, two, three and four for the first split
    assert split is not None and split.ends.tolist() == [3, 3, 0, 0]


def test_rows_whose_windows_begin_at_different_keys_stay_apart(device: torch.device) -> None:
    tree = fork(device, [70, 70, 71], window=50)
    found = tree.find(LAUNCH)
    assert found is not None and found.ends.tolist() == [4, 4, 0]
    assert found.starts.tolist() == [1, 1, 1]
    assert fork(device, [70, 71], window=50).find(LAUNCH) is None
    assert fork(device, [70, 71], window=80).find(LAUNCH) is not None


def test_rows_without_common_blocks_have_no_task(device: torch.device) -> None:
    assert fork(device, [70, 71, 72], prefix=0).find(LAUNCH) is None
    assert fork(device, [70]).find(LAUNCH) is None
    assert fork(device, [70, 71], heads=(16, 1)).find(LAUNCH) is None  # the query heads of a row fill the tile
    late = fork(device, [70, 71])
    late.tables[1, 0] = 9  # the second block and the following are equal, but the first is not
    assert late.find(LAUNCH) is None


def test_a_step_without_tasks_leaves_each_row_alone(device: torch.device) -> None:
    tree = fork(device, [70, 71])
    nobody = nothing_shared(3, 8)
    assert torch.equal(tree.run(LAUNCH, [0, 1], nobody, 1), tree.run(LAUNCH, [0, 1], None))


def test_tasks_may_change_from_step_to_step_in_the_same_memory(device: torch.device) -> None:
    """A captured launch reads the tasks from the same memory each time."""
    tree = fork(device, [70, 71, 72, 73])
    tree.tables[[0, 1], 4] = tree.tables[0, 4]
    tiles = SharedTiles(tree.ints(np.full((2, 8), -1)), tree.ints([0] * 4))
    tables = torch.from_numpy(tree.tables).to(device)
    expected = tree.run(LAUNCH, [0, 1, 2, 3], None)
    for rows in ([0, 1, 2, 3], [3, 1], [0, 2, 1], [2]):
        found = tree.find(LAUNCH, rows, slack=4 - len(rows)) or nothing_shared(4, 8)
        tiles.members.copy_(tree.ints(found.members))
        tiles.ends.copy_(tree.ints(found.ends))
        padding = [0] * (4 - len(rows))
        lengths = tree.ints([tree.lengths[row] for row in rows] + padding)
        ours = paged_attention(
            tree.q[rows + padding], tree.keys, tree.values, lengths, tables, scale=0.3, window=None, launch=LAUNCH,
            table_rows=tree.ints(rows + padding), shared=tiles,
        )  # fmt: skip
        assert torch.equal(ours[: len(rows)], expected[rows])


@pytest.mark.parametrize("fault", ["other group", "past the end", "other member", "other split"])
def test_a_wrong_task_changes_the_answer(fault: str, device: torch.device) -> None:
    """The comparisons of this file would notice."""
    launch = dataclasses.replace(LAUNCH, num_splits=2) if fault == "other split" else LAUNCH
    tree = fork(device, [70, 71, 72, 73, 120 if fault == "other split" else 66])
    tree.tables[[2, 3], :4] = tree.tables[2, :4] + 100  # another beginning
    tree = dataclasses.replace(tree, num_blocks=int(tree.tables.max()) + 1)
    expected = tree.run(launch, list(range(5)), None)
    found = tree.find(launch)
    assert found is not None
    task = next(i for i, members in enumerate(found.members.tolist()) if 0 in members)
    if fault == "other group":  # its rows read the keys of the first row's beginning
        found.members[task, :3] = [2, 0, 1]
    if fault == "past the end":  # more tiles than the rows have in common
        found.ends[[0, 1, 4]] = 5
    if fault == "other member":  # its state is never stored
        found.members[task][found.members[task] == 1] = -1
    if fault == "other split":  # the splits of a longer row begin elsewhere
        found.members[task, :3] = [0, 1, 4]
        found.ends[[0, 1, 4]] = 4
    ours = tree.run(launch, list(range(5)), found)
    assert not torch.equal(ours, expected)


def test_sharing_must_save_more_than_its_launch_takes(device: torch.device) -> None:
    lengths = [1030 + row % 9 for row in range(64)]
    tree = fork(device, lengths, prefix=1024)
    launch = dataclasses.replace(LAUNCH, block_n=64)
    found = tree.find(launch)
    assert found is not None and found.ends.tolist() == [16] * 64
    assert sorted((found.members >= 0).sum(axis=1).tolist())[-8:] == [8] * 8
    # 64 rows of 8 KV heads are 512 programs, 3.9 for each of 132 multiprocessors; 8 tasks are 64. Fewer than three for
    # each take as long as three. A program reads 16 tiles of 32 KiB.
    saved = saved_seconds(found, 8, launch, 1 << 15, 132)
    assert saved == pytest.approx((512 / 132 - 3) * 16 * (1 << 15) / 30e9 - 3e-6)
    assert saved > 0 > saved_seconds(found, 4, launch, 1 << 15, 132)
    assert saved_seconds(found, 4, launch, 1 << 15, 132) == pytest.approx(-3e-6)
    assert saved_seconds(None, 8, launch, 1 << 15, 132) == pytest.approx(-3e-6)


def test_tasks_of_another_shape_are_refused(device: torch.device) -> None:
    tree = fork(device, [70, 71])
    with pytest.raises(InvariantError, match=r"members \[1, 4\] and ends \[2\] do not go with 8 rows in a tile"):
        tree.run(LAUNCH, [0, 1], nothing_shared(2, 4))
    with pytest.raises(InvariantError, match="2 rows in the step"):
        tree.run(LAUNCH, [0, 1], nothing_shared(3, 8))
