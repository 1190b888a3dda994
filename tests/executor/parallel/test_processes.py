"""An engine whose model is divided among processes: equal tokens, and what happens when a process dies or hangs."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from chairlift.base.lora_request import LoRARequest
from chairlift.base.outputs import RequestOutput
from chairlift.base.sampling_params import SamplingParams
from chairlift.config import EngineConfig
from chairlift.engine.engine import Engine
from chairlift.errors import ConfigError, EngineDeadError, ModelLoadError
from chairlift.executor.backends.native import native_runner
from chairlift.executor.local import LocalExecutor
from chairlift.executor.parallel import processes
from chairlift.executor.parallel.parallel_runner import ParallelRunner
from chairlift.executor.parallel.processes import divide_processors, on_processors, rank_threads
from chairlift.llm import LLM
from chairlift.metrics.stats import EngineStats
from tests.kernels.cpu.models import tiny_model
from tests.lora.adapters import random_adapter
from tests.models.tiny import EXPERT_FAMILIES, tiny_hf_model
from tests.native import needs_kernels

pytestmark = needs_kernels

SIZES: dict[str, Any] = {"skip_tokenizer_init": True, "max_num_seqs": 4, "max_num_batched_tokens": 64, "threads": 2}
PROMPTS = [[5, 9, 11, 40, 41, 7] * 4, [5, 9, 11, 40, 41, 7] * 4 + [3, 2], [17] * 50, [90, 91], [6, 7, 8, 99, 120]]
PARAMS = [SamplingParams(temperature=0.9, seed=n, max_tokens=30, logprobs=1) for n in range(len(PROMPTS))]


def tokens(outputs: list[RequestOutput]) -> list[Any]:
    return [(one.outputs[0].token_ids, one.outputs[0].logprobs) for one in outputs]


def answers(model_dir: Path, size: int) -> tuple[list[Any], EngineStats]:
    llm = LLM(str(model_dir), tensor_parallel_size=size, **(SIZES | {"threads": max(size, 2)}))
    return tokens(llm.generate(PROMPTS, PARAMS)), engine_of(llm).core.stats()


def engine_of(llm: LLM) -> Engine:
    assert llm._engine is not None
    return llm._engine


def runner_of(llm: LLM) -> ParallelRunner:
    executor = engine_of(llm).core.executor
    assert isinstance(executor, LocalExecutor)
    runner = executor._runner
    assert isinstance(runner, ParallelRunner)
    return runner


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_several_processes_give_the_tokens_of_one(size: int, tmp_path: Path) -> None:
    """``test_sizes.py`` has all settings and kinds of models."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    model_dir = tiny_model(tmp_path, "qwen3", dtype="bfloat16", **heads)
    alone, before = answers(model_dir, 1)
    divided, after = answers(model_dir, size)
    assert divided == alone
    assert before.collective_seconds == 0.0 < after.collective_seconds


def go_on(llm: LLM, busy: bool) -> None:
    """Compute, or only look at the processes as an idle engine does."""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        if busy:
            llm.generate(PROMPTS, PARAMS)
        engine_of(llm).core.check_processes()


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("busy", [False, True])
def test_a_process_that_dies_or_hangs_ends_the_engine(busy: bool, signum: signal.Signals, tmp_path: Path) -> None:
    llm = LLM(str(tiny_model(tmp_path, "llama")), tensor_parallel_size=2, tensor_parallel_timeout=2.0, **SIZES)
    llm.generate(PROMPTS, PARAMS)
    ranks = runner_of(llm).processes
    assert isinstance(ranks, processes.RankProcesses)
    os.kill(ranks.pids[0], signum)
    begin = time.monotonic()
    with pytest.raises(EngineDeadError, match="another process of tensor_parallel_size 2 ended, or did not answer"):
        go_on(llm, busy)
    assert (time.monotonic() - begin < 2) == (signum == signal.SIGKILL)
    with pytest.raises(EngineDeadError):
        llm.generate(PROMPTS, PARAMS)
    ranks.close()
    assert [each.returncode for each in ranks._processes] == [-signal.SIGKILL]
    assert time.monotonic() - begin < 9  # a hanging process is killed at once


@pytest.mark.parametrize("asked", [False, True])
def test_processes_end_with_the_engine(asked: bool, tmp_path: Path) -> None:
    llm = LLM(str(tiny_model(tmp_path, "llama")), tensor_parallel_size=2, **SIZES)
    ranks = runner_of(llm).processes
    assert isinstance(ranks, processes.RankProcesses)
    children = list(ranks._processes)
    if asked:
        engine_of(llm).shutdown()
    del llm, ranks
    assert [each.returncode for each in children] == [0]


KEEPER = """import sys, threading
from chairlift.llm import LLM
llm = LLM(sys.argv[1], tensor_parallel_size=3, threads=3, skip_tokenizer_init=True, kv_cache_memory_bytes=1 << 20)
print(*llm.engine.core.executor._runner.processes.pids, flush=True)
threading.Event().wait()"""


@pytest.mark.parametrize("continued", [False, True])
def test_no_process_outlives_a_killed_engine(continued: bool, tmp_path: Path) -> None:
    """One of the two processes is stopped when the engine's process is killed, and stays so, or goes on."""
    model_dir = tiny_model(tmp_path, "llama", num_attention_heads=6, num_key_value_heads=3)
    keeper = subprocess.Popen([sys.executable, "-c", KEEPER, str(model_dir)], stdout=subprocess.PIPE)
    assert keeper.stdout is not None
    with keeper, contextlib.ExitStack() as stack:
        pids = [int(pid) for pid in keeper.stdout.readline().split()]
        assert len(pids) == 2
        ends = select.poll()
        for pid in pids:
            ends.register(end := os.pidfd_open(pid), select.POLLIN)
            stack.callback(os.close, end)
        os.kill(pids[1], signal.SIGSTOP)
        keeper.kill()
        keeper.wait()
        if continued:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pids[1], signal.SIGCONT)
        assert gone(ends, 2), "a process outlived the engine's"


def gone(ends: select.poll, count: int) -> bool:
    """Wait until ``count`` processes have ended, for at most 30 seconds. Returns whether they have."""
    end = time.monotonic() + 30
    while (found := len(ends.poll(1000))) < count and time.monotonic() < end:
        pass
    return found == count


def test_processes_outlive_the_thread_that_loaded_the_model(tmp_path: Path) -> None:
    made: list[LLM] = []
    model_dir = tiny_model(tmp_path, "llama")
    loads = threading.Thread(target=lambda: made.append(LLM(str(model_dir), tensor_parallel_size=2, **SIZES)))
    loads.start()
    loads.join()
    [llm] = made
    ranks = runner_of(llm).processes
    assert isinstance(ranks, processes.RankProcesses)
    ends = select.poll()
    ends.register(end := os.pidfd_open(ranks.pids[0]), select.POLLIN)
    assert not ends.poll(200)  # the kernel would have killed it with the thread
    os.close(end)
    assert len(llm.generate(PROMPTS, PARAMS)) == len(PROMPTS)


def test_a_process_that_cannot_be_started_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig.from_flat({"model": str(tmp_path), "tensor_parallel_size": 2, **SIZES})
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    with pytest.raises(FileNotFoundError):
        processes.RankProcesses(config, 64)
    for thread in threading.enumerate():
        if thread.name == "rank-parent":
            thread.join(30)
            assert not thread.is_alive()


def test_an_error_in_another_process_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_dir = tiny_model(tmp_path, "llama")
    config = EngineConfig.from_flat({"model": str(model_dir), "tensor_parallel_size": 2, **SIZES})
    (model_dir / "config.json").rename(tmp_path / "kept.json")
    ranks = processes.RankProcesses(config, 64)
    with pytest.raises(ConfigError, match=r"in process 1 of tensor_parallel_size 2: .*config\.json"):
        ranks.wait_until_loaded()
    ranks.close()


def test_every_process_replaces_its_weights(tmp_path: Path) -> None:
    first = tiny_model(tmp_path / "first", "mixtral", **EXPERT_FAMILIES["mixtral"])
    second = tiny_model(tmp_path / "second", "mixtral", seed=1, **EXPERT_FAMILIES["mixtral"])
    expected = tokens(LLM(str(second), **SIZES).generate(PROMPTS, PARAMS))
    llm = LLM(str(first), tensor_parallel_size=2, **SIZES)
    assert tokens(llm.generate(PROMPTS, PARAMS)) != expected
    with pytest.raises(ConfigError, match="each process reads its part of new weights itself, from a directory"):
        llm.update_weights({}, 1)
    with pytest.raises(ModelLoadError, match="is not a directory"):
        llm.update_weights(tmp_path / "none", 1)
    llm.update_weights(second, 1)
    assert tokens(llm.generate(PROMPTS, PARAMS)) == expected


def test_weights_that_another_process_cannot_read_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_dir = tiny_model(tmp_path, "llama")
    llm = LLM(str(model_dir), tensor_parallel_size=2, **SIZES)
    expected = tokens(llm.generate(PROMPTS, PARAMS))
    replaced = []
    monkeypatch.setattr(native_runner, "replace_weights", lambda *given: replaced.append(given))
    (model_dir / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match="in process 1 of tensor_parallel_size 2"):
        llm.update_weights(model_dir, 1)
    assert replaced == []
    assert tokens(llm.generate(PROMPTS, PARAMS)) == expected


def test_weights_that_are_lost_after_the_check_end_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_dir = tiny_model(tmp_path, "llama")
    llm = LLM(str(model_dir), tensor_parallel_size=2, **SIZES)
    file = model_dir / "model.safetensors"
    monkeypatch.setattr(native_runner, "replace_weights", lambda *_: file.unlink())
    with pytest.raises(EngineDeadError, match=r"new weights were refused \(ModelLoadError: in process 1"):
        llm.update_weights(model_dir, 1)
    with pytest.raises(EngineDeadError):
        llm.generate(PROMPTS, PARAMS)


def test_requests_with_adapters_get_the_tokens_of_one_process(tmp_path: Path) -> None:
    model_dir = tiny_hf_model(tmp_path, "qwen3")
    paths = [random_adapter(model_dir, tmp_path / f"a{n}", seed=n) for n in range(3)]
    asked = [None, *(LoRARequest(f"a{n}", n + 1, path) for n, path in enumerate(paths)), None]
    found = []
    for size in (1, 2):
        llm = LLM(str(model_dir), tensor_parallel_size=size, enable_lora=True, max_loras=2, max_cpu_loras=2, **SIZES)
        found.append(tokens(llm.generate(PROMPTS, PARAMS, lora_request=asked)))
        found[-1] += tokens(llm.generate(PROMPTS, PARAMS, lora_request=asked[::-1]))
    assert found[0] == found[1]
    assert found[0][:5] != found[0][5:]


def test_processors_are_divided_by_memory_node(tmp_path: Path) -> None:
    for processor in range(8):  # nodes alternate, as on some machines
        (tmp_path / "cpu" / f"cpu{processor}" / f"node{processor % 2}").mkdir(parents=True)
    assert divide_processors(2, set(range(8)), tmp_path) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert divide_processors(4, set(range(8)), tmp_path) == [[0, 2], [4, 6], [1, 3], [5, 7]]
    assert divide_processors(3, {0, 1}, tmp_path) == [[0, 1]] * 3
    assert divide_processors(2, {1, 2, 3}, tmp_path / "none") == [[1], [2, 3]]


def test_threads_are_divided() -> None:
    assert rank_threads(7, 3) == [2, 2, 3]
    assert rank_threads(1, 2) == [1, 1]
    assert sum(rank_threads(None, 2)) >= 2


def test_processors_are_restored() -> None:
    before = os.sched_getaffinity(0)
    with on_processors([min(before)]):
        assert os.sched_getaffinity(0) == {min(before)}
    assert os.sched_getaffinity(0) == before
    assert torch.get_num_threads() >= 1
