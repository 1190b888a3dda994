"""Request and response types of /v1/responses, OpenAI's Responses API.

Known fields that are not supported follow the rule of :mod:`~chairlift.server.openai.protocol`. Three kinds of fields
are hints, so they are ignored: fields for tools on OpenAI's servers (``max_tool_calls``), for billing and caching on
these servers (``prompt_cache_key``, ``safety_identifier``), and for the form of a stream (``stream_options``).
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from chairlift.server.openai.chat import ChosenLogprob
from chairlift.server.openai.protocol import (
    CacheRetention,
    Form,
    PromptCacheOptions,
    Refusals,
    SampledRequest,
    SessionName,
    StopString,
    TemplateVariables,
    refused_elsewhere,
)
from chairlift.text.tool_calls.request import MAX_TOOLS

__all__ = [
    "CARRIED_REASONING",
    "ENCRYPTED_REASONING",
    "INCLUDABLE",
    "REFUSED",
    "CustomToolCall",
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

ENCRYPTED_REASONING: Final = "reasoning.encrypted_content"
INCLUDABLE: Final = (
    *("message.output_text.logprobs", ENCRYPTED_REASONING, "message.input_image.image_url"),
    *("file_search_call.results", "web_search_call.results", "web_search_call.action.sources"),
    *("computer_call_output.output.image_url", "code_interpreter_call.outputs"),
)
"""Accepted values of ``include``. Only the first two values change a response; the others concern features that this
server does not have."""
CARRIED_REASONING: Final = "chairlift:"
"""Beginning of the ``encrypted_content`` of this server's reasoning items. The rest is the text, which is not
encrypted. Some clients send back only this field and ``summary``."""

_ITEM_SCHEMA: Final = {
    "description": "A message (role and content), a reasoning item, a function_call (call_id, name, arguments), a "
    "function_call_output (call_id, output), or a call of a custom tool or a shell and its output. Parts of contents "
    "are input_text, output_text and refusal.",
    "properties": {
        "type": {"type": "string"},
        "role": {"enum": ["user", "assistant", "system", "developer"]},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}, {"type": "null"}]},
        "call_id": {"type": "string", "description": "Of a call and of its output."},
        "name": {"type": "string", "description": "Of a called function."},
        "arguments": {"type": "string", "description": "JSON text of an object."},
        "output": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]},
    },
}
_TOOL_SCHEMA: Final = {
    "description": "A function, a custom tool (its input is a text) or a namespace of both. Tools of other types are"
    " left out of the prompt.",
    "required": ["type"],
    "properties": {
        "type": {"type": "string"},
        "name": {"type": "string", "pattern": "^[A-Za-z0-9_.-]{1,128}$"},
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
    """``type`` is ``text``, ``json_object`` or ``json_schema``. A schema is always enforced, even if ``strict`` is
    false."""
    verbosity: str | None = None
    """Ignored: the server cannot change the verbosity of an output."""


class ReasoningOptions(msgspec.Struct, kw_only=True):
    """The field ``reasoning``."""

    effort: Annotated[str, Meta(max_length=32)] | None = None
    """``none``, ``minimal``, ``low``, ``medium``, ``high``, ``xhigh`` or ``max``. The field has an effect if the chat
    template uses it."""
    summary: str | None = None
    """Ignored, because ``content`` has the whole reasoning."""
    generate_summary: str | None = None
    """Older name of ``summary``."""
    context: Annotated[str, Meta(max_length=32)] | None = None
    """``auto``: the chat template decides which reasoning of earlier turns it prints. ``current_turn``: reasoning items
    before the last message of the user are left out."""


class ResponsesRequest(SampledRequest, kw_only=True):
    """The body of POST /v1/responses."""

    input: str | Annotated[list[InputItem], Meta(min_length=1, max_length=4096)]
    """A text of the user, or a list of items of the conversation."""
    instructions: Annotated[str, Meta(max_length=2**24)] | None = None
    """System message of this request. The previous response's instructions are not used again."""
    previous_response_id: Annotated[str, Meta(max_length=128)] | None = None
    """Id of the stored response that this request continues."""
    store: bool | None = None
    """false: do not keep the response in memory. Otherwise it is kept, within limits, for ``previous_response_id``,
    ``item_reference`` and GET."""
    max_output_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    """Maximum number of output tokens, including reasoning. If missing, the output may fill the model's length."""
    tools: Annotated[list[FunctionTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Annotated[str, Meta(max_length=64)] | Annotated[dict[str, Any], Meta(max_length=16)] | None = None
    """``auto``, ``none``, ``required``, or an object that names a function or is of the type ``allowed_tools``."""
    parallel_tool_calls: bool | None = None
    """false: tool calls after the first are dropped from the response."""
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: Annotated[list[Annotated[str, Meta(max_length=64)]], Meta(max_length=16)] | None = None
    """``message.output_text.logprobs`` adds the log-probabilities of the output tokens."""
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    """Number of alternatives at each position, the most likely tokens, whose log-probabilities are returned."""
    truncation: Annotated[str, Meta(max_length=16)] | None = None
    """``disabled``: a conversation that is too long for the model is refused. ``auto``: its oldest turns are left
    out."""
    metadata: Metadata | None = None
    """Key -> value, copied to the response."""
    user: Annotated[str, Meta(max_length=256)] | None = None
    """Name of the caller. If there are no API keys, the scheduler treats it as the tenant that is charged for the
    request."""
    prompt_cache_key: SessionName | None = None
    """Name of the conversation, if there is no ``session_id``."""
    prompt_cache_retention: CacheRetention | None = None
    """``in_memory`` or ``24h``, as in chats."""
    prompt_cache_options: PromptCacheOptions | None = None
    """As in chats."""
    stop: StopString | Annotated[list[StopString], Meta(max_length=16)] | None = None
    chat_template_kwargs: TemplateVariables | None = None


_ALONE: Final = "responses are made while the client waits; leave it out"
REFUSED: Final[Refusals] = refused_elsewhere(
    ResponsesRequest,
    {
        "background": ((), _ALONE),
        "conversation": ((), "conversations are not kept; send the items in input, or previous_response_id"),
        "prompt": ((), "prompts are not kept; send the text in input and instructions"),
        "context_management": ((), "conversations are not compacted; send what the model is to read in input"),
        "moderation": ((), "the server moderates nothing; leave it out"),
        "background_options": ((), _ALONE),
        "image": (({"context_compression": "disabled"},), "images are read as they are; leave it out"),
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
    """A text part of a message."""

    text: str
    annotations: list[Any] = []
    logprobs: list[ChosenLogprob] = []


class OutputMessage(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    """A message with generated text."""

    id: str
    role: Literal["assistant"] = "assistant"
    status: str
    content: list[OutputText]


class FunctionCall(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call"):
    """A tool call that the model wants the client to make. The client sends the result in a ``function_call_output``
    item with the same call_id."""

    id: str
    call_id: str
    namespace: str | UnsetType = UNSET
    """Namespace of the tool, if it has one."""
    name: str
    arguments: str
    """The arguments: a JSON object, as text."""
    status: str


class CustomToolCall(msgspec.Struct, kw_only=True, tag_field="type", tag="custom_tool_call"):
    """A call of a custom tool, whose input is a text. The client sends the result in a ``custom_tool_call_output`` item
    with the same call_id."""

    id: str
    call_id: str
    namespace: str | UnsetType = UNSET
    name: str
    input: str


class ReasoningText(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning_text"):
    """A text part of the reasoning."""

    text: str


class ReasoningItem(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning"):
    """An item with the reasoning of the model."""

    id: str
    summary: list[Any] = []
    content: list[ReasoningText]
    encrypted_content: str | msgspec.UnsetType = msgspec.UNSET
    """The text again, behind ``CARRIED_REASONING``, if the request asked for it."""
    status: str


class InputTokensDetails(msgspec.Struct, kw_only=True):
    """Number of cached input tokens, a part of :class:`ResponseUsage`."""

    cached_tokens: int
    cache_write_tokens: int = 0
    """Computed tokens before a breakpoint: those that the request asks to keep, and that were not in the cache."""


class OutputTokensDetails(msgspec.Struct, kw_only=True):
    """Number of reasoning tokens, a part of :class:`ResponseUsage`."""

    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, kw_only=True):
    """Numbers of input and output tokens."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class Response(msgspec.Struct, kw_only=True):
    """A response of the API, with the fields copied from the request."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: str
    """``in_progress``, ``completed``, ``incomplete`` or ``failed``."""
    background: bool = False
    completed_at: int | None = None
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None = None
    model: str
    output: list[OutputMessage | FunctionCall | CustomToolCall | ReasoningItem] = []
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
    truncation: str = "disabled"
    usage: ResponseUsage | UnsetType = UNSET
    """Missing until the response has ended: OpenAI's types have no null here."""
    user: str | UnsetType = UNSET
    metadata: dict[str, str]
    tool_call_errors: list[str] | UnsetType = UNSET
    """Descriptions of malformed tool calls in the output. The text of these calls stays in a message."""


class DeletedResponse(msgspec.Struct, kw_only=True):
    """The response to DELETE."""

    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class InputTokenCount(msgspec.Struct, kw_only=True):
    """The response of /v1/responses/input_tokens: number of tokens in the prompt."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class InputItemList(msgspec.Struct, kw_only=True):
    """A page of the input items of a stored response."""

    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
