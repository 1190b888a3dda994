"""Schemas of the kinds that zod 4 (``z.toJSONSchema``) and pydantic 2 write, with valid and invalid values.

The shapes of zod are written by hand from its published output. Those of pydantic come from the installed package.
"""

from __future__ import annotations

import collections
import datetime
import decimal
import enum
import ipaddress
import pathlib
import re
import uuid
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, NotRequired

import pydantic
from pydantic import AfterValidator, BaseModel, Field, TypeAdapter
from typing_extensions import TypedDict

__all__ = ["PYDANTIC", "PYDANTIC_REFUSED", "ZOD", "ZOD_REFUSED"]

Case = tuple[dict[str, Any], list[Any], list[Any]]
"""(schema, values that satisfy it, values that do not)."""


def _text(**more: Any) -> dict[str, Any]:
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "type": "string", **more}


def _object(properties: dict[str, Any], *required: str, **more: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required or properties),
        "additionalProperties": False,
        **more,
    }


_STRING, _INT = {"type": "string"}, {"type": "integer", "minimum": -9007199254740991, "maximum": 9007199254740991}
_ZOD_EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
_ZOD_DURATION = r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$"
_ZOD_DATE = (
    r"(?:(?:\d\d[2468][048]|\d\d[13579][26]|\d\d0[48]|[02468][048]00|[13579][26]00)-02-29"
    r"|\d{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)"
    r"|(?:02)-(?:0[1-9]|1\d|2[0-8])))"
)
_ZOD_TIME = r"(?:[01]\d|2[0-3]):[0-5]\d(?::[0-5]\d(?:\.\d+)?)?"
_V4 = r"(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9][0-9]|[0-9])"
_UUID = r"[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[1-8][0-9a-fA-F]{3}-[89abAB][0-9a-fA-F]{3}-[0-9a-fA-F]{12}"
_LABEL = "[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_HOST = rf"^(?=.{{1,253}}\.?$){_LABEL}(?:\.{_LABEL})*\.?$"
_BASE64 = r"^$|^(?:[0-9a-zA-Z+/]{4})*(?:(?:[0-9a-zA-Z+/]{2}==)|(?:[0-9a-zA-Z+/]{3}=))?$"
_NODE = _object({"v": _STRING, "kids": {"type": "array", "items": {"$ref": "#"}}})

ZOD: dict[str, Case] = {
    "string": (_text(), ["", "a"], [1, None]),
    "string lengths": (_text(minLength=2, maxLength=3), ["ab"], ["a", "abcd"]),
    "email": (
        _text(format="email", pattern=_ZOD_EMAIL),
        ["a@b.de", "o'b.c+d@e-f.org"],
        [".a@b.de", "a..b@c.de", "a'@b.de", "a@b"],
    ),
    "uuid": (
        _text(format="uuid", pattern=f"^({_UUID}|00000000-0000-0000-0000-000000000000)$"),
        ["123e4567-e89b-42d3-a456-426614174000"],
        ["123e4567-e89b-92d3-a456-426614174000", "1"],
    ),
    "url": (_text(format="uri"), ["https://a.de/b?c#d"], ["a b", ""]),
    "emoji": (_text(format="emoji", pattern=r"^(\p{Extended_Pictographic}|\p{Emoji_Component})+$"), ["😀"], ["a", ""]),
    "nanoid": (_text(format="nanoid", pattern="^[a-zA-Z0-9_-]{21}$"), ["a" * 21], ["a" * 20]),
    "cuid": (_text(format="cuid", pattern=r"^[cC][^\s-]{8,}$"), ["c12345678"], ["12345678c"]),
    "cuid2": (_text(format="cuid2", pattern="^[0-9a-z]+$"), ["a1"], ["A1", ""]),
    "ulid": (_text(format="ulid", pattern="^[0-9A-HJKMNP-TV-Za-hjkmnp-tv-z]{26}$"), ["0" * 26], ["I" * 26]),
    "datetime": (
        _text(format="date-time", pattern=f"^{_ZOD_DATE}T(?:{_ZOD_TIME}(?:Z))$"),
        ["2024-02-29T10:00:00Z", "2020-01-01T10:00:00.123Z"],
        ["2023-02-29T10:00:00Z", "2020-01-01T10:00:00+01:00", "2020-01-01"],
    ),
    "datetime with an offset": (
        _text(format="date-time", pattern=rf"^{_ZOD_DATE}T(?:{_ZOD_TIME}(?:Z|([+-](?:[01]\d|2[0-3]):[0-5]\d)))$"),
        ["2020-01-01T10:00:00+01:00", "2020-01-01T10:00:00Z"],
        ["2020-01-01T10:00:00+25:00"],
    ),
    "date": (_text(format="date", pattern=f"^{_ZOD_DATE}$"), ["2000-02-29"], ["1900-02-29", "2020-04-31"]),
    "time": (_text(format="time", pattern=f"^{_ZOD_TIME}$"), ["10:00", "10:00:01.5"], ["24:00", "10"]),
    "duration": (
        _text(format="duration", pattern=_ZOD_DURATION),
        ["P1D", "P1Y2M3DT4H5M6S", "P2W", "PT5S"],
        ["P", "PT", "P1DT", "P1W2D", "1D"],
    ),
    "ipv4": (_text(format="ipv4", pattern=rf"^(?:{_V4}\.){{3}}{_V4}$"), ["10.0.0.255"], ["10.0.0.256"]),
    "ipv6": (
        _text(format="ipv6", pattern="^(([0-9a-fA-F]{1,4}:){7}[0-9a-fA-F]{1,4}|([0-9a-fA-F]{1,4}:){1,7}:|::1)$"),
        ["1:2:3:4:5:6:7:8", "::1", "fe80::"],
        ["1:2", ":::"],
    ),
    "cidrv4": (
        _text(format="cidrv4", pattern=rf"^({_V4}\.){{3}}{_V4}\/([0-9]|[1-2][0-9]|3[0-2])$"),
        ["10.0.0.0/8"],
        ["10.0.0.0", "10.0.0.0/33"],
    ),
    "base64": (_text(format="base64", contentEncoding="base64", pattern=_BASE64), ["", "QUI="], ["QUI", "é"]),
    "base64url": (_text(format="base64url", contentEncoding="base64url", pattern="^[A-Za-z0-9_-]*$"), ["a_-"], ["+"]),
    "e164": (_text(format="e164", pattern=r"^\+[1-9]\d{6,14}$"), ["+491234567"], ["491234567"]),
    "jwt": (_text(format="jwt"), ["a.b.c"], [1]),
    "hostname": (_text(format="hostname", pattern=_HOST), ["a.de", "localhost"], ["-a", "a..b", ""]),
    "json string": (_text(format="json-string"), ["{}"], [{}]),
    "regex": (_text(pattern="^ab+$"), ["abb"], ["a"]),
    "two patterns": (_text(allOf=[{"pattern": "^a.*"}, {"pattern": ".*b$"}]), ["ab", "acb"], ["a", "b", "ba"]),
    "lowercase": (_text(format="lowercase", pattern="^[^A-Z]*$"), ["a"], ["A"]),
    "template literal": (_text(pattern=r"^hello, .*!$"), ["hello, you!"], ["hello"]),
    "file": (_text(format="binary", contentEncoding="binary", maxLength=3), ["abc"], ["abcd"]),
    "number": ({"type": "number"}, [1, -2.5], ["1"]),
    "number between": ({"type": "number", "exclusiveMinimum": 0, "maximum": 5}, [0.5, 5], [0, 5.1]),
    "multiple": ({"type": "number", "multipleOf": 0.5}, [0, 1.5], [0.3]),
    "int": (_INT, [0, -5, 9007199254740991], [9007199254740992, 1.5]),
    "int32": ({"type": "integer", "minimum": -2147483648, "maximum": 2147483647}, [0], [2147483648]),
    "uint64": ({"type": "integer", "minimum": 0, "maximum": 18446744073709551615}, [7, 10**18], [-1, 2**64]),
    "float32": (
        {"type": "number", "minimum": -3.4028234663852886e38, "maximum": 3.4028234663852886e38},
        [1.5, -7],
        [1e39, "1"],
    ),
    "float64": (
        {"type": "number", "minimum": -1.7976931348623157e308, "maximum": 1.7976931348623157e308},
        [1.5, -7],
        [None],
    ),
    "below a bound of draft 4": ({"type": "number", "minimum": 3, "exclusiveMinimum": True}, [4, 3.5], [3]),
    "boolean": ({"type": "boolean"}, [True], ["true"]),
    "null": ({"type": "null"}, [None], [0]),
    "any": ({}, [1, "a", None], []),
    "never": (_object({"a": {"not": {}}, "b": _INT}, "b"), [{"b": 1}], [{"a": 1, "b": 1}]),
    "literal": ({"type": "string", "const": "a"}, ["a"], ["b"]),
    "literal null": ({"type": "null", "const": None}, [None], ["null"]),
    "literals": ({"type": "string", "enum": ["a", "b"]}, ["b"], ["c"]),
    "numeric enum": ({"type": "number", "enum": [0, 1]}, [0, 1], [2, "0"]),
    "object": (
        _object({"a": _STRING, "b": _INT}, "a"),
        [{"a": "x"}, {"a": "x", "b": 1}],
        [{"b": 1}, {"a": "x", "c": 1}],
    ),
    "loose object": (_object({"a": _STRING}, additionalProperties={}), [{"a": "x", "z": [1]}], [{}]),
    "catchall": (_object({"a": _STRING}, additionalProperties=_INT), [{"a": "x", "z": 1}], [{"a": "x", "z": "1"}]),
    "array": ({"type": "array", "items": _STRING, "minItems": 1, "maxItems": 2}, [["a"]], [[], ["a", "b", "c"], [1]]),
    "tuple": (
        {"type": "array", "prefixItems": [_STRING, _INT], "items": False, "minItems": 2},
        [["a", 1]],
        [["a"], ["a", 1, 2], [1, "a"]],
    ),
    "tuple with a rest": ({"type": "array", "prefixItems": [_STRING], "items": _INT}, [["a"], ["a", 1]], [["a", "b"]]),
    "tuple of draft 7": (
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "type": "array",
            "items": [_STRING],
            "additionalItems": _INT,
        },
        [["a", 1]],
        [["a", "b"], [1]],
    ),
    "record": (
        {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": _INT},
        [{}, {"a": 1}],
        [{"a": "1"}],
    ),
    "record of an enum": (
        {
            "type": "object",
            "propertyNames": {"type": "string", "enum": ["a", "b"]},
            "additionalProperties": _INT,
            "required": ["a", "b"],
        },
        [{"a": 1, "b": 2}],
        [{"a": 1}, {"a": 1, "b": "2"}, {"a": 1, "b": 2, "c": 3}],
    ),
    "partial record": (
        {"type": "object", "propertyNames": {"type": "string", "enum": ["a", "b"]}, "additionalProperties": _INT},
        [{}, {"b": 2}],
        [{"c": 1}, {"a": "1"}],
    ),
    "record of a pattern": (
        {"type": "object", "propertyNames": {"type": "string", "pattern": "^x-"}, "additionalProperties": _INT},
        [{}, {"x-a": 1}],
        [{"a": 1}, {"x-a": "1"}],
    ),
    "record of long names": (
        {"type": "object", "propertyNames": {"type": "string", "minLength": 2}, "additionalProperties": {}},
        [{"ab": 1}],
        [{"a": 1}],
    ),
    "union": ({"anyOf": [_STRING, _INT]}, ["a", 1], [None, 1.5]),
    "discriminated union": (
        {"oneOf": [_object({"k": {"type": "string", "const": "a"}}), _object({"k": {"const": "b"}, "n": _INT})]},
        [{"k": "a"}, {"k": "b", "n": 1}],
        [{"k": "b"}, {"k": "c"}],
    ),
    "nullable": ({"anyOf": [_STRING, {"type": "null"}]}, ["a", None], [1]),
    "default": (_object({"a": {"default": 3, "type": "number"}}), [{"a": 4}], [{"a": "4"}]),
    "catch": ({"default": "x", "type": "string"}, ["y"], [1]),
    "readonly": ({"readOnly": True, "type": "string"}, ["y"], [1]),
    "lazy": (_NODE, [{"v": "a", "kids": [{"v": "b", "kids": []}]}], [{"v": "a", "kids": [1]}, {"v": "a"}]),
    "shared definitions": (
        _object({"a": {"$ref": "#/$defs/__schema0"}}, **{"$defs": {"__schema0": _STRING}}),
        [{"a": "x"}],
        [{"a": 1}],
    ),
    "intersection": (
        {
            "allOf": [
                {"type": "object", "properties": {"a": _STRING}, "required": ["a"]},
                {"type": "object", "properties": {"b": _INT}, "required": ["b"]},
            ]
        },
        [{"a": "x", "b": 1}],
        [{"a": "x"}, {"b": 1}],
    ),
    "json": (
        {
            "$ref": "#/$defs/__schema0",
            "$defs": {
                "__schema0": {
                    "anyOf": [
                        _STRING,
                        {"type": "number"},
                        {"type": "boolean"},
                        {"type": "null"},
                        {"type": "array", "items": {"$ref": "#/$defs/__schema0"}},
                        {
                            "type": "object",
                            "propertyNames": {"type": "string"},
                            "additionalProperties": {"$ref": "#/$defs/__schema0"},
                        },
                    ]
                }
            },
        },
        [{"a": [1, None, {}]}, "x"],
        [],
    ),
    "meta": (_text(title="T", description="d", id="x", examples=["a"], deprecated=True), ["a"], [1]),
}
"""Kind -> case."""

ZOD_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "pattern with a look-ahead of its own": (_text(pattern="^(?!admin$)[a-z]+$"), "write the pattern without it"),
    "set, written as a list of unique items": (
        {"type": "array", "uniqueItems": True, "items": _STRING},
        "a list instead of a set",
    ),
}
"""Kind -> (schema, the part of the error that says what to write instead)."""


class _Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class _Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class _Cat(BaseModel):
    kind: Literal["cat"] = "cat"
    lives: int = 9


class _Dog(BaseModel):
    kind: Literal["dog", "wolf"] = "dog"
    name: str


class _Pair(NamedTuple):
    a: int
    b: str


class _Typed(TypedDict):
    a: int
    b: NotRequired[str]


class _Tree(BaseModel):
    value: int
    children: list[_Tree] = []


class _Closed(BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    a: int = Field(alias="A", ge=1, le=9, multiple_of=3)
    b: str | None = None


_ANY_OF_TWO = Annotated[_Cat | _Dog, Field(discriminator="kind")]
_TYPES: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "str": (str, ["a"], [1]),
    "int": (int, [1], [1.5, "1"]),
    "float": (float, [1.5, 2], ["1"]),
    "bool": (bool, [True], [1]),
    "None": (type(None), [None], [0]),
    "bytes": (bytes, ["ab"], [1]),
    "date": (datetime.date, ["2024-02-29"], ["2023-02-29", "2024-13-01"]),
    "datetime": (datetime.datetime, ["2024-02-29T01:02:03Z"], ["2023-02-29T01:02:03Z", "now"]),
    "time": (datetime.time, ["01:02:03Z"], ["25:00:00Z"]),
    "timedelta": (datetime.timedelta, ["P1DT2H"], ["1 day"]),
    "Decimal": (decimal.Decimal, [1.5, "1.5"], [None]),
    "UUID": (uuid.UUID, ["123e4567-e89b-12d3-a456-426614174000"], ["1"]),
    "UUID4": (
        pydantic.UUID4,
        ["123e4567-e89b-42d3-a456-426614174000"],
        ["123e4567-e89b-12d3-a456-426614174000"],
    ),
    "Enum": (_Colour, ["red"], ["green"]),
    "IntEnum": (_Level, [1], [3, "1"]),
    "Literal": (Literal["a", 1, None], ["a", 1, None], ["b", 2]),
    "Optional": (int | None, [1, None], ["1"]),
    "Union": (int | str, [1, "a"], [None]),
    "list": (list[int], [[], [1]], [["a"]]),
    "bounded list": (Annotated[list[int], Field(min_length=1, max_length=2)], [[1]], [[], [1, 2, 3]]),
    "tuple": (tuple[int, str], [[1, "a"]], [[1], [1, "a", 2], ["a", 1]]),
    "tuple of any length": (tuple[int, ...], [[], [1, 2]], [["a"]]),
    "Sequence": (Sequence[int], [[1]], [["a"]]),
    "Iterable": (Iterable[int], [[1]], [["a"]]),
    "deque": (collections.deque[int], [[1]], [["a"]]),
    "dict": (dict[str, int], [{"a": 1}], [{"a": "b"}]),
    "dict with int keys": (dict[int, str], [{"1": "a"}], [{"1": 1}]),
    "dict with enum keys": (dict[_Colour, int], [{}, {"red": 1}], [{"green": 1}, {"red": "a"}]),
    "dict with date keys": (dict[datetime.date, int], [{"2024-02-29": 1}], [{"2023-02-29": 1}, {"a": 1}]),
    "dict with UUID keys": (dict[uuid.UUID, int], [{"123e4567-e89b-12d3-a456-426614174000": 1}], [{"a": 1}]),
    "dict with a pattern": (dict[Annotated[str, Field(pattern="^x")], int], [{"xa": 1}, {"a": "b"}], [{"xa": "b"}]),
    "bounded dict": (Annotated[dict[str, int], Field(min_length=1, max_length=2)], [{"a": 1}], [{}]),
    "Mapping": (Mapping[str, int], [{"a": 1}], [{"a": "b"}]),
    "Any": (Any, [1, None], []),
    "Hashable": (Hashable, [1], []),
    "model": (_Closed, [{"A": 3}, {"A": 9, "b": None}], [{"A": 4}, {}, {"A": 3, "c": 1}]),
    "model of models": (_Tree, [{"value": 1, "children": [{"value": 2}]}], [{"value": 1, "children": [{}]}]),
    "discriminated union": (
        _ANY_OF_TWO,
        [{"kind": "cat", "lives": 2}, {"kind": "wolf", "name": "a"}],
        [{"kind": "bird"}, {"kind": "dog"}, {"name": "a"}],
    ),
    "union of models": (_Cat | _Dog, [{"kind": "cat"}, {"kind": "dog", "name": "a"}], [{"kind": "bird"}]),
    "root model": (pydantic.RootModel[list[int]], [[1]], [["a"]]),
    "TypedDict": (_Typed, [{"a": 1}, {"a": 1, "b": "x"}], [{"b": "x"}]),
    "NamedTuple": (_Pair, [[1, "a"]], [[1]]),
    "AnyUrl": (pydantic.AnyUrl, ["https://a.de/"], ["a b"]),
    "HttpUrl": (pydantic.HttpUrl, ["https://a.de/"], ["a b", ""]),
    "IPv4Address": (ipaddress.IPv4Address, ["10.0.0.1"], ["10.0.0.256"]),
    "IPv6Address": (ipaddress.IPv6Address, ["::ffff:10.0.0.1", "fe80::1"], ["1::2::3", "::ffff:10.0.0.256"]),
    "IPv4Network": (ipaddress.IPv4Network, ["10.0.0.0/8"], [8]),
    "IPv6Interface": (ipaddress.IPv6Interface, ["fe80::1/64"], [8]),
    "Path": (pathlib.Path, ["/a"], [1]),
    "FilePath": (pydantic.FilePath, ["/a"], [1]),
    "SecretStr": (pydantic.SecretStr, ["a"], [1]),
    "Json": (pydantic.Json[dict[str, int]], ["{}"], [{}]),
    "PositiveInt": (pydantic.PositiveInt, [1], [0]),
    "NegativeFloat": (pydantic.NegativeFloat, [-0.5], [0, 1]),
    "bounded str": (Annotated[str, Field(min_length=1, max_length=3, pattern="^a")], ["ab"], ["", "b", "abcd"]),
    "StrictInt": (pydantic.StrictInt, [1], ["1"]),
    "PastDate": (pydantic.PastDate, ["2020-01-01"], ["2020-02-30"]),
    "AwareDatetime": (pydantic.AwareDatetime, ["2020-01-01T00:00:00Z"], ["2020-01-01"]),
    "Base64Bytes": (pydantic.Base64Bytes, ["QUI="], ["QUI", "?"]),
    "ByteSize": (pydantic.ByteSize, [5, "5 KB"], [None]),
    "Pattern": (re.Pattern, ["^a$"], [1]),
    "JsonValue": (pydantic.JsonValue, [{"a": [1]}], []),
    "complex": (complex, ["1+2j"], [None]),
    "validated after": (Annotated[int, AfterValidator(abs)], [1], ["1"]),
    "format of its own": (Annotated[str, Field(json_schema_extra={"format": "color"})], ["red"], [1]),
}
PYDANTIC: dict[str, Case] = {
    name: (TypeAdapter(kind).json_schema(), valid, invalid) for name, (kind, valid, invalid) in _TYPES.items()
}
"""Kind -> case."""
PYDANTIC_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "set": (TypeAdapter(set[int]).json_schema(), "a list instead of a set"),
    "frozenset": (TypeAdapter(frozenset[str]).json_schema(), "a list instead of a set"),
    "dict with two or more keys": (
        TypeAdapter(Annotated[dict[str, int], Field(min_length=2)]).json_schema(),
        'name that many keys in "required"',
    ),
}
"""Kind -> (schema, the part of the error that says what to write instead)."""
