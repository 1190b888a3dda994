"""Settings that have no effect are told, in both directions: also, no setting is told that has an effect."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from chairlift.config import EngineConfig
from chairlift.engine.idle_settings import idle_settings
from chairlift.engine.info import PoolingInfo
from tests.server.harness import INFO


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({}, []),
        ({"batch_wait_ms": 5.0}, ["batch_wait_ms has no effect: a continuous batch never waits"]),
        ({"batch_wait_ms": 5.0, "batching": "dynamic"}, []),
        ({"late_requests": "drop", "ageing_seconds": 5.0}, ["late_requests", "ageing_seconds"]),
        ({"late_requests": "drop", "ageing_seconds": 5.0, "scheduling_policy": "priority"}, []),
        ({"governor_ttft_ms": 5.0, "governor_tpot_ms": 5.0}, ["governor_ttft_ms", "governor_tpot_ms"]),
        ({"governor_ttft_ms": 5.0, "governor": "rules"}, []),
        ({"preemption_mode": "swap", "swap_space_bytes": 0, "swap_directory": "/x"}, ["preemption_mode", "swap_dir"]),
        ({"preemption_mode": "recompute", "swap_directory": "/x"}, ["swap_directory has no effect: nothing"]),
        ({"preemption_mode": "swap", "swap_directory": "/x"}, []),
        ({"preemption_mode": "recompute", "swap_directory": "/x", "prefix_offload": True}, []),
        ({"prefix_offload": True, "swap_space_bytes": 0}, ["prefix_offload has no effect: it needs"]),
        ({"prefix_offload": True, "enable_prefix_caching": False}, ["prefix_offload has no effect: it needs"]),
        (
            {"preemption_mode": "recompute", "swap_space_bytes": 4096},
            ["swap_space_bytes has no effect"],
        ),
        (
            {"preemption_mode": "none", "swap_space_bytes": 4096},
            ["swap_space_bytes has no effect"],
        ),
        ({"preemption_mode": "none", "swap_space_bytes": 4096, "prefix_offload": True}, []),
        ({"preemption_mode": "none", "swap_space_bytes": 0}, []),
        ({"enable_prefix_caching": False, "kv_events_endpoint": "tcp://127.0.0.1:5"}, ["kv_events_endpoint"]),
        ({"policy_share": 0.5, "batching": "static"}, ["policy_share has no effect: a static batch"]),
        ({"policy_share": 0.5}, []),
        ({"max_loras": 2, "max_lora_rank": 8, "max_cpu_loras": 9}, ["max_loras", "max_lora_rank", "max_cpu_loras"]),
        ({"max_loras": 2, "max_lora_rank": 8, "max_cpu_loras": 9, "enable_lora": True}, []),
        ({"image_memory_bytes": 4096}, ["image_memory_bytes has no effect: this model takes no images"]),
        ({"revision": "main"}, ["revision has no effect: it is for models from the Hub"]),
        ({"revision": "main", "model": "/"}, ["revision"]),
        ({"revision": "main", "model": "someone/model"}, []),
        ({"tokenizer": "/x", "skip_tokenizer_init": True}, ["tokenizer has no effect: skip_tokenizer_init"]),
        ({"plain_text_messages": True, "skip_tokenizer_init": True}, ["plain_text_messages has no effect: skip_"]),
        ({"tokenizer": "/x"}, []),
        ({"cuda_graphs": "start"}, ["cuda_graphs has no effect: avx512 kernels compute"]),
        ({"cuda_graphs": "off"}, []),  # and there are none
        ({"gpu_memory_utilization": 0.5}, ["gpu_memory_utilization has no effect: device is cpu"]),
        ({"gpu_memory_utilization": 0.5, "device": "cuda"}, []),
        ({"gpu_memory_utilization": 0.5, "device": "cuda", "num_kv_blocks": 9}, ["gpu_memory_utilization"]),
        (
            {"pooling_type": "MEAN", "pooling_normalize": False, "is_matryoshka": True},
            ["pooling_type has no effect: this model generates text", "pooling_normalize", "is_matryoshka"],
        ),
        ({"speculative_config": '{"method": "ngram"}', "num_lookahead_steps": 0}, []),
        ({"speculative_config": '{"method": "ngram"}', "num_lookahead_steps": 1}, ["num_lookahead_steps"]),
        ({"speculative_config": '{"method": "ngram"}', "batching": "static"}, []),
    ],
)
def test_settings_without_effect_are_reported(settings: dict[str, Any], named: list[str]) -> None:
    told = idle_settings(EngineConfig.from_flat(settings), INFO)
    assert len(told) == len(named), told
    assert all(line.startswith(name) for line, name in zip(told, named, strict=True)), told


def test_a_model_for_embeddings_uses_its_own_settings() -> None:
    info = dataclasses.replace(INFO, pooling=PoolingInfo(task="embed", pooling_type="MEAN", normalize=True, width=8))
    settings = {"pooling_type": "MEAN", "policy_share": 0.5, "revision": "main"}
    assert [line.split()[0] for line in idle_settings(EngineConfig.from_flat(settings), info)] == ["revision"]


def test_a_model_with_images_uses_their_memory() -> None:
    info = dataclasses.replace(INFO, takes_images=True)
    assert not idle_settings(EngineConfig.from_flat({"image_memory_bytes": 4096}), info)


def test_on_a_gpu_graphs_are_used() -> None:
    info = dataclasses.replace(INFO, kernels="triton", records_graphs=True)
    assert not idle_settings(EngineConfig.from_flat({"cuda_graphs": "start", "device": "cuda"}), info)
