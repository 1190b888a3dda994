"""Chooses the backend of a model, and refuses the settings that need an ability that the backend lacks."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch

from chairlift.config import EngineConfig
from chairlift.errors import ConfigError
from chairlift.executor.backends.backend import Backend
from chairlift.executor.backends.native.backend import NativeBackend
from chairlift.executor.backends.torch.backend import TorchBackend
from chairlift.executor.backends.triton.backend import TritonBackend
from chairlift.executor.image_bank import ImageBank
from chairlift.models.encoder_config import EncoderConfig
from chairlift.models.fallback.config import TransformersConfig
from chairlift.models.formats.gguf_projector import NONE
from chairlift.models.hf_config import NetworkConfig
from chairlift.models.loader import resolve_dtype
from chairlift.models.vision.vision_config import PatchConfig, PooledTowerConfig
from chairlift.models.vision.vision_files import load_tower

__all__ = [
    "BACKENDS",
    "FALLBACK",
    "backend_class",
    "choose_backend",
    "choose_dtype",
    "choose_pooled_backend",
    "choose_transformers",
    "load_images",
    "refuse_for_states",
]

_log = logging.getLogger(__name__)

FALLBACK: Final[type[Backend]] = TorchBackend
"""Runs every model on every device, more slowly than the others."""
BACKENDS: Final[tuple[type[Backend], ...]] = (NativeBackend, TritonBackend, FALLBACK)


def backend_class(kernels: str) -> type[Backend] | None:
    """The backend that a value of the setting ``kernels`` asks for; None for ``auto``."""
    return next((each for each in BACKENDS if kernels in each.settings), None)


def choose_dtype(
    network: NetworkConfig | EncoderConfig | TransformersConfig, setting: str, device: torch.device
) -> torch.dtype:
    """Data type in which a model runs. On a CPU, ``auto`` replaces float16 by bfloat16: the native kernels do not
    support float16, and PyTorch's float16 kernels are ten times slower."""
    dtype = resolve_dtype(network, setting)
    return torch.bfloat16 if setting == "auto" and dtype == torch.float16 and device.type == "cpu" else dtype


def choose_backend(config: EngineConfig, network: NetworkConfig, dtype: torch.dtype, device: torch.device) -> Backend:
    """The backend for a model: the one that the setting ``kernels`` asks for, or else the fastest for the device.

    If PyTorch is chosen because a faster backend cannot run the model, the reason is logged. Raises ConfigError if the
    setting ``kernels`` is impossible, and for settings that the backend cannot do.
    """
    backend = _pick(config, network, dtype, device, BACKENDS)
    _refuse_for_weights(backend, config, dtype, device)
    if config.scheduler.speculation is not None and not backend.abilities.drafts:
        raise ConfigError(
            f"speculative_config is set, but {backend.kernel_words} verify no drafts yet; leave it out, or take"
            " kernels='torch'"
        )
    if config.model.logprobs_mode != "raw_logprobs" and not backend.abilities.processed_logprobs:
        raise ConfigError(
            f"logprobs_mode is {config.model.logprobs_mode!r}, but {backend.kernel_words} report raw_logprobs only;"
            " leave it out, or take kernels='torch'"
        )
    kv_dtype = config.cache.kv_cache_dtype
    if kv_dtype != "auto" and not backend.abilities.int8_kv:
        reason = _why_not_int8_kv(backend, config, network, dtype, device)
        raise ConfigError(f"kv_cache_dtype is {kv_dtype!r}, but {reason}, or leave kv_cache_dtype out")
    return backend


def choose_pooled_backend(
    config: EngineConfig, network: NetworkConfig | EncoderConfig, dtype: torch.dtype, device: torch.device
) -> Backend:
    """The backend for a model of embeddings, scores or classes, as in :func:`choose_backend`."""
    able = [each for each in BACKENDS if each.abilities.texts]
    asked = backend_class(config.model.kernels)
    if asked is not None and asked not in able:
        raise ConfigError(
            f"kernels is {config.model.kernels!r}, but models for embeddings and classes run on 'auto' or 'torch'"
        )
    backend = _pick(config, network, dtype, device, able)
    _refuse_for_weights(backend, config, dtype, device)
    return backend


def _pick(
    config: EngineConfig,
    network: NetworkConfig | EncoderConfig,
    dtype: torch.dtype,
    device: torch.device,
    able: Sequence[type[Backend]],
) -> Backend:
    setting = config.model.kernels
    block_size = config.cache.block_size
    asked = backend_class(setting)
    if asked is not None:
        if reason := asked.why_not(network, dtype, device, block_size):
            raise ConfigError(f"kernels is {setting!r}, but {asked.kernel_words} cannot run this model: {reason}")
        return asked.choose(setting)
    fastest = next((each for each in able if each.home == device.type), FALLBACK)
    if reason := fastest.why_not(network, dtype, device, block_size):
        words = fastest.kernel_words
        _log.warning("PyTorch runs this model, more slowly than %s would: %s", words, reason)
        fastest = FALLBACK
    return fastest.choose(setting)


def _refuse_for_weights(backend: Backend, config: EngineConfig, dtype: torch.dtype, device: torch.device) -> None:
    if config.model.batch_invariant and not backend.abilities.batch_invariant:
        raise ConfigError(
            "batch_invariant is on, but PyTorch would run this model, and promises no equal bits; leave it off"
        )
    quantization = config.model.quantization
    if quantization in (None, "none"):
        return
    if quantization in backend.abilities.weights:
        reason = backend.why_not_weights(quantization, dtype, device)
    else:
        able = [each for each in BACKENDS if quantization in each.abilities.weights]
        known = f"{' and '.join(each.kernel_words for each in able)} alone know it"
        reason = f"{backend.owner} would run this model, and {known}; use {', or '.join(each.remedy for each in able)}"
    if reason:
        raise ConfigError(f"quantization is {quantization!r}, but {reason}, or leave quantization out")


def _why_not_int8_kv(
    backend: Backend, config: EngineConfig, network: NetworkConfig, dtype: torch.dtype, device: torch.device
) -> str:
    able = [each for each in BACKENDS if each.abilities.int8_kv]
    whose = " and ".join(each.whose for each in able)
    refused = f"{backend.owner} would run this model, and only {whose} ones read K and V in 8 bits"
    if config.model.kernels != "auto":
        return f"{refused}; use kernels='auto'"
    usual = next(each for each in able if each.home == device.type)
    return f"{refused}: {usual.why_not(network, dtype, device, config.cache.block_size)}"


def choose_transformers(config: EngineConfig, network: TransformersConfig) -> Backend:
    """Backend for a model from transformers: always PyTorch's. Raises ConfigError for settings that need another."""
    model = config.model
    kv_dtype = config.cache.kv_cache_dtype
    refused = {
        "kernels": model.kernels not in ("auto", *FALLBACK.settings),
        "quantization": model.quantization not in (None, "none"),
        "batch_invariant": model.batch_invariant,
        "kv_cache_dtype": kv_dtype != "auto",
        "enable_lora": config.lora.enable_lora,
    }
    others = {"kv_cache_dtype": kv_dtype, "enable_lora": config.lora.enable_lora}
    for name, is_refused in refused.items():
        if is_refused:
            value = others[name] if name in others else getattr(model, name)
            raise ConfigError(
                f"{name} is {value!r}, but model_type {network.model_type!r} runs through transformers, by PyTorch's"
                f" kernels, which cannot do that; leave {name} out"
            )
    return FALLBACK.choose("auto")


def refuse_for_states(config: EngineConfig, recurrent: bool) -> None:
    """Raise ConfigError for settings that need recurrent states, if the model has none."""
    if not recurrent and config.cache.state_snapshot_interval is not None:
        raise ConfigError(
            f"state_snapshot_interval is {config.cache.state_snapshot_interval}, but this model keeps no recurrent"
            " states; leave it out"
        )


def load_images(
    config: EngineConfig,
    model_dir: Path,
    network: NetworkConfig | TransformersConfig,
    dtype: torch.dtype,
    backend: Backend,
) -> ImageBank | None:
    """Load the model's image encoder; None for a model without one, if the setting ``mmproj`` is ``none``, and if the
    backend takes none.

    Raises ConfigError and ModelLoadError.
    """
    if isinstance(network, TransformersConfig) or network.vision is None or not backend.abilities.images:
        return None
    if config.model.mmproj == NONE:
        return None
    if config.lora.active:
        raise ConfigError(
            "enable_lora is on, but a model that reads images is served without adapters; leave it out, or set mmproj"
            " to none for texts"
        )
    scheduler = config.scheduler
    if isinstance(network.vision, PooledTowerConfig):  # its images are computed in one step, beside all decode rows
        rows = network.vision.rows_per_tile
        if scheduler.max_num_batched_tokens < rows + scheduler.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens is {scheduler.max_num_batched_tokens}, but an image of this model has {rows}"
                f" tokens that are computed in one step, beside max_num_seqs {scheduler.max_num_seqs}; set it to"
                f" {rows + scheduler.max_num_seqs} or more, or lower max_num_seqs"
            )
    levels = network.vision.levels if isinstance(network.vision, PatchConfig) else ()
    row_bytes = (1 + len(levels)) * network.hidden_size * dtype.itemsize
    return ImageBank(load_tower(model_dir, network, dtype, config.model.mmproj), row_bytes)
