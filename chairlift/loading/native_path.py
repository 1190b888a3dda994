"""Which kernels run a loaded model, and in which dtype: for reports and for comparisons with the machine's limits."""

from __future__ import annotations

import dataclasses

import torch

from chairlift.config import EngineConfig
from chairlift.engine.info import EngineInfo
from chairlift.executor.select import BACKENDS, FALLBACK, backend_class
from chairlift.kernels.cpu.library import default_threads
from chairlift.models.hf_config import NetworkConfig
from chairlift.models.loader import resolve_dtype

__all__ = ["NativePath", "native_path"]


@dataclasses.dataclass(frozen=True, slots=True)
class NativePath:
    """Kernels that run a model, or the reason why PyTorch runs it."""

    isa: str | None
    dtype: torch.dtype
    threads: int
    reason: str
    """Reason why the compiled CPU kernels do not run the model. Empty if they do."""
    triton: bool = False
    """Whether the Triton kernels run the model."""
    quantization: str | None = None
    """Quantisation format of the weights. None if they are not quantised."""

    @property
    def kernels(self) -> str:
        """Value of the engine's setting ``kernels`` that selects these kernels."""
        return "triton" if self.triton else self.isa or "torch"

    def describe(self) -> str:
        """Short text for reports that names the kernels."""
        name = str(self.dtype).removeprefix("torch.")
        name += f" with {self.quantization} weights" if self.quantization else ""
        if self.triton:
            return f"triton in {name}"
        if self.isa is None:
            return f"PyTorch in {name}: {self.reason}"
        return f"{self.isa} in {name}, {self.threads} thread{'s' if self.threads > 1 else ''}"


def native_path(config: EngineConfig, info: EngineInfo, network: NetworkConfig) -> NativePath:
    """Determine which kernels run a loaded model: ``config`` are its settings, ``info`` are its facts, and ``network``
    is its configuration."""
    dtype = resolve_dtype(network, info.dtype)
    device = torch.device(config.model.device)
    threads = config.model.threads or default_threads()
    running = backend_class(info.kernels) or FALLBACK
    if running.abilities.floors:
        return NativePath(info.kernels, dtype, threads, "", quantization=info.quantization)
    if running.abilities.graphs:
        why = f"{running.kernel_words} do"
        return NativePath(None, dtype, threads, why, triton=True, quantization=info.quantization)
    if config.model.kernels in running.settings:
        return NativePath(None, dtype, threads, f"kernels is {config.model.kernels!r}")
    fastest = next((each for each in BACKENDS if each.home == device.type), FALLBACK)
    reason = fastest.why_not(network, dtype, device, config.cache.block_size)
    return NativePath(None, dtype, threads, reason, quantization=info.quantization)
