"""A loaded model: its executor, and facts about it."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from chairlift.config import CacheGroup, EngineConfig
from chairlift.engine.info import EngineInfo
from chairlift.executor.executor import AdapterMemory, Executor
from chairlift.version import __version__

if TYPE_CHECKING:
    from chairlift.core.scheduler.cost_model import StepFeatures
    from chairlift.models.step_cost import ModelCost

__all__ = ["LoadedExecutor", "fingerprint", "identified", "pool_tokens", "serving_facts"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoadedExecutor:
    """A model in memory with its KV cache, and facts about it."""

    executor: Executor
    info: EngineInfo
    """Facts about the model and how it is served. Only ``capacity_tokens`` is not known yet: it comes from the engine,
    because it depends on how long a sliding window keeps its blocks."""
    adapters: AdapterMemory | None = None
    """Memory for the adapters; None if no adapters are served."""
    approximations: Callable[[], tuple[str, ...]] = tuple
    """Function that returns the roundings and approximations beyond arithmetic in the model's dtype, in words. New
    weights may change them."""
    step_cost: ModelCost | None = None
    """Minimum cost of the model's steps (bytes to read, operations to compute), if the native CPU kernels run the
    model; otherwise None."""

    def least_step_seconds(self) -> Callable[[StepFeatures, int], float] | None:
        """Measure the limits of this machine (takes about 100 ms), and return a function for the minimum duration of a
        step in seconds.

        The function takes (features of the step, number of rows that the step samples from). Returns None unless the
        native CPU kernels run the model.
        """
        cost = self.step_cost
        if cost is None:
            return None
        import torch

        from chairlift.kernels.cpu.library import ThreadPool
        from chairlift.kernels.roof import quick_roof

        info = self.info
        pool = ThreadPool(info.threads)
        try:
            roof = quick_roof(pool, info.kernels, torch.int8 if info.quantization else getattr(torch, info.dtype))
        finally:
            pool.close()

        def least_seconds(step: StepFeatures, sampled: int) -> float:
            rows = step.num_decodes
            kv_bytes = rows * cost.kv_read(step.context_tokens // rows) if rows else 0
            if step.shared_tokens:  # rows read the KV of shared prefixes together
                kv_bytes -= kv_bytes * step.shared_tokens // step.context_tokens
            return cost.least_seconds(roof, rows + step.prefill_tokens, sampled, kv_bytes)

        return least_seconds


def serving_facts(config: EngineConfig, executor: Executor, max_model_len: int) -> dict[str, Any]:
    """Name -> value, for the fields of :class:`EngineInfo` that come from the settings and the executor."""
    groups = executor.cache_groups
    size = executor.block_size
    scheduler = config.scheduler
    return {
        "model": config.model.model,
        "max_model_len": max_model_len,
        "pool_tokens": pool_tokens(groups, size, max_model_len),
        "block_size": size,
        "num_blocks": sum(group.num_blocks - 1 for group in groups),
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "held": scheduler.batching == "static",
        "preset": scheduler.preset,
        **_speculation(config, executor),
    }


def identified(info: EngineInfo, config: EngineConfig, *, equal_bits: bool) -> EngineInfo:
    """``info`` with its fingerprint. ``equal_bits``: the bits of a row depend on no other row, without any setting."""
    how = ["batch_invariant"] if config.model.batch_invariant and not equal_bits else []
    how += [info.quantization] if info.quantization else []
    how += [f"kv {info.kv_cache_dtype}"] if info.kv_cache_dtype else []
    how += [] if info.model_impl == "native" else [info.model_impl]
    how += info.approximations
    name = fingerprint(info.model_dir, info.model, info.dtype, info.kernels, *how)
    return dataclasses.replace(info, fingerprint=name)


def _speculation(config: EngineConfig, executor: Executor) -> dict[str, Any]:
    """Name -> value, for the fields of :class:`EngineInfo` about speculative decoding."""
    verifies = config.scheduler.takes_drafts(executor.num_lookahead_steps)
    speculation = config.scheduler.speculation if verifies else None
    method = {} if speculation is None else {"speculative_method": speculation.method}
    num_tokens = 0 if speculation is None else speculation.num_speculative_tokens
    drafter = getattr(executor, "drafter", None)
    if drafter is not None:  # Medusa has as many drafts as heads
        num_tokens = min(num_tokens, drafter.most)
    return {**method, "num_speculative_tokens": num_tokens, "takes_predictions": verifies}


def pool_tokens(groups: Sequence[CacheGroup], block_size: int, max_model_len: int) -> int:
    """Number of positions that fit into the smallest cache group. If all groups hold recurrent states: the number of
    positions of the longest texts that fit."""
    tokens = [(group.num_blocks - 1) * block_size for group in groups if group.state_span is None]
    states = [(group.num_blocks - 1) * min(group.state_span, max_model_len) for group in groups if group.state_span]
    return min(tokens or states)


_PIECES_OF_WEIGHTS: Final = 256


def fingerprint(model_dir: str, *parts: str) -> str:
    """Name that changes when the weights, precision, kernels or version change, because then the generated text may
    change."""
    digest = hashlib.sha256("\0".join((__version__, *parts)).encode())
    files: list[Path] = []
    if model_dir.endswith(".gguf"):
        files = [Path(model_dir)]
    elif model_dir:
        files = list(Path(model_dir).glob("*"))
    for path in sorted(files):
        # Only regular files are read: reading a pipe or a device might never end, and a link may be broken.
        if path.suffix in (".json", ".safetensors", ".gguf") and path.is_file():
            with path.open("rb") as file:  # only a part of each file, because reading all weights would take too long
                size = file.seek(0, os.SEEK_END)
                digest.update(f"{path.name}:{size}".encode())
                for at in range(0, size, 4096 if path.suffix == ".json" else max(1, size // _PIECES_OF_WEIGHTS)):
                    file.seek(at)
                    digest.update(file.read(4096))
    return "fp_" + digest.hexdigest()[:10]
