"""Reads arguments that a model writes as nested elements: each argument is an element with the argument's name."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, Final

from chairlift.text.tool_calls.values import MAX_DEPTH, NotReadable, by_schema, referred, types_of

__all__ = ["element_arguments"]

_ITEM: Final = "item"
"""Name of the elements of a list."""


@dataclasses.dataclass(slots=True)
class _Element:
    """An element whose end was not read yet."""

    name: str
    schema: Any
    begin: int
    """Offset after the tag that begins the element, or after its last child."""
    children: list[tuple[str, Any]] = dataclasses.field(default_factory=list)


def element_arguments(text: str, mark: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments in ``MARK<place>UlmMARK</place>MARK<days>MARK<item>1MARK</item>MARK</days>``, by the schema of the
    function. An element with children is an object, or a list if its schema says so or if all its children are named
    ``item`` and its schema does not say otherwise. Raises NotReadable."""
    tags = re.compile(re.escape(mark) + r"<(/?)([^<>]+)>")
    stack = [_Element("", schema, 0)]
    for tag in tags.finditer(text):
        within = stack[-1]
        between = text[within.begin : tag.start()]
        is_end, name = tag[1] == "/", tag[2].strip()
        if (within.children or not is_end) and between.strip():
            raise NotReadable(f"there is text between the arguments: {between.strip()[:40]!r}")
        if not is_end:
            if len(stack) > MAX_DEPTH:
                raise NotReadable(f"lists and objects are more than {MAX_DEPTH} deep")
            stack.append(_Element(name, _child_schema(within.schema, name, schema), tag.end()))
            continue
        if len(stack) == 1 or name != within.name:
            raise NotReadable(f"</{name[:40]}> ends no argument")
        stack.pop()
        stack[-1].children.append((name, _value(within, between, schema)))
        stack[-1].begin = tag.end()
    if len(stack) > 1:
        raise NotReadable(f"the argument {stack[-1].name[:40]!r} has no end")
    if mark in text[stack[0].begin :] or text[stack[0].begin :].strip():
        raise NotReadable("there is text between the arguments")
    return _object(stack[0].children)


def _value(element: _Element, text: str, root: Mapping[str, Any]) -> Any:
    types = types_of(element.schema, root)
    if not element.children:
        if not text.strip() and types and types <= {"array", "object", "null"}:
            return [] if "array" in types else {}
        return by_schema(text, element.schema, root)
    are_items = all(name == _ITEM for name, _ in element.children)
    if are_items and ("array" in types or "object" not in types):
        return [value for _, value in element.children]
    return _object(element.children)


def _object(children: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(children)
    if len(found) < len(children):
        raise NotReadable("an argument is there twice")
    return found


def _child_schema(schema: Any, name: str, root: Mapping[str, Any]) -> Any:
    """Schema of a child of an element; empty if it is not known."""
    schemas = [schema]
    for each in schemas:
        if len(schemas) > MAX_DEPTH or not isinstance(each, Mapping):
            continue
        properties = each.get("properties")
        if isinstance(properties, Mapping) and name in properties:
            return properties[name]
        if name == _ITEM and isinstance(each.get("items"), Mapping):
            return each["items"]
        if isinstance(each.get("$ref"), str):
            schemas.append(referred(each["$ref"], root))
        for key in ("anyOf", "oneOf", "allOf"):
            schemas += each[key] if isinstance(each.get(key), list) else []
    others = schema.get("additionalProperties") if isinstance(schema, Mapping) else None
    return others if isinstance(others, Mapping) else {}
