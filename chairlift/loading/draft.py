"""Loads what makes drafts for the served model, by the method of ``speculative_config``."""

from __future__ import annotations

import importlib
from pathlib import Path

import torch

from chairlift.base.draft_methods import DRAFT_METHODS
from chairlift.config import BUNDLED_MODEL, EngineConfig
from chairlift.errors import ConfigError
from chairlift.executor.backends.backend import Backend
from chairlift.executor.drafters.source import DraftSource, Served
from chairlift.models.fallback.config import TransformersConfig
from chairlift.models.hf_config import NetworkConfig
from chairlift.models.loader import Progress, resolve_model_dir

__all__ = ["load_drafts"]


def load_drafts(
    config: EngineConfig,
    model_dir: Path,
    network: NetworkConfig | TransformersConfig,
    dtype: torch.dtype,
    backend: Backend,
    progress: Progress | None = None,
) -> DraftSource | None:
    """Load what ``speculative_config`` names: a small model, a layer or heads. None if it names none, or if steps take
    no drafts.

    ``model_dir``, ``network``, ``dtype`` and ``backend`` are those of the served model. Raises ConfigError for what
    cannot draft for the served model, and ModelLoadError for files that cannot be read.
    """
    speculation = config.scheduler.speculation
    if speculation is None or speculation.method not in DRAFT_METHODS or not config.scheduler.takes_drafts(0):
        return None
    if not backend.abilities.draft_models:
        raise ConfigError(
            f"speculative_config: {speculation.method} runs on the native CPU kernels, and {backend.kernels} runs this"
            " model; use method ngram"
        )
    served = Served(
        config=config,
        model_dir=model_dir,
        network=network,
        dtype=dtype,
        backend=backend,
        method=speculation.method,
        name=speculation.model,
        most=speculation.num_speculative_tokens,
        progress=progress,
    )
    folder = _folder(served)
    loaded: DraftSource = importlib.import_module(DRAFT_METHODS[served.method].module).load_drafts(folder, served)
    return loaded


def _folder(served: Served) -> Path:
    """Directory of what makes drafts. Raises ConfigError and ModelLoadError."""
    if DRAFT_METHODS[served.method].is_own:
        return served.model_dir
    return resolve_model_dir(served.name) if served.name else _bundled(served)


def _bundled(served: Served) -> Path:
    """Directory of the heads or the layer that comes with the served model, for settings that name none. Raises
    ConfigError for a model without them."""
    if served.config.model.model == BUNDLED_MODEL and (served.model_dir / served.method).is_dir():
        return served.model_dir / served.method
    raise ConfigError(
        f"speculative_config: {served.method} needs model, the directory or name of the"
        f" {DRAFT_METHODS[served.method].what}; only the bundled model comes with heads and a layer"
        " (docs/speculation.md says how to train them)"
    )
