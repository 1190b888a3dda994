"""The number of positions whose KV a step reads only for another row comes from counters, and is exact."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.core.kv_cache.block_pool import NULL_BLOCK, BlockPool
from chairlift.core.kv_cache.block_tables import BlockTables
from chairlift.core.request import Request
from chairlift.core.scheduler.batch import Batch
from chairlift.core.scheduler.cost_model import CostModel, Roofline
from chairlift.core.scheduler.costs import Costs
from chairlift.core.scheduler.output import SchedulerOutput
from chairlift.errors import InvariantError
from tests.core.scheduler.driver import BLOCK, Driver, request

TREE = [list(range(1000 * stem, 1000 * stem + 40)) for stem in range(1, 4)]


def branch(name: str, stem: int, depth: int, own: int, max_tokens: int = 6, **other: Any) -> Request:
    """A request with the first ``depth`` tokens of a stem, and ``own`` tokens of its own."""
    tokens = TREE[stem][:depth] + [100_000 + 1000 * int(name[1:]) + i for i in range(own)]
    return request(name, tokens, max_tokens, **other)


class Counting(Driver):
    """Compares each step's number of shared positions with the block tables of its decode rows."""

    def __init__(self, **settings: Any) -> None:
        usual = {"caching": True, "num_blocks": 300, "reads_shared_once": True, "max_num_batched_tokens": 64}
        super().__init__(**{**usual, **settings})
        self.most = 0
        self.num_compared = 0

    def _tokens(self, out: SchedulerOutput) -> list[int]:
        tokens = super()._tokens(out)
        running = self.scheduler.running
        tables = [running[name].block_ids for name, _ in out.decode_rows] if out.num_decodes else []
        saved = 0
        for group in range(len(self.kv.pools)):
            blocks = [block for table in tables for block in table[group] if block != NULL_BLOCK]
            saved += len(blocks) - len(set(blocks))
        exact = saved * BLOCK // len(self.kv.pools)
        assert 0 <= out.shared_tokens <= out.context_tokens
        if not out.chunks and not self.scheduler.batch.catching_up:
            self.num_compared += 1
            assert out.shared_tokens == min(exact, out.context_tokens), (out.shared_tokens, exact)
        self.most = max(self.most, out.shared_tokens)
        return tokens


def check_equal_prompts() -> None:
    drive = Counting()
    drive.add(*(branch(f"r{n}", 0, 40, 3) for n in range(5)))
    drive.run()
    assert drive.most == 4 * 40 and drive.num_compared
    # A prompt that begins alike computes in a step beside two rows that decode: it does not count.
    drive = Counting(max_num_seqs=8)
    drive.add(branch("r0", 0, 40, 3, 12), branch("r1", 0, 40, 3, 12))
    for _ in range(4):
        drive.step()
    drive.add(branch("r2", 0, 40, 30, 12))
    out = drive.step()
    assert out.num_decodes == 2 and out.chunks and out.shared_tokens == 40
    assert drive.step().shared_tokens == 80
    drive.run()
    drive.add(branch("r3", 0, 40, 3), branch("r4", 0, 40, 3))  # the cache still has the blocks, and no table
    assert drive.step().shared_tokens == 0
    drive.run()


def test_rows_that_begin_alike_read_their_beginning_once() -> None:
    check_equal_prompts()


def test_answers_to_one_prompt_read_it_once() -> None:
    drive = Counting()
    first = branch("r0", 0, 40, 0)
    drive.add(first, *(branch(f"r{n}", 0, 40, 0, source=first) for n in range(1, 4)))
    drive.run()
    assert drive.most == 3 * 36  # the last block of the prompt is each answer's own


def test_an_executor_that_reads_each_row_shares_nothing() -> None:
    drive = Driver(caching=True, num_blocks=300)
    drive.add(*(branch(f"r{n}", 0, 40, 3) for n in range(5)))
    assert not any(out.shared_tokens for out in drive.run())


@settings(max_examples=60, deadline=None)
@given(
    branches=st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 40), st.integers(1, 12), st.integers(1, 9)), min_size=1, max_size=12
    ),
    depth=st.integers(0, 1),
    num_blocks=st.sampled_from([300, 40]),
    windows=st.sampled_from([(None,), (None, 16), (16,)]),
)
def test_any_tree_of_prefixes_is_counted_as_its_block_tables_say(
    branches: list[tuple[int, int, int, int]], depth: int, num_blocks: int, windows: tuple[int | None, ...]
) -> None:
    drive = Counting(num_blocks=num_blocks, windows=windows, max_num_seqs=6)
    for number, (stem, begin, own, answer) in enumerate(branches):
        drive.add(branch(f"r{number}", stem, begin, own, answer))
        if number % 3 == 2:
            drive.step()
    drive.run()


MUTATIONS = ["rows beside the decodes", "blocks of admission", "shares"]


@pytest.mark.planted("test_rows_that_begin_alike_read_their_beginning_once")
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_each_miscount_is_noticed(mutation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if mutation == "rows beside the decodes":
        right = Batch.shared_tokens
        monkeypatch.setattr(Batch, "shared_tokens", lambda self, aside=(): right(self))
    elif mutation == "blocks of admission":
        occupy = BlockTables.occupy

        def forgets(self: BlockTables, one: Request, *rest: Any) -> None:
            occupy(self, one, *rest)
            one.num_shared_blocks = 0

        monkeypatch.setattr(BlockTables, "occupy", forgets)
    else:
        share = BlockPool.share

        def counts_cached_blocks_too(self: BlockPool, block: int) -> None:
            share(self, block)
            self.num_shares += self.ref_counts[block] == 1

        monkeypatch.setattr(BlockPool, "share", counts_cached_blocks_too)
    with pytest.raises((AssertionError, InvariantError)):
        check_equal_prompts()


def test_a_pace_leaves_more_prompt_tokens_beside_rows_that_share() -> None:
    def chunk(reads_shared_once: bool) -> int:
        prices = Roofline(weight_seconds=1e-4, token_seconds=1e-4, context_seconds=1e-3, shared_share=0.1)
        costs = Costs([1], CostModel(prices))
        drive = Driver(caching=True, num_blocks=300, reads_shared_once=reads_shared_once, costs=costs)
        drive.add(*(branch(f"r{n}", 0, 40, 3, 20) for n in range(4)))
        for _ in range(4):
            drive.step()
        drive.scheduler.batch.paced["r0"] = 0.12
        drive.add(branch("r9", 1, 40, 20))
        return sum(chunk.num_tokens for chunk in drive.step().chunks)

    assert chunk(True) > chunk(False)
