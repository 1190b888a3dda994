"""Each way of breaking the engine on purpose must be noticed by the comparison with transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from chairlift.executor.backends.native.sampling_rows import NativeRows, RowTemplates
from chairlift.executor.input_batch import InputBatch
from chairlift.executor.sampling import sampler
from chairlift.executor.sampling.gumbel import gumbel_argmax
from chairlift.kernels import ops
from chairlift.models.layers.attention import Attention
from tests.equivalence.cases import make_llm, run
from tests.equivalence.conftest import Truth
from tests.equivalence.test_greedy import check as check_greedy
from tests.equivalence.test_sampled import JOBS, texts
from tests.equivalence.test_sampled import check as check_sampled

Patch = Callable[[pytest.MonkeyPatch], None]


def drop_rope(patch: pytest.MonkeyPatch) -> None:
    heads = ops.rotary_heads
    patch.setattr(ops, "rotary_heads", lambda qkv, rotary, *rest: heads(qkv, None, *rest))


def drop_attention_of_one_layer(patch: pytest.MonkeyPatch) -> None:
    forward = Attention.forward

    def without(self: Attention, x: Tensor, *rest: Any) -> Tensor:
        return forward(self, x, *rest) if self.layer != 1 else ops.call_out(torch.zeros_like, x, width=64)

    patch.setattr(Attention, "forward", without)


def read_one_wrong_kv_block(patch: pytest.MonkeyPatch) -> None:
    """Every sequence of four blocks or more reads its third block in place of its second."""
    tables = InputBatch._tables

    def wrong(self: InputBatch, *args: Any) -> Any:
        found = [table.copy() for table in tables(self, *args)]
        for table in found:
            if table.shape[1] >= 4:
                table[:, 1] = np.where(table[:, 3] > 0, table[:, 2], table[:, 1])
        return found

    patch.setattr(InputBatch, "_tables", wrong)


def forget_the_newest_token_after_preemption(patch: pytest.MonkeyPatch) -> None:
    join = InputBatch._join

    def wrong(self: InputBatch, row: Any) -> None:
        join(self, row)
        if len(row.token_ids) > row.num_prompt_tokens:
            self.tokens[row.slot, len(row.token_ids) - 1] = 2

    patch.setattr(InputBatch, "_join", wrong)


def write_kv_one_position_late(patch: pytest.MonkeyPatch) -> None:
    mapping = InputBatch._slot_mapping
    patch.setattr(InputBatch, "_slot_mapping", lambda self, *args: [slots + 1 for slots in mapping(self, *args)])


BROKEN: list[tuple[Patch, dict[str, Any]]] = [
    (drop_rope, {}),
    (drop_attention_of_one_layer, {}),
    (read_one_wrong_kv_block, {"block_size": 16}),
    (forget_the_newest_token_after_preemption, {"cache": "tight", "block_size": 1, "max_num_batched_tokens": 64}),
    (write_kv_one_position_late, {"max_num_batched_tokens": 16}),
]


@pytest.mark.planted
@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize(("broken", "settings"), BROKEN, ids=[broken.__name__ for broken, _ in BROKEN])
def test_broken_engine_is_noticed(
    broken: Patch,
    settings: dict[str, Any],
    kernels: str,
    truth: Callable[[str], Truth],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check_greedy(truth("llama"), kernels=kernels, **settings)
    broken(monkeypatch)
    with pytest.raises(AssertionError, match=r"but .* scores|no reason to stop|goes on after"):
        check_greedy(truth("llama"), kernels=kernels, **settings)


@pytest.mark.planted
@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_noise_that_ignores_the_position_is_noticed(
    kernels: str, truth: Callable[[str], Truth], monkeypatch: pytest.MonkeyPatch
) -> None:
    def frozen(scores: Tensor, seeds: list[int], positions: list[int]) -> Tensor:
        return gumbel_argmax(scores, seeds, [0] * len(positions))

    fill = RowTemplates.fill

    def frozen_rows(self: RowTemplates, *args: Any) -> NativeRows:
        rows = fill(self, *args)
        rows.records["position"] = 0
        return rows

    monkeypatch.setattr(sampler, "gumbel_argmax", frozen)
    monkeypatch.setattr(RowTemplates, "fill", frozen_rows)
    llama = truth("llama")
    noticed = 0
    for answer, token_ids in texts(run(make_llm(llama.model_dir, JOBS, kernels=kernels), JOBS)).items():
        try:
            check_sampled(llama, JOBS, answer, token_ids)
        except AssertionError:
            noticed += 1
    assert noticed > 30
