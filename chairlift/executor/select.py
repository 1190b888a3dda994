"""Who runs the model: the native CPU kernels where they can, PyTorch where they cannot."""

from __future__ import annotations

import logging

import torch

from chairlift.config import EngineConfig
from chairlift.errors import ConfigError
from chairlift.executor.kv_tensors import KVPlan
from chairlift.executor.local import ModelRunner
from chairlift.executor.model_runner import TorchModelRunner
from chairlift.executor.native_runner import NativeModelRunner
from chairlift.kernels.cpu.library import Pool, best_isa, load, supported_isas, why_unavailable
from chairlift.kernels.cpu.packing import NATIVE_DTYPES
from chairlift.models.causal_lm import CausalLM
from chairlift.models.hf_config import ModelConfig

__all__ = ["choose_isa", "make_runner", "why_not_native"]

_log = logging.getLogger(__name__)


def why_not_native(network: ModelConfig, dtype: torch.dtype, device: torch.device, block_size: int) -> str:
    """Why the native kernels cannot run a model, and what to do about it; empty when they can."""
    if device.type != "cpu":
        return f"they run on the CPU, and device is {device}; use device='cpu'"
    if load() is None:
        return why_unavailable()
    if dtype not in NATIVE_DTYPES:
        return (
            f"they compute in bfloat16 and float32, and dtype is {str(dtype).removeprefix('torch.')}; use one of those"
        )
    if block_size % 16:
        return f"they need block_size to be a multiple of 16, and it is {block_size}; leave it out"
    if network.head_dim % 16 or not 16 <= network.head_dim <= 256:
        return f"they need a head size that is a multiple of 16 from 16 to 256, and this model's is {network.head_dim}"
    return ""


def choose_isa(config: EngineConfig, network: ModelConfig, dtype: torch.dtype, device: torch.device) -> str | None:
    """The instruction-set path of the native kernels that will run the model, or None for PyTorch.

    Falling back on PyTorch unasked is said once, in the log. Raises ConfigError when ``kernels`` names a path that
    this processor lacks, or that cannot run this model.
    """
    kernels = config.model.kernels
    if kernels == "torch":
        return None
    reason = why_not_native(network, dtype, device, config.cache.block_size)
    if kernels == "auto":
        if reason and device.type == "cpu":
            _log.warning("PyTorch runs this model, more slowly than the native CPU kernels would: %s", reason)
        return None if reason else best_isa()
    if reason:
        raise ConfigError(f"kernels is {kernels!r}, but the native kernels cannot run this model: {reason}")
    if kernels not in supported_isas():
        raise ConfigError(
            f"kernels is {kernels!r}, but this processor runs {', '.join(supported_isas())}; use one of them, or auto"
        )
    return kernels


def make_runner(
    model: CausalLM, plan: KVPlan, config: EngineConfig, dtype: torch.dtype, device: torch.device, isa: str | None
) -> ModelRunner:
    """The runner for what :func:`choose_isa` chose, of a model loaded in the layout that goes with it."""
    threads = config.model.threads
    if isa is None:
        if threads is not None:
            torch.set_num_threads(threads)
        return TorchModelRunner(model, plan, dtype, device)
    try:
        pool = Pool(threads)
    except OSError as error:
        raise ConfigError(f"threads is {threads}: {error}") from None
    return NativeModelRunner(model, plan, dtype, pool, isa=isa, max_tokens=config.scheduler.max_num_batched_tokens)
