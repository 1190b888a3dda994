"""Records of the training log."""

from __future__ import annotations

import dataclasses
from typing import Literal

from chairlift_train.service.compute.calls import AdapterConfig

__all__ = ["CallAnswer", "CheckpointRecord", "LoggedCall", "ModelRecord", "SamplerRecord", "SessionRecord"]

CheckpointKind = Literal["weights", "sampler_weights"]


@dataclasses.dataclass(frozen=True, slots=True)
class CallAnswer:
    """Result of a call."""

    form: Literal["json", "proto", "error"]
    """``error``: the payload is the JSON object of a failed call."""
    payload: bytes


@dataclasses.dataclass(frozen=True, slots=True)
class LoggedCall:
    """A call as it was accepted."""

    model_id: str
    seq_id: int
    kind: str
    """``create``, ``load``, ``pass``, ``forward`` (a pass that changes nothing), ``optim_step``, ``save`` or
    ``save_sampler``."""
    body: bytes | None
    """The request; None if the call has ended and need not be computed again."""
    answer: CallAnswer | None
    """None if the call has not ended."""
    is_dropped: bool = False
    """Whether the result is kept no longer: the answer has its form only."""


@dataclasses.dataclass(frozen=True, slots=True)
class SessionRecord:
    """A client process."""

    session_id: str
    owner: str
    """Tenant of the API key that created the session."""
    created_at: float
    metadata: str
    """JSON."""
    display_name: str
    ended: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class ModelRecord:
    """A training run: one adapter of one client."""

    model_id: str
    session_id: str
    owner: str
    base_model: str
    config: AdapterConfig
    metadata: str
    """JSON."""
    created_at: float
    state_seq: int | None = None
    """The newest saved state has the effect of all calls up to this one; None if no state was saved."""
    ended: bool = False
    """Whether the run takes no further calls."""


@dataclasses.dataclass(frozen=True, slots=True)
class CheckpointRecord:
    """Weights that a client saved."""

    model_id: str
    kind: CheckpointKind
    name: str
    owner: str
    created_at: float
    num_bytes: int
    expires_at: float | None
    metadata: str
    """JSON."""
    optimizer: bool
    """Whether the optimiser's state was saved, too."""

    @property
    def path(self) -> str:
        """The path by which clients name it."""
        return f"tinker://{self.model_id}/{self.kind}/{self.name}"

    @property
    def checkpoint_id(self) -> str:
        """The path without its first part."""
        return f"{self.kind}/{self.name}"


@dataclasses.dataclass(frozen=True, slots=True)
class SamplerRecord:
    """A sampling session: what its samples are drawn from."""

    sampler_id: str
    session_id: str
    owner: str
    model_path: str
    """Path of a checkpoint; empty for the base model."""
    directory: str
    """Directory of the adapter; empty for the base model."""
    follows: str = ""
    """Training run whose newest weights its samples use; empty if its weights do not change."""
