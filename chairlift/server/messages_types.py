"""Request and reply types of /v1/messages, Anthropic's Messages API.

Known fields that are not supported follow the rule of :mod:`~chairlift.server.protocol`. ``cache_control`` needs no
action, because prefixes of every prompt are cached. Fields for Anthropic's own servers (``inference_geo``, ``speed``,
``diagnostics``, ``context_management``) are hints, and ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from chairlift.server.protocol import Form, ModelName, Refusals, SampledRequest, StopString, refused_beside
from chairlift.server.translation import MAX_MESSAGES
from chairlift.tool_calls.request import MAX_TOOLS

__all__ = [
    "REFUSED",
    "REFUSED_IN_COUNT",
    "CountTokensRequest",
    "MessageReply",
    "MessagesError",
    "MessagesRequest",
    "MessagesUsage",
    "Metadata",
    "OutputConfig",
    "TextBlock",
    "ThinkingBlock",
    "ThinkingConfig",
    "TokenCount",
    "ToolUseBlock",
]

_BLOCK_SCHEMA: Final = {
    "type": "object",
    "required": ["type"],
    "properties": {
        "type": {"enum": ["text", "thinking", "tool_use", "tool_result"]},
        "text": {"type": "string"},
        "thinking": {"type": "string"},
        "id": {"type": "string", "description": "Of a tool_use."},
        "name": {"type": "string"},
        "input": {"type": "object"},
        "tool_use_id": {"type": "string", "description": "Of a tool_result: the call that it answers."},
        "content": {"description": "Of a tool_result: a text, or text blocks."},
        "is_error": {"type": "boolean"},
    },
}
_MESSAGE_SCHEMA: Final = {
    "description": "One message: its role, and a text or blocks.",
    "required": ["role", "content"],
    "properties": {
        "role": {"enum": ["user", "assistant", "system"]},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": _BLOCK_SCHEMA}]},
    },
}
_TOOL_SCHEMA: Final = {
    "description": "A function that the model may call. Tools that Anthropic defines are refused by name.",
    "required": ["name", "input_schema"],
    "properties": {
        "type": {"enum": ["custom", None]},
        "name": {"type": "string", "pattern": "^[A-Za-z0-9_.-]{1,64}$"},
        "description": {"type": "string"},
        "input_schema": {"type": "object", "description": "JSON schema of the input."},
    },
}
InputMessage = Annotated[dict[str, Any], Meta(max_length=16, extra_json_schema=_MESSAGE_SCHEMA)]
CustomTool = Annotated[dict[str, Any], Meta(max_length=16, extra_json_schema=_TOOL_SCHEMA)]


class ThinkingConfig(msgspec.Struct, kw_only=True):
    """The field ``thinking``."""

    type: str
    """enabled, adaptive or disabled, for chat templates with such a switch."""
    budget_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    """Ignored: max_tokens limits the answer."""
    display: str | None = None
    """omitted: the reply does not contain the thinking."""


class OutputConfig(msgspec.Struct, kw_only=True):
    """The field ``output_config``."""

    effort: Annotated[str, Meta(max_length=32)] | None = None
    """low, medium, high, xhigh or max, if the chat template uses it."""
    format: Form | None = None
    """Type ``json_schema``, with a ``schema``."""


class Metadata(msgspec.Struct, kw_only=True):
    """The field ``metadata``."""

    user_id: Annotated[str, Meta(max_length=4096)] | None = None
    """Name of the caller. Without API keys, it decides whose share of the engine the request uses."""


InputMessages = Annotated[list[InputMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
System = str | Annotated[list[dict[str, Any]], Meta(max_length=64)]
CustomTools = Annotated[list[CustomTool], Meta(max_length=MAX_TOOLS)]
ToolChoice = Annotated[dict[str, Any], Meta(max_length=16)]


class CountTokensRequest(msgspec.Struct, kw_only=True):
    """The body of POST /v1/messages/count_tokens. Fields are those of POST /v1/messages."""

    model: ModelName | None = None
    messages: InputMessages
    system: System | None = None
    tools: CustomTools | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    cache_control: Any = None


class MessagesRequest(SampledRequest, kw_only=True):
    """The body of POST /v1/messages."""

    messages: InputMessages
    """If the last message is an assistant's, the answer continues it."""
    max_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    """Most tokens of the answer, including thinking; fewer if the model's length leaves less room."""
    system: System | None = None
    """A text, or text blocks."""
    tools: CustomTools | None = None
    tool_choice: ToolChoice | None = None
    """Type auto, any, tool (with a name) or none. disable_parallel_tool_use drops calls after the first."""
    thinking: ThinkingConfig | None = None
    """Without it models do not think, if their chat template has a switch for it."""
    output_config: OutputConfig | None = None
    cache_control: Any = None
    """Has no effect: prefixes are always cached."""
    stop_sequences: Annotated[list[StopString], Meta(max_length=16)] | None = None
    metadata: Metadata | None = None


_OWN: Final[Refusals] = {
    "container": ((), "there are no containers; leave it out"),
    "mcp_servers": ((), "the server calls no other servers; send the tools, and make the calls yourself"),
    "output_format": ((), "send output_config.format"),
    "stop": ((), "send stop_sequences"),
    "user": ((), "send metadata.user_id"),
    "response_format": (({"type": "text"},), "send output_config.format"),
    "reasoning_effort": ((), "send output_config.effort"),
    "max_completion_tokens": ((), "send max_tokens"),
    "prompt": ((), "it belongs to /v1/completions; send messages"),
}
REFUSED: Final[Refusals] = refused_beside(MessagesRequest, _OWN)
REFUSED_IN_COUNT: Final[Refusals] = {name: _OWN[name] for name in ("container", "mcp_servers", "output_format")}


class TextBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="text"):
    """Text of the answer."""

    text: str
    citations: None = None


class ThinkingBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="thinking"):
    """Reasoning of the model before its answer."""

    thinking: str
    signature: str
    """Always ``unsigned``: nothing is signed, and nothing is checked when it is sent back."""


class ToolUseBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_use"):
    """A call that the model wants the client to make. Its result is a tool_result with this id."""

    id: str
    name: str
    input: dict[str, Any]


class ThinkingDetails(msgspec.Struct, kw_only=True):
    """Part of :class:`MessagesUsage`."""

    thinking_tokens: int


class MessagesUsage(msgspec.Struct, kw_only=True):
    """Numbers of input and output tokens. The whole prompt is the sum of the first three."""

    input_tokens: int
    """Prompt tokens that were computed."""
    cache_read_input_tokens: int
    """Prompt tokens that were in the prefix cache."""
    cache_creation_input_tokens: int = 0
    """Always 0: computed tokens are cached, and not counted twice."""
    output_tokens: int
    output_tokens_details: ThinkingDetails | UnsetType = UNSET


class MessageReply(msgspec.Struct, kw_only=True):
    """The answer to a request."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock] = []
    stop_reason: str | None = None
    """end_turn, max_tokens, stop_sequence, tool_use or model_context_window_exceeded; null during a stream."""
    stop_sequence: str | None = None
    usage: MessagesUsage
    tool_call_errors: list[str] | UnsetType = UNSET
    """Errors of text that began like a tool call and stayed in a text block."""


class TokenCount(msgspec.Struct, kw_only=True):
    """Number of tokens in a prompt."""

    input_tokens: int


class MessagesErrorObject(msgspec.Struct, kw_only=True):
    """An error and its remedy."""

    type: str
    message: str


class MessagesError(msgspec.Struct, kw_only=True):
    """Every reply of these paths that reports an error."""

    type: Literal["error"] = "error"
    error: MessagesErrorObject
    request_id: str | None = None
