"""Arguments that are nested elements, and texts that only look like them."""

from __future__ import annotations

from typing import Any

import pytest

from chairlift.text.tool_calls.elements import element_arguments
from chairlift.text.tool_calls.values import NotReadable

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "lines": {"type": "array", "items": {"$ref": "#/$defs/line"}},
        "deep": {"type": "object", "properties": {"item": {"type": "integer"}}},
        "any": {},
        "maybe": {"anyOf": [{"type": "array", "items": {"type": "number"}}, {"type": "null"}]},
    },
    "$defs": {"line": {"type": "object", "properties": {"sku": {"type": "string"}, "n": {"type": "integer"}}}},
}


def written(text: str) -> str:
    return text.replace("<", "@@<")


READ: list[tuple[str, Any]] = [
    ("", {}),
    ("<text> 5\n</text>", {"text": " 5\n"}),
    ("<text></text>", {"text": ""}),
    ("<lines>\n<item><sku>7</sku><n>2</n></item>\n<item></item></lines>", {"lines": [{"sku": "7", "n": 2}, {}]}),
    ("<lines></lines>", {"lines": []}),
    ('<lines>[{"sku": "a"}]</lines>', {"lines": [{"sku": "a"}]}),
    ("<deep><item>3</item></deep>", {"deep": {"item": 3}}),
    ("<any><a>1</a></any>", {"any": {"a": 1}}),
    ("<any><item>x</item></any>", {"any": ["x"]}),
    ("<maybe><item>1.5</item></maybe>", {"maybe": [1.5]}),
    ("<maybe>null</maybe>", {"maybe": None}),
]


@pytest.mark.parametrize(("text", "arguments"), READ)
def test_elements_are_read_by_their_schema(text: str, arguments: Any) -> None:
    assert element_arguments(written(text), "@@", SCHEMA) == arguments


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("<text>a", "no end"),
        ("<text>a</any>", "ends no argument"),
        ("</text>", "ends no argument"),
        ("<text>a</text>b", "text between"),
        ("b<text>a</text>", "text between"),
        ("<deep>b<item>3</item></deep>", "text between"),
        ("<text>a</text><text>b</text>", "twice"),
        ("<a>" * 100, "deep"),
        ("<text>a</text><", "text between"),
    ],
)
def test_other_texts_are_not_read(text: str, reason: str) -> None:
    with pytest.raises(NotReadable, match=reason):
        element_arguments(written(text), "@@", SCHEMA)
