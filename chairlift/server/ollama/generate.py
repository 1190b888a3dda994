"""POST /api/chat and /api/generate: Ollama's endpoints that generate text."""

from __future__ import annotations

import dataclasses
import datetime
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from chairlift.base.outputs import CompletionOutput, FinishReason, RequestMetrics, RequestOutput
from chairlift.engine.output_stream import OutputStream
from chairlift.errors import PromptTooLongError
from chairlift.server.http.errors import ApiError
from chairlift.server.http.limits import read_json, until_tokens
from chairlift.server.http.pieces import Pieces, json_items, respond
from chairlift.server.http.state import ServerState
from chairlift.server.http.streaming import (
    StreamWriter,
    TokenTexts,
    collect,
    in_pieces,
    parts,
    start_stream,
    submit_all,
)
from chairlift.server.ollama.bodies import (
    OllamaChat,
    OllamaChatReply,
    OllamaFunction,
    OllamaGenerate,
    OllamaGenerateReply,
    OllamaMessage,
    OllamaToolCall,
)
from chairlift.server.ollama.input import Generating, fill, names, parse_body, served_name, to_chat
from chairlift.server.openai.chat import chosen_logprob
from chairlift.server.openai.chat_reading import AnswerReading, ChatPlan
from chairlift.server.openai.chat_run import begin_chat
from chairlift.server.openai.infilling import infilling
from chairlift.server.openai.logprob_room import reserve_logprobs
from chairlift.server.openai.models import adapter_named, generating_info
from chairlift.server.openai.promises import class_of, read_scheduling_fields
from chairlift.server.openai.protocol import CompletionRequest, sampling_params, warning_headers
from chairlift.server.openai.translation import Names
from chairlift.text.tool_calls import CallBegun, CallEnded, CallPiece, Piece, Tools, complete_part

__all__ = ["NDJSON", "error_form", "now", "routes"]

NDJSON: Final = "application/x-ndjson"
_NANOSECONDS: Final = 1_000_000_000
_encode: Final = msgspec.json.encode
_Reply = OllamaChatReply | OllamaGenerateReply


@dataclasses.dataclass(frozen=True, slots=True)
class _Run:
    """A request that was sent to the engine."""

    model: str
    """Model name as the client gave it."""
    kind: type[_Reply]
    prompt: list[int]
    streams: list[OutputStream]
    reading: AnswerReading
    texts: TokenTexts
    arrived: float
    """Time of the request's arrival, by ``time.monotonic``."""
    top_logprobs: int
    gives_context: bool


async def chat(request: Request) -> Response:
    """Generate the next message of a conversation."""
    return await _answer(request, *parse_body(OllamaChat, await read_json(request)))


async def generate(request: Request) -> Response:
    """Generate an answer to a prompt, or a continuation of it."""
    return await _answer(request, *parse_body(OllamaGenerate, await read_json(request)))


async def _answer(request: Request, payload: Generating, ignored: list[str]) -> Response:
    state: ServerState = request.app.state.server
    model = served_name(state, payload.model)
    info = generating_info(state)
    if payload.options is not None and (payload.options.num_ctx or 0) > info.max_model_len:
        ignored.append("options.num_ctx")
    if not (payload.messages if isinstance(payload, OllamaChat) else payload.prompt or payload.suffix):
        return _loaded(payload)
    client_names = names()
    with client_names.translated_errors(state, request.state.request_id):
        if isinstance(payload, OllamaGenerate) and (payload.raw or payload.suffix):
            run = await _begin_raw(request, payload, model, ignored)
        else:
            run = await _begin_chat(request, payload, model, ignored, client_names)
    headers = warning_headers([client_names.translated(name) for name in ignored])
    if payload.stream is not False:
        return await start_stream(state, run.streams, _Lines(run), headers)
    with client_names.translated_errors(state, request.state.request_id):
        (output,) = await collect(run.streams)
    pieces = Pieces()
    return respond(state, _whole(run, output, pieces), pieces, headers)


def _loaded(payload: Generating) -> Response:
    """The response to a request without a prompt, by which Ollama's clients load and unload models."""
    fields: dict[str, Any] = {"model": payload.model or "", "created_at": now(), "done": True, "done_reason": "load"}
    made = OllamaGenerateReply(**fields)
    if isinstance(payload, OllamaChat):
        return _lines_or_json(OllamaChatReply(**fields, message=OllamaMessage()), payload.stream)
    return _lines_or_json(made, payload.stream)


def unloaded_reply(path: str, body: Mapping[str, Any]) -> Response:
    """The response to a request without a prompt whose ``keep_alive`` is 0: the model is unloaded. ``body`` was not
    checked."""
    fields: dict[str, Any] = {"model": str(body.get("model")), "created_at": now(), "done": True}
    fields["done_reason"] = "unload"
    stream = False if body.get("stream") is False else None
    if path.endswith("/chat"):
        return _lines_or_json(OllamaChatReply(**fields, message=OllamaMessage()), stream)
    return _lines_or_json(OllamaGenerateReply(**fields), stream)


def _lines_or_json(reply: _Reply, stream: bool | None) -> Response:
    media_type = "application/json" if stream is False else NDJSON
    return Response(_encode(reply) + (b"" if stream is False else b"\n"), media_type=media_type)


async def _begin_chat(
    request: Request, payload: Generating, model: str, ignored: list[str], client_names: Names
) -> _Run:
    """Send a conversation to the engine. If it is too long, its oldest turns are left out, except if the request
    forbids this."""
    state: ServerState = request.app.state.server
    made = to_chat(payload, model, state.engine.prompts.chat_template or "", ignored, client_names)
    before = (payload.context or ()) if isinstance(payload, OllamaGenerate) else ()
    of_chat: list[str] = []
    try:
        run = await begin_chat(request, made, of_chat, shorten=True, before=before)
    except PromptTooLongError:
        if payload.truncate is False or before:
            raise
        of_chat.clear()
        run = await begin_chat(request, made, of_chat, shorten=True, drops_turns=True)
    ignored += of_chat
    return _Run(
        payload.model or model,
        OllamaChatReply if isinstance(payload, OllamaChat) else OllamaGenerateReply,
        run.prompt,
        run.streams,
        run.reading(),
        run.texts,
        request.scope["state"]["arrived"],
        payload.top_logprobs or 0,
        isinstance(payload, OllamaGenerate),
    )


async def _begin_raw(request: Request, payload: OllamaGenerate, model: str, ignored: list[str]) -> _Run:
    """Send a text to the engine as it is, or with the suffix as the model's files say."""
    state: ServerState = request.app.state.server
    given = [name for name in ("system", "images", "context", "think") if getattr(payload, name)]
    if given:
        why = "raw is true" if payload.raw else "there is a suffix"
        message = f"{given[0]} cannot be used if {why}, because the prompt gets no chat template; leave it out"
        raise ApiError(400, message, code="unsupported_parameter", param=given[0])
    text = payload.prompt or ""
    asked = fill(CompletionRequest(prompt=text, suffix=payload.suffix), payload, model)
    asked.logprobs = (payload.top_logprobs or 0) if payload.logprobs else None
    caller = read_scheduling_fields(request, asked, ignored)
    info = generating_info(state)
    between = infilling(state, asked, [text])
    ends = {} if between is None else {"stop_token_ids": between.ends}
    params = sampling_params(
        asked, info.sampling_defaults, max_tokens=asked.max_tokens, logprobs=asked.logprobs, **ends
    )
    state.engine.check_room(1, class_of(params))
    async with until_tokens(request, asked):
        if between is None:
            (prompt,) = await state.engine.prompts.encode_all([text])
        else:
            (prompt,) = await between.encode(state, asked, [text])
    room = min(info.max_model_len, info.capacity_tokens + 1) - len(prompt)
    if params.max_tokens is not None and 1 <= room < params.max_tokens:
        params = dataclasses.replace(params, max_tokens=room)
    reserve_logprobs(request, asked, [prompt])
    whose: dict[str, Any] = {"caller": caller, "adapter": adapter_named(state, model)}
    streams = await submit_all(state, [prompt], params, asked, stream=bool(asked.stream), **whose)
    tokenizer = state.engine.prompts.tokenizer
    return _Run(
        payload.model or model,
        OllamaGenerateReply,
        prompt,
        streams,
        AnswerReading(ChatPlan(Tools(), {}), tokenizer, params.skip_special_tokens),
        TokenTexts(tokenizer, as_ids=False),
        request.scope["state"]["arrived"],
        payload.top_logprobs or 0,
        gives_context=False,
    )


def error_form(error: ApiError, request_id: str) -> tuple[dict[str, object], dict[str, str]]:
    """(body, headers) of an error in Ollama's form: ``{"error": "..."}``."""
    return {"error": error.message}, {}


def now() -> str:
    """The current time, as in RFC 3339."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class _Parts:
    """Divides an output into texts, thinking and tool calls, as it grows."""

    def __init__(self, reading: AnswerReading) -> None:
        self._reading = reading
        self._call: CallBegun | None = None
        self._arguments: list[str] = []
        self._num_calls = 0

    def read(self, answer: CompletionOutput) -> list[OllamaMessage]:
        """The new parts. Adjacent pieces of text of the same kind are one part; a tool call is a part of its own."""
        found: list[OllamaMessage] = []
        for event in self._reading.read(answer.text, answer.token_ids, answer.finish_reason is not None):
            if isinstance(event, CallBegun):
                self._call = event
                self._arguments = []
            elif isinstance(event, CallPiece):
                self._arguments.append(event.text)
            elif isinstance(event, CallEnded):
                found.append(OllamaMessage(tool_calls=[self._ended(event.is_cut)]))
            elif isinstance(event, Piece) and event.text:
                _add(found, event)
        return found

    def _ended(self, is_cut: bool) -> OllamaToolCall:
        text = "".join(self._arguments)
        begun = self._call or CallBegun("")
        whole = complete_part(text) if is_cut else text
        function = OllamaFunction(index=self._num_calls, name=begun.name, arguments=msgspec.Raw(whole.encode()))
        self._num_calls += 1
        return OllamaToolCall(id=begun.id, function=function)


def _add(found: list[OllamaMessage], piece: Piece) -> None:
    """Add a piece of text to the last part if this has the same kind, otherwise as a new part."""
    last = found[-1] if found else None
    thinks = piece.kind == "reasoning"
    if last is not None and last.tool_calls is UNSET and (last.thinking is not UNSET) is thinks:
        if thinks:
            last.thinking = f"{last.thinking or ''}{piece.text}"
        else:
            last.content += piece.text
        return
    found.append(OllamaMessage(thinking=piece.text) if thinks else OllamaMessage(content=piece.text))


def _made(run: _Run, message: OllamaMessage) -> _Reply:
    """A reply with a message, in the form of the endpoint."""
    if run.kind is OllamaChatReply:
        return OllamaChatReply(model=run.model, created_at=now(), message=message)
    return OllamaGenerateReply(model=run.model, created_at=now(), response=message.content, thinking=message.thinking)


def _end(run: _Run, reply: _Reply, output: RequestOutput, token_ids: list[int]) -> None:
    """Set the fields of a reply that only the last has. ``token_ids`` is the whole output."""
    reply.done = True
    reason = output.outputs[0].finish_reason
    reply.done_reason = "length" if reason is FinishReason.LENGTH else "stop"
    reply.tool_call_errors = run.reading.broken or UNSET
    total = time.monotonic() - run.arrived
    prompt, answer = _durations(output.metrics, total)
    reply.total_duration = _whole_ns(total)
    reply.load_duration = 0
    reply.prompt_eval_count = len(run.prompt)
    reply.prompt_eval_duration = _whole_ns(prompt)
    reply.eval_count = len(token_ids)
    reply.eval_duration = _whole_ns(answer)
    if isinstance(reply, OllamaGenerateReply) and run.gives_context:
        reply.context = [*run.prompt, *token_ids]


def _durations(metrics: RequestMetrics | None, total: float) -> tuple[float, float]:
    """Seconds (for the prompt, for the output). What was not measured counts as output."""
    if metrics is None or metrics.first_token_time is None or metrics.finished_time is None:
        return 0.0, total
    begin = metrics.arrival_time if metrics.first_scheduled_time is None else metrics.first_scheduled_time
    return metrics.first_token_time - begin, metrics.finished_time - metrics.first_token_time


def _whole_ns(seconds: float) -> int:
    """Nanoseconds, at least 1, because clients divide by them."""
    return max(1, round(seconds * _NANOSECONDS))


def _whole(run: _Run, output: RequestOutput, pieces: Pieces) -> _Reply:
    """The reply with the whole output. Long parts are added to ``pieces``."""
    answer = output.outputs[0]
    message = OllamaMessage()
    calls: list[OllamaToolCall] = []
    thoughts: list[str] = []
    for part in _Parts(run.reading).read(answer):
        message.content += part.content
        thoughts += [part.thinking] if part.thinking is not UNSET else []
        calls += part.tool_calls or []
    message.thinking = "".join(thoughts) or UNSET
    message.tool_calls = calls or UNSET
    reply = _made(run, message)
    if answer.logprobs is not None:
        entries = json_items(chosen_logprob(entry, run.top_logprobs, run.texts) for entry in answer.logprobs)
        reply.logprobs = pieces.later(entries, len(answer.logprobs) * (run.top_logprobs + 1))
    _end(run, reply, output, answer.token_ids)
    return reply


class _Lines(StreamWriter):
    """Writes the lines of a stream."""

    media_type = NDJSON
    holds_back = True

    def __init__(self, run: _Run) -> None:
        super().__init__(run.streams)
        self._run = run
        self._parts = _Parts(run.reading)
        self._token_ids: list[int] = []
        self._last: RequestOutput | None = None

    def ping(self) -> bytes:
        return _line(_made(self._run, OllamaMessage()))

    def chunk(self, prompt: int, output: RequestOutput) -> Iterator[bytes]:
        self.note(prompt, output)
        (answer,) = output.outputs
        self._token_ids += answer.token_ids
        self._last = output
        yield from in_pieces(self._lines(answer))

    def _lines(self, answer: CompletionOutput) -> Iterator[bytes]:
        found = self._parts.read(answer)
        if answer.logprobs:
            for part in parts(answer, self._run.top_logprobs):
                reply = _made(self._run, found.pop(0) if found else OllamaMessage())
                entries = part.logprobs or ()
                reply.logprobs = [chosen_logprob(each, self._run.top_logprobs, self._run.texts) for each in entries]
                yield _line(reply)
        for message in found:
            yield _line(_made(self._run, message))

    def end(self) -> bytes:
        reply = _made(self._run, OllamaMessage())
        if self._last is not None:
            _end(self._run, reply, self._last, self._token_ids)
        return _line(reply)

    def failed(self, error: ApiError) -> bytes:
        return _line(error_form(error, "")[0])


def _line(content: Any) -> bytes:
    return _encode(content) + b"\n"


routes: Final = [
    Route("/api/chat", chat, methods=["POST"]),
    Route("/api/generate", generate, methods=["POST"]),
]
