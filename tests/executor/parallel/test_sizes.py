"""Engines on two and four processes give the tokens and log-probabilities of one process, with every setting.

The other processes are threads here; ``test_processes.py`` starts processes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from chairlift.base.sampling_params import SamplingParams
from chairlift.core.spec_decode.adaptive import AdaptiveSpeculator
from chairlift.executor.parallel.messages import Messages
from chairlift.executor.parallel.shares import Share, divide_model
from chairlift.kernels.cpu import division
from chairlift.kernels.cpu.fused_op import FusedOp, OpKind
from chairlift.llm import LLM
from chairlift.metrics.stats import EngineStats
from chairlift.models.causal_lm import CausalLM
from chairlift.models.layers.delta_net import DeltaNetMixer
from tests.executor.parallel.rank_threads import use_threads
from tests.executor.parallel.test_processes import PROMPTS, engine_of, runner_of, tokens
from tests.kernels.cpu.models import tiny_model
from tests.models.tiny import RECURRENT_FAMILIES
from tests.native import needs_kernels

pytestmark = needs_kernels

_WIDE: dict[str, Any] = {"hidden_size": 160, "intermediate_size": 136, "num_attention_heads": 8}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {**_WIDE, "num_key_value_heads": 4},
    "qwen3_next": {**RECURRENT_FAMILIES["qwen3_next"], **_WIDE, "linear_key_head_dim": 32, "num_key_value_heads": 4},
    "lfm2": {**RECURRENT_FAMILIES["lfm2"], **_WIDE, "num_key_value_heads": 4},
}
"""Family -> fields of its config. The second has layers with scans and with experts, the third has convolutions."""
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "swap": {"num_kv_blocks": 9, "swap_space_bytes": 1 << 20, "preemption_mode": "swap"},
    "recompute": {"num_kv_blocks": 9, "swap_space_bytes": 0, "preemption_mode": "recompute"},
    "offload": {"num_kv_blocks": 9, "swap_space_bytes": 1 << 20, "prefix_offload": True},
    "drafts": {"speculative_config": '{"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 3}'},
    "int8": {"quantization": "int8", "kv_cache_dtype": "int8"},
    "int4": {"quantization": "int4"},
    "processed": {"logprobs_mode": "processed_logprobs"},
}
PARAMS = [
    SamplingParams(temperature=0.9 * (n % 2), seed=n, max_tokens=30, logprobs=1, ignore_eos=True)
    for n in range(len(PROMPTS))
]
REPETITIVE = [dataclasses.replace(each, allowed_token_ids=[5, 9, 11]) for each in PARAMS]
HYBRID = ("swap", "recompute", "drafts")
"""Settings with which the default tests run models with recurrent layers."""
COUNTS: dict[str, tuple[str, ...]] = {
    "swap": ("num_swap_preemptions", "num_swapped_out_blocks", "num_swapped_in_blocks"),
    "recompute": ("num_preemptions", "num_recomputed_tokens"),
    "offload": ("num_offloaded_blocks",),
    "drafts": ("num_draft_tokens", "num_accepted_tokens"),
}
"""Setting -> statistics that must be above 0, and the same for any number of processes."""


def make(model_dir: Path, size: int, settings: Mapping[str, Any]) -> LLM:
    sizes: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
    }
    return LLM(str(model_dir), tensor_parallel_size=size, threads=size, **sizes, **settings)


def run(model_dir: Path, size: int, settings: Mapping[str, Any]) -> tuple[list[Any], EngineStats]:
    """Tokens and log-probabilities of the prompts, and of the same prompts when they are in the prefix cache."""
    llm = make(model_dir, size, settings)
    params = REPETITIVE if draft_always(llm) else PARAMS
    found = [each for _ in range(2) for each in tokens(llm.generate(PROMPTS, params))]
    return found, engine_of(llm).core.stats()


def draft_always(llm: LLM) -> bool:
    """Have the engine draft whenever a text repeats itself, whatever the time of steps. Returns whether it drafts."""
    scheduler = engine_of(llm).core.scheduler
    if scheduler.drafts is None or llm.config.scheduler.speculation is None:
        return False
    speculator = scheduler.drafts.speculator
    assert isinstance(speculator, AdaptiveSpeculator)
    speculator._seconds, speculator.reach = lambda step: 1.0, speculator.most
    speculator._look_clock = None
    return True


def case(model: str, settings: str) -> Any:
    seldom = model != "qwen3" and settings not in HYBRID
    return pytest.param(model, settings, marks=[pytest.mark.nightly] if seldom else [])


@pytest.mark.parametrize(("model", "settings"), [case(model, settings) for model in MODELS for settings in SETTINGS])
def test_every_size_gives_the_tokens_of_one_process(
    model: str, settings: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_threads(monkeypatch)
    model_dir = tiny_model(tmp_path, model, dtype="bfloat16", **MODELS[model])
    alone, before = run(model_dir, 1, SETTINGS[settings])
    names = COUNTS.get(settings, ())
    assert all(getattr(before, name) > 0 for name in names), [(name, getattr(before, name)) for name in names]
    for size in (2, 4):
        divided, after = run(model_dir, size, SETTINGS[settings])
        assert divided == alone, size
        assert [getattr(after, name) for name in names] == [getattr(before, name) for name in names], size


HEADS: dict[str, tuple[dict[str, Any], dict[int, list[int]]]] = {
    "3 on 2": ({"num_attention_heads": 6, "num_key_value_heads": 3}, {2: [1, 2]}),
    "5 on 2 and 4": ({"num_attention_heads": 10, "num_key_value_heads": 5}, {2: [2, 3], 4: [1, 1, 1, 2]}),
    "narrow": ({"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 16}, {2: [4, 4], 4: [2, 2, 2, 2]}),
    "in one panel": ({"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}, {2: [2, 2]}),
}
"""Fields of a config, and number of processes -> KV heads of each. Queries are divided in panels of 32 columns; heads
that are all in one panel are computed by every process."""


@pytest.mark.parametrize("heads", HEADS)
def test_kv_heads_are_divided_unevenly_if_need_be(heads: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_threads(monkeypatch)
    fields, parts = HEADS[heads]
    model_dir = tiny_model(tmp_path, "qwen3", dtype="bfloat16", **{"head_dim": 32, **_WIDE, **fields})
    alone, _ = run(model_dir, 1, {})
    whole = make(model_dir, 1, {})
    for size, expected in parts.items():
        llm = make(model_dir, size, {})
        assert tokens(llm.generate(PROMPTS, PARAMS)) == alone[: len(PROMPTS)]
        processes = runner_of(llm).processes
        assert processes is not None
        caches = [each.cache_bytes for each in processes.memory]
        per_head = whole_bytes(whole) // fields["num_key_value_heads"]
        assert [nbytes // per_head for nbytes in caches] == expected


def whole_bytes(llm: LLM) -> int:
    """Bytes of all KV caches of a model on one process."""
    executor = engine_of(llm).core.executor
    return sum(size * group.num_blocks for size, group in zip(executor.block_bytes, executor.cache_groups, strict=True))


def drop_moves(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Messages, "send_moves", lambda self, batch: None)


def begin_at_the_first_head(patch: pytest.MonkeyPatch) -> None:
    """Every process reads the sinks, and writes the results, of the first KV heads."""
    reduce = division._reduce

    def wrong(op: FusedOp, heads: dict[Any, Any]) -> bool:
        shared = reduce(op, heads)
        op.column = 0 if op.kind == OpKind.ATTENTION else op.column
        return shared

    patch.setattr(division, "_reduce", wrong)


def scan_the_first_heads(patch: pytest.MonkeyPatch) -> None:
    """Every process scans as many heads as it should, but the first ones."""

    def wrong(model: CausalLM, share: Share) -> None:
        divide_model(model, share)
        for module in model.modules():
            if isinstance(module, DeltaNetMixer) and module.own_heads is not None:
                module.own_heads = 0, module.own_heads[1]

    patch.setattr("chairlift.loading.rank_process.divide_model", wrong)


def forget_the_drafts(patch: pytest.MonkeyPatch) -> None:
    """The other processes compute the logits of the first row in place of those of all drafts."""
    send = Messages.send_head

    def wrong(self: Messages, token_rows: npt.NDArray[np.int32], adapters: npt.NDArray[Any] | None) -> None:
        send(self, token_rows * 0 if len(token_rows) > 4 else token_rows, adapters)

    patch.setattr(Messages, "send_head", wrong)


MISTAKES: list[tuple[Callable[[pytest.MonkeyPatch], None], str, str]] = [
    (drop_moves, "qwen3", "swap"),
    (begin_at_the_first_head, "qwen3", "plain"),
    (scan_the_first_heads, "qwen3_next", "recompute"),
    (forget_the_drafts, "qwen3", "drafts"),
]


@pytest.mark.planted("test_every_size_gives_the_tokens_of_one_process[{model}-{settings}]")
@pytest.mark.parametrize(("broken", "model", "settings"), MISTAKES, ids=[each[0].__name__ for each in MISTAKES])
def test_a_division_with_a_mistake_is_noticed(
    broken: Callable[[pytest.MonkeyPatch], None],
    model: str,
    settings: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_threads(monkeypatch)
    model_dir = tiny_model(tmp_path, model, dtype="bfloat16", **MODELS[model])
    alone, _ = run(model_dir, 1, SETTINGS[settings])
    broken(monkeypatch)
    divided, _ = run(model_dir, 4, SETTINGS[settings])
    assert divided != alone
