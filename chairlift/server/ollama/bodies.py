"""Types of requests and responses of Ollama's API.

Beyond Ollama's fields, requests that compute have the fields of scheduling of the other APIs, such as ``priority`` and
``deadline_ms``.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec
from msgspec import UNSET, Meta, UnsetType

from chairlift.server.openai.chat import ChosenLogprob
from chairlift.server.openai.protocol import CacheSalt, Milliseconds, ModelName, Refusals, TokenId
from chairlift.server.openai.translation import MAX_MESSAGES

__all__ = [
    "REFUSED",
    "REFUSED_OPTIONS",
    "SCHEDULING",
    "OllamaChat",
    "OllamaChatReply",
    "OllamaDetails",
    "OllamaEmbed",
    "OllamaEmbedReply",
    "OllamaEmbedding",
    "OllamaEmbeddingReply",
    "OllamaError",
    "OllamaFunction",
    "OllamaGenerate",
    "OllamaGenerateReply",
    "OllamaMessage",
    "OllamaModel",
    "OllamaModels",
    "OllamaOptions",
    "OllamaProgress",
    "OllamaScheduled",
    "OllamaShow",
    "OllamaShowReply",
    "OllamaToolCall",
    "OllamaVersion",
]

_INT32: Final = 2**31 - 1
_Whole = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
_Number = Annotated[float, Meta(ge=-1e300, le=1e300)]


class OllamaOptions(msgspec.Struct, kw_only=True):
    """The object ``options`` of a request. A missing value is the default of the model's files, not Ollama's."""

    num_predict: _Whole | None = None
    """Maximum number of output tokens. 0 and below: as many as fit."""
    temperature: _Number | None = None
    top_k: _Whole | None = None
    top_p: _Number | None = None
    min_p: _Number | None = None
    seed: _Whole | None = None
    """Below 0: a random seed."""
    stop: str | list[str] | None = None
    repeat_penalty: _Number | None = None
    """The penalty applies to all tokens so far, not to the last ``repeat_last_n`` only."""
    presence_penalty: _Number | None = None
    frequency_penalty: _Number | None = None
    repeat_last_n: _Whole | None = None
    """0: no penalties. -1: all tokens. Other values are refused if there are penalties."""
    penalize_newline: bool | None = None
    """false is refused if there are penalties."""
    num_ctx: _Whole | None = None
    """Has no effect: every request may have the server's whole length."""


class OllamaScheduled(msgspec.Struct, kw_only=True):
    """Fields that all requests for work of the model share."""

    model: ModelName | None = None
    """Name of the model or of an adapter, with or without ``:latest``."""
    options: OllamaOptions | None = None
    keep_alive: _Number | Annotated[str, Meta(max_length=64)] | None = None
    """Time without requests after which the model is unloaded, such as 300, ``5m``, 0 (at once) or -1 (never). A server
    with one model keeps it loaded."""
    priority: Annotated[int, Meta(ge=-(2**31), le=_INT32)] | None = None
    queue_timeout: Annotated[float, Meta(gt=0, le=1_000_000)] | None = None
    service_tier: Annotated[str, Meta(max_length=64)] | None = None
    ttft_ms: Milliseconds | None = None
    deadline_ms: Milliseconds | None = None
    user: Annotated[str, Meta(max_length=256)] | None = None


class _Generating(OllamaScheduled, kw_only=True):
    stream: bool | None = None
    """Whether the response is a stream of lines (default: true)."""
    format: Annotated[str, Meta(max_length=64)] | dict[str, Any] | None = None
    """``json``, or a JSON schema."""
    think: bool | Annotated[str, Meta(max_length=16)] | None = None
    """true, false, or an effort such as ``high``."""
    truncate: bool | None = None
    """false: a conversation that is too long is refused, instead of losing its oldest turns."""
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tpot_ms: Milliseconds | None = None
    cache_salt: CacheSalt | None = None


SCHEDULING: Final = ("priority", "queue_timeout", "service_tier", "ttft_ms", "deadline_ms", "user")
"""Fields of scheduling that every request of the other APIs has under the same name."""


class OllamaChat(_Generating, kw_only=True):
    """The body of POST /api/chat."""

    messages: Annotated[list[dict[str, Any]], Meta(max_length=MAX_MESSAGES)] | None = None
    """Messages with ``role``, ``content``, ``images`` (base64), ``thinking``, ``tool_calls`` and ``tool_name``. Without
    messages, the response says that the model is loaded."""
    tools: list[dict[str, Any]] | None = None
    """Functions that the model may call."""


class OllamaGenerate(_Generating, kw_only=True):
    """The body of POST /api/generate."""

    prompt: str | None = None
    """Without a prompt, the response says that the model is loaded."""
    suffix: str | None = None
    """Text after the output, for models that can fill in the middle."""
    system: str | None = None
    """System message."""
    raw: bool | None = None
    """true: the prompt is used as it is, without the chat template."""
    images: list[str] | None = None
    """Images in base64."""
    context: list[TokenId] | None = None
    """Token ids of the conversation before, from the response to an earlier request."""


class OllamaEmbed(OllamaScheduled, kw_only=True):
    """The body of POST /api/embed."""

    input: str | list[str] | None = None
    truncate: bool | None = None
    """false: a text that is too long is refused, instead of losing its end."""
    dimensions: Annotated[int, Meta(ge=1, le=_INT32)] | None = None


class OllamaEmbedding(OllamaScheduled, kw_only=True):
    """The body of POST /api/embeddings, the older form of /api/embed."""

    prompt: str | None = None


class OllamaShow(msgspec.Struct, kw_only=True):
    """A body that names a model: of POST /api/show, /api/pull, /api/push and /api/create, and DELETE /api/delete."""

    model: ModelName | None = None
    name: ModelName | None = None
    """Older name of ``model``."""
    stream: bool | None = None
    """Whether the response to a pull is a stream of lines (default: true)."""


class OllamaFunction(msgspec.Struct, kw_only=True):
    """Function name and arguments of a tool call."""

    index: int
    name: str
    arguments: msgspec.Raw
    """A JSON object."""


class OllamaToolCall(msgspec.Struct, kw_only=True):
    """A call that the model wants the client to make."""

    id: str
    function: OllamaFunction


class OllamaMessage(msgspec.Struct, kw_only=True):
    """The generated message, or the new part of it."""

    role: str = "assistant"
    content: str = ""
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaToolCall] | UnsetType = UNSET


class _Reply(msgspec.Struct, kw_only=True):
    model: str
    created_at: str
    """Time in RFC 3339."""
    done: bool = False
    done_reason: str | UnsetType = UNSET
    """``stop``, ``length``, or ``load`` for a request without a prompt."""
    total_duration: int | UnsetType = UNSET
    """Nanoseconds from the arrival of the request to the end of its output."""
    load_duration: int | UnsetType = UNSET
    """0, because the model is loaded before requests are served."""
    prompt_eval_count: int | UnsetType = UNSET
    """Number of prompt tokens."""
    prompt_eval_duration: int | UnsetType = UNSET
    """Nanoseconds from the first step to the first output token."""
    eval_count: int | UnsetType = UNSET
    """Number of output tokens."""
    eval_duration: int | UnsetType = UNSET
    """Nanoseconds from the first output token to the last."""
    tool_call_errors: list[str] | UnsetType = UNSET
    """Descriptions of malformed and of incomplete tool calls in the output."""
    logprobs: list[ChosenLogprob] | UnsetType = UNSET


class OllamaChatReply(_Reply, kw_only=True):
    """The response of /api/chat, or a line of its stream."""

    message: OllamaMessage


class OllamaGenerateReply(_Reply, kw_only=True):
    """The response of /api/generate, or a line of its stream."""

    response: str = ""
    thinking: str | UnsetType = UNSET
    context: list[int] | UnsetType = UNSET
    """Token ids of prompt and output, for the field ``context`` of the next request; missing with ``raw``."""


class OllamaEmbedReply(msgspec.Struct, kw_only=True):
    """The response of /api/embed: vectors of length 1, in the order of the input."""

    model: str
    embeddings: list[list[float]]
    total_duration: int = 0
    load_duration: int = 0
    prompt_eval_count: int = 0


class OllamaEmbeddingReply(msgspec.Struct, kw_only=True):
    """The response of /api/embeddings: the vector as the model makes it."""

    embedding: list[float]


class OllamaDetails(msgspec.Struct, kw_only=True):
    """Facts about a model, as texts. What is not known is empty."""

    parent_model: str = ""
    """Name of the model that an adapter adapts."""
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaModel(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A model in the lists of /api/tags and /api/ps."""

    name: str
    model: str
    """The same as ``name``."""
    modified_at: str
    size: int
    """Bytes of the weights in memory."""
    digest: str
    details: OllamaDetails
    expires_at: str | None = None
    """Only in /api/ps: a time far ahead, because the model stays loaded."""
    size_vram: int | None = None
    """Only in /api/ps."""
    context_length: int | None = None
    """Only in /api/ps: maximum length of prompt and output together, in tokens."""


class OllamaModels(msgspec.Struct, kw_only=True):
    """The response of /api/tags and /api/ps."""

    models: list[OllamaModel]


class OllamaShowReply(msgspec.Struct, kw_only=True):
    """The response of /api/show."""

    modelfile: str
    parameters: str
    """The model's default sampling parameters, one per line."""
    template: str
    """The chat template, in Jinja."""
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class OllamaProgress(msgspec.Struct, kw_only=True):
    """The response of /api/pull, or a line of its stream."""

    status: str


class OllamaVersion(msgspec.Struct, kw_only=True):
    """The response of /api/version."""

    version: str
    """The version of Ollama whose API is served. Clients compare it with the version that they need."""
    chairlift: str


class OllamaError(msgspec.Struct, kw_only=True):
    """Response of every path if an error occurs."""

    error: str


_IN_OPTIONS: Final = "it belongs into options; Ollama ignores it here"
_PENALTY: Final = "penalties of this kind are not supported; leave it out"

REFUSED: Final[Refusals] = {
    **dict.fromkeys(
        (*("num_predict", "temperature", "top_k", "top_p", "min_p", "seed", "stop", "num_ctx"), "repeat_penalty"),
        ((), _IN_OPTIONS),
    ),
    "max_tokens": ((), "it is named num_predict here, and belongs into options"),
    "response_format": ((), "it is named format here"),
    "template": ((), "templates come from the model or the operator; send raw true with the whole prompt"),
    "width": ((0,), "no images are made here; leave it out"),
    "height": ((0,), "no images are made here; leave it out"),
    "steps": ((0,), "no images are made here; leave it out"),
    "tools": ((), "they belong to /api/chat"),
    "messages": ((), "they belong to /api/chat"),
    "prompt": ((), "it belongs to /api/generate; send messages"),
    "system": ((), "send it as a message with the role system"),
    "images": ((), "send them in a message"),
    "suffix": ((), "it belongs to /api/generate"),
    "raw": ((), "it belongs to /api/generate"),
    "context": ((), "it belongs to /api/generate; send the messages before"),
}
"""Refused fields of requests. An entry applies only if the type of the body has no such field."""
REFUSED_OPTIONS: Final[Refusals] = {
    "mirostat": ((0,), "mirostat is not supported; use top_p or min_p"),
    "tfs_z": ((1,), "tail-free sampling is not supported; use min_p"),
    "typical_p": ((1,), "typical sampling is not supported; use min_p"),
    "dry_multiplier": ((0,), _PENALTY),
    "xtc_probability": ((0,), "XTC sampling is not supported; leave it out"),
    "max_tokens": ((), "it is named num_predict here"),
    "repetition_penalty": ((1,), "it is named repeat_penalty here"),
}
"""Names of ``options`` that would change the output and are not supported."""
