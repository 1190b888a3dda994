"""Trains Medusa heads: the model is frozen, and each head learns to predict a token further ahead (Cai et al., 2024).

The model computes its last hidden states once per pack. From the hidden state at position t, head i predicts the token
at position t + 2 + i, and the model itself predicts the token at t + 1. The losses of the heads are added, with smaller
weights for later heads.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from chairlift.lora.trainable import weights_digest
from chairlift.models.causal_lm import CausalLM
from chairlift.train.checkpoint import ModelFiles
from chairlift.train.collate import IGNORED
from chairlift.train.layout import Pack
from chairlift.train.loss import StepLoss
from chairlift.train.networks import NativeNetwork
from chairlift.train.several_adapters import AdapterLosses
from chairlift.train.trainer import Trainer, predictions
from chairlift.train.varlen import VarlenContext

__all__ = ["MedusaNetwork", "MedusaTrainer", "ahead"]

_WEIGHTS_NAME: Final = "medusa_lm_head.safetensors"


class MedusaNetwork(NativeNetwork):
    """A frozen model with Medusa heads: blocks x + SiLU(Wx + b), followed by an output head.

    The blocks begin as the identity, so that each head begins as the model's output head. With ``own_output_heads``,
    each head trains its own copy of the model's output head. Otherwise all heads use the model's output head, and their
    files are small. Training is in float32. ``base`` is the name of the model, which is written with the heads.
    """

    section = "heads"

    def __init__(
        self, model: CausalLM, *, num_heads: int, num_layers: int, own_output_heads: bool = False, base: str = ""
    ) -> None:
        super().__init__(model)
        self._base = base
        self.num_heads, self.num_layers, self.own_output_heads = num_heads, num_layers, own_output_heads
        parameters: dict[str, nn.Parameter] = {}
        output = model.lm_head.weight.detach()
        for head in range(num_heads):
            for layer in range(num_layers):
                for part, shape in (("weight", (output.shape[1],) * 2), ("bias", (output.shape[1],))):
                    parameters[f"{head}.{layer}.linear.{part}"] = nn.Parameter(torch.zeros(shape, device=output.device))
            if own_output_heads:
                parameters[f"{head}.{num_layers}.weight"] = nn.Parameter(output.clone())
        self.trained = parameters

    def hidden(self, batch: Mapping[str, Tensor], pack: Pack) -> Tensor:
        """Last hidden states [tokens, hidden size] that the model computes for a collated pack."""
        context = VarlenContext(pack.layout.cu_seqlens)
        states: Tensor = self.model(batch["input_ids"][0], batch["position_ids"][0], context)
        return states

    def head_logits(self, hidden: Tensor, head: int) -> Tensor:
        """Logits [R, V] of one head for the model's hidden states [R, D]."""
        for layer in range(self.num_layers):
            weight, bias = (self.trained[f"{head}.{layer}.linear.{part}"] for part in ("weight", "bias"))
            hidden = hidden + functional.silu(functional.linear(hidden, weight, bias))
        if self.own_output_heads:
            return functional.linear(hidden, self.trained[f"{head}.{self.num_layers}.weight"])
        return self.model.compute_logits(hidden)

    def settings(self) -> Mapping[str, Any]:
        """Settings that must be equal when the training of heads is resumed, as plain data."""
        names = ("num_heads", "num_layers", "own_output_heads")
        return {**{name: getattr(self, name) for name in names}, "base": self._base_digest}

    @functools.cached_property
    def _base_digest(self) -> str:
        return weights_digest(self.model)

    def write(self, directory: Path, files: ModelFiles) -> None:
        """Write the heads in Medusa's file format, in the dtype of ``files``. ``directory`` is created if needed."""
        directory.mkdir(parents=True, exist_ok=True)
        tensors = {name: each.detach().to(files.dtype).cpu().contiguous() for name, each in self.trained.items()}
        save_file(tensors, directory / _WEIGHTS_NAME, metadata={"format": "pt"})
        (directory / _WEIGHTS_NAME).chmod(0o644)  # the library writes it for the owner only
        config = {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "base_model_name_or_path": self._base or None,
            "medusa_num_heads": self.num_heads,
            "medusa_num_layers": self.num_layers,
            "original_lm_head": not self.own_output_heads,
            "hidden_size": self.model.lm_head.weight.shape[1],
            "vocab_size": self.model.config.vocab_size,
            "torch_dtype": str(files.dtype).removeprefix("torch."),
        }
        text = json.dumps(config, indent=2, ensure_ascii=False)
        (directory / "config.json").write_text(text + "\n", encoding="utf-8")


class MedusaTrainer(Trainer):
    """Takes optimiser steps on the heads of a frozen model; see :class:`Trainer`.

    The loss is the sum of the heads' losses, head i's multiplied with ``decay ** (i + 1)``.
    """

    def __init__(self, heads: MedusaNetwork, *given: Any, decay: float = 0.8, **others: Any) -> None:
        super().__init__(heads, *given, **others)
        self.heads, self.decay = heads, decay

    def pack_loss(self, pack: Pack, loss: StepLoss | AdapterLosses) -> Tensor:
        """Loss of one pack over all heads, as a scalar. Call it inside ``loss.step``."""
        return torch.stack(list(self._parts(pack, loss))).sum()

    def _learn(self, pack: Pack) -> Tensor:
        """Add the gradient of a pack, one head after another, so that only the logits of one head are in memory at a
        time."""
        total = torch.zeros(())
        for part in self._parts(pack, self._loss):
            part.backward()  # type: ignore[no-untyped-call]
            total = total + part.detach().cpu()
        return total

    def _parts(self, pack: Pack, loss: StepLoss | AdapterLosses) -> Iterator[Tensor]:
        """Yield each head's part of the loss of a pack."""
        batch = self._batch(pack)
        with self._cast(batch):
            hidden = self.heads.hidden(batch, pack)  # no weight of the model has a gradient, so nothing is kept for one
        for head in range(self.heads.num_heads):
            rows, chosen = predictions({**batch, **ahead(batch, head + 1)})
            with self._cast(batch):
                logits = self.heads.head_logits(hidden[rows], head)
            yield self.decay ** (head + 1) * loss(logits, chosen)

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
    found, weighed = torch.full_like(labels, IGNORED), torch.zeros_like(weights)
    found[:count] = labels[distance:].where(is_target, found[:count])
    weighed[:count] = weights[distance:].where(is_target, weighed[:count])
    return {"labels": found[None], "loss_weight": weighed[None]}
