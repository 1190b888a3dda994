"""Checks the tools of a request: their definitions, the choice of a tool, and calls and results in the conversation."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NoReturn

from chairlift.errors import RequestError
from chairlift.text.grammar.lark import lark_regex
from chairlift.text.tool_calls.events import INPUT

__all__ = ["MAX_TOOLS", "Tools", "check_history", "check_tools"]

MAX_TOOLS: Final = 128
_MAX_CHARS: Final = 262_144
_MAX_DEPTH: Final = 48
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_LONGEST: Final = 60


@dataclasses.dataclass(frozen=True, slots=True)
class Tools:
    """Tools of one request, and the choice between them."""

    definitions: tuple[Mapping[str, Any], ...] = ()
    """Definitions ``{"type": "function", "function": {...}}``, as the chat template gets them."""
    choice: str = "auto"
    """``auto`` (the model decides), ``none``, ``required`` (a call must come), or ``named`` (a call of :attr:`named`
    must come)."""
    named: str = ""
    """Name of the function that must be called, if ``choice`` is ``named``."""
    parallel: bool = True
    """Whether one output may have several calls."""
    allowed: tuple[str, ...] | None = None
    """Names of the functions that may be called; None: all. The prompt also shows the other functions."""
    custom: frozenset[str] = frozenset()
    """Names of the custom tools, whose input is a text. The model calls them like a function with one text argument."""
    grammars: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Name of a custom tool with a grammar -> regular expression of its inputs. The prompt shows the grammar in the
    description instead."""

    @property
    def offered(self) -> tuple[Mapping[str, Any], ...]:
        """Definitions of the tools that the prompt shows to the model."""
        return () if self.choice == "none" else self.definitions

    @property
    def schemas(self) -> dict[str, Mapping[str, Any]]:
        """Name of a function -> JSON schema of its arguments."""
        functions = [definition["function"] for definition in self.offered]
        allowed = [each for each in functions if self.allowed is None or each["name"] in self.allowed]
        schemas = {function["name"]: function.get("parameters") or {} for function in allowed}
        for name in self.grammars.keys() & schemas.keys():
            text = {"type": "string", "pattern": f"^(?:{self.grammars[name]})$"}
            schemas[name] = {**schemas[name], "properties": {INPUT: text}}
        return schemas

    @property
    def strict(self) -> frozenset[str]:
        """Names of the functions whose calls must satisfy their schema although the model decides whether to call, and
        of the custom tools with a grammar."""
        if self.choice != "auto":
            return frozenset()
        functions = [definition["function"] for definition in self.definitions]
        strict = {each["name"] for each in functions if each.get("strict") is True}
        return frozenset(strict | self.grammars.keys()) & self.schemas.keys()


def check_tools(tools: Any, tool_choice: Any = None, parallel: bool | None = None) -> Tools:
    """Check the request fields ``tools``, ``tool_choice`` and ``parallel_tool_calls``, in OpenAI's form.

    Raises RequestError. Its message begins with the path of the wrong value.
    """
    given: Sequence[Any] = () if tools is None else tools
    if isinstance(given, (str, bytes, Mapping)) or not isinstance(given, Sequence):
        _wrong("tools", "must be a list of functions", tools)
    if len(given) > MAX_TOOLS:
        raise RequestError(f"tools has {len(given)} entries; at most {MAX_TOOLS} are taken: leave some out")
    definitions = tuple(_definition(f"tools[{index}]", _as_function(index, tool)) for index, tool in enumerate(given))
    custom = frozenset(
        definition["function"]["name"]
        for definition, tool in zip(definitions, given, strict=True)
        if tool.get("type") == "custom"
    )
    names = [definition["function"]["name"] for definition in definitions]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise RequestError(f"tools[{index}].function.name is {name!r} again; give every function its own name")
    allowed = None
    if isinstance(tool_choice, Mapping) and tool_choice.get("type") == "allowed_tools":
        tool_choice, allowed = _allowed(tool_choice, names)
    choice, named = _choice(tool_choice, names)
    grammars = {
        definition["function"]["name"]: pattern
        for index, (definition, tool) in enumerate(zip(definitions, given, strict=True))
        if (pattern := _pattern(f"tools[{index}].custom.format", tool))
    }
    return Tools(definitions, choice, named, parallel is not False, allowed, custom, grammars)


def _allowed(given: Mapping[str, Any], names: Sequence[str]) -> tuple[Any, tuple[str, ...]]:
    """(mode, names) from ``{"type": "allowed_tools", "allowed_tools": {"mode": ..., "tools": [...]}}``."""
    inner = given.get("allowed_tools")
    mode = inner.get("mode") if isinstance(inner, Mapping) else None
    tools = inner.get("tools") if isinstance(inner, Mapping) else None
    if mode not in ("auto", "required") or not isinstance(tools, Sequence) or isinstance(tools, str) or not tools:
        _wrong("tool_choice", 'must have allowed_tools: {"mode": "auto" or "required", "tools": [...]}', inner)
    allowed = [_choice(each, names)[1] if isinstance(each, Mapping) else "" for each in tools]
    if "" in allowed:
        _wrong("tool_choice", 'must have allowed_tools.tools of {"type": "function", "function": {"name": ...}}', tools)
    return mode, tuple(allowed)


def _as_function(index: int, tool: Any) -> Any:
    """A custom tool as a function with one text argument. The description shows a grammar to the model. Other tools are
    returned unchanged."""
    if not isinstance(tool, Mapping) or tool.get("type") != "custom":
        return tool
    where = f"tools[{index}].custom"
    custom = tool.get("custom")
    if not isinstance(custom, Mapping):
        _wrong(where, "must be an object with a name", custom)
    described = custom.get("description") or ""
    if not isinstance(described, str):
        _wrong(f"{where}.description", "must be a text", described)
    syntax, definition = _grammar(f"{where}.format", custom.get("format"))
    if syntax:
        described = f"{described}\n\nThe input must follow this {syntax} grammar:\n{definition}".strip()
    parameters = {"type": "object", "properties": {INPUT: {"type": "string"}}, "required": [INPUT]}
    function = {"name": custom.get("name"), "description": described, "parameters": parameters}
    return {"type": "function", "function": function}


def _grammar(where: str, given: Any) -> tuple[str, str]:
    """(syntax, definition) of the grammar of a custom tool; two empty texts for free text."""
    if given is None or (isinstance(given, Mapping) and given.get("type") == "text"):
        return "", ""
    if not isinstance(given, Mapping) or given.get("type") != "grammar":
        _wrong(where, "must be of type text or grammar", given)
    inner = given.get("grammar", given)
    syntax = inner.get("syntax") if isinstance(inner, Mapping) else None
    definition = inner.get("definition") if isinstance(inner, Mapping) else None
    if syntax not in ("lark", "regex") or not isinstance(definition, str):
        _wrong(where, 'must have a grammar: {"syntax": "lark" or "regex", "definition": ...}', inner)
    return syntax, definition


def _pattern(where: str, tool: Any) -> str:
    """Regular expression of the inputs of a custom tool; empty for free text and for other tools. Raises RequestError
    for a grammar that cannot be enforced."""
    if tool.get("type") != "custom":
        return ""
    syntax, definition = _grammar(where, tool["custom"].get("format"))
    if syntax != "lark":
        return definition
    try:
        return lark_regex(definition)
    except RequestError as error:
        raise RequestError(f"{where} cannot be enforced: {error}") from None


def _definition(where: str, tool: Any) -> dict[str, Any]:
    if not isinstance(tool, Mapping):
        _wrong(where, 'must be {"type": "function", "function": {"name": ..., "parameters": ...}}', tool)
    if tool.get("type", "function") != "function":
        raise RequestError(f"{where}.type must be 'function', got {str(tool['type'])[:_LONGEST]!r}; leave the tool out")
    function = tool.get("function")
    if not isinstance(function, Mapping):
        _wrong(f"{where}.function", "must be an object with a name", function)
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        _wrong(f"{where}.function.name", "must be 1 to 128 characters from A-Z, a-z, 0-9, '_', '-' and '.'", name)
    if not isinstance(function.get("description") or "", str):
        _wrong(f"{where}.function.description", "must be a text", function["description"])
    parameters = function.get("parameters")
    if parameters is not None:
        _schema(f"{where}.function.parameters", parameters)
    try:  # a copy as plain data, so that no subclass of dict reaches the template
        plain: dict[str, Any] = json.loads(json.dumps({key: v for key, v in tool.items() if v is not None}))
    except (TypeError, ValueError, RecursionError):
        raise RequestError(f"{where} must be plain JSON data, at most {_MAX_DEPTH} deep") from None
    if len(json.dumps(plain)) > _MAX_CHARS or _too_deep(plain, _MAX_DEPTH):
        raise RequestError(f"{where} is too large: at most {_MAX_CHARS:,} characters, {_MAX_DEPTH} deep; shorten it")
    plain["type"] = "function"
    plain["function"] = {key: value for key, value in plain["function"].items() if value is not None}
    return plain


def _schema(where: str, schema: Any) -> None:
    """Raise RequestError if a schema of arguments does not describe an object."""
    if not isinstance(schema, Mapping):
        _wrong(where, "must be a JSON schema of an object", schema)
    if schema.get("type", "object") != "object":
        _wrong(f"{where}.type", "must be 'object': arguments have names", schema["type"])
    properties = schema.get("properties")
    if properties is not None and not isinstance(properties, Mapping):
        _wrong(f"{where}.properties", "must be an object", properties)
    for name, value in (properties or {}).items():
        if not isinstance(value, (Mapping, bool)):
            _wrong(f"{where}.properties.{name!s:.40}", "must be a JSON schema", value)
    required = schema.get("required")
    if required is not None and not (
        isinstance(required, Sequence) and all(isinstance(each, str) for each in required)
    ):
        _wrong(f"{where}.required", "must be a list of names", required)


def _too_deep(value: Any, levels: int) -> bool:
    inner: Iterable[Any] = ()
    if isinstance(value, dict):
        inner = value.values()
    elif isinstance(value, list):
        inner = value
    return levels < 0 or any(_too_deep(each, levels - 1) for each in inner)


def _choice(given: Any, names: Sequence[str]) -> tuple[str, str]:
    if given is None or given == "auto":
        return "auto", ""
    if given == "none":
        return "none", ""
    if given == "required":
        if not names:
            raise RequestError("tool_choice is 'required', but there are no tools; send tools, or leave it out")
        return "required", ""
    kind = given.get("type") if isinstance(given, Mapping) else None
    function = given.get(kind) if kind in ("function", "custom") else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        _wrong(
            "tool_choice",
            'must be "auto", "none", "required", {"type": "function", "function": {"name": ...}} or allowed_tools',
            given,
        )
    if name not in names:
        raise RequestError(
            f"tool_choice names the function {name[:_LONGEST]!r}, which is none of tools"
            f" ({', '.join(names)[:200] or 'there are none'}); send its definition, or name one of those"
        )
    return "named", name


def check_history(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages of a conversation, in which every tool message has the function's ``name``.

    Some templates print the function's name next to its result, but clients send only the id of the call. Raises
    RequestError for a call without a name, for equal ids in one message, and for a result with an unknown id.
    Malformed messages are not checked here; the validation of chats reports them.
    """
    known: dict[str, str] = {}
    checked: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        plain = dict(message)
        calls = plain.get("tool_calls")
        if isinstance(calls, list):
            calls = plain["tool_calls"] = [
                _custom_call(f"{where}.tool_calls[{place}]", call) for place, call in enumerate(calls)
            ]
            known |= _ids(where, calls)
        answered = plain.get("tool_call_id")
        if plain.get("role") == "tool" and answered is not None:
            if not isinstance(answered, str):
                _wrong(f"{where}.tool_call_id", "must be the id of a call", answered)
            if answered not in known:
                raise RequestError(
                    f"{where}.tool_call_id is {answered[:_LONGEST]!r}, but no message before it has a call with this"
                    " id; send the assistant's message with its tool_calls too"
                )
            plain.setdefault("name", known[answered])
            if plain["name"] is None:
                plain["name"] = known[answered]
        checked.append(plain)
    return checked


def _custom_call(where: str, call: Any) -> Any:
    """A call of a custom tool as a call of a function. Other calls are returned unchanged."""
    if not isinstance(call, Mapping) or call.get("type") != "custom":
        return call
    custom = call.get("custom")
    if not isinstance(custom, Mapping) or not isinstance(custom.get("input"), str):
        _wrong(f"{where}.custom", "must be an object with a name and an input", custom)
    arguments = json.dumps({INPUT: custom["input"]}, ensure_ascii=False)
    function = {"name": custom.get("name"), "arguments": arguments}
    return {"id": call.get("id"), "type": "function", "function": function}


def _ids(where: str, calls: Sequence[Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for index, call in enumerate(calls):
        function = call.get("function", call) if isinstance(call, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or not name:
            _wrong(f"{where}.tool_calls[{index}].function.name", "must be the name of a function", name)
        call_id = call.get("id")
        if call_id is None:
            continue
        if not isinstance(call_id, str) or not call_id:
            _wrong(f"{where}.tool_calls[{index}].id", "must be a text", call_id)
        if call_id in found:
            raise RequestError(
                f"{where}.tool_calls[{index}].id is {call_id[:_LONGEST]!r} again; give each call its own"
            )
        found[call_id] = name
    return found


def _wrong(where: str, allowed: str, given: Any) -> NoReturn:
    got = "nothing" if given is None else repr(given)[:_LONGEST]
    raise RequestError(f"{where} {allowed}; got {got}")
