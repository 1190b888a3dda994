"""Request and response types of /v1/messages, Anthropic's Messages API.

Known fields that are not supported follow the rule of :mod:`~chairlift.server.openai.protocol`. Fields for Anthropic's
own servers (``inference_geo``, ``speed``, ``diagnostics``, ``fallbacks``) are hints, so they are ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from chairlift.server.openai.protocol import Form, ModelName, Refusals, SampledRequest, StopString, refused_elsewhere
from chairlift.server.openai.translation import MAX_MESSAGES
from chairlift.text.tool_calls.request import MAX_TOOLS

__all__ = [
    "REFUSED",
    "REFUSED_IN_COUNT",
    "CacheCreation",
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
        "type": {
            "enum": [
                *("text", "image", "document", "search_result", "thinking", "redacted_thinking", "compaction"),
                *("tool_use", "tool_result"),
            ]
        },
        "text": {"type": "string"},
        "thinking": {"type": "string"},
        "id": {"type": "string", "description": "Of a tool_use."},
        "name": {"type": "string"},
        "input": {"type": "object"},
        "tool_use_id": {"type": "string", "description": "Of a tool_result: the call that it answers."},
        "content": {"description": "Of a tool_result: a text, or blocks of text and images."},
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
        "name": {"type": "string", "pattern": "^[A-Za-z0-9_.-]{1,128}$"},
        "description": {"type": "string"},
        "input_schema": {"type": "object", "description": "JSON schema of the input."},
    },
}
InputMessage = Annotated[dict[str, Any], Meta(max_length=16, extra_json_schema=_MESSAGE_SCHEMA)]
CustomTool = Annotated[dict[str, Any], Meta(max_length=16, extra_json_schema=_TOOL_SCHEMA)]


class ThinkingConfig(msgspec.Struct, kw_only=True):
    """The field ``thinking``."""

    type: str
    """``enabled``, ``adaptive`` or ``disabled``. The field has an effect if the chat template can turn thinking on and
    off."""
    budget_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    """Ignored, because ``max_tokens`` limits the whole output."""
    display: str | None = None
    """``omitted``: the response does not contain the thinking of the model."""


class OutputConfig(msgspec.Struct, kw_only=True):
    """The field ``output_config``."""

    effort: Annotated[str, Meta(max_length=32)] | None = None
    """``low``, ``medium``, ``high``, ``xhigh`` or ``max``. The field has an effect if the chat template uses it."""
    format: Form | None = None
    """An object with the type ``json_schema`` and a ``schema``."""
    task_budget: Any = None
    """Refused, because the model cannot be told how many tokens are left."""


class Metadata(msgspec.Struct, kw_only=True):
    """The field ``metadata``."""

    user_id: Annotated[str, Meta(max_length=4096)] | None = None
    """Name of the caller. If there are no API keys, the scheduler treats it as the tenant that is charged for the
    request."""


InputMessages = Annotated[list[InputMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
System = str | Annotated[list[dict[str, Any]], Meta(max_length=64)]
CustomTools = Annotated[list[CustomTool], Meta(max_length=MAX_TOOLS)]
ContextManagement = Annotated[dict[str, Any], Meta(max_length=16)]
ToolChoice = Annotated[dict[str, Any], Meta(max_length=16)]


class CountTokensRequest(msgspec.Struct, kw_only=True):
    """The body of POST /v1/messages/count_tokens. Its fields are those of POST /v1/messages."""

    model: ModelName | None = None
    messages: InputMessages
    system: System | None = None
    tools: CustomTools | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None
    cache_control: Any = None


class MessagesRequest(SampledRequest, kw_only=True):
    """The body of POST /v1/messages."""

    messages: InputMessages
    """The conversation. If the last message is an assistant's, the output continues that message."""
    max_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    """Maximum number of output tokens, including thinking. If it is too large for the model's length, it is reduced."""
    system: System | None = None
    """System prompt: a text, or a list of text blocks."""
    tools: CustomTools | None = None
    tool_choice: ToolChoice | None = None
    """``type`` is ``auto``, ``any``, ``tool`` (with a name) or ``none``. With ``disable_parallel_tool_use``, calls
    after the first are dropped."""
    thinking: ThinkingConfig | None = None
    """If missing, thinking is off, provided that the chat template can turn it off."""
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None
    """Only edits that remove nothing: ``clear_thinking_20251015`` with ``keep`` ``all``."""
    cache_control: Any = None
    """A breakpoint at the end of the last block, in addition to those of blocks and tools."""
    stop_sequences: Annotated[list[StopString], Meta(max_length=16)] | None = None
    metadata: Metadata | None = None


_OWN: Final[Refusals] = {
    "container": ((), "there are no containers; leave it out"),
    "mcp_servers": ((), "the server calls no other servers; send the tools, and make the calls yourself"),
    "output_format": ((), "send output_config.format"),
    "compaction": ((), "conversations are not compacted; send what the model is to read in messages"),
    "stop": ((), "send stop_sequences"),
    "user": ((), "send metadata.user_id"),
    "response_format": (({"type": "text"},), "send output_config.format"),
    "reasoning_effort": ((), "send output_config.effort"),
    "max_completion_tokens": ((), "send max_tokens"),
    "prompt": ((), "it belongs to /v1/completions; send messages"),
}
REFUSED: Final[Refusals] = refused_elsewhere(MessagesRequest, _OWN)
REFUSED_IN_COUNT: Final[Refusals] = {
    name: _OWN[name] for name in ("container", "mcp_servers", "output_format", "compaction")
}


class TextBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="text"):
    """A block of generated text."""

    text: str


class ThinkingBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="thinking"):
    """A block with the reasoning of the model."""

    thinking: str
    signature: str
    """Always ``unsigned``. The server does not sign reasoning, and does not check the signature that a client sends
    back."""


class DirectCaller(msgspec.Struct, frozen=True, tag_field="type", tag="direct"):
    """The model itself, as the caller of a tool. Anthropic's servers have other callers, such as a program."""


class ToolUseBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_use"):
    """A tool call that the model wants the client to make. The client sends the result in a ``tool_result`` block with
    the same id."""

    id: str
    caller: DirectCaller = DirectCaller()
    name: str
    input: Annotated[msgspec.Raw, Meta(extra_json_schema={"type": "object"})]
    """A JSON object, as text. So numbers of any size pass."""


class ThinkingDetails(msgspec.Struct, kw_only=True):
    """Number of thinking tokens, a part of :class:`MessagesUsage`."""

    thinking_tokens: int


class CacheCreation(msgspec.Struct, kw_only=True):
    """The tokens in ``cache_creation_input_tokens``, by the time to live of their breakpoint."""

    ephemeral_5m_input_tokens: int
    ephemeral_1h_input_tokens: int


class MessagesUsage(msgspec.Struct, kw_only=True):
    """Numbers of input and output tokens. The first three fields add up to the whole prompt."""

    input_tokens: int
    """The other tokens of the prompt."""
    cache_read_input_tokens: int
    """Prompt tokens that were read from the prefix cache. Prefixes of every prompt are cached, so tokens may be read
    without any ``cache_control``."""
    cache_creation_input_tokens: int
    """Computed prompt tokens before a breakpoint, in whole blocks of the cache."""
    cache_creation: CacheCreation | UnsetType
    """Missing at the end of a stream, as in Anthropic's API."""
    output_tokens: int
    output_tokens_details: ThinkingDetails | UnsetType = UNSET


class MessageReply(msgspec.Struct, kw_only=True):
    """The response: a generated message."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock] = []
    stop_reason: str | None = None
    """``end_turn``, ``max_tokens``, ``stop_sequence``, ``tool_use`` or ``model_context_window_exceeded``; null during
    a stream."""
    stop_sequence: str | None = None
    usage: MessagesUsage
    tool_call_errors: list[str] | UnsetType = UNSET
    """Descriptions of malformed tool calls in the output. The text of these calls stays in a text block."""


class TokenCount(msgspec.Struct, kw_only=True):
    """The response of /v1/messages/count_tokens."""

    input_tokens: int


class MessagesErrorObject(msgspec.Struct, kw_only=True):
    """Type of an error, and a message that says how to correct it."""

    type: str
    message: str


class MessagesError(msgspec.Struct, kw_only=True):
    """Error response of the paths of Anthropic's API."""

    type: Literal["error"] = "error"
    error: MessagesErrorObject
    request_id: str | None = None
