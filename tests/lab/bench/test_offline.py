from __future__ import annotations

from pathlib import Path

import pytest
import torch

from chairlift import LLM
from chairlift.errors import ConfigError, RequestError
from chairlift.kernels.cpu.library import best_isa, default_threads
from chairlift.kernels.roof import GPU, Roof
from chairlift.loading.native_path import NativePath, native_path
from chairlift.models.hf_config import NetworkConfig
from chairlift.models.model_files import read_config
from chairlift.models.step_cost import ModelCost
from chairlift_lab.bench.floor import GPU_BUDGETS, workload_floor
from chairlift_lab.bench.limits import Limits, Peak, Rate
from chairlift_lab.bench.machine import describe_machine
from chairlift_lab.bench.offline import fit, floor_of, limits_of, room_of, run_offline
from chairlift_lab.workload.lengths import LogNormal, Workload
from tests.models.tiny import tiny_hf_model
from tests.native import needs_kernels

REQUESTS = Workload(
    count=9, vocab_size=128, prompt=LogNormal(2.5, 0.8, 3, 40), output=LogNormal(2.0, 0.8, 2, 20)
).requests()


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_hf_model(tmp_path_factory.mktemp("offline"), "llama", head_dim=32, max_position_embeddings=128)


def load(model_dir: Path, **settings: object) -> LLM:
    return LLM(model_dir, skip_tokenizer_init=True, kv_cache_memory_bytes=1 << 24, threads=1, **settings)


def test_requests_are_cut_to_the_room_there_is() -> None:
    long, short = list(range(100)), list(range(5))
    assert fit([(long, 30), (short, 3)], 130) == ([(long, 30), (short, 3)], 0)
    assert fit([(long, 30), (short, 3)], 129) == ([(long[:99], 30), (short, 3)], 1)
    assert fit([(long, 30), (short, 90)], 40) == ([(long[:20], 20), (short, 20)], 2)
    assert fit([(long, 30)], 2) == ([(long[:1], 1)], 1)
    with pytest.raises(ConfigError, match="there is room for 1"):
        fit([(long, 30)], 1)


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_a_workload_is_answered_and_counted(model_dir: Path, kernels: str) -> None:
    llm = load(model_dir, kernels=kernels)
    assert room_of(llm) == 128
    run = run_offline(llm, REQUESTS)
    assert (run.requests, run.prompt_tokens) == (9, sum(len(prompt) for prompt, _ in REQUESTS))
    assert run.output_tokens == sum(count for _, count in REQUESTS)
    assert run.output_tokens_per_second == pytest.approx(run.output_tokens / run.seconds)
    assert run.steps == max(count for _, count in REQUESTS)  # all prompts fit into the first
    assert 0 < run.time_to_first_token.p50 <= run.latency.p50 <= run.latency.p99 <= run.seconds
    assert (run.preemptions, run.held_row_tokens) == (0, 0)
    again = run_offline(llm, REQUESTS[:3])
    assert again.output_tokens == sum(count for _, count in REQUESTS[:3])


def test_static_batches_hold_rows_and_scarce_memory_preempts(model_dir: Path) -> None:
    static = run_offline(load(model_dir, batching="static", max_num_seqs=4), REQUESTS)
    assert static.held_row_tokens > 0
    long = [(prompt[:10], 60) for prompt, _ in REQUESTS]  # 5 blocks each in the end, one at first
    scarce = run_offline(load(model_dir, num_kv_blocks=12, block_size=16), long)
    assert scarce.preemptions > 0
    assert scarce.output_tokens == 9 * 60


def test_a_request_beyond_the_model_length_is_refused(model_dir: Path) -> None:
    with pytest.raises(RequestError, match="128"):
        run_offline(load(model_dir), [([11] * 120, 20)])


def path_of(llm: LLM, network: NetworkConfig) -> NativePath:
    return native_path(llm.config, llm.info, network)


@needs_kernels
def test_the_report_names_the_kernels_that_run_a_model(model_dir: Path) -> None:
    network = read_config(model_dir)
    path = path_of(load(model_dir, dtype="bfloat16"), network)
    assert path == NativePath(best_isa(), torch.bfloat16, 1, "")
    assert path.describe() == f"{best_isa()} in bfloat16, 1 thread"
    path = path_of(load(model_dir, kernels="torch"), network)
    assert path.isa is None
    assert path.describe() == "PyTorch in float32: kernels is 'torch'"
    path = path_of(load(model_dir, block_size=8), network)
    assert path.isa is None
    assert "block_size" in path.reason


def test_a_run_has_a_floor_of_its_requests(model_dir: Path) -> None:
    llm, network = load(model_dir, max_num_seqs=3), read_config(model_dir)
    limits = Limits(1, {2: Rate(1e9, 1e9)}, (Peak("avx2", "f32", 2, Rate(1e10, 1e10)),))
    floor = floor_of(REQUESTS, llm, network, NativePath("avx2", torch.float32, 2, ""), limits)
    lengths = [(len(prompt), count) for prompt, count in REQUESTS]
    cost = ModelCost.of(network, torch.float32)
    assert floor == workload_floor(lengths, cost, Roof(1e9, 1e10), max_num_seqs=3)
    assert floor.steps > workload_floor(lengths, cost, Roof(1e9, 1e10)).steps
    gpu = Limits(1, {1: Rate(3e9, 3e9)}, (Peak(GPU, "f32", 1, Rate(4e10, 4e10)),))
    path = NativePath(None, torch.float32, 1, "the Triton kernels do", triton=True)
    assert floor_of(REQUESTS, llm, network, path, gpu) == workload_floor(
        lengths, cost, Roof(3e9, 4e10), max_num_seqs=3, budgets=GPU_BUDGETS
    )


@pytest.mark.parametrize("triton", [False, True], ids=["PyTorch", "Triton's interpreter"])
def test_there_is_no_floor_without_compiled_kernels(model_dir: Path, triton: bool) -> None:
    path = NativePath(None, torch.float32, default_threads(), "because", triton=triton)
    with pytest.raises(ConfigError, match="do not run this model: because"):
        limits_of(load(model_dir), path, describe_machine())
