"""Which decode rows read keys together: found on the host, once per step and cache group, from the block tables.

The rows of a tile of queries in the attention kernel need not belong to one sequence. A decode row has as many rows in
the tile as query heads share a KV head. The rest of the tile is free for other sequences that read the same keys.
Sorted by their block tables, sequences with long common beginnings are neighbours, at every level of a tree of
prefixes. So a division of the sorted rows into runs of neighbours is a set of tasks, and a dynamic program finds the
division that saves the most.

Hydragen (Juravsky et al., 2024) and cascade inference (Ye et al., 2024) compute a common prefix for all rows and merge
it with the rest, which changes the order of sums. Here a task has the same tiles of keys as each of its rows alone.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from chairlift.kernels.triton.launch import PROGRAMS_PER_MULTIPROCESSOR, AttentionLaunch

__all__ = ["SharedRows", "find_shared_tiles", "least_rows", "nothing_shared", "rows_per_task", "saved_seconds"]

_Int32 = npt.NDArray[np.int32]

LEAST_TILES: Final = 2
"""Minimum number of tiles of keys that rows must share. A row stores its state once and loads it once, (Dh + 2) * 4
bytes each per query head. For two query heads of 128 that is 2 KiB, and a tile of 64 keys has 32 KiB."""
MULTIPROCESSOR_RATE: Final = 30e9
"""Bytes per second of keys and values that one multiprocessor computes. Decode attention was measured at 93 % of the
H200's 4.24 TB/s with 132 multiprocessors, which is 29.9 GB/s for each. It is assumed that keys in the L2 cache are not
computed faster."""
LAUNCH_SECONDS: Final = 3e-6
"""Time of the second launch of a layer: about 2 us for the launch itself (a decode step of one row took 1.2 ms in 250
launches of at least 4 us each before launches were fused), and 1 us to store and load the states. It is an estimate."""


@dataclasses.dataclass(frozen=True, slots=True)
class SharedRows:
    """Tasks of a step in one cache group. See :class:`~chairlift.kernels.triton.paged_attention.SharedTiles`."""

    members: _Int32
    """[tasks, rows per task] rows of the step; -1 after the last row of a task, and in tasks that do not exist."""
    ends: _Int32
    """[N] tile of keys at which the shared tiles of each row end; 0: the row is in no task."""
    starts: _Int32
    """[N] tile of keys at which each row begins. It is not 0 if its window begins later."""


def rows_per_task(launch: AttentionLaunch, group: int) -> int:
    """Number of decode rows with ``group`` query heads per KV head that fit into one tile of queries."""
    return launch.block_m // group


def least_rows(num_kv_heads: int, launch: AttentionLaunch, num_multiprocessors: int) -> int:
    """Number of rows from which on sharing can save time, by the estimate of :func:`saved_seconds`."""
    return PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors // (num_kv_heads * launch.num_splits) + 1


def nothing_shared(num_rows: int, rows: int) -> SharedRows:
    """The arrays of a step with ``num_rows`` rows and no task, for tasks of up to ``rows`` rows."""
    members = np.full((_num_tasks(num_rows), rows), -1, dtype=np.int32)
    return SharedRows(members, np.zeros(num_rows, dtype=np.int32), np.zeros(num_rows, dtype=np.int32))


def find_shared_tiles(
    tables: _Int32,
    seq_lens: _Int32,
    num_rows: int,
    *,
    block_size: int,
    window: int | None,
    launch: AttentionLaunch,
    group: int,
) -> SharedRows | None:
    """Tasks of a step in which each row has one query; None if no rows share enough keys.

    Equal entries of the block tables are the only condition for a shared tile, whoever made them. Rows of a task also
    see their first key at the same position and divide their keys among the splits in the same way, so that a task
    sums in the order of each of its rows.

    Args: tables: [N, M] block tables of the step's rows; entries after a row's end or before its window may hold
    anything. seq_lens: [N], including the token of this step. num_rows: at least N; the number of rows with the padding
    of the launch. group: query heads per KV head.
    """
    rows = rows_per_task(launch, group)
    if rows < 2 or len(seq_lens) < 2:
        return None
    low = np.zeros_like(seq_lens) if window is None else np.maximum(seq_lens - window, 0)
    first = low // launch.block_n
    share = -(-(-(-seq_lens // launch.block_n) - first) // launch.num_splits)
    keys = np.stack((low, share if launch.num_splits > 1 else np.zeros_like(share)), axis=1)
    # A row that has ended may pass the end of its table. Its result is dropped.
    held = np.minimum(seq_lens, tables.shape[1] * block_size)
    whole = held // launch.block_n
    able = np.flatnonzero(whole - first >= LEAST_TILES)
    # Position of the last key that rows must share. Usually no two rows have the same block there.
    deep = (first + LEAST_TILES) * launch.block_n - 1
    entries = np.sort(tables[able, deep[able] // block_size])
    if not (entries[1:] == entries[:-1]).any():
        return None
    order = _order(tables, able, held, keys, deep, block_size)
    order = order[_has_neighbour(tables, keys, order, deep, block_size)]
    if len(order) < 2:
        return None
    ends = _common_ends(tables, keys, order, low, whole, block_size, launch.block_n)
    members = np.full((_num_tasks(num_rows), rows), -1, dtype=np.int32)
    row_ends = np.zeros(num_rows, dtype=np.int32)
    count = 0
    for begin, stop in _runs(ends - first[order[1:]], rows):
        task = order[begin:stop]
        members[count, : len(task)] = task
        row_ends[task] = ends[begin : stop - 1].min()
        count += 1
    starts = np.zeros(num_rows, dtype=np.int32)
    starts[: len(first)] = first
    return SharedRows(members, row_ends, starts) if count else None


def saved_seconds(
    found: SharedRows | None, num_kv_heads: int, launch: AttentionLaunch, tile_bytes: int, num_multiprocessors: int
) -> float:
    """Estimated time that the tasks save in one layer; negative if reading each row's keys alone is faster.

    A multiprocessor with three programs or more reads at its full rate. With fewer it reads more slowly, because each
    program waits for its own computations: so fewer programs than three for each take as long as three. ``tile_bytes``
    are those of a tile of keys and values of one KV head.
    """
    if found is None:
        return -LAUNCH_SECONDS
    sizes = (found.members >= 0).sum(axis=1)
    sizes = sizes[sizes > 0]
    leaders = found.members[: len(sizes), 0]
    tiles = found.ends[leaders] - found.starts[leaders]
    # The time of the longest task's tiles, as if the other tasks and rows had fractions of programs.
    longest = int(tiles.max())
    per_program = -(-longest // launch.num_splits) * tile_bytes / MULTIPROCESSOR_RATE
    programs = num_kv_heads * launch.num_splits / longest / num_multiprocessors
    alone = max(PROGRAMS_PER_MULTIPROCESSOR, float((sizes * tiles).sum()) * programs)
    together = max(PROGRAMS_PER_MULTIPROCESSOR, float(tiles.sum()) * programs)
    return (alone - together) * per_program - LAUNCH_SECONDS


def _num_tasks(num_rows: int) -> int:
    """Maximum number of tasks of a step with ``num_rows`` rows. A task has at least two rows."""
    return max(1, num_rows // 2)


def _order(
    tables: _Int32,
    able: npt.NDArray[np.intp],
    held: npt.NDArray[Any],
    keys: npt.NDArray[np.int32],
    deep: npt.NDArray[Any],
    block_size: int,
) -> npt.NDArray[np.intp]:
    """The rows ``able`` in an order in which rows with equal ``keys`` and long common beginnings are neighbours.

    ``held`` [N] is the number of tokens of each row in ``tables``. The blocks at a few positions are compared: first
    those at ``deep``, then at distances that double. Rows with the same block at one position usually have the same
    blocks before it. If they have not, the order is worse and nothing else.
    """
    last = held[able] - 1
    distance = 0
    columns = []
    while distance <= int((last - deep[able]).max()):
        columns.append(tables[able, np.minimum(deep[able] + distance, last) // block_size])
        distance = max(2 * distance, 4 * block_size)
    return able[np.lexsort((*columns[::-1], keys[able, 1], keys[able, 0]))]


def _has_neighbour(
    tables: _Int32, keys: npt.NDArray[np.int32], order: npt.NDArray[np.intp], deep: npt.NDArray[Any], block_size: int
) -> npt.NDArray[np.bool_]:
    """For each row in ``order``, whether a neighbour has equal ``keys`` and the same block at position ``deep`` [N].
    It leaves few rows for the comparison of whole tables."""
    entry = tables[order, deep[order] // block_size]
    same: npt.NDArray[np.bool_] = (entry[1:] == entry[:-1]) & (keys[order[1:]] == keys[order[:-1]]).all(axis=1)
    return np.append(same, False) | np.insert(same, 0, False)


def _common_ends(
    tables: _Int32,
    keys: npt.NDArray[np.int32],
    order: npt.NDArray[np.intp],
    low: npt.NDArray[Any],
    whole: npt.NDArray[Any],
    block_size: int,
    tile: int,
) -> npt.NDArray[Any]:
    """For each two neighbours in ``order``: the tile of keys at which their equal tiles end; 0 if their ``keys``
    differ. Only tiles that are full of keys of both rows count."""
    width = min(tables.shape[1], -(-int(whole[order].max()) * tile // block_size))
    sorted_tables = tables[order, :width]
    before = np.arange(width) < low[order[1:], None] // block_size  # entries before the window
    differ = (sorted_tables[1:] != sorted_tables[:-1]) & ~before
    blocks = np.where(differ.any(axis=1), differ.argmax(axis=1), width)
    ends = np.minimum(blocks * block_size // tile, np.minimum(whole[order[1:]], whole[order[:-1]]))
    return np.where((keys[order[1:]] == keys[order[:-1]]).all(axis=1), ends, 0)


def _runs(tiles: npt.NDArray[Any], rows: int) -> list[tuple[int, int]]:
    """Runs (begin, end) of two to ``rows`` neighbours that together save the most reads of tiles. ``tiles`` [N - 1] has
    the number of tiles that each two neighbours share.

    A run saves its shared tiles once for each row after the first.
    """
    count = len(tiles) + 1
    best = [0] * (count + 1)
    size = [1] * (count + 1)
    numbers = tiles.tolist()
    for end in range(1, count + 1):
        best[end] = best[end - 1]
        common = numbers[end - 2] if end > 1 else 0
        for length in range(2, min(rows, end) + 1):
            common = min(common, numbers[end - length])
            if common < LEAST_TILES:
                break
            saved = best[end - length] + (length - 1) * common
            if saved > best[end]:
                best[end] = saved
                size[end] = length
    runs = []
    end = count
    while end > 0:
        if size[end] > 1:
            runs.append((end - size[end], end))
        end -= size[end]
    return runs
