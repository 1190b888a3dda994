"""KV that went to host memory and came back is what it was, for every runner, in memory and in a file."""

from __future__ import annotations

import contextlib
import logging
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from chairlift.config import CacheGroup
from chairlift.executor.backends.native.native_kv import NativeKV
from chairlift.executor.backends.native.native_runner import NativeModelRunner
from chairlift.executor.backends.torch.model_runner import TorchModelRunner
from chairlift.executor.backends.torch.swap_space import CudaHostBlocks, make_swap_space
from chairlift.executor.executor import Executor
from chairlift.executor.host_memory import host_memory
from chairlift.executor.kv_tensors import KVPlan, make_host_blocks, make_kv_caches, plan_kv_cache
from chairlift.executor.local import LocalExecutor, ModelRunner
from chairlift.kernels.cpu.library import ThreadPool, supported_isas
from chairlift.kernels.weights import NATIVE, ONEDNN
from chairlift.models.context import LayerCache
from chairlift.models.hashlm import HashLM, reference_tokens
from chairlift.models.loader import load_model
from chairlift.models.model_files import read_config
from tests.executor.swapping import TURN, Turns, sampling_row
from tests.kernels.cpu.models import tiny_model
from tests.native import needs_kernels

BLOCK, VOCAB, LENGTH, TURNS = 16, 97, 128, 3
ROOM = 6
"""Blocks of the longest of the two requests below, and the null block: never enough for both."""


def prompts() -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(2, VOCAB) for _ in range(length)] for length in (60, 33)]


def where(tmp_path: Path, place: str) -> str | None:
    return str(tmp_path) if place == "file" else None


@pytest.mark.parametrize("place", ["memory", "file"])
@pytest.mark.parametrize("windows", [(None,), (20,), (None, 7, 20)])
def test_hashlm_answers_as_if_nothing_had_moved(windows: tuple[int | None, ...], place: str, tmp_path: Path) -> None:
    groups = [CacheGroup(ROOM, window, 12) for window in windows]
    directory = where(tmp_path, place)
    model = HashLM(groups, BLOCK, VOCAB, LENGTH, lambda nbytes: host_memory(nbytes, directory))
    turns = Turns(LocalExecutor(model, num_slots=2, max_model_len=LENGTH, block_size=BLOCK), swaps=True)
    answers = turns.run(prompts(), TURNS)
    assert answers == [
        reference_tokens(prompt, sampling_row(index, prompt), windows, VOCAB, TURN * TURNS)
        for index, prompt in enumerate(prompts())
    ]
    away = sum(len(blocks) for saved in turns.kv.swapped.values() for blocks in saved.blocks)
    assert turns.num_brought == turns.num_saved - away > 0
    assert model.block_bytes == [16 * BLOCK] * len(windows) == turns.executor.block_bytes


@pytest.mark.parametrize("part", ["swap_out", "swap_in"])
def test_a_copy_left_out_changes_the_answer(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = HashLM.move_blocks

    def move_blocks(self: HashLM, batch: Any) -> None:
        del getattr(batch, part)[-1:]
        return original(self, batch)

    monkeypatch.setattr(HashLM, "move_blocks", move_blocks)
    with pytest.raises(AssertionError, match="At index"):
        test_hashlm_answers_as_if_nothing_had_moved((None,), "memory", Path())


def make_executor(kind: str, model_dir: Path, blocks: int, directory: str | None) -> Executor:
    weight_format = ONEDNN if kind == "torch" else NATIVE
    kv_dtype = torch.int8 if kind == "int8" else None
    model = load_model(model_dir, read_config(model_dir), "float32", weight_format=weight_format)
    plan = plan_kv_cache(
        model.kv_cache_spec(),
        dtype=torch.float32,
        kv_dtype=kv_dtype,
        block_size=BLOCK,
        memory_bytes=0,
        num_blocks=blocks,
        most_tokens=0,
        swap_bytes=1 << 20,
        swap_directory=directory,
    )
    runner: ModelRunner
    if kind == "torch":
        runner = TorchModelRunner(model, plan, torch.float32, torch.device("cpu"))
    else:
        pool = ThreadPool(1, pin=False)
        runner = NativeModelRunner(model, plan, torch.float32, pool, isa=supported_isas()[-1], max_tokens=LENGTH)
    return LocalExecutor(runner, num_slots=2, max_model_len=LENGTH, block_size=BLOCK)


@pytest.mark.parametrize("place", ["memory", "file"])
@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("kind", ["torch", *(pytest.param(kind, marks=needs_kernels) for kind in ("native", "int8"))])
def test_real_models_answer_bit_for_bit_as_if_nothing_had_moved(
    kind: str, family: str, place: str, tmp_path: Path
) -> None:
    model_dir = tiny_model(tmp_path, family)
    there = Turns(make_executor(kind, model_dir, 2 * ROOM, None), swaps=False)
    back = Turns(make_executor(kind, model_dir, ROOM, where(tmp_path, place)), swaps=True)
    assert back.run(prompts(), TURNS, logprobs=8) == there.run(prompts(), TURNS, logprobs=8)
    assert back.num_brought > 0
    for found, truth in zip(back.results, there.results, strict=True):
        (one,), (other,) = found.logprobs, truth.logprobs
        assert one.token_ids.tolist() == other.token_ids.tolist()
        np.testing.assert_array_equal(one.logprobs, other.logprobs)


# -- many blocks at once, in any order ---------------------------------------------------------------------------------

SPEC = [LayerCache(2, 16, None), LayerCache(4, 16, 8), LayerCache(1, 32, None)]


class Stream:
    """Stands for CUDA's: what is queued is done at once, so that it cannot be seen to be late."""

    def __init__(self, device: torch.device) -> None:
        self.num_waits = 0

    def wait_stream(self, other: Stream) -> None:
        assert other is not self

    def synchronize(self) -> None:
        self.num_waits += 1


def cuda_on_the_cpu(caches: list[list[torch.Tensor]], plan: KVPlan, monkeypatch: pytest.MonkeyPatch) -> CudaHostBlocks:
    current = Stream(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    dtype = caches[0][0].dtype
    return CudaHostBlocks(caches, [torch.from_numpy(array).view(dtype) for array in make_host_blocks(plan)])


def test_copies_under_way_at_once_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_kv_cache(
        SPEC, dtype=torch.float32, block_size=BLOCK, memory_bytes=0, num_blocks=9, most_tokens=0, swap_bytes=1 << 19
    )
    caches: list[list[torch.Tensor]] = [[], []]
    for group, pair in zip(
        plan.layer_groups, make_kv_caches(SPEC, plan, torch.float32, torch.device("cpu")), strict=True
    ):
        caches[group] += pair
    space = cuda_on_the_cpu(caches, plan, monkeypatch)
    moves = [(0, block, block) for block in range(1, 9)]
    space.swap_out(moves)
    assert space._stream.num_waits == 0
    monkeypatch.setattr("chairlift.executor.backends.torch.swap_space._MAX_STAGED", 2 * plan.block_bytes[0])
    space.swap_out(moves)  # in four parts, of which two may be on their way
    assert space._stream.num_waits == 1


@pytest.mark.parametrize("kind", ["torch", "cuda", pytest.param("native", marks=needs_kernels)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("side_by_side", [True, False])
def test_every_block_goes_where_it_is_sent(
    kind: str, dtype: torch.dtype, side_by_side: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_kv_cache(
        SPEC, dtype=dtype, block_size=BLOCK, memory_bytes=0, num_blocks=40, most_tokens=0, swap_bytes=1 << 19
    )
    rng = np.random.default_rng(3)
    space: Any
    if kind != "native":
        caches = make_kv_caches(SPEC, plan, dtype, torch.device("cpu"))
        tensors: list[list[torch.Tensor]] = [[], []]
        for group, pair in zip(plan.layer_groups, caches, strict=True):
            tensors[group] += pair
        grouped: list[list[Any]] = [[cache.view(torch.uint8).numpy() for cache in group] for group in tensors]
        if kind == "cuda":
            monkeypatch.setattr("chairlift.executor.backends.torch.swap_space._MAX_STAGED", 3 * plan.block_bytes[0])
            space = cuda_on_the_cpu(tensors, plan, monkeypatch)
        else:
            space = make_swap_space(caches, plan)
    else:
        native = NativeKV(SPEC, plan)
        space, grouped = native.host, native._caches
    for cache in [cache for group in grouped for cache in group]:
        cache[:] = rng.integers(0, 256, cache.shape, dtype=np.uint8)
    before = [[cache.copy() for cache in group] for group in grouped]
    count = plan.groups[0].num_host_blocks
    assert count >= 20
    moves = [(group, block, host) for group in (0, 1) for block, host in _pairs(rng, count, side_by_side)]
    space.swap_out(moves)
    for cache in [cache for group in grouped for cache in group]:
        cache[:] = 0
    targets = {group: rng.permutation(40)[:30].tolist() for group in (0, 1)}
    wanted = [(group, host, targets[group].pop()) for group, _, host in moves]
    wanted += [(group, host, targets[group].pop()) for group, _, host in moves[::3]]  # two may want the same
    space.swap_in(wanted)
    sources = {(group, host): block for group, block, host in moves}
    for group in (0, 1):
        filled = {block: sources[group, host] for g, host, block in wanted if g == group}
        for cache, old in zip(grouped[group], before[group], strict=True):
            for block in range(40):
                expected = old[filled[block]] if block in filled else np.zeros_like(old[0])
                np.testing.assert_array_equal(cache[block], expected)


def _pairs(rng: np.random.Generator, count: int, side_by_side: bool) -> list[tuple[int, int]]:
    blocks, hosts = rng.permutation(40)[:20].tolist(), rng.permutation(20 if side_by_side else count)[:20].tolist()
    return list(zip(blocks, hosts, strict=True))


# -- memory that a GPU reads by itself ---------------------------------------------------------------------------------


class Cudart:
    """The calls of CUDA that the space for swapping makes. ``status`` is the result of registering memory."""

    def __init__(self, status: int) -> None:
        self.status = status
        self.calls: list[tuple[Any, ...]] = []

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.calls.append(("register", address, size, flags))
        return self.status

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append(("unregister", address))
        return 0

    def cudaGetErrorString(self, status: int) -> str:
        return f"error {status}"


@pytest.mark.parametrize("status", [0, 2])
def test_pinned_memory_has_the_planned_size_and_is_released(
    status: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cudart = Cudart(status)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: cudart.calls.append(("wait", device.type)))
    plan = plan_kv_cache(
        SPEC, dtype=torch.bfloat16, block_size=BLOCK, memory_bytes=0, num_blocks=40, most_tokens=0, swap_bytes=1 << 19
    )
    with caplog.at_level(logging.WARNING, "chairlift"):
        space = make_swap_space(make_kv_caches(SPEC, plan, torch.bfloat16, torch.device("meta")), plan)
    assert isinstance(space, CudaHostBlocks)
    hosts = list(space._hosts)
    first = hosts[0].data_ptr()
    assert cudart.calls == [("register", first, plan.host_bytes, 1)]
    assert sum(host.nbytes for host in hosts) == plan.host_bytes <= 1 << 19
    assert [host.shape[1] for host in hosts] == [sum(cache[0].numel() for cache in group) for group in space._caches]
    assert all(host.data_ptr() + host.nbytes <= first + plan.host_bytes for host in hosts)
    assert [f"{plan.host_bytes:,} bytes" in record.message for record in caplog.records] == [True] * bool(status)
    assert "error 2" in caplog.text or not status
    del space
    assert len(cudart.calls) == 1  # one tensor is enough to keep it
    del hosts
    assert cudart.calls[1:] == ([] if status else [("wait", "meta"), ("unregister", first)])


def test_without_host_blocks_nothing_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    cudart = Cudart(0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    plan = plan_kv_cache(SPEC, dtype=torch.float32, block_size=BLOCK, memory_bytes=0, num_blocks=4, most_tokens=0)
    make_swap_space(make_kv_caches(SPEC, plan, torch.float32, torch.device("meta")), plan)
    assert cudart.calls == []
