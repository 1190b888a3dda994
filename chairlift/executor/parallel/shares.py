"""Which outputs of a model's layers each of several processes computes.

Every layer is divided along its outputs: attention by KV heads, scans of recurrent layers by heads, other layers and
every expert by panels of 32 columns, the output head by rows of the vocabulary. See
:mod:`chairlift.kernels.cpu.division` for what follows from it. Layers that cannot be divided are computed by every
process.
"""

from __future__ import annotations

import dataclasses
import math
import sys

from chairlift.base.draft_methods import DRAFT_METHODS
from chairlift.config import EngineConfig
from chairlift.errors import ConfigError
from chairlift.executor.backends.backend import Backend
from chairlift.executor.kv_tensors import KVPlan
from chairlift.kernels.cpu.lowering import scan_heads
from chairlift.kernels.cpu.packing import PANEL, KeptRows
from chairlift.models.causal_lm import CausalLM
from chairlift.models.context import LayerCache
from chairlift.models.fallback.config import TransformersConfig
from chairlift.models.formats.gguf_projector import NONE
from chairlift.models.hf_config import NetworkConfig
from chairlift.models.layers.attention import Attention
from chairlift.models.layers.delta_net import DeltaNetMixer
from chairlift.models.layers.linear import Linear, Matrix, Stack
from chairlift.models.layers.mixers import Mamba2Mixer

__all__ = ["Share", "divide_model", "divided_plan", "refuse_division"]


@dataclasses.dataclass(frozen=True, slots=True)
class Share:
    """The part of process number ``rank`` of ``size``."""

    rank: int
    size: int

    def of(self, count: int, unit: int = 1) -> tuple[int, int]:
        """(first, end) of this process's items of ``count``. All but the last end are multiples of ``unit``."""
        units = -(-count // unit)
        first, end = (units * each // self.size * unit for each in (self.rank, self.rank + 1))
        return first, min(end, count)


def refuse_division(config: EngineConfig, network: NetworkConfig | TransformersConfig, backend: Backend) -> None:
    """Raise ConfigError for models and settings that cannot be divided among processes."""
    size = config.model.tensor_parallel_size
    asked = f"tensor_parallel_size is {size}, but"
    if not isinstance(network, NetworkConfig):
        raise ConfigError(f"{asked} this model runs through transformers, on one process; leave it out")
    if not backend.abilities.divides:
        raise ConfigError(
            f"{asked} {backend.owner} run this model, on one process and one device, and only the CPU's native ones"
            " divide a model; start a server per device and put a proxy before them"
        )
    if sys.platform != "linux":
        raise ConfigError(f"{asked} the processes share a memory file as only Linux has it; leave it out")
    heads = network.num_key_value_heads
    if network.attends and heads < size:
        raise ConfigError(f"{asked} this model has {heads} KV heads, and each process needs one; use at most {heads}")
    if config.model.threads is not None and config.model.threads < size:
        threads = config.model.threads
        raise ConfigError(f"{asked} threads is {threads}, and each process needs one; set threads to {size} or more")
    speculation = config.scheduler.speculation
    refused = {
        "images": network.vision is not None and config.model.mmproj != NONE,
        "kv_store": config.cache.kv_store is not None,
        "draft models": speculation is not None and speculation.method in DRAFT_METHODS,
    }
    for name, is_refused in refused.items():
        if is_refused:
            raise ConfigError(f"{asked} {name} cannot be divided among processes yet; leave one of the two out")


def divide_model(model: CausalLM, share: Share) -> None:
    """Have the layers of a model on the meta device keep only the outputs of ``share``, when their weights are
    allocated."""
    undivided = set[Matrix]()
    for module in model.modules():
        if isinstance(module, Attention) and module.splits_by_heads:
            _divide_heads(module, share)
            undivided.add(module.qkv_proj)
    layers: list[Matrix] = [module for module in model.modules() if isinstance(module, Linear | Stack)]
    if model.config.tie_word_embeddings:
        layers.append(model.model.embed_tokens)
    for layer in layers:
        if layer not in undivided:
            _divide_columns(layer, share)
    for module in model.modules():
        if isinstance(module, Mamba2Mixer | DeltaNetMixer) and scan_heads(module.cell()) >= share.size:
            first, end = share.of(scan_heads(module.cell()))
            module.own_heads = first, end - first


def _divide_heads(attention: Attention, share: Share) -> None:
    """Divide q, k and v by KV heads. A process's columns of the result begin on a multiple of a panel, so that its
    padding touches no others."""
    size, kv_heads = attention.head_dim, attention.num_kv_heads
    group = attention.num_heads // kv_heads
    unit = PANEL // math.gcd(PANEL, group * size)
    first, end = share.of(kv_heads, unit)
    if -(-kv_heads // unit) < share.size:
        return
    queries = attention.num_heads * size
    keys = queries + kv_heads * size
    ranges = (
        (first * group * size, end * group * size),
        *((at + first * size, at + end * size) for at in (queries, keys)),
    )
    shape = attention.qkv_proj.shape
    attention.qkv_proj.shape = shape._replace(kept=KeptRows(shape.out_features, ranges))
    attention.stored_kv_heads = end - first


def _divide_columns(layer: Matrix, share: Share) -> None:
    """Divide the outputs by panels: those of each weight of a stack, and gates in the same way as their values."""
    shape = layer.shape
    parts = shape.stack * (2 if shape.interleaved else 1)
    width = shape.out_features // parts
    first, end = share.of(width, PANEL)
    if -(-width // PANEL) < share.size:
        return  # too few columns
    ranges = tuple((part * width + first, part * width + end) for part in range(parts))
    layer.shape = shape._replace(kept=KeptRows(shape.out_features, ranges))


def divided_plan(plan: KVPlan, model: CausalLM) -> KVPlan:
    """``plan``, which is that of the whole model, for the heads that ``model`` keeps: as many blocks, of fewer
    bytes."""
    block_bytes = [0 for _ in plan.groups]
    tokens = 0
    for layer, group in zip(model.kv_cache_spec(), plan.layer_groups, strict=True):
        if isinstance(layer, LayerCache):
            tokens += layer.token_bytes(plan.dtype)
            block_bytes[group] += plan.block_size * layer.token_bytes(plan.dtype)
        else:
            block_bytes[group] += sum(layer.part_bytes(model.dtype))
    total = sum(group.num_blocks * size for group, size in zip(plan.groups, block_bytes, strict=True))
    return dataclasses.replace(plan, block_bytes=block_bytes, bytes_per_token=tokens, total_bytes=total)
