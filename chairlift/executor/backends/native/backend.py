"""The backend of the native CPU kernels."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Mapping
from typing import Any, Final

import torch

from chairlift.base.processors import architecture
from chairlift.config import EngineConfig
from chairlift.errors import ConfigError, InvariantError
from chairlift.executor.backends.backend import Abilities, Backend
from chairlift.executor.backends.native.native_runner import NativeModelRunner
from chairlift.executor.drafters.runner import DraftRunner
from chairlift.executor.drafters.source import DraftSource
from chairlift.executor.image_bank import ImageBank
from chairlift.executor.kv_tensors import KVPlan
from chairlift.executor.pooled_runner import NativePooledRunner, PooledExecutor
from chairlift.kernels import ops
from chairlift.kernels.cpu.library import (
    ARM64_ISAS,
    BUILD_ALL,
    ISA_NAMES,
    ThreadPool,
    best_isa,
    built_isas,
    default_threads,
    load,
    supported_isas,
    why_unavailable,
)
from chairlift.kernels.cpu.lowering import CELLS, FUSED, OPERATIONS
from chairlift.kernels.cpu.packing import NATIVE_DTYPES
from chairlift.kernels.weights import NATIVE, QUANTIZED, WeightFormat
from chairlift.lora.kinds import ALL_KINDS
from chairlift.models.causal_lm import CausalLM
from chairlift.models.encoder_config import EncoderConfig
from chairlift.models.fallback.model import TransformersLM
from chairlift.models.hf_config import NetworkConfig
from chairlift.models.pooled_network import PooledNetwork

__all__ = ["NativeBackend", "why_not_isa"]

_ABILITIES: Final = Abilities(
    weights=frozenset({"int8", "int4", "stored"}),
    int8_kv=True,
    adapters=ALL_KINDS,
    processed_logprobs=True,
    drafts=True,
    draft_models=True,
    images=True,
    texts=True,
    divides=True,
    equal_bits=True,
    batch_invariant=True,
    fused_head=True,
    floors=True,
)


class NativeBackend(Backend):
    """Runs a model as a step program of the compiled kernels. ``kernels`` is their instruction set."""

    abilities = _ABILITIES
    home = "cpu"
    settings = ISA_NAMES
    kernel_words = "the native CPU kernels"
    whose = "the CPU's native"
    rounded = QUANTIZED
    remedy = "device='cpu'"

    @property
    def owner(self) -> str:
        return f"the CPU's {self.kernels} kernels"

    @classmethod
    def why_not(
        cls, network: NetworkConfig | EncoderConfig | None, dtype: torch.dtype, device: torch.device, block_size: int
    ) -> str:
        if device.type != "cpu":
            return f"they run on the CPU, and device is {device}; use device='cpu'"
        if load() is None:
            return why_unavailable()
        if best_isa() is None:
            return "this processor has none of their instruction sets; use kernels='torch'"
        if dtype not in NATIVE_DTYPES:
            name = str(dtype).removeprefix("torch.")
            return f"they compute in bfloat16 and float32, and dtype is {name}; use one of those"
        if block_size % 16:
            return f"they need block_size to be a multiple of 16, and it is {block_size}; leave it out"
        return cls.lacks(network) if isinstance(network, NetworkConfig) else ""

    @classmethod
    def lacks(cls, network: NetworkConfig) -> str:
        if network.attends and (network.head_dim % 16 or not 16 <= network.head_dim <= 256):
            size = network.head_dim
            return f"they need a head size that is a multiple of 16 from 16 to 256, and this model's is {size}"
        return ""

    @classmethod
    def operations(cls) -> Mapping[object, str]:
        computed = {*OPERATIONS, *CELLS, ops.linear}
        return dict.fromkeys(computed, "kernel") | dict.fromkeys(FUSED, "kernel, with a neighbour")

    @classmethod
    def choose(cls, setting: str) -> Backend:
        if setting == "auto":
            return cls(best_isa() or "")
        if setting not in supported_isas():
            raise ConfigError(why_not_isa(setting))
        return cls(setting)

    def float_format(self, *, exact: bool) -> WeightFormat:
        return dataclasses.replace(NATIVE, floats=exact)

    def num_threads(self, config: EngineConfig) -> int:
        return config.model.threads or default_threads()

    def make_runner(
        self,
        model: CausalLM | TransformersLM,
        plan: KVPlan,
        config: EngineConfig,
        dtype: torch.dtype,
        device: torch.device,
        max_model_len: int,
        drafts: DraftSource | None = None,
        images: ImageBank | None = None,
    ) -> DraftRunner:
        if not isinstance(model, CausalLM):
            raise InvariantError(f"the native kernels do not run {type(model).__name__}")
        sizes: dict[str, Any] = {"isa": self.kernels, "max_tokens": config.scheduler.max_num_batched_tokens}
        lora = config.lora.active
        pool = _pool(config)
        sizes["logprobs_mode"] = config.model.logprobs_mode
        return NativeModelRunner(model, plan, dtype, pool, **sizes, drafts=drafts, lora=lora, images=images)

    def make_pooled_executor(
        self, model: PooledNetwork, config: EngineConfig, dtype: torch.dtype, device: torch.device, max_tokens: int
    ) -> PooledExecutor:
        if config.model.threads is not None:
            torch.set_num_threads(config.model.threads)  # an encoder's attention runs in PyTorch
        rows = config.scheduler.max_num_seqs
        pool = _pool(config)
        runner = NativePooledRunner(model, dtype, pool, isa=self.kernels, max_tokens=max_tokens, max_rows=rows)
        return PooledExecutor(model, runner)


def why_not_isa(kernels: str) -> str:
    """Why this machine does not run the instruction set ``kernels``, and what to do about it."""
    if kernels in built_isas():
        runs = ", ".join(supported_isas())
        return f"kernels is {kernels!r}, but this processor runs {runs}; use one of them, or auto"
    home = "ARM64" if kernels in ARM64_ISAS else "x86-64"
    if (home == "ARM64") != (architecture() == "aarch64"):
        return f"kernels is {kernels!r}, which is for {home}, and this processor is {platform.machine()}; use auto"
    return (
        f"kernels is {kernels!r}, but Chairlift was compiled only for {', '.join(built_isas())}; use auto, or compile "
        f"the kernels of all instruction sets: {BUILD_ALL}"
    )


def _pool(config: EngineConfig) -> ThreadPool:
    try:
        return ThreadPool(config.model.threads)
    except OSError as error:
        raise ConfigError(f"threads is {config.model.threads}: {error}") from None
