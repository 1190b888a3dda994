"""Pauses of conversations with files: blocks are given up, come back before the next turn, and displace nothing."""

from __future__ import annotations

import random
from typing import Any

import pytest

from chairlift.base.cache_hints import CacheHints
from chairlift.base.sampling_params import SamplingParams
from chairlift.base.turn_cache import TurnCache
from chairlift.config import CacheConfig, CacheGroup, SchedulerConfig
from chairlift.core.kv_cache.eviction.lease import LeaseRule
from chairlift.core.request import Request
from chairlift.engine.clock import VirtualClock
from chairlift.engine.engine import Engine
from chairlift.engine.input_processor import ModelLimits
from chairlift.engine.kv_store.files import StoreFiles
from chairlift.engine.kv_store.store import KVStore
from chairlift.executor.local import LocalExecutor
from chairlift.models.hashlm import HashLM
from tests.engine.kv_store.fake_disk import FakeDisk, FakeFile, Faults

BLOCK = 4


class Server:
    """An engine with a cache of 60 blocks and files, whose thread works when :meth:`step` is called."""

    def __init__(self, rule: str = "lease", write_rate: float = 1e9) -> None:
        self.clock = VirtualClock(1.0)
        model = HashLM([CacheGroup(61, None)], BLOCK, 97, 200)
        executor = LocalExecutor(model, num_slots=4, max_model_len=200, block_size=BLOCK)
        sizes: dict[str, Any] = {"block_size": BLOCK, "block_bytes": executor.block_bytes, "spans": [BLOCK]}
        files = StoreFiles(FakeDisk(random.Random(1), Faults()), "model", {}, nbytes=4_000_000, **sizes)
        self.store = KVStore(files, write_rate, self.clock.now, unix_time=self.clock.now, threaded=False)
        self.engine = Engine(
            executor,
            ModelLimits(97, 200, ()),
            SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=200),
            cache=CacheConfig(cache_eviction=rule),
            clock=self.clock,
            kv_store=lambda: self.store,
        )
        self.engine.core.costs.model.prefill_seconds = lambda num, begin=0: num / 20  # type: ignore[method-assign]
        self.number = 0
        self.works = True

    @property
    def rule(self) -> LeaseRule:
        rule = self.engine.kv.eviction
        assert isinstance(rule, LeaseRule)
        return rule

    def step(self, seconds: float = 0.05) -> list[Any]:
        self.clock.advance(seconds)
        outputs = self.engine.step()
        self.engine.check_invariants()
        while self.works and self.store.work():
            pass
        return outputs

    def ask(self, tokens: list[int], tools: tuple[str, ...] = (), **whose: Any) -> tuple[list[int], int]:
        """(prompt and answer, number of prompt tokens that were not computed). ``whose``: salt and hints."""
        self.number += 1
        name = f"r{self.number}"
        params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
        self.engine.add_request(tokens, params, request_id=name, stream=False, **whose)
        while not (ended := [each for each in self.step() if each.finished]):
            pass
        if tools:
            self.engine.core.paused(name, tools)
        return [*tokens, *ended[0].outputs[0].token_ids], ended[0].num_cached_tokens or 0

    def flood(self, seconds: float, length: int = 60) -> None:
        """Compute prompts that never come again for so many seconds."""
        end = self.clock.now() + seconds
        rng = random.Random(self.number)
        while self.clock.now() < end:
            self.ask([rng.randrange(97) for _ in range(length)])

    def cached(self, tokens: list[int]) -> int:
        """Number of leading tokens in the cache."""
        cache = self.engine.kv.prefix_cache
        assert cache is not None
        path = cache.walk(Request("look", tokens, max_tokens=1), len(tokens) // BLOCK)
        return sum(node.blocks[0] is not None for node in path) * BLOCK


PROMPT = list(range(3, 51))


def paused_server(**settings: Any) -> tuple[Server, list[int]]:
    """A server, and a conversation whose tool takes 10 seconds and has just begun."""
    server = Server(**settings)
    for _ in range(3):
        server.rule.gaps.observe("", ["search"], 10.0)
    said, _ = server.ask(PROMPT, ("search",))
    return server, said


def test_a_long_pause_is_given_up_and_comes_back_before_the_next_turn() -> None:
    server, said = paused_server()
    server.flood(5.0)
    assert server.cached(said) == 0, "the blocks were evicted like others"
    assert server.rule.orders[0].num_leased == 0
    server.flood(4.8)
    assert server.rule.num_fetched == 1
    assert server.cached(said) >= len(said) // BLOCK * BLOCK - BLOCK
    assert server.rule.orders[0].num_leased == server.cached(said) // BLOCK
    loads = server.engine.core.preparers.kv_blocks.num_loads
    _, cached = server.ask([*said, 1, 2])
    assert cached >= 48
    assert server.engine.core.preparers.kv_blocks.num_loads == loads, "the request waited for no file"
    assert (server.rule.found[TurnCache.KEPT], server.rule.num_fetched_used) == (1, 1)
    counts = server.engine.core.preparers.counts()
    assert (counts["num_kv_fetches"], counts["num_kv_fetches_used"]) == (1, 1)


def test_a_pause_that_ends_early_loads_what_it_lacks() -> None:
    server, said = paused_server()
    server.flood(5.0)
    _, cached = server.ask([*said, 1, 2])
    assert cached >= 48
    assert (server.rule.num_fetched, server.rule.found[TurnCache.KEPT]) == (0, 1)


def test_a_turn_that_never_comes_costs_one_read() -> None:
    server, said = paused_server()
    server.flood(9.8)
    read = server.store.num_read
    assert (server.rule.num_fetched, server.rule.num_fetched_used) == (1, 0)
    server.flood(20.0)
    assert server.store.num_read == read
    assert (server.cached(said), server.rule.orders[0].num_leased) == (0, 0)


def test_a_short_pause_keeps_its_blocks() -> None:
    server = Server()
    server.rule.gaps.observe("", ["search"], 1.0)
    said, _ = server.ask(PROMPT, ("search",))
    server.flood(0.9)
    assert server.cached(said) >= 48
    assert (server.rule.num_fetched, server.rule.num_leases) == (0, 1)


def test_a_fetch_displaces_no_lease_and_waits_for_room() -> None:
    server, said = paused_server()
    server.rule.gaps.observe("", ["read"], 1.9)
    others = [server.ask([each] * 44, ("read",))[0] for each in (91, 92)]
    leased = server.rule.orders[0].num_leased
    assert leased >= 22
    for turn in server.rule.turns.paused:  # they stay longer than the tool of the first one takes
        if turn.tools == ("read",):
            server.rule._lease(turn, 100.0, 2.0)
    server.flood(10.0, 20)
    assert [server.cached(each) for each in others] == [44, 44]
    assert (server.rule.num_fetched, server.cached(said)) == (0, 0)
    assert server.rule.orders[0].num_leased == leased


def test_a_request_that_arrives_during_a_fetch_does_not_wait_for_it() -> None:
    server, said = paused_server()
    server.flood(8.0)
    server.works = False
    while server.engine.core.preparers.kv_pauses._fetch is None:
        server.step()
    assert server.engine.core.next_event() is not None
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    server.engine.add_request([*said, 1], params, request_id="back", stream=False)
    server.step()
    assert server.engine.core.preparers.kv_pauses._fetch is None
    server.works = True
    outputs = [each for _ in range(20) for each in server.step()]
    assert [each.num_cached_tokens >= 48 for each in outputs if each.finished] == [True]


def test_blocks_of_a_pause_are_written_before_those_of_others() -> None:
    server, said = paused_server(write_rate=1.0)  # no block of the flood has its turn within an hour
    server.flood(1.0)
    stored = server.store.num_blocks
    assert stored >= len(PROMPT) // BLOCK
    server.flood(8.8)
    assert server.rule.num_fetched == 1 and server.cached(said) >= 48


def test_nothing_is_given_up_while_the_files_cannot_be_used() -> None:
    server = Server()
    server.store.stop("the disk is full")
    server.rule.gaps.observe("", ["search"], 10.0)
    said, _ = server.ask(PROMPT, ("search",))
    server.flood(9.0)
    assert server.cached(said) >= 48


@pytest.mark.parametrize(("salt", "cached"), [("mine", 48), ("another", 0), ("", 0)])
def test_the_session_of_another_key_reads_no_file(salt: str, cached: int, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server()
    hints = CacheHints(leases=((len(PROMPT), 0.1),), session="the conversation")
    server.ask(PROMPT, cache_salt="mine", hints=hints)
    server.flood(5.0)
    reads: list[int] = []
    read = FakeFile.read

    def counted(self: FakeFile, at: int, nbytes: int) -> bytes:
        reads.append(at)
        return read(self, at, nbytes)

    monkeypatch.setattr(FakeFile, "read", counted)
    assert server.ask([*PROMPT, 1], cache_salt=salt, hints=hints)[1] == cached
    assert bool(reads) == (cached > 0)


@pytest.mark.parametrize("rule", ["lru", "tlru"])
def test_other_rules_give_nothing_up(rule: str) -> None:
    server = Server(rule)
    server.ask(PROMPT, ("search",))
    assert "num_kv_fetches" not in server.engine.core.preparers.counts()


def test_new_weights_end_all_fetches() -> None:
    server, said = paused_server()
    server.flood(5.0)
    server.engine.core.preparers.weights_changed()
    server.flood(5.0)
    assert (server.rule.num_fetched, server.cached(said)) == (0, 0)
