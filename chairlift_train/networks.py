"""The interface between the trainer and a model.

:class:`NativeNetwork` is a model with Chairlift's own layers, which is trained as a whole or with an adapter. Any other
implementation needs only the methods of :class:`Network`. Packing, losses and optimiser steps are the same for all.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from chairlift.errors import ConfigError
from chairlift.lora.trainable import TrainableAdapter
from chairlift.lora.trainable_set import TrainableAdapters
from chairlift.models.causal_lm import CausalLM
from chairlift.models.layers.attention import Attention
from chairlift.models.layers.linear import Linear
from chairlift.models.layers.mlp import MLP
from chairlift_train.checkpoint import ModelFiles, write_model
from chairlift_train.layout import Pack
from chairlift_train.sharding import divide
from chairlift_train.varlen import VarlenContext

__all__ = ["NativeNetwork", "Network"]


class Network(Protocol):
    """Protocol of a model that the trainer can train."""

    module: nn.Module
    """The whole model. The trainer sets its mode and reads its device."""
    trained: Mapping[str, nn.Parameter]
    """Name in checkpoints -> parameter, for the parameters that are trained."""
    vocab_size: int
    """Number of token ids of the model."""
    drops: bool
    """Whether the module applies dropout itself in training mode."""
    section: str
    """Name of the section in the settings file from which :meth:`settings` come."""

    def logits(self, batch: Mapping[str, Tensor], pack: Pack, rows: Tensor) -> Tensor:
        """Logits [R, V] at the positions ``rows`` (int64 [R]) of a collated pack. Sequences do not affect each
        other."""
        ...

    def branches(self) -> Iterable[nn.Module]:
        """Modules to whose outputs the trainer applies dropout."""
        ...

    def layers(self) -> Sequence[nn.Module]:
        """The decoder's layers in their order."""
        ...

    def divided(self) -> None:
        """Shard the parameters over the ranks (:mod:`~chairlift_train.sharding`). This replaces ``trained``.

        Raises ConfigError if only a part of the network is trained.
        """
        ...

    def recomputed(self) -> contextlib.AbstractContextManager[None]:
        """Context with gradient checkpointing: a forward pass stores only the input of each layer, and the backward
        pass computes the layer again."""
        ...

    def settings(self) -> Mapping[str, Any] | None:
        """Settings that must be equal when a run is resumed, as plain data. None for a model that is trained as a
        whole."""
        ...

    def write(self, directory: Path, files: ModelFiles) -> None:
        """Write the model or adapter into ``directory`` so that it can be served. The directory is created if
        needed."""
        ...


class NativeNetwork:
    """A model with Chairlift's own layers. With one or more adapters, only the adapters are trained and written."""

    section = "lora"

    def __init__(self, model: CausalLM, adapter: TrainableAdapter | TrainableAdapters | None = None) -> None:
        self.model = model
        self.module: nn.Module = model
        self.adapter = adapter
        self.trained: Mapping[str, nn.Parameter] = (
            dict(model.named_parameters()) if adapter is None else adapter.parameters
        )
        self.vocab_size = model.config.vocab_size
        self.drops = adapter is not None and adapter.dropout > 0

    def logits(self, batch: Mapping[str, Tensor], pack: Pack, rows: Tensor) -> Tensor:
        """Logits [R, V] at the positions ``rows``. Each sequence of the pack attends only to itself
        (:class:`VarlenContext`)."""
        hidden: Tensor = self.model(
            batch["input_ids"][0], batch["position_ids"][0], VarlenContext(pack.layout.cu_seqlens)
        )
        return self._head(rows)(hidden[rows])

    def _head(self, rows: Tensor) -> Callable[[Tensor], Tensor]:
        """Function from hidden states [R, D] to logits [R, V], for the ascending ``rows`` [R] of a pack."""
        if not isinstance(self.adapter, TrainableAdapters):
            return self.model.compute_logits
        adapters = self.adapter

        def computed(hidden: Tensor) -> Tensor:
            with adapters.selecting(rows):
                return self.model.compute_logits(hidden)

        return computed

    def logprobs(self, batch: Mapping[str, Tensor], pack: Pack, rows: Tensor, targets: Tensor) -> Tensor:
        """Log-probabilities float32 [R] of the tokens ``targets`` (int64 [R]) after the positions ``rows``."""
        logits = self.logits(batch, pack, rows).float()
        return logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]

    def sampled_logprobs(
        self,
        batch: Mapping[str, Tensor],
        pack: Pack,
        rows: Tensor,
        targets: Tensor,
        *,
        temperature: float = 1.0,
        kept: Sequence[Sequence[int]] | None = None,
    ) -> Tensor:
        """Log-probabilities float32 [R] of the tokens ``targets`` (int64 [R]) in the distributions from which a rollout
        drew them: the softmax of logits / ``temperature`` (above 0) over the ids ``kept`` [R, any] that top-k, top-p or
        min-p left (None: all ids).

        An LLM with ``logprobs_mode="processed_logprobs"`` computes the same numbers. All R rows of logits are in memory
        at once.
        """
        logits = self.logits(batch, pack, rows).float()
        if temperature != 1.0:
            logits = logits / torch.tensor(temperature, dtype=torch.float32, device=logits.device)
        if kept is not None:
            places = [row for row, ids in enumerate(kept) for _ in ids]
            left_out = torch.ones_like(logits, dtype=torch.bool)
            left_out[places, [token for ids in kept for token in ids]] = False
            logits = logits.masked_fill(left_out, -math.inf)
        logprobs = torch.log_softmax(logits, dim=-1, dtype=torch.float64)
        return logprobs.gather(1, targets[:, None])[:, 0].float()

    @contextlib.contextmanager
    def reference(self) -> Iterator[None]:
        """Context in which the adapter is switched off and gradients are not computed: the network is the model from
        which the adapter began. Raises ConfigError without an adapter, because the first weights no longer exist."""
        if self.adapter is None:
            raise ConfigError("a model that is trained whole has no reference; train an adapter, or keep a copy")
        layers = [each for each in self.model.modules() if isinstance(each, Linear) and each.adapted is not None]
        kept = [layer.adapted for layer in layers]
        for layer in layers:
            layer.adapted = None
        try:
            with torch.no_grad():
                yield
        finally:
            for layer, adapted in zip(layers, kept, strict=True):
                layer.adapted = adapted

    def branches(self) -> Iterable[nn.Module]:
        """The attention module and the MLP of each layer."""
        return [module for module in self.model.modules() if isinstance(module, (Attention, MLP))]

    def layers(self) -> Sequence[nn.Module]:
        """The decoder's layers."""
        return list(self.model.model.layers)

    def divided(self) -> None:
        """Shard the parameters. Raises ConfigError for an adapter or heads, because the frozen model is not sharded."""
        if self.trained.keys() != dict(self.model.named_parameters()).keys():
            raise ConfigError(
                f"training.sharding is for models that are trained whole, and {self.section} trains a part; leave it"
                " out"
            )
        divide(self.model, self.layers())
        self.trained = dict(self.model.named_parameters())

    @contextlib.contextmanager
    def recomputed(self) -> Iterator[None]:
        """Context with gradient checkpointing (Chen et al., 2016). The second computation of a layer gives the same
        numbers, also with dropout."""
        layers = self.layers()
        for layer in layers:
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
        try:
            yield
        finally:
            for layer in layers:
                del layer.forward  # makes the method of the class visible again

    def settings(self) -> Mapping[str, Any] | None:
        """Scale and base model of the adapter, as plain data. None if the whole model is trained."""
        return None if self.adapter is None else self.adapter.settings()

    def write(self, directory: Path, files: ModelFiles) -> None:
        """Write a model with Hugging Face's tensor names, or an adapter as a PEFT directory."""
        if self.adapter is not None:
            self.adapter.write(directory)
        else:
            write_model(self.model, files, directory)

    def __str__(self) -> str:
        kind = "native"
        if self.adapter is not None:
            kind += ", with an adapter" if isinstance(self.adapter, TrainableAdapter) else ", with several adapters"
        return f"{self.model.config.model_type}, {kind}"
