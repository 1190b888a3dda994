"""What the training service asks its trainer to do, and what the trainer answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["AdamParameters", "AdapterConfig", "Datum", "PassCall", "PassOutcome", "TrainingError", "TrainsAdapters"]


class TrainingError(Exception):
    """Raised when a caller asks for something impossible. The message is for the caller, and nothing has changed."""


@dataclasses.dataclass(frozen=True, slots=True)
class AdapterConfig:
    """A new adapter: two low-rank matrices for each layer that learns."""

    rank: int
    seed: int = 0
    """Seed of the first matrices A. Equal seeds give equal matrices."""
    train_mlp: bool = True
    train_attn: bool = True
    train_unembed: bool = True
    """Whether the output head learns, too."""


@dataclasses.dataclass(frozen=True, slots=True)
class AdamParameters:
    """Parameters of one step of AdamW (Loshchilov and Hutter, 2019)."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    """Decoupled: the weights shrink by ``learning_rate * weight_decay`` of themselves."""
    grad_clip_norm: float = 0.0
    """Maximum norm of the adapter's whole gradient; 0 for no limit."""


@dataclasses.dataclass(frozen=True, slots=True)
class Datum:
    """One sequence with what its loss reads."""

    tokens: NDArray[np.int32]
    """Token ids [N]. The model's output at position i predicts ``target_tokens[i]``."""
    inputs: Mapping[str, NDArray[Any]]
    """Name -> values, float32 or int64, [N] or [N, K]: ``target_tokens``, ``weights``, ``advantages`` ..."""


@dataclasses.dataclass(frozen=True, slots=True)
class PassCall:
    """A forward pass, with a backward pass unless ``forward_only``, over the data of one adapter."""

    model_id: str
    datums: Sequence[Datum]
    loss: str
    """``cross_entropy``, ``importance_sampling``, ``ppo``, ``cispo``, ``dro`` or ``gspo``."""
    loss_config: Mapping[str, float | str] = dataclasses.field(default_factory=dict)
    forward_only: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class PassOutcome:
    """Result of one call."""

    logprobs: Sequence[NDArray[np.float32]] = ()
    """For each datum, the log-probabilities of its targets, [N] or [N, K]."""
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Name with its reduction -> value, such as ``loss:sum``."""
    error: str = ""
    """Why the call failed, for its caller. A failed call has added nothing to the gradient."""


class TrainsAdapters(Protocol):
    """The trainer as the service sees it. One thread uses it. Each method raises TrainingError for what its caller did
    wrong."""

    def create(self, model_id: str, config: AdapterConfig) -> None:
        """Add an adapter whose second matrices are zero."""
        ...

    def forward_backward(self, calls: Sequence[PassCall]) -> list[PassOutcome]:
        """Compute the calls of many adapters in one packed pass. Gradients are added in the order of the calls."""
        ...

    def optim_step(self, model_id: str, adam: AdamParameters) -> Mapping[str, float]:
        """Take one step with the gradient so far, and forget the gradient. Returns metrics."""
        ...

    def save(self, model_id: str, directory: Path, optimizer: bool) -> None:
        """Write the adapter as a PEFT directory, with the optimiser's state if ``optimizer``."""
        ...

    def load(self, model_id: str, directory: Path, optimizer: bool) -> None:
        """Replace the adapter by a saved one. Without ``optimizer``, its optimiser begins anew."""
        ...

    def drop(self, model_id: str) -> None:
        """Forget an adapter."""
        ...

    def price(self, config: AdapterConfig) -> int:
        """Bytes that an adapter takes, with its gradient and the optimiser's state."""
        ...
