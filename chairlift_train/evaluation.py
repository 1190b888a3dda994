"""Evaluation on data that is not trained on: the exact mean loss per token, and the perplexity, of each source."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from chairlift.errors import ConfigError
from chairlift_train.loss import StepLoss
from chairlift_train.parallel import Ranks, sum_over_ranks
from chairlift_train.stream import PackStream

if TYPE_CHECKING:
    from chairlift_train.layout import Pack
    from chairlift_train.trainer import Trainer

__all__ = ["Evaluation", "EvaluationResult", "SourceLoss"]

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class SourceLoss:
    """Loss on one source, or on all sources together."""

    loss: float
    """Weighted mean of the targets' losses, in nats."""
    targets: int
    """Number of targets."""

    @property
    def perplexity(self) -> float:
        """exp(loss), or infinity if the result is too large for a float."""
        return math.exp(self.loss) if self.loss < 700 else math.inf


@dataclasses.dataclass(frozen=True, slots=True)
class EvaluationResult:
    """Losses of one evaluation."""

    step: int
    """Number of optimiser steps before the evaluation."""
    sources: Mapping[str, SourceLoss]
    total: SourceLoss
    """Loss on all sources together: the mean over all tokens, not the mean of the sources' losses."""

    def as_dict(self) -> dict[str, Any]:
        """The losses as plain data, for a line of the log."""
        rows = {"total": self.total, **self.sources}
        plain = {
            name: {"loss": row.loss, "perplexity": row.perplexity, "targets": row.targets} for name, row in rows.items()
        }
        return {"step": self.step, "total": plain.pop("total"), "sources": plain}


class Evaluation:
    """Evaluates a trainer's model on the same sequences each time.

    An evaluation changes neither weights nor random states. Except for rounding, its result does not depend on how the
    sequences are packed and divided among ranks.
    """

    def __init__(
        self,
        sources: Mapping[str, Callable[[], Any]],
        *,
        capacity: int,
        overflow: Any = "error",
        ranks: Ranks | None = None,
    ) -> None:
        """``sources`` maps the name of a source to a function that opens it from the beginning.

        The function returns a source for :class:`PackStream`.
        """
        self._sources = dict(sources)
        self._capacity = capacity
        self._overflow = overflow
        self._ranks = ranks or Ranks()

    def check(self) -> None:
        """Read all data once without computing losses, to find errors before the training starts. Warn about tokens
        that every evaluation leaves out because of ``overflow``.

        Raises ConfigError for an invalid record, and for a source without a target.
        """
        for name, open_source in self._sources.items():
            stream = PackStream(open_source(), self._capacity, overflow=self._overflow)
            if not math.fsum(float(pack.weights.sum(dtype="float64")) for pack in stream) > 0:
                raise ConfigError(
                    f"eval_files {name} has no target with a weight above 0; give records with tokens to learn"
                )
            stats = stream.stats()
            left_out = stats.dropped + sum(each.left_out for each in stats.cut.values())
            tokens = sum(each.tokens for each in stats.cut.values())
            if left_out or tokens:
                _log.warning(
                    "eval_files %s: evaluations leave out %d sequences that do not fit in a pack, and cut off %d tokens"
                    " (packing.overflow, packing.capacity)",
                    name,
                    left_out,
                    tokens,
                )

    def run(self, trainer: Trainer) -> EvaluationResult:
        """Evaluate the trainer's model on all sources. Every rank must call this method."""
        sums = {name: self._sum(trainer, open_source()) for name, open_source in self._sources.items()}
        flat = sum_over_ranks([value for row in sums.values() for value in row])
        rows = {name: flat[3 * index : 3 * index + 3] for index, name in enumerate(sums)}
        total = [math.fsum(column) for column in zip(*rows.values(), strict=True)]
        return EvaluationResult(trainer.num_steps, {name: _loss(row) for name, row in rows.items()}, _loss(total))

    def _sum(self, trainer: Trainer, source: Any) -> list[float]:
        """Returns [sum of weighted losses, sum of weights, number of targets] over this rank's packs of one source."""
        stream = PackStream(
            source, self._capacity, overflow=self._overflow, ranks=self._ranks.size, rank=self._ranks.rank
        )
        losses = []
        weights = []
        targets = 0
        with _evaluating(trainer):
            for pack in stream:
                count = int((pack.weights != 0).sum())
                if count or trainer.is_sharded:
                    losses.append(_loss_of(trainer, pack))
                    weights.append(float(pack.weights.sum(dtype="float64")))
                    targets += count
        return [math.fsum(losses), math.fsum(weights), targets]


def _loss(row: list[float]) -> SourceLoss:
    return SourceLoss(row[0] / row[1], int(row[2]))


def _loss_of(trainer: Trainer, pack: Pack) -> float:
    loss = StepLoss("token", gradients="sum")
    with loss.step(1.0):
        return float(trainer.pack_loss(pack, loss))


@contextlib.contextmanager
def _evaluating(trainer: Trainer) -> Iterator[None]:
    trainer.model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        trainer.model.train()
