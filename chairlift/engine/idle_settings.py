"""Settings that have no effect together with the other settings, or for the loaded model."""

from __future__ import annotations

import os

from chairlift.config import BUNDLED_MODEL, CLOSED_BATCHING, EngineConfig
from chairlift.engine.info import EngineInfo

__all__ = ["idle_settings"]

_Idle = dict[str, tuple[bool, str]]
"""Setting -> (whether it has no effect, reason)."""


def idle_settings(config: EngineConfig, info: EngineInfo) -> list[str]:
    """One sentence for each setting that was changed from its default and has no effect here. Such settings are not
    refused, because a comparison uses the same settings in every run.

    A model for embeddings or classes says in ``info.notes`` which settings of generation it does not use.
    """
    idle = _of_any_model(config)
    if info.pooling is None:
        idle |= _of_scheduling(config) | _of_cache(config, info) | _of_generation(config, info)
    given = config.to_flat()
    return [f"{name} has no effect: {why}" for name, (is_idle, why) in idle.items() if is_idle and name in given]


def _of_any_model(config: EngineConfig) -> _Idle:
    model = config.model
    local = model.model == BUNDLED_MODEL or model.model.startswith("hashlm") or os.path.exists(model.model)
    return {
        "revision": (local, "it is for models from the Hub, and this model is not from there"),
        "tokenizer": (model.skip_tokenizer_init, "skip_tokenizer_init is set, and no tokenizer is loaded"),
        "plain_text_messages": (model.skip_tokenizer_init, "skip_tokenizer_init is set, and chats need the tokenizer"),
    }


def _of_scheduling(config: EngineConfig) -> _Idle:
    scheduler = config.scheduler
    plain = scheduler.scheduling_policy == "fcfs"
    ungoverned = scheduler.governor == "off"
    for_priority = "fcfs looks at no deadlines and priorities; choose scheduling_policy priority"
    for_governor = "the governor is off; choose governor rules"
    return {
        "batch_wait_ms": (scheduler.batching == "continuous", "a continuous batch never waits"),
        "policy_share": (
            scheduler.batching in CLOSED_BATCHING,
            f"a {scheduler.batching} batch is filled in the policy's order only",
        ),
        "num_lookahead_steps": (
            bool(scheduler.num_lookahead_steps) and scheduler.speculation is not None,
            "steps with drafts are not scheduled ahead; leave speculative_config out",
        ),
        "late_requests": (plain, for_priority),
        "ageing_seconds": (plain, for_priority),
        "governor_ttft_ms": (ungoverned, for_governor),
        "governor_tpot_ms": (ungoverned, for_governor),
    }


def _of_cache(config: EngineConfig, info: EngineInfo) -> _Idle:
    scheduler = config.scheduler
    cache = config.cache
    swaps = scheduler.preemption_mode in ("swap", "auto") and cache.swap_space_bytes != 0
    offloads = cache.enable_prefix_caching and cache.swap_space_bytes != 0
    unused = not swaps and not (offloads and cache.prefix_offload)
    no_prefixes = (not cache.enable_prefix_caching, "it needs enable_prefix_caching")
    return {
        "preemption_mode": (
            scheduler.preemption_mode == "swap" and not swaps,
            "there is nowhere to swap to, and all is recomputed; raise swap_space_bytes",
        ),
        "cache_eviction": no_prefixes,
        "state_snapshot_interval": no_prefixes,
        "swap_space_bytes": (
            bool(cache.swap_space_bytes) and unused,
            f"preemption_mode is {scheduler.preemption_mode}, and nothing is swapped",
        ),
        "swap_directory": (unused, "nothing is swapped"),
        "kv_events_endpoint": no_prefixes,
        **dict.fromkeys(
            ("kv_store_bytes", "kv_store_mode", "kv_store_write_rate"),
            (cache.kv_store is None, "no blocks are stored; set kv_store"),
        ),
        "prefix_offload": (not offloads, "it needs enable_prefix_caching, and swap space"),
        "kv_cache_memory_bytes": (not info.block_bytes, "HashLM keeps no K and V; choose num_kv_blocks"),
        "gpu_memory_utilization": _gpu_memory(config),
    }


def _gpu_memory(config: EngineConfig) -> tuple[bool, str]:
    if config.model.device == "cpu":
        return True, "device is cpu; kv_cache_memory_bytes sets the memory for KV"
    given = [name for name in ("kv_cache_memory_bytes", "num_kv_blocks") if getattr(config.cache, name) is not None]
    return bool(given), f"{' and '.join(given)} set the size of the KV cache"


def _of_generation(config: EngineConfig, info: EngineInfo) -> _Idle:
    no_adapters = (not config.lora.enable_lora, "no adapters are served; set enable_lora")
    no_pooling = (True, "this model generates text; it is for embeddings and classes (runner pooling)")
    no_images = (not info.takes_images, "this model takes no images")
    return {
        "image_memory_bytes": no_images,
        **dict.fromkeys(("max_loras", "max_lora_rank", "max_cpu_loras"), no_adapters),
        **dict.fromkeys(("pooling_type", "pooling_normalize", "is_matryoshka"), no_pooling),
        "cuda_graphs": (
            config.model.cuda_graphs != "off" and not info.records_graphs,
            f"{info.kernels} kernels compute, and only triton's are recorded as graphs",
        ),
    }
