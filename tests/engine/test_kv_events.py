"""Events of the prefix cache: a subscriber always knows exactly the blocks that a prompt would find."""

from __future__ import annotations

import importlib.util
import random
import sys
from array import array
from pathlib import Path
from typing import Any

import msgspec
import pytest

from chairlift.base.sampling_params import SamplingParams
from chairlift.config import CacheConfig, EngineConfig, SchedulerConfig, ServerConfig
from chairlift.core.request import Request
from chairlift.engine.core import EngineCore
from chairlift.engine.input_processor import PreparedRequest
from chairlift.engine.kv_events import events_of
from chairlift.errors import ConfigError
from chairlift.server.http.lifecycle import start_engine
from tests.server.watched import make_truth

needs_zmq = pytest.mark.skipif(importlib.util.find_spec("zmq") is None, reason="pyzmq is not installed")
BLOCK = 4


class Subscriber:
    """The blocks that a router knows from the events, by all tokens from the beginning of the prompt."""

    def __init__(self) -> None:
        self.beginnings: dict[int, tuple[int, ...]] = {}
        """Hash of a block -> all tokens up to its end."""
        self.seen: dict[int, tuple[int, ...]] = {}
        """The same for all blocks so far: a parent's block may be evicted while its child's is still there."""

    def take(self, events: list[dict[str, Any]]) -> None:
        for event in events:
            if event["type"] == "AllBlocksCleared":
                self.beginnings.clear()
            elif event["type"] == "BlockRemoved":
                for name in event["block_hashes"]:
                    del self.beginnings[name]
            else:
                assert event["block_size"] == BLOCK
                known = () if event["parent_block_hash"] is None else self.seen[event["parent_block_hash"]]
                tokens = event["token_ids"]
                assert len(tokens) == BLOCK * len(event["block_hashes"])
                for number, name in enumerate(event["block_hashes"]):
                    known = (*known, *tokens[BLOCK * number : BLOCK * number + BLOCK])
                    assert name not in self.beginnings
                    self.beginnings[name] = self.seen[name] = known


def test_a_subscriber_knows_what_the_cache_holds() -> None:
    """Under bursts, aborts and evictions, in every step."""
    truth, subscriber = make_truth(3), Subscriber()
    cache = truth.core.kv.prefix_cache
    assert cache is not None
    cache.journal = []
    evicted = stored = 0

    def held() -> set[tuple[int, ...]]:
        found = set()
        for node in cache._nodes.values():
            if node.blocks[0] is not None:
                tokens, above = b"", node
                while above.parent is not None:
                    tokens, above = above.tokens + tokens, above.parent
                found.add(tuple(memoryview(tokens).cast("q")))
        return found

    step = truth.step

    def step_and_compare() -> None:
        nonlocal evicted, stored
        step()
        changes, cache.journal = cache.journal or [], []
        evicted += sum(kind == "removed" for kind, *_ in changes)
        stored += sum(kind == "stored" for kind, *_ in changes)
        subscriber.take(events_of(changes, BLOCK))
        assert set(subscriber.beginnings.values()) == held()

    truth.step = step_and_compare  # type: ignore[method-assign]
    truth.run(12)
    assert stored > 100 and evicted > 50
    cache.clear()
    subscriber.take(events_of(cache.journal, BLOCK))
    assert not subscriber.beginnings and not held()


def test_blocks_of_one_prompt_share_an_event() -> None:
    def key(number: int) -> bytes:
        return bytes([number] * 32)

    def block(first: int) -> bytes:
        return array("q", range(first, first + BLOCK)).tobytes()

    plain = Request("a", [1], max_tokens=1)
    changes: list[tuple[Any, ...]] = [
        ("stored", key(1), None, block(0) + b"marks of images", plain),
        ("stored", key(2), key(1), block(4), plain),
        ("stored", key(3), None, block(8), Request("b", [1], max_tokens=1, adapter_id=7)),
        ("removed", key(1)),
        ("removed", key(3)),
        ("stored", key(4), key(2), block(12), plain),
    ]
    first, other, removed, late = events_of(changes, BLOCK)
    assert first["token_ids"] == list(range(8)) and len(first["block_hashes"]) == 2
    assert (first["parent_block_hash"], first["lora_id"], other["lora_id"]) == (None, None, 7)
    assert removed == {
        "type": "BlockRemoved",
        "block_hashes": [first["block_hashes"][0], *other["block_hashes"]],
        "medium": "GPU",
    }
    assert late["parent_block_hash"] == first["block_hashes"][1]
    assert events_of([*changes, ("cleared",)], BLOCK) == [{"type": "AllBlocksCleared"}]


def make_core(endpoint: str | None) -> EngineCore:
    executor = make_truth().core.executor
    cache = CacheConfig(kv_events_endpoint=endpoint)
    return EngineCore(
        executor, SchedulerConfig(max_num_seqs=5, max_num_batched_tokens=24), max_model_len=96, cache=cache
    )


@needs_zmq
def test_events_have_the_format_of_vllm(tmp_path: Path) -> None:
    import zmq

    core, rng, got = make_core(f"ipc://{tmp_path}/events"), random.Random(1), list[bytes]()
    with zmq.Context.instance().socket(zmq.SUB) as socket:
        socket.subscribe(b"")
        socket.connect(f"ipc://{tmp_path}/events")
        for number in range(500):  # a subscriber gets nothing that was sent before it was connected
            prompt = [rng.randrange(18) for _ in range(9)]
            params = SamplingParams(max_tokens=2, ignore_eos=True)
            core.add(PreparedRequest(f"r{number}", None, prompt, params, seed=1, max_tokens=2))
            while core.has_work:
                core.step()
            if socket.poll(20):
                got = socket.recv_multipart()
                break
    core.shutdown()
    topic, sequence, payload = got
    when, events = msgspec.msgpack.decode(payload)
    assert topic == b"" and len(sequence) == 8 and when > 1.7e9
    assert events[0]["type"] == "BlockStored" and len(events[0]["token_ids"]) == BLOCK * len(events[0]["block_hashes"])
    with pytest.raises(ConfigError, match="cannot listen on 'tcp://nowhere'"):
        make_core("tcp://nowhere")


def test_kv_events_are_off_by_default_and_need_their_package(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make_core(None).kv.prefix_cache
    assert cache is not None and cache.journal is None
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(ConfigError, match=r"pip install 'chairlift\[kv-events\]'"):
        make_core("tcp://127.0.0.1:5557")


def test_replicas_behind_one_queue_refuse_it() -> None:
    config = EngineConfig.from_flat({"model": "hashlm", "kv_events_endpoint": "tcp://127.0.0.1:5557"})
    with pytest.raises(ConfigError, match="kv_events_endpoint is for one engine"):
        start_engine(config, ServerConfig(replicas=2), lambda label, share: None)
