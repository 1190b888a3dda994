"""Schemas of objects, arrays, unions and references, in the format of :mod:`tests.text.grammar.schemas`."""

from __future__ import annotations

from typing import Any

__all__ = ["PART_SCHEMAS", "closed"]


def closed(properties: dict[str, Any], required: list[str] | None = None, **more: Any) -> dict[str, Any]:
    """Schema of an object that allows no other keys. All keys are required unless ``required`` lists fewer."""
    names = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False, **more}


def _list(items: Any, **more: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, **more}


def _open(properties: dict[str, Any], *required: str, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required), **more}


_TEXT, _WHOLE, _NUMBER, _BOOL, _NULL = ({"type": name} for name in ("string", "integer", "number", "boolean", "null"))
_SHORT = {"type": "string", "maxLength": 8}

_OBJECTS: dict[str, tuple[dict[str, Any], list[Any], list[Any]]] = {
    "no keys at all": (closed({}), [{}], [{"a": 1}, [], None]),
    "first is optional": (closed({"a": _WHOLE, "b": _TEXT}, ["b"]), [{"b": "x"}, {"a": 1, "b": "x"}], [{"a": 1}, {}]),
    "middle is optional": (
        closed({"a": _WHOLE, "b": _WHOLE, "c": _WHOLE}, ["a", "c"]),
        [{"a": 1, "c": 3}, {"a": 1, "b": 2, "c": 3}],
        [{"a": 1}, {"a": 1, "b": 2}, {"c": 3}],
    ),
    "key that is never allowed": (
        _open({"a": _WHOLE, "b": False}, "a"),
        [{"a": 1}, {"a": 1, "c": 2}],
        [{"a": 1, "b": 2}],
    ),
    "key of any value": (closed({"a": True}), [{"a": None}, {"a": [{}]}], [{}, {"b": 1}]),
    "required without a schema": (
        {"type": "object", "properties": {"a": _WHOLE}, "required": ["a", "z"]},
        [{"a": 1, "z": None}],
        [{"a": 1}, {"z": 1}],
    ),
    "names that begin alike": (
        closed({"user": _TEXT, "user_id": _WHOLE, "user_ids": _list(_WHOLE)}),
        [{"user": "a", "user_id": 1, "user_ids": [2]}],
        [{"user": "a", "user_id": 1}, {"user_id": 1, "user": 2, "user_ids": []}],
    ),
    "empty name": (closed({"": _WHOLE}), [{"": 1}], [{}, {" ": 1}, {"": "1"}]),
    "name with a slash": (closed({"a/b": _BOOL, "c~d": _BOOL}), [{"a/b": True, "c~d": False}], [{"a/b": True}]),
    "name with a line end": (closed({"a\nb": _WHOLE}), [{"a\nb": 1}], [{"a b": 1}, {"ab": 1}]),
    "name with an emoji": (closed({"😀": _WHOLE, "ключ": _WHOLE}), [{"😀": 1, "ключ": 2}], [{"😀": 1}, {"ключ": 2}]),
    "names that spell keywords": (
        closed({"type": _TEXT, "properties": _WHOLE, "$ref": _BOOL}),
        [{"type": "a", "properties": 1, "$ref": True}],
        [{"type": 1, "properties": 1, "$ref": True}, {"type": "a"}],
    ),
    "map of lists": (
        {"type": "object", "additionalProperties": _list(_WHOLE, maxItems=2)},
        [{}, {"a": [], "b": [1, 2]}],
        [{"a": [1, 2, 3]}, {"a": 1}],
    ),
    "map of closed objects": (
        {"type": "object", "additionalProperties": closed({"x": _NUMBER})},
        [{"p": {"x": 1.5}}, {}],
        [{"p": {}}, {"p": {"x": 1, "y": 2}}],
    ),
    "map of maps": (
        {"type": "object", "additionalProperties": {"type": "object", "additionalProperties": _BOOL}},
        [{"a": {"b": True}}, {"a": {}}],
        [{"a": True}, {"a": {"b": 1}}],
    ),
    "two patterns of names": (
        {"type": "object", "patternProperties": {"^x-": {}, "^[0-9]+$": _TEXT}, "additionalProperties": False},
        [{"x-a": [1], "12": "t"}],
        [{"12": 1}, {"y-a": 1}, {"1a": "t"}],
    ),
    "names and a pattern": (
        {
            "type": "object",
            "properties": {"id": _WHOLE},
            "required": ["id"],
            "patternProperties": {"^x_": _TEXT},
            "additionalProperties": False,
        },
        [{"id": 1}, {"id": 1, "x_a": "b"}],
        [{"x_a": "b"}, {"id": 1, "x_a": 2}, {"id": 1, "y": "b"}],
    ),
    "pattern of languages": (
        {"type": "object", "patternProperties": {"^[a-z]{2}$": _SHORT}, "additionalProperties": False},
        [{"de": "hallo", "en": "hi"}],
        [{"deu": "hallo"}, {"de": "a long text"}],
    ),
    "at least one key": ({"type": "object", "minProperties": 1, "additionalProperties": _WHOLE}, [{"a": 1}], [{}]),
    "at most two keys": (
        {"type": "object", "maxProperties": 2, "additionalProperties": _WHOLE},
        [{}, {"a": 1, "b": 2}],
        [{"a": 1, "b": 2, "c": 3}],
    ),
    "object or list of it": (
        {"anyOf": [closed({"a": _WHOLE}), _list(closed({"a": _WHOLE}))]},
        [{"a": 1}, [], [{"a": 1}, {"a": 2}]],
        [{"a": "1"}, [1], [{"b": 1}]],
    ),
    "eight levels": (
        closed({"a": closed({"b": closed({"c": closed({"d": closed({"e": closed({"f": closed({"g": _NULL})})})})})})}),
        [{"a": {"b": {"c": {"d": {"e": {"f": {"g": None}}}}}}}],
        [{"a": {"b": {"c": {"d": {"e": {"f": {"g": 0}}}}}}}, {"a": {"b": {"c": {}}}}],
    ),
    "hundred optional keys": (
        closed({f"k{i}": _WHOLE for i in range(100)}, []),
        [{}, {"k0": 1, "k50": 2, "k99": 3}],
        [{"k100": 1}, {"k0": "1"}],
    ),
    "read-only and old": (
        closed({"a": {**_WHOLE, "readOnly": True, "deprecated": True, "$comment": "kept for old clients"}}),
        [{"a": 1}],
        [{}, {"a": "1"}],
    ),
}
_ARRAYS: dict[str, tuple[dict[str, Any], list[Any], list[Any]]] = {
    "empty only": (_list(_WHOLE, maxItems=0), [[]], [[1], None]),
    "at least three": (_list(_WHOLE, minItems=3), [[1, 2, 3], [1, 2, 3, 4]], [[], [1, 2]]),
    "exactly two": (_list(_BOOL, minItems=2, maxItems=2), [[True, False]], [[True], [True, False, True]]),
    "no items": ({"type": "array", "items": False}, [[]], [[1], [None]]),
    "items of any kind": (_list(True, maxItems=2), [[1, "a"], [{}]], [[1, 2, 3]]),
    "items of two kinds": (_list({"type": ["string", "null"]}), [["a", None], []], [[1], [["a"]]]),
    "items of an enum": (_list({"enum": ["x", "y"]}, minItems=1), [["x"], ["y", "x"]], [[], ["z"], ["xy"]]),
    "items in bounds": (_list({"type": "integer", "minimum": 1, "maximum": 6}), [[1, 6]], [[0], [7], [1, 10]]),
    "items by pattern": (_list({"type": "string", "pattern": "^[A-Z]{3}$"}), [["EUR", "USD"]], [["eur"], ["EURO"]]),
    "three dimensions": (
        _list(_list(_list(_WHOLE, maxItems=1), maxItems=1), maxItems=1),
        [[], [[]], [[[1]]]],
        [[1], [[1]], [[[1, 2]]], [[[["a"]]]]],
    ),
    "pair": (
        {"type": "array", "prefixItems": [_NUMBER, _NUMBER], "items": False, "minItems": 2},
        [[1.5, -2]],
        [[1], [1, 2, 3], ["1", 2]],
    ),
    "tuple that may be short": (
        {"type": "array", "prefixItems": [_TEXT, _WHOLE, _BOOL], "items": False},
        [[], ["a"], ["a", 1], ["a", 1, True]],
        [[1], ["a", "b"], ["a", 1, True, 2]],
    ),
    "tuple, open at its end": (
        {"type": "array", "prefixItems": [_WHOLE], "minItems": 1},
        [[1], [1, "a", None]],
        [[], ["a"]],
    ),
    "tuple with a bounded rest": (
        {"type": "array", "prefixItems": [_TEXT], "items": _WHOLE, "minItems": 2, "maxItems": 3},
        [["a", 1], ["a", 1, 2]],
        [["a"], ["a", 1, 2, 3], ["a", "b"]],
    ),
    "list of pairs": (
        _list({"type": "array", "prefixItems": [_TEXT, _NUMBER], "items": False, "minItems": 2}),
        [[], [["a", 1], ["b", 2.5]]],
        [[["a"]], [[1, "a"]], [["a", 1, 1]]],
    ),
    "tuple of objects": (
        {
            "type": "array",
            "prefixItems": [closed({"q": _TEXT}), closed({"a": _TEXT})],
            "items": False,
            "minItems": 2,
        },
        [[{"q": "?"}, {"a": "!"}]],
        [[{"a": "!"}, {"q": "?"}], [{"q": "?"}]],
    ),
    "old form of a tuple": (
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "type": "array",
            "items": [_TEXT, _WHOLE],
            "additionalItems": False,
            "minItems": 2,
        },
        [["a", 1]],
        [["a"], [1, "a"], ["a", 1, 2]],
    ),
    "list of maps": (_list({"type": "object", "additionalProperties": _WHOLE}), [[{}, {"a": 1}]], [[{"a": "b"}], [1]]),
    "fifty of them": (_list(_WHOLE, minItems=50, maxItems=50), [list(range(50))], [list(range(49)), list(range(51))]),
}
_UNIONS: dict[str, tuple[dict[str, Any], list[Any], list[Any]]] = {
    "any of three types": ({"anyOf": [_WHOLE, _TEXT, _NULL]}, [1, "a", None], [1.5, True, []]),
    "any of ranges": (
        {"anyOf": [{"type": "integer", "maximum": 3}, {"type": "integer", "minimum": 10, "maximum": 12}]},
        [3, -5, 10, 12],
        [4, 9, 13],
    ),
    "any of within any of": (
        {"anyOf": [{"anyOf": [_WHOLE, _BOOL]}, {"anyOf": [_NULL, {"const": "x"}]}]},
        [1, True, None, "x"],
        ["y", 1.5],
    ),
    "any of patterns": (
        {"anyOf": [{"type": "string", "pattern": "^a+$"}, {"type": "string", "pattern": "^b+$"}]},
        ["a", "bb"],
        ["ab", "", "c"],
    ),
    "any of tagged by number": (
        {"anyOf": [closed({"v": {"const": 1}, "a": _TEXT}), closed({"v": {"const": 2}, "b": _WHOLE})]},
        [{"v": 1, "a": ""}, {"v": 2, "b": 3}],
        [{"v": 2, "a": ""}, {"v": 3, "b": 3}, {"v": 1}],
    ),
    "one of constants": ({"oneOf": [{"const": "a"}, {"const": "b"}]}, ["a", "b"], ["c", "ab"]),
    "one of enums": ({"oneOf": [{"enum": [1, 2]}, {"enum": ["x"]}]}, [1, 2, "x"], [3, "y"]),
    "one of object or text": ({"oneOf": [_TEXT, closed({"text": _TEXT})]}, ["a", {"text": "a"}], [{}, 1, {"text": 1}]),
    "one of three kinds": (
        {
            "oneOf": [
                closed({"op": {"const": "add"}, "by": _WHOLE}),
                closed({"op": {"const": "set"}, "to": _WHOLE}),
                closed({"op": {"const": "clear"}}),
            ]
        },
        [{"op": "add", "by": 1}, {"op": "set", "to": 0}, {"op": "clear"}],
        [{"op": "add", "to": 1}, {"op": "clear", "to": 1}, {"op": "x"}],
    ),
    "all of bounds on text": (
        {"allOf": [{"type": "string", "minLength": 2}, {"type": "string", "maxLength": 4}]},
        ["ab", "abcd"],
        ["a", "abcde", 3],
    ),
    "all of two kinds": (
        {"allOf": [{"type": ["string", "integer"]}, {"type": ["integer", "null"]}]},
        [1, 0],
        ["a", None],
    ),
    "all of enums": ({"allOf": [{"enum": [1, 2, 3]}, {"enum": [2, 3, 4]}]}, [2, 3], [1, 4]),
    "all of with keys beside it": (
        {
            "type": "object",
            "properties": {"a": _WHOLE},
            "required": ["a"],
            "allOf": [{"properties": {"b": _TEXT}, "required": ["b"]}],
        },
        [{"a": 1, "b": "x"}],
        [{"a": 1}, {"b": "x"}, {"a": 1, "b": 2}],
    ),
    "all of with a reference": (
        {
            "$defs": {"named": _open({"name": _SHORT}, "name")},
            "allOf": [{"$ref": "#/$defs/named"}, _open({"age": _WHOLE}, "age")],
        },
        [{"name": "Ann", "age": 3}],
        [{"name": "Ann"}, {"age": 3}, {"name": 1, "age": 3}],
    ),
    "all of the same key": (
        {
            "allOf": [
                _open({"n": {"type": "integer", "minimum": 3}}, "n"),
                _open({"n": {"type": "integer", "maximum": 5}}, "n"),
            ]
        },
        [{"n": 3}, {"n": 5}],
        [{"n": 2}, {"n": 6}, {}],
    ),
    "all of one": ({"allOf": [{"type": "boolean"}]}, [True], [1, None]),
    "all of any of": (
        {"allOf": [{"anyOf": [_WHOLE, _TEXT]}, {"anyOf": [_TEXT, _NULL]}]},
        ["a", ""],
        [1, None],
    ),
    "any of beside a type": (
        {"type": "object", "anyOf": [_open({"a": _WHOLE}, "a"), _open({"b": _WHOLE}, "b")]},
        [{"a": 1}, {"b": 2}],
        [{"a": "1"}, {"c": 1}, []],
    ),
    "field of either kind": (
        closed({"value": {"anyOf": [_NUMBER, _list(_NUMBER, maxItems=2)]}, "unit": {"enum": ["m", "s"]}}),
        [{"value": 1.5, "unit": "m"}, {"value": [1, 2], "unit": "s"}],
        [{"value": "1", "unit": "m"}, {"value": [1, 2, 3], "unit": "s"}, {"value": 1, "unit": "g"}],
    ),
    "optional nullable": (
        closed({"a": {"anyOf": [_WHOLE, _NULL]}, "b": {"type": ["boolean", "null"]}}, ["a"]),
        [{"a": None}, {"a": 1, "b": None}],
        [{}, {"b": None}, {"a": "x"}],
    ),
}
_EXPRESSION: dict[str, Any] = {
    "$ref": "#/$defs/e",
    "$defs": {
        "e": {
            "anyOf": [
                _NUMBER,
                closed({"op": {"enum": ["+", "*"]}, "l": {"$ref": "#/$defs/e"}, "r": {"$ref": "#/$defs/e"}}),
            ]
        }
    },
}
_REFERENCES: dict[str, tuple[dict[str, Any], list[Any], list[Any]]] = {
    "expression": (
        _EXPRESSION,
        [1, {"op": "+", "l": 1, "r": {"op": "*", "l": 2, "r": 3.5}}],
        [{"op": "-", "l": 1, "r": 2}, {"op": "+", "l": 1}, "1"],
    ),
    "reference to the root": (
        closed({"v": _WHOLE, "next": {"anyOf": [{"$ref": "#"}, _NULL]}}),
        [{"v": 1, "next": None}, {"v": 1, "next": {"v": 2, "next": None}}],
        [{"v": 1}, {"v": 1, "next": {"v": 2}}, {"v": 1, "next": 2}],
    ),
    "reference through a reference": (
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"type": "integer", "minimum": 1}}, "$ref": "#/$defs/a"},
        [1, 20],
        [0, "1"],
    ),
    "reference to a property": (
        closed({"from": closed({"x": _WHOLE}), "to": {"$ref": "#/properties/from"}}),
        [{"from": {"x": 1}, "to": {"x": 2}}],
        [{"from": {"x": 1}, "to": {}}, {"from": {"x": 1}, "to": 2}],
    ),
    "reference with bounds beside it": (
        {"$defs": {"n": {"type": "integer", "minimum": 0}}, "$ref": "#/$defs/n", "maximum": 5},
        [0, 5],
        [-1, 6],
    ),
    "two types that call each other": (
        {
            "$defs": {
                "folder": closed({"name": _SHORT, "files": _list({"$ref": "#/$defs/file"})}),
                "file": {"anyOf": [_SHORT, {"$ref": "#/$defs/folder"}]},
            },
            "$ref": "#/$defs/folder",
        },
        [{"name": "a", "files": ["b", {"name": "c", "files": []}]}],
        [{"name": "a"}, {"name": "a", "files": [{"name": "c"}]}, "a"],
    ),
    "reference to an escaped name": (
        {"$defs": {"a/b": _WHOLE, "c d": _TEXT}, "type": "array", "items": {"$ref": "#/$defs/a~1b"}},
        [[1], []],
        [["a"], [None]],
    ),
    "one definition in many places": (
        {
            **closed({name: {"$ref": "#/$defs/money"} for name in ("net", "tax", "gross")}),
            "$defs": {"money": closed({"cents": {"type": "integer", "minimum": 0}, "currency": {"enum": ["EUR"]}})},
        },
        [{name: {"cents": 1, "currency": "EUR"} for name in ("net", "tax", "gross")}],
        [
            {"net": {"cents": 1, "currency": "EUR"}},
            {name: {"cents": -1, "currency": "EUR"} for name in ("net", "tax", "gross")},
        ],
    ),
    "JSON in JSON": (
        {
            "$defs": {
                "json": {
                    "anyOf": [
                        *({"type": name} for name in ("null", "boolean", "number", "string")),
                        _list({"$ref": "#/$defs/json"}),
                        {"type": "object", "additionalProperties": {"$ref": "#/$defs/json"}},
                    ]
                }
            },
            **closed({"data": {"$ref": "#/$defs/json"}}),
        },
        [{"data": None}, {"data": {"a": [1, {"b": "c"}]}}],
        [{}, {"dat": 1}, []],
    ),
    "comments with answers": (
        {
            "$defs": {"c": closed({"by": _SHORT, "answers": _list({"$ref": "#/$defs/c"}, maxItems=2)})},
            **_list({"$ref": "#/$defs/c"}, minItems=1),
        },
        [[{"by": "a", "answers": [{"by": "b", "answers": []}]}]],
        [[], [{"by": "a"}], [{"by": "a", "answers": [1]}]],
    ),
}
_APPLICATIONS: dict[str, tuple[dict[str, Any], list[Any], list[Any]]] = {
    "verdict with reasons": (
        closed({"verdict": {"enum": ["yes", "no"]}, "score": {"type": "integer", "minimum": 1, "maximum": 5}}),
        [{"verdict": "yes", "score": 5}],
        [{"verdict": "maybe", "score": 5}, {"verdict": "no", "score": 0}],
    ),
    "extracted people": (
        closed({"people": _list(closed({"name": _SHORT, "born": {"type": ["integer", "null"]}}), maxItems=4)}),
        [{"people": []}, {"people": [{"name": "Ada", "born": 1815}, {"name": "B", "born": None}]}],
        [{"people": [{"name": "Ada"}]}, {"people": [{"name": "Ada", "born": "1815"}]}],
    ),
    "steps of a plan": (
        closed({"steps": _list(closed({"do": _SHORT, "tool": {"enum": ["read", "write"]}}), minItems=1, maxItems=3)}),
        [{"steps": [{"do": "look", "tool": "read"}]}],
        [{"steps": []}, {"steps": [{"do": "look", "tool": "run"}]}],
    ),
    "place on a map": (
        closed(
            {
                "type": {"const": "Point"},
                "coordinates": {"type": "array", "prefixItems": [_NUMBER, _NUMBER], "items": False, "minItems": 2},
            }
        ),
        [{"type": "Point", "coordinates": [9.99, 48.4]}],
        [{"type": "Line", "coordinates": [9.99, 48.4]}, {"type": "Point", "coordinates": [9.99]}],
    ),
    "page of results": (
        closed({"items": _list(_SHORT, maxItems=3), "next": {"type": ["string", "null"], "maxLength": 4}}),
        [{"items": ["a"], "next": "p2"}, {"items": [], "next": None}],
        [{"items": [], "next": "page 2"}, {"items": [1], "next": None}],
    ),
    "query of a table": (
        closed(
            {
                "select": _list({"type": "string", "pattern": "^[a-z_]+$"}, minItems=1, maxItems=3),
                "where": _list(
                    closed({"field": _SHORT, "op": {"enum": ["=", "<", ">"]}, "value": {"anyOf": [_NUMBER, _SHORT]}})
                ),
                "limit": {"type": "integer", "minimum": 1, "maximum": 100},
            },
            ["select", "limit"],
        ),
        [
            {"select": ["a_b"], "where": [{"field": "a", "op": "<", "value": 3}], "limit": 10},
            {"select": ["a"], "limit": 1},
        ],
        [{"select": [], "limit": 1}, {"select": ["a"], "limit": 0}, {"select": ["A"], "limit": 1}],
    ),
    "event of a calendar": (
        closed(
            {"title": _SHORT, "day": {"type": "string", "format": "date"}, "all_day": _BOOL, "guests": _list(_SHORT)}
        ),
        [{"title": "call", "day": "2026-11-26", "all_day": False, "guests": ["Ann"]}],
        [{"title": "call", "day": "tomorrow", "all_day": False, "guests": []}, {"title": "call", "day": "2026-11-26"}],
    ),
    "labels with weights": (
        {
            "type": "object",
            "patternProperties": {"^[a-z]+$": {"type": "number", "minimum": 0, "maximum": 1}},
            "additionalProperties": False,
        },
        [{"good": 0.5, "bad": 1}, {}],
        [{"good": 2}, {"Good": 0.5}],
    ),
    "message with parts": (
        closed(
            {
                "role": {"enum": ["user", "assistant"]},
                "content": {
                    "anyOf": [
                        _SHORT,
                        _list(
                            {
                                "oneOf": [
                                    closed({"type": {"const": "text"}, "text": _SHORT}),
                                    closed({"type": {"const": "image"}, "url": _SHORT}),
                                ]
                            },
                            minItems=1,
                        ),
                    ]
                },
            }
        ),
        [{"role": "user", "content": "hi"}, {"role": "assistant", "content": [{"type": "image", "url": "a.png"}]}],
        [{"role": "system", "content": "hi"}, {"role": "user", "content": [{"type": "text", "url": "a"}]}],
    ),
    "menu": (
        closed(
            {
                "id": {"type": "integer", "minimum": 1},
                "price": {"type": "number", "minimum": 0, "maximum": 99},
                "spicy": {"enum": [0, 1, 2, 3]},
            }
        ),
        [{"id": 1, "price": 9.5, "spicy": 0}],
        [{"id": 0, "price": 9.5, "spicy": 0}, {"id": 1, "price": 100, "spicy": 0}, {"id": 1, "price": 1, "spicy": 4}],
    ),
    "chess move": (
        closed({"move": {"type": "string", "pattern": "^[a-h][1-8][a-h][1-8][qrbn]?$"}, "draw": _BOOL}),
        [{"move": "e2e4", "draw": False}, {"move": "a7a8q", "draw": True}],
        [{"move": "e2e9", "draw": False}, {"move": "Nf3", "draw": False}],
    ),
    "board of tic-tac-toe": (
        _list(_list({"enum": ["x", "o", ""]}, minItems=3, maxItems=3), minItems=3, maxItems=3),
        [[["x", "", "o"]] * 3],
        [[["x", "", "o"]] * 2, [["x", ""]] * 3, [["a", "", "o"]] * 3],
    ),
    "settings of a server": (
        closed(
            {
                "host": {"type": "string", "format": "hostname"},
                "port": {"type": "integer", "minimum": 1, "maximum": 65535},
                "tls": {"anyOf": [_NULL, closed({"cert": _SHORT, "key": _SHORT})]},
            }
        ),
        [{"host": "a.test", "port": 443, "tls": {"cert": "c", "key": "k"}}, {"host": "b", "port": 80, "tls": None}],
        [{"host": "a b", "port": 443, "tls": None}, {"host": "a", "port": 443, "tls": {"cert": "c"}}],
    ),
}

PART_SCHEMAS: dict[str, tuple[dict[str, Any], list[Any], list[Any]]] = (
    _OBJECTS | _ARRAYS | _UNIONS | _REFERENCES | _APPLICATIONS
)
"""Name -> (schema, values that satisfy it, values that do not)."""
