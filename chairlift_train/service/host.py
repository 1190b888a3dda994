"""Runs training work where the trainer is: in the engine's process, between two steps, or on a thread.

Orders and results are plain data, so that they can pass between processes. A call that is computed in several packs
stays here until its last part; its gradient is added then, or not at all.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from chairlift_train.service.compute.calls import (
    AdamParameters,
    AdapterConfig,
    PassCall,
    PassOutcome,
    TrainingError,
    TrainsAdapters,
)
from chairlift_train.service.wire.passes import pass_answer, read_pass

__all__ = [
    "NOT_SET_UP",
    "AdamOrder",
    "CreateOrder",
    "DropOrder",
    "LoadOrder",
    "Order",
    "PackOrder",
    "PartOrder",
    "RunningPass",
    "SaveOrder",
    "SlicedTrainer",
    "TrainingHost",
    "TrainingSetup",
    "WorkResult",
]


NOT_SET_UP: Final = "the trainer is not set up"
"""Error of an order that a new process gets before its :class:`TrainingSetup`."""

_log: Final = logging.getLogger(__name__)


class CreateOrder(msgspec.Struct, tag="create", frozen=True):
    """Add an adapter."""

    model_id: str
    config: AdapterConfig


class PartOrder(msgspec.Struct, frozen=True):
    """A part of a call: groups of its data that follow each other."""

    model_id: str
    seq_id: int
    first: int
    """Index of the first group."""
    count: int
    is_last: bool
    body: bytes = b""
    """The request; empty after the first part."""


class PackOrder(msgspec.Struct, tag="pack", frozen=True):
    """Compute parts of calls in one pass. The result has an answer for each part that is a call's last."""

    parts: list[PartOrder]


class AdamOrder(msgspec.Struct, tag="optim_step", frozen=True):
    """Take an optimiser step; the result has its metrics."""

    model_id: str
    adam: AdamParameters


class SaveOrder(msgspec.Struct, tag="save", frozen=True):
    """Write an adapter to a directory."""

    model_id: str
    directory: str
    optimizer: bool


class LoadOrder(msgspec.Struct, tag="load", frozen=True):
    """Read an adapter from a directory."""

    model_id: str
    directory: str
    optimizer: bool


class DropOrder(msgspec.Struct, tag="drop", frozen=True):
    """Forget an adapter."""

    model_id: str


class TrainingSetup(msgspec.Struct, tag="setup", frozen=True):
    """First order: settings of the training half. The reply comes when the trainer is ready."""

    base: str
    """Name of the model in the configuration of saved adapters."""
    max_rank: int
    max_models: int
    pack_tokens: int
    gap: float
    """Seconds that training may add between two steps of a busy engine."""
    share: float
    """Largest part of the time that training takes while the engine is busy."""


Order = TrainingSetup | CreateOrder | PackOrder | AdamOrder | SaveOrder | LoadOrder | DropOrder


class PassResult(msgspec.Struct, frozen=True):
    """The answer to one call: the output in Protocol Buffers, or an error."""

    model_id: str
    seq_id: int
    output: bytes = b""
    error: str = ""
    loss: float = 0.0
    """Sum of the losses of all data."""


class WorkResult(msgspec.Struct, frozen=True):
    """What an order has led to."""

    passes: list[PassResult] = []
    metrics: dict[str, float] = {}
    error: str = ""
    """Why the order was not followed, for the caller."""
    slice_seconds: float = 0.0
    """Seconds of the longest piece of the work that nothing could interrupt."""
    broken: bool = False
    """Whether the error is the server's, and the state of the trainer is unknown."""


class RunningPass(Protocol):
    """A call that the trainer has begun. ``groups`` of its data are empty if it cannot be computed."""

    groups: Sequence[Any]

    def outcome(self) -> PassOutcome:
        """End the call, and add its gradient if it has no error."""
        ...


class SlicedTrainer(TrainsAdapters, Protocol):
    """A trainer that computes a pack in slices, between which other work may run."""

    def begin(self, call: PassCall) -> Any:
        """Check a call; the result is a :class:`RunningPass`."""
        ...

    def compute(self, data: Sequence[tuple[Any, int]]) -> Iterator[None]:
        """Compute (running call, index of a group of its data) together. The groups of a call come in their order."""
        ...


class TrainingHost:
    """Follows orders with a trainer. One thread uses it."""

    def __init__(self, trainer: SlicedTrainer) -> None:
        self._trainer = trainer
        self._running: dict[tuple[str, int], RunningPass] = {}
        """Calls of which some data were computed."""

    def run(self, order: Order) -> Iterator[WorkResult | None]:
        """Follow an order. Yields None between two slices, and the result at the end. Raises nothing."""
        try:
            if isinstance(order, PackOrder):
                yield from self._pack(order)
            else:
                yield self._follow(order)
        except TrainingError as error:
            yield WorkResult(error=str(error))
        except Exception as error:
            _log.exception("training work failed")
            yield WorkResult(error=f"{type(error).__name__}: {error}", broken=True)

    def _follow(self, order: Order) -> WorkResult:
        trainer = self._trainer
        if isinstance(order, CreateOrder):
            trainer.create(order.model_id, order.config)
        elif isinstance(order, AdamOrder):
            return WorkResult(metrics=_plain(trainer.optim_step(order.model_id, order.adam)))
        elif isinstance(order, SaveOrder):
            trainer.save(order.model_id, Path(order.directory), order.optimizer)
        elif isinstance(order, LoadOrder):
            trainer.load(order.model_id, Path(order.directory), order.optimizer)
        elif isinstance(order, DropOrder):
            for key in [key for key in self._running if key[0] == order.model_id]:
                del self._running[key]
            trainer.drop(order.model_id)
        return WorkResult()

    def _pack(self, order: PackOrder) -> Iterator[WorkResult | None]:
        data: list[tuple[RunningPass, int]] = []
        results: dict[tuple[str, int], PassResult] = {}
        for part in order.parts:
            key = (part.model_id, part.seq_id)
            if part.body:
                try:
                    self._running[key] = self._trainer.begin(read_pass(part.body).call())
                except TrainingError as error:
                    results[key] = PassResult(*key, error=str(error))
            running = self._running.get(key)
            if running is None:
                results.setdefault(key, PassResult(*key, error="an earlier part of this call has failed"))
                continue
            known = len(running.groups)
            data += [(running, index) for index in range(part.first, part.first + part.count) if index < known]
        for _ in self._trainer.compute(data):
            yield None
        for part in order.parts:
            key = (part.model_id, part.seq_id)
            if part.is_last and key in self._running:
                results[key] = _result(key, self._running.pop(key).outcome())
        yield WorkResult(passes=list(results.values()))


def _result(key: tuple[str, int], outcome: PassOutcome) -> PassResult:
    if outcome.error:
        return PassResult(*key, error=outcome.error)
    return PassResult(*key, output=pass_answer(outcome), loss=outcome.metrics.get("loss:sum", 0.0))


def _plain(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}
