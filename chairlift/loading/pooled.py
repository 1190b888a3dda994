"""Loads a model for embeddings, scores and classes, and makes its executor, from settings."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Final

from chairlift.base.rerankers import RERANKERS
from chairlift.config import EngineConfig, SchedulerConfig
from chairlift.engine.info import EngineInfo, PairTexts, PoolingInfo
from chairlift.errors import ConfigError
from chairlift.loading.loaded import fingerprint
from chairlift.loading.model import (
    Progress,
    device_name,
    find_device,
    model_directory,
    read_tokenizer,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from chairlift.executor.backends.backend import Backend
    from chairlift.executor.pooled_runner import PooledExecutor
    from chairlift.models.pooling import PooledConfig

__all__ = ["LoadedPooling", "is_pooling", "load_pooling", "read_pooled"]

_OF_STEPS: Final = (
    *("prefill_mode", "preemption_mode", "batching", "batch_wait_ms", "preferred_batch_sizes", "num_lookahead_steps"),
    *("admission_watermark", "governor", "governor_ttft_ms", "governor_tpot_ms", "speculative_config"),
    *("usual_mask_ms", "max_mask_seconds", "max_tenant_mask_share"),
)
"""Settings of the scheduler that are for requests with several steps, a KV cache or masks."""

_OF_GENERATION: Final = (
    *("block_size", "kv_cache_dtype", "kv_cache_memory_bytes", "num_kv_blocks", "gpu_memory_utilization"),
    *(
        "enable_prefix_caching",
        "prefix_offload",
        "cache_eviction",
        "state_snapshot_interval",
        "swap_space_bytes",
        "swap_directory",
        *("kv_store", "kv_store_bytes", "kv_store_mode", "kv_store_write_rate"),
        "image_memory_bytes",
        "cuda_graphs",
        "plain_text_messages",
        "seed",
    ),
    *("generation_config", "logprobs_mode", "kv_events_endpoint", "max_loras", "max_lora_rank", "max_cpu_loras"),
    *_OF_STEPS,
)
"""Settings of the KV cache, of decode steps and of sampling. A model for embeddings, scores or classes does not use
them."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoadedPooling:
    """A model for embeddings, scores or classes in memory, and facts about it."""

    executor: PooledExecutor
    scheduler: SchedulerConfig
    """Settings of the scheduler, with the defaults of those that have no effect."""
    info: EngineInfo


def is_pooling(config: EngineConfig) -> bool:
    """Whether the settings name a model for embeddings, scores or classes. Raises ConfigError and ModelLoadError."""
    from chairlift.models.hashlm_served import parse_hashlm

    if config.model.reranker is None and config.model.reranker_instruction is not None:
        raise ConfigError("reranker_instruction is for a reranker, and none is set; leave it out, or set reranker")
    if parse_hashlm(config.model.model) is not None:
        if config.model.runner == "pooling" or config.model.reranker is not None:
            raise ConfigError("runner is 'pooling', but HashLM only generates; leave runner and reranker out")
        return False
    from chairlift.models.pooling import pools
    from chairlift.models.registry import named_family

    named_family(config.model.model_impl)
    return pools(model_directory(config), config.model.runner, config.model.reranker)


def read_pooled(config: EngineConfig, model_dir: Path) -> PooledConfig:
    """Settings of pooling, from the model's files and the settings of the engine. Raises ConfigError and
    ModelLoadError."""
    from chairlift.models.pooling import read_pooled_config, read_reranker

    settings = config.model
    overrides = {
        "pooling_type": settings.pooling_type,
        "normalize": settings.pooling_normalize,
        "is_matryoshka": settings.is_matryoshka,
    }
    if settings.reranker is None:
        return read_pooled_config(model_dir, **overrides)  # type: ignore[arg-type]
    if any(value is not None for value in overrides.values()):
        raise ConfigError("pooling_type, pooling_normalize and is_matryoshka are for embeddings; a reranker has none")
    if settings.skip_tokenizer_init:
        raise ConfigError("a reranker needs the tokenizer, to know its answers; leave skip_tokenizer_init out")
    tokenizer = read_tokenizer(config, str(model_dir))
    answers = RERANKERS[settings.reranker].answers
    ids = [tokenizer.token_to_id(answer) for answer in answers]
    if None in ids:
        missing = answers[ids.index(None)]
        raise ConfigError(f"reranker is {settings.reranker!r}, but {model_dir} has no token {missing!r}; leave it out")
    return read_reranker(model_dir, settings.reranker, tuple(each for each in ids if each is not None))


def load_pooling(config: EngineConfig, progress: Progress | None = None) -> LoadedPooling:
    """Load the weights. Raises ConfigError and ModelLoadError."""
    from chairlift.executor.kv_tensors import check_step_fits
    from chairlift.executor.select import choose_dtype, choose_pooled_backend
    from chairlift.models.approximations import approximations_of
    from chairlift.models.loader import load_pooled

    settings = config.model
    scheduler = config.scheduler
    if config.lora.enable_lora:
        raise ConfigError("enable_lora is on, but models for embeddings or classes take no adapters; leave it out")
    if settings.tensor_parallel_size != 1:
        size = settings.tensor_parallel_size
        raise ConfigError(f"tensor_parallel_size is {size}, but models for embeddings or classes run on one process")
    model_dir = model_directory(config)
    pooled = read_pooled(config, model_dir)
    network = pooled.network
    device = find_device(settings.device)
    dtype = choose_dtype(network, settings.dtype, device)
    backend = choose_pooled_backend(config, network, dtype, device)
    weight_format = backend.weight_format(settings.quantization, settings.dtype)
    max_tokens = max(scheduler.max_num_batched_tokens, _max_model_len(settings.max_model_len, pooled))
    given = max(scheduler.max_num_batched_tokens, settings.max_model_len or 0)  # the model's own length is a default
    sized_by = "max_num_batched_tokens, max_model_len"
    check_step_fits(scheduler, given, network.step_bytes(dtype.itemsize), 0, device, sized_by)
    model = load_pooled(model_dir, pooled, dtype, device, progress, weight_format=weight_format)
    try:
        executor = backend.make_pooled_executor(model, config, dtype, device, max_tokens)
    except MemoryError:
        message = f"no memory for passes of {max_tokens:,} tokens (max_num_batched_tokens, max_model_len); lower them"
        raise ConfigError(message) from None
    approximations = approximations_of(model, dtype)
    info = _engine_info(config, pooled, model_dir, str(dtype).removeprefix("torch."), backend, approximations)
    info = dataclasses.replace(
        info,
        quantization=model.quantization,
        weight_bytes=model.weight_bytes(dtype),
        device=device_name(device),
        deterministic=backend.abilities.equal_bits and set(executor.calls) <= _INVARIANT,
    )
    return LoadedPooling(executor=executor, scheduler=_without(scheduler, _OF_STEPS), info=info)


def _without(scheduler: SchedulerConfig, names: Sequence[str]) -> SchedulerConfig:
    """The settings with the defaults of the fields ``names``."""
    defaults = SchedulerConfig()
    return dataclasses.replace(scheduler, **{name: getattr(defaults, name) for name in names})


_INVARIANT: Final = {"encoder_embeddings of token_ids", "encoder_attention", "layer_norm", "gelu", "gelu_and_mul"}
"""PyTorch operations whose result for a row does not depend on the other rows. (Attention of an encoder is one call per
text.)"""


def _max_model_len(setting: int | None, pooled: PooledConfig) -> int:
    if setting is not None and setting > pooled.max_model_len:
        raise ConfigError(f"max_model_len is {setting}, but the model was made for {pooled.max_model_len}; lower it")
    return setting or min(pooled.max_seq_length or pooled.max_model_len, pooled.max_model_len)


def _engine_info(
    config: EngineConfig,
    pooled: PooledConfig,
    model_dir: Path,
    dtype: str,
    backend: Backend,
    approximations: tuple[str, ...],
) -> EngineInfo:
    from chairlift.models.formats.quantized_checkpoints import quantization_notes  # imports torch

    settings = config.model
    scheduler = config.scheduler
    max_model_len = _max_model_len(settings.max_model_len, pooled)
    how: tuple[str, ...] = (dtype, backend.kernels, pooled.pooling, str(pooled.normalize), str(settings.quantization))
    how += (*filter(None, (settings.reranker, settings.reranker_instruction)), *approximations)
    return EngineInfo(
        model=settings.model,
        model_dir=str(model_dir),
        vocab_size=pooled.network.vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=(),
        capacity_tokens=max_model_len,
        pool_tokens=0,
        block_size=1,
        num_blocks=0,
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        dtype=dtype,
        approximations=approximations,
        device="",
        kernels=backend.kernels,
        threads=backend.num_threads(config),
        memory_plan="no KV cache: every text is computed whole, in one pass",
        held=False,
        deterministic=False,
        fingerprint=fingerprint(str(model_dir), settings.model, *how),
        notes=(*quantization_notes(model_dir), *_notes(config, pooled)),
        pooling=_info(config, pooled),
    )


def _pair_texts(config: EngineConfig) -> PairTexts | None:
    reranker = RERANKERS.get(config.model.reranker or "")
    instruction = config.model.reranker_instruction
    if reranker is None:
        return None
    task = reranker.default if instruction is None else instruction
    query = f"{reranker.instruction}{task}{reranker.query}"
    return PairTexts(reranker.before, query, reranker.document, reranker.behind)


def _info(config: EngineConfig, pooled: PooledConfig) -> PoolingInfo:
    return PoolingInfo(
        task=pooled.task,
        pooling_type=pooled.pooling,
        normalize=pooled.normalize,
        width=pooled.width,
        dimensions=pooled.dimensions,
        labels=pooled.labels,
        prompts=dict(pooled.prompts),
        default_prompt=pooled.default_prompt,
        token_types=getattr(pooled.network, "num_token_types", 0) > 1,
        pair=_pair_texts(config),
    )


def _notes(config: EngineConfig, pooled: PooledConfig) -> tuple[str, ...]:
    """Notes for the user on how this model is run, one per line."""
    idle = [name for name in _OF_GENERATION if name in config.to_flat()]
    without = f"{', '.join(idle)} have no effect: a model for embeddings or classes has no KV cache and draws no tokens"
    notes = [*pooled.notes, *([without] if idle else [])]
    longest = _max_model_len(config.model.max_model_len, pooled)
    if longest > config.scheduler.max_num_batched_tokens:
        notes.append(
            f"texts of more than {config.scheduler.max_num_batched_tokens:,} tokens (max_num_batched_tokens), and up to"
            f" {longest:,} (max_model_len), have a pass of their own"
        )
    return tuple(notes)
