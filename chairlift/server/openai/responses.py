"""OpenAI's Responses API, translated to chat requests: POST /v1/responses, and the paths of one response.

A request becomes a chat. The content, reasoning and tool calls of the output become items of the response. A response
is stored unless ``store`` is false. It then stays in memory, within limits, so that ``previous_response_id`` can
continue it and ``item_reference`` can name its items. Only the API key that made it can use it.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response as HttpResponse
from starlette.routing import Route

from chairlift.base.outputs import RequestOutput
from chairlift.server.http.auth import Caller
from chairlift.server.http.errors import ApiError
from chairlift.server.http.limits import read_json, until_tokens
from chairlift.server.http.state import ServerState
from chairlift.server.http.streaming import (
    Meter,
    StreamWriter,
    collect,
    in_pieces,
    json_response,
    on_thread_if_long,
    start_stream,
)
from chairlift.server.openai.batches.files import page_of
from chairlift.server.openai.chat_reading import plan_prompt
from chairlift.server.openai.chat_run import ChatRun, begin_chat, encode_messages
from chairlift.server.openai.models import check_model, generating_info
from chairlift.server.openai.protocol import parse, unknown_inside, warning_headers
from chairlift.server.openai.response_store import StoredResponse
from chairlift.server.openai.responses_cache import response_breakpoints
from chairlift.server.openai.responses_events import EventFields, ResponseBuilder
from chairlift.server.openai.responses_input import input_items, listed_items, names, to_chat
from chairlift.server.openai.responses_types import (
    ENCRYPTED_REASONING,
    REFUSED,
    CustomToolCall,
    DeletedResponse,
    FunctionCall,
    InputItemList,
    InputTokenCount,
    OutputMessage,
    ReasoningOptions,
    Response,
    ResponsesRequest,
    TextOptions,
)
from chairlift.server.openai.translation import wrong

__all__ = ["routes"]

_encode: Final = msgspec.json.encode
_Items = list[dict[str, Any]]
_Keep = Callable[[Response, bytes], None]


async def create_response(request: Request) -> HttpResponse:
    """Generate the next items of a conversation."""
    state: ServerState = request.app.state.server
    body = await read_json(request)
    payload, ignored = parse(ResponsesRequest, body, REFUSED)
    ignored += unknown_inside("text", body.get("text"), TextOptions)
    ignored += unknown_inside("reasoning", body.get("reasoning"), ReasoningOptions)
    ignored += [path for path, value in _hints(payload) if value]
    stores = _stores(request, payload)
    _resolve(request, payload)
    earlier = _earlier(request, payload)
    client_names = names()
    chat = to_chat(payload, earlier, client_names, ignored)
    points = response_breakpoints(state, payload, lambda marked: to_chat(marked, earlier, names()))
    of_chat: list[str] = []
    with client_names.translated_errors(state, request.state.request_id):
        drops = payload.truncation == "auto"
        run = await begin_chat(request, chat, of_chat, drops_turns=drops, points=points)
    response = _response(payload, run, stores)
    keep = _keeper(request, payload, earlier) if stores else None
    headers = warning_headers([*ignored, *map(client_names.translated, of_chat)])
    carries = ENCRYPTED_REASONING in (payload.include or ())

    def make_builder(meter: Meter) -> ResponseBuilder:
        return ResponseBuilder(response, run, meter, client_names.namespaces, carries_reasoning=carries)

    if payload.stream:
        events = _ResponseEvents(run, keep, make_builder)
        return await start_stream(state, run.streams, events, headers)
    with client_names.translated_errors(state, request.state.request_id):
        (output,) = await collect(run.streams)
    meter = Meter(run.streams)
    meter.note(0, output)
    builder = make_builder(meter)

    def fill() -> bytes:
        for _ in builder.new_events(output.outputs[0]):
            pass
        return _encode(response)

    top = chat.top_logprobs or 0
    content = await on_thread_if_long(state, len(output.outputs[0].token_ids) * (top + 1) if chat.logprobs else 0, fill)
    if keep is not None:
        keep(response, content)
    return HttpResponse(content, headers=headers, media_type="application/json")


def _hints(payload: ResponsesRequest) -> Iterator[tuple[str, Any]]:
    """(name, value) of those request fields that have no effect in this server."""
    text = payload.text or TextOptions()
    reasoning = payload.reasoning or ReasoningOptions()
    yield "text.verbosity", text.verbosity
    yield "reasoning.summary", reasoning.summary
    yield "reasoning.generate_summary", reasoning.generate_summary


def _stores(request: Request, payload: ResponsesRequest) -> bool:
    """Whether the response is stored. Responses to requests of a batch are stored only if the request says so:
    thousands of them would take the place of conversations.

    Raises ApiError if the response must be stored, and this server stores none, and for a stream in a batch.
    """
    state: ServerState = request.app.state.server
    is_batch = getattr(request.state, "is_batch", False)
    if is_batch and payload.stream:
        message = "stream cannot be used in a batch, whose answers are lines of a file; leave it out"
        raise ApiError(400, message, code="invalid_value", param="stream")
    if payload.store and not state.config.max_stored_responses:
        message = "store is true, but this server keeps no responses (--max-stored-responses 0); leave it out"
        raise ApiError(400, message, code="unsupported_parameter", param="store")
    wanted = bool(payload.store) if is_batch else payload.store is not False
    return wanted and state.config.max_stored_responses > 0


def _resolve(request: Request, payload: ResponsesRequest) -> None:
    """Replace each ``item_reference`` of the input by the item of a stored response. Raises ApiError 404 if there is no
    such item."""
    if isinstance(payload.input, str):
        return
    state: ServerState = request.app.state.server
    for index, item in enumerate(payload.input):
        if item.get("type") != "item_reference" and set(item) != {"id"}:
            continue
        where = f"input[{index}].id"
        item_id = item.get("id")
        if not isinstance(item_id, str):
            wrong(where, "must be the id of an item of an earlier response", item_id)
        stored = state.responses.with_item(_holder(request), item_id)
        if stored is None:
            raise _not_stored(state, f"item {item_id!r:.80}", where, "the item itself")
        items: _Items = msgspec.json.decode(stored.items)
        payload.input[index] = items[stored.num_input + stored.output_ids.index(item_id)]


def _earlier(request: Request, payload: ResponsesRequest) -> _Items:
    """Items of the conversation that ``previous_response_id`` continues. Raises ApiError 404 if that response is not
    stored."""
    if payload.previous_response_id is None:
        return []
    stored = _stored(request, payload.previous_response_id, "previous_response_id")
    items: _Items = msgspec.json.decode(stored.items)
    return items


def _stored(request: Request, response_id: str, param: str) -> StoredResponse:
    state: ServerState = request.app.state.server
    stored = state.responses.get(_holder(request), response_id)
    if stored is None:
        raise _not_stored(state, f"response {response_id!r:.80}", param, "its items")
    return stored


def _not_stored(state: ServerState, what: str, param: str, instead: str) -> ApiError:
    message = (
        f"there is no {what}: it was not made with this API key, or with store false, was dropped for newer ones (the"
        f" last {state.config.max_stored_responses:,} responses are kept, in"
        f" {state.config.max_stored_response_bytes:,} bytes), or the server was started again; send {instead} in input"
        " instead"
    )
    code = "response_not_found" if what.startswith("response") else "item_not_found"
    return ApiError(404, message, code=code, param=param)


def _holder(request: Request) -> str:
    caller: Caller = getattr(request.state, "caller", Caller())
    return caller.holder


def _keeper(request: Request, payload: ResponsesRequest, earlier: _Items) -> _Keep:
    """Return a function that stores a finished response, together with all items of the conversation."""
    state: ServerState = request.app.state.server
    before = [*earlier, *input_items(payload)]
    holder = _holder(request)
    limits = (state.config.max_stored_responses, state.config.max_stored_response_bytes)

    def keep(response: Response, body: bytes) -> None:
        items = [*before, *map(_item, response.output)]
        output_ids = tuple(item.id for item in response.output)
        stored = StoredResponse(body, _encode(items), len(before), output_ids)
        state.responses.put(holder, response.id, stored, *limits)

    return keep


def _item(item: Any) -> dict[str, Any]:
    """Convert an item of the output to an input item, for a later request that continues the response."""
    if isinstance(item, OutputMessage):
        texts = [{"type": "output_text", "text": part.text} for part in item.content]
        return {"type": "message", "role": "assistant", "content": texts}
    if isinstance(item, (FunctionCall, CustomToolCall)):
        fields: dict[str, Any] = msgspec.to_builtins(item)
        return {name: value for name, value in fields.items() if name not in ("id", "status")}
    return {"type": "reasoning", "content": [{"type": "reasoning_text", "text": part.text} for part in item.content]}


def _response(payload: ResponsesRequest, run: ChatRun, stores: bool) -> Response:
    """The response before there is any output, with the fields that it copies from the request."""
    text_format = payload.text.format if payload.text else None
    return Response(
        id=f"resp_{secrets.token_hex(16)}",
        created_at=int(time.time()),
        status="in_progress",
        instructions=payload.instructions,
        max_output_tokens=payload.max_output_tokens,
        model=run.model,
        parallel_tool_calls=payload.parallel_tool_calls is not False,
        previous_response_id=payload.previous_response_id,
        reasoning={"effort": payload.reasoning.effort if payload.reasoning else None, "summary": None},
        service_tier=run.streams[0].service_class,
        store=stores,
        temperature=run.params.temperature,
        text={"format": text_format or {"type": "text"}},
        tool_choice=payload.tool_choice or "auto",
        tools=payload.tools or [],
        truncation=payload.truncation or "disabled",
        top_logprobs=payload.top_logprobs or 0,
        top_p=run.params.top_p,
        user=msgspec.UNSET if payload.user is None else payload.user,
        metadata=payload.metadata or {},
    )


class _ResponseEvents(StreamWriter):
    """Writes the events of a streamed response."""

    def __init__(self, run: ChatRun, keep: _Keep | None, make_builder: Callable[[Meter], ResponseBuilder]) -> None:
        super().__init__(run.streams)
        self._builder = make_builder(self.meter)
        self._keep = keep
        self.holds_back = run.plan.reads

    def ping(self) -> bytes:
        return _event(self._builder.ping())

    def start(self) -> bytes:
        return b"".join(map(_event, self._builder.begin()))

    def chunk(self, prompt: int, output: RequestOutput) -> Iterator[bytes]:
        self.note(prompt, output)
        for answer in output.outputs:
            yield from in_pieces(map(_event, self._builder.new_events(answer)))

    def end(self) -> bytes:
        if self._keep is not None:
            self._keep(self._builder.response, _encode(self._builder.response))
        return _event(self._builder.end())

    def failed(self, error: ApiError) -> bytes:
        return _event(self._builder.failed(error))


def _event(fields: EventFields) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (fields["type"].encode(), _encode(fields))


async def _get_response(request: Request) -> HttpResponse:
    """Show a stored response."""
    given: Sequence[str] = request.query_params.getlist("stream")
    if any(value not in ("false", "") for value in given) or "starting_after" in request.query_params:
        message = "the events of a response are not kept; leave stream and starting_after out"
        raise ApiError(400, message, code="unsupported_parameter", param="stream")
    stored = _stored(request, request.path_params["response_id"], "response_id")
    return HttpResponse(stored.body, media_type="application/json")


async def _delete_response(request: Request) -> HttpResponse:
    """Delete a stored response."""
    state: ServerState = request.app.state.server
    response_id = request.path_params["response_id"]
    _stored(request, response_id, "response_id")
    state.responses.delete(_holder(request), response_id)
    return json_response(DeletedResponse(id=response_id))


async def _list_input_items(request: Request) -> HttpResponse:
    """List the input items of a stored response, including the items of earlier responses that it continues."""
    after, limit = page_of(request, 20, 100)
    order = request.query_params.get("order", "desc")
    if order not in ("asc", "desc"):
        wrong("order", "must be asc or desc", order)
    response_id = request.path_params["response_id"]
    stored = _stored(request, response_id, "response_id")
    items = listed_items(response_id, msgspec.json.decode(stored.items)[: stored.num_input])
    if order == "desc":
        items.reverse()
    if after is not None:
        matches = [index for index, item in enumerate(items) if item["id"] == after]
        if not matches:
            wrong("after", "must be the id of an item of this response", after)
        items = items[matches[0] + 1 :]
    page = items[:limit]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    return json_response(InputItemList(data=page, first_id=first, last_id=last, has_more=len(items) > limit))


async def _count_input_tokens(request: Request) -> HttpResponse:
    """Count the tokens in the prompt of a conversation."""
    state: ServerState = request.app.state.server
    payload, ignored = parse(ResponsesRequest, await read_json(request), REFUSED)
    check_model(state, payload.model)
    generating_info(state)
    client_names = names()
    _resolve(request, payload)
    chat = to_chat(payload, _earlier(request, payload), client_names, ignored)
    of_chat: list[str] = []
    with client_names.translated_errors(state, request.state.request_id):
        plan = plan_prompt(state, chat, of_chat)
        async with until_tokens(request):
            prompt = await encode_messages(state, chat, plan)
    headers = warning_headers([*ignored, *map(client_names.translated, of_chat)])
    return json_response(InputTokenCount(input_tokens=len(prompt)), headers)


async def _cancel_response(request: Request) -> HttpResponse:
    """Return an error: only background responses can be cancelled, and the server does not support ``background``."""
    response_id = request.path_params["response_id"]
    _stored(request, response_id, "response_id")
    message = (
        f"the response {response_id!r:.80} has ended: only background responses can be cancelled, and this server makes"
        " none; close the connection to cancel a response while it is made"
    )
    raise ApiError(400, message, code="unsupported_operation", param="response_id")


routes: Final = [
    Route("/v1/responses", create_response, methods=["POST"]),
    Route("/v1/responses/input_tokens", _count_input_tokens, methods=["POST"]),
    Route("/v1/responses/{response_id}", _get_response, methods=["GET"]),
    Route("/v1/responses/{response_id}", _delete_response, methods=["DELETE"]),
    Route("/v1/responses/{response_id}/input_items", _list_input_items, methods=["GET"]),
    Route("/v1/responses/{response_id}/cancel", _cancel_response, methods=["POST"]),
]
