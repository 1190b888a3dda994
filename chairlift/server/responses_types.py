"""Request and reply types of /v1/responses, OpenAI's Responses API.

Known fields that are not supported follow the rule of :mod:`~chairlift.server.protocol`. Fields that concern only tools
on OpenAI's servers (``max_tool_calls``), billing and caching there (``prompt_cache_key``, ``safety_identifier``) or the
form of a stream (``stream_options``) are hints, and ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from chairlift.server.chat import ChosenLogprob
from chairlift.server.protocol import (
    Form,
    Refusals,
    SampledRequest,
    StopString,
    TemplateVariables,
    refused_beside,
)
from chairlift.tool_calls.request import MAX_TOOLS

__all__ = [
    "INCLUDABLE",
    "REFUSED",
    "DeletedResponse",
    "FunctionCall",
    "InputItemList",
    "InputTokenCount",
    "OutputMessage",
    "OutputText",
    "ReasoningItem",
    "ReasoningText",
    "Response",
    "ResponseUsage",
    "ResponsesRequest",
]

INCLUDABLE: Final = (
    *("message.output_text.logprobs", "reasoning.encrypted_content", "message.input_image.image_url"),
    *("file_search_call.results", "web_search_call.results", "web_search_call.action.sources"),
    *("computer_call_output.output.image_url", "code_interpreter_call.outputs"),
)
"""Values of ``include``. Only the first changes a reply; the others concern features that do not exist here."""

_ITEM_SCHEMA: Final = {
    "description": "A message (role and content), a reasoning item, a function_call (call_id, name, arguments) or a "
    "function_call_output (call_id, output). Parts of contents are input_text, output_text and refusal.",
    "properties": {
        "type": {"enum": ["message", "reasoning", "function_call", "function_call_output"]},
        "role": {"enum": ["user", "assistant", "system", "developer"]},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}, {"type": "null"}]},
        "call_id": {"type": "string", "description": "Of a call and of its output."},
        "name": {"type": "string", "description": "Of a called function."},
        "arguments": {"type": "string", "description": "JSON text of an object."},
        "output": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]},
    },
}
_TOOL_SCHEMA: Final = {
    "description": "A function that the model may call. Built-in tools are refused by name.",
    "required": ["type", "name"],
    "properties": {
        "type": {"const": "function"},
        "name": {"type": "string", "pattern": "^[A-Za-z0-9_.-]{1,64}$"},
        "description": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "parameters": {"description": "JSON schema of the arguments, an object.", "type": ["object", "null"]},
        "strict": {"type": ["boolean", "null"]},
    },
}
InputItem = Annotated[dict[str, Any], Meta(max_length=64, extra_json_schema=_ITEM_SCHEMA)]
FunctionTool = Annotated[dict[str, Any], Meta(max_length=16, extra_json_schema=_TOOL_SCHEMA)]
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]


class TextOptions(msgspec.Struct, kw_only=True):
    """The field ``text``."""

    format: Form | None = None
    """Type ``text``, ``json_object`` or ``json_schema`` (with ``schema``; always enforced, whatever ``strict`` is)."""
    verbosity: str | None = None
    """Ignored."""


class ReasoningOptions(msgspec.Struct, kw_only=True):
    """The field ``reasoning``."""

    effort: Annotated[str, Meta(max_length=32)] | None = None
    """none, minimal, low, medium, high, xhigh or max, if the chat template uses it."""
    summary: str | None = None
    """Ignored: ``content`` has the whole reasoning."""
    generate_summary: str | None = None
    """Older name of summary."""


class ResponsesRequest(SampledRequest, kw_only=True):
    """The body of POST /v1/responses."""

    input: str | Annotated[list[InputItem], Meta(min_length=1, max_length=4096)]
    """A text of the user, or the items of the conversation."""
    instructions: Annotated[str, Meta(max_length=2**24)] | None = None
    """System message. Instructions of the previous response no longer apply."""
    previous_response_id: Annotated[str, Meta(max_length=128)] | None = None
    """Id of a stored response whose conversation continues."""
    store: bool | None = None
    """true: keep the response in memory for previous_response_id and GET. Otherwise it is not kept."""
    max_output_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    """Most tokens, including reasoning. Without it: as many as fit."""
    tools: Annotated[list[FunctionTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Annotated[str, Meta(max_length=64)] | Annotated[dict[str, Any], Meta(max_length=16)] | None = None
    """auto, none, required, a function by name, or allowed_tools."""
    parallel_tool_calls: bool | None = None
    """false: calls after the first are dropped from the answer."""
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: Annotated[list[Annotated[str, Meta(max_length=64)]], Meta(max_length=16)] | None = None
    """``message.output_text.logprobs``: log-probabilities of the answer's tokens."""
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    """Number of most likely tokens at each position to report as well."""
    truncation: Annotated[str, Meta(max_length=16)] | None = None
    """disabled: a conversation that is too long is refused."""
    metadata: Metadata | None = None
    """Copied to the reply."""
    user: Annotated[str, Meta(max_length=256)] | None = None
    """Name of the caller. Without API keys, it decides whose share of the engine the request uses."""
    stop: StopString | Annotated[list[StopString], Meta(max_length=16)] | None = None
    chat_template_kwargs: TemplateVariables | None = None


_ALONE: Final = "responses are made while the client waits; leave it out"
REFUSED: Final[Refusals] = refused_beside(
    ResponsesRequest,
    {
        "background": ((), _ALONE),
        "conversation": ((), "conversations are not kept; send the items in input, or previous_response_id"),
        "prompt": ((), "prompts are not kept; send the text in input and instructions"),
        "context_management": ((), "conversations are not compacted; send what the model is to read in input"),
        "moderation": ((), "the server moderates nothing; leave it out"),
        "messages": ((), "it belongs to /v1/chat/completions; send input"),
        "response_format": (({"type": "text"},), "send text.format"),
        "max_tokens": ((), "send max_output_tokens"),
        "max_completion_tokens": ((), "send max_output_tokens"),
        "reasoning_effort": ((), "send reasoning.effort"),
        "logprobs": ((), "send include with message.output_text.logprobs, and top_logprobs"),
        "functions": ((), "send tools"),
        "add_special_tokens": ((), "the chat template writes its own special tokens; leave it out"),
    },
)


class ResponseError(msgspec.Struct, kw_only=True):
    """Reason why a response failed."""

    code: str
    message: str


class IncompleteDetails(msgspec.Struct, kw_only=True):
    """Reason why a response is incomplete."""

    reason: str


class OutputText(msgspec.Struct, kw_only=True, tag_field="type", tag="output_text"):
    """A part of a message."""

    text: str
    annotations: list[Any] = []
    logprobs: list[ChosenLogprob] = []


class OutputMessage(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    """Text of the answer."""

    id: str
    role: Literal["assistant"] = "assistant"
    status: str
    content: list[OutputText]


class FunctionCall(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call"):
    """A call that the model wants the client to make. Its result is a function_call_output with the same call_id."""

    id: str
    call_id: str
    name: str
    arguments: str
    """JSON text of an object."""
    status: str


class ReasoningText(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning_text"):
    """A part of the reasoning."""

    text: str


class ReasoningItem(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning"):
    """Reasoning of the model before its answer."""

    id: str
    summary: list[Any] = []
    content: list[ReasoningText]
    encrypted_content: None = None
    """Always null: content has the reasoning, which may be sent back."""
    status: str


class InputTokensDetails(msgspec.Struct, kw_only=True):
    """Part of :class:`ResponseUsage`."""

    cached_tokens: int


class OutputTokensDetails(msgspec.Struct, kw_only=True):
    """Part of :class:`ResponseUsage`."""

    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, kw_only=True):
    """Numbers of input and output tokens."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class Response(msgspec.Struct, kw_only=True):
    """The answer to a request, with the fields of the request."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: str
    """in_progress, completed, incomplete or failed."""
    background: bool = False
    completed_at: int | None = None
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None = None
    model: str
    output: list[OutputMessage | FunctionCall | ReasoningItem] = []
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, Any]
    service_tier: str
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    user: str | None
    metadata: dict[str, str]
    tool_call_errors: list[str] | UnsetType = UNSET
    """What was wrong with text that began like a tool call and is part of a message."""


class DeletedResponse(msgspec.Struct, kw_only=True):
    """The reply to DELETE."""

    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class InputTokenCount(msgspec.Struct, kw_only=True):
    """Number of tokens in the prompt of a conversation."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class InputItemList(msgspec.Struct, kw_only=True):
    """A page of the items before a response's answer."""

    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
