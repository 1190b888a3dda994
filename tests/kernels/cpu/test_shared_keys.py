"""Rows that read shared KV blocks together have the bits that each has alone; and mistakes in that are noticed."""

from __future__ import annotations

import dataclasses
import random
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from chairlift.kernels.cpu import library
from tests.kernels.cpu.emulated_tiles import SOURCES
from tests.kernels.cpu.one_op import Machine, counts, equal_bits
from tests.kernels.cpu.shared_prefixes import Forest, Node, Step, attend, check, draw_step
from tests.sweep import sweep
from tests.tiers import one_in

pytestmark = pytest.mark.usefixtures("native_library")

BLOCK = 16


@pytest.fixture(params=[False, True], ids=["plain", "int8"])
def int8_kv(request: pytest.FixtureRequest) -> bool:
    """Each kind of cache."""
    return bool(request.param)


@pytest.fixture
def machine(machine: Machine, int8_kv: bool) -> Machine:
    """Each path, dtype, number of threads and kind of cache."""
    return machine._replace(int8_kv=int8_kv)


def forest(shared: Sequence[int], own: Sequence[int], new: Sequence[int] = ()) -> Forest:
    """Sequences with ``own[i]`` tokens of their own after ``shared[0]``, ``shared[1]`` ... tokens of nodes that all
    share. The last node of every other sequence is another one of the same size."""
    nodes = [Node(i, tokens // BLOCK) for i, tokens in enumerate(shared)]
    other = [*nodes[:-1], dataclasses.replace(nodes[-1], number=len(nodes))]
    paths = [tuple(other if i % 2 else nodes) for i in range(len(own))]
    lengths = [sum(shared) + tokens for tokens in own]
    return Forest(BLOCK, paths, lengths, list(new) or [1] * len(own))


@counts(2)
def test_random_forests_of_shared_keys_equal_rows_alone(
    machine: Machine, count: int, request: pytest.FixtureRequest
) -> None:
    """Random groups, levels, sizes of blocks, heads, windows, caps and sinks."""

    def one(seed: int) -> None:
        rng = random.Random(seed)
        check(machine, rng, draw_step(rng, machine.dtype))

    sweep(request, count, one)


@pytest.mark.parametrize("shared", [64, 240, 256, 272, 1008, 1024, 1040, 1264, 2000])
def test_shared_prefixes_are_right_at_edges_of_tiles_and_splits(shared: int, isa: str, dtype: torch.dtype) -> None:
    rng = random.Random(shared)
    for int8_kv in (False, True):
        own = [rng.choice((1, 15, 16, 17, 60, 300)) for _ in range(9)]
        step = Step(forest([shared, 96], own), 1, 3, 32).fill(rng, dtype)
        check(Machine(isa, dtype, 2, int8_kv), rng, step)


@pytest.mark.parametrize("window", [1, 16, 100, 256, 700])
def test_windows_may_begin_at_different_positions(window: int, isa: str, dtype: torch.dtype) -> None:
    rng = random.Random(window)
    own = [rng.randint(1, 400) for _ in range(12)]
    step = Step(forest([1200], own), 1, 2, 32, window=window).fill(rng, dtype)
    for int8_kv in (False, True):
        check(Machine(isa, dtype, 2, int8_kv), rng, step)


def test_drafts_and_short_chunks_share_keys(machine: Machine) -> None:
    """Rows with several new tokens share keys, too; a long chunk reads alone."""
    rng = random.Random(0)
    own = [rng.randint(40, 90) for _ in range(8)]
    step = Step(forest([512], own, [1, 5, 16, 1, 3, 40, 16, 2]), 2, 2, 48).fill(rng, machine.dtype)
    check(machine, rng, step)


def test_an_infinite_value_reaches_only_its_own_row(machine: Machine) -> None:
    """Rows are computed again, each alone, where a sum is not finite."""
    rng = random.Random(0)
    step = Step(forest([560], [20, 30, 40, 50]), 1, 2, 32).fill(rng, machine.dtype)
    sound = attend(machine, rng, step, [0, 1, 2, 3])
    for broken in range(4):
        found = attend(machine, rng, step, [0, 1, 2, 3], broken=broken)
        for row in range(4):
            assert equal_bits(found[row], sound[row]) == (row != broken)
        assert not found[broken].isfinite().all()


def test_groups_may_change_from_step_to_step(machine: Machine) -> None:
    """Rows join and leave in any order; every step is planned anew."""
    rng = random.Random(0)
    step = Step(forest([1100, 128], [rng.randint(1, 200) for _ in range(10)]), 1, 3, 32).fill(rng, machine.dtype)
    alone = [attend(machine, rng, step, [row])[0] for row in range(10)]
    for _ in range(4):
        rows = rng.sample(range(10), rng.randint(2, 10))
        for row, out in zip(rows, attend(machine, rng, step, rows), strict=True):
            assert equal_bits(out, alone[row])


@dataclasses.dataclass(frozen=True)
class Mutant:
    """``right`` in a header becomes ``wrong``."""

    header: str
    right: str
    wrong: str


MUTANTS = {
    "a neighbour's blocks": Mutant("shared_keys.h", "mask(one.equal_from, one.equal_until) & seen_[i]", "seen_[i]"),
    "one block too many": Mutant("sharing.h", "one.equal_until = end * size;", "one.equal_until = (end + 1) * size;"),
    "a row sees behind its end": Mutant(
        "attention.h",
        "s.high[first_row + row] = piece.seen_end(row);",
        "s.high[first_row + row] = piece.seen_end(row) + (first_row > 0);",
    ),
    "a row sees before its window": Mutant(
        "attention.h",
        "s.low[first_row + row] = piece.seen_begin(row);",
        "s.low[first_row + row] = first_row > 0 ? 0 : piece.seen_begin(row);",
    ),
    "a group that changes within a tile": Mutant("shared_keys.h", "borders_ |= equal_[i] ^ equal_[i] << 1;", ""),
    "a member that ends within a tile": Mutant("shared_keys.h", "borders_ |= seen_[i] ^ seen_[i] << 1;", ""),
    "the tile after the shared ones left out": Mutant(
        "attention_tasks.h", "shared ? sharer->end(split) : 0", "shared ? sharer->end(split) + KV_TILE : 0"
    ),
    "a shared tile added twice": Mutant(
        "attention_tasks.h", "shared ? sharer->end(split) : 0", "shared ? sharer->end(split) - KV_TILE : 0"
    ),
    "the state of another split": Mutant(
        "attention_tasks.h", "handed(sharers[i], kv_head, shared.split)", "handed(sharers[i], kv_head, 0)"
    ),
    "the state of another member": Mutant(
        "attention_tasks.h", "hand_over(s_.all, members[i].first_row", "hand_over(s_.all, members[0].first_row"
    ),
    "the query of another member": Mutant(
        "attention.h", "store_rounded(s.q + (first_row + row) * dim", "store_rounded(s.q + (first_row / 2 + row) * dim"
    ),
    "the state of another KV head": Mutant(
        "plan.h", "((int64_t(sharer) * kv_heads + kv_head) * splits", "((int64_t(sharer) * kv_heads + 0) * splits"
    ),
    "weights of other columns": Mutant(
        "shared_keys.h",
        "multiply_codes<false>(run.task, codes, run.at, ahead, run.column0",
        "multiply_codes<false>(run.task, codes, run.at, ahead, 0",
    ),
    "sums of the tile before": Mutant(
        "shared_keys.h", "memset(codes.sums + part.first_row * dim, 0, sizeof(int32_t) * part.rows * dim);", ""
    ),
    "weights not rescaled": Mutant("shared_keys.h", "apply_factors(part, s, state);", ""),
}
FLAGS = ["-std=c++17", "-O1", "-fPIC", "-shared", "-ffp-contract=off", "-mavx2", "-mfma", "-mf16c", "-pthread", "-w"]


def compiled(folder: Path, mutant: Mutant | None) -> library.Library:
    """A library with attention in float32 alone, with the mistake or without one."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no g++ to compile the kernels with")
    for name in ("isa", "system"):
        shutil.copytree(SOURCES / name, folder / name)
    for source in [*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp"), Path(__file__).with_name("attention_ops.cpp")]:
        text = source.read_text()
        if mutant is not None and source.name == mutant.header:
            assert text.count(mutant.right) == 1, f"{mutant.header} has not once: {mutant.right}"
            text = text.replace(mutant.right, mutant.wrong)
        (folder / source.name).write_text(text)
    sources = [
        str(folder / f"{name}.cpp")
        for name in ("attention_ops", "api", "comm", "memory", "pack", "paths", "pool", "system")
    ]
    command = [compiler, *FLAGS, "-DCL_PATHS=1", f"-I{folder}", *sources, "-o", str(folder / "attention.so")]
    subprocess.run(command, check=True)
    return library.Library(folder / "attention.so")


def differs(kernels: library.Library) -> bool:
    """Whether the library's bits depend on who shares keys."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "_load", lambda: (kernels, ""))
        for seed in range(6):
            rng = random.Random(seed)
            machine = Machine("avx2", torch.float32, 2, int8_kv=seed % 2 == 1)
            own = [*(rng.randint(1, 200) for _ in range(4)), -5, -9]  # the last two end within the shared block
            window = (0, 0, 0, 0, 300, 300)[seed]
            step = Step(forest([1200, 160], own), 2, 2, 32, window=window).fill(rng, torch.float32)
            try:
                check(machine, rng, step)
            except AssertionError:
                return True
    return False


def test_the_kernels_are_right_where_mistakes_are_noticed(tmp_path: Path) -> None:
    kernels = compiled(tmp_path, None)
    assert not differs(kernels)
    # Only this library and AMX share parts of tiles. In the others a span must share whole tiles.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "_load", lambda: (kernels, ""))
        for shared in (64, 240, 272, 1008, 1040, 1264, 2000):
            rng = random.Random(shared)
            own = [rng.choice((1, 15, 16, 17, 60, 300)) for _ in range(9)]
            step = Step(forest([shared, 96], own), 1, 3, 32).fill(rng, torch.float32)
            check(Machine("avx2", torch.float32, 2, int8_kv=shared % 3 == 0), rng, step)


@pytest.mark.full
@pytest.mark.planted("test_the_kernels_are_right_where_mistakes_are_noticed")
@pytest.mark.parametrize("name", one_in(5, MUTANTS))
def test_a_mistake_in_the_source_is_noticed(name: str, tmp_path: Path) -> None:
    assert differs(compiled(tmp_path, MUTANTS[name]))
