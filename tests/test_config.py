"""Settings: unknown names are refused with the nearest known one, and every range at its edges."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from chairlift.base.quantities import reader_of
from chairlift.config import EngineConfig, ServerConfig, flat_fields
from chairlift.errors import ConfigError

HUGE = 10**400


def test_defaults_are_legal_and_every_setting_is_documented() -> None:
    config = EngineConfig()
    assert config == EngineConfig.from_flat({flag.name: flag.default for flag in flat_fields()})
    assert all(len(flag.help) > 10 for flag in flat_fields())
    assert len({flag.name for flag in flat_fields()}) == len(flat_fields())


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("max_num_sequences", "did you mean 'max_num_seqs'"),
        ("blocksize", "did you mean 'block_size'"),
        ("qqqqqqqq", "known: model, "),
        ("zzz", "known: model, "),
        (5, "known: model, "),
    ],
)
def test_unknown_names_are_refused_with_a_suggestion(name: Any, hint: str) -> None:
    with pytest.raises(ConfigError, match=hint) as caught:
        EngineConfig.from_flat({name: 1})
    assert repr(name) in str(caught.value)


RANGES: list[tuple[str, float, float]] = [
    ("threads", 1, 256),
    ("max_model_len", 2, 2**24),
    ("seed", -(2**63), 2**63 - 1),
    ("kv_cache_memory_bytes", 1, 2**50),
    ("num_kv_blocks", 2, 2**31),
    ("swap_space_bytes", 0, 2**50),
    ("max_num_seqs", 1, 2**16),
    ("max_num_batched_tokens", 1, 2**24),
    ("batch_wait_ms", 0, 3_600_000),
    ("num_lookahead_steps", 0, 2),
    ("admission_watermark", 0, 0.5),
    ("usual_mask_ms", 0, 1000),
    ("max_mask_seconds", 0.001, 10**6),
    ("max_tenant_mask_share", 0.001, 256),
    ("block_size", 1, 256),
]


@pytest.mark.parametrize(("name", "low", "high"), RANGES)
def test_numbers_are_accepted_up_to_the_edges_of_their_ranges_only(name: str, low: float, high: float) -> None:
    for value in (low, high):
        EngineConfig.from_flat({name: value})
    for value in (low - 1, high + 1, HUGE, -HUGE):
        with pytest.raises(ConfigError, match=name):
            EngineConfig.from_flat({name: value})


@pytest.mark.parametrize("name", [name for name, _, _ in RANGES])
@pytest.mark.parametrize("value", [True, "1", [1], {}, float("nan"), float("inf"), b"1", object()])
def test_numbers_refuse_other_types(name: str, value: Any) -> None:
    kinds = {flag.name: flag.kind for flag in flat_fields()}
    if value == "1" and reader_of(name, kinds[name]) is not None:
        value = "one"  # amounts may be texts
    with pytest.raises(ConfigError, match=name):
        EngineConfig.from_flat({name: value})


@pytest.mark.parametrize("name", ["block_size", "max_num_seqs", "seed"])
def test_whole_numbers_refuse_fractions(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be a whole number"):
        EngineConfig.from_flat({name: 16.0})


@pytest.mark.parametrize("name", ["max_num_seqs", "block_size", "batch_wait_ms", "model", "device", "dtype"])
def test_settings_that_need_a_value_refuse_none(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        EngineConfig.from_flat({name: None})


@pytest.mark.parametrize("block_size", [3, 24, 255])
def test_block_size_is_a_power_of_two(block_size: int) -> None:
    with pytest.raises(ConfigError, match=f"power of two from 1 to 256, got {block_size}"):
        EngineConfig.from_flat({"block_size": block_size})


@pytest.mark.parametrize("name", ["enable_prefix_caching", "prefix_offload", "skip_tokenizer_init"])
@pytest.mark.parametrize("value", ["false", 0, 1, None])
def test_switches_are_true_or_false(name: str, value: Any) -> None:
    """A text like "false" would count as true."""
    with pytest.raises(ConfigError, match=f"{name} must be true or false, got {value!r}"):
        EngineConfig.from_flat({name: value})


@pytest.mark.parametrize("name", ["model", "tokenizer", "revision", "swap_directory"])
def test_names_are_text_or_paths(name: str) -> None:
    EngineConfig.from_flat({name: "a"})
    EngineConfig.from_flat({name: Path("a")})
    with pytest.raises(ConfigError, match=f"{name} must be text, got 5"):
        EngineConfig.from_flat({name: 5})


@pytest.mark.parametrize("value", ["\0", Path("a\0b"), "\ud800"])
def test_an_impossible_file_name_is_refused_with_its_setting(value: Any) -> None:
    for name in ("model", "tokenizer", "revision", "swap_directory"):
        with pytest.raises(ConfigError, match=f"{name} must be UTF-8 text without NUL"):
            EngineConfig.from_flat({name: value})
    for name in ("host", "api_key_file", "chat_template", "otlp_traces_endpoint"):
        with pytest.raises(ConfigError, match=f"{name} must be UTF-8 text without NUL"):
            ServerConfig(**{name: value})


@pytest.mark.parametrize("kind", [str, Path])
def test_names_of_bytes_that_are_no_text_are_told_before_anything_is_started(kind: type) -> None:
    with pytest.raises(
        ConfigError,
        match=r"model must be UTF-8 text without NUL, got '/models/mod\\udce8le'; rename what it names",
    ):
        EngineConfig.from_flat({"model": kind(os.fsdecode(b"/models/mod\xe8le"))})


@pytest.mark.parametrize(
    ("name", "value", "known"),
    [
        ("dtype", "fp16", "auto, float32, bfloat16, float16"),
        ("dtype", ["auto"], "auto, float32"),
        ("kernels", "AVX2", "auto, amx, avx512_bf16, avx512_vnni, avx512, avx2, neon, neon_i8mm, torch"),
        ("batching", "Static", "continuous, static, dynamic"),
        ("scheduling_policy", "lifo", "fcfs, priority or module:Class"),
        ("prefill_mode", "best", "mixed, prefill_first"),
        ("late_requests", "ignore", "downgrade, drop"),
    ],
)
def test_choices_name_what_is_known(name: str, value: Any, known: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be (one of )?{known}"):
        EngineConfig.from_flat({name: value})


@pytest.mark.parametrize(
    ("device", "good"), [("cpu", 1), ("cuda", 1), ("cuda:3", 1), ("cuda:", 0), ("cuda:00", 0), ("cpu:0", 0), ("tpu", 0)]
)
def test_devices_are_cpu_cuda_or_a_numbered_gpu(device: str, good: int) -> None:
    if good:
        EngineConfig.from_flat({"device": device})
    else:
        with pytest.raises(ConfigError, match=f"cuda:N, got '{device}'"):
            EngineConfig.from_flat({"device": device})
