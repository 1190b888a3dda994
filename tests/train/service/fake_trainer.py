"""A trainer that computes no network, and a compute seat that runs it in the event loop.

An adapter is one number. A datum's log-probabilities and gradient depend on its tokens and on the number, and the
gradient is a sum in the order of the calls. So whatever is lost, repeated or in another order changes all later
results.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from chairlift.errors import EngineDeadError
from chairlift_train.service.compute.calls import (
    AdamParameters,
    AdapterConfig,
    Datum,
    PassCall,
    PassOutcome,
    TrainingError,
)
from chairlift_train.service.groups import groups_of
from chairlift_train.service.host import Order, TrainingHost, WorkResult

VOCAB = 1000
BYTES_PER_RANK = 100


@dataclasses.dataclass
class FakeAdapter:
    config: AdapterConfig
    weight: float
    moment: float = 0.0
    gradient: float = 0.0
    num_added: int = 0
    """Number of passes whose gradients were added since the last step."""


@dataclasses.dataclass
class FakePass:
    call: PassCall
    adapter: FakeAdapter
    data: Sequence[Datum]
    groups: Sequence[range] = ()
    error: str = ""
    gradient: float = 0.0
    loss: float = 0.0
    logprobs: list[npt.NDArray[np.float32]] = dataclasses.field(default_factory=list)

    def outcome(self) -> PassOutcome:
        if self.error:
            return PassOutcome(error=self.error)
        if not self.call.forward_only:
            self.adapter.gradient = self.adapter.gradient * 1.000_1 + self.gradient
            self.adapter.num_added += 1
        return PassOutcome(self.logprobs, {"loss:sum": self.loss})


class FakeTrainer:
    """Implements :class:`chairlift_train.service.host.SlicedTrainer`."""

    def __init__(self) -> None:
        self.adapters: dict[str, FakeAdapter] = {}

    def create(self, model_id: str, config: AdapterConfig) -> None:
        if not 1 <= config.rank <= 64:
            raise TrainingError(f"rank must be from 1 to 64, got {config.rank}")
        self.adapters[model_id] = FakeAdapter(config, 1.0 + config.seed % 97 / 100)

    def price(self, config: AdapterConfig) -> int:
        return BYTES_PER_RANK * config.rank

    def begin(self, call: PassCall) -> FakePass:
        adapter = self.adapters[call.model_id]
        for index, datum in enumerate(call.datums):
            targets = datum.inputs.get("target_tokens")
            if targets is None or len(targets) != len(datum.tokens):
                return FakePass(
                    call, adapter, [], error=f"datum {index}: target_tokens has another length than the tokens"
                )
            if (datum.tokens >= VOCAB).any():
                return FakePass(call, adapter, [], error=f"datum {index}: tokens has an unknown token id")
        return FakePass(call, adapter, call.datums, groups_of([len(datum.tokens) for datum in call.datums]))

    def compute(self, data: Sequence[tuple[Any, int]]) -> Iterator[None]:
        for running, index in [(each, index) for each, group in data for index in each.groups[group]]:
            datum = running.data[index]
            weights = datum.inputs.get("weights", np.ones(datum.inputs["target_tokens"].shape, np.float32))
            scores = -np.float32(running.adapter.weight) / (1 + datum.inputs["target_tokens"].astype(np.float32))
            if not np.isfinite(weights).all():
                running.error = running.error or f"datum {index}: the loss is NaN"
                continue
            running.logprobs.append(scores)
            running.loss -= float((scores * weights).sum())
            running.gradient = running.gradient * 1.01 + float((scores * weights).sum())
            yield

    def forward_backward(self, calls: Sequence[PassCall]) -> list[PassOutcome]:
        running = [self.begin(call) for call in calls]
        for _ in self.compute([(each, index) for each in running for index in range(len(each.groups))]):
            pass
        return [each.outcome() for each in running]

    def optim_step(self, model_id: str, adam: AdamParameters) -> Mapping[str, float]:
        adapter = self.adapters[model_id]
        if not adapter.num_added:
            raise TrainingError("there is no gradient; call forward_backward first")
        adapter.moment = adam.beta1 * adapter.moment + adapter.gradient
        adapter.weight -= adam.learning_rate * adapter.moment
        adapter.gradient, adapter.num_added = 0.0, 0
        return {"weight": adapter.weight}

    def save(self, model_id: str, directory: Path, optimizer: bool) -> None:
        if directory.exists():
            raise TrainingError(f"{directory.name} exists")
        part = directory.with_name(f"{directory.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        (part / "adapter.json").write_text(json.dumps(dataclasses.asdict(self.adapters[model_id])))
        part.rename(directory)

    def load(self, model_id: str, directory: Path, optimizer: bool) -> None:
        if not directory.exists():
            raise TrainingError(f"there is nothing in {directory.name}")
        read = json.loads((directory / "adapter.json").read_text())
        adapter = FakeAdapter(AdapterConfig(**read.pop("config")), **read)
        self.adapters[model_id] = adapter if optimizer else FakeAdapter(adapter.config, adapter.weight)

    def drop(self, model_id: str) -> None:
        self.adapters.pop(model_id, None)


class FakeCompute:
    """Runs the orders of a service with a :class:`FakeTrainer`. A test may let it die, or hold it up."""

    def __init__(self, trainer: FakeTrainer | None = None) -> None:
        self.trainer = trainer or FakeTrainer()
        self.host = TrainingHost(self.trainer)
        self.orders: list[Order] = []
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.deaths = 0
        """Number of orders with which the trainer dies from now on."""

    async def run(self, order: Order) -> WorkResult:
        self.orders.append(order)
        await self.go_on.wait()
        if self.deaths:
            self.deaths -= 1
            self.trainer.adapters.clear()
            self.host = TrainingHost(self.trainer)
            raise EngineDeadError("the trainer's process was killed")
        slices = self.host.run(order)
        while (result := next(slices)) is None:
            await asyncio.sleep(0)
        return result
