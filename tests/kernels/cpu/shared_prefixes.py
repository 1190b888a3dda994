"""Sequences whose block tables begin alike, and their attention in one step."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from chairlift.kernels.cpu.fused_op import OpFlag, OpKind
from tests.kernels.cpu.one_op import Batch, Buffer, Cache, Machine, equal_bits, make_cache, normal, run, size_in

__all__ = ["Forest", "Step", "attend", "check", "draw_forest", "draw_step"]


@dataclasses.dataclass(frozen=True)
class Node:
    """A piece of text that all sequences below it share: ``blocks`` whole blocks of keys and values."""

    number: int
    blocks: int


@dataclasses.dataclass
class Forest:
    """Sequences as paths of shared nodes, each with tokens of its own at the end."""

    block_size: int
    paths: list[tuple[Node, ...]]
    lengths: list[int]
    """Length of each sequence. It may end inside of its last node."""
    news: list[int]
    """Number of each sequence's new tokens."""

    def owners(self, row: int) -> Iterator[tuple[int, int]]:
        """(index in the block table, number of the node) of the blocks that a row may share."""
        index = 0
        for node in self.paths[row]:
            for _ in range(node.blocks):
                yield index, node.number
                index += 1


@dataclasses.dataclass
class Step:
    """One attention operation over a forest."""

    forest: Forest
    kv_heads: int
    group: int
    head_dim: int
    window: int = 0
    cap: float = 0.0
    sinks: Tensor | None = None
    keys: list[Tensor] = dataclasses.field(default_factory=list)
    values: list[Tensor] = dataclasses.field(default_factory=list)
    queries: list[Tensor] = dataclasses.field(default_factory=list)

    def fill(self, rng: random.Random, dtype: torch.dtype) -> Step:
        """Draw keys, values and queries. Sequences have equal keys and values where they share blocks."""
        forest, known = self.forest, dict[int, list[Tensor]]()
        for path, length, new in zip(forest.paths, forest.lengths, forest.news, strict=True):
            parts = []
            for node in path:
                shape = node.blocks * forest.block_size, self.kv_heads, self.head_dim
                if node.number not in known:
                    known[node.number] = [normal(rng, *shape, dtype=dtype) for _ in "kv"]
                parts.append(known[node.number])
            rest = max(0, length - sum(len(part[0]) for part in parts))
            parts.append([normal(rng, rest, self.kv_heads, self.head_dim, dtype=dtype) for _ in "kv"])
            for which, into in enumerate((self.keys, self.values)):
                into.append(torch.cat([part[which] for part in parts])[:length])
            self.queries.append(normal(rng, new, self.kv_heads * self.group, self.head_dim, dtype=dtype))
        return self

    def first(self, row: int) -> int:
        """First position that the row's first query reads."""
        end = self.forest.lengths[row] - self.forest.news[row] + 1
        return max(0, end - self.window) if self.window else 0


def draw_forest(rng: random.Random, block_size: int) -> Forest:
    """Groups of up to twenty sequences; up to three levels of shared nodes; some sequences share nothing."""
    numbers = iter(range(1_000_000))
    paths, lengths = [], []

    def node() -> Node:
        tokens = size_in(rng, (16, 100), (100, 400), (200, 1400))
        return Node(next(numbers), max(1, tokens // block_size))

    def grow(path: tuple[Node, ...], level: int) -> None:
        if level < 3 and rng.random() < (0.9 if level == 0 else 0.5):
            below = (*path, node())
            for _ in range(rng.randint(1, 3)):
                grow(below, level + 1)
            return
        shared = sum(each.blocks for each in path) * block_size
        for _ in range(rng.choice((1, 2, rng.randint(1, 12)))):
            paths.append(path)
            own = size_in(rng, (1, 20), (1, 300), (1, 1200))
            # A sequence may end inside of the last block that others fill.
            short = rng.random() < 0.1 and shared > block_size
            lengths.append(shared - rng.randint(0, block_size - 1) if short else shared + own)

    while len(paths) < 2 or rng.random() < 0.3:
        grow((), 0)
    order = rng.sample(range(len(paths)), min(len(paths), 24))
    paths, lengths = [paths[i] for i in order], [lengths[i] for i in order]
    news = [min(length, rng.choice((1, 1, 1, rng.randint(1, 6), rng.randint(1, 40)))) for length in lengths]
    return Forest(block_size, paths, lengths, news)


def draw_step(rng: random.Random, dtype: torch.dtype) -> Step:
    """A random forest with random sizes and settings of attention."""
    forest = draw_forest(rng, rng.choice((16, 16, 32, 64, 256)))
    step = Step(forest, rng.randint(1, 2), rng.choice((1, 2, 3, 4, 7, 16)), 16 * rng.randint(2, 8))
    step.window = rng.choice((0, 0, rng.randint(1, 300), rng.randint(200, 2000), 256, 1024))
    step.cap = rng.choice((0.0, 0.0, 3.0))
    if rng.random() < 0.3:
        step.sinks = normal(rng, step.kv_heads * step.group)
    return step.fill(rng, dtype)


def _share_blocks(rng: random.Random, step: Step, cache: Cache, rows: list[int], kept: list[int]) -> None:
    """Let the rows' block tables name the same block where the rows share it. Entries before ``kept`` are never read;
    some name the shared block all the same."""
    owner = dict[tuple[int, int], int]()
    for at, row in enumerate(rows):
        for index, number in step.forest.owners(row):
            last = -(-step.forest.lengths[row] // step.forest.block_size)
            if index >= last:
                continue
            read = index >= kept[at] // step.forest.block_size
            if read:
                cache.table[at, index] = owner.setdefault((index, number), int(cache.table[at, index]))
            elif rng.random() < 0.5:
                cache.table[at, index] = owner.get((index, number), 0)


def attend(
    machine: Machine, rng: random.Random, step: Step, rows: list[int], *, shares: bool = True, broken: int | None = None
) -> list[Tensor]:
    """Results [new, heads, head_dim] of the given rows, computed in one step. Blocks are scattered anew. ``broken`` is
    a row whose newest value is infinite."""
    forest, kv_heads = step.forest, step.kv_heads
    heads, dim = kv_heads * step.group, step.head_dim
    kept = [step.first(row) // forest.block_size * forest.block_size for row in rows]
    lengths, news = [forest.lengths[row] for row in rows], [forest.news[row] for row in rows]
    sizes: dict[str, Any] = {"kv_heads": kv_heads, "head_dim": dim}
    cache = make_cache(rng, machine, lengths, block_size=forest.block_size, first=kept, **sizes)
    _share_blocks(rng, step, cache, rows, kept)
    # A shorter sequence first: a longer one overwrites what is after its end.
    for at in sorted(range(len(rows)), key=lambda at: lengths[at]):
        keys, values = (x[rows[at]][kept[at] :].clone() for x in (step.keys, step.values))
        if rows[at] == broken:
            values[-1] = float("inf")
        cache.write(at, kept[at], keys, values)
    queries = torch.cat([step.queries[row] for row in rows])
    q = Buffer(rng, machine, len(queries), heads * dim, queries.flatten(1))
    out = Buffer(rng, machine, len(queries), heads * dim)
    batch = Batch(list(zip(news, lengths, strict=True)), [cache])
    sizes |= {"heads": heads, "window": step.window, "scale": dim**-0.5, "cap": step.cap, "sinks": step.sinks}
    flags = 0 if shares else int(OpFlag.APART)
    run(machine, OpKind.ATTENTION, batch, [q, out], [cache], in_=0, out=1, flags=flags, **sizes)
    return list(torch.split(out.rows.view(-1, heads, dim), news))


def check(machine: Machine, rng: random.Random, step: Step) -> None:
    """Assert that each row has the same bits alone, in a step that shares keys, and in one that does not."""
    rows = list(range(len(step.forest.paths)))
    together = attend(machine, rng, step, rows)
    apart = attend(machine, rng, step, rows, shares=False)
    some = rng.sample(rows, rng.randint(1, len(rows)))
    others = dict(zip(some, attend(machine._replace(threads=rng.choice((1, 3))), rng, step, some), strict=True))
    for row in rows:
        assert equal_bits(together[row], apart[row]), f"row {row} of {step.forest} depends on who shares its keys"
        assert row not in others or equal_bits(together[row], others[row]), f"row {row} depends on its batch"
    row = rng.choice(rows)
    (alone,) = attend(machine, rng, step, [row])
    assert equal_bits(together[row], alone), f"row {row} of {step.forest} is another one alone"
