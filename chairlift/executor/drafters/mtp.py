"""Drafts with the layer for a further token that the served model's own files have. See :mod:`chairlift.models.mtp`.

The layer is run as that of EAGLE-3 is: its KV lies in the model's blocks, and it collects the model's hidden states.
"""

from __future__ import annotations

from pathlib import Path

from chairlift.executor.drafters.eagle3 import Eagle3Drafter
from chairlift.executor.drafters.runner import DraftRunner
from chairlift.executor.drafters.source import DraftSource, Served
from chairlift.models.mtp import load_mtp

__all__ = ["load_drafts"]


def load_drafts(folder: Path, served: Served) -> DraftSource:
    """Read the layer in the model's directory ``folder``. Raises ConfigError and ModelLoadError."""
    layer = load_mtp(folder, served.native, served.dtype, served.backend.weight_format(None))
    served.check_runs(layer.config.layer)

    def make(runner: DraftRunner, **sizes: int) -> Eagle3Drafter:
        return Eagle3Drafter(layer, runner, most=served.most, **sizes)

    return DraftSource(make=make, taps=layer.config.taps, layers=layer.kv_cache_spec())
