"""Grammars that force a tool call, for ``tool_choice`` ``required`` or the name of a function.

The grammars are written as formats of structural tags (``chairlift/text/grammar/structural_tag.py`` lists them), which
are plain data. :class:`~chairlift.text.tool_calls.reader.AnswerReader` can read any output that follows such a grammar,
and the arguments satisfy their schemas.

An object gets only the properties that its schema names, except if the schema has ``additionalProperties``. Otherwise
a model could invent further keys without end.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from chairlift.errors import RequestError
from chairlift.text.grammar.strings import is_whole
from chairlift.text.tool_calls.events import INPUT
from chairlift.text.tool_calls.formats import Body, ToolFormat
from chairlift.text.tool_calls.request import Tools
from chairlift.text.tool_calls.values import PYTHON_TYPES, referred, types_of

__all__ = ["call_texts", "calls_format", "series_texts", "strict_calls_format"]

_NUMBER: Final = "(0|[1-9][0-9]?)"
_WITHOUT_GRAMMAR: Final = (Body.PYTHON, Body.GEMMA, Body.ELEMENTS)
_COMBINED: Final = ("patternProperties", "allOf", "anyOf", "oneOf", "$ref", "not", "if")
"""Keywords, other than ``properties``, that may allow or require further properties of an object."""
_DESCRIBES: Final = (
    *("type", "properties", "required", "additionalProperties", "$defs", "definitions"),
    *("title", "description", "$schema", "$id", "$comment", "default", "examples"),
)
"""Keywords that an object's schema may have if the grammar writes each argument separately. A schema with any other
keyword is not supported in this case."""
_MAX_STEPS: Final = 16
"""Maximum number of schemas that refer to each other until one lists its texts."""
_OF_TEXT: Final = ("pattern", "format", "minLength", "maxLength", "allOf", "anyOf", "oneOf", "not")
"""Keywords that the grammar cannot enforce for text without quotation marks."""


def calls_format(form: ToolFormat, tools: Tools) -> dict[str, Any]:
    """Format of one or more calls of the allowed functions, without any other text.

    It allows one call only if ``tools.parallel`` is false, a function is named, or the format itself allows no more.
    Raises RequestError if the tool format or a schema cannot be expressed as a grammar.
    """
    schemas = tools.schemas
    names = [tools.named] if tools.named else list(schemas)
    if form.body in _WITHOUT_GRAMMAR:
        raise RequestError(
            f"tool_choice cannot force a call, nor response_format be held beside tools, in the format {form.name}:"
            " there is no grammar for its arguments; use tool_choice 'auto' without response_format"
        )
    before, separator, after = series_texts(form)
    nothing = {"type": "object", "properties": {}}  # a function without parameters takes no arguments
    tags = [_call(form, name, _closed({"type": "object", **(schemas[name] or nothing)})) for name in names]
    single = bool(tools.named) or not tools.parallel or separator is None
    many = {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": separator or "",
        "at_least_one": True,
        "stop_after_first": single,
    }
    return sequence(*literal(before), many, *literal(after))


def strict_calls_format(form: ToolFormat, tools: Tools) -> dict[str, Any] | None:
    """Format of free text in which each call of a strict function satisfies its schema, from the first mark of the call
    on. Other functions get any arguments. None if no function is strict, or the tool format has no such grammar."""
    if form.body in (*_WITHOUT_GRAMMAR, Body.HARMONY):
        return None
    if not tools.strict or not form.section:
        return None
    free = {"type": "object", "additionalProperties": True}
    text = {"type": "object", "properties": {INPUT: {"type": "string"}}, "required": [INPUT]}
    is_strict = form.body is Body.TAGGED  # a format with tags always needs the names of the arguments
    schemas = {
        name: each if is_strict or name in tools.strict else text if name in tools.custom else free
        for name, each in tools.schemas.items()
    }
    nothing = {"type": "object", "properties": {}}
    try:
        calls = [_call(form, name, _closed({"type": "object", **(each or nothing)})) for name, each in schemas.items()]
    except RequestError:
        return None
    before, separator, after = series_texts(form)
    if before:
        many = {"type": "tags_with_separator", "tags": calls, "separator": separator or "", "at_least_one": True}
        many["stop_after_first"] = not tools.parallel or separator is None
        calls = [tag(before, many, after)]
    tags = [each for begin in form.begins for each in _beginning_with(form, begin, calls)]
    return {
        "type": "triggered_tags",
        "triggers": list(form.begins),
        "tags": tags,
        "stop_after_first": not tools.parallel,
    }


def _beginning_with(form: ToolFormat, begin: str, calls: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the tags ``calls``, changed to begin with another text that can begin a call."""
    usual = form.section[0]
    for each in calls:
        before, mark, after = each["begin"].partition(usual)
        rest = after if mark else before  # some formats have an edge before the mark
        yield {**each, "begin": rest.lstrip("\n") if begin == form.call else begin + rest}


def literal(text: str) -> Iterator[dict[str, Any]]:
    """Yield the format that matches exactly ``text``. For an empty text, yield nothing."""
    if text:
        yield {"type": "const_string", "value": text}


def sequence(*elements: dict[str, Any]) -> dict[str, Any]:
    """The format that matches ``elements`` one after another. At least one element must be given."""
    return elements[0] if len(elements) == 1 else {"type": "sequence", "elements": list(elements)}


def tag(begin: str, content: dict[str, Any], end: str) -> dict[str, Any]:
    """The format that matches the text ``begin``, then ``content``, then the text ``end``. ``{number}`` in ``begin``
    matches a number of one or two digits."""
    head, mark, tail = begin.partition("{number}")
    if mark:
        content = sequence({"type": "regex", "pattern": _NUMBER}, *literal(tail), content)
    return {"type": "tag", "begin": head, "content": content, "end": end}


def optional(*tags: dict[str, Any]) -> dict[str, Any]:
    """The format that matches one of ``tags`` once, or nothing."""
    return {"type": "tags_with_separator", "tags": list(tags), "separator": "", "stop_after_first": True}


def series_texts(form: ToolFormat) -> tuple[str, str | None, str]:
    """(text before a series of calls, text between two calls, text after the series). If the text between two calls is
    None, only one call is possible."""
    if form.body is Body.HARMONY or not form.section:
        return "", None, ""
    if form.body is Body.JSON and form.wrapped is not None:
        before, _, after = form.wrapped
        return (before, ", ", after) if before.endswith("[") else ("", "\n", "")
    if form.body is Body.TAGGED and form.call and not form.bare_call:
        return form.section[0] + _line(form), "", form.section_end
    if form.body is Body.TAGGED:
        return "", "\n", ""
    return (form.section[0], "", form.section_end) if form.call else ("", "", "")


def call_texts(form: ToolFormat, name: str) -> tuple[str, str]:
    """(text before the arguments, text after them) of a call that follows the grammar of a format. ``{number}`` in the
    first text is a number. In a format with tags, the second text follows the last argument."""
    if form.body is Body.HARMONY and form.wrapped is not None:
        return form.wrapped[0].replace("{name}", name), form.wrapped[2]
    if form.body is Body.JSON and form.wrapped is not None:
        before, key, after = form.wrapped
        before, after = ("", "") if before.endswith("[") else (before, after)
        begin = f", {json.dumps(key)}: " if key else ": "
        return before + form.opening + json.dumps(name) + begin, "}" + after
    if form.body is Body.NAMED:
        begin = form.call or form.section[0]
        written = form.prefix + name + (":{number}" if form.numbered else "")
        return begin + written + form.name_ends[0], form.call_end.replace("```<", "\n```<")
    if form.head_end:
        return form.call + name + form.name_ends[0] + "{number}" + form.head_end, form.call_end
    section = form.section[0] + "\n" if form.bare_call else ""
    head = section + (form.call or form.section[0]) + name + form.name_ends[0].removesuffix("\n") + "\n"
    # The line break belongs to the call. As a separate part, the grammar could not distinguish "\n" from the beginning
    # of "\n</section>".
    end = form.call_end
    if form.bare_call:
        end += "\n" + form.section_end
    elif form.call:
        end += "\n"
    return head, end


def _call(form: ToolFormat, name: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    if form.body is Body.TAGGED:
        return _tagged(form, name, schema)
    begin, end = call_texts(form, name)
    return tag(begin, {"type": "json_schema", "json_schema": schema}, end)


# --- a tag per argument ---------------------------------------------------------------------------------------------


def _tagged(form: ToolFormat, name: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    where = f"the parameters of {name}"
    if unknown := [key for key in schema if key not in _DESCRIBES]:
        raise _not_here(form, where, unknown[0])
    properties = dict(schema.get("properties") or {})
    required = schema.get("required") or ()
    properties |= {key: {} for key in required if key not in properties}
    parts = []
    for key, value in properties.items():
        if value is False and key not in required:
            continue
        if key != key.strip() or not key or any(mark in key for mark in (form.key_end, "\n")):
            raise _not_here(form, where, key)
        one = _argument(form, f"{where}.{key}", key, value if isinstance(value, Mapping) else {}, schema)
        once = one[0] if len(one) == 1 else {"type": "or", "elements": one}
        parts.append(once if key in required else optional(*one))
    head, end = call_texts(form, name)
    return tag(head, sequence(*parts, *literal(end)), "")


def _argument(
    form: ToolFormat, where: str, key: str, schema: Mapping[str, Any], root: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Tags of an argument, of which one is written: one for each type if the tag names the type of the value."""
    types = types_of(schema, root)
    if types == {"string"}:
        return [_text_argument(form, where, key, schema, root)]
    if not form.typed:
        return [_json_argument(form, key, "", schema, root)]
    kinds = sorted(types or PYTHON_TYPES)
    narrow = [(kind, _of_type(schema, kind, root)) for kind in kinds]
    return [
        _text_argument(form, where, key, each, root)
        if kind == "string"
        else _json_argument(form, key, kind, each, root)
        for kind, each in narrow
    ]


def _json_argument(
    form: ToolFormat, key: str, kind: str, schema: Mapping[str, Any], root: Mapping[str, Any]
) -> dict[str, Any]:
    line = "\n" if form.own_line else ""
    shared = {name: root[name] for name in ("$defs", "definitions") if name in root}
    content = {"type": "json_schema", "json_schema": {**shared, **schema}}
    return tag(_argument_begin(form, key, kind) + line, content, line + form.value_end + _line(form))


def _text_argument(
    form: ToolFormat, where: str, key: str, schema: Mapping[str, Any], root: Mapping[str, Any]
) -> dict[str, Any]:
    line = "\n" if form.own_line else ""
    begin = _argument_begin(form, key, "string") + line
    pattern = schema.get("pattern")
    if isinstance(pattern, str) and is_whole(pattern) and not {*_OF_TEXT, "enum", "const"} & {*schema} - {"pattern"}:
        content = {"type": "regex", "pattern": pattern[1:-1], "end": line + form.value_end}
        return tag(begin, content, _line(form))
    words = _words(form, where, schema, root, 0)
    if words is None:
        return tag(begin, tag("", {"type": "any_text"}, form.value_end), _line(form))
    if any(not word or form.value_end in word for word in words):
        raise _not_here(form, where, "enum")
    choice = {"type": "or", "elements": [each for word in words for each in literal(word)]}
    return tag(begin, choice, line + form.value_end + _line(form))


def _of_type(schema: Mapping[str, Any], kind: str, root: Mapping[str, Any], steps: int = 0) -> dict[str, Any]:
    """The schema, for values of one JSON type, which it allows."""
    reference = schema.get("$ref")
    target = referred(reference, root) if isinstance(reference, str) else None
    if isinstance(target, Mapping) and steps < _MAX_STEPS:
        return _of_type(target, kind, root, steps + 1)
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list) and steps < _MAX_STEPS:
            fits = [each for each in schema[key] if not (kinds := types_of(each, root)) or kind in kinds]
            narrow = [_of_type(each, kind, root, steps + 1) if isinstance(each, Mapping) else each for each in fits]
            rest = {name: value for name, value in schema.items() if name != key}
            return {**rest, **narrow[0]} if len(narrow) == 1 and narrow[0] is not True else {**schema, key: narrow}
    if isinstance(schema.get("enum"), list):
        words = [each for each in schema["enum"] if type(each) in PYTHON_TYPES[kind]]
        return {**schema, "enum": words, "type": kind}
    return {**schema, "type": kind}


def _argument_begin(form: ToolFormat, key: str, kind: str) -> str:
    """Text before the value of an argument. ``kind`` is the JSON type of the value, or empty for any type."""
    marks = {how: mark for mark, how in form.values}
    mark = marks.get("schema", marks.get("text" if kind == "string" else "json", ""))
    if form.typed:
        mark = next(each for each, _ in form.values if each.startswith(kind))
    between = "\n" if mark.startswith("<") else ""
    return form.key + form.written_key(key) + form.key_end + between + mark


def _line(form: ToolFormat) -> str:
    """Text between the tags of a call."""
    return "" if form.head_end else "\n"


def _words(form: ToolFormat, where: str, schema: Any, root: Mapping[str, Any], depth: int) -> list[str] | None:
    """The texts that a schema of texts lists as its values; None if it allows any text. Raises RequestError for a
    schema that restricts texts in another way."""
    reference = schema.get("$ref") if isinstance(schema, Mapping) else None
    if isinstance(reference, str) and depth < _MAX_STEPS:
        return _words(form, where, referred(reference, root), root, depth + 1)
    if not isinstance(schema, Mapping) or reference is not None:
        raise _not_here(form, where, "$ref")
    one_of = next((schema[key] for key in ("anyOf", "oneOf", "allOf") if key in schema), None)
    if isinstance(one_of, list) and len(one_of) == 1:
        rest = {key: value for key, value in schema.items() if value is not one_of}
        if not {"enum", "const", *_OF_TEXT} & set(rest):
            return _words(form, where, one_of[0], root, depth + 1)
    if found := next((each for each in _OF_TEXT if each in schema), None):
        raise _not_here(form, where, found)
    words = [schema["const"]] if "const" in schema else schema.get("enum")
    return [word for word in words if isinstance(word, str)] if isinstance(words, list) else None


def _not_here(form: ToolFormat, where: str, what: str) -> RequestError:
    return RequestError(
        f"tool_choice cannot force a call, nor response_format be held beside tools: {where} has {what!r:.80}, and"
        f" arguments in the format {form.name} cannot be held to that; leave it out of the schema, or use tool_choice"
        " 'auto' without response_format"
    )


# --- schemas --------------------------------------------------------------------------------------------------------


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema, changed so that objects may have only the properties that it names. It never allows more than the
    original schema."""
    return schema if '"allOf"' in json.dumps(schema) else _close(schema)


def _close(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    closed = dict(schema)
    for key in ("properties", "$defs", "definitions"):
        if isinstance(schema.get(key), dict):
            closed[key] = {name: _close(each) for name, each in schema[key].items()}
    for key in ("anyOf", "oneOf", "prefixItems"):
        if isinstance(schema.get(key), list) and "properties" not in schema:
            closed[key] = [_close(each) for each in schema[key]]
    if "items" in schema:
        closed["items"] = _close(schema["items"])
    known = schema.get("properties")
    if not isinstance(known, dict) or any(key in schema for key in _COMBINED):
        return closed
    if all(key in known for key in schema.get("required") or ()):
        closed.setdefault("additionalProperties", False)
    return closed
