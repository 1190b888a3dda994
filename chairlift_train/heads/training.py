"""What all kinds of draft heads share: targets, the loss over several heads, and the files of a checkpoint.

Head i predicts, from a state at position t, the token at position t + 2 + i. The model itself predicts the token at
position t + 1.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from chairlift.lora.trainable import weights_digest
from chairlift.models.causal_lm import CausalLM
from chairlift_train.checkpoint import ModelFiles
from chairlift_train.collate import IGNORED
from chairlift_train.layout import Pack
from chairlift_train.loss import StepLoss
from chairlift_train.networks import NativeNetwork
from chairlift_train.several_adapters import AdapterLosses
from chairlift_train.trainer import Trainer, predictions

__all__ = ["HeadsNetwork", "HeadsTrainer", "ahead"]


class HeadsNetwork(NativeNetwork):
    """A frozen model with draft heads. Subclasses set ``trained`` to the parameters of the heads, in float32.

    ``base`` is the name of the model, which is written with the heads.
    """

    section = "heads"

    def __init__(self, model: CausalLM, *, base: str = "") -> None:
        super().__init__(model)
        self._base = base

    def states(self, batch: Mapping[str, Tensor], pack: Pack) -> Iterator[Tensor]:
        """Yield, for each head, the states [tokens, hidden size] of a collated pack from which the head predicts."""
        raise NotImplementedError

    def head_logits(self, states: Tensor, head: int) -> Tensor:
        """Logits [R, rows of the output head] of one head for states [R, hidden size]."""
        raise NotImplementedError

    def head_labels(self, labels: Tensor) -> Tensor:
        """Rows of the output heads for token ids. A token without a row, and :data:`IGNORED`, give :data:`IGNORED`."""
        return labels

    def teacher(self, rows: Tensor, head: int) -> Tensor | None:
        """Probabilities [R, rows of the output head] that one head learns at the positions ``rows`` of the pack of the
        last :meth:`states`. None: the head learns the tokens of the text."""
        return None

    @functools.cached_property
    def _base_digest(self) -> str:
        return weights_digest(self.model)

    def _write_files(self, directory: Path, name: str, tensors: Mapping[str, Tensor], config: dict[str, Any]) -> None:
        """Write the tensors, as they are, to ``directory / name``, and ``config.json`` next to them. ``directory`` is
        created if needed."""
        directory.mkdir(parents=True, exist_ok=True)
        own = {key: each.cpu().contiguous() for key, each in tensors.items()}
        save_file(own, directory / name, metadata={"format": "pt"})
        (directory / name).chmod(0o644)  # the library writes it for the owner only
        text = json.dumps({**config, "base_model_name_or_path": self._base or None}, indent=2, ensure_ascii=False)
        (directory / "config.json").write_text(text + "\n", encoding="utf-8")

    def write(self, directory: Path, files: ModelFiles) -> None:
        """Write the heads in their published format, in the dtype of ``files``. ``directory`` is created if needed."""
        raise NotImplementedError


class HeadsTrainer(Trainer):
    """Takes optimiser steps on the heads of a frozen model; see :class:`Trainer`.

    The loss is the sum of the heads' losses, head i's multiplied with ``decay ** (i + 1)``.
    """

    def __init__(self, heads: HeadsNetwork, *given: Any, decay: float = 0.8, **others: Any) -> None:
        super().__init__(heads, *given, **others)
        self.heads = heads
        self.decay = decay

    def pack_loss(self, pack: Pack, loss: StepLoss | AdapterLosses) -> Tensor:
        """Loss of one pack over all heads, as a scalar. Call it inside ``loss.step``."""
        batch = self._batch(pack)
        return torch.stack(
            [self._part(batch, state, head, loss) for head, state in enumerate(self._states(batch, pack))]
        ).sum()

    def _learn(self, pack: Pack) -> Tensor:
        """Add the gradient of a pack. The backward pass of each head's logits runs at once, so that only the logits of
        one head are in memory at a time. The gradients of the states follow at the end, because later states can depend
        on earlier ones."""
        batch = self._batch(pack)
        total = torch.zeros(())
        found: list[tuple[Tensor, Tensor]] = []
        for head, state in enumerate(self._states(batch, pack)):
            leaf = state.detach().requires_grad_(state.requires_grad)
            part = self._part(batch, leaf, head, self._loss)
            part.backward()  # type: ignore[no-untyped-call]
            if leaf.grad is not None:
                found.append((state, leaf.grad))
            total = total + part.detach().cpu()
        if found:
            states, gradients = zip(*found, strict=True)
            torch.autograd.backward(states, gradients)
        return total

    def _states(self, batch: Mapping[str, Tensor], pack: Pack) -> Iterator[Tensor]:
        states = self.heads.states(batch, pack)
        while True:
            with self._cast(batch):
                state = next(states, None)
            if state is None:
                return
            yield state

    def _part(self, batch: Mapping[str, Tensor], state: Tensor, head: int, loss: StepLoss | AdapterLosses) -> Tensor:
        """One head's part of the loss of a pack, from the states of all its tokens."""
        shifted = ahead(batch, head + 1)
        shifted["labels"] = self.heads.head_labels(shifted["labels"])
        rows, chosen = predictions({**batch, **shifted})
        with self._cast(batch):
            logits = self.heads.head_logits(state[rows], head)
            teacher = self.heads.teacher(rows, head)
        part = loss(logits, chosen) if teacher is None else loss(logits, chosen, teacher)  # type: ignore[call-arg]
        return self.decay ** (head + 1) * part

    def _cast(self, batch: Mapping[str, Tensor]) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(batch["input_ids"].device.type, torch.bfloat16, enabled=self.config.dtype == "bfloat16")


def ahead(batch: Mapping[str, Tensor], distance: int) -> dict[str, Tensor]:
    """Shift targets: ``labels`` and ``loss_weight`` [1, T] of a collated pack, taken from the token ``distance``
    positions later in the same sequence. A position has a target only if its own token and the later token are both
    targets, because drafts follow tokens that the model has generated.
    """
    labels, weights, segments = (batch[name][0] for name in ("labels", "loss_weight", "segment_ids"))
    count = max(0, len(labels) - distance)
    is_target = (segments[:count] == segments[distance:]) & (labels[:count] != IGNORED) & (labels[distance:] != IGNORED)
    found = torch.full_like(labels, IGNORED)
    weighed = torch.zeros_like(weights)
    found[:count] = labels[distance:].where(is_target, found[:count])
    weighed[:count] = weights[distance:].where(is_target, weighed[:count])
    return {"labels": found[None], "loss_weight": weighed[None]}
