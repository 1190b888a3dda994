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
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from chairlift.base.lora_request import LoRARequest
from chairlift.base.outputs import FinishReason, OutputKind
from chairlift.base.sampling_params import SamplingParams
from chairlift.base.service_class import DEFAULT_CLASS
from chairlift.config import EngineConfig
from chairlift.core.scheduler.prompt_share import PromptShare
from chairlift.engine.adapter_names import AdapterEntry, AdapterNames
from chairlift.engine.adapters import AdapterState
from chairlift.engine.calibration import Calibration
from chairlift.engine.core_outputs import FinishedSequence
from chairlift.engine.events import Events
from chairlift.engine.idle_settings import idle_settings
from chairlift.engine.info import EngineInfo, check_update
from chairlift.engine.input_processor import InputProcessor, ModelLimits, PreparedRequest, Prompt, unnamed
from chairlift.engine.intake import Intake, Place
from chairlift.engine.output_processor import OutputProcessor
from chairlift.engine.output_stream import OutputStream
from chairlift.engine.pooled.pooled_requests import PooledRequests
from chairlift.engine.pooled.pooling_core import PooledText
from chairlift.engine.pooled.pooling_inputs import PoolingInputs
from chairlift.engine.process.messages import PassBegun, Pooled, Refused, Step
from chairlift.engine.process.process_client import ProcessClient, RemoteCore
from chairlift.errors import (
    ChairliftError,
    ConfigError,
    EngineDeadError,
    ModelLoadError,
    OverloadedError,
    PromptTooLongError,
    QueueFullError,
    QueueTimeoutError,
    RequestError,
)
from chairlift.metrics.stats import AutoscalingStats, ReplicaCounts, ReplicaStats, RequestStats
from chairlift.models.vision.addresses import MediaSource
from chairlift.models.vision.chats import GivenImage, take_images
from chairlift.models.vision.image_reader import ImageReader
from chairlift.models.vision.processor import ImageProcessor, PlacedImages
from chairlift.text.grammar.checker import GrammarChecker
from chairlift.text.tokenizer.encoder import PromptEncoder
from chairlift.text.tokenizer.tokenizer import Tokenizer

__all__ = ["AsyncEngine", "EngineState"]

_log = logging.getLogger(__name__)

_T = TypeVar("_T")
Progress = Callable[[str, float], None]
Connect = Callable[["AsyncEngine"], RemoteCore]
"""Function that makes the core of an engine. The core sends its events to that engine."""
ReadTokenizer = Callable[[EngineConfig, str], Tokenizer]
ReadImages = Callable[[str, Tokenizer], ImageProcessor | None]

_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 30.0
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
        self.config, scheduler = config, config.scheduler
        self._connect = connect or (lambda events: ProcessClient(config.to_flat(), events))
        self._prompt_share = PromptShare(scheduler.open_policy_share)
        self.service_classes = scheduler.promises
        """Class of service -> its guarantees; None if the scheduling policy ignores classes."""
        self.state = EngineState.LOADING
        self.failure = ""
        """Reason why the engine is down or stopped."""
        self.info: EngineInfo | None = None
        self.tokenizer: Tokenizer | None = None
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
        self._read_images = read_images
        self._images: ImageReader | None = None
        self._read_tokenizer, self._chat_template = read_tokenizer, chat_template
        self._on_progress, self._restart = on_progress, restart
        self._queue_timeout, self._request_timeout = queue_timeout, request_timeout
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
        self._encoder: PromptEncoder | None = None
        self._grammars: GrammarChecker | None = None
        self._streams: dict[str, OutputStream] = {}
        self.adapters = AdapterNames()
        """Adapters that requests may name."""
        self._loads: dict[int, tuple[str, asyncio.Future[AdapterState]]] = {}
        """``adapter_id`` of an adapter that is being loaded -> (its name, future of the load's result)."""
        self._pooled = PooledRequests(self.intake, self.stats)
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
        return len(self._streams) + len(self._pooled)

    @property
    def num_queued(self) -> int:
        """Number of unfinished requests that have not been in any step."""
        return len(self.intake)

    @property
    def engine_pid(self) -> int | None:
        """Process id of the engine's process; None if it has none."""
        return None if self._client is None else self._client.pid

    def replicas(self) -> list[ReplicaStats]:
        """State of each replica; empty if the engine is a single process."""
        return [] if self._client is None else self._client.shown()

    def replica_counts(self) -> dict[int, ReplicaCounts]:
        """Index -> state and counters of each replica; empty if the engine is a single process."""
        return self.stats.of_replicas({} if self._client is None else self._client.replica_stats())

    def autoscaling(self) -> AutoscalingStats | None:
        """State of autoscaling; None if the number of replicas is fixed."""
        return None if self._client is None else self._client.autoscaling()

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
        with self._refusing():
            self.intake.check(time.monotonic(), num_requests, num_tokens, service_class, tenant)

    # -- requests --------------------------------------------------------------------------------------------------

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Raises RequestError, and PromptTooLongError for a text that is much longer than the
        model allows."""
        with self._front() as encoder:
            return await encoder.encode(text, add_special_tokens)

    async def encode_all(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of each text of one call.

        Raises RequestError, QueueFullError if too many texts wait for the tokenizer, and PromptTooLongError if one
        text, or all texts together, are much longer than the model allows.
        """
        with self._front() as encoder:
            return await encoder.encode_all(texts, add_special_tokens)

    async def encode_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Token ids of each of the ``bad_words``, as an argument for :meth:`submit`. Raises the errors of
        :meth:`encode_all`."""
        with self._front() as encoder:
            return await encoder.encode_words(params.bad_words or ())

    async def encode_prediction(self, params: SamplingParams) -> SamplingParams:
        """``params`` with its ``prediction`` converted to token ids. Raises the errors of :meth:`encode`."""
        if not isinstance(params.prediction, str):
            return params
        return dataclasses.replace(params, prediction=await self.encode(params.prediction, add_special_tokens=False))

    @property
    def chat_template(self) -> str | None:
        """Template that formats conversations: the one from the settings, otherwise the model's own."""
        own = None if self.tokenizer is None else self.tokenizer.chat_template
        return own if self._chat_template is None else self._chat_template

    async def check_grammar(self, params: SamplingParams, cache_salt: str = "") -> None:
        """Check that the grammar in ``params``, if it has one, compiles. Only callers with the same ``cache_salt``
        share what was found.

        Raises RequestError for a bad grammar, QueueFullError if too many grammars wait for this check, and
        OverloadedError if the check fails for lack of resources.
        """
        self._ready()
        if params.structured_outputs is None:
            return
        if self._grammars is None:
            raise RequestError("structured_outputs needs the tokenizer, which was not loaded; leave it out")
        with self._refusing():
            await self._grammars.check(params.structured_outputs.value, cache_salt)

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> list[int]:
        """Token ids of a conversation, formatted by the chat template. Raises RequestError and TemplateError."""
        how: dict[str, Any] = {"add_generation_prompt": add_generation_prompt, "tools": tools, **variables}
        laid_out, _ = await self.lay_out_chat(messages, continue_final_message=continue_final_message, **how)
        return laid_out

    async def lay_out_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> tuple[list[int], PlacedImages | None]:
        """(token ids of a conversation, its images or None), as arguments for :meth:`submit`. Raises RequestError and
        TemplateError."""
        given_images: list[GivenImage] = []
        if self._images is not None:
            messages, given_images = take_images(messages)
        how = add_generation_prompt, continue_final_message, variables, tools, bool(given_images)
        with self._front() as encoder:
            token_ids = await encoder.encode_chat(messages, *how)
            if not given_images or self._images is None:
                return token_ids, None
            return await self._images.place(token_ids, given_images, encoder.beside)

    async def fetch_images(self, messages: list[dict[str, Any]], source: MediaSource) -> list[dict[str, Any]]:
        """``messages`` in which the images at addresses that ``source`` reads are prepared. Raises RequestError."""
        with self._front():
            return messages if self._images is None else await self._images.fetch(messages, source)

    async def beside(self, work: Callable[[], _T]) -> _T:
        """Run ``work`` in another thread and return its result. Long texts are processed one after another. Raises
        QueueFullError."""
        with self._front() as encoder:
            return await encoder.beside(work)

    @contextlib.contextmanager
    def _front(self) -> Iterator[PromptEncoder]:
        if (encoder := self._ready()._encoder) is None:
            raise EngineDeadError("the engine is not there")
        with self._refusing():
            yield encoder

    @contextlib.contextmanager
    def _refusing(self) -> Iterator[None]:
        """Count the QueueFullError of a refused request in the statistics."""
        try:
            yield
        except QueueFullError as full:
            self.stats.rejected["forecast" if full.kind == "forecast" else f"queue_{full.kind}"] += 1
            raise

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
    ) -> OutputStream:
        """Queue a request and return the stream of its outputs of this ``kind``.

        ``tenant`` is charged; ``name`` is the caller's name for the request. ``arrival`` is on the monotonic clock.
        ``has_room``: :meth:`check_room` was called before. ``bad_word_ids`` come from :meth:`encode_words`, an expanded
        prompt with ``images`` from :meth:`lay_out_chat`. ``adapter`` names a loaded adapter. Timeouts (seconds after
        ``arrival``) replace the engine's. Raises RequestError for a request that cannot be served, QueueFullError when
        the queue is full or the forecast exceeds the timeouts, and EngineDeadError.
        """
        since, (prompt, text) = time.monotonic() if arrival is None else arrival, unnamed(prompt)
        if isinstance(prompt, str):
            prompt = await self.encode(prompt)
        if isinstance(params, SamplingParams):
            params = await self.encode_prediction(params)
            bad_word_ids = await self.encode_words(params) if bad_word_ids is None else bad_word_ids
            await self.check_grammar(params, cache_salt)
        self._ready()
        if self._inputs is None or self._outputs is None or self._client is None:
            raise EngineDeadError("the engine is not there")
        whose = cache_salt, tenant, text, bad_word_ids, self.adapters.id_of(adapter)
        prepared = self._inputs.prepare(uuid.uuid4().hex, prompt, params, since, *whose, images=images)
        num_tokens, service_class = len(prepared.prompt_token_ids), prepared.service.service_class
        foreseeable, now = self._is_foreseeable(prepared), time.monotonic()
        patience, limit = self._timeouts(queue_timeout, timeout)
        predicted = self.expected_wait(service_class, tenant) if foreseeable else None
        if not has_room:
            self.check_room(1, service_class, num_tokens, tenant)
        with self._refusing():
            self.intake.check_wait(predicted, {"queue_timeout": patience, "timeout": limit}, service_class, now - since)
        self._client.add(prepared)
        try:
            state = self._outputs.add(prepared, stream=kind is not OutputKind.FINAL)
        except Exception:  # out of memory, for example; without the abort the core would compute unread tokens
            self._client.abort(prepared.sequence_ids)
            raise
        stream = OutputStream(state, kind, self.abort, name)
        self._streams[stream.request_id] = stream
        self.events.tell("began", stream)
        self.intake.enter(stream.request_id, num_tokens, service_class, now, predicted, tenant if foreseeable else None)
        for seconds, ended in ((patience, self._queued_too_long), (limit, self._took_too_long)):
            if seconds is not None:
                stream.set_timer(max(0.0, since + seconds - now), ended)
        _log.debug("request %s: %d prompt tokens, seed %d", stream.request_id, num_tokens, prepared.seed)
        return stream

    async def pool(
        self,
        texts: Sequence[PooledText],
        *,
        queue_timeout: float | None = None,
        timeout: float | None = None,
        arrival: float | None = None,
    ) -> list[bytes]:
        """The vector of each text of one call, as float32 bytes. :attr:`pooling_inputs` makes the ``texts``. See
        :meth:`submit` for the timeouts.

        Raises QueueFullError when the queue is full, QueueTimeoutError and OverloadedError when a timeout passes,
        EngineDeadError when the engine does not run, and RequestError for a model that generates.
        """
        self._ready()
        if self._client is None or self.pooling_inputs is None:
            raise RequestError("the model generates texts; it gives no embeddings, scores or classes")
        self.check_room(len(texts), num_tokens=sum(len(text.token_ids) for text in texts))
        return await self._pooled.ask(
            texts,
            self._client,
            since=time.monotonic() if arrival is None else arrival,
            patience=self._queue_timeout if queue_timeout is None else queue_timeout,
            limit=self._request_timeout if timeout is None else timeout,
        )

    def _timeouts(self, queue: float | None, whole: float | None) -> tuple[float | None, float | None]:
        """(queue timeout, timeout) of a request in seconds. Each is the request's own value, or else the engine's
        value."""
        return self._queue_timeout if queue is None else queue, self._request_timeout if whole is None else whole

    def _is_foreseeable(self, request: PreparedRequest) -> bool:
        """Whether the forecast applies to this request. The forecast does not apply if the request's place in the queue
        is changed by a deadline, or by a priority other than that of its class. (The scheduler itself decides whether a
        deadline can be met.)"""
        service, classes = request.service, self.service_classes
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

    async def restart_replicas(self, patience: float) -> None:
        """Restart all replicas, one after another, while the other replicas serve. Each replica first finishes its
        requests, for at most ``patience`` seconds. Raises ConfigError unless two replicas are alive, EngineDeadError if
        the engine does not run."""
        self._ready()
        if self._client is not None:
            await self._client.roll(patience)

    async def load_adapter(
        self, name: str, path: str | Path, *, root: str | None = None, in_place: bool = False, int_id: int = 0
    ) -> None:
        """Load the adapter in the directory ``path``, so that requests may name it. If ``root`` is given, all files
        must be inside ``root`` after links are followed.

        ``in_place`` replaces the loaded adapter of the same name; running requests keep the old adapter. Raises
        RequestError for a name that is in use, ModelLoadError for an adapter that cannot be read, ConfigError if no
        adapters are served, and EngineDeadError.
        """
        self._ready()
        if not self.config.lora.enable_lora or self._client is None:
            raise ConfigError("adapters are not served; start with enable_lora")
        request = LoRARequest(name, int_id or 1, path)
        if any(name == loading for loading, _ in self._loads.values()) or (name in self.adapters and not in_place):
            raise RequestError(
                f"the adapter {request.lora_name!r} is loaded already, or about to be; give load_inplace to replace it,"
                " or another name"
            )
        load = self.adapters.next_load(name, str(path), root)
        loaded: asyncio.Future[AdapterState] = asyncio.get_running_loop().create_future()
        self._loads[load.adapter_id] = name, loaded
        self._client.load_adapter(load)
        try:
            state = await loaded
        except BaseException:  # the caller has left, so no request will use the adapter
            self._client.unload_adapter(load.adapter_id)
            raise
        finally:
            del self._loads[load.adapter_id]
        if state.error:
            raise ModelLoadError(state.error)
        before = self.adapters.add(AdapterEntry(load, int_id))
        if before is not None:
            self._client.unload_adapter(before.load.adapter_id)

    def remove_lora(self, int_id: int) -> bool:
        """Call :meth:`unload_adapter` for the adapter to which a caller gave this number."""
        entry = self.adapters.with_int_id(int_id)
        return entry is not None and self.unload_adapter(entry.name)

    def unload_adapter(self, name: str) -> bool:
        """Refuse new requests for an adapter at once. Running requests keep the adapter; it leaves memory after the
        last of them. Returns False if no adapter has this name."""
        entry = self.adapters.remove(name)
        if entry is not None and self._client is not None:
            self._client.unload_adapter(entry.load.adapter_id)
        return entry is not None

    async def adapter_of(self, lora_request: LoRARequest | None) -> str:
        """Name of the adapter of a request, which is loaded first if necessary; empty if ``lora_request`` is None.

        Raises the errors of :meth:`load_adapter`.
        """
        if lora_request is None:
            return ""
        if not isinstance(lora_request, LoRARequest):
            raise RequestError(f"lora_request must be a LoRARequest, got {type(lora_request).__name__}")
        while self.adapters.find(lora_request) is None:
            others = [future for name, future in self._loads.values() if name == lora_request.lora_name]
            if others:
                await asyncio.wait(others)
                await asyncio.sleep(0)  # let the task that loaded it register the name
                continue
            await self.load_adapter(lora_request.lora_name, lora_request.lora_path, int_id=lora_request.lora_int_id)
        return lora_request.lora_name

    async def shutdown(self) -> None:
        """End the engine's process. Unfinished requests fail with EngineDeadError."""
        self.state, self.failure = EngineState.STOPPED, self.failure or "it was shut down"
        self.stopped.set()
        if self._keeper is not None:
            self._keeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._keeper
        if self._client is not None:
            await self._client.close()
        self._fail_all()
        if self._encoder is not None:
            await self._encoder.close()
        if self._images is not None:
            await self._images.close()
        if self._grammars is not None:
            await self._grammars.close()
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

    def on_progress(self, label: str, share: float) -> None:
        if self._on_progress is not None and self.state is not EngineState.READY:
            self._on_progress(label, share)

    def on_refused(self, refused: Refused) -> None:
        kind = PromptTooLongError if refused.too_long else RequestError
        failed = OverloadedError(refused.message, self.retry_after())
        self._fail(refused.request_id, failed if refused.failed else kind(refused.message))

    def on_pooled(self, message: PassBegun | Pooled) -> None:
        """Note that a forward pass over texts has begun or ended."""
        if isinstance(message, PassBegun):
            self._pooled.begun(message)
        else:
            self._pooled.pooled(message)

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
        waiting = self._loads.get(state.adapter_id)
        if waiting is not None:
            if not waiting[1].done():
                waiting[1].set_result(state)
            return
        for entry in self.adapters:  # no caller waits: a restarted process loads its adapters again
            if state.error and entry.load.adapter_id == state.adapter_id:
                _log.error("the adapter %r could not be loaded again: %s", entry.name, state.error)
                self.adapters.remove(entry.name)

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
        finished, holds_batch = core.finished, self.info is not None and self.info.held
        if stopped and self._client is not None:
            self._client.stop(stopped)
            if not holds_batch:  # in a static batch, requests that have ended wait until the core ends the batch
                finished = finished + [FinishedSequence(sequence_id, FinishReason.STOP) for sequence_id in stopped]
        growing = [] if holds_batch else outputs.touched(core.sequence_ids)
        for state in outputs.finish(finished, now):
            if state.finished:
                self._settle(state.request_id, now)
            elif not holds_batch:
                growing.append(state)
        for state in growing:
            stream = self._streams.get(state.request_id)
            if stream is not None and state.stream:
                stream.wake()
        for state, sequence_ids in outputs.take_broken():
            if self._client is not None:
                self._client.abort(sequence_ids)
            self._settle(state.request_id, now)

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
        self._pooled.fail_all(EngineDeadError(why, taken=True))
        for _, loaded in self._loads.values():
            if not loaded.done():
                loaded.set_exception(EngineDeadError(why))
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
            started, loaded = time.monotonic(), False
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
            self.stats.engine_died(self.num_requests, client.replica_stats())
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
            for entry in self.adapters:
                self._client.load_adapter(entry.load)
        if self.info is None:
            if not self.config.model.skip_tokenizer_init:
                self.tokenizer = self._read_tokenizer(self.config, info.model_dir)
            # The queue for tokenization has room for the maximum number of queued and running requests.
            max_texts = self.intake.max_requests + self.config.scheduler.max_num_seqs
            chats = info.pooling is None
            if self.tokenizer is not None and self._read_images is not None and info.takes_images:
                reads = self._read_images(info.model_dir, self.tokenizer)
                self._images = None if reads is None else ImageReader(reads, info.max_model_len, max_texts)
            if self._images is not None:
                await self._images.start()
            self._encoder = PromptEncoder(
                self.tokenizer,
                info.max_model_len,
                max_texts,
                self._chat_template,
                chats=chats,
                plain_text_messages=self.config.model.plain_text_messages,
            )
            await self._encoder.start()
            if self.tokenizer is not None:
                self._grammars = GrammarChecker(self.tokenizer, info.vocab_size, max_texts)
            problem = info.too_much_reserved(self.service_classes)
            for each in [*idle_settings(self.config, info), *info.notes, *([problem] if problem and chats else [])]:
                _log.warning("%s", each)
        eos = set(info.eos_token_ids) | set(self.tokenizer.eos_token_ids if self.tokenizer else ())
        self.info = info = dataclasses.replace(info, eos_token_ids=tuple(sorted(eos)))
        limits = ModelLimits(info.vocab_size, info.max_model_len, info.eos_token_ids, self.service_classes)
        self.pooling_inputs = PoolingInputs(info, self.tokenizer) if info.pooling else None
        reader = None if self._images is None else self._images.processor
        self._inputs = InputProcessor(limits, self.tokenizer, info, self.config.model.seed, reader)
        self._outputs = OutputProcessor(self.tokenizer, info.eos_token_ids, self.stats)
        self._outputs.weights_changed(info.weight_version)
        self.failure = ""
        self.state = EngineState.READY
        if self._follows and self._client is not None:
            self._client.watch(True)
