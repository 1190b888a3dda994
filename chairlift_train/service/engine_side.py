"""Main program of an engine's process that trains, too: the trainer runs between two steps of the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from chairlift.config import EngineConfig
from chairlift.engine.info import EngineInfo
from chairlift.engine.process import engine_process
from chairlift_train.service.compute.trainer import AdapterTrainer, TrainerSettings
from chairlift_train.service.host import TrainingHost, TrainingSetup
from chairlift_train.service.side_training import SideTraining

__all__ = ["main"]

_STEP_TOKENS: Final = 64
"""Number of tokens that the forward pass computes in one slice."""


def _side_work_of(config: EngineConfig, info: EngineInfo) -> SideTraining:
    def make(setup: TrainingSetup) -> TrainingHost:
        settings = TrainerSettings(
            dtype="bfloat16" if info.dtype == "bfloat16" else "float32",
            kernels=info.kernels,
            threads=info.threads,
            base=setup.base,
            max_rank=setup.max_rank,
            max_models=setup.max_models,
            pack_tokens=setup.pack_tokens,
            step_tokens=min(_STEP_TOKENS, setup.pack_tokens),
            max_tokens=info.max_model_len,
        )
        return TrainingHost(AdapterTrainer.load_model(Path(info.model_dir), settings))

    return SideTraining(make)


def main() -> None:
    """Run an engine that trains, too."""
    engine_process.main(side_work_of=_side_work_of)
