"""Uses packs and the exact loss in the ``Trainer`` of transformers, and in TRL's ``SFTTrainer``, a subclass of it.

::

    loss = TrainerLoss("sequence")
    trainer = Trainer(
        model,
        TrainingArguments(..., per_device_train_batch_size=1, gradient_accumulation_steps=4, max_steps=1000),
        train_dataset=PackStream(source, capacity=4096).as_torch(),
        data_collator=PackCollator(),
        compute_loss_func=loss,
    )
    loss.attach(trainer)
    trainer.train()

The trainer determines the size of a step: ``gradient_accumulation_steps`` rows on every rank. Set
``accelerator_config={"dispatch_batches": False}``; otherwise the trainer would cut the row of a pack into pieces. The
trainer then divides the data set among the ranks, so do not pass ``ranks`` and ``rank`` to the stream.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from chairlift.errors import ConfigError
from chairlift_train.collate import ALL_KEYS, TRAINER_KEYS
from chairlift_train.loss import Reduce, StepLoss, token_losses

__all__ = ["TrainerLoss"]

_OURS = frozenset(ALL_KEYS) - frozenset(TRAINER_KEYS)


class TrainerLoss:
    """A ``compute_loss_func`` that divides the loss by the constant Z of the whole optimiser step.

    Z is computed over all accumulated rows and all ranks before the first backward pass. Without :meth:`attach`, with a
    collator of :data:`~chairlift_train.collate.TRAINER_KEYS`, the loss is the mean over all tokens with a label, and Z
    is the trainer's own count. With :meth:`attach`, the loss uses weights and boundaries of sequences, so that every
    ``reduce`` works, and the evaluation is a mean over tokens, too.
    """

    def __init__(self, reduce: Reduce = "token", *, label_smoothing: float = 0.0, chunk: int | None = None) -> None:
        """Create a loss. The arguments are those of :class:`~chairlift_train.loss.StepLoss`."""
        self.loss = StepLoss(reduce, label_smoothing=label_smoothing, chunk=chunk)
        self._pending: collections.deque[Mapping[str, Any]] = collections.deque()
        self._normaliser = 0.0
        self._attached = False
        self._rows: list[Tensor] = []
        """[1, 2] (sum of the losses, number of targets) of the row that was evaluated last."""
        self._sums = torch.zeros(2, dtype=torch.float64)
        """[2] (sum of the losses, number of targets) of the running evaluation."""

    def attach(self, trainer: Any) -> TrainerLoss:
        """Replace methods of the trainer, so that the loss sees the batches before the model does.

        The loss computes Z from them, and removes the keys that models do not accept. ``eval_loss`` becomes the mean
        over all tokens with a label, over all batches and ranks, for every ``reduce``. The trainer's own ``eval_loss``
        is a mean of the means of batches, in which the tokens of short rows have more weight.

        Raises ConfigError for a trainer with another loss, for a trainer that divides rows among devices
        (``DataParallel``), and for a trainer that removes columns of the data set which the loss needs.
        """
        given: object = trainer.compute_loss_func
        if given is not self:
            raise ConfigError("attach(trainer) is for the trainer that got this loss as compute_loss_func")
        if trainer.args.n_gpu > 1:
            raise ConfigError(
                f"{trainer.args.n_gpu} GPUs in one process would split a packed row; start it with torchrun"
            )
        if trainer.args.remove_unused_columns and hasattr(trainer.train_dataset, "column_names"):
            raise ConfigError("the trainer would drop seq_lengths and loss_weight; set remove_unused_columns=False")
        # With this setting, the trainer itself multiplies the loss by the number of ranks.
        self.loss.gradients = "sum" if trainer.args.average_tokens_across_devices else "mean"
        self._attached = True
        take = trainer.get_batch_samples
        predict = trainer.prediction_step
        loop = trainer.evaluation_loop

        def get_batch_samples(batches: Iterator[Any], num_batches: int, device: torch.device) -> tuple[list[Any], Any]:
            samples, num_items = take(batches, num_batches, device)
            return self._begin(samples), num_items

        def prediction_step(model: Any, inputs: Mapping[str, Any], *rest: Any, **named: Any) -> Any:
            self._rows.clear()
            result = predict(model, _known_to_models(inputs), *rest, **named)
            for row in self._rows:  # the trainer's own function leaves out repeated rows
                self._sums += trainer.gather_function(row.to(trainer.args.device)).cpu().double().sum(0)
            return result

        def evaluation_loop(*args: Any, **named: Any) -> Any:
            self._sums = torch.zeros(2, dtype=torch.float64)
            output = loop(*args, **named)
            total, count = self._sums.tolist()
            if count:
                prefix = named.get("metric_key_prefix", args[4] if len(args) > 4 else "eval")
                output.metrics[f"{prefix}_loss"] = total / count
            return output

        trainer.get_batch_samples = get_batch_samples
        trainer.prediction_step = prediction_step
        trainer.evaluation_loop = evaluation_loop
        return self

    def __call__(self, outputs: Any, labels: Tensor | None, num_items_in_batch: Tensor | float | None = None) -> Tensor:
        """The loss of one row as a scalar. The trainer calls this method. Raises ConfigError if there are no labels."""
        if labels is None:
            raise ConfigError("the batch has no labels; use PackCollator, or a collator that makes them")
        logits = outputs["logits"] if isinstance(outputs, Mapping) else outputs.logits
        if self._pending:
            batch = {**self._pending.popleft(), "labels": labels}
            with self.loss.step(self._normaliser):
                return self.loss(logits, batch)
        if self.loss.reduce != "token" and not self._attached:
            raise ConfigError(f"reduce={self.loss.reduce!r} needs the boundaries: call TrainerLoss.attach(trainer)")
        shifted = torch.nn.functional.pad(labels[..., 1:], (0, 1), value=-100).flatten()
        losses = token_losses(
            logits.flatten(0, -2), shifted, label_smoothing=self.loss.label_smoothing, chunk=self.loss.chunk
        )
        count = (shifted != -100).sum()
        self._rows = [torch.stack([losses.detach().sum(), count.to(losses)])[None]]
        return losses.sum() / (count if num_items_in_batch is None else num_items_in_batch)

    def _begin(self, samples: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Compute Z of the step from its ``samples`` on all ranks. Returns the samples without keys that models do not
        accept."""
        self._pending = collections.deque(samples)
        self._normaliser = self.loss.normaliser(samples)
        return [_known_to_models(batch) for batch in samples]


def _known_to_models(batch: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in batch.items() if key not in _OURS}
