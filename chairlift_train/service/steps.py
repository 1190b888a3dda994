"""Runs the calls of a model that are no passes: create, optimiser step, save and load."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from chairlift.errors import EngineDeadError, StorageError
from chairlift_train.service.compute.calls import TrainingError
from chairlift_train.service.groups import groups_of
from chairlift_train.service.host import (
    AdamOrder,
    CreateOrder,
    LoadOrder,
    Order,
    PackOrder,
    PartOrder,
    SaveOrder,
    WorkResult,
)
from chairlift_train.service.log.records import CallAnswer, CheckpointRecord, LoggedCall, ModelRecord, SamplerRecord
from chairlift_train.service.places import check_name, num_bytes, split_path
from chairlift_train.service.wire.bodies import (
    CreateModel,
    LoadWeights,
    OptimStep,
    SaveWeights,
    SaveWeightsForSampler,
    adam_of,
    adapter_of,
    check_optimizer,
    read_body,
)
from chairlift_train.service.wire.passes import read_pass

if TYPE_CHECKING:
    from chairlift_train.service.log.store import TrainingLog
    from chairlift_train.service.runs import TrainingRuns

__all__ = ["StepRunner", "check_ttl"]

_SNAPSHOTS = 16
"""Number of a model's newest snapshots for sampling sessions that are kept."""
_LEAST_TTL, _MOST_TTL = 3600, 10 * 366 * 86400


def _json(value: Any) -> CallAnswer:
    return CallAnswer("json", msgspec.json.encode(value))


class StepRunner:
    """Runs steps of the models of ``runs``."""

    def __init__(self, runs: TrainingRuns) -> None:
        self._runs = runs

    def _check_model(self, name: str) -> None:
        if name not in self._runs.model_names:
            known = ", ".join(self._runs.model_names)
            raise TrainingError(f"this server does not train {name!r:.160}; it trains {known}")

    def check(self, model: ModelRecord, kind: str, body: bytes) -> None:
        """Raise TrainingError for a step that can be refused before its turn."""
        if kind == "optim_step":
            adam_of(read_body(body, OptimStep))
        elif kind == "save":
            request = read_body(body, SaveWeights)
            check_name(request.path or "")
            check_ttl(request.ttl_seconds)
        elif kind == "save_sampler":
            sampler = read_body(body, SaveWeightsForSampler)
            check_ttl(sampler.ttl_seconds)
            if sampler.path is not None:
                check_name(sampler.path)
            elif sampler.sampling_session_seq_id is None:
                raise TrainingError("save_weights_for_sampler needs a path, or a sampling_session_seq_id")
        elif kind == "load":
            load = read_body(body, LoadWeights)
            check_optimizer(load.optimizer_config)
            split_path(load.path)
        elif kind == "create":
            create = read_body(body, CreateModel)
            check_optimizer(create.optimizer_config)
            self._check_model(create.base_model)
            adapter_of(create.lora_config, 0)

    async def run(self, model: ModelRecord, seq_id: int, kind: str, body: bytes) -> None:
        """Run a step, and log its answer. Raises TrainingError, EngineDeadError and StorageError."""
        if kind == "create":
            await self._order(CreateOrder(model.model_id, model.config))
            await self._finish(model, seq_id, {"type": "create_model", "model_id": model.model_id})
        elif kind == "optim_step":
            adam = adam_of(read_body(body, OptimStep))
            result = await self._order(AdamOrder(model.model_id, adam))
            await self._finish(model, seq_id, {"metrics": result.metrics})
        elif kind == "save":
            await self._save(model, seq_id, read_body(body, SaveWeights))
        elif kind == "save_sampler":
            await self._save_sampler(model, seq_id, read_body(body, SaveWeightsForSampler))
        elif kind == "load":
            await self._load(model, seq_id, read_body(body, LoadWeights))

    async def repeat(self, model: ModelRecord, call: LoggedCall) -> None:
        """Compute a call again whose answer is known, for its effect on the model."""
        body = call.body or b""
        if call.kind == "optim_step":
            await self._order(AdamOrder(model.model_id, adam_of(read_body(body, OptimStep))))
        elif call.kind == "pass" and not (message := read_pass(body)).forward_only:
            count = len(groups_of(message.lengths()))
            await self._order(PackOrder([PartOrder(model.model_id, call.seq_id, 0, count, True, body)]))

    async def _order(self, order: Order) -> WorkResult:
        result = await self._runs.compute.run(order)
        self._runs.progress.sliced(result.slice_seconds)
        if result.broken:
            raise EngineDeadError(result.error)
        if result.error:
            raise TrainingError(result.error)
        return result

    async def _finish(
        self,
        model: ModelRecord,
        seq_id: int,
        answer: Any,
        *,
        checkpoint: CheckpointRecord | None = None,
        sampler: SamplerRecord | None = None,
        state: bool = False,
    ) -> None:
        answers = [(model.model_id, seq_id, _json(answer))]
        now = self._runs.wall_clock()
        made: dict[str, Any] = {"checkpoint": checkpoint, "sampler": sampler, "has_state": state}
        await self._runs.log(lambda log: log.finish(answers, now=now, **made))

    # -- saves -----------------------------------------------------------------------------------------------------

    async def save_state(self, model_id: str, seq_id: int) -> None:
        """Save the state of a model after a call, and forget older ones."""
        places = self._runs.places
        directory = places.state(model_id, seq_id)
        replaced = places.num_bytes_beside(directory)
        places.note(directory, await self._save_within(model_id, directory, "the state", optimizer=True, less=replaced))
        await self._runs.log(lambda log: log.state_saved(model_id, seq_id))
        places.keep_newest(directory, 1)

    async def _save_within(
        self, model_id: str, directory: Path, what: str, *, optimizer: bool, less: int = 0, owner: str | None = None
    ) -> int:
        """Save a model in ``directory``; an older one there was left by a process that was killed. Returns the size.

        Raises TrainingError if there is no room for ``what``, of whose size ``less`` becomes free again, or if the
        checkpoints of the ``owner`` would be too large. Then nothing is left.
        """
        places = self._runs.places
        places.remove(directory)
        await self._order(SaveOrder(model_id, str(directory), optimizer=optimizer))
        size = num_bytes(directory)

        def check(log: TrainingLog) -> None:
            log.check_room(size - less, what)
            if owner is not None:
                log.check_owner(owner, size - less)

        try:
            await self._runs.log(check)
        except StorageError as error:
            places.remove(directory)
            if error.is_quota:
                raise TrainingError(str(error)) from None
            raise
        return size

    async def _save(self, model: ModelRecord, seq_id: int, request: SaveWeights) -> None:
        record = await self._write(model, "weights", request.path or "", request, overwrite=request.overwrite)
        await self._finish(model, seq_id, {"type": "save_weights", "path": record.path}, checkpoint=record)

    async def _save_sampler(self, model: ModelRecord, seq_id: int, request: SaveWeightsForSampler) -> None:
        kind = "save_weights_for_sampler"
        if request.path is not None:
            record = await self._write(model, "sampler_weights", request.path, request, overwrite=False)
            await self._finish(model, seq_id, {"type": kind, "path": record.path}, checkpoint=record)
            return
        places = self._runs.places
        directory = places.snapshot(model.model_id, seq_id)
        size = await self._save_within(model.model_id, directory, "the snapshot", optimizer=False)
        places.note(directory, size)
        places.keep_newest(directory, _SNAPSHOTS)
        sampler_id = f"{model.session_id}:sample:{request.sampling_session_seq_id}"
        follows = model.model_id if request.kind == "inflight" else ""
        sampler = SamplerRecord(sampler_id, model.session_id, model.owner, "", str(directory), follows)
        await self._runs.publish(sampler)
        await self._finish(model, seq_id, {"type": kind, "sampling_session_id": sampler_id}, sampler=sampler)

    async def _write(
        self,
        model: ModelRecord,
        kind: Any,
        name: str,
        request: SaveWeights | SaveWeightsForSampler,
        *,
        overwrite: bool,
    ) -> CheckpointRecord:
        """Write a checkpoint. Its record is logged together with the answer, so a directory without a record was left
        by a process that was killed."""
        runs = self._runs
        directory = runs.places.checkpoint(model.model_id, kind, name)
        before = await runs.log(lambda log: log.checkpoint(model.model_id, kind, name))
        if before is not None and not overwrite:
            raise TrainingError(f"the name {name!r} is taken: {before.path}; take another, or save with overwrite=True")
        part = directory.with_name(f"{name}.new")
        optimizer = kind == "weights"
        size = await self._save_within(
            *(model.model_id, part, "the checkpoint"),
            optimizer=optimizer,
            less=0 if before is None else before.num_bytes,
            owner=model.owner or None,
        )
        runs.places.remove(directory)
        part.rename(directory)
        now = runs.wall_clock()
        expires = None if request.ttl_seconds is None else now + request.ttl_seconds
        metadata = msgspec.json.encode(request.user_metadata).decode()
        return CheckpointRecord(model.model_id, kind, name, model.owner, now, size, expires, metadata, optimizer)

    async def _load(self, model: ModelRecord, seq_id: int, request: LoadWeights) -> None:
        """Load a checkpoint into a model. The state is saved at once, because the checkpoint may be deleted later."""
        source, kind, name = split_path(request.path)
        record = await self._runs.log(lambda log: log.checkpoint(source, kind, name))
        if record is None or record.owner != model.owner:
            raise TrainingError(f"there is no checkpoint {request.path}; list_checkpoints shows those that are there")
        if request.optimizer and not record.optimizer:
            raise TrainingError(f"{request.path} has no optimiser's state; load it without optimizer")
        places = self._runs.places
        state = places.state(model.model_id, seq_id)
        places.remove(state)
        more = record.num_bytes - places.num_bytes_beside(state)
        try:
            await self._runs.log(lambda log: log.check_room(more, "the state after a load"))
        except StorageError as error:
            if error.is_quota:
                raise TrainingError(str(error)) from None
            raise
        directory = places.checkpoint(source, kind, name)
        await self._order(LoadOrder(model.model_id, str(directory), optimizer=request.optimizer))
        await self._order(SaveOrder(model.model_id, str(state), optimizer=True))
        places.note(state, num_bytes(state))
        answer = {"type": "load_weights", "path": request.path, "model_id": model.model_id}
        await self._finish(model, seq_id, answer, state=True)
        places.keep_newest(state, 1)


def check_ttl(seconds: int | None) -> None:
    """Raise TrainingError for a lifetime of a checkpoint that is out of range."""
    if seconds is not None and not (_LEAST_TTL <= seconds <= _MOST_TTL and math.isfinite(seconds)):
        raise TrainingError(f"ttl_seconds must be from {_LEAST_TTL:,} to {_MOST_TTL:,} (10 years), got {seconds}")
