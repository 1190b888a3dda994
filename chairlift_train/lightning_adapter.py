"""A Lightning module that trains on packs. Each batch of its loader is the list of packs of one optimiser step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from chairlift.errors import ConfigError
from chairlift_train.checkpoint import from_tensors, with_tensors
from chairlift_train.collate import PackCollator
from chairlift_train.layout import Pack
from chairlift_train.loss import Reduce, StepLoss
from chairlift_train.stream import PackStream

__all__ = ["lightning_module", "step_loader"]

_KEYS = ("input_ids", "position_ids", "labels", "loss_weight", "segment_ids")


class _Steps(IterableDataset[list[Pack]]):
    def __init__(self, stream: PackStream) -> None:
        self.stream = stream

    def __iter__(self) -> Iterator[list[Pack]]:
        return iter(self.stream.steps())


def step_loader(stream: PackStream) -> DataLoader[Any]:
    """A data loader for ``Trainer.fit``. Each batch is the list of packs of one optimiser step."""
    return DataLoader(_Steps(stream), batch_size=None, num_workers=0)


def lightning_module(
    model: nn.Module,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
    stream: PackStream,
    *,
    reduce: Reduce = "token",
    max_grad_norm: float | None = 1.0,
) -> Any:
    """A ``LightningModule`` for a causal language model of transformers (see :func:`~chairlift_train.patch_hf`).

    The module uses manual optimisation: the stream decides the number of packs in a step, and their losses are divided
    by one constant Z (:class:`~chairlift_train.loss.StepLoss`). So leave ``accumulate_grad_batches`` at 1.
    ``optimizer`` is a function that makes the optimiser of the parameters. Lightning's checkpoints contain the position
    in the ``stream``; create the trainer with ``max_epochs=-1`` so that a run can be resumed from them. The module logs
    ``loss``. It runs in one process only, because DDP exchanges gradients after every backward pass, and a step has
    several. Raises ConfigError if Lightning is not installed, or if the trainer has several processes.
    """
    try:
        import lightning
    except ImportError as error:
        raise ConfigError(f"lightning_module needs Lightning ({error}); pip install lightning") from None

    class PackModule(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.model = model
            self._loss = StepLoss(reduce)
            self._collate = PackCollator(keys=_KEYS)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer(self.model.parameters())

        # With a batch as argument, Lightning reads one batch ahead. A checkpoint would then skip a step of the stream.
        def training_step(self, dataloader_iter: Iterator[tuple[Sequence[Pack], int, int]]) -> None:
            packs, *_ = next(dataloader_iter)
            used = self.optimizers()
            used.zero_grad()
            with self._loss.step(packs):
                for pack in packs:
                    batch = {name: value.to(self.device) for name, value in self._collate(pack).items()}
                    out = self.model(batch["input_ids"], position_ids=batch["position_ids"], use_cache=False)
                    self.manual_backward(self._loss(out.logits, batch))
            if max_grad_norm is not None:
                self.clip_gradients(used, gradient_clip_val=max_grad_norm, gradient_clip_algorithm="norm")
            used.step()
            self.log("loss", self._loss.total, prog_bar=True, batch_size=len(packs))

        def on_fit_start(self) -> None:
            if self.trainer.world_size > 1:
                raise ConfigError(
                    f"lightning_module runs in one process, and this trainer has {self.trainer.world_size}; use"
                    " chairlift train, or a loop of your own, for several"
                )

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["pack_stream"] = with_tensors(stream.state_dict())

        def on_load_checkpoint(self, checkpoint: Mapping[str, Any]) -> None:
            stream.load_state_dict(from_tensors(checkpoint["pack_stream"]))

    return PackModule()
