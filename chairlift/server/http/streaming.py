"""Turns the engine's streams into responses: whole responses, or server-sent events.

A stream has these events: one chunk per choice with the role (chat only), chunks with new output, one chunk per choice
with its ``finish_reason``, one chunk with the usage and no choices if requested, and ``[DONE]``. An error ends the
stream with an error object, without ``[DONE]``. (/v1/responses and /v1/messages have other events.) The HTTP status is
sent with the first output. So an error before that point still gets its own status.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

import msgspec
from msgspec import UNSET, UnsetType
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from chairlift.base.cache_hints import CacheHints
from chairlift.base.outputs import CompletionOutput, FinishReason, Logprob, OutputKind, RequestOutput
from chairlift.base.sampling_params import SamplingParams, is_of_the_caller
from chairlift.engine.info import EngineInfo
from chairlift.engine.output_stream import OutputStream
from chairlift.errors import EngineDeadError, RequestError
from chairlift.models.vision.processor import PlacedImages
from chairlift.server.caching.breakpoints import Leases, written
from chairlift.server.http.auth import Caller, salt_for
from chairlift.server.http.errors import ApiError, error_body, to_api_error
from chairlift.server.http.pieces import Pieces, json_items
from chairlift.server.http.state import ServerState
from chairlift.server.openai.promises import class_of
from chairlift.server.openai.protocol import GenerationRequest, StreamOptions
from chairlift.server.openai.structured import naming
from chairlift.text.tokenizer.tokenizer import Tokenizer

__all__ = [
    "ChunkWriter",
    "CompletionTokensDetails",
    "EventStream",
    "Meter",
    "PromptLogprob",
    "PromptLogprobs",
    "PromptTokensDetails",
    "StreamWriter",
    "Timing",
    "TokenTexts",
    "Usage",
    "abort_all",
    "collect",
    "finite",
    "in_pieces",
    "json_response",
    "merge",
    "on_thread_if_long",
    "parts",
    "prompt_logprobs",
    "refuse_aborted",
    "reply_head",
    "start_stream",
    "submit_all",
    "timing",
    "tokens_at_once",
    "truncate",
]

_encode: Final = msgspec.json.encode
_LOWEST_LOGPROB: Final = -9999.0
"""Log-probability that is sent instead of minus infinity, which JSON cannot represent."""
_PIECE: Final = 1 << 16
"""Approximate maximum number of bytes that are sent at a time."""
_PING_SECONDS: Final = 4.0
"""Seconds of silence after which a stream that holds text back sends a ping. The engine's next output decides, so
pings come within 5 s."""
_MAX_ON_LOOP: Final = 512
"""Number of tokens above which a list of tokens is decoded on a thread, so that other streams are not delayed."""

_T = TypeVar("_T")


class PromptTokensDetails(msgspec.Struct):
    """Number of cached prompt tokens, a part of :class:`Usage`."""

    cached_tokens: int
    """Prompt tokens read from the prefix cache."""
    cache_write_tokens: int | UnsetType = UNSET
    """Computed tokens before a breakpoint. Missing if the request asks for no lease."""


class CompletionTokensDetails(msgspec.Struct):
    """Details of the output tokens, a part of :class:`Usage`."""

    reasoning_tokens: int | UnsetType = UNSET
    """Number of reasoning tokens in the outputs, including the marks. Missing if reasoning is not separated."""
    accepted_prediction_tokens: int | UnsetType = UNSET
    """Draft tokens from ``prediction`` that the model confirmed. Present if the request has a ``prediction``."""
    rejected_prediction_tokens: int | UnsetType = UNSET
    """Draft tokens from ``prediction`` that the model rejected. Present if the request has a ``prediction``."""


class Usage(msgspec.Struct):
    """Numbers of input and output tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET
    """Present if reasoning is separated from the content, or if the request has a ``prediction``."""


class Timing(msgspec.Struct, omit_defaults=True):
    """Time from a request's arrival to its end, divided by cause."""

    queue_ms: float
    """Milliseconds from the request's arrival to its first step."""
    causes_ms: dict[str, float]
    """Cause of waiting or computing -> milliseconds; docs/why-slow.md explains the causes."""
    preempted_by: list[str]
    """Engine ids of requests that preempted this request. Only the latest are listed."""
    pause_ms: float | None = None
    """For the first turn after tools were called: milliseconds from the end of the turn that called them to the arrival
    of this request. Absent for other requests."""
    turn_cache: str = ""
    """What this turn found of its conversation's cache: ``kept``, or why a part of it was evicted. Absent for other
    requests."""


class PromptLogprob(msgspec.Struct):
    """Log-probability of a token in the prompt."""

    logprob: float
    rank: int | None
    decoded_token: str | None


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""One entry per prompt token: token id (as text) -> log-probability. The first entry is null, because no token
precedes it."""


class Meter:
    """Counts the tokens of one HTTP request, summed over all its prompts."""

    def __init__(self, streams: Sequence[OutputStream], *, predicted: bool = False) -> None:
        self._prompt_tokens = sum(len(stream.prompt_token_ids) for stream in streams)
        self._cached = [0] * len(streams)
        self._leases = [stream.leases for stream in streams]
        self._completion_tokens = 0
        self._predicted: dict[tuple[int, int], tuple[int, int]] | None = {} if predicted else None
        """(prompt index, output index) -> (accepted, rejected) draft tokens from ``prediction``. None if the request
        has no ``prediction``."""
        self.reasoning_tokens: int | None = None
        """Number of reasoning tokens over all outputs; None if reasoning is not separated."""

    def note(self, prompt: int, output: RequestOutput) -> None:
        """Count the tokens of ``output``, which is about to be sent."""
        self._cached[prompt] = output.num_cached_tokens
        for answer in output.outputs:
            self._completion_tokens += len(answer.token_ids)
            if self._predicted is not None:
                counts = answer.accepted_prediction_tokens, answer.rejected_prediction_tokens
                self._predicted[prompt, answer.index] = counts

    def written(self) -> dict[float, int] | None:
        """Seconds -> number of computed tokens that are kept for so long; None if the request asks for no lease."""
        if not any(self._leases):
            return None
        found: dict[float, int] = {}
        for leases, cached in zip(self._leases, self._cached, strict=True):
            for seconds, count in written(leases, cached).items():
                found[seconds] = found.get(seconds, 0) + count
        return found

    def usage(self) -> Usage:
        read = self._prompt_tokens
        generated = self._completion_tokens
        details: CompletionTokensDetails | UnsetType = UNSET
        if self.reasoning_tokens is not None or self._predicted is not None:
            details = CompletionTokensDetails()
        if details is not UNSET and self.reasoning_tokens is not None:
            details.reasoning_tokens = self.reasoning_tokens
        if details is not UNSET and self._predicted is not None:
            details.accepted_prediction_tokens = sum(right for right, _ in self._predicted.values())
            details.rejected_prediction_tokens = sum(wrong for _, wrong in self._predicted.values())
        of_prompt = PromptTokensDetails(sum(self._cached))
        if (kept := self.written()) is not None:
            of_prompt.cache_write_tokens = sum(kept.values())
        return Usage(read, generated, read + generated, of_prompt, details)


# --- the engine's side ------------------------------------------------------------------------------------------------


async def on_thread_if_long(state: ServerState, size: int, work: Callable[[], _T]) -> _T:
    """Run ``work``, which processes ``size`` tokens, and return its result. For many tokens it runs on a thread. Raises
    QueueFullError."""
    return await state.engine.prompts.beside(work) if size > _MAX_ON_LOOP else work()


def truncate(
    prompt: list[int], keep: int | None, info: EngineInfo, max_tokens: int | None, added: tuple[int, int] = (0, 0)
) -> list[int]:
    """The last tokens of a prompt, so that ``keep`` tokens remain. Special tokens that the tokenizer ``added`` (number
    before, number after) are kept and counted.

    -1 keeps the largest number that leaves room for the output; None keeps all. Raises ApiError if ``keep`` is less
    than the number of added tokens.
    """
    if keep == -1:
        keep = max(1, min(info.max_model_len, info.capacity_tokens + 1) - (1 if max_tokens is None else max_tokens))
    if keep is None or keep >= len(prompt):
        return prompt
    before, behind = added
    if keep < max(1, before + behind):
        own = before + behind
        reason = f"the tokenizer adds {own}, which are kept" if own else "a prompt has at least 1"
        message = f"truncate_prompt_tokens keeps {keep} tokens, but {reason}; raise it, or leave it out"
        raise ApiError(400, message, code="invalid_value", param="truncate_prompt_tokens")
    return prompt[:before] + prompt[len(prompt) - keep + before :]


async def submit_all(
    state: ServerState,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    request: GenerationRequest,
    *,
    stream: bool,
    caller: Caller,
    adapter: str = "",
    images: PlacedImages | None = None,
    leases: Sequence[Leases] = (),
) -> list[OutputStream]:
    """Submit all prompts and return one stream per prompt. Raises the first error; with several prompts the error
    names the prompt's index.

    ``caller`` is charged. Callers with different API keys share no cache. ``adapter`` is the name of a loaded adapter.
    ``images`` are allowed with a single prompt only. ``leases`` has the leases of each prompt; empty for none.
    """
    streams: list[OutputStream] = []
    kind = OutputKind.DELTA if stream else OutputKind.FINAL
    salt = salt_for(caller.holder, request.cache_salt or "")
    params = await state.engine.prompts.encode_prediction(params)
    bad_word_ids = await state.engine.prompts.encode_words(params)
    if params.structured_outputs is not None:
        with naming(request):
            await state.engine.prompts.check_grammar(params, salt)
    state.engine.check_room(len(prompts), class_of(params), sum(map(len, prompts)), caller.tenant)
    try:
        for index, prompt in enumerate(prompts):
            try:
                opened = await state.engine.submit(
                    prompt,
                    params,
                    kind=kind,
                    cache_salt=salt,
                    tenant=caller.tenant,
                    queue_timeout=request.queue_timeout,
                    name=caller.request_id,
                    arrival=caller.arrived,
                    has_room=True,  # checked for all prompts before, so that the first does not block the last
                    bad_word_ids=bad_word_ids,
                    adapter=adapter,
                    images=images,
                    hints=CacheHints(caller.session, leases[index] if leases else (), caller.vouched),
                )
            except RequestError as error:
                raise type(error)(f"prompt {index}: {error}") if len(prompts) > 1 else error from None
            streams.append(opened)
    except BaseException:
        abort_all(streams)
        raise
    return streams


def abort_all(streams: Sequence[OutputStream]) -> None:
    """End all unfinished requests."""
    for stream in streams:
        stream.abort()


async def collect(streams: Sequence[OutputStream]) -> list[RequestOutput]:
    """Wait for the whole outputs and return them in the order of the prompts. All requests have left the engine
    afterwards, also after an error."""
    outputs: dict[int, RequestOutput] = {}
    try:
        async with contextlib.aclosing(merge(streams)) as news:
            async for index, output in news:  # in the order in which they end, so that a failure is noticed at once
                outputs[index] = output
                for answer in output.outputs:
                    _check_end(output, answer)
    finally:
        abort_all(streams)
    return [_whole(outputs.get(index)) for index in range(len(streams))]


async def merge(streams: Sequence[OutputStream]) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """(index of the stream, output) in the order in which outputs arrive. If several streams have outputs, they take
    turns."""
    if len(streams) == 1:
        output = None
        async for output in streams[0]:
            yield 0, output
        _whole(output)
        return
    last: list[RequestOutput | None] = [None] * len(streams)
    waiting = {asyncio.ensure_future(_next(stream)): index for index, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=waiting.__getitem__):
                output = task.result()
                index = waiting.pop(task)
                if output is None:
                    _whole(last[index])
                    continue
                last[index] = output
                waiting[asyncio.ensure_future(_next(streams[index]))] = index
                yield index, output
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def _next(stream: OutputStream) -> RequestOutput | None:
    return await anext(stream, None)


def _whole(last: RequestOutput | None) -> RequestOutput:
    if last is None or not last.finished:
        raise EngineDeadError("the request was cut off before its answer was complete; send it again")
    return last


def _check_end(output: RequestOutput, answer: CompletionOutput) -> None:
    """Raise ApiError if the output ended abnormally, for example by an engine error."""
    if answer.finish_reason is FinishReason.ERROR:
        reason = output.error or "its logits could not be used"
        status, code = (400, "invalid_value") if is_of_the_caller(reason) else (500, "generation_failed")
        raise ApiError(status, f"the answer could not be generated: {reason}", code=code)
    if answer.finish_reason is FinishReason.DEADLINE:
        raise ApiError(503, output.error or "the deadline has passed", code="deadline_exceeded")


def refuse_aborted(answer: CompletionOutput) -> None:
    """Raise ApiError for an answer that the operator has ended. For interfaces that have no name for such an end."""
    if answer.finish_reason is FinishReason.ABORT:
        raise ApiError(503, "the server's operator has ended the request; send it again", code="aborted")


# --- what replies are made of -----------------------------------------------------------------------------------------


def reply_head(prefix: str, model: str, info: EngineInfo, streams: Sequence[OutputStream]) -> dict[str, Any]:
    """Fields with which responses and chunks begin. All outputs of one response have the same class of service."""
    return {
        "id": f"{prefix}-{secrets.token_hex(16)}",
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": info.fingerprint,
        "service_tier": streams[0].service_class,
    }


def json_response(content: Any, headers: Mapping[str, str] | None = None) -> Response:
    """A response with status 200 and ``content`` as JSON."""
    return Response(_encode(content), headers=headers, media_type="application/json")


def finite(logprob: float) -> float:
    """A log-probability that JSON can represent: minus infinity becomes ``_LOWEST_LOGPROB``."""
    return max(logprob, _LOWEST_LOGPROB)


def timing(outputs: Sequence[RequestOutput], requested: bool | None) -> Timing | UnsetType:
    """Timing of the output that took longest, if ``requested``. UNSET if the engine did not report an end of any
    output."""
    charged = [(m.causes, m) for output in outputs if (m := output.metrics) is not None and m.causes]
    if not requested or not charged:
        return UNSET
    causes, of = max(charged, key=lambda each: sum(each[0].values()))
    queue = (of.first_scheduled_time or of.arrival_time) - of.arrival_time
    in_ms = {cause: round(seconds * 1000, 3) for cause, seconds in causes.items()}
    found = Timing(round(queue * 1000, 3), in_ms, of.preempted_by)
    if of.resumed is not None:
        found.pause_ms, found.turn_cache = round(of.resumed.gap * 1000, 3), of.resumed.cache.value
    return found


class TokenTexts:
    """Texts of tokens for the log-probabilities of a response."""

    def __init__(self, tokenizer: Tokenizer | None, as_ids: bool) -> None:
        self.tokenizer = tokenizer
        self._as_ids = as_ids or tokenizer is None

    def text(self, token_id: int, entry: Logprob) -> str:
        """The token's text, or ``token_id:17`` if the request asks for ids."""
        return f"token_id:{token_id}" if self._as_ids else entry.decoded_token or ""

    def bytes(self, token_id: int, entry: Logprob) -> bytes:
        """Bytes of the token. These bytes differ from the bytes of the token's text if the token holds only a part of a
        character."""
        if self.tokenizer is not None and self.tokenizer.byte_decoding is not None:
            return self.tokenizer.token_bytes(token_id, skip_special_tokens=False)
        return (entry.decoded_token or "").encode()


def prompt_logprobs(
    entries: Sequence[Mapping[int, Logprob] | None] | None, texts: TokenTexts, top: int, pieces: Pieces
) -> Any:
    """The engine's prompt log-probabilities in the form of the response. Each entry has the prompt's token and the
    ``top`` most likely tokens."""
    if entries is None:
        return None
    return pieces.later(json_items(_prompt_entry(entry, texts, top) for entry in entries), len(entries) * (top + 1))


def _prompt_entry(entry: Mapping[int, Logprob] | None, texts: TokenTexts, top: int) -> dict[str, PromptLogprob] | None:
    if entry is None:
        return None
    shown = [(i, e) for k, (i, e) in enumerate(entry.items()) if k == 0 or (e.rank or 0) <= top]
    return {str(i): PromptLogprob(finite(e.logprob), e.rank, texts.text(i, e)) for i, e in shown}


def parts(answer: CompletionOutput, top: int) -> Iterator[CompletionOutput]:
    """Divide the new part of an output into several parts if it has many log-probabilities. The first of them has the
    whole text."""
    size = tokens_at_once(top)
    if answer.logprobs is None or len(answer.token_ids) <= size:
        yield answer
        return
    for start in range(0, len(answer.token_ids), size):
        cut = slice(start, start + size)
        text = "" if start else answer.text
        yield dataclasses.replace(answer, text=text, token_ids=answer.token_ids[cut], logprobs=answer.logprobs[cut])


def in_pieces(events: Iterable[bytes]) -> Iterator[bytes]:
    """Join short events, so that fewer and larger pieces are sent. No piece is much longer than ``_PIECE``."""
    buffer = bytearray()
    for event in events:
        buffer += event
        if len(buffer) >= _PIECE:
            yield bytes(buffer)
            buffer.clear()
    yield bytes(buffer)


def tokens_at_once(top: int) -> int:
    """Number of tokens that are encoded at a time on the event loop, if each has ``top`` alternatives: about 1,024
    log-probabilities."""
    return max(1, 1024 // (top + 1))


class StreamWriter:
    """Base class for writers of stream events. Subclasses define the events.

    ``holds_back``: the writer may hold text back for long, for example until a tool call is complete.
    """

    holds_back = False
    media_type = "text/event-stream"

    def __init__(self, streams: Sequence[OutputStream]) -> None:
        self.meter = Meter(streams)

    def ping(self) -> bytes:
        """An event without content, which tells the client that the answer grows."""
        return b""

    def start(self) -> bytes:
        """Bytes to send before the first output."""
        return b""

    def chunk(self, prompt: int, output: RequestOutput) -> Iterator[bytes]:
        """Events for one output of the prompt with the index ``prompt``, in pieces; empty if there is nothing to
        send."""
        raise NotImplementedError

    def end(self) -> bytes:
        """Bytes to send after the last output."""
        return b""

    def failed(self, error: ApiError) -> bytes:
        """Bytes that end the stream after ``error``."""
        return b"data: " + _encode(error_body(error)) + b"\n\n"

    def note(self, prompt: int, output: RequestOutput) -> None:
        """Count the tokens of an output. Raises ApiError if it ended abnormally."""
        self.meter.note(prompt, output)
        for answer in output.outputs:
            if answer.finish_reason is not None:
                _check_end(output, answer)


class ChunkWriter(StreamWriter):
    """Writes the events of chat and text completions. The constant part of all events is encoded once.

    ``head`` has the fields that all chunks share. Subclasses make the choices.
    """

    def __init__(self, head: Mapping[str, Any], payload: GenerationRequest, streams: Sequence[OutputStream]) -> None:
        super().__init__(streams)
        options = payload.stream_options or StreamOptions()
        self._timing = payload.return_timing
        self.meter = Meter(streams, predicted=payload.prediction is not None)
        self._head = b"data: " + _encode(head)[:-1] + b',"choices":['
        self._continuous = bool(options.continuous_usage_stats)
        self._include_usage = bool(options.include_usage)
        self._tail = b',"usage":null}\n\n' if self._include_usage else b"}\n\n"

    def choices(self, prompt: int, output: RequestOutput, answer: CompletionOutput) -> Iterator[bytes]:
        """JSON of the choices for the new part of an output. Each item is sent as one event."""
        raise NotImplementedError

    def chunk(self, prompt: int, output: RequestOutput) -> Iterator[bytes]:
        self.note(prompt, output)
        times = timing([output], self._timing) if output.finished else UNSET
        buffer = list[bytes]()
        size = 0
        last = b""
        for answer in output.outputs:
            for choice in self.choices(prompt, output, answer):
                if last:
                    buffer.append(self.event(last))
                    size += len(buffer[-1])
                last = choice
                if size >= _PIECE:
                    yield b"".join(buffer)
                    buffer = []
                    size = 0
        if last:
            buffer.append(self.event(last, b"" if times is UNSET else b',"timing":' + _encode(times)))
            yield b"".join(buffer)

    def event(self, choice: bytes, more: bytes = b"") -> bytes:
        """One server-sent event; ``more`` is JSON to add after the choices."""
        if self._continuous:
            return self._head + choice + b"]" + more + b',"usage":' + _encode(self.meter.usage()) + b"}\n\n"
        return self._head + choice + b"]" + more + self._tail

    def end(self) -> bytes:
        usage = self._head + b'],"usage":' + _encode(self.meter.usage()) + b"}\n\n" if self._include_usage else b""
        return usage + b"data: [DONE]\n\n"


async def start_stream(
    state: ServerState, streams: Sequence[OutputStream], chunks: StreamWriter, headers: Mapping[str, str]
) -> EventStream:
    """Wait for the first output, and return a stream that begins with it. Raises the errors that occur before the first
    output."""
    outputs = merge(streams)
    try:
        first = await anext(outputs, None)
        if first is None:
            raise EngineDeadError("the request was cut off before its answer began; send it again")
        pieces = chunks.chunk(*first)
        begin = chunks.start() + next(pieces, b"")
        events = _events(state, outputs, chunks, itertools.chain([begin], pieces), streams[0].name)
        return EventStream(events, headers, lambda: abort_all(streams), chunks.media_type)
    except BaseException:
        await outputs.aclose()
        abort_all(streams)
        raise


class EventStream(Response):
    """A response of server-sent events, or of other pieces if ``media_type`` says so. Each event is sent as soon as it
    is made, without a task or queue in between.

    ``over`` is called when the events end or the client disconnects. The engine does not wait for a slow client;
    outputs that wait are merged into one larger chunk. If a client stops reading, the stall timeout closes its
    connection, which ends the stream.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        headers: Mapping[str, str] | None = None,
        over: Callable[[], object] = lambda: None,
        media_type: str | None = None,
    ) -> None:
        self.status_code = 200
        self.media_type = media_type or self.media_type
        self.background = None
        self.init_headers({**(headers or {}), "cache-control": "no-cache", "x-accel-buffering": "no"})
        self._events = events
        self._over = over

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with contextlib.aclosing(self._events) as events:
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                async for event in events:
                    await send({"type": "http.response.body", "body": event, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._over()


async def _events(
    state: ServerState,
    outputs: AsyncGenerator[tuple[int, RequestOutput], None],
    chunks: StreamWriter,
    first: Iterator[bytes],
    request_id: str,
) -> AsyncGenerator[bytes, None]:
    """Pieces of a stream: one piece per output of the engine, or several for a long output."""
    async with contextlib.aclosing(outputs):
        try:
            async for piece in _in_turns(first):
                yield piece
            if chunks.holds_back:
                async for piece in _with_pings(state, outputs, chunks):
                    yield piece
            async for prompt, output in outputs:
                async for piece in _in_turns(chunks.chunk(prompt, output)):
                    yield piece
            yield chunks.end()
        except Exception as error:
            yield chunks.failed(to_api_error(error, state, request_id))


async def _with_pings(
    state: ServerState, outputs: AsyncGenerator[tuple[int, RequestOutput], None], chunks: StreamWriter
) -> AsyncGenerator[bytes, None]:
    """Pieces of a stream, with a ping where the outputs have brought nothing to send for ``_PING_SECONDS``."""
    last = state.clock()
    async for prompt, output in outputs:
        is_silent = True
        async for piece in _in_turns(chunks.chunk(prompt, output)):
            is_silent = False
            yield piece
        now = state.clock()
        if not is_silent:
            last = now
        elif now - last >= _PING_SECONDS:
            last = now
            yield chunks.ping()


async def _in_turns(pieces: Iterator[bytes]) -> AsyncGenerator[bytes, None]:
    """The non-empty pieces. Other tasks may run between two pieces."""
    is_first = True
    for piece in pieces:
        if not is_first:
            await asyncio.sleep(0)
        is_first = False
        if piece:
            yield piece
