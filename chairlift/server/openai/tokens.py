"""POST /tokenize and POST /detokenize: convert texts or conversations to token ids, and token ids to text."""

from __future__ import annotations

from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from chairlift.server.http.errors import ApiError
from chairlift.server.http.limits import read_json, until_tokens
from chairlift.server.http.state import ServerState
from chairlift.server.http.streaming import json_response, on_thread_if_long
from chairlift.server.openai.chat_reading import plan_prompt
from chairlift.server.openai.chat_run import encode_messages
from chairlift.server.openai.models import check_model, engine_info
from chairlift.server.openai.protocol import DetokenizeRequest, TokenizeRequest, parse, warning_headers
from chairlift.text.tokenizer.tokenizer import Tokenizer

__all__ = ["DetokenizeReply", "TokenizeReply", "routes"]

_MAX_STRINGS: Final = 2**18
"""Maximum number of tokens for which a response lists the texts. A longer list would take gigabytes."""


class TokenizeReply(msgspec.Struct, kw_only=True):
    """Token ids, their number, and the model's maximum length."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None
    """Text of each token, if requested."""


class DetokenizeReply(msgspec.Struct, kw_only=True):
    """The text of the token ids, including special tokens."""

    prompt: str


async def tokenize(request: Request) -> Response:
    """Return the token ids of a prompt or of messages."""
    state: ServerState = request.app.state.server
    payload, ignored = parse(TokenizeRequest, await read_json(request))
    check_model(state, payload.model)
    info = engine_info(state)
    if (payload.prompt is None) == (payload.messages is None):
        raise ApiError(400, "send either prompt or messages", code="invalid_value", param="prompt")
    tokenizer = _tokenizer(state)
    if payload.prompt is None and payload.add_special_tokens:
        message = "add_special_tokens goes with prompt; the chat template writes its own: leave it out"
        raise ApiError(400, message, code="invalid_value", param="add_special_tokens")
    if payload.prompt is not None and payload.tools is not None:
        message = "tools goes with messages, whose chat template prints them; leave it out"
        raise ApiError(400, message, code="invalid_value", param="tools")
    async with until_tokens(request):
        if payload.prompt is None:
            ids = await encode_messages(state, payload, plan_prompt(state, payload, ignored))
        else:
            ids = await state.engine.prompts.encode(payload.prompt, payload.add_special_tokens is not False)
        reply = TokenizeReply(count=len(ids), max_model_len=info.max_model_len, tokens=ids)
        if payload.return_token_strs:
            if len(ids) > _MAX_STRINGS:
                message = f"there are {len(ids):,} tokens, and return_token_strs takes {_MAX_STRINGS:,}; leave it out"
                raise ApiError(400, message, code="invalid_value", param="return_token_strs")
            reply.token_strs = await on_thread_if_long(state, len(ids), lambda: [tokenizer.token_text(i) for i in ids])
    return json_response(reply, warning_headers(ignored))


async def detokenize(request: Request) -> Response:
    """Return the text of token ids."""
    state: ServerState = request.app.state.server
    payload, ignored = parse(DetokenizeRequest, await read_json(request))
    check_model(state, payload.model)
    highest = engine_info(state).vocab_size - 1
    tokens = payload.tokens
    tokenizer = _tokenizer(state)
    if tokens and max(tokens) > highest:
        message = f"tokens has id {max(tokens)}, but the model knows ids from 0 to {highest}"
        raise ApiError(400, message, code="invalid_value", param="tokens")
    async with until_tokens(request):
        text = await on_thread_if_long(state, len(tokens), lambda: tokenizer.decode(tokens, False))
    return json_response(DetokenizeReply(prompt=text), warning_headers(ignored))


def _tokenizer(state: ServerState) -> Tokenizer:
    if state.engine.prompts.tokenizer is None:
        raise ApiError(400, "this server works on token ids only: the tokenizer was not loaded", code="no_tokenizer")
    return state.engine.prompts.tokenizer


routes: Final = [
    Route("/tokenize", tokenize, methods=["POST"]),
    Route("/detokenize", detokenize, methods=["POST"]),
]
