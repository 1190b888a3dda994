"""Translates Ollama's requests to chats and completions."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeVar

from chairlift.server.http.errors import ApiError
from chairlift.server.http.logs import log_event
from chairlift.server.http.state import ServerState
from chairlift.server.ollama.bodies import (
    REFUSED,
    REFUSED_OPTIONS,
    SCHEDULING,
    OllamaChat,
    OllamaGenerate,
    OllamaOptions,
    OllamaScheduled,
)
from chairlift.server.openai.chat_reading import EFFORTS
from chairlift.server.openai.models import check_model
from chairlift.server.openai.protocol import ChatRequest, GenerationRequest, parse
from chairlift.server.openai.translation import Names, image_part, thinking_switch, wrong
from chairlift.text.tool_calls import reasoning_format_of

__all__ = ["Generating", "fill", "names", "parse_body", "served_name", "to_chat"]

_log = logging.getLogger("chairlift.server")
_LATEST: Final = ":latest"
_SAME: Final = ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "stop")
_PENALTIES: Final = ("repeat_penalty", "presence_penalty", "frequency_penalty")
_NEUTRAL: Final = {"repeat_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
_WITHOUT_EFFECT: Final = frozenset(
    (
        *("numa", "num_batch", "num_gpu", "main_gpu", "low_vram", "f16_kv", "logits_all", "vocab_only", "use_mmap"),
        *("use_mlock", "embedding_only", "num_thread", "num_keep", "mirostat_tau", "mirostat_eta"),
    )
)
"""Options about loading a model, about a cut context, and of another option that is off. Without them the answer is the
same, so they are ignored without a line in the log."""
_MAX_LOGGED: Final = 8
_FIELDS: Final = {
    r"(messages\[[0-9]+\])\.content\[[0-9]+\](?:\.image_url\.url)?": r"\1.images",
    r"response_format\.(?:json_schema\.)?schema": "format",
    "response_format": "format",
    "reasoning_effort": "think",
    "repetition_penalty": "options.repeat_penalty",
    "max_tokens": "options.num_predict",
    **{name: f"options.{name}" for name in (*_SAME, "seed")},
}
_KINDS: Final = {"/9j/": "jpeg", "iVBOR": "png", "R0lG": "gif", "UklGR": "webp"}
"""Beginning of an image in base64 -> its format."""
_DATA_URL: Final = re.compile(r"data:image/[a-z]+;base64,")

Generating = OllamaChat | OllamaGenerate
_T = TypeVar("_T", bound=OllamaScheduled)
_G = TypeVar("_G", bound=GenerationRequest)


def names() -> Names:
    """Names of the fields of Ollama's API, for error messages."""
    return Names(_FIELDS)


def served_name(state: ServerState, name: str | None) -> str:
    """The served name that a client means by ``name``, which may end with ``:latest``. Raises ApiError 400 without a
    name, and 404 for a model that is not served."""
    if not name:
        raise ApiError(400, "model is required", code="missing_required_parameter", param="model")
    known = {*state.model_names, *state.engine.adapters.names.public}
    if name not in known and name.removesuffix(_LATEST) in known:
        return name.removesuffix(_LATEST)
    try:
        check_model(state, name)
    except ApiError as error:
        served = error.message.rpartition("; ")[2]
        message = f"model {name!r:.100} not found: this server serves the model with which it was started; {served}"
        raise ApiError(404, message, code="model_not_found", param="model") from None
    return name


def parse_body(kind: type[_T], body: Mapping[str, Any]) -> tuple[_T, list[str]]:
    """Parse a request. Returns (request, names of ignored fields). Unknown options are named in the log, too.

    Raises ApiError 400.
    """
    options = body.get("options")
    given = isinstance(options, dict)
    payload, ignored = parse(kind, {**body, "options": None} if given else body, REFUSED)
    if given:
        try:
            payload.options, unknown = parse(OllamaOptions, dict(options or {}), REFUSED_OPTIONS)
        except ApiError as error:
            error.message = f"options: {error.message}"
            error.param = f"options.{error.param}" if error.param else "options"
            raise
        ignored += [f"options.{name}" for name in unknown]
        strange = [name for name in unknown if name not in _WITHOUT_EFFECT]
        if strange:
            log_event(_log, logging.INFO, "unknown options", names=", ".join(strange[:_MAX_LOGGED])[:200])
    return payload, ignored


def to_chat(payload: Generating, model: str, template: str, ignored: list[str], client_names: Names) -> ChatRequest:
    """Translate a request to a chat for a model with the chat template ``template``.

    ``ignored`` gets the names of ignored fields, and ``client_names`` the positions of messages. Raises ApiError.
    """
    if isinstance(payload, OllamaChat):
        messages = _Messages()
        for index, message in enumerate(payload.messages or ()):
            messages.add(f"messages[{index}]", message)
        chat = ChatRequest(messages=messages.messages, tools=payload.tools or None)
        if chat.messages[-1]["role"] == "assistant" and not chat.messages[-1].get("tool_calls"):
            chat.add_generation_prompt = False  # the answer continues this message
            chat.continue_final_message = True
    else:
        asked: dict[str, Any] = {"role": "user", "content": _content("images", payload.prompt or "", payload.images)}
        system = [{"role": "system", "content": payload.system}] if payload.system else []
        client_names.places.update(
            zip(("messages[0]", "messages[1]"), [*("system" for _ in system), "prompt"], strict=False)
        )
        chat = ChatRequest(messages=[*system, asked])
    fill(chat, payload, model)
    chat.logprobs = payload.logprobs
    chat.top_logprobs = payload.top_logprobs
    _think(chat, payload.think, template, ignored)
    return chat


def fill(request: _G, payload: Generating, model: str) -> _G:
    """Set the model, the sampling parameters and the fields of scheduling of a chat or completion, and return it.

    Raises ApiError for options that cannot be combined.
    """
    request.model = model
    request.stream = payload.stream is not False
    for name in (*SCHEDULING, "tpot_ms", "cache_salt"):
        setattr(request, name, getattr(payload, name))
    options = payload.options or OllamaOptions()
    _check_penalties(options)
    for name in _SAME:
        setattr(request, name, getattr(options, name))
    fields: dict[str, Any] = {"repetition_penalty": options.repeat_penalty}
    if options.seed is not None and options.seed >= 0:
        fields["seed"] = options.seed
    if options.num_predict is not None and options.num_predict > 0:
        fields["max_tokens"] = options.num_predict
    if options.repeat_last_n == 0:
        fields |= {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    if payload.format == "json":
        fields["response_format"] = {"type": "json_object"}
    elif isinstance(payload.format, dict):
        fields["response_format"] = {"type": "json_schema", "json_schema": {"schema": payload.format}}
    elif payload.format:
        wrong("format", 'must be "json" or a JSON schema', payload.format)
    for name, value in fields.items():
        setattr(request, name, value)
    return request


def _check_penalties(options: OllamaOptions) -> None:
    """Raise ApiError if the penalties shall not apply to all tokens so far."""
    active = [name for name in _PENALTIES if getattr(options, name) not in (None, _NEUTRAL[name])]
    if not active:
        return
    if options.repeat_last_n not in (None, -1, 0):
        message = (
            f"options.repeat_last_n is {options.repeat_last_n}, but {active[0]} applies to all tokens so far; send -1,"
            " or leave repeat_last_n out"
        )
        raise ApiError(400, message, code="unsupported_parameter", param="options.repeat_last_n")
    if options.penalize_newline is False:
        message = f"options.penalize_newline is false, but {active[0]} applies to all tokens; leave one of them out"
        raise ApiError(400, message, code="unsupported_parameter", param="options.penalize_newline")


def _think(chat: ChatRequest, think: bool | str | None, template: str, ignored: list[str]) -> None:
    """Turn thinking on or off. Raises ApiError if the model cannot think."""
    if think in (None, ""):
        return
    thinks = reasoning_format_of(template) is not None or "reasoning_effort" in template
    if isinstance(think, str) and think not in EFFORTS:
        wrong("think", f"must be true, false or one of {', '.join(EFFORTS)}", think)
    if think in (False, "none"):
        chat.include_reasoning = False
    elif not thinks and thinking_switch(template) is None:
        message = "think is set, but the model does not support thinking: its chat template has none; leave it out"
        raise ApiError(400, message, code="unsupported_parameter", param="think")
    switch = thinking_switch(template)
    if isinstance(think, str) and "reasoning_effort" in template:
        chat.reasoning_effort = think
    elif switch is not None:
        chat.chat_template_kwargs = {switch: think not in (False, "none")}
    elif thinks and (isinstance(think, str) or not think):
        ignored.append("think")  # the template has no switch for thinking


class _Messages:
    """Makes the messages of a chat."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._open: list[tuple[str, str]] = []
        """(function name, id) of calls that have no result yet."""
        self._num_calls = 0

    def add(self, where: str, message: Mapping[str, Any]) -> None:
        if not isinstance(message, Mapping):
            wrong(where, "must be an object with a role", message)
        role = message.get("role")
        if not isinstance(role, str) or not role:
            wrong(f"{where}.role", "must be system, user, assistant or tool", role)
        content = "" if message.get("content") is None else message["content"]
        if not isinstance(content, str):
            wrong(f"{where}.content", "must be a text; images belong into the list images", content)
        images = message.get("images") or None
        made: dict[str, Any] = {"role": role, "content": _content(f"{where}.images", content, images)}
        if message.get("thinking"):
            made["reasoning_content"] = message["thinking"]
        if message.get("tool_calls"):
            made["tool_calls"] = self._calls(f"{where}.tool_calls", message["tool_calls"])
        if role == "tool":
            made |= self._answered(message)
        self.messages.append(made)

    def _calls(self, where: str, given: Any) -> list[dict[str, Any]]:
        if not isinstance(given, list):
            wrong(where, "must be a list of calls", given)
        calls = []
        self._open.clear()
        for index, call in enumerate(given):
            function = call.get("function") if isinstance(call, Mapping) else None
            if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
                wrong(f"{where}[{index}].function", "must be an object with a name and arguments", function)
            arguments = function.get("arguments") or {}
            if not isinstance(arguments, (str, Mapping)):
                wrong(f"{where}[{index}].function.arguments", "must be an object", arguments)
            text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            call_id = call.get("id") or f"call{self._num_calls:05}"
            self._num_calls += 1
            self._open.append((function["name"], call_id))
            calls.append({"id": call_id, "type": "function", "function": {"name": function["name"], "arguments": text}})
        return calls

    def _answered(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Fields that say to which call a tool's result belongs: the one with the given id, or else the first call of
        the given name, or else the first call, that has no result yet."""
        name = message.get("tool_name") or message.get("name")
        call_id = message.get("tool_call_id")
        fits = [each for each in self._open if (call_id or each[1]) == each[1] and (name or each[0]) == each[0]]
        if not fits:
            return {key: value for key, value in (("name", name), ("tool_call_id", call_id)) if value}
        self._open.remove(fits[0])
        return {"name": fits[0][0], "tool_call_id": fits[0][1]}


def _content(where: str, text: str, images: Sequence[Any] | None) -> str | list[dict[str, Any]]:
    """Content of a message: its text, after its images."""
    if not images:
        return text
    if not isinstance(images, list):
        wrong(where, "must be a list of images in base64", images)
    parts = []
    for index, image in enumerate(images):
        if not isinstance(image, str):
            wrong(f"{where}[{index}]", "must be an image in base64", image)
        kind = next((kind for start, kind in _KINDS.items() if image.startswith(start)), "png")
        url = image if _DATA_URL.match(image) else f"data:image/{kind};base64,{image}"
        parts.append(image_part(url, f"{where}[{index}]"))
    return [*parts, {"type": "text", "text": text}] if text else parts
