"""The engine for an event loop. The process of the event loop tokenizes and checks requests and limits the queue; the
core runs in its own process.

When the core's process dies, its requests end with an error, and a new process starts after a pause. The pauses grow
with every restart.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import enum
import logging
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from chairlift.base.cache_hints import NO_HINTS, CacheHints
from chairlift.base.outputs import FinishReason, OutputKind
from chairlift.base.sampling_params import SamplingParams
from chairlift.base.service_class import DEFAULT_CLASS
from chairlift.config import CacheConfig, EngineConfig
from chairlift.core.scheduler.prompt_share import PromptShare
from chairlift.engine.adapters import AdapterState
from chairlift.engine.calibration import Calibration
from chairlift.engine.core_outputs import FinishedSequence
from chairlift.engine.events import Events
from chairlift.engine.generation import Generation
from chairlift.engine.idle_settings import idle_settings
from chairlift.engine.info import EngineInfo, check_update
from chairlift.engine.input_processor import (
    InputProcessor,
    ModelLimits,
    PooledText,
    PreparedRequest,
    Prompt,
    unnamed,
)
from chairlift.engine.intake import Intake, Place, counting_refusals
from chairlift.engine.kv_store.report import StoreReport
from chairlift.engine.output_processor import OutputProcessor, RequestState
from chairlift.engine.output_stream import OutputStream
from chairlift.engine.pooled.pooling_inputs import PoolingInputs
from chairlift.engine.process.messages import Refused, Step
from chairlift.engine.process.process_client import ProcessClient, RemoteCore
from chairlift.engine.prompts import Prompts, ReadImages, ReadTokenizer
from chairlift.engine.replicas import ServedReplicas
from chairlift.engine.served_adapters import ServedAdapters
from chairlift.errors import (
    ChairliftError,
    ConfigError,
    DeadlineError,
    EngineDeadError,
    OverloadedError,
    PromptTooLongError,
    QueueTimeoutError,
    RequestError,
)
from chairlift.metrics.stats import RequestStats
from chairlift.models.vision.processor import PlacedImages

__all__ = ["AsyncEngine", "EngineState"]

_log = logging.getLogger(__name__)

Progress = Callable[[str, float], None]
_Limits = tuple[float | None, float | None]
"""Seconds after the arrival of a request: its queue timeout, and its timeout. None: no timeout."""
Connect = Callable[["AsyncEngine"], RemoteCore]
"""Function that makes the core of an engine. The core sends its events to that engine."""

_CUT_OFF: Final = "the operator of the server has ended the request"
_FIRST_PAUSE = 0.2
_MAX_TOOLS: Final = 16
"""Number of called tools, and the length of their names in the next line, that the core is told about."""
_MAX_NAME: Final = 64
_LONGEST_PAUSE = 30.0
_SETTLED_SECONDS: Final = 60.0
"""If the engine process ran at least this many seconds before it died, the next pause before a restart is the shortest
again."""


class EngineState(enum.StrEnum):
    """Whether the engine accepts requests."""

    LOADING = "loading"
    READY = "ready"
    DOWN = "down"
    """The engine's process died, and a new process will be started."""
    STOPPED = "stopped"
    """The engine was shut down, or gave up restarting. It will not start again."""


class AsyncEngine:
    """One engine process and its requests. Create it with :meth:`start`; use it in one event loop only.

    ``connect`` makes the core; None starts one process. The core may also be a fleet of several processes.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        read_tokenizer: ReadTokenizer,
        read_images: ReadImages | None = None,
        on_progress: Progress | None = None,
        restart: bool = True,
        chat_template: str | None = None,
        max_queued_requests: int | None = None,
        max_queued_tokens: int | None = None,
        queue_timeout: float | None = None,
        request_timeout: float | None = None,
        health_timeout: float = 30.0,
        connect: Connect | None = None,
    ) -> None:
        self.config = config
        scheduler = config.scheduler
        self._connect = connect or (lambda events: ProcessClient(config.to_flat(), events))
        self._prompt_share = PromptShare(scheduler.open_policy_share)
        self.service_classes = scheduler.promises
        """Class of service -> its guarantees; None if the scheduling policy ignores classes."""
        self.state = EngineState.LOADING
        self.failure = ""
        """Reason why the engine is down or stopped."""
        self.info: EngineInfo | None = None
        self.pooling_inputs: PoolingInputs | None = None
        """Checks texts for a model that computes embeddings, scores or classes; None for a model that generates
        text."""
        self.stats = RequestStats()
        self.stopped = asyncio.Event()
        self.intake = Intake(
            max(64, 4 * scheduler.max_num_seqs) if max_queued_requests is None else max_queued_requests,
            32 * scheduler.max_num_batched_tokens if max_queued_tokens is None else max_queued_tokens,
            self.service_classes,
            Calibration(self.stats.forecast_error),
        )
        self.prompts = Prompts(
            config,
            self.stats,
            self._ready,
            read_tokenizer=read_tokenizer,
            read_images=read_images,
            chat_template=chat_template,
        )
        self.adapters = ServedAdapters(lambda: self._client, self._ready, enabled=config.lora.enable_lora)
        self.replicas = ServedReplicas(lambda: self._client, self._ready, self.stats)
        self.generation = Generation(lambda: self._client, self._ready, self.requests, self._cut_off)
        self._on_progress = on_progress
        self._restart = restart
        self._queue_timeout = queue_timeout
        self._request_timeout = request_timeout
        self._health_timeout = health_timeout
        self.events = Events("began", "ended", "steps", changed=self._follow)
        """Subscribers to three events.

        - ``began(stream)``: a request was admitted to the queue.
        - ``ended(stream, cut_off, now)``: a request has ended. ``cut_off`` is None if its answers ended by themselves,
          ABORT if its caller left, ERROR if the engine ended it. If its caller left after an answer had failed,
          it is that answer's finish reason: ERROR or DEADLINE.
        - ``steps(lines, replica)``: new lines of the recorder of a replica, counted from 0. An engine without replicas
          has the number 0.
        """
        self._begin_empty()

    def _begin_empty(self) -> None:
        """Set the state of an engine that does not run yet and has no requests."""
        self._client: RemoteCore | None = None
        self._inputs: InputProcessor | None = None
        self._outputs: OutputProcessor | None = None
        self._streams: dict[str, OutputStream] = {}
        self._first_outcome: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._keeper: asyncio.Task[None] | None = None
        self._follows = False

    @classmethod
    def start(cls, config: EngineConfig, **settings: Any) -> AsyncEngine:
        """Create an engine and begin to load its model. The settings are those of the constructor. See
        :meth:`wait_ready`."""
        engine = cls(config, **settings)
        engine._keeper = asyncio.create_task(engine._keep_alive(), name="engine keeper")
        return engine

    async def wait_ready(self) -> None:
        """Wait for the first load. Raises its error: ConfigError, ModelLoadError or EngineDeadError."""
        await asyncio.shield(self._first_outcome)

    # -- what it is doing ------------------------------------------------------------------------------------------

    @property
    def num_requests(self) -> int:
        """Number of requests that have not ended."""
        return len(self._streams)

    @property
    def num_queued(self) -> int:
        """Number of unfinished requests that have not been in any step."""
        return len(self.intake)

    @property
    def cache(self) -> CacheConfig:
        """Settings of the KV cache."""
        return self.config.cache

    def check_health(self) -> str:
        """Reason why requests make no progress; empty if they make progress, or if there are none."""
        if self.state is not EngineState.READY or self._client is None:
            return f"the engine is {self.state}" + (f": {self.failure}" if self.failure else "")
        silent = 0.0 if self._client.silent_since is None else time.monotonic() - self._client.silent_since
        if silent > self._health_timeout:
            waiting = (
                f"{self.num_requests} requests wait" if self.num_requests else "the requests that waited were aborted"
            )
            return f"the engine has not finished a step for {silent:.0f} s, and {waiting}"
        return ""

    def expected_wait(self, service_class: str = DEFAULT_CLASS, tenant: str = "") -> float | None:
        """Forecast of the seconds until a new request of this class and tenant would be in its first step.

        The forecast assumes the priority of the class and no deadline. None if there is no forecast.
        """
        stats = self.stats.engine
        if self.state is not EngineState.READY:
            return None
        now = time.monotonic()
        if not self.intake and not stats.num_waiting and self._free_rows:
            return None if stats.num_running and self.intake.is_outdated(now) else 0.0
        return self.intake.expected_wait(service_class, now, self._free_rows, tenant)

    def line(self) -> list[tuple[OutputStream, Place]]:
        """Requests that wait for their first step, with their places in the queue, in the order of their expected
        start."""
        places = self.intake.line(time.monotonic(), self._free_rows)
        return [(self._streams[place.request_id], place) for place in places if place.request_id in self._streams]

    def requests(self) -> list[OutputStream]:
        """Requests that have not ended, in order of arrival."""
        return list(self._streams.values())

    def named(self, name: str) -> list[OutputStream]:
        """Requests that have not ended and that were submitted with this ``name``."""
        return [stream for stream in self._streams.values() if stream.name == name]

    def _follow(self) -> None:
        """Let the core report its steps while there is a subscriber, and stop the reports when there is none."""
        wants_steps = self.events.wants("steps")
        if wants_steps != self._follows and self._client is not None:
            self._client.watch(wants_steps)
        self._follows = wants_steps

    @property
    def _free_rows(self) -> int:
        """Number of additional requests that may start now, without the rows reserved for short requests."""
        rows = self.stats.engine.running_limit or self.config.scheduler.max_num_seqs
        return max(0, rows - self._prompt_share.reserved_rows(rows) - self.stats.engine.num_running)

    def retry_after(self) -> float:
        """Seconds, from 1 to 60, after which the queue is expected to have room."""
        return self.intake.retry_after(time.monotonic())

    def check_room(
        self, num_requests: int = 1, service_class: str = DEFAULT_CLASS, num_tokens: int = 0, tenant: str = ""
    ) -> None:
        """Raise QueueFullError if the queue has no room now for ``num_requests`` requests with ``num_tokens`` prompt
        tokens.

        Raises EngineDeadError if the engine does not run.
        """
        self._ready()
        with counting_refusals(self.stats):
            self.intake.check(time.monotonic(), num_requests, num_tokens, service_class, tenant)

    # -- requests --------------------------------------------------------------------------------------------------

    async def submit(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        kind: OutputKind = OutputKind.DELTA,
        cache_salt: str = "",
        tenant: str = "",
        queue_timeout: float | None = None,
        timeout: float | None = None,
        name: str = "",
        arrival: float | None = None,
        has_room: bool = False,
        bad_word_ids: tuple[tuple[int, ...], ...] | None = None,
        adapter: str = "",
        images: PlacedImages | None = None,
        hints: CacheHints = NO_HINTS,
    ) -> OutputStream:
        """Queue a request and return the stream of its outputs of this ``kind``.

        ``tenant`` is charged; ``name`` is the caller's name for the request. ``arrival`` is on the monotonic clock.
        ``has_room``: :meth:`check_room` was called before. ``bad_word_ids`` come from :meth:`Prompts.encode_words`, an
        expanded prompt with ``images`` from :meth:`Prompts.lay_out_chat`. ``adapter`` names a loaded adapter. ``hints``
        are for the prefix cache. Timeouts
        (seconds after ``arrival``) replace the engine's. Raises RequestError for a request that cannot be served,
        QueueFullError when the queue is full or the forecast exceeds the timeouts, and EngineDeadError.
        """
        since, (prompt, text) = time.monotonic() if arrival is None else arrival, unnamed(prompt)
        if isinstance(prompt, str):
            prompt = await self.prompts.encode(prompt)
        if isinstance(params, SamplingParams):
            params = await self.prompts.encode_prediction(params)
            bad_word_ids = await self.prompts.encode_words(params) if bad_word_ids is None else bad_word_ids
            await self.prompts.check_grammar(params, cache_salt)
        self._ready()
        if self._inputs is None or self._outputs is None or self._client is None:
            raise EngineDeadError("the engine is not there")
        whose = cache_salt, tenant, text, bad_word_ids, self.adapters.names.id_of(adapter)
        prepared = self._inputs.prepare(uuid.uuid4().hex, prompt, params, since, *whose, images=images, hints=hints)
        num_tokens = len(prepared.prompt_token_ids)
        service_class = prepared.service.service_class
        predicted = self._predicted(prepared)
        limits = self._timeouts(queue_timeout, timeout)
        if not has_room:
            self.check_room(1, service_class, num_tokens, tenant)
        self._check_wait(prepared, predicted, limits)
        return self._begin(prepared, kind, name, predicted, limits)

    def _predicted(self, request: PreparedRequest) -> float | None:
        """Forecast of the seconds until a new request is in its first step; None if there is no forecast for it."""
        service = request.service
        return self.expected_wait(service.service_class, service.tenant) if self._is_foreseeable(request) else None

    def _check_wait(self, request: PreparedRequest, predicted: float | None, limits: _Limits) -> None:
        """Raise QueueFullError if the request would pass one of its timeouts in the queue."""
        allowed = {"queue_timeout": limits[0], "timeout": limits[1]}
        spent = time.monotonic() - request.arrival_time
        with counting_refusals(self.stats):
            self.intake.check_wait(predicted, allowed, request.service.service_class, spent)

    def _begin(
        self, prepared: PreparedRequest, kind: OutputKind, name: str, predicted: float | None, limits: _Limits
    ) -> OutputStream:
        """Send a request to the core, and return the stream of its outputs."""
        client = self._client
        outputs = self._outputs
        now = time.monotonic()
        if client is None or outputs is None:
            raise EngineDeadError("the engine is not there")
        client.add(prepared)
        try:
            state = outputs.add(prepared, stream=kind is not OutputKind.FINAL)
        except Exception:  # out of memory, for example; without the abort the core would compute unread tokens
            client.abort(prepared.sequence_ids)
            raise
        stream = OutputStream(state, kind, self.abort, name)
        self._streams[stream.request_id] = stream
        self.events.tell("began", stream)
        num_tokens = len(prepared.prompt_token_ids)
        service = prepared.service
        lane = service.tenant if self._is_foreseeable(prepared) else None
        self.intake.enter(stream.request_id, num_tokens, service.service_class, now, predicted, lane)
        for seconds, ended in zip(limits, (self._queued_too_long, self._took_too_long), strict=True):
            if seconds is not None:
                stream.set_timer(max(0.0, prepared.arrival_time + seconds - now), ended)
        _log.debug("request %s: %d prompt tokens, seed %d", stream.request_id, num_tokens, prepared.seed)
        return stream

    async def pool(
        self,
        texts: Sequence[PooledText],
        params: SamplingParams | None = None,
        *,
        tenant: str = "",
        queue_timeout: float | None = None,
        timeout: float | None = None,
        name: str = "",
        arrival: float | None = None,
    ) -> list[bytes]:
        """The vector of each text of one call, as float32 bytes. :attr:`pooling_inputs` makes the ``texts``. Each text
        is a request; of ``params``, its class of service, its priority and its deadlines count. See :meth:`submit` for
        the other arguments.

        Raises QueueFullError when the queue is full or the forecast exceeds the timeouts, QueueTimeoutError and
        OverloadedError when a timeout or a deadline passes, EngineDeadError when the engine does not run, and
        RequestError for a model that generates. After any error, the engine computes no further text of the call.
        """
        self._ready()
        if self._inputs is None or self.pooling_inputs is None:
            raise RequestError("the model generates texts; it gives no embeddings, scores or classes")
        since = time.monotonic() if arrival is None else arrival
        params = params or SamplingParams()
        prepared = [self._inputs.prepare_text(text, params, since, tenant) for text in texts]
        service_class = params.service_tier or DEFAULT_CLASS
        limits = self._timeouts(queue_timeout, timeout)
        self.check_room(len(texts), service_class, sum(len(text.token_ids) for text in texts), tenant)
        streams: list[OutputStream] = []
        try:
            for each in prepared:
                predicted = None if streams else self._predicted(each)  # the others wait longer
                self._check_wait(each, predicted, limits)
                streams.append(self._begin(each, OutputKind.FINAL, name, predicted, limits))
            return [await self._vector(stream) for stream in streams]
        finally:
            for stream in streams:
                stream.abort()

    async def _vector(self, stream: OutputStream) -> bytes:
        output = await anext(stream, None)
        if output is not None and output.vector is not None:
            return output.vector
        error = "it was ended before it was computed" if output is None else output.error
        if output is not None and output.outputs[0].finish_reason is FinishReason.DEADLINE:
            raise DeadlineError(str(error), self.retry_after())
        raise OverloadedError(f"the text has no result: {error}", self.retry_after())

    def _timeouts(self, queue: float | None, whole: float | None) -> _Limits:
        """(queue timeout, timeout) of a request in seconds. Each is the request's own value, or else the engine's
        value."""
        return self._queue_timeout if queue is None else queue, self._request_timeout if whole is None else whole

    def _is_foreseeable(self, request: PreparedRequest) -> bool:
        """Whether the forecast applies to this request. The forecast does not apply if the request's place in the queue
        is changed by a deadline, or by a priority other than that of its class. (The scheduler itself decides whether a
        deadline can be met.)"""
        service = request.service
        classes = self.service_classes
        usual = 0 if classes is None else classes[service.service_class].priority
        return request.priority == usual and not service.has_deadline

    def abort(self, request_id: str, *, error: ChairliftError | None = None) -> None:
        """End a request in any state, at once. ``error`` is the reason; None means that its caller ended the request.
        Unknown ids are ignored."""
        stream = self._streams.pop(request_id, None)
        if stream is None:
            return
        now = time.monotonic()
        cut_off = FinishReason.ERROR if error else stream.state.failure or FinishReason.ABORT
        self.events.tell("ended", stream, cut_off, now)
        self.intake.leave(request_id, now, started=False)
        stream.settle()
        if self._outputs is not None and self._client is not None and request_id in self._outputs:
            self._client.abort(self._outputs.remove(request_id, now, died=isinstance(error, EngineDeadError)))

    def paused(self, request_id: str, tools: Sequence[str]) -> None:
        """Note that the only answer of a request that has ended calls these tools. Its KV may be kept until they have
        run; see :mod:`chairlift.core.kv_cache.eviction.lease`."""
        if self._client is not None:
            names = [name[:_MAX_NAME] for name in tools[:_MAX_TOOLS]]
            self._client.paused(request_id, names)

    def _cut_off(self, streams: Sequence[OutputStream]) -> None:
        """End requests with the finish reason ABORT. Their readers get the tokens that have arrived."""
        if self._outputs is None or self._client is None:
            return
        now = time.monotonic()
        for stream in streams:
            running = [each.sequence_id for each in stream.state.answers if each.finish_reason is None]
            self._client.abort(running)
            self._finish([FinishedSequence(name, FinishReason.ABORT, error=_CUT_OFF) for name in running], now)

    async def update_weights(self, source: str | Path, version: int, *, in_flight: str = "continue") -> EngineInfo:
        """Load weights from a directory into the running engine; see
        :meth:`chairlift.async_llm.AsyncLLM.update_weights`."""
        self._ready()
        if not isinstance(source, (str, Path)):
            raise ConfigError("tensors do not cross to the engine's process; save them, and give the directory")
        if self._client is None or self.info is None:
            raise EngineDeadError("the engine is not there")
        check_update(version, self.info.weight_version, in_flight)
        return await self._client.update_weights(str(Path(source).absolute()), version, in_flight)

    async def kv_store(self, clear: str = "") -> list[StoreReport]:
        """State of the store of KV blocks, one entry per replica.

        With ``clear``, first remove the blocks of the model's namespace (``own``) or of all namespaces (``all``). Files
        that other engines write stay. Raises EngineDeadError.
        """
        self._ready()
        if self._client is None:
            raise EngineDeadError("the engine is not there")
        return await self._client.kv_store(clear)

    async def side_work(self, order: bytes) -> bytes:
        """Give an order to the work beside the engine's steps; see :mod:`chairlift.engine.process.side_work`. Raises
        ConfigError if the engine does no other work, and EngineDeadError."""
        self._ready()
        if self._client is None:
            raise EngineDeadError("the engine is not there")
        return await self._client.side_work(order)

    async def shutdown(self) -> None:
        """End the engine's process. Unfinished requests fail with EngineDeadError."""
        self.state = EngineState.STOPPED
        self.failure = self.failure or "it was shut down"
        self.stopped.set()
        if self._keeper is not None:
            self._keeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._keeper
        if self._client is not None:
            await self._client.close()
        self._fail_all()
        await self.prompts.close()
        if not self._first_outcome.done():
            self._first_outcome.cancel()

    # -- the engine's process --------------------------------------------------------------------------------------

    def delivered(self, request_id: str) -> list[list[int]]:
        """Token ids of each answer of an unfinished request that have arrived so far; empty for an unknown request."""
        return [] if self._outputs is None else self._outputs.delivered(request_id)

    def on_lost(self, request_ids: Sequence[str], why: str) -> None:
        """End requests whose replica has died. Requests of other replicas continue."""
        self.stats.num_lost += len(request_ids)
        for request_id in request_ids:
            self._fail(request_id, EngineDeadError(f"the replica died with the request in it: {why}", taken=True))

    def on_moved(self, kind: str) -> None:
        """Count a move of a running request to another replica: ``kv``, ``replay``, or ``failed``."""
        self.stats.moves[kind] += 1

    def on_progress(self, label: str, share: float) -> None:
        if self._on_progress is not None and self.state is not EngineState.READY:
            self._on_progress(label, share)

    def on_refused(self, refused: Refused) -> None:
        kind = PromptTooLongError if refused.too_long else RequestError
        failed = OverloadedError(refused.message, self.retry_after())
        self._fail(refused.request_id, failed if refused.failed else kind(refused.message))

    def on_watched(self, lines: bytes, replica: int = 0) -> None:
        """Pass on lines from the step recorder of a replica, counted from 0."""
        self.events.tell("steps", lines, replica)

    def on_updated(self, info: EngineInfo) -> None:
        """Note that the weights were replaced: all later steps use the new weights."""
        if self.info is not None and self._outputs is not None:
            self._outputs.weights_changed(info.weight_version)
            self.info = dataclasses.replace(info, eos_token_ids=self.info.eos_token_ids)

    def on_resized(self, info: EngineInfo) -> None:
        """Note that the number of replicas has changed. ``info`` describes all replicas together."""
        if self.info is not None:
            self.info = dataclasses.replace(info, eos_token_ids=self.info.eos_token_ids)

    def latency_targets(self) -> tuple[int, int]:
        """(Number of ended requests that had latency targets, number of those that met them)."""
        return self.stats.with_deadline.total(), self.stats.within_deadline.total()

    def on_weights(self, sequence_ids: Sequence[str], version: int) -> None:
        """Note that all later tokens of these sequences come from version ``version`` of the weights."""
        if self._outputs is not None:
            self._outputs.weights_of(sequence_ids, version)

    def on_adapter(self, state: AdapterState) -> None:
        """Handle the result of loading an adapter."""
        self.adapters.reported(state)

    def on_step(self, step: Step, replica: int | None = None) -> None:
        """Deliver the results of a step to the streams of its requests. ``replica`` is the index of the replica that
        computed the step; None if the engine is a single process, or if no step was computed."""
        self.intake.heard(now := time.monotonic(), busy=self.stats.engine.num_running > 0)
        self.stats.step(step.stats)
        outputs = self._outputs
        if outputs is None:
            return
        core = step.outputs
        counted = self.stats.tokens_counted()
        stopped = outputs.take(core, now)
        if replica is not None:
            self.stats.credit(replica, counted)
        for sequence_id, _, when in core.joined:
            state = outputs.state_of(sequence_id)
            if state is not None:
                self.intake.leave(state.request_id, when, started=True)
        if step.forecast is not None:
            self.intake.foreseen(step.forecast)
        finished = core.finished
        holds_batch = self.info is not None and self.info.held
        if stopped and self._client is not None:
            self._client.stop(stopped)
            if not holds_batch:  # in a static batch, requests that have ended wait until the core ends the batch
                finished = finished + [FinishedSequence(sequence_id, FinishReason.STOP) for sequence_id in stopped]
        growing = outputs.touched(core.sequence_ids)
        growing += self._finish(finished, now)
        for state in [] if holds_batch else growing:
            stream = self._streams.get(state.request_id)
            if stream is not None and state.stream:
                stream.wake()

    def _finish(self, finished: Sequence[FinishedSequence], now: float) -> list[RequestState]:
        """Close sequences that have ended, and settle their requests. Returns the requests that have other answers."""
        if self._outputs is None:
            return []
        states = self._outputs.finish(finished, now)
        for state in states:
            if state.finished:
                self._settle(state.request_id, now)
        for state, sequence_ids in self._outputs.take_broken():
            if self._client is not None:
                self._client.abort(sequence_ids)
            self._settle(state.request_id, now)
        return [state for state in states if not state.finished]

    def _settle(self, request_id: str, now: float) -> None:
        """Remove a request whose answers have all ended. Its stream still delivers the remaining output."""
        stream = self._streams.pop(request_id, None)
        self.intake.leave(request_id, now, started=False)
        if stream is not None:
            self.events.tell("ended", stream, None, now)
            stream.settle()
            stream.wake()

    def _fail(self, request_id: str, error: ChairliftError) -> None:
        stream = self._streams.get(request_id)
        self.abort(request_id, error=error)
        if stream is not None:
            stream.fail(error)

    def _fail_all(self) -> None:
        why = f"the engine died with the request in it: {self.failure}"
        for stream in list(self._streams.values()):
            self._fail(stream.request_id, EngineDeadError(why, taken=True))
        self.adapters.fail_all(lambda: EngineDeadError(why))
        self.intake.clear()

    def _queued_too_long(self, request_id: str) -> None:
        if request_id in self.intake:
            self.stats.rejected["queue_timeout"] += 1
            stream = self._streams.get(request_id)
            whose = () if stream is None else (stream.service_class, stream.tenant)
            retry = self.intake.retry_after(time.monotonic(), *whose)
            self._fail(request_id, QueueTimeoutError("the request was not started within its queue_timeout", retry))

    def _took_too_long(self, request_id: str) -> None:
        self._fail(request_id, OverloadedError("the request was not finished in time", self.retry_after()))

    def _ready(self) -> AsyncEngine:
        if self.state is not EngineState.READY:
            raise EngineDeadError(f"the engine is {self.state}" + (f": {self.failure}" if self.failure else ""))
        return self

    async def _keep_alive(self) -> None:
        """Start the engine's process, and start a new one whenever it dies."""
        pause = _FIRST_PAUSE
        while True:
            started = time.monotonic()
            loaded = False
            self._client = client = self._connect(self)
            try:
                await self._prepare(await client.start())
                loaded = True
                if not self._first_outcome.done():
                    self._first_outcome.set_result(None)
                self.failure = await client.died()
            except asyncio.CancelledError:
                await client.close()
                raise
            except Exception as error:
                self.failure = str(error) or type(error).__name__
                await client.close()
                if not self._first_outcome.done():
                    self.state = EngineState.STOPPED
                    self.stopped.set()
                    self._first_outcome.set_exception(error)
                    return
            self.state = EngineState.DOWN
            self.stats.engine_died(self.num_requests, client.replicas.stats())
            self._fail_all()
            if not self._restart:
                _log.error("%s", self.failure)
                self.state = EngineState.STOPPED
                self.stopped.set()
                return
            if loaded and time.monotonic() - started > _SETTLED_SECONDS:
                pause = _FIRST_PAUSE
            _log.error("%s; starting it again in %.1f s", self.failure, pause)
            await asyncio.sleep(pause)
            pause = min(_LONGEST_PAUSE, 2 * pause)
            self.stats.num_restarts += 1

    async def _prepare(self, info: EngineInfo) -> None:
        """Prepare the process of the event loop for a model that the engine has loaded. A restarted engine loads the
        newest weights and the adapters again."""
        if self.info is not None and self.info.weights and self._client is not None:
            info = await self._client.update_weights(self.info.weights, self.info.weight_version, "continue")
        if self._client is not None:
            self.adapters.load_again(self._client)
            await self.generation.restored(self._client)
        if self.info is None:
            # The queue for tokenization has room for the maximum number of queued and running requests.
            await self.prompts.start(info, self.intake.max_requests + self.config.scheduler.max_num_seqs)
            warnings = [*idle_settings(self.config, info), *info.notes]
            if info.pooling is None and (problem := info.too_much_reserved(self.service_classes)):
                warnings.append(problem)
            for each in warnings:
                _log.warning("%s", each)
        tokenizer = self.prompts.tokenizer
        eos = set(info.eos_token_ids) | set(tokenizer.eos_token_ids if tokenizer else ())
        self.info = info = dataclasses.replace(info, eos_token_ids=tuple(sorted(eos)))
        limits = ModelLimits(
            info.vocab_size, info.max_model_len, info.eos_token_ids, self.service_classes, info.shortest_prompt
        )
        self.pooling_inputs = PoolingInputs(info, tokenizer) if info.pooling else None
        reader = self.prompts.image_processor
        self._inputs = InputProcessor(limits, tokenizer, info, self.config.model.seed, reader)
        self._outputs = OutputProcessor(tokenizer, info.eos_token_ids, self.stats)
        self._outputs.weights_changed(info.weight_version)
        self.failure = ""
        self.state = EngineState.READY
        if self._follows and self._client is not None:
            self._client.watch(True)
