"""The trainer of the service: adapters of many clients on one frozen model, whose calls share forward passes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, Self

import torch

from chairlift.config import LoRAConfig
from chairlift.errors import InvariantError
from chairlift.kernels.weights import PLAIN
from chairlift.lora.bank import NativeAdapters
from chairlift.lora.sites import HEAD, sites_in
from chairlift.lora.trainable import attach
from chairlift.models.causal_lm import CausalLM
from chairlift.models.loader import load_model
from chairlift.models.model_files import read_config
from chairlift_train.engine_pass import EnginePass
from chairlift_train.service.compute import files
from chairlift_train.service.compute.calls import (
    AdamParameters,
    AdapterConfig,
    PassCall,
    PassOutcome,
    TrainingError,
)
from chairlift_train.service.compute.checks import DatumLimits, checked_data, loss_of
from chairlift_train.service.compute.client import Client, bytes_of, modules_of
from chairlift_train.service.compute.packs import AdapterSwitch, Group, PackPass, RunningCall, Segment
from chairlift_train.service.groups import groups_of

__all__ = ["AdapterTrainer", "TrainerSettings"]

_END: Final = object()
"""Marks the end of an iterator."""


@dataclasses.dataclass(frozen=True, slots=True)
class TrainerSettings:
    """Settings of an :class:`AdapterTrainer`. ``dtype``, ``kernels`` and the model must be those of the engine that
    samples, so that log-probabilities are equal."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the engine's copy of the weights, and of its activations."""
    kernels: str = "auto"
    """Instruction set of the engine's kernels; ``auto`` is the best of this processor."""
    threads: int | None = None
    """Number of threads of the engine's kernels; None: all processors."""
    base: str = ""
    """Name of the model in the configuration of saved adapters."""
    alpha: float = 32.0
    """Scale of all adapters: low-rank terms are multiplied by ``alpha / rank``. It is not part of a client's call."""
    max_rank: int = 64
    max_models: int = 8
    """Maximum number of adapters at once."""
    pack_tokens: int = 2048
    """Number of tokens of a packed pass. A longer group of data has a pass of its own."""
    step_tokens: int = 512
    """Number of tokens that the engine computes at a time. It does not change any bits."""
    max_tokens: int | None = None
    """Maximum number of tokens of a datum; None: the model's context."""


class AdapterTrainer:
    """Trains adapters of ``model``, which has plain float32 weights on the CPU and does not change. Implements
    :class:`~chairlift_train.service.compute.calls.TrainsAdapters`. One thread uses it.

    The forward pass is the engine's (:mod:`chairlift_train.engine_pass`), so log-probabilities are those of the
    sampler. A client's results and weights have the same bits in any company. Raises ConfigError for a model that the
    native kernels do not run.
    """

    def __init__(self, model: CausalLM, settings: TrainerSettings | None = None) -> None:
        self.settings = settings = TrainerSettings() if settings is None else settings
        self._model = model.requires_grad_(False).eval()
        self._sites = sites_in(model.config)
        context = model.config.max_position_embeddings
        most = context if settings.max_tokens is None else min(context, settings.max_tokens)
        self.limits = DatumLimits(model.config.vocab_size, most)
        """What a datum may have."""
        dtype: torch.dtype = getattr(torch, settings.dtype)
        self._engine = EnginePass(model, dtype=dtype, kernels=settings.kernels, threads=settings.threads)
        self._engine.write(model)
        self._room = (0, 0)
        self._clients: dict[str, Client] = {}
        self._numbers: dict[str, int] = {}
        """Model id -> number of its adapter in the engine."""
        self._put: set[str] = set()
        """Models whose newest matrices are in the engine."""
        self._adapters = AdapterSwitch()
        for name in (*self._sites.layers, HEAD):
            attach(model, name, self._adapters.of_layer(name))

    @classmethod
    def load_model(cls, directory: Path, settings: TrainerSettings | None = None) -> Self:
        """A trainer for the model in a directory. Raises ModelLoadError and ConfigError."""
        return cls(load_model(directory, read_config(directory), torch.float32, weight_format=PLAIN), settings)

    # -- models --------------------------------------------------------------------------------------------------------

    @property
    def models(self) -> list[str]:
        """Ids of the models in memory."""
        return list(self._clients)

    def create(self, model_id: str, config: AdapterConfig) -> None:
        """Add an adapter whose matrices B are zero. Raises TrainingError for an id that is in use, a rank out of range,
        and one adapter too many."""
        if model_id in self._clients:
            raise TrainingError(f"the model {model_id!r:.200} exists already; take another name")
        if isinstance(config.rank, bool) or not 1 <= config.rank <= self.settings.max_rank:
            raise TrainingError(f"rank must be from 1 to {self.settings.max_rank}, got {config.rank}")
        if len(self._clients) >= self.settings.max_models:
            raise TrainingError(
                f"{self.settings.max_models} models are in training, and there is no room for another; drop one first"
            )
        if not -(2**63) <= config.seed < 2**64:
            raise TrainingError(f"seed must fit into 64 bits, got {config.seed}")
        self._add(model_id, self._client(modules_of(self._sites, config), config, self.settings.alpha))

    def _client(self, modules: Sequence[str], config: AdapterConfig, alpha: float) -> Client:
        return Client(self._model, modules, config, alpha=alpha, base=self.settings.base)

    def _add(self, model_id: str, client: Client) -> None:
        self._clients[model_id] = client
        taken = set(self._numbers.values())
        self._numbers[model_id] = next(n for n in range(1, self.settings.max_models + 1) if n not in taken)

    def drop(self, model_id: str) -> None:
        """Forget an adapter. An unknown id is ignored."""
        if self._clients.pop(model_id, None) is not None:
            self._withdraw(model_id)
            del self._numbers[model_id]

    def price(self, config: AdapterConfig) -> int:
        """Bytes that an adapter takes: its matrices, the gradient and that of a running call, two moments, and the
        engine's copy. Raises TrainingError for a configuration without layers."""
        modules = modules_of(self._sites, config)
        return bytes_of(self._sites, modules, config.rank, self._engine.dtype.itemsize)

    def _of(self, model_id: str) -> Client:
        client = self._clients.get(model_id)
        if client is None:
            raise TrainingError(f"there is no model {model_id!r:.200}; create or load it first")
        return client

    # -- calls ---------------------------------------------------------------------------------------------------------

    def forward_backward(self, calls: Sequence[PassCall]) -> list[PassOutcome]:
        """Compute the calls in packed passes. Gradients are added in the order of the calls."""
        running = [self.begin(call) for call in calls]
        rest = [(each, index) for each in running for index in range(len(each.groups))]
        while rest:
            count, tokens = 0, 0
            while count < len(rest) and (not count or tokens + _length(*rest[count]) <= self.settings.pack_tokens):
                tokens += _length(*rest[count])
                count += 1
            for _ in self.compute(rest[:count]):
                pass
            rest = rest[count:]
        return [each.outcome() for each in running]

    def begin(self, call: PassCall) -> RunningCall:
        """Check a call, for :meth:`compute`. A call that cannot be computed has no data, and its result says why."""
        found = RunningCall(call)
        try:
            found.client = self._of(call.model_id)
            found.number = self._numbers[call.model_id]
            found.loss, found.options = loss_of(call)
            found.data = checked_data(call, found.loss, self.limits)
            found.groups = groups_of([len(each.token_ids) for each in found.data])
        except TrainingError as error:
            found.error = str(error)
        return found

    def compute(self, data: Sequence[tuple[RunningCall, int]]) -> Iterator[None]:
        """Compute a packed pass over (call, index of a group of its data) in slices, between which other work may run,
        but no other call of the same models.

        The groups of a call must be given in their order, in one or several passes. After the last,
        :meth:`RunningCall.outcome` gives the result; for one model it must be called in the order of the calls.
        """
        groups: list[Group] = []
        start = 0
        for running, index in data:
            if index != running.given:
                raise InvariantError(f"group {index} of a call is computed after {running.given} of its groups")
            running.given += 1
            if not running.error:
                segments = []
                for datum in running.groups[index]:
                    segments.append(Segment(running, datum, start))
                    start = segments[-1].rows.stop
                groups.append(Group(segments))
        if groups:
            count = sum(len(each.segments) for each in groups)
            self._refresh(start, count, {each.running.call.model_id for each in groups})
            work = PackPass(self._model, self._engine, self._adapters, groups).slices()
            while not _ended(work):
                yield

    def optim_step(self, model_id: str, adam: AdamParameters) -> Mapping[str, float]:
        """Take one step of AdamW; see :meth:`Client.optim_step`."""
        metrics = self._of(model_id).optim_step(adam)
        self._withdraw(model_id)
        return metrics

    def _refresh(self, num_tokens: int, num_sequences: int, models: set[str]) -> None:
        """Give the engine room for a pack, and the newest matrices of ``models``."""
        if num_tokens > self._room[0] or num_sequences > self._room[1]:
            sequences = max(1 << (num_sequences - 1).bit_length(), self._room[1])  # seldom made anew as packs grow
            self._room = (max(num_tokens, self._room[0], self.settings.pack_tokens), sequences)
            rank, count = self.settings.max_rank, self.settings.max_models
            lora = LoRAConfig(enable_lora=True, max_lora_rank=rank, max_loras=count, max_cpu_loras=count)
            self._engine.grow(*self._room, lora, step_tokens=self.settings.step_tokens)
            self._put.clear()
        for model_id in sorted(models - self._put):
            self._table.put(self._numbers[model_id], self._table.hold(self._clients[model_id].served()))
            self._put.add(model_id)

    @property
    def _table(self) -> NativeAdapters:
        table = self._engine.runner.adapters
        if table is None:
            raise InvariantError("the engine has no room for adapters")
        return table

    def _withdraw(self, model_id: str) -> None:
        """Take a model's matrices, which have changed, out of the engine."""
        if model_id in self._put:
            self._table.drop(self._numbers[model_id])
            self._put.remove(model_id)

    # -- files ---------------------------------------------------------------------------------------------------------

    def save(self, model_id: str, directory: Path, optimizer: bool) -> None:
        """Write the adapter as a PEFT directory, with everything that training needs to go on if ``optimizer``.

        The directory appears whole or not at all. Raises TrainingError if it exists, and OSError.
        """
        files.save(self._of(model_id), directory, optimizer=optimizer)

    def load(self, model_id: str, directory: Path, optimizer: bool) -> None:
        """Replace the adapter of a model by a saved one, or make a model of it. Without ``optimizer``, its optimiser
        begins anew.

        Raises TrainingError for files that are damaged or do not fit to the model, or to the adapter that is replaced,
        which then stays.
        """
        before = self._clients.get(model_id)
        if before is None and len(self._clients) >= self.settings.max_models:
            raise TrainingError(f"{self.settings.max_models} models are in training; drop one first")
        saved = files.read(directory, self._sites, max_rank=self.settings.max_rank)
        if before is not None and (before.modules, before.config.rank) != (saved.modules, saved.config.rank):
            raise TrainingError(
                f"{directory.name} has another rank or other layers than the model {model_id!r:.200}; load it as a new"
                " model"
            )
        client = self._client(saved.modules, saved.config, saved.alpha)
        files.restore(client, saved, optimizer=optimizer)
        if before is None:
            self._add(model_id, client)
        else:
            self._clients[model_id] = client
            self._withdraw(model_id)


def _ended(work: Iterator[Any]) -> bool:
    """Run the next slice of ``work``. Returns whether there was none. The engine's thread may be in inference mode,
    whose tensors have no gradients."""
    with torch.inference_mode(False):
        return next(work, _END) is _END


def _length(running: RunningCall, index: int) -> int:
    return sum(len(running.data[datum].token_ids) for datum in running.groups[index])
