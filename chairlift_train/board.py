"""Writes the curves of a training run for TensorBoard (``tensorboard --logdir OUTPUT``)."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from chairlift.errors import ConfigError
from chairlift_train.evaluation import EvaluationResult

if TYPE_CHECKING:
    from chairlift_train.trainer import Trainer, TrainingStepResult

__all__ = ["Board"]


class Board:
    """Writes one TensorBoard event file per training process. A resumed run hides the points after the step from which
    it resumes, because it computes these points again.
    """

    def __init__(self, directory: Path, *, after: int = 0) -> None:
        """``after`` is the step from which the run resumes. Raises ConfigError if TensorBoard is not installed."""
        try:
            from torch.utils.tensorboard.writer import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                f"tensorboard: true needs TensorBoard ({error}); pip install 'chairlift[tensorboard]', or leave it out"
            ) from None
        self._writer = SummaryWriter(str(directory), purge_step=after + 1)
        self._since = time.perf_counter()

    def step(self, result: TrainingStepResult, trainer: Trainer) -> None:
        """Write the points of one optimiser step: loss, gradient norm, learning rate, tokens per second, packing waste
        and so on."""
        now = time.perf_counter()
        points = {
            "train/loss": result.loss,
            "train/grad_norm": result.grad_norm,
            "train/learning_rate": result.learning_rate,
            "train/tokens": result.num_tokens,
            "train/targets": result.num_targets,
            "train/packs": result.num_packs,
            "train/tokens_per_second": result.num_tokens / (now - self._since),
        }
        self._since = now
        for name, each in result.adapters.items():
            if each.num_targets:  # its last point stands for steps without a target
                points |= {f"adapter_loss/{name}": each.loss, f"adapter_grad_norm/{name}": each.grad_norm}
        if result.balance_loss:
            points["train/balance_loss"] = result.balance_loss
        if trainer.stream is not None:
            stats = trainer.stream.stats()
            points["packing/waste"] = stats.waste
            points["packing/mean_length"] = stats.tokens / max(1, stats.sequences)
        self._write(points, result.step)

    def evaluation(self, result: EvaluationResult) -> None:
        """Write the loss and the perplexity of each source, and of all sources together."""
        points = {}
        for name, row in {"total": result.total, **result.sources}.items():
            points[f"eval_loss/{name}"] = row.loss
            points[f"eval_perplexity/{name}"] = row.perplexity
        self._write(points, result.step)
        self._since = time.perf_counter()

    def _write(self, points: dict[str, float], step: int) -> None:
        for name, value in points.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write the points that are still in memory, and close the file."""
        self._writer.close()
