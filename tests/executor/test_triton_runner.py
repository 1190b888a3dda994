"""The runner of the Triton kernels: what it sends, pads, records and reads. Interpreted where there is no GPU."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import itertools
import logging
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch

from tests.kernels.triton import conftest  # before anything that imports the kernels, which it makes interpreted ones

# isort: split
from chairlift import LLM, SamplingParams
from chairlift.base.sampling_row import SamplingRow
from chairlift.base.step_batch import StepBatch, mask_bits
from chairlift.config import EngineConfig
from chairlift.core.scheduler.output import Chunk, NewRow, SchedulerOutput
from chairlift.errors import ConfigError
from chairlift.executor.backends.torch.step_buffer import StepBuffer
from chairlift.executor.backends.triton.device_sampling import SlotSettings, failures
from chairlift.executor.backends.triton.step_graph import (
    CudaGraphs,
    EagerSteps,
    Graph,
    graph_sizes,
    padded_size,
    token_sizes,
)
from chairlift.executor.local import LocalExecutor
from chairlift.executor.select import FALLBACK
from chairlift.kernels import ops, recording
from chairlift.kernels.triton.launch import gemm_launch
from chairlift.kernels.triton.program import PagedKV, TritonProgram
from chairlift.loading import model as loading
from chairlift.models.model_files import read_config
from tests.models.tiny import tiny_hf_model

if conftest.MISSING:
    pytest.skip(conftest.MISSING, allow_module_level=True)
device, interpreter = conftest.device, conftest.interpreter

_T = TypeVar("_T")
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_hf_model(tmp_path_factory.mktemp("models"), "llama", num_hidden_layers=1, intermediate_size=32)


@pytest.fixture(autouse=True)
def products_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreting them takes longer than all the rest, and test_triton.py has them."""
    monkeypatch.setattr("chairlift.kernels.triton.program.SMALL_ROWS", 0)


def load(model_dir: Path, device: object, kernels: str = "triton", **settings: Any) -> LLM:
    sizes = {"max_num_seqs": 4, "num_kv_blocks": 30, "block_size": 4, "max_model_len": 32, "dtype": "float32"}
    return LLM(
        model_dir,
        skip_tokenizer_init=True,
        kernels=kernels,
        device=str(device),
        **{**sizes, **settings},
    )


def runner_of(llm: LLM) -> Any:
    assert isinstance(llm.engine.core.executor, LocalExecutor)
    return llm.engine.core.executor._runner


def answers(llm: LLM, params: SamplingParams = GREEDY) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]


def test_recorded_graph_sizes_grow_to_the_number_of_rows() -> None:
    assert graph_sizes(1) == [1]
    assert graph_sizes(4) == [1, 2, 4]
    assert graph_sizes(21) == [1, 2, 4, 8, 16, 21]
    assert graph_sizes(320)[-4:] == [248, 256, 288, 320]
    assert len(graph_sizes(256)) == 35
    sizes = graph_sizes(300)
    assert [padded_size(sizes, n) for n in (1, 3, 9, 256, 257, 300)] == [1, 4, 16, 256, 288, 300]
    assert token_sizes(6) == [6] and token_sizes(64) == [64] and token_sizes(70) == [64, 70]
    assert token_sizes(2048) == token_sizes(1024) == [64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024]


def test_arrays_arrive_as_they_were_and_at_the_same_places(device: torch.device) -> None:
    buffer = StepBuffer(device)
    first = [np.arange(3, dtype=np.int32), np.array([[0.5], [-7.0]]), np.zeros(0, dtype=np.int64), np.full(5, -1)]
    sent = buffer.send(first)
    for array, tensor in zip(first, sent, strict=True):
        assert tensor.shape == array.shape and tensor.cpu().numpy().dtype == array.dtype
        assert tensor.data_ptr() % 16 == 0
        np.testing.assert_array_equal(tensor.cpu().numpy(), array)
    again = buffer.send([array + 1 for array in first])
    assert [tensor.data_ptr() for tensor in again] == [tensor.data_ptr() for tensor in sent]
    np.testing.assert_array_equal(sent[0].cpu().numpy(), [1, 2, 3])
    (large,) = buffer.send([np.arange(1000)])
    np.testing.assert_array_equal(large.cpu().numpy(), np.arange(1000))


def test_the_kernels_sample_rows_with_settings_they_know_only() -> None:
    asked: list[dict[str, Any]] = [
        {"temperature": 0.0, "top_k": 5},
        {"temperature": 0.5, "top_k": 64},
        {"top_p": 0.9},
        {"min_p": 0.1},
        {"presence_penalty": 1.0},
        {"logprobs": 1},
        {"logit_bias": {3: 1.0}},
    ]
    rows = [SamplingRow(SamplingParams(**each), 2**64 - 1 - i, 1) for i, each in enumerate(asked)]
    settings = SlotSettings(10, 64)
    settings.update([9, *range(6)], rows)
    slots = np.array([9, *range(6)], dtype=np.int32)
    assert settings.on_device[slots].tolist() == [True] * 4 + [False] * 3
    assert settings.truncates[slots].tolist() == [False, False, True, True] + [False] * 3
    seeds, temperature, log_min_p, top_k, top_p = settings.arrays(slots[:4])
    assert seeds.tolist() == [-1, -2, -3, -4] and temperature.tolist() == [0, 0.5, 1, 1]
    assert top_k.tolist() == [5, 0, 0, 0] and top_p.tolist() == [1, 1, 0.9, 1]
    assert log_min_p[3] == torch.log(torch.tensor(0.1)).item() and np.isneginf(log_min_p[:3]).all()
    settings.update([9], rows[1:2])
    assert settings.arrays(slots[:1])[1].tolist() == [0.5]


def test_failed_draws_become_errors_in_words() -> None:
    numbers = [(0, 1.0, 1.0), (-1, float("nan"), float("nan")), (-1, float("-inf"), 0.0), (-1, 1e30, float("inf"))]
    drawn = np.array([[token, *np.array(pair, dtype=np.float32).view(np.int32)] for token, *pair in numbers], np.int32)
    errors = failures(drawn)
    assert sorted(errors) == [1, 2, 3]
    assert "contain NaN" in errors[1] and "-inf" in errors[2] and "overflow" in errors[3]


def test_rows_that_fill_up_a_batch_write_nowhere(model_dir: Path, device: torch.device) -> None:
    llm = load(model_dir, device, max_num_batched_tokens=32)
    runner = runner_of(llm)
    assert answers(llm) == answers(load(model_dir, "cpu", "torch"))
    assert (4, False, False, False) in runner._decodes  # three rows, and one that fills up
    assert sorted(runner._state.slots.tolist()) == [-1, 0, 1, 2]
    for cache in runner._kv_caches[0]:
        assert not cache[0].any() and cache[1:].any()  # block 0 is nobody's


def tensors(result: Any) -> dict[str, torch.Tensor]:
    """A step's, or those of its body alone."""
    if isinstance(result, torch.Tensor):
        return {"hidden": result}
    found = {field.name: getattr(result, field.name) for field in dataclasses.fields(result)}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


@pytest.mark.full
@pytest.mark.parametrize("graphs", ["lazy", "off"])
def test_an_engine_that_nobody_holds_frees_its_memory_at_once(
    graphs: str, model_dir: Path, device: torch.device
) -> None:
    llm = load(model_dir, device, cuda_graphs=graphs)
    answers(llm)
    runner = weakref.ref(runner_of(llm))
    gc.disable()
    try:
        del llm
        assert runner() is None
    finally:
        gc.enable()


class OverwritingGraphs(EagerSteps):
    """Like CUDA graphs: recording runs a step more than once, and a replay overwrites the result of the last replay."""

    def record(self, step: Callable[[], _T]) -> Graph[_T]:
        step()
        result = step()
        self.num_graphs += 1

        class Static:
            def replay(self) -> _T:
                old, new = tensors(result), tensors(step())
                for name in new:
                    old[name].copy_(new[name])
                return result

        return Static()


@pytest.mark.nightly
def test_replays_give_the_tokens_of_fresh_steps(
    model_dir: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(seed=4, temperature=2.0, top_p=0.8, max_tokens=3)
    expected = answers(load(model_dir, device), params)
    llm = load(model_dir, device)
    monkeypatch.setattr(runner_of(llm), "graphs", OverwritingGraphs())
    assert [answers(llm, params) for _ in range(2)] == [expected, expected]
    assert runner_of(llm).graphs.num_graphs == len(runner_of(llm)._decodes) + len(runner_of(llm)._bodies) > 1


class FullGraphs(OverwritingGraphs):
    """A GPU with memory for one graph, and for every step without."""

    def record(self, step: Callable[[], _T]) -> Graph[_T]:
        if self.num_graphs:
            step()
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return super().record(step)


@pytest.mark.nightly
def test_without_memory_for_a_graph_steps_are_launched_kernel_by_kernel(
    model_dir: Path, device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    llm = load(model_dir, device)
    runner_of(llm).graphs = FullGraphs()
    with caplog.at_level(logging.WARNING, "chairlift"):
        assert [answers(llm) for _ in range(2)] == [answers(load(model_dir, device))] * 2
    said = [record.message.split(",")[0] for record in caplog.records]
    assert said == ["no memory for a CUDA graph of steps of 4 rows"]


@pytest.mark.nightly
def test_steps_with_chunks_may_be_filled_up(model_dir: Path, device: torch.device) -> None:
    """To 4, 8 or 32 tokens and eight rows, which changes no token. Another prompt begins in every step."""

    def served(llm: LLM) -> dict[str, list[int]]:
        done = {}
        for i, length in enumerate((24, 2, 9, 1, 1, 3, 2, 1)):
            prompt, params = [5 + i, *range(20, 19 + length)], dataclasses.replace(GREEDY, max_tokens=9)
            llm.engine.add_request(prompt, params, request_id=str(i), stream=False)
            done |= {output.request_id: output.outputs[0].token_ids for output in llm.engine.step()}
        while llm.engine.has_unfinished:
            done |= {output.request_id: output.outputs[0].token_ids for output in llm.engine.step()}
        return done

    sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "num_kv_blocks": 80, "max_model_len": 48}
    llm = load(model_dir, device, num_lookahead_steps=1, **sizes)
    runner = runner_of(llm)
    runner._token_sizes = [4, 8, 32]
    if not conftest.ON_GPU:
        runner.graphs = OverwritingGraphs()
    assert served(llm) == served(load(model_dir, "cpu", "torch", **sizes))
    assert sorted(runner._bodies) == [(4, False), (8, False), (32, False)]


AHEAD: list[tuple[list[int], dict[str, Any]]] = [
    ([5, 6, 7, 8, 9, 10], {"temperature": 0.0, "max_tokens": 7, "ignore_eos": True}),
    ([11, 12], {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True}),
    ([5, 6, 7, 8, 9, 13, 14], {"temperature": 0.0, "max_tokens": 6, "stop_token_ids": list(range(0, 128, 3))}),
    ([15], {"temperature": 2.0, "seed": 1, "max_tokens": 6, "ignore_eos": True}),
    ([16, 17, 18], {"temperature": 0.0, "presence_penalty": 1.9, "max_tokens": 4, "ignore_eos": True}),
    ([19, 20], {"temperature": 1.5, "seed": 3, "logprobs": 1, "max_tokens": 3, "ignore_eos": True}),
]
"""Three at a time, in chunks: one shares a beginning, one stops early, two are drawn on the host."""


def serve_ahead(model_dir: Path, device: object, depth: int, **how: Any) -> tuple[dict[str, Any], LLM, int]:
    """Answers and reasons; how many steps were launched before the tokens of the one before them were known."""
    upset = how.pop("upset", False)
    sizes = {"max_num_seqs": 3, "max_num_batched_tokens": 6, "block_size": 4, "num_kv_blocks": 40}
    llm = load(model_dir, device, **{**sizes, "num_lookahead_steps": depth, **how})
    runner, engine = runner_of(llm), llm.engine
    if depth and not conftest.ON_GPU:  # there, they are real
        runner.graphs = OverwritingGraphs()
    forward, num_ahead = runner.forward, 0

    def watched(batch: StepBatch) -> Any:
        nonlocal num_ahead
        num_ahead += bool((batch.token_ids < 0).any())
        return forward(batch)

    runner.forward = watched
    for i, (prompt, params) in enumerate(AHEAD):
        engine.add_request(prompt, SamplingParams(**params), request_id=str(i), stream=False)
    done: dict[str, Any] = {}
    for step in range(200):
        if upset and step == 3:
            engine.abort("1")
            assert engine.scheduler.preempt("0")
        for output in engine.step():
            answer = output.outputs[0]
            ids = answer.logprobs and [sorted(entry) for entry in answer.logprobs]
            done[output.request_id] = (answer.token_ids, answer.finish_reason, ids)
        engine.check_invariants()
        if not engine.has_unfinished:
            break
    return done, llm, num_ahead


@pytest.fixture(scope="module")
def in_turns(model_dir: Path, interpreter: None) -> dict[str, Any]:
    """Host and device take turns."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("chairlift.kernels.triton.program.SMALL_ROWS", 0)
        done, _, num_ahead = serve_ahead(model_dir, "cuda" if conftest.ON_GPU else "cpu", 0, cuda_graphs="off")
    assert not num_ahead and sorted(done) == list("012345")
    assert {reason for _, reason, _ in done.values()} == {"stop", "length"}
    return done


@pytest.mark.full
@pytest.mark.parametrize(
    ("depth", "how"),
    [
        (1, {"upset": True, "num_kv_blocks": 10, "block_size": 2}),
        pytest.param(1, {}, marks=pytest.mark.nightly),
        pytest.param(2, {"enable_prefix_caching": False}, marks=pytest.mark.nightly),
        pytest.param(2, {"num_kv_blocks": 9, "block_size": 2, "max_num_batched_tokens": 12}, marks=pytest.mark.nightly),
    ],
    ids=["aborted and preempted", "ample", "without a prefix cache", "few blocks"],
)
def test_running_ahead_changes_no_token(
    depth: int, how: dict[str, Any], model_dir: Path, device: torch.device, in_turns: dict[str, Any]
) -> None:
    done, llm, num_ahead = serve_ahead(model_dir, device, depth, **how)
    expected = in_turns.copy()
    if "upset" in how:
        assert not done.pop("1", None) and expected.pop("1")
    assert done == expected
    assert num_ahead >= 4
    if "upset" in how:
        assert llm.engine.scheduler.num_late > 0 and llm.engine.scheduler.num_preemptions > 0


def test_steady_decoding_sends_nothing(model_dir: Path, device: torch.device) -> None:
    """But a new block now and then: what the steps need is on the device, and what they drew as well."""
    llm = load(model_dir, device, num_lookahead_steps=1, block_size=4)
    state, sent = runner_of(llm)._state, []
    send = state._send

    def watched(places: Any, words: Any) -> None:
        sent.append(len(places))
        send(places, words)

    state._send = watched
    llm.engine.add_request([5, 6], SamplingParams(temperature=0.0, max_tokens=11, ignore_eos=True), stream=False)
    counts = []
    while llm.engine.has_unfinished:
        llm.engine.step()
        counts.append(sum(sent))
        sent.clear()
    # The first step sends a block and how the row samples; the second that it is row 0 of the decodes, and its place.
    # The others: a block before position 4, and one before position 8.
    assert counts[0] > 0 and counts[1:12] == [2, 0, 1, 0, 0, 0, 1, 0, 0, 0, 0]


@pytest.mark.parametrize("depth", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_after_a_step_that_failed_halfway_rows_are_right(depth: int, model_dir: Path, device: torch.device) -> None:
    """Its rows had been advanced on the device when it failed. The next in the row comes to the same place."""
    llm = load(model_dir, device, max_num_seqs=1, num_lookahead_steps=depth, cuda_graphs="off")
    runner = runner_of(llm)
    params = dataclasses.replace(GREEDY, max_tokens=3)
    expected = [output.outputs[0].token_ids for output in llm.generate([[5], [8]], params)]
    run, left = runner._head.run, [1]

    def failing(*given: Any) -> Any:
        left[0] -= 1
        if not left[0]:
            raise RuntimeError("out of memory")
        return run(*given)

    runner._head.run = failing
    first, second = llm.generate([[5], [8]], params)
    assert first.error is not None and "RuntimeError" in first.error
    assert second.outputs[0].token_ids == expected[1]


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")  # the interpreter's
def test_a_row_with_nan_fails_alone(model_dir: Path, device: torch.device) -> None:
    llm = load(model_dir, device, num_lookahead_steps=1)
    expected = answers(load(model_dir, device))
    runner_of(llm)._model.model.embed_tokens.weight[9] = float("nan")
    outputs = llm.generate(PROMPTS, GREEDY)
    assert [output.outputs[0].token_ids for output in outputs[::2]] == expected[::2]
    assert outputs[1].error is not None and "NaN" in outputs[1].error


@pytest.mark.full
def test_other_weights_are_used_at_once(model_dir: Path, tmp_path: Path, device: torch.device) -> None:
    other = tiny_hf_model(tmp_path, "llama", seed=1, num_hidden_layers=1, intermediate_size=32)
    llm = load(model_dir, device)
    before = answers(llm)
    llm.update_weights(other, version=1)
    assert answers(llm) == answers(load(other, "cpu", "torch")) != before


@pytest.mark.parametrize("mixed", [False, True])
def test_a_mask_excludes_all_other_tokens(mixed: bool, model_dir: Path, device: torch.device) -> None:
    """One prompt of two tokens, or two prompts of one, which is a decode step to the runner."""
    runner = runner_of(load(model_dir, device))
    row = SamplingRow(GREEDY, 0, 1)

    def ints(*values: int) -> Any:
        return np.array(values, dtype=np.int32)

    slots = ints(0) if mixed else ints(0, 1)
    ends, lengths = (ints(0, 2), ints(2)) if mixed else (ints(0, 1, 2), ints(1, 1))
    tables, places = ints(1) if mixed else ints(1, 2), (np.array([4, 5]) if mixed else np.array([4, 8]))
    positions = ints(0, 1) if mixed else ints(0, 0)
    tokens = np.zeros((4, 8), dtype=np.int32)
    batch = StepBatch(
        token_ids=ints(5, 6),
        positions=positions,
        cu_seqlens=ends,
        seq_lens=lengths,
        block_tables=tables[None, :, None],
        slot_mapping=places[None],
        slots=slots,
        tokens=tokens,
        sampling=[row] * len(slots),
        sample_rows=np.arange(len(slots), dtype=np.int32),
        sample_tokens=ends[1:] - 1,
    )
    handle = runner.forward(batch)
    free = runner.sample(handle, batch, None).result().token_ids
    others = [token for token in range(128) if token != free[0]]
    masked = runner.sample(handle, batch, {0: mask_bits(others, 128)}).token_ids
    logits = runner._model.compute_logits(handle.hidden[1 if mixed else 0])
    assert masked[0] == int(logits.topk(2).indices[1]) and masked[1:] == free[1:]


def test_a_row_with_several_sample_positions_draws_what_each_prefix_would(
    model_dir: Path, device: torch.device
) -> None:
    """Each draws what its prefix would alone; the last token is what the row goes on with."""
    llm, prompt = load(model_dir, device), [5, 6, 7, 8]
    outputs = llm.generate([prompt[:2], prompt[:3], prompt], dataclasses.replace(GREEDY, max_tokens=2))
    alone = [output.outputs[0].token_ids for output in outputs]
    executor, row = llm.engine.core.executor, SamplingRow(GREEDY, 0, 4)
    joined = [NewRow(slot, str(slot), prompt, 4, 0, [[1 + 2 * slot, 2 + 2 * slot]], row) for slot in range(2)]
    chunks = [Chunk(0, 0, 4, 3, "prefill"), Chunk(1, 0, 4, 1, "prefill")]
    steps = [
        SchedulerOutput(9, joined=joined, decode_slots=(), chunks=chunks),
        SchedulerOutput(10, decode_slots=(0, 1)),
    ]
    drawn = [executor.sample(executor.execute(step)).result().token_ids for step in steps]
    assert drawn == [[*(tokens[0] for tokens in alone), alone[2][0]], [alone[2][1]] * 2]


def test_a_gpu_is_named_and_filled(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are loaded: 40 of 100 GB are in use, and the rest within the share is for steps and the KV cache."""
    gpu = torch.device("cuda:1")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device.index}")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60 * 10**9, 100 * 10**9))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    assert loading.device_name(gpu) == "cuda:1 (GPU 1)" and loading.device_name(torch.device("cpu")) == "cpu"

    def room(**settings: Any) -> int:
        config = EngineConfig.from_flat({"max_num_seqs": 8, **settings})
        return loading._cache_memory(config, read_config(model_dir), torch.float32, gpu)

    assert 49_900_000_000 < room() < 50_000_000_000
    assert room() - room(gpu_memory_utilization=0.5) == 40 * 10**9
    # Activations of a step's tokens: heads, three of the MLP, four of the hidden size.
    token = 4 * (2 * 6 * 16 + 3 * 32 + 4 * 64)
    assert room(max_num_batched_tokens=1024) - room(max_num_batched_tokens=3000) == 1976 * token
    assert room(max_num_batched_tokens=500) - room(max_num_batched_tokens=1000) == 2 * 500 * token  # and in graphs
    # The parts of split sums, which are made for every token where all products are split.
    hopper = types.SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: hopper)
    parts = max(
        4 * launch.num_splits * width
        for width, depth in itertools.product(range(64, 9000, 64), (64, 1024, 8192))
        if (launch := gemm_launch(width, depth, 132, any_rows=True)).num_splits > 1
    )
    exact = room(max_num_batched_tokens=1000) - room(max_num_batched_tokens=1000, batch_invariant=True)
    assert exact == 2000 * parts > 60 * 10**6


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({}, "in use and a step may need .* nothing is left for the KV cache; .* lower max_num_batched_tokens"),
        ({"num_kv_blocks": 9}, r"a step of 16,777,216 tokens \(max_num_batched_tokens\) would have .* 60,000,000,000"),
        ({"kv_cache_memory_bytes": 10**6}, r"and the logits of 8 rows \(max_num_seqs\) .* even without weights"),
    ],
)
def test_steps_that_a_gpu_does_not_hold_are_refused_before_weights_are_read(
    model_dir: Path, sizes: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60 * 10**9, 100 * 10**9))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    network = dataclasses.replace(read_config(model_dir), intermediate_size=2**12)

    def check(**settings: Any) -> None:
        config = EngineConfig.from_flat({"max_num_seqs": 8, **sizes, **settings})
        backend = FALLBACK.choose("auto")
        loading._check_sizes(config, network, torch.float32, torch.device("cuda:1"), 32, backend)

    check()
    with pytest.raises(ConfigError, match=words):
        check(max_num_batched_tokens=2**24)


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [loading.find_device(name).index for name in ("cpu", "cuda", "cuda:0", "cuda:1")] == [None, None, 0, 1]
    for name in ("cuda:2", "cuda:300"):
        with pytest.raises(ConfigError, match=rf"'{name}', but this torch finds 2 CUDA device\(s\); use cuda:1 or"):
            loading.find_device(name)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ConfigError, match="'cuda', but this torch finds no CUDA device; use device='cpu'"):
        loading.find_device("cuda")


@pytest.mark.parametrize("collects", [True, False])
def test_nothing_is_collected_while_a_graph_is_captured(collects: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Garbage may be an engine, whose end waits for the device, and that would end the capture."""

    def nothing(*_: object) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    stream = types.SimpleNamespace(wait_stream=lambda other: None)
    for name in ("graph_pool_handle", "synchronize", "empty_cache", "CUDAGraph", "graph", "stream"):
        monkeypatch.setattr(torch.cuda, name, nothing)
    for name, value in (("Stream", stream), ("current_stream", stream), ("memory_reserved", 0)):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    seen: list[bool] = []
    (gc.enable if collects else gc.disable)()
    try:
        CudaGraphs(torch.device("cuda")).record(lambda: seen.append(gc.isenabled()))
        assert seen == [collects, False]
        assert gc.isenabled() == collects
        with pytest.raises(IndexError):
            CudaGraphs(torch.device("cuda")).record(lambda: seen.pop(2 - len(seen)))  # the second time it fails
        assert gc.isenabled() == collects
    finally:
        gc.enable()


@pytest.mark.gpu
@pytest.mark.skipif(not conftest.ON_GPU, reason="no GPU is there")
@pytest.mark.parametrize("first", [False, True])
def test_graphs_may_be_recorded_in_any_mode(first: bool) -> None:
    graphs, ones, made = CudaGraphs(torch.device("cuda", 0)), torch.ones(4, device="cuda"), []
    for mode in (first, not first, first):
        with torch.inference_mode(mode):
            made.append(graphs.record(lambda: ones + len(made)))
    for added, graph in enumerate(made):
        assert graph.replay().tolist() == [1 + added] * 4


@pytest.mark.gpu
@pytest.mark.skipif(not conftest.ON_GPU, reason="no GPU is there")
@pytest.mark.parametrize("graphs", ["lazy", "start"])
def test_graphs_change_nothing(graphs: str, model_dir: Path) -> None:
    llm = load(model_dir, "cuda", cuda_graphs=graphs)
    assert llm.engine.core.num_lookahead_steps == 1
    assert answers(llm) == answers(load(model_dir, "cuda", cuda_graphs="off"))
    # The largest step and the prompts, then three rows; or twelve numbers of tokens, and one, two and four rows.
    assert llm.engine.core.executor.describe_graphs().startswith("3 " if graphs == "lazy" else "15 ")


@pytest.mark.gpu
@pytest.mark.skipif(not conftest.ON_GPU, reason="no GPU is there")
def test_graphs_change_nothing_in_fp8(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompts are nine rows, which the library multiplies, and the others stream the weights."""
    monkeypatch.setattr("chairlift.kernels.triton.program.SMALL_ROWS", 4)
    fp8 = {"dtype": "bfloat16", "quantization": "fp8"}
    outputs = [answers(load(model_dir, "cuda", cuda_graphs=graphs, **fp8)) for graphs in ("lazy", "off")]
    assert outputs[0] == outputs[1] and all(len(tokens) == 4 for tokens in outputs[0])


def test_parts_that_pytorch_computes_promise_no_equal_bits(device: torch.device) -> None:
    recorder = recording.Recorder(torch.float32)
    embedded = ops.call_out(lambda ids: ids[:, None].float().repeat(1, 16), recorder.token_ids, width=16)
    whole = ops.linear(embedded, torch.ones(16, 16, device=device), None)
    for nodes, output in ((recorder.nodes[:1], embedded), (recorder.nodes, whole)):
        program: Any = functools.partial(TritonProgram, nodes, output, PagedKV([], []), device, 2)
        ids = torch.tensor([3, 4], dtype=torch.int32, device=device)
        assert program().run({recorder.token_ids: ids})[:, 0].tolist() in ([3, 4], [48, 64])
        with pytest.raises(ConfigError, match="batch_invariant is on, but PyTorch computes a part of this model"):
            program(batch_invariant=True)
    assert TritonProgram(recorder.nodes[1:], whole, PagedKV([], []), device, 2, batch_invariant=True)
