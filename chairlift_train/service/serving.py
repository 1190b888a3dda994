"""``chairlift serve --enable-training``: a server with the training service beside the engine."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Final

import msgspec
from starlette.types import ASGIApp

from chairlift.base.service_class import parse_tenant_weights
from chairlift.config import EngineConfig, ServerConfig
from chairlift.engine.async_engine import AsyncEngine
from chairlift.engine.info import EngineInfo
from chairlift.engine.process.process_client import EngineProgram, ThisMachine
from chairlift.errors import ConfigError, EngineDeadError
from chairlift.lora.sites import sites_in
from chairlift.models.model_files import read_config
from chairlift.server.http.app import make_app
from chairlift.server.http.lifecycle import serve, start_engine
from chairlift.server.http.state import ServerState
from chairlift.server.routes import all_routes
from chairlift_train.service.compute.calls import AdapterConfig
from chairlift_train.service.compute.client import bytes_of, modules_of
from chairlift_train.service.host import NOT_SET_UP, Order, TrainingSetup, WorkResult
from chairlift_train.service.log.log_thread import LogThread
from chairlift_train.service.log.store import TrainingLog
from chairlift_train.service.places import Places
from chairlift_train.service.runs import RunSettings, TrainingRuns
from chairlift_train.service.schedule.scheduler import TrainingScheduler
from chairlift_train.service.service import TrainingService
from chairlift_train.service.wire.live import live_routes
from chairlift_train.service.wire.routes import training_routes

__all__ = ["EngineSeat", "serve_training"]

_PROGRAM: Final = EngineProgram("chairlift_train.service.engine_side")
_MAX_MODELS: Final = 64
"""Maximum number of adapters in training at a time. Their memory usually sets the limit."""


class EngineSeat:
    """The way to the trainer in the engine's process. Implements :class:`chairlift_train.service.runs.Compute`."""

    def __init__(self, engine: AsyncEngine, setup: TrainingSetup) -> None:
        self._engine = engine
        self._setup = setup
        self._is_set_up = False

    async def set_up(self) -> None:
        """Let the engine's process load the trainer. Raises ConfigError for a model that it cannot train."""
        result = await self._send(self._setup)
        if result.error:
            raise ConfigError(f"enable_training: {result.error}")
        self._is_set_up = True

    async def run(self, order: Order) -> WorkResult:
        """Follow an order. Raises EngineDeadError if the process has died, or is another one than before."""
        try:
            if not self._is_set_up:
                await self.set_up()
            result = await self._send(order)
        except EngineDeadError:
            self._is_set_up = False
            raise
        except ConfigError as error:
            raise EngineDeadError(str(error)) from None
        if result.broken and result.error == NOT_SET_UP:  # the engine was restarted since the last order
            self._is_set_up = False
            raise EngineDeadError("the engine was restarted")
        return result

    async def _send(self, order: Order) -> WorkResult:
        reply = await self._engine.side_work(msgspec.msgpack.encode(order))
        return msgspec.msgpack.decode(reply, type=WorkResult)


def _price(info: EngineInfo) -> Callable[[AdapterConfig], int]:
    sites = sites_in(read_config(Path(info.model_dir)))
    itemsize = 2 if info.dtype == "bfloat16" else 4

    def price(config: AdapterConfig) -> int:
        return bytes_of(sites, modules_of(sites, config), max(1, config.rank), itemsize)

    return price


def _check(server: ServerConfig, config: EngineConfig) -> EngineConfig:
    """The engine's settings with adapters. Raises ConfigError for settings that do not combine with training."""
    if config.model.quantization is not None:
        raise ConfigError(
            "enable_training needs the weights as they are, so that the sampler's log-probabilities are the trainer's;"
            " leave out quantization"
        )
    if server.replicas > 1 or server.max_replicas is not None or server.ray_address is not None:
        raise ConfigError("enable_training works with one engine; leave out replicas, max_replicas and ray_address")
    return dataclasses.replace(config, lora=dataclasses.replace(config.lora, enable_lora=True))


@contextlib.asynccontextmanager
async def _training(
    state: ServerState, engine_config: EngineConfig, door: list[TrainingService]
) -> AsyncIterator[None]:
    """Context manager: run the training service while the server serves. ``door`` receives it for the endpoints."""
    config = state.config
    info = state.engine.info
    if info is None or info.pooling is not None:
        raise ConfigError("enable_training needs a model that generates text")
    base = str(engine_config.model.model)
    local = Path(base).expanduser().exists() or base == "bundled"
    setup = TrainingSetup(
        base=info.model_dir if local else base,
        max_rank=engine_config.lora.max_lora_rank,
        max_models=_MAX_MODELS,
        pack_tokens=config.training_pack_tokens,
        gap=config.training_gap_ms / 1000,
        share=config.training_share,
    )
    seat = EngineSeat(state.engine, setup)
    await seat.set_up()
    root = Path(config.training_dir or "").expanduser()
    scheduler = TrainingScheduler(
        token_budget=config.training_pack_tokens,
        memory=config.training_memory_bytes,
        max_models=config.max_training_adapters_per_key,
        weights=parse_tenant_weights(engine_config.scheduler.tenant_weights),
    )
    places = Places(root)
    sizes = {"max_bytes": config.max_training_dir_bytes, "max_owner_bytes": config.max_training_bytes_per_key}
    log = LogThread(TrainingLog(root, **sizes, beside=places.num_bytes))
    settings = RunSettings(result_seconds=config.training_result_seconds)
    service = TrainingService(
        TrainingRuns(log, seat, scheduler, places, _price(info), settings),
        state.engine,
        model_names=state.model_names,
        max_context=info.max_model_len,
        tokenizer_id=info.model_dir if local else base,
        arch=read_config(Path(info.model_dir)).model_type,
        follow=config.training_in_flight == "follow",
    )
    state.engine.stats.training = service.runs.progress.stats
    async with service.running():
        door.append(service)
        try:
            yield
        finally:
            door.clear()


async def serve_training(server: ServerConfig, config: EngineConfig, **settings: Any) -> int:
    """Serve until stopped, and train. ``settings`` go to :func:`chairlift.server.http.lifecycle.serve`, whose exit code
    is returned and whose errors are raised."""
    config = _check(server, config)
    door: list[TrainingService] = []

    def service() -> TrainingService:
        if not door:
            raise EngineDeadError("the training service has not started yet")
        return door[0]

    def app(state: ServerState) -> ASGIApp:
        return make_app(state, [*training_routes(service), *live_routes(service), *all_routes()])

    return await serve(
        server,
        config,
        start_engine=functools.partial(start_engine, place=ThisMachine(program=_PROGRAM)),
        make_app=app,
        beside=lambda state: _training(state, config, door),
        **settings,
    )
