"""Anthropic's Messages API: the routes, and their entries in ``/openapi.json``."""

from __future__ import annotations

from typing import Any, Final

from chairlift.server.anthropic import messages
from chairlift.server.anthropic.messages_types import (
    CountTokensRequest,
    MessageReply,
    MessagesError,
    MessagesRequest,
    TokenCount,
)
from chairlift.server.http.api_docs import post, ref
from chairlift.server.http.dialect import Dialect
from chairlift.server.openai.dialect import ASK, TTFT_PARAMETER

__all__ = ["ANTHROPIC"]


def _messages_paths() -> dict[str, Any]:
    paths = {
        "/v1/messages": post(
            "Generate the next message of a conversation",
            MessagesRequest,
            MessageReply,
            (429,),
            streams=True,
            parameters=[TTFT_PARAMETER],
            example={"messages": ASK, "max_tokens": 64},
        ),
        "/v1/messages/count_tokens": post(
            "Number of tokens in the prompt of a conversation",
            CountTokensRequest,
            TokenCount,
            (429,),
            example={"messages": ASK},
        ),
    }
    for path in paths.values():
        for status, response in path["post"]["responses"].items():
            if status != "200":
                response["content"] = ref(MessagesError)
    return paths


ANTHROPIC: Final = Dialect(
    routes=messages.routes,
    types=(MessagesRequest, MessageReply, CountTokensRequest, TokenCount, MessagesError),
    paths=_messages_paths(),
    prefixes=("/v1/messages",),
    computing={route.path for route in messages.routes},
    error_form=messages.error_form,
)
