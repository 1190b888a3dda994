"""Types and limits of the fields in request bodies: OpenAI's fields and vLLM's extensions.

The rule for known fields that are not supported:

- A value that equals the default (null, false, an empty text, list or object, or a value named below) is accepted.
  For fields with a JSON schema only null is the default, because ``{}`` and ``false`` are schemas.
- A hint is ignored, because the output is right without it. A response header names the ignored fields
  (``Warning: 299 chairlift "ignored: user"``). Unknown fields are treated as hints.
- A value that would change the output is refused with status 400, and so is a misspelt field (``temprature``).

``request_id`` has no effect. ``user`` names the tenant of the request if the server has no API keys and its scheduling
policy is fair between tenants. Otherwise it is ignored.

``service_tier`` is ``auto``, ``default``, ``flex``, ``priority``, ``scale`` (the same as ``auto``, because there is no
prepaid use) or a class of the server's settings; other values are refused. With the scheduling policy ``fcfs`` it has
no effect: the response says ``default``, and deadlines and a ``priority`` other than 0 are refused. The header
``x-slo-ttft-ms`` is used if the field ``ttft_ms`` is missing.

A text completion ignores the fields of chats for tool calls and reasoning, except ``tools`` and ``tool_choice``.

===================  ================================================================================================
What happens         Fields
===================  ================================================================================================
supported, all       ``model``, ``stream``, ``stream_options`` (``include_usage``, ``continuous_usage_stats``),
                     ``max_tokens``, ``logprobs``, ``logit_bias``, ``stop_token_ids``, ``allowed_token_ids``,
                     the parameters of :data:`~chairlift.base.sampling_params.PARAMETERS` (``prompt_logprobs`` not with
                     ``stream``), ``truncate_prompt_tokens``, ``return_token_ids``, ``return_tokens_as_token_ids``,
                     one of ``response_format``, ``structured_outputs``, ``guided_json``, ``guided_regex``,
                     ``guided_choice``, ``guided_grammar`` and ``structural_tag``,
                     ``cache_salt``, ``session_id``, ``prompt_cache_key``, ``prompt_cache_retention``,
                     ``prompt_cache_options``, ``service_tier``, ``user``, ``prediction`` (ignored, and named,
                     where the engine takes no drafts), and ours: ``queue_timeout``
                     (seconds), ``return_timing``
supported, chat      ``messages``, ``max_completion_tokens``, ``top_logprobs``, ``add_generation_prompt``,
                     ``continue_final_message``, ``chat_template_kwargs``, ``tools``, ``tool_choice``,
                     ``parallel_tool_calls``, ``reasoning_effort``, ``thinking_token_budget`` and its other
                     name ``thinking_budget``, ``include_reasoning``, ``separate_reasoning``
supported, texts     ``prompt``, ``suffix`` (where the model can fill in the middle), ``echo``, ``best_of`` (not with
                     ``stream``), ``add_special_tokens``
ignored              ``metadata``, ``request_id``, ``safety_identifier``, ``verbosity``,
                     ``spaces_between_special_tokens``, ``mm_processor_kwargs``
refused              ``functions``, ``function_call`` but ``none``, of texts ``tools`` and ``tool_choice``,
                     ``json_schema``, ``grammar``, ``regex``, ``ebnf``,
                     ``extra_body``, ``modalities`` but ``["text"]``, ``audio``, ``web_search_options``, ``store``,
                     ``moderation``, ``chat_template``, ``documents``, ``lora_path``,
                     ``kv_transfer_params``, ``prompt_embeds``, ``logits_processors``, ``use_beam_search``,
                     ``length_penalty`` but 1; and where the other endpoint has the field:
                     ``thinking_token_budget``, ``thinking_budget``, ``echo``, ``best_of``, ``suffix``,
                     ``add_special_tokens``, ``max_completion_tokens``, ``top_logprobs``,
                     ``continue_final_message``, ``chat_template_kwargs``
===================  ================================================================================================
"""

from __future__ import annotations

import difflib
import functools
import re
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import msgspec
import msgspec.inspect
from msgspec import Meta

from chairlift.base.sampling_params import PARAMETERS, SamplingLimits, SamplingParams
from chairlift.base.structured_outputs import MAX_GRAMMAR_CHARS
from chairlift.errors import RequestError
from chairlift.server.http.errors import ApiError
from chairlift.server.openai.structured import FIELDS, structured_outputs
from chairlift.text.tool_calls.request import MAX_TOOLS

__all__ = [
    "DEFAULT_MAX_TOKENS",
    "REFUSED",
    "AdapterName",
    "CacheRetention",
    "ChatRequest",
    "CompletionRequest",
    "DetokenizeRequest",
    "GenerationRequest",
    "Message",
    "Prediction",
    "PromptCacheOptions",
    "Refusals",
    "SampledRequest",
    "SessionName",
    "StopString",
    "StreamOptions",
    "TokenizeRequest",
    "no_prompt_logprobs_in_stream",
    "parse",
    "refused_elsewhere",
    "sampling_params",
    "template_variables",
    "unknown_inside",
    "warning_headers",
]

DEFAULT_MAX_TOKENS: Final = 16
"""Default of ``max_tokens`` in a request to /v1/completions."""
_LIMITS: Final = SamplingLimits()
_INT32: Final = 2**31 - 1
_MAX_MESSAGES: Final = 1024
_MAX_PROMPTS: Final = 64
_MAX_IDS: Final = 2**20
"""Maximum number of token ids in one list. A body of the largest allowed size could contain more."""

_MAX_COMPARED: Final = 16
_MAX_LENGTH_DIFFERENCE: Final = 2
_MIN_SIMILARITY: Final = 0.88
"""Minimum similarity (0 to 1) of an unknown field to a known one that counts as a misspelling. A less similar name is
taken for a field of another server."""
_OTHER_SERVERS: Final = frozenset(("speed",))
"""Fields of other servers that look like a misspelt field of this server, but are not misspelt."""

_END: Final = r"$(?!\n)"
"""Regular expression for the end of a text. ``$`` alone also matches before a final newline."""
_SALT: Final = "^[A-Za-z0-9_-]{0,64}" + _END
_NAME: Final = "^[A-Za-z][A-Za-z0-9_]{0,63}" + _END
_ID: Final = "^(0|[1-9][0-9]{0,9})" + _END
_CONTENT: Final = "^content" + _END
_TEXT: Final = "^text" + _END
_CACHE_MODE: Final = "^(implicit|explicit)" + _END
_CACHE_TTL: Final = "^30m" + _END
_RETENTION: Final = "^(in_memory|in-memory|24h)" + _END
_ADAPTER: Final = "^[A-Za-z0-9][A-Za-z0-9._/:-]{0,127}" + _END
_IN_WORDS: Final = {
    _CONTENT: "'content'",
    _TEXT: "'text'",
    _CACHE_MODE: "'implicit' or 'explicit'",
    _CACHE_TTL: "'30m'",
    _RETENTION: "'in_memory' or '24h'",
    _ADAPTER: "a name of at most 128 characters from A-Z, a-z, 0-9 and '._/:-' that begins with a letter or a digit",
    _SALT: "a text of at most 64 characters from A-Z, a-z, 0-9, '_' and '-'",
    _NAME: "a text of at most 64 characters from A-Z, a-z, 0-9 and '_' that begins with a letter",
    _ID: "a token id in decimal digits, such as '50', without sign and leading zeros",
}

TokenId = Annotated[int, Meta(ge=0, le=_INT32)]
PromptItem = str | TokenId | list[TokenId]
StopString = Annotated[str, Meta(min_length=1, max_length=_LIMITS.max_stop_length)]
AdapterName = Annotated[str, Meta(pattern=_ADAPTER)]
ModelName = Annotated[str, Meta(max_length=256)]
Milliseconds = Annotated[float, Meta(gt=0, le=1_000_000_000)]
CacheSalt = Annotated[str, Meta(pattern=_SALT)]
CacheRetention = Annotated[str, Meta(pattern=_RETENTION)]
SessionName = Annotated[str, Meta(max_length=256)]
Scalar = (
    Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
    | Annotated[float, Meta(ge=-1e300, le=1e300)]
    | Annotated[str, Meta(max_length=4096)]
    | bool
    | None
)
VariableName = Annotated[str, Meta(pattern=_NAME)]
TemplateVariables = Annotated[dict[VariableName, Scalar], Meta(max_length=32)]
Form = Annotated[dict[str, Any], Meta(max_length=64)]
GrammarText = Annotated[str, Meta(max_length=MAX_GRAMMAR_CHARS)]
LogitBias = Annotated[
    dict[Annotated[str, Meta(pattern=_ID)], Annotated[float, Meta(ge=-100, le=100)]],
    Meta(max_length=_LIMITS.max_logit_bias),
]
_MAPPINGS: Final = {"logit_bias": LogitBias, "chat_template_kwargs": TemplateVariables}
"""Field -> type of its value. The value is an object whose names the client chooses."""


class StreamOptions(msgspec.Struct, kw_only=True):
    """Options for the contents of a stream."""

    include_usage: bool | None = None
    """Send a last chunk with the token counts of the whole request."""
    continuous_usage_stats: bool | None = None
    """Send the token counts so far in every chunk."""


class PredictionPart(msgspec.Struct, kw_only=True):
    """One part of a predicted text."""

    type: Annotated[str, Meta(pattern=_TEXT)]
    text: str


class Prediction(msgspec.Struct, kw_only=True):
    """A text that large parts of the output are expected to repeat, such as a file that is being edited."""

    type: Annotated[str, Meta(pattern=_CONTENT)]
    content: str | Annotated[list[PredictionPart], Meta(min_length=1, max_length=_MAX_MESSAGES)]

    @property
    def whole(self) -> str:
        """The predicted text, all parts joined."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class PromptCacheOptions(msgspec.Struct, kw_only=True):
    """The field ``prompt_cache_options``: the whole prompt and explicit breakpoints are kept for 30 minutes."""

    mode: Annotated[str, Meta(pattern=_CACHE_MODE)] | None = None
    """``implicit`` (the default): the whole prompt is kept. ``explicit``: only the prompt up to each
    ``prompt_cache_breakpoint`` of a part."""
    ttl: Annotated[str, Meta(pattern=_CACHE_TTL)] | None = None
    """``30m``, the only value."""


class _AddressedRequest(msgspec.Struct, kw_only=True):
    model: ModelName | None = None
    stream: bool | None = None


def _number_type(name: str) -> Any:
    """Type of the field for a sampling parameter that is a number, with its range."""
    declared = PARAMETERS[name]
    # Whole numbers, also for floats, are written into the OpenAPI document without a decimal point.
    low, high = (int(each) if each == int(each) else each for each in (declared.low, declared.high))
    return Annotated[declared.kind, Meta(gt=low, le=high) if declared.above else Meta(ge=low, le=high)]


if TYPE_CHECKING:
    _SharedParameters = _AddressedRequest
else:
    _SharedParameters = msgspec.defstruct(
        "_SharedParameters",
        [(name, _number_type(name) | None, None) for name, declared in PARAMETERS.items() if declared.shared],
        bases=(_AddressedRequest,),
        module=__name__,
        kw_only=True,
    )


class SampledRequest(_SharedParameters, kw_only=True):
    """Fields that all endpoints for text generation share. ``null`` has the same effect as a missing field. The fields
    of shared sampling parameters are made from their declarations."""

    priority: Annotated[int, Meta(ge=-(2**31), le=_INT32)] | None = None
    cache_salt: CacheSalt | None = None
    """Only requests with the same salt share cached prompts."""
    session_id: SessionName | None = None
    """Name of the conversation. A fleet sends its requests to the replica that has its blocks. It gives no access."""
    queue_timeout: Annotated[float, Meta(gt=0, le=1_000_000)] | None = None
    """Maximum number of seconds that the request may wait for its first step."""
    service_tier: Annotated[str, Meta(max_length=64)] | None = None
    """Class of service. The response says which class was used."""
    ttft_ms: Milliseconds | None = None
    """Milliseconds from arrival until the first token is due."""
    tpot_ms: Milliseconds | None = None
    """Maximum time per output token after the first, in milliseconds."""
    deadline_ms: Milliseconds | None = None
    """Milliseconds from arrival until the whole output is due."""


class GenerationRequest(SampledRequest, kw_only=True):
    """Fields that chat and text completions share."""

    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=_LIMITS.max_n)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=_LIMITS.max_stop_strings)] | None = None
    logit_bias: LogitBias | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=_INT32)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=_LIMITS.max_token_id_list)] | None = None
    bad_words: Annotated[list[StopString], Meta(max_length=_LIMITS.max_bad_words)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=_MAX_IDS)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=_LIMITS.max_logprobs)] | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=_INT32)] | None = None
    """Maximum number of prompt tokens. The end of the prompt is kept, together with the special tokens that the
    tokenizer adds. -1: the largest number that leaves room for the output."""
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    """Write tokens in logprobs as ``token_id:17`` instead of their text, so that different tokens never look equal."""
    response_format: Form | None = None
    """``type`` is ``text``, ``json_object``, ``json_schema`` (always enforced, even if ``strict`` is false) or
    ``structural_tag``."""
    structured_outputs: Form | None = None
    """An object with one of ``json``, ``json_object``, ``regex``, ``choice``, ``grammar`` and ``structural_tag``."""
    guided_json: Any = None
    """Same as ``structured_outputs.json``, under vLLM's older name. The next fields are older names of its other
    members."""
    guided_regex: GrammarText | None = None
    guided_choice: Annotated[list[GrammarText], Meta(max_length=4096)] | None = None
    guided_grammar: GrammarText | None = None
    structural_tag: Form | GrammarText | None = None
    user: Annotated[str, Meta(max_length=256)] | None = None
    """Name of the caller. If there are no API keys, the scheduler treats it as the tenant that is charged for the
    request."""
    prompt_cache_key: SessionName | None = None
    """Name of the conversation, if there is no ``session_id``."""
    prompt_cache_retention: CacheRetention | None = None
    """``24h``: keep the whole prompt in files if the server keeps any (``--kv-store``), otherwise in memory for an
    hour. ``in_memory``: the default."""
    prompt_cache_options: PromptCacheOptions | None = None
    """How long, and up to where, the prompt is kept in memory."""
    prediction: Prediction | None = None
    """Text that the output is expected to repeat. It does not change the output, but speeds up the repeated parts."""
    return_timing: bool | None = None
    """Add ``timing`` to the response, or to the last chunk of each prompt: how the time was spent."""


_PART_SCHEMA: Final = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
}
_MESSAGE_SCHEMA: Final = {
    "description": "One message of a conversation. Fields that are not here reach the chat template too.",
    "required": ["role"],
    "properties": {
        "role": {
            "description": "system, developer (read as system where the template does not know it), user, assistant, "
            "tool, function, or a role that the chat template names.",
            "type": "string",
            "minLength": 1,
        },
        "content": {
            "description": "Only an assistant's message with tool_calls or reasoning_content may be without.",
            "anyOf": [{"type": "string"}, {"type": "array", "items": _PART_SCHEMA, "minItems": 1}, {"type": "null"}],
        },
        "name": {"anyOf": [{"type": "string", "minLength": 1}, {"type": "null"}]},
        "reasoning_content": {"description": "What the assistant thought; also as reasoning or thinking."},
        "tool_calls": {"anyOf": [{"type": "array", "items": {"type": "object"}}, {"type": "null"}]},
        "tool_call_id": {"description": "Of a tool's message: the call that it answers."},
    },
}
Message = Annotated[dict[str, Any], Meta(max_length=64, extra_json_schema=_MESSAGE_SCHEMA)]
"""A chat message. :func:`~chairlift.text.tokenizer.messages.normalize_messages` checks it, for HTTP and Python
alike."""


_TOOL_SCHEMA: Final = {
    "description": "A function that the model may call.",
    "required": ["function"],
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "required": ["name"],
            "properties": {
                "name": {"type": "string", "pattern": "^[A-Za-z0-9_.-]{1,128}$"},
                "description": {"type": "string"},
                "parameters": {"description": "JSON schema of the arguments, an object.", "type": "object"},
            },
        },
    },
}
Tool = Annotated[dict[str, Any], Meta(max_length=16, extra_json_schema=_TOOL_SCHEMA)]
"""A tool definition. :func:`~chairlift.text.tool_calls.request.check_tools` checks it, for HTTP and Python alike."""


class ChatRequest(GenerationRequest, kw_only=True):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1, max_length=_MAX_MESSAGES)]
    max_tokens: Annotated[int, Meta(ge=1, le=_INT32)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1, le=_INT32)] | None = None
    """The newer name of ``max_tokens``; it takes precedence. If both are missing, the output may fill the model's
    length."""
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=_LIMITS.max_logprobs)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateVariables | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    """Functions that the model may call."""
    tool_choice: Annotated[str, Meta(max_length=64)] | Annotated[dict[str, Any], Meta(max_length=16)] | None = None
    """``auto`` (the model decides), ``none``, ``required``, or an object that names a function."""
    parallel_tool_calls: bool | None = None
    """false: tool calls after the first are dropped from the response."""
    reasoning_effort: Annotated[str, Meta(max_length=32)] | None = None
    """``none``, ``minimal``, ``low``, ``medium``, ``high``, ``xhigh`` or ``max``. It has an effect if the chat
    template uses it."""
    thinking_token_budget: Annotated[int, Meta(ge=-1, le=_INT32)] | None = None
    """Maximum number of reasoning tokens. At the limit the server forces the end of the reasoning, and the final
    answer follows. -1: no limit."""
    thinking_budget: Annotated[int, Meta(ge=-1, le=_INT32)] | None = None
    """Another name of ``thinking_token_budget``, which takes precedence."""
    include_reasoning: bool | None = None
    """false: the response does not contain the reasoning. Its tokens are still counted."""
    separate_reasoning: bool | None = None
    """false: the reasoning stays in ``content``, as the model wrote it."""


class CompletionRequest(GenerationRequest, kw_only=True):
    """The body of POST /v1/completions."""

    prompt: str | Annotated[list[PromptItem], Meta(min_length=1, max_length=_MAX_IDS)]
    """A text, a list of texts, a list of token ids, or a list of such lists."""
    max_tokens: Annotated[int, Meta(ge=0, le=_INT32)] | None = None
    """Maximum number of output tokens. Default: 16. 0 is allowed with ``echo``: it returns the prompt and its
    log-probabilities."""
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    """Text after the output, for models that can fill in the middle. An empty text has no effect."""
    best_of: Annotated[int, Meta(ge=1, le=_LIMITS.max_n)] | None = None
    add_special_tokens: bool | None = None

    def prompts(self) -> list[str | list[int]]:
        """The prompts as a list. Raises ApiError for mixed lists, and for too many prompts or outputs."""
        prompts = _prompts(self.prompt)
        answers = max(self.n or 1, self.best_of or 1)
        if len(prompts) > _MAX_PROMPTS or len(prompts) * answers > _MAX_PROMPTS:
            each = f" with {answers} answers each" if answers > 1 else ""
            raise ApiError(
                400,
                f"{len(prompts)} prompts{each} were asked for; a call takes at most"
                f" {_MAX_PROMPTS} prompts and {_MAX_PROMPTS} answers in all: split it",
                code="invalid_value",
                param="prompt",
            )
        return prompts


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """The body of POST /tokenize: a prompt, or messages."""

    model: ModelName | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1, max_length=_MAX_MESSAGES)] | None = None
    add_special_tokens: bool | None = None
    """Allowed only with a prompt. For messages, the chat template writes the special tokens."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateVariables | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    """Allowed only with messages."""
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """The body of POST /detokenize."""

    model: ModelName | None = None
    tokens: Annotated[list[TokenId], Meta(max_length=2**18)]


_TOOLS: Final = "it belongs to /v1/chat/completions; leave it out"
_OLD_TOOLS: Final = "it is the older form of tools; send tools instead"
_GRAMMAR: Final = "answers are held to a form by response_format or structured_outputs; use one of them"
_CHAT_ONLY: Final = "it belongs to /v1/chat/completions; leave it out"
_ELSEWHERE: Final = "it belongs to /v1/chat/completions or /v1/completions; leave it out"
_FORM_ELSEWHERE: Final = "it asks for a form of the answer as /v1/chat/completions has it; use this endpoint's field"
_TEXT_ONLY: Final = "it belongs to /v1/completions; leave it out"

Refusals = Mapping[str, tuple[tuple[Any, ...], str]]
"""Name of a refused field -> (values that equal the default and are accepted, text that says what to do instead)."""

REFUSED: Final[dict[str, tuple[tuple[Any, ...], str]]] = {
    "tools": ((), _TOOLS),
    "functions": ((), _OLD_TOOLS),
    "tool_choice": (("none",), _TOOLS),
    "function_call": (("none",), _OLD_TOOLS),
    "json_schema": ((), _GRAMMAR),
    "grammar": ((), _GRAMMAR),
    "regex": ((), _GRAMMAR),
    "ebnf": ((), _GRAMMAR),
    "extra_body": ((), "it is an argument of OpenAI's Python client, not a field; send what is in it as fields"),
    "modalities": ((["text"],), 'answers are text; leave it out or send ["text"]'),
    "audio": ((), "answers are text; leave it out"),
    "moderation": ((), "the server moderates nothing; leave it out"),
    "web_search_options": ((), "the server looks nothing up; leave it out"),
    "store": ((), "nothing is stored; leave it out"),
    "chat_template": ((), "templates come from the model or the operator, not from requests; leave it out"),
    "documents": ((), "put the documents into the messages"),
    "lora_path": ((), "an adapter is named by model, and loaded by POST /v1/load_lora_adapter; leave it out"),
    "kv_transfer_params": ((), "the cache takes nothing from outside; leave it out"),
    "prompt_embeds": ((), "prompts are text or token ids; leave it out"),
    "logits_processors": ((), "requests cannot bring code; leave it out"),
    "use_beam_search": ((), "beam search is not supported; use best_of or n"),
    "length_penalty": ((1,), "it belongs to beam search, which is not supported; leave it out"),
    "thinking_token_budget": ((-1,), _CHAT_ONLY),
    "thinking_budget": ((-1,), _CHAT_ONLY),
    "suffix": ((), _TEXT_ONLY),
    "echo": ((), _TEXT_ONLY),
    "best_of": ((1,), _TEXT_ONLY),
    "add_special_tokens": ((), "the chat template writes its own special tokens; leave it out"),
    "max_completion_tokens": ((), "it belongs to /v1/chat/completions; use max_tokens"),
    "top_logprobs": ((0,), "it belongs to /v1/chat/completions; give logprobs a number"),
    "continue_final_message": ((), _CHAT_ONLY),
    "chat_template_kwargs": ((), _CHAT_ONLY),
}
"""Refused fields of chat and text completions. An entry applies only if the type of the body has no such field."""

_SAMPLING: Final = tuple(
    name
    for name in GenerationRequest.__struct_fields__
    if name in SamplingParams.__dataclass_fields__ and name not in ("structured_outputs", "prediction")
)
"""Fields with the same name and meaning in SamplingParams."""
_NAMED: Final = (*_SAMPLING, "prediction")

_RESERVED_VARIABLES: Final = frozenset(
    ("self", "messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template")
)
_repr: Final = reprlib.Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = 60
_repr.maxlevel = 2

_T = TypeVar("_T", bound=msgspec.Struct)


def parse(struct_type: type[_T], body: Mapping[str, Any], refused: Refusals = REFUSED) -> tuple[_T, list[str]]:
    """Parse a request. Returns (request, names of ignored fields). 4.0 counts as an integer, as in JSON Schema.

    ``refused`` has the known fields that are not supported. Raises ApiError 400. Its ``param`` is the path of the
    field (``messages[0].role``), and its message says what was given and what is allowed.
    """
    known = _field_names(struct_type)
    ignored: list[str] = []
    for name, value in body.items():
        if name in known or value is None:
            continue
        if name not in refused:
            if len(ignored) < _MAX_COMPARED and (meant := _misspelled_field(name, known)) is not None:
                message = f"unknown field {name!r}; did you mean {meant!r}?"
                raise ApiError(400, message, code="unknown_parameter", param=name)
            ignored.append(name)
        elif not _equals_default(value, *refused[name]):
            message = f"{name} is {_quoted(value)}, which is not supported: {refused[name][1]}"
            raise ApiError(400, message, code="unsupported_parameter", param=name)
    floats = ((name, value) for name, value in body.items() if isinstance(value, float) and value.is_integer())
    whole = {name: int(value) for name, value in floats if name in _whole_numbers(struct_type)}
    try:
        request = msgspec.convert({**body, **whole}, struct_type)
    except msgspec.ValidationError as error:
        raise _readable(struct_type, body, str(error)) from None
    ignored += _ignored_inside(struct_type, body)
    return request, ignored


def refused_elsewhere(struct_type: type[msgspec.Struct], own: Refusals) -> Refusals:
    """Refused fields of another endpoint: ``own``, and every field of chat and text completions that the endpoint's
    body does not have."""
    other_fields = {*_field_names(ChatRequest), *_field_names(CompletionRequest), *REFUSED}
    elsewhere: dict[str, tuple[tuple[Any, ...], str]] = {}
    for name in sorted(other_fields - {*_field_names(struct_type), *_HINTS}):
        harmless, reason = REFUSED.get(name, ((1,) if name == "n" else (), _ELSEWHERE))
        asks_for_form = name in FIELDS or reason is _GRAMMAR
        elsewhere[name] = (harmless, _FORM_ELSEWHERE if asks_for_form else reason)
    return {**elsewhere, **own}


def unknown_inside(place: str, given: Any, struct_type: type[msgspec.Struct]) -> list[str]:
    """Paths of names in the object at the path ``place`` that are not fields of ``struct_type``."""
    known = _field_names(struct_type)
    return [f"{place}.{name}" for name, value in (given or {}).items() if name not in known and value is not None]


def _misspelled_field(name: str, known: Iterable[str]) -> str | None:
    """The known field of which ``name`` is probably a misspelling; None if there is none. Only fields of similar
    length are compared, because the comparison is slow."""
    if name in _OTHER_SERVERS:
        return None
    near = [each for each in known if abs(len(each) - len(name)) <= _MAX_LENGTH_DIFFERENCE]
    found = difflib.get_close_matches(name, near, n=1, cutoff=_MIN_SIMILARITY)
    return found[0] if found else None


def warning_headers(ignored: Sequence[str]) -> dict[str, str]:
    """Header with the names of ignored fields; no header when there are none."""
    if not ignored:
        return {}
    names = [name for name in ignored if _HEADER_NAME.fullmatch(name)][:16]
    if len(names) < len(ignored):
        names.append(f"and {len(ignored) - len(names)} more")
    return {"warning": f'299 chairlift "ignored: {", ".join(names)}"'}


def sampling_params(request: GenerationRequest, defaults: Mapping[str, Any], **fields: Any) -> SamplingParams:
    """The request's sampling parameters. The request's own fields override ``defaults``, and ``fields`` override both.
    Raises ApiError with the name of a field."""
    given = {name: value for name in _SAMPLING if (value := getattr(request, name)) is not None}
    given["structured_outputs"] = structured_outputs(request)
    if request.prediction is not None:
        given["prediction"] = request.prediction.whole
    try:
        return SamplingParams(**{**defaults, **given, **fields})
    except RequestError as error:
        first = str(error).split(" ", 1)[0]
        raise ApiError(400, str(error), code="invalid_value", param=first if first in _NAMED else None) from None


def template_variables(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """The variables in ``chat_template_kwargs``, without null values. Raises ApiError for a variable that another
    field sets."""
    variables = {name: v for name, v in (given or {}).items() if v is not None or name not in _RESERVED_VARIABLES}
    reserved = sorted(_RESERVED_VARIABLES & set(variables))
    if reserved:
        message = f"chat_template_kwargs cannot set {', '.join(reserved)}; leave it out, or use the field of that name"
        raise ApiError(400, message, code="invalid_value", param="chat_template_kwargs")
    return variables


def no_prompt_logprobs_in_stream(request: GenerationRequest) -> None:
    """Raise ApiError if a streamed request asks for prompt log-probabilities, because chunks have no field for them."""
    if request.stream and request.prompt_logprobs is not None:
        message = "prompt_logprobs is not given in a stream; leave out stream or prompt_logprobs"
        raise ApiError(400, message, code="invalid_value", param="prompt_logprobs")


def _equals_default(value: Any, harmless: Sequence[Any], reason: str) -> bool:
    """Whether the value of a refused field equals the default, so that the field has no effect. 0 equals the default
    only if ``harmless`` lists it."""
    empty = value is False or (isinstance(value, (str, list, dict)) and not value)
    return (empty and reason not in (_GRAMMAR, _FORM_ELSEWHERE)) or any(
        value == each and isinstance(value, bool) is isinstance(each, bool) for each in harmless
    )


_HINTS: Final = ("stream_options", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options")
"""Fields that an endpoint without them ignores instead of refusing them, because they change no answer."""
_HEADER_NAME: Final = re.compile(r"[A-Za-z0-9_.\[\]-]{1,64}")


def _prompts(prompt: Any) -> list[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    kinds = {type(item) for item in prompt}
    if kinds == {int}:
        return [prompt]
    if len(kinds) == 1:
        return list(prompt)
    raise ApiError(
        400,
        "prompt mixes texts, token ids and lists; send a text, a list of texts, a list of token ids, or a list of lists"
        " of token ids",
        code="invalid_type",
        param="prompt",
    )


def _ignored_inside(struct_type: type[msgspec.Struct], body: Mapping[str, Any]) -> list[str]:
    """Paths of unknown names in objects that were parsed before, so their types are right."""
    inside = {
        "stream_options": StreamOptions,
        "prediction": Prediction,
        "prompt_cache_options": PromptCacheOptions,
    }
    return [
        f"{field}.{name}"
        for field, kind in inside.items()
        for name in ((body.get(field) or {}) if field in _field_names(struct_type) else {})
        if name not in _field_names(kind)
    ]


@functools.cache
def _field_names(struct_type: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset(struct_type.__struct_fields__)


# --- what msgspec says about a bad value, in words --------------------------------------------------------------------

_MISSING: Final = re.compile(r"Object missing required field `(\w+)`")
_PLACE: Final = re.compile(r" - at (`key` in )?`\$([^`]*)`\Z")
_STEP: Final = re.compile(r"\.(\w+)|\[(\d+)\]|(\[\.\.\.\])")


def _readable(struct_type: type[msgspec.Struct], body: Mapping[str, Any], text: str) -> ApiError:
    place = _PLACE.search(text)
    path = place[2].lstrip(".") if place else ""
    missing = _MISSING.match(text)
    if missing:
        name = f"{path}.{missing[1]}" if path else missing[1]
        return ApiError(400, f"{name} is missing; it is required", code="missing_required_parameter", param=name)
    kind: Any = _type_info(struct_type)
    value: Any = body
    known = place is not None and not place[1]
    for field, index, _ in _STEP.findall(place[2]) if place else ():
        kind = _inner(kind, field)
        if field:
            value = value[field]
        elif index:
            value = value[int(index)]
        else:
            value = None
        known = known and bool(field or index)
    reason = text[: place.start()] if place else text
    code = "invalid_type" if ", got" in reason else "invalid_value"
    if not known or kind is None:
        if place and place[1] and (unlike := _first_bad_name(kind, value)):
            message = f"a name in {path} must be {unlike[1]}; got {_quoted(unlike[0])}"
            return ApiError(400, message, code="invalid_value", param=path)
        name = place[2].partition("[")[0].lstrip(".") if place else ""
        if name in _MAPPINGS and isinstance(value := body[name], dict):
            key = _first_unfit(name, value)
            message = f"{name}[{key}] must be {_allowed(_entry_type(name))}; got {_quoted(value.get(key))}"
            return ApiError(400, message, code=code, param=f"{name}[{key}]")
        where = f"a value in {path}" if path else "the body"
        return ApiError(400, f"{where} is not allowed: {reason}", code="invalid_value", param=path or None)
    return ApiError(400, f"{path} must be {_allowed(kind)}; got {_quoted(value)}", code=code, param=path)


@functools.cache  # it evaluates all annotations, which takes ten times as long as the rest of an error
def _type_info(struct_type: type[msgspec.Struct]) -> msgspec.inspect.Type:
    return msgspec.inspect.type_info(struct_type)


@functools.cache
def _whole_numbers(struct_type: type[msgspec.Struct]) -> frozenset[str]:
    """Names of the fields of ``struct_type`` that accept integers only."""
    info: Any = _type_info(struct_type)
    kinds = {field.name: getattr(field.type, "types", (field.type,)) for field in info.fields}
    return frozenset(name for name in kinds if any(isinstance(kind, msgspec.inspect.IntType) for kind in kinds[name]))


def _inner(kind: Any, field: str) -> Any:
    """Type of a struct's field ``field``, or of a list's items if ``field`` is empty."""
    for option in getattr(kind, "types", (kind,)):
        if field and isinstance(option, msgspec.inspect.StructType):
            return next((each.type for each in option.fields if each.name == field), None)
        if not field and isinstance(option, msgspec.inspect.ListType):
            return option.item_type
    return None


def _first_bad_name(kind: Any, value: Any) -> tuple[str, str] | None:
    """(first invalid name in the object ``value``, description of the names that its type ``kind`` allows); None if all
    names are valid."""
    for option in getattr(kind, "types", (kind,)):
        if isinstance(option, msgspec.inspect.DictType) and isinstance(option.key_type, msgspec.inspect.StrType):
            pattern = option.key_type.pattern or ""
            unlike = [key for key in value if not re.search(pattern, key)]
            return (unlike[0], _allowed(option.key_type)) if unlike else None
    return None


def _first_unfit(name: str, value: Mapping[str, Any]) -> str:
    """First name in ``value`` whose value is not allowed; ``value`` is the object in the field ``name`` of
    ``_MAPPINGS``."""
    for key, entry in value.items():
        try:
            msgspec.convert({key: entry}, _MAPPINGS[name])
        except msgspec.ValidationError:
            return key
    return ""  # not reached: one of them was invalid


@functools.cache
def _entry_type(name: str) -> Any:
    kind: Any = msgspec.inspect.type_info(_MAPPINGS[name])
    return kind.value_type


def _quoted(value: Any) -> str:
    if isinstance(value, (list, dict)) and len(value) > 6:
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
    if isinstance(value, str) and len(value) > 60:
        return f"a text of {len(value)} characters"
    names = {True: "true", False: "false", None: "null"}
    return names[value] if value is None or isinstance(value, bool) else _repr.repr(value)


def _allowed(kind: Any) -> str:
    """Description of a type with its limits, for error messages."""
    types = msgspec.inspect
    if isinstance(kind, types.UnionType):
        words = [_allowed(option) for option in kind.types if not isinstance(option, types.NoneType)]
        return " or ".join(words)
    if isinstance(kind, (types.IntType, types.FloatType)):
        noun = "a whole number" if isinstance(kind, types.IntType) else "a number"
        low = f"above {kind.gt}, at most" if kind.gt is not None else f"from {kind.ge} to"
        return f"{noun} {low} {kind.le}"
    if isinstance(kind, types.StrType):
        if kind.pattern:
            return _IN_WORDS[kind.pattern]
        if kind.max_length is None:
            return "a text"
        return f"a text of {kind.min_length or 0} to {kind.max_length} characters"
    if isinstance(kind, (types.ListType, types.DictType)):
        noun = "a list" if isinstance(kind, types.ListType) else "an object"
        return noun if kind.max_length is None else f"{noun} of {kind.min_length or 0} to {kind.max_length} entries"
    return "true or false" if isinstance(kind, types.BoolType) else "an object"
