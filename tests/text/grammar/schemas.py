"""Schemas, with values that satisfy them and values that do not. The keys of valid values are in the schema's order."""

from __future__ import annotations

from typing import Any

from tests.text.grammar.part_schemas import PART_SCHEMAS, closed
from tests.text.grammar.value_schemas import VALUE_SCHEMAS

__all__ = ["REFUSED", "SCHEMAS"]


_TEXT, _WHOLE, _NUMBER, _BOOL = ({"type": name} for name in ("string", "integer", "number", "boolean"))
_TREE = {
    "$ref": "#/$defs/node",
    "$defs": {"node": closed({"v": _WHOLE, "kids": {"type": "array", "items": {"$ref": "#/$defs/node"}}})},
}
_LIST = {
    "$defs": {"l": {"anyOf": [{"type": "null"}, closed({"head": _WHOLE, "tail": {"$ref": "#/$defs/l"}})]}},
    "$ref": "#/$defs/l",
}

SCHEMAS: dict[str, tuple[dict[str, Any], list[Any], list[Any]]] = {
    "string": (_TEXT, ["", "a", 'with "quotes" \\ and \n', "日本語 😀"], [1, None, [], {}]),
    "integer": (_WHOLE, [0, -1, 12345], [1.5, "1", None, True]),
    "number": (_NUMBER, [0, -1.5, 1e10, 0.001], ["1", None, False]),
    "boolean": (_BOOL, [True, False], [0, "true", None]),
    "null": ({"type": "null"}, [None], [0, "", False]),
    "anything": ({}, [1, "a", None, [1, {"a": []}], {}], []),
    "any object": ({"type": "object"}, [{}, {"a": 1, "b": [None]}], [1, [], "a", None]),
    "any array": ({"type": "array"}, [[], [1, "a", {}]], [{}, 1]),
    "two types": ({"type": ["string", "null"]}, ["a", None], [1, False, []]),
    "three flat fields": (
        closed({"name": _TEXT, "age": _WHOLE, "ok": _BOOL}),
        [{"name": "Ann", "age": 3, "ok": True}],
        [{"name": "Ann", "age": 3}, {"name": 1, "age": 3, "ok": True}, {"name": "A", "age": 3, "ok": True, "x": 1}],
    ),
    "optional field": (
        closed({"a": _WHOLE, "b": _TEXT}, ["a"]),
        [{"a": 1}, {"a": 1, "b": "x"}],
        [{}, {"b": "x"}, {"a": "1"}],
    ),
    "all optional": (
        closed({"a": _WHOLE, "b": _WHOLE, "c": _WHOLE}, []),
        [{}, {"b": 1}, {"a": 1, "c": 2}],
        [{"d": 1}],
    ),
    "open object": (
        {"type": "object", "properties": {"a": _WHOLE}, "required": ["a"]},
        [{"a": 1}, {"a": 1, "z": [1]}],
        [{}, {"a": "x"}],
    ),
    "typed rest": (
        {"type": "object", "properties": {"a": _WHOLE}, "required": ["a"], "additionalProperties": _TEXT},
        [{"a": 1}, {"a": 1, "b": "x"}],
        [{"a": 1, "b": 2}],
    ),
    "map of numbers": (
        {"type": "object", "additionalProperties": _NUMBER},
        [{}, {"x": 1.5, "y": 2}],
        [{"x": "1"}, {"x": None}],
    ),
    "nested": (
        closed({"user": closed({"name": _TEXT, "tags": {"type": "array", "items": _TEXT}})}),
        [{"user": {"name": "A", "tags": []}}, {"user": {"name": "A", "tags": ["x", "y"]}}],
        [{"user": {"name": "A"}}, {"user": {"name": "A", "tags": [1]}}, {"user": []}],
    ),
    "enum of strings": ({"enum": ["red", "green", "dark blue"]}, ["red", "dark blue"], ["blue", "Red", 1]),
    "enum of all kinds": ({"enum": [1, "a", None, True, {"x": [1]}]}, [1, None, {"x": [1]}], [2, False, {"x": [2]}]),
    "const": ({"const": "yes"}, ["yes"], ["no", "ye", "yes!", None]),
    "const object": ({"const": {"a": [1, 2]}}, [{"a": [1, 2]}], [{"a": [1]}, {}]),
    "const with a quote": ({"const": 'a "b" \\ c'}, ['a "b" \\ c'], ['a "b"', "a"]),
    "large enum": ({"enum": [f"value {i}" for i in range(1000)]}, ["value 0", "value 999"], ["value 1000", "value"]),
    "minimum": ({"type": "integer", "minimum": 5}, [5, 6, 1000], [4, 0, -7]),
    "maximum": ({"type": "integer", "maximum": 5}, [5, 0, -100], [6, 50]),
    "between": ({"type": "integer", "minimum": -3, "maximum": 117}, [-3, 0, 117], [-4, 118, 1000]),
    "exclusive": ({"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 10}, [1, 9], [0, 10]),
    "number between": ({"type": "number", "minimum": 0, "maximum": 1}, [0, 0.25, 1], [-0.1, 1.1, 2]),
    "multiple": ({"type": "integer", "multipleOf": 7}, [0, 7, 49], [1, 8, 50]),
    "length": ({"type": "string", "minLength": 2, "maxLength": 4}, ["ab", "abcd", "日本"], ["a", "abcde", ""]),
    "pattern": ({"type": "string", "pattern": "^[a-z]{2}[0-9]+$"}, ["ab1", "zz987"], ["a1", "ab", "AB1", "ab1x"]),
    "pattern anywhere": ({"type": "string", "pattern": "cat"}, ["cat", "a cat here"], ["dog", "ca t"]),
    "pattern or": ({"type": "string", "pattern": "^(yes|no|may be)$"}, ["yes", "may be"], ["maybe", "yesno"]),
    "date": ({"type": "string", "format": "date"}, ["2026-11-26"], ["26.11.2026", "2026-13-01", "today"]),
    "date-time": ({"type": "string", "format": "date-time"}, ["2026-11-26T03:14:00Z"], ["2026-11-26", "now"]),
    "email": ({"type": "string", "format": "email"}, ["a@example.com"], ["a", "@example.com"]),
    "uuid": (
        {"type": "string", "format": "uuid"},
        ["123e4567-e89b-12d3-a456-426614174000"],
        ["123e4567", "123e4567-e89b-12d3-a456-42661417400z"],
    ),
    "ipv4": ({"type": "string", "format": "ipv4"}, ["192.168.0.1"], ["192.168.0", "256.1.1.1"]),
    "array of integers": ({"type": "array", "items": _WHOLE}, [[], [1], [1, 2, 3]], [["a"], [1.5], {}]),
    "array bounds": (
        {"type": "array", "items": _WHOLE, "minItems": 2, "maxItems": 3},
        [[1, 2], [1, 2, 3]],
        [[], [1], [1, 2, 3, 4]],
    ),
    "tuple": (
        {"type": "array", "prefixItems": [_TEXT, _WHOLE], "items": False, "minItems": 2},
        [["a", 1]],
        [["a"], [1, "a"], ["a", 1, 2]],
    ),
    "tuple with rest": (
        {"type": "array", "prefixItems": [_TEXT], "items": _WHOLE, "minItems": 1},
        [["a"], ["a", 1, 2]],
        [[], ["a", "b"]],
    ),
    "array of objects": (
        {"type": "array", "items": closed({"id": _WHOLE, "ok": _BOOL})},
        [[], [{"id": 1, "ok": True}, {"id": 2, "ok": False}]],
        [[{"id": 1}], [{"id": "1", "ok": True}]],
    ),
    "matrix": (
        {"type": "array", "items": {"type": "array", "items": _NUMBER, "maxItems": 2}, "maxItems": 2},
        [[], [[1, 2], [3.5]]],
        [[[1, 2, 3]], [["a"]], [1]],
    ),
    "any of": ({"anyOf": [_WHOLE, {"type": "string", "maxLength": 2}]}, [5, "ab"], ["abc", None, 1.5]),
    "any of objects": (
        {"anyOf": [closed({"a": _WHOLE}), closed({"b": _TEXT})]},
        [{"a": 1}, {"b": "x"}],
        [{"a": 1, "b": "x"}, {"a": "x"}, {}],
    ),
    "one of disjoint": ({"oneOf": [_WHOLE, _TEXT]}, [1, "a"], [None, 1.5, []]),
    "one of tagged": (
        {
            "oneOf": [
                closed({"kind": {"const": "circle"}, "r": _NUMBER}),
                closed({"kind": {"const": "square"}, "side": _NUMBER}),
            ]
        },
        [{"kind": "circle", "r": 1}, {"kind": "square", "side": 2.5}],
        [{"kind": "circle", "side": 1}, {"kind": "triangle", "r": 1}],
    ),
    "all of": (
        {"allOf": [{"type": "integer", "minimum": 3}, {"type": "integer", "maximum": 9}]},
        [3, 9],
        [2, 10, "5"],
    ),
    "all of objects": (
        {
            "allOf": [
                {"type": "object", "properties": {"a": _WHOLE}, "required": ["a"]},
                {"type": "object", "properties": {"b": _TEXT}, "required": ["b"]},
            ]
        },
        [{"a": 1, "b": "x"}],
        [{"a": 1}, {"b": "x"}],
    ),
    "reference": (
        {
            **closed({"from": {"$ref": "#/$defs/p"}, "to": {"$ref": "#/$defs/p"}}),
            "$defs": {"p": closed({"x": _WHOLE})},
        },
        [{"from": {"x": 1}, "to": {"x": 2}}],
        [{"from": {"x": 1}}, {"from": {"x": "1"}, "to": {"x": 2}}],
    ),
    "old definitions": (
        {"definitions": {"p": _WHOLE}, "type": "array", "items": {"$ref": "#/definitions/p"}},
        [[1, 2]],
        [["a"], 1],
    ),
    "tree": (
        _TREE,
        [{"v": 1, "kids": []}, {"v": 1, "kids": [{"v": 2, "kids": [{"v": 3, "kids": []}]}]}],
        [{"v": 1}, {"v": 1, "kids": [{"v": 2}]}, {"v": "1", "kids": []}],
    ),
    "linked list": (_LIST, [None, {"head": 1, "tail": {"head": 2, "tail": None}}], [1, {"head": 1}]),
    "pattern properties": (
        {"type": "object", "patternProperties": {"^n_": _WHOLE, "^s_": _TEXT}, "additionalProperties": False},
        [{}, {"n_a": 1, "s_b": "x"}],
        [{"n_a": "x"}, {"other": 1}],
    ),
    "property names with spaces": (
        closed({"first name": _TEXT, 'say "hi"': _WHOLE, "größe": _NUMBER}),
        [{"first name": "A", 'say "hi"': 1, "größe": 1.5}],
        [{"first name": "A"}, {"first name": "A", 'say "hi"': "1", "größe": 1}],
    ),
    "constant fields": (
        closed({"type": {"const": "call"}, "version": {"const": 2}, "args": {"type": "object"}}),
        [{"type": "call", "version": 2, "args": {"x": 1}}],
        [{"type": "call", "version": 3, "args": {}}, {"type": "x", "version": 2, "args": {}}],
    ),
    "nullable object": (
        {"anyOf": [closed({"a": _WHOLE}), {"type": "null"}]},
        [None, {"a": 1}],
        [{}, "null", 0],
    ),
    "weather call": (
        closed({"city": _TEXT, "unit": {"enum": ["celsius", "fahrenheit"]}, "days": {"type": "integer", "minimum": 1}}),
        [{"city": "Ulm", "unit": "celsius", "days": 3}],
        [{"city": "Ulm", "unit": "kelvin", "days": 3}, {"city": "Ulm", "unit": "celsius", "days": 0}],
    ),
    "invoice": (
        closed(
            {
                "number": {"type": "string", "pattern": "^INV-[0-9]{4}$"},
                "lines": {"type": "array", "items": closed({"text": _TEXT, "cents": _WHOLE}), "minItems": 1},
                "paid": _BOOL,
            }
        ),
        [{"number": "INV-0042", "lines": [{"text": "ride", "cents": 4200}], "paid": False}],
        [
            {"number": "INV-42", "lines": [{"text": "ride", "cents": 1}], "paid": False},
            {"number": "INV-0042", "lines": [], "paid": False},
        ],
    ),
    "settings with defaults": (
        closed({"level": {"type": "integer", "default": 3, "description": "how loud"}, "on": _BOOL}, title="Settings"),
        [{"level": 1, "on": True}],
        [{"level": None, "on": True}, {"on": True}],
    ),
    "with a schema and an id": (
        {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "$id": "https://example.com/x",
            **closed({"a": _BOOL}),
        },
        [{"a": True}],
        [{"a": 1}, {}],
    ),
    "deep": (
        closed({"a": closed({"b": closed({"c": closed({"d": {"type": "array", "items": closed({"e": _BOOL})}})})})}),
        [{"a": {"b": {"c": {"d": [{"e": True}]}}}}],
        [{"a": {"b": {"c": {"d": [{"e": 1}]}}}}, {"a": {"b": {}}}],
    ),
    "a word that spells a marker": (
        closed({"tag": {"enum": ["<|end|>", "<|user|>hi", "</s>"]}}),
        [{"tag": "<|end|>"}, {"tag": "<|user|>hi"}, {"tag": "</s>"}],
        [{"tag": "<|assistant|>"}, {"tag": ""}],
    ),
    "many fields": (
        closed({f"f{i}": _WHOLE if i % 2 else _TEXT for i in range(40)}),
        [{f"f{i}": i if i % 2 else str(i) for i in range(40)}],
        [{f"f{i}": i if i % 2 else str(i) for i in range(39)}],
    ),
    **VALUE_SCHEMAS,
    **PART_SCHEMAS,
}
"""Name -> (schema, values that satisfy it, values that do not)."""

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "not": ({"not": _TEXT}, '"not"'),
    "if": ({"type": "object", "properties": {"a": {"if": _TEXT, "then": {"minLength": 3}}}}, '"if"'),
    "uniqueItems": ({"type": "array", "uniqueItems": True}, '"uniqueItems"'),
    "contains": ({"type": "array", "contains": _WHOLE}, '"contains"'),
    "propertyNames": (
        {"type": "object", "properties": {"a": {}}, "propertyNames": {"pattern": "^a"}},
        'use "patternProperties" with "additionalProperties": false',
    ),
    "dependentRequired": ({"type": "object", "dependentRequired": {"a": ["b"]}}, '"dependentRequired"'),
    "unevaluatedProperties": (
        {"type": "object", "anyOf": [{"properties": {"a": {}}}], "unevaluatedProperties": False},
        '"unevaluatedProperties"',
    ),
    "overlapping oneOf": ({"oneOf": [{"type": "object"}, {"type": "object", "required": ["a"]}]}, "oneOf"),
    "look-ahead": ({"type": "string", "pattern": "^a(?=b)"}, "write the pattern without it"),
    "negative look-ahead": ({"type": "string", "pattern": "^(?!a)"}, "write the pattern without it"),
    "look-ahead in one of two branches": ({"type": "string", "pattern": "^(?=a)|b"}, "write the pattern without it"),
    "remote reference": ({"$ref": "https://example.com/schema"}, "https://example.com/schema"),
    "missing reference": ({"$ref": "#/$defs/a"}, "$defs/a"),
    "unknown type": ({"type": "text"}, "text"),
    "impossible bounds": ({"type": "integer", "minimum": 5, "maximum": 4}, "minimum (5)"),
    "empty enum": ({"enum": []}, "empty"),
    "bad pattern": ({"type": "string", "pattern": "(a"}, "unclosed"),
    "not inside allOf": ({"type": "object", "allOf": [{"not": {"required": ["a"]}}]}, '"not"'),
    "dependentSchemas": ({"dependentSchemas": {"a": {"required": ["b"]}}}, '"dependentSchemas"'),
    "old dependencies": ({"dependencies": {"a": ["b"]}}, '"dependencies"'),
    "dynamic reference": ({"$dynamicRef": "#a"}, '"$dynamicRef"'),
    "unevaluatedItems": ({"allOf": [{"prefixItems": [{}]}], "unevaluatedItems": False}, '"unevaluatedItems"'),
    "minContains": ({"contains": {}, "minContains": 2}, '"minContains"'),
    "maxContains in a property": (closed({"a": {"contains": {}, "minContains": 0, "maxContains": 1}}), '"maxContains"'),
    "oneOf of numbers": ({"oneOf": [_WHOLE, _NUMBER]}, "oneOf"),
    "oneOf of bounds": ({"oneOf": [{"minimum": 1}, {"minimum": 2}]}, "oneOf"),
    "nothing at all": ({"not": {}}, '"not"'),
    "an id beside a reference": ({"items": {"$id": "a", "$ref": "#/$defs/b"}, "$defs": {"b": {}}}, '"$id"'),
    "look-behind": ({"type": "string", "pattern": "(?<!a)b"}, "look"),
    "back reference": ({"type": "string", "pattern": "^(a|b)\\1$"}, "backreferences"),
    "edge of a word": ({"type": "string", "pattern": "\\bcat\\b"}, "WordUnicode"),
    "impossible lengths": ({"type": "string", "minLength": 3, "maxLength": 2}, "minLength (3)"),
    "impossible counts": ({"type": "array", "minItems": 3, "maxItems": 2}, "minItems (3)"),
    "type that is a number": ({"type": 5}, "type must be"),
    "bound that is a text": ({"type": "integer", "minimum": "3"}, "'minimum'"),
    "length below zero": ({"type": "string", "maxLength": -1}, "'maxLength'"),
    "bad pattern of names": ({"type": "object", "patternProperties": {"(": {}}}, "unclosed"),
    "const of another type": ({"type": "string", "const": 1}, "incompatible types"),
    "two types at once": ({"allOf": [_TEXT, _WHOLE]}, "incompatible types"),
    "any of nothing": ({"anyOf": []}, "anyOf is empty"),
    "reference to another file": ({"$ref": "other.json#/a"}, "other.json"),
    "reference to itself": ({"$ref": "#"}, "leads back to itself"),
    "two keys, whose names are free": ({"type": "object", "minProperties": 2}, '"minProperties"'),
    "two keys of three, deep inside": (
        {"type": "array", "items": {"anyOf": [_NUMBER, {"$ref": "#/$defs/a"}]}, "$defs": {"a": {"minProperties": 2}}},
        '"minProperties"',
    ),
    "too many optional keys": (
        {"type": "array", "items": closed({f"p{i}": _WHOLE for i in range(1_001)}, [])},
        '1,001 "properties"',
    ),
}
"""Name of an unsupported schema -> (schema, part of the error message that refuses it)."""
