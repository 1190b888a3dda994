"""The training half: packs sequences of different lengths into flat batches, without padding and without leaks between
sequences.

Packing is continuous batching without a cache. Each part can be used alone: with a plain PyTorch loop, with Hugging
Face's Trainer, or with TRL. ``chairlift train`` is built from the same parts. Names are imported on first use, so that
planning packs needs NumPy only.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from chairlift_train.adapters import megatron_batch
    from chairlift_train.async_loop import AsyncLoop, Generator, Rollout
    from chairlift_train.balance import Cost
    from chairlift_train.collate import PackCollator
    from chairlift_train.detectors import Adwin, PageHinkley
    from chairlift_train.drift import DriftSampler
    from chairlift_train.exact import ExactNetwork
    from chairlift_train.hf import TrainerLoss
    from chairlift_train.isolation import IsolationReport, check_isolation
    from chairlift_train.lanes import LaneBatch, Lanes
    from chairlift_train.layout import Layout, Pack
    from chairlift_train.loss import ExpertCounts, StepLoss
    from chairlift_train.pack import lower_bound, pack_indices
    from chairlift_train.staleness import StalenessGate
    from chairlift_train.stream import PackStream
    from chairlift_train.trainer import Trainer, TrainerConfig
    from chairlift_train.varlen import attend, patch_hf

_HOME = {
    "adapters": ("megatron_batch",),
    "async_loop": ("AsyncLoop", "Generator", "Rollout"),
    "balance": ("Cost",),
    "collate": ("PackCollator",),
    "detectors": ("Adwin", "PageHinkley"),
    "drift": ("DriftSampler",),
    "exact": ("ExactNetwork",),
    "hf": ("TrainerLoss",),
    "isolation": ("IsolationReport", "check_isolation"),
    "lanes": ("LaneBatch", "Lanes"),
    "layout": ("Layout", "Pack"),
    "loss": ("ExpertCounts", "StepLoss"),
    "pack": ("lower_bound", "pack_indices"),
    "staleness": ("StalenessGate",),
    "stream": ("PackStream",),
    "trainer": ("Trainer", "TrainerConfig"),
    "varlen": ("attend", "patch_hf"),
}
_LAZY = {name: f"chairlift_train.{module}" for module, names in _HOME.items() for name in names}

__all__ = [
    "Adwin",
    "AsyncLoop",
    "Cost",
    "DriftSampler",
    "ExactNetwork",
    "ExpertCounts",
    "Generator",
    "IsolationReport",
    "LaneBatch",
    "Lanes",
    "Layout",
    "Pack",
    "PackCollator",
    "PackStream",
    "PageHinkley",
    "Rollout",
    "StalenessGate",
    "StepLoss",
    "Trainer",
    "TrainerConfig",
    "TrainerLoss",
    "attend",
    "check_isolation",
    "lower_bound",
    "megatron_batch",
    "pack_indices",
    "patch_hf",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'chairlift_train' has no attribute {name!r}")
