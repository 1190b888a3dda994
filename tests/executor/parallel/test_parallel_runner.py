"""A model that several processes share computes the bits of the model on one process."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from chairlift.base.sampling_params import SamplingParams
from chairlift.base.sampling_row import SamplingRow
from chairlift.base.step_batch import SampledTokens, StepBatch
from chairlift.core.scheduler.output import Chunk, NewBlocks, NewRow, SchedulerOutput
from chairlift.errors import EngineDeadError
from chairlift.executor.backends.native import native_runner
from chairlift.executor.input_batch import InputBatch
from chairlift.kernels.cpu.program import ROUTED_TOKENS
from chairlift.kernels.weights import NATIVE, QUANTIZED, WeightFormat
from tests.equivalence.test_determinism import MODELS
from tests.executor.parallel.ranks import BLOCK, LENGTH, SLOTS, Ranks
from tests.kernels.cpu.models import VOCAB, tiny_model
from tests.models.tiny import EXPERT_FAMILIES, RECURRENT_FAMILIES
from tests.native import needs_kernels

pytestmark = needs_kernels

ASKED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "top_k": 5, "presence_penalty": 0.3},
    {"temperature": 0.7, "logprobs": 2, "prompt_logprobs": 1},
    {"temperature": 0.8},
]


class Traffic:
    """Random steps for both, fed by one InputBatch."""

    def __init__(self, ranks: Ranks, seed: int) -> None:
        self.ranks = ranks
        self.rng = random.Random(seed)
        groups = ranks.plan.groups
        self.input = InputBatch(
            SLOTS, ranks.first._max_tokens + LENGTH, BLOCK, len(groups), [group.state_span for group in groups]
        )
        self.spans = [group.state_span or BLOCK for group in groups]
        self.free = [self.rng.sample(range(1, each.num_blocks), each.num_blocks - 1) for each in groups]
        self.step_number = 0

    def join(self, slot: int, length: int, sampling: dict[str, Any], adapter_id: int = 0) -> NewRow:
        prompt = [self.rng.randrange(2, VOCAB) for _ in range(length)]
        most = max(LENGTH, length + BLOCK)
        blocks = [
            [free.pop() for _ in range(-(-most // span))] for free, span in zip(self.free, self.spans, strict=True)
        ]
        row = SamplingRow(SamplingParams(**sampling), seed=slot, num_prompt_tokens=length)
        return NewRow(slot, str(slot), prompt, length, 0, blocks, row, adapter_id)

    def step(self, out: SchedulerOutput) -> StepBatch:
        batch = self.input.apply(out)
        hidden = self.ranks.alone.forward(batch)
        bits = hidden.view(torch.uint8).numpy().copy()
        truth = self.ranks.alone.sample(hidden, batch, None)
        divided = self.ranks.first.forward(batch)
        assert np.array_equal(divided.view(torch.uint8).numpy(), bits)
        same(truth, self.ranks.first.sample(divided, batch, None))
        self.input.store(batch, truth.token_ids)
        return batch


def same(truth: SampledTokens, found: SampledTokens) -> None:
    assert found.token_ids == truth.token_ids
    assert found.errors == truth.errors
    pairs = [(truth.logprobs, found.logprobs)]
    pairs += [(a.entries, b.entries) for a, b in zip(truth.prompt_logprobs, found.prompt_logprobs, strict=True)]
    for one, other in pairs:
        assert (one is None) == (other is None)
        for a, b in zip(one or [], other or [], strict=True):
            assert (a is None) == (b is None)
            if a is not None and b is not None:
                assert a.token_ids.tolist() == b.token_ids.tolist()
                assert a.logprobs.tobytes() == b.logprobs.tobytes()
                assert a.rank == b.rank


def run(ranks: Ranks, seed: int = 0, steps: int = 6, adapters: Sequence[int] = (0,)) -> None:
    """Prompts in chunks beside decodes, then decodes alone. Rows have the ``adapters`` in turn."""
    traffic = Traffic(ranks, seed)
    lengths = [traffic.rng.randrange(3, 70) for _ in ASKED]
    decoding: list[int] = []
    for slot, (length, sampling) in enumerate(zip(lengths, ASKED, strict=True)):
        joined = [traffic.join(slot, length, sampling, adapters[slot % len(adapters)])]
        start = 0
        while start < length:
            size = min(traffic.rng.choice((5, 17, 40)), length - start)
            chunk = Chunk(slot, start, size, start + size == length, "prefill")
            traffic.step(output(traffic, joined, decoding, [chunk]))
            joined, start = [], start + size
        decoding.append(slot)
    for _ in range(steps):
        traffic.step(output(traffic, [], decoding, []))


def output(
    traffic: Traffic, joined: Sequence[NewRow], decoding: Sequence[int], chunks: Sequence[Chunk]
) -> SchedulerOutput:
    traffic.step_number += 1
    return SchedulerOutput(
        step=traffic.step_number, joined=list(joined), chunks=list(chunks), decode_slots=tuple(decoding)
    )


FORMATS: dict[str, WeightFormat] = {"floats": NATIVE, "int8": QUANTIZED["int8"], "int4": QUANTIZED["int4"]}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_two_processes_compute_the_bits_of_one(family: str, weights: str, dtype: torch.dtype, tmp_path: Path) -> None:
    ranks = Ranks(tiny_model(tmp_path, family), dtype, 2, weight_format=FORMATS[weights])
    run(ranks, seed=len(family))
    ranks.close()


@pytest.mark.parametrize("model", ["gemma3_text", "gpt_neox", "hunyuan_v1_dense", "lfm2", "olmo2", "mistral-200"])
def test_other_families_have_equal_bits_too(model: str, tmp_path: Path) -> None:
    """Parts that are not divided, such as recurrent layers and call-outs, are computed by every process."""
    family, more = MODELS[model]
    ranks = Ranks(tiny_model(tmp_path, family, **more), torch.bfloat16, 2)
    run(ranks, seed=3)
    ranks.close()


EXPERTS: dict[str, dict[str, Any]] = {
    "glm4_moe": {},
    "gpt_oss": {},
    "mixtral": {"hidden_size": 136, "intermediate_size": 104},
    "qwen2_moe": {},
    "granitemoehybrid": {"mamba_n_heads": 4},
    "qwen3_next": {},
}
"""Family with experts -> fields of its tiny config: groups, biases and a limit, a shared expert with a gate, recurrent
layers."""
SHORT = (("gpt_oss", "int4"), ("mixtral", "floats"), ("qwen2_moe", "int8"), ("granitemoehybrid", "floats"))


@pytest.mark.parametrize(
    ("family", "weights"),
    [
        pytest.param(family, weights, marks=() if (family, weights) in SHORT else pytest.mark.nightly)
        for family in EXPERTS
        for weights in FORMATS
    ],
)
def test_every_expert_is_divided(family: str, weights: str, tmp_path: Path) -> None:
    fields = {**EXPERT_FAMILIES, **RECURRENT_FAMILIES}[family] | EXPERTS[family]
    ranks = Ranks(tiny_model(tmp_path, family, **fields), torch.bfloat16, 2, weight_format=FORMATS[weights])
    assert ranks.first.program.plan.shared
    run(ranks, seed=5)
    counts = [runner.expert_counts for runner in (ranks.alone, *ranks.runners)]
    assert all(np.array_equal(each, counts[0]) for each in counts)
    ranks.close()


@pytest.mark.parametrize("threads", [1, 2])
def test_four_processes_divide_experts(threads: int, tmp_path: Path) -> None:
    sizes = {"hidden_size": 136, "intermediate_size": 136, "num_attention_heads": 4, "num_key_value_heads": 4}
    model_dir = tiny_model(tmp_path, "mixtral", num_local_experts=5, num_experts_per_tok=2, **sizes)
    ranks = Ranks(model_dir, torch.float32, 4, num_threads=threads)
    run(ranks)
    ranks.close()


def test_experts_of_more_tokens_than_are_routed_together(tmp_path: Path) -> None:
    """Each process overwrites its activations of the first tokens only when the others have read them."""
    length = ROUTED_TOKENS + 40
    ranks = Ranks(tiny_model(tmp_path, "mixtral", **EXPERT_FAMILIES["mixtral"]), torch.bfloat16, 2, budget=length)
    traffic = Traffic(ranks, 1)
    row = traffic.join(0, length, {"temperature": 0.0, "prompt_logprobs": 0})
    traffic.step(output(traffic, [row], [], [Chunk(0, 0, length, True, "prefill")]))
    ranks.close()


def test_experts_keep_their_bits_with_few_columns(tmp_path: Path) -> None:
    """Inner widths and hidden sizes of too few panels are computed by every process."""
    for hidden, inner in ((72, 30), (32, 100)):
        fields = {"hidden_size": hidden, "intermediate_size": inner, **EXPERT_FAMILIES["mixtral"]}
        ranks = Ranks(tiny_model(tmp_path / str(inner), "mixtral", **fields), torch.bfloat16, 2)
        run(ranks)
        ranks.close()


@pytest.mark.parametrize("family", ["falcon_h1", "mamba2", "nemotron_h", "qwen3_5_text"])
def test_scans_of_recurrent_layers_are_divided_by_head(family: str, tmp_path: Path) -> None:
    fields = {"hidden_size": 64, **RECURRENT_FAMILIES[family]}
    ranks = Ranks(tiny_model(tmp_path, family, **fields), torch.bfloat16, 2)
    run(ranks, seed=2)
    whole, *parts = [
        sum(state[-1].numel() for state in runner._kv.states.values()) for runner in (ranks.alone, *ranks.runners)
    ]
    assert sum(parts) == whole > max(parts)
    ranks.close()


@pytest.mark.parametrize("size", [3, 4])
def test_kv_heads_may_be_divided_unevenly(size: int, tmp_path: Path) -> None:
    model_dir = tiny_model(
        tmp_path, "qwen3", num_attention_heads=10, num_key_value_heads=5, hidden_size=136, head_dim=64
    )
    ranks = Ranks(model_dir, torch.bfloat16, size)
    heads = [[layer.kv_heads for layer in runner._kv.layers] for runner in ranks.runners]
    assert [sum(each) for each in zip(*heads, strict=True)] == [5, 5, 5]
    run(ranks)
    ranks.close()


@pytest.mark.parametrize("threads", [1, 2])
def test_the_number_of_threads_changes_no_bits(threads: int, tmp_path: Path) -> None:
    ranks = Ranks(tiny_model(tmp_path, "llama"), torch.bfloat16, 2, kv_dtype=torch.int8, num_threads=threads)
    run(ranks)
    ranks.close()


def test_blocks_move_in_every_process(tmp_path: Path) -> None:
    ranks = Ranks(tiny_model(tmp_path, "llama"), torch.bfloat16, 2, swap_bytes=1 << 20)
    traffic = Traffic(ranks, 1)
    row = traffic.join(0, 40, ASKED[0])
    traffic.step(output(traffic, [row], [], [Chunk(0, 0, 40, True, "prefill")]))
    old = [table[:3] for table in row.block_ids]
    new = [[free.pop() for _ in range(3)] for free in traffic.free]
    out = output(traffic, [], [0], [])
    pairs = [(g, a, b) for g, tables in enumerate(zip(old, new, strict=True)) for a, b in zip(*tables, strict=True)]
    out.swap_out = [(group, block, host) for host, (group, block, _) in enumerate(pairs)]
    out.swap_in = [(group, host, block) for host, (group, _, block) in enumerate(pairs)]
    out.new_blocks = [(0, NewBlocks(group, 0, blocks)) for group, blocks in enumerate(new)]
    batch = traffic.input.apply(out)
    for runner in (ranks.alone, ranks.first):
        runner.move_blocks(batch)
    hidden = ranks.alone.forward(batch).view(torch.uint8).numpy().copy()
    assert np.array_equal(ranks.first.forward(batch).view(torch.uint8).numpy(), hidden)
    ranks.close()


def test_more_rows_than_fit_into_the_logits_are_sampled_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_runner, "_SCRATCH_BYTES", 4 * 160 * 3)  # three rows of 131 logits
    ranks = Ranks(tiny_model(tmp_path, "llama"), torch.bfloat16, 2)
    assert len(ranks.first._shared_logits) == 3
    run(ranks)
    ranks.close()


def test_an_error_in_one_process_ends_all(tmp_path: Path) -> None:
    ranks = Ranks(tiny_model(tmp_path, "llama"), torch.bfloat16, 2)
    traffic = Traffic(ranks, 1)
    out = output(traffic, [traffic.join(0, 5, ASKED[0])], [], [Chunk(0, 0, 5, True, "prefill")])
    batch = traffic.input.apply(out)
    batch.cu_seqlens = batch.cu_seqlens + 1  # a step that the program refuses
    with pytest.raises(EngineDeadError, match="tensor_parallel_size is 2, and a step failed in process 0"):
        ranks.first.forward(batch)
    ranks.threads[0].join(30)
    assert not ranks.threads[0].is_alive()


def test_weights_and_cache_are_divided(tmp_path: Path) -> None:
    model_dir = tiny_model(tmp_path, "llama", hidden_size=256, intermediate_size=512)
    ranks = Ranks(model_dir, torch.float32, 2)
    whole = ranks.alone._model.weight_bytes
    parts = [runner._model.weight_bytes for runner in ranks.runners]
    embedding = 4 * VOCAB * 256
    assert all(part - embedding < 0.6 * (whole - embedding) for part in parts)
    assert [2 * size for size in ranks.first.block_bytes] == ranks.alone.block_bytes
    ranks.close()
