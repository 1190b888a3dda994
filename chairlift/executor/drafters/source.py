"""A loaded source of drafts: what it needs from the served model, and how its drafter is made."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch

from chairlift.config import EngineConfig
from chairlift.errors import ConfigError
from chairlift.executor.backends.backend import Backend
from chairlift.executor.drafters.runner import DraftRunner
from chairlift.executor.local import Drafter
from chairlift.models.causal_lm import CausalLM
from chairlift.models.context import LayerCache, LayerState
from chairlift.models.fallback.config import TransformersConfig
from chairlift.models.hf_config import NetworkConfig
from chairlift.models.loader import Progress

__all__ = ["DraftSource", "MakeDrafter", "Served"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """The served model, for which drafts are made."""

    config: EngineConfig
    model_dir: Path
    network: NetworkConfig | TransformersConfig
    dtype: torch.dtype
    backend: Backend
    method: str
    """The method of ``speculative_config``."""
    name: str
    """What the key ``model`` of ``speculative_config`` has; empty for what comes with the bundled model."""
    most: int
    """Maximum number of drafts for a row in one step."""
    progress: Progress | None = None

    @property
    def native(self) -> NetworkConfig:
        """The sizes of the model. Raises ConfigError for a model without a native family, whose hidden states are not
        known here."""
        if not isinstance(self.network, NetworkConfig):
            raise ConfigError(f"speculative_config: {self.method} needs a model with a native family; use method ngram")
        return self.network

    def check_runs(self, network: NetworkConfig) -> None:
        """Raise ConfigError if the backend cannot run a small model or a layer with this config."""
        config = self.config
        if reason := self.backend.why_not(network, self.dtype, torch.device("cpu"), config.cache.block_size):
            raise ConfigError(
                f"speculative_config: the draft model {self.name!r:.200} cannot be run by the native kernels: {reason}"
            )


class MakeDrafter(Protocol):
    """Makes the drafter that works with the runner of the served model."""

    def __call__(
        self, runner: DraftRunner, *, num_slots: int, max_model_len: int, block_size: int, max_tokens: int
    ) -> Drafter:
        """
        Args:
            runner: Runner of the served model.
            num_slots: Number of rows of the engine.
            max_model_len: Maximum sequence length of the engine, in tokens.
            block_size: Tokens per block.
            max_tokens: Maximum number of tokens in a step of the engine.
        """
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DraftSource:
    """What makes drafts, with its weights in memory: a small model, a layer, or heads."""

    make: MakeDrafter
    small: CausalLM | None = None
    """A small model that the backend runs: :attr:`~chairlift.executor.drafters.runner.DraftRunner.draft`."""
    taps: Sequence[int] = ()
    """Layers of the served model before which hidden states are kept for the drafter."""
    layers: Sequence[LayerCache | LayerState] = ()
    """Cache layers of the drafter; they are added to the cache of the served model."""
