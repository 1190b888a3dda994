"""How memory becomes blocks, and what the plan says of itself."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch

from chairlift.config import SchedulerConfig
from chairlift.errors import ConfigError
from chairlift.executor.kv_tensors import (
    KVPlan,
    available_memory,
    check_step_fits,
    gpu_cache_memory,
    make_host_blocks,
    make_kv_caches,
    plan_kv_cache,
)
from chairlift.models.context import LayerCache


def spec(*windows: int | None) -> list[LayerCache]:
    return [LayerCache(num_kv_heads=2, head_dim=8, window=window) for window in windows]


def plan(layers: list[LayerCache], **settings: Any) -> KVPlan:
    defaults: dict[str, Any] = {
        "dtype": torch.float32,
        "block_size": 16,
        "memory_bytes": 1 << 20,
        "num_blocks": None,
        "most_tokens": 1 << 20,
    }
    return plan_kv_cache(layers, **{**defaults, **settings})


def test_a_gpu_is_filled_up_to_the_share_that_was_asked_for() -> None:
    assert gpu_cache_memory(free=90, total=100, utilization=0.9, step_bytes=15) == 65
    assert gpu_cache_memory(free=100, total=100, utilization=1.0, step_bytes=0) == 100
    words = r"GPU's 100 bytes 60 are in use and a step may need 30, .* gpu_memory_utilization 0.9 nothing is left"
    with pytest.raises(ConfigError, match=words):
        gpu_cache_memory(free=40, total=100, utilization=0.9, step_bytes=30)


@pytest.mark.parametrize(
    ("tokens", "rows", "logits", "words"),
    [
        (4000, 256, 0, None),
        (4001, 256, 0, r"of 4,001 tokens \(max_tokens\) would have 4,001,000 bytes, but there are 4,000,000 bytes of"),
        (4001, 256, 0, "even without weights and KV cache, at most about 4,000 tokens fit: lower max_tokens"),
        (3000, 100, 10_000, None),
        (3001, 100, 10_000, r"bytes, and the logits of 100 rows \(max_num_seqs\) 1,000,000, but"),
        (3001, 100, 10_000, "at most about 3,000 tokens fit: lower max_tokens"),
        (2048, 400, 10_000, "at most about 363 rows of one token fit: lower max_tokens or max_num_seqs"),
        (200, 400, 10_000, None),
        (2048, 256, 10**9, None),
    ],
)
def test_steps_that_no_memory_holds_are_refused_unless_they_are_the_default(
    tokens: int, rows: int, logits: int, words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chairlift.executor.kv_tensors.total_memory", lambda: 4_000_000)
    refuses = contextlib.nullcontext() if words is None else pytest.raises(ConfigError, match=words)
    with refuses:
        check_step_fits(SchedulerConfig(max_num_seqs=rows), tokens, 1000, logits, torch.device("cpu"), "max_tokens")


def test_layers_with_the_same_window_share_a_group() -> None:
    made = plan(spec(None, 8, None, 8, 4))
    assert [group.window for group in made.groups] == [None, 8, 4]
    assert made.layer_groups == [0, 1, 0, 1, 2]


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_memory_divides_into_blocks(dtype: torch.dtype, size: int) -> None:
    made = plan(spec(None, None), dtype=dtype)
    assert made.bytes_per_token == 2 * 2 * 2 * 8 * size
    assert made.groups[0].num_blocks == (1 << 20) // (made.bytes_per_token * 16)
    assert made.total_bytes <= 1 << 20
    assert made.num_tokens == (made.groups[0].num_blocks - 1) * 16


def test_the_plan_has_no_more_blocks_than_can_be_used() -> None:
    assert plan(spec(None), most_tokens=100).groups[0].num_blocks == 7 + 1


def test_an_exact_number_overrides_the_size() -> None:
    assert plan(spec(None), num_blocks=5, memory_bytes=1).groups[0].num_blocks == 5


def test_too_little_memory_names_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"has 4,095 bytes.* need 4,096; raise kv_cache_memory_bytes"):
        plan(spec(None), memory_bytes=4_095)
    assert plan(spec(None), memory_bytes=4_096).groups[0].num_blocks == 2


@pytest.mark.parametrize(
    ("max_model_len", "words"), [(100_000, "about 4 chats of 2,048 tokens"), (512, "about 16 chats of 512 tokens")]
)
def test_the_plan_describes_its_tokens_and_blocks(max_model_len: int, words: str) -> None:
    text = plan(spec(None), num_blocks=513).describe(max_model_len)
    assert words in text
    assert "8,192 tokens in blocks of 16" in text


def test_in_8_bits_more_tokens_fit_and_the_plan_says_so() -> None:
    layers = [LayerCache(num_kv_heads=2, head_dim=64, window=None)]
    plain, codes = (plan(layers, dtype=torch.bfloat16, kv_dtype=kept) for kept in (None, torch.int8))
    assert (plain.bytes_per_token, codes.bytes_per_token) == (2 * 2 * 64 * 2, 2 * 2 * (64 + 8))
    assert (plain.dtype, codes.dtype) == (torch.bfloat16, torch.int8)
    assert codes.num_tokens / plain.num_tokens == pytest.approx(1.78, abs=0.02)
    assert codes.block_bytes == [16 * codes.bytes_per_token]
    text = codes.describe(2048)
    assert "GiB of int8, " in text and "in blocks of 16, 1.8 times as many per GiB as in bfloat16; room" in text
    assert "int8" not in plain.describe(2048)
    more = plan(layers, dtype=torch.float32, kv_dtype=torch.int8)
    assert ", 3.6 times as many per GiB as in float32" in more.describe(2048)


def test_the_tensors_are_as_planned_and_zero() -> None:
    layers = spec(None, 8)
    made = plan(layers, num_blocks=3)
    caches = make_kv_caches(layers, made, torch.bfloat16, torch.device("cpu"))
    assert len(caches) == 2
    for key, value in caches:
        assert key.shape == value.shape == (3, 16, 2, 8)
        assert key.dtype == value.dtype == torch.bfloat16
        assert not key.any()
        assert not value.any()
        assert key.data_ptr() != value.data_ptr()
        key.fill_(1)
        assert not value.any()


# -- swap space --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("blocks", "hosts"), [(2, 1), (10, 1), (11, 2), (513, 52)])
def test_a_tenth_of_the_blocks_rounded_up_is_swap_space_unless_asked(blocks: int, hosts: int) -> None:
    made = plan(spec(None, 8), num_blocks=blocks, swap_bytes=None)
    assert [group.num_host_blocks for group in made.groups] == [hosts, hosts]


def test_swap_space_is_as_many_whole_blocks_as_fit() -> None:
    layers = [LayerCache(2, 8, None), LayerCache(1, 16, 8), LayerCache(4, 8, None)]
    made = plan(layers, num_blocks=9, swap_bytes=99_999)
    assert made.block_bytes == [2 * 16 * 6 * 8 * 4, 2 * 16 * 16 * 4]
    assert sum(made.block_bytes) == made.bytes_per_token * 16
    hosts = 99_999 // sum(made.block_bytes)
    assert hosts == 12 and [group.num_host_blocks for group in made.groups] == [hosts, hosts]
    assert made.host_bytes == hosts * sum(made.block_bytes)


def test_no_swap_space_is_planned_if_none_is_asked_for_or_none_fits() -> None:
    for size in (0, 2_047):
        made = plan(spec(None), swap_bytes=size)
        assert (made.host_bytes, made.groups[0].num_host_blocks) == (0, 0)
        assert made.describe(512).endswith("; no swap space")


def test_the_plan_says_where_preempted_requests_go() -> None:
    made = plan(spec(None), num_blocks=513, swap_bytes=3 << 19)
    assert made.describe(512).endswith("swap space for 12,288 tokens of preempted requests: 0.00 GiB of host memory")
    made = plan(spec(None), num_blocks=513, swap_bytes=3 << 19, swap_directory="/fast")
    assert made.describe(512).endswith("0.00 GiB of a file in /fast")
    assert plan(spec(None), num_blocks=3 << 19, swap_bytes=5 << 29).describe(4096) == (
        "KV cache: 3.00 GiB, 25,165,808 tokens in blocks of 16; room for about 12,287 chats of 2,048 tokens at once; "
        "swap space for 20,971,520 tokens of preempted requests: 2.50 GiB of host memory"
    )


def test_host_blocks_are_as_planned_zero_and_apart(tmp_path: Path) -> None:
    layers = spec(None, 8, None)
    for directory in (None, str(tmp_path)):
        made = plan(layers, num_blocks=9, swap_bytes=1 << 16, swap_directory=directory)
        arrays = make_host_blocks(made)
        size, count = 2 * 8 * 4 * 16, made.groups[0].num_host_blocks
        assert [array.shape for array in arrays] == [(count, 4 * size), (count, 2 * size)]
        assert not any(array.any() for array in arrays)
        for value, array in enumerate(arrays, start=1):
            array[:] = value
        assert all((array == value).all() for value, array in enumerate(arrays, start=1))


def test_memory_of_this_machine_is_found() -> None:
    assert available_memory(torch.device("cpu")) > 1 << 27
