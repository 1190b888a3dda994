"""What the training scheduler hands out: parts of calls, packs of them, and steps."""

from __future__ import annotations

import dataclasses
from typing import Final

__all__ = ["STEP_KINDS", "CallPart", "TrainingCall", "TrainingPack", "TrainingStep"]

STEP_KINDS: Final = ("create", "optim_step", "save", "load")
"""Kinds of calls that run alone. Each begins when all earlier calls of its model have ended."""


@dataclasses.dataclass(frozen=True, slots=True)
class TrainingCall:
    """One call of a client, as the scheduler sees it."""

    model_id: str
    seq_id: int
    """Position among the calls of the model. Calls of a model run in this order."""
    kind: str
    """``pass`` for a forward pass, with or without a backward pass; otherwise one of ``STEP_KINDS``."""
    lengths: tuple[int, ...] = ()
    """Number of tokens of each group of data, which is never divided. Empty for a step."""
    forward_only: bool = False
    """Whether the pass adds no gradient."""


@dataclasses.dataclass(frozen=True, slots=True)
class CallPart:
    """Consecutive groups of data of one call, which share a pack with those of others."""

    model_id: str
    seq_id: int
    first: int
    """Index of the first group."""
    count: int
    num_tokens: int
    is_last: bool
    """Whether the call ends with this part."""


@dataclasses.dataclass(frozen=True, slots=True)
class TrainingPack:
    """One forward pass, with or without backward passes, over parts of calls of several models."""

    number: int
    parts: tuple[CallPart, ...]
    """Parts of one call are in the order of its groups, and parts of one model in the order of its calls."""
    num_tokens: int
    seconds: float
    """Predicted duration."""


@dataclasses.dataclass(frozen=True, slots=True)
class TrainingStep:
    """A call that runs alone."""

    number: int
    call: TrainingCall
    seconds: float
    """Predicted duration."""
