"""A model as the trainer sees it, whoever implements its layers.

:class:`NativeNetwork` is a model of Chairlift's, whole or with an adapter; another implementation needs the methods of
:class:`Network` and nothing else. The trainer packs, weighs losses, takes steps and keeps moments the same way for all.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from chairlift.lora.trainable import TrainableAdapter
from chairlift.lora.trainable_set import TrainableAdapters
from chairlift.models.causal_lm import CausalLM
from chairlift.models.layers.attention import Attention
from chairlift.models.layers.mlp import MLP
from chairlift.train.checkpoint import ModelFiles, write_model
from chairlift.train.layout import Pack
from chairlift.train.varlen import VarlenContext

__all__ = ["NativeNetwork", "Network"]


class Network(Protocol):
    """What the trainer needs of a model."""

    module: nn.Module
    """The whole model. The trainer sets its mode and reads its device."""
    trained: Mapping[str, nn.Parameter]
    """Parameters that are trained, by their names in checkpoints."""
    vocab_size: int
    """Token ids are below this."""
    drops: bool
    """Whether the module drops numbers by itself in training mode."""
    section: str
    """Section of the settings that :meth:`settings` come from."""

    def logits(self, batch: Mapping[str, Tensor], pack: Pack, rows: Tensor) -> Tensor:
        """Logits [R, V] of the tokens ``rows`` (int64 [R]) of a collated pack, without a look at other sequences."""
        ...

    def branches(self) -> Iterable[nn.Module]:
        """Modules whose outputs the trainer's dropout is applied to."""
        ...

    def recomputed(self) -> contextlib.AbstractContextManager[None]:
        """Within, only the input of each layer is kept for the backward, which computes the layer again."""
        ...

    def settings(self) -> Mapping[str, Any] | None:
        """Plain data that must be equal where a run goes on; None for a model that is trained whole."""
        ...

    def write(self, directory: Path, files: ModelFiles) -> None:
        """Write the directory that is served, which is made if needed."""
        ...


class NativeNetwork:
    """A model of Chairlift's own layers. With an ``adapter`` of it, or several, only these are trained and written."""

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
        """Logits [R, V]; each sequence of the pack attends to itself (:class:`VarlenContext`)."""
        hidden: Tensor = self.model(
            batch["input_ids"][0], batch["position_ids"][0], VarlenContext(pack.layout.cu_seqlens)
        )
        return self.model.compute_logits(hidden[rows])

    def branches(self) -> Iterable[nn.Module]:
        """Attention and MLP of each layer."""
        return [module for module in self.model.modules() if isinstance(module, (Attention, MLP))]

    @contextlib.contextmanager
    def recomputed(self) -> Iterator[None]:
        """Gradient checkpointing (Chen et al., 2016). The same operations run on the same numbers, dropout included."""
        layers = list(self.model.model.layers)
        for layer in layers:
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
        try:
            yield
        finally:
            for layer in layers:
                del layer.forward  # what hid the class's own method

    def settings(self) -> Mapping[str, Any] | None:
        """Scale and base model of the adapter."""
        return None if self.adapter is None else self.adapter.settings()

    def write(self, directory: Path, files: ModelFiles) -> None:
        """Write a model under Hugging Face's names, or PEFT's directory."""
        if self.adapter is not None:
            self.adapter.write(directory)
        else:
            write_model(self.model, files, directory)

    def __str__(self) -> str:
        kind = "native"
        if self.adapter is not None:
            kind += ", with an adapter" if isinstance(self.adapter, TrainableAdapter) else ", with several adapters"
        return f"{self.model.config.model_type}, {kind}"
