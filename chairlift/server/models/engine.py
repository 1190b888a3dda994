"""Stands in the place of the engine for a server with many models: it starts, reports and ends all of them."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

from chairlift.config import CPU_CACHE_SHARE, EngineConfig, ServerConfig
from chairlift.engine.async_engine import AsyncEngine, EngineState
from chairlift.engine.process.process_client import EnginePlace, ThisMachine
from chairlift.errors import ConfigError
from chairlift.fleet.models.catalog import CatalogEntry, read_catalog
from chairlift.fleet.models.policy import ModelPolicy, PolicyLimits
from chairlift.fleet.models.turnstile.shared import Turnstile, can_share, num_processors
from chairlift.fleet.ray import ray_models
from chairlift.loading.model import read_tokenizer
from chairlift.loading.sizes import ADAPTERS, machine_bytes, sizes_of
from chairlift.server.http.lifecycle import Progress, StartEngine
from chairlift.server.http.state import ServerState
from chairlift.server.models.hosts import Hosts

__all__ = ["ManyModels", "StartModel", "check_combines", "entries_of", "starter"]

_log: Final = logging.getLogger("chairlift.server")

_PLACES: Final = 3
"""By default there is memory for this many of the largest models."""
_MOST_SHARE: Final = 0.8
"""Largest default share of the machine's memory for all models."""
_NOT_WITH_MODELS: Final = {
    "replicas": "each model has one engine",
    "max_replicas": "each model has one engine",
    "min_replicas": "each model has one engine",
    "served_model_name": "name the models in the file of --models",
    "chat_template": "name a chat_template for each model in the file of --models",
    "lora_modules": "name the adapters of each model in the file of --models",
    "lora_dir": "name the adapters of each model in the file of --models",
    "batch_dir": "start a server with one model for batches",
    "enable_training": "start a server with one model for training",
    "otlp_traces_endpoint": "traces are written by servers with one model",
    "restart": "a model whose engine died is loaded again when it is needed",
}
"""Setting of the server that many models do not support -> what to do instead."""


def check_combines(config: ServerConfig, model: str | None) -> None:
    """Raise ConfigError for settings that do not combine with ``models``."""
    if model is not None:
        raise ConfigError(
            f"models is {config.models!r:.200} and the model {model!r:.200} is given; leave one of them out"
        )
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    for name, instead in _NOT_WITH_MODELS.items():
        if getattr(config, name) != defaults[name]:
            raise ConfigError(f"{name} does not combine with models; {instead}")


Measure = Callable[[Sequence[Mapping[str, Any]]], Awaitable[list[int | str]]]
"""Function like :func:`~chairlift.loading.sizes.sizes_of`."""


StartModel = Callable[[EngineConfig, ServerConfig, Progress, EnginePlace], AsyncEngine]
"""Function that starts the engine of one model at a place."""


class ManyModels(AsyncEngine):
    """The engine of a server with many models: it computes nothing itself, and counts the requests that no model
    takes."""

    def __init__(
        self,
        config: ServerConfig,
        entries: Sequence[CatalogEntry],
        start_engine: StartModel,
        *,
        measure: Measure = sizes_of,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(EngineConfig(), read_tokenizer=read_tokenizer)
        self._measure = measure
        self._clock = clock
        self.entries = entries
        self.hosts: Hosts | None = None
        """None until the memory of all models is known."""
        self._server = config
        self._start_engine = start_engine
        self._state: ServerState | None = None
        self._sizes: dict[str, int] = {}
        """Name of a model -> bytes that it needs."""
        self._ray_place = None if config.ray_address is None else ray_models(config.ray_address)
        self._turnstile = _make_turnstile(entries) if self._ray_place is None else None

    def attach(self, state: ServerState) -> None:
        """Note the state of the server; the states of the models share its keys and its stored responses."""
        self._state = state
        state.model_names = tuple(entry.name for entry in self.entries)

    async def wait_ready(self) -> None:
        """Plan the memory of all models, and begin to load the pinned ones. Raises ConfigError if those do not fit."""
        sizes = await self._measure(
            [entry.config.to_flat() | {ADAPTERS: list(entry.adapters.values())} for entry in self.entries]
        )
        self._sizes = {
            entry.name: size for entry, size in zip(self.entries, sizes, strict=True) if isinstance(size, int)
        }
        limits = PolicyLimits(
            memory_bytes=self._server.models_memory_bytes or _default_memory(sizes),
            max_waiting=self._server.max_num_loading_reqs,
            load_timeout=self._server.request_timeout,
        )
        pinned = [
            (entry.name, self._sizes[entry.name])
            for entry in self.entries
            if entry.pinned and entry.name in self._sizes
        ]
        if sum(size for _, size in pinned) > limits.memory_bytes:
            raise ConfigError(
                f"the pinned models {', '.join(name for name, _ in pinned)} need {sum(size for _, size in pinned):,}"
                f" bytes of memory together, and all models may have {limits.memory_bytes:,} (models_memory_bytes); pin"
                " fewer, or raise it"
            )
        self.hosts = Hosts(
            self.entries,
            sizes,
            ModelPolicy(limits),
            self._start_one,
            keep_alive=self._server.model_keep_alive,
            clock=self._clock,
        )
        self.state = EngineState.READY
        self.hosts.turn()

    def check_health(self) -> str:
        """Reason why the models make no progress; empty if all that are loaded do."""
        if self.hosts is None:
            return f"the engine is {self.state}"
        troubles = [
            f"{host.entry.name}: {trouble}"
            for host in self.hosts.loaded()
            if host.state is not None and (trouble := host.state.engine.check_health())
        ]
        return "; ".join(troubles)

    async def shutdown(self) -> None:
        """End the engines of all models."""
        if self.hosts is not None:
            await self.hosts.close()
        if self._turnstile is not None:
            self._turnstile.close()
            self._turnstile = None
        await super().shutdown()

    def _place(self, entry: CatalogEntry) -> EnginePlace:
        """Place for the engine of one model."""
        slot = [each.name for each in self.entries].index(entry.name)
        if self._ray_place is not None:
            return self._ray_place(slot, self._sizes[entry.name])
        return ThisMachine(program=None if self._turnstile is None else self._turnstile.program(slot))

    def _start_one(self, entry: CatalogEntry) -> ServerState:
        """State and engine of one model; the engine begins to load. Raises ConfigError."""
        if self._state is None:
            raise ConfigError("the server has not started")
        modules = tuple(f"{name}={path}" for name, path in entry.adapters.items())
        config = dataclasses.replace(
            self._server,
            models=None,
            models_memory_bytes=None,
            ray_address=None,
            model_keep_alive=None,
            max_num_loading_reqs=ServerConfig().max_num_loading_reqs,
            served_model_name=entry.names,
            chat_template=entry.chat_template,
            lora_modules=modules,
            restart=False,
        )
        engine = self._start_engine(entry.config, config, _no_progress, self._place(entry))
        shared = self._state
        state = ServerState(config, engine, entry.names, api_keys=shared.api_keys, started_at=int(time.time()))
        state.reloads = True
        state.responses = shared.responses
        state.reading = shared.reading
        state.writing = shared.writing
        state.media = shared.media
        state.comparison = shared.comparison
        return state


def _make_turnstile(entries: Sequence[CatalogEntry]) -> Turnstile | None:
    """The order of the steps of all models; None for a single model, or if the system has no means for it."""
    if len(entries) < 2 or not can_share():
        return None
    try:
        return Turnstile([entry.weight for entry in entries], num_processors())
    except OSError as error:
        _log.warning("the engines take no turns, and slow each other when several compute: %s", error)
        return None


def _default_memory(sizes: Sequence[int | str]) -> int:
    """Memory for some of the largest models, within a share of the machine's memory."""
    known = sorted((size for size in sizes if isinstance(size, int)), reverse=True)
    return min(sum(known[:_PLACES]), int(machine_bytes() * _MOST_SHARE)) or 1


def _no_progress(label: str, share: float) -> None:
    """Loads of models are reported in the log."""


def entries_of(config: ServerConfig, settings: dict[str, Any]) -> list[CatalogEntry]:
    """The models that ``config.models`` names, with ``settings`` for all of them. Raises ConfigError."""
    memory = int(machine_bytes() * CPU_CACHE_SHARE) // _PLACES
    return read_catalog(str(config.models), settings, memory)


def starter(entries: Sequence[CatalogEntry], start_engine: StartModel) -> StartEngine:
    """Function for :func:`~chairlift.server.http.lifecycle.serve` that starts all models instead of one engine."""

    def start(_: EngineConfig, config: ServerConfig, on_progress: Progress) -> AsyncEngine:
        return ManyModels(config, entries, start_engine)

    return start
