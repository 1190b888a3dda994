"""POST /api/embed and /api/embeddings: vectors of texts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from chairlift.engine.pooled.pooling_inputs import floats, unit_length
from chairlift.server.http.limits import read_json
from chairlift.server.http.state import ServerState
from chairlift.server.http.streaming import json_response
from chairlift.server.ollama.bodies import (
    SCHEDULING,
    OllamaEmbed,
    OllamaEmbedding,
    OllamaEmbeddingReply,
    OllamaEmbedReply,
    OllamaScheduled,
)
from chairlift.server.ollama.input import parse_body, served_name
from chairlift.server.openai.models import pooling_info
from chairlift.server.openai.pooling import EmbeddingRequest, EndpointCall, listed, refusing

__all__ = ["routes"]

_NANOSECONDS: Final = 1_000_000_000


def _call(request: Request, payload: OllamaScheduled, ignored: list[str], truncate: bool | None) -> EndpointCall:
    state: ServerState = request.app.state.server
    asked = EmbeddingRequest(
        input="",
        model=served_name(state, payload.model),
        truncate_prompt_tokens=None if truncate is False else -1,
        **{name: getattr(payload, name) for name in SCHEDULING},
    )
    return EndpointCall(request, asked, ignored, "embed")


async def _vectors(call: EndpointCall, texts: Sequence[str], name: str) -> list[bytes]:
    """Vectors of texts, as float32 bytes. ``name`` is the field with the texts."""
    prefix = call.inputs.prefix(None)
    return await call.vectors(await call.encode(listed(texts, name), prefix, name))


async def _embed(request: Request) -> Response:
    state: ServerState = request.app.state.server
    payload, ignored = parse_body(OllamaEmbed, await read_json(request))
    served_name(state, payload.model)
    pooling_info(state)
    model = payload.model or ""
    if not payload.input:
        return json_response(OllamaEmbedReply(model=model, embeddings=[]))
    call = _call(request, payload, ignored, payload.truncate)
    with refusing("dimensions"):
        call.inputs.check_dimensions(payload.dimensions)
    texts = [payload.input] if isinstance(payload.input, str) else payload.input
    vectors = await _vectors(call, texts, "input")

    def make() -> OllamaEmbedReply:
        return OllamaEmbedReply(
            model=model,
            embeddings=[floats(unit_length(call.inputs.cut(each, payload.dimensions))) for each in vectors],
            total_duration=round((time.monotonic() - request.scope["state"]["arrived"]) * _NANOSECONDS),
            prompt_eval_count=call.num_tokens,
        )

    return await call.reply(sum(map(len, vectors)) // 4, make)


async def _embeddings(request: Request) -> Response:
    state: ServerState = request.app.state.server
    payload, ignored = parse_body(OllamaEmbedding, await read_json(request))
    served_name(state, payload.model)
    pooling_info(state)
    if not payload.prompt:
        return json_response(OllamaEmbeddingReply(embedding=[]))
    call = _call(request, payload, ignored, None)
    (vector,) = await _vectors(call, [payload.prompt], "prompt")
    return await call.reply(len(vector) // 4, lambda: OllamaEmbeddingReply(embedding=floats(vector)))


routes: Final = [
    Route("/api/embed", _embed, methods=["POST"]),
    Route("/api/embeddings", _embeddings, methods=["POST"]),
]
