"""Every field of the clients' request types has a decision: served, refused by name, or a hint that the header names.

A field that a new release of a client brings fails here, so that nobody's history is ignored in silence.
"""

from __future__ import annotations

import importlib
import typing
from typing import Any

import msgspec
import pytest

from chairlift.server.anthropic.messages_types import REFUSED as REFUSED_MESSAGES
from chairlift.server.anthropic.messages_types import MessagesRequest, OutputConfig, ThinkingConfig
from chairlift.server.openai.pooling import EmbeddingRequest
from chairlift.server.openai.protocol import REFUSED, ChatRequest, CompletionRequest
from chairlift.server.openai.responses_types import REFUSED as REFUSED_RESPONSES
from chairlift.server.openai.responses_types import ReasoningOptions, ResponsesRequest, TextOptions

_BILLING = frozenset(("safety_identifier", "metadata", "verbosity"))
_OF_ANTHROPIC = frozenset(
    (
        *("diagnostics", "inference_geo", "speed", "user_profile_id", "workspace_id", "betas", "billing_policy"),
        *("fallback_credit_token", "fallbacks"),
    )
)
_CHECKED_BEFORE = frozenset(("thread",))
"""Fields that the endpoint itself refuses (test_messages.py)."""

# (name of the class, its fields here, refused fields, hints: fields that change nothing of what the model reads)
_TYPES: dict[str, tuple[type[msgspec.Struct], Any, frozenset[str]]] = {
    "openai.types.chat.completion_create_params:CompletionCreateParamsNonStreaming": (ChatRequest, REFUSED, _BILLING),
    "openai.types.completion_create_params:CompletionCreateParamsNonStreaming": (CompletionRequest, REFUSED, _BILLING),
    "openai.types.embedding_create_params:EmbeddingCreateParams": (EmbeddingRequest, {}, frozenset()),
    "openai.types.responses.response_create_params:ResponseCreateParamsNonStreaming": (
        ResponsesRequest,
        REFUSED_RESPONSES,
        _BILLING | {"max_tool_calls", "stream_options", "access_programs"},
    ),
    "openai.types.responses.response_text_config_param:ResponseTextConfigParam": (TextOptions, {}, frozenset()),
    "openai.types.shared_params.reasoning:Reasoning": (ReasoningOptions, {}, frozenset(("mode",))),
    "anthropic.types.beta.message_create_params:MessageCreateParamsNonStreaming": (
        MessagesRequest,
        REFUSED_MESSAGES,
        _OF_ANTHROPIC,
    ),
    "anthropic.types.message_create_params:MessageCreateParamsNonStreaming": (
        MessagesRequest,
        REFUSED_MESSAGES,
        _OF_ANTHROPIC,
    ),
    "anthropic.types.beta.beta_output_config_param:BetaOutputConfigParam": (OutputConfig, {}, frozenset()),
    "anthropic.types.beta.beta_thinking_config_enabled_param:BetaThinkingConfigEnabledParam": (
        ThinkingConfig,
        {},
        frozenset(("block_binding",)),
    ),
}


@pytest.mark.parametrize("place", _TYPES)
def test_every_field_of_a_client_is_served_refused_or_known_as_a_hint(place: str) -> None:
    module, _, name = place.partition(":")
    served, refused, hints = _TYPES[place]
    fields = set(typing.get_type_hints(getattr(importlib.import_module(module), name)))
    assert fields, "the client's type has no fields"
    known = {*served.__struct_fields__, *refused, *hints, *_CHECKED_BEFORE}
    assert not sorted(fields - known), "serve the field, refuse it by name, or list it as a hint"


@pytest.mark.parametrize("place", _TYPES)
def test_no_hint_is_a_field_with_an_effect(place: str) -> None:
    served, refused, hints = _TYPES[place]
    assert not hints & ({*refused} - {"stream_options"})
    assert not hints & {*served.__struct_fields__} - {"metadata", "stream_options"}
