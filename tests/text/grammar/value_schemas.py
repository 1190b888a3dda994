"""Schemas of strings, numbers and fixed values, in the format of :mod:`tests.text.grammar.schemas`."""

from __future__ import annotations

from typing import Any

__all__ = ["VALUE_SCHEMAS"]


def _text(**more: Any) -> dict[str, Any]:
    return {"type": "string", **more}


def _whole(**more: Any) -> dict[str, Any]:
    return {"type": "integer", **more}


def _number(**more: Any) -> dict[str, Any]:
    return {"type": "number", **more}


_FORMATS: dict[str, tuple[dict[str, Any], list[Any], list[Any]]] = {
    "time": (_text(format="time"), ["12:30:00Z", "23:59:59+01:00"], ["12:30", "25:00:00Z", "noon", ""]),
    "duration": (_text(format="duration"), ["P1D", "PT3H30M", "P2W"], ["1 day", "P", "PT", "P1"]),
    "hostname": (_text(format="hostname"), ["example.com", "a-b.test", "localhost"], ["-a.com", "a b", "a..b"]),
    "ipv6": (_text(format="ipv6"), ["::1", "2001:db8::ff00:42:8329"], ["192.168.0.1", "::g", "1:2:3"]),
    "uri": (_text(format="uri"), ["https://example.com/a?b=c#d", "urn:a:b"], ["no uri", "//a", ""]),
    "date or nothing": ({"anyOf": [_text(format="date"), {"type": "null"}]}, ["2024-02-28", None], ["2024-2-28", ""]),
    "list of dates": (
        {"type": "array", "items": _text(format="date"), "maxItems": 2},
        [[], ["2020-01-31", "1999-12-01"]],
        [["2020-00-01"], ["01/02/2020"], ["2020-01-01", "2020-01-02", "2020-01-03"]],
    ),
    "address with uuid and e-mail": (
        {
            "type": "object",
            "properties": {"id": _text(format="uuid"), "mail": _text(format="email")},
            "required": ["id", "mail"],
            "additionalProperties": False,
        },
        [{"id": "00000000-0000-4000-8000-000000000000", "mail": "x.y@b.org"}],
        [{"id": "0", "mail": "x.y@b.org"}, {"id": "00000000-0000-4000-8000-000000000000", "mail": "x.y"}],
    ),
    "address of either version": (
        {"anyOf": [_text(format="ipv4"), _text(format="ipv6")]},
        ["10.0.0.255", "fe80::1"],
        ["10.0.0.256", "fe80", 10],
    ),
}
_TEXTS: dict[str, tuple[dict[str, Any], list[Any], list[Any]]] = {
    "at least one character": (_text(minLength=1), ["a", " ", "é"], ["", None]),
    "at most nothing": (_text(maxLength=0), [""], ["a", " ", None]),
    "exactly three": (_text(minLength=3, maxLength=3), ["abc", "日本語"], ["ab", "abcd", ""]),
    "exactly one emoji long": (_text(minLength=1, maxLength=1), ["😀", "a", "\n"], ["", "ab"]),
    "length with escapes": (_text(maxLength=2), ['""', "\\\\", "\t\n"], ['"""', "\\\\\\"]),
    "two hundred": (_text(maxLength=200), ["", "x" * 200], ["x" * 201]),
    "colour": (_text(pattern="^#[0-9a-fA-F]{6}$"), ["#00ff7F", "#ABCDEF"], ["00ff7f", "#00ff7", "#00ff7g", "#00ff7ff"]),
    "telephone": (_text(pattern="^\\+[0-9]{1,3} [0-9]{4,10}$"), ["+49 731123456"], ["49 731123456", "+49 12", "+49"]),
    "version": (
        _text(pattern="^(0|[1-9][0-9]*)\\.(0|[1-9][0-9]*)\\.(0|[1-9][0-9]*)$"),
        ["0.1.0", "10.20.30"],
        ["01.1.0", "1.0", "1.0.0.0", "v1.0.0"],
    ),
    "identifier": (_text(pattern="^[A-Za-z_][A-Za-z0-9_]*$"), ["_", "a1", "Abc_d"], ["1a", "a-b", "", " a"]),
    "words with single blanks": (_text(pattern="^\\w+( \\w+)*$"), ["a", "two words"], ["a  b", " a", "a ", ""]),
    "ends in a full stop": (_text(pattern="\\.$"), [".", "It ends."], ["", "It ends", ". "]),
    "begins with a letter": (_text(pattern="^[a-z]"), ["a", "z9 !"], ["", "9z", "A"]),
    "no digits": (_text(pattern="^[^0-9]*$"), ["", "abc", "é ß"], ["a1", "1"]),
    "anything but blanks": (_text(pattern="^\\S+$"), ["a", "a.b"], ["", "a b", "\t"]),
    "either way round": (_text(pattern="^(ab|ba){1,2}$"), ["ab", "abba", "baab"], ["", "aa", "ababab"]),
    "optional ending": (_text(pattern="^colou?r(s)?$"), ["color", "colours"], ["colouur", "colour "]),
    "escaped characters": (_text(pattern='^["\\\\/]$'), ['"', "\\", "/"], ["", "a", '""']),
    "letters of Greek": (_text(pattern="^[α-ω]+$"), ["λόγος".replace("ό", "ο"), "ω"], ["a", "", "Ω"]),
    "pattern with both lengths": (
        _text(pattern="^[ab]+$", minLength=2, maxLength=3),
        ["ab", "aba"],
        ["a", "abab", "ac"],
    ),
    "pattern with an empty branch": (_text(pattern="^(a|)$"), ["", "a"], ["aa", "b"]),
    "base 64": (_text(pattern="^([A-Za-z0-9+/]{4})*$"), ["", "QUJD", "QUJDQUJD"], ["QUJ", "QUJ=", "QU D"]),
    "time of a clock": (
        _text(pattern="^([01][0-9]|2[0-3]):[0-5][0-9]$"),
        ["00:00", "23:59"],
        ["24:00", "9:30", "12:60"],
    ),
    "text with a title": (_text(title="Name", description="of a person", examples=["Ann"]), ["Bob"], [1, None]),
}
_NUMBERS: dict[str, tuple[dict[str, Any], list[Any], list[Any]]] = {
    "one digit": (_whole(minimum=0, maximum=9), [0, 9], [-1, 10, 0.5]),
    "one value": (_whole(minimum=42, maximum=42), [42], [41, 43, -42, 4, 422]),
    "byte": (_whole(minimum=0, maximum=255), [0, 99, 100, 199, 255], [256, 300, -1, 1000]),
    "below zero": (_whole(maximum=-1), [-1, -100], [0, 1]),
    "between negatives": (_whole(minimum=-250, maximum=-17), [-250, -100, -17], [-16, -251, 17, 0]),
    "across zero": (_whole(minimum=-1, maximum=1), [-1, 0, 1], [-2, 2, 10]),
    "port": (_whole(minimum=1, maximum=65535), [1, 80, 65535], [0, 65536, 70000, -80]),
    "year": (_whole(minimum=1900, maximum=2100), [1900, 1999, 2100], [1899, 2101, 19, 20000]),
    "large bounds": (_whole(minimum=10**12, maximum=10**13), [10**12, 5 * 10**12, 10**13], [10**12 - 1, 10**13 + 1]),
    "exclusive below": (_whole(exclusiveMaximum=0), [-1, -99], [0, 1]),
    "exclusive above and at most": (_whole(exclusiveMinimum=10, maximum=12), [11, 12], [10, 13]),
    "multiple of ten in bounds": (_whole(multipleOf=10, minimum=20, maximum=50), [20, 50], [10, 25, 60]),
    "multiple of three": (_whole(multipleOf=3), [0, 3, 333], [1, 100, 7]),
    "any number above zero": (_number(exclusiveMinimum=0), [0.001, 1, 17.5], [0, -1, -0.5]),
    "half open": (_number(minimum=0, exclusiveMaximum=1), [0, 0.5, 0.999], [1, 1.5, -0.1]),
    "degrees": (_number(minimum=-90, maximum=90), [-90, -0.5, 0, 89.99, 90], [-90.1, 90.1, 180]),
    "bounds with fractions": (_number(minimum=0.25, maximum=1.75), [0.25, 1, 1.75], [0.2, 1.8, 2]),
    "temperature of a sampler": (_number(minimum=0, maximum=2), [0, 0.7, 2], [2.1, -0.1]),
    "narrow": (_number(minimum=3.1, maximum=3.2), [3.1, 3.14159, 3.2], [3.0, 3.3, 31]),
    "hundredths": (_number(multipleOf=0.01), [0, 1.25, 3], ["1.25", None]),
    "number of a union": ({"type": ["number", "boolean"]}, [1.5, 0, True], ["1", None]),
    "whole or text": ({"type": ["integer", "string"]}, [3, "3"], [3.5, None]),
}
_FIXED: dict[str, tuple[dict[str, Any], list[Any], list[Any]]] = {
    "enum of one": ({"enum": ["only"]}, ["only"], ["onl", "only ", None]),
    "enum of numbers": ({"enum": [1, 2, 30]}, [1, 30], [3, 0, "1", 12]),
    "enum with a type": ({"type": "string", "enum": ["a", "b"]}, ["a", "b"], ["c", 1]),
    "enum whose type excludes some": ({"type": "integer", "enum": [1, "a", 2]}, [1, 2], ["a", 3]),
    "enum with common beginnings": ({"enum": ["a", "ab", "abc", "b"]}, ["a", "ab", "abc"], ["", "abcd", "bc"]),
    "enum with an empty text": ({"enum": ["", "x"]}, ["", "x"], [" ", "xx"]),
    "enum of booleans": ({"enum": [True]}, [True], [False, "true", 1]),
    "enum of lists": ({"enum": [[1, 2], []]}, [[1, 2], []], [[1], [2, 1]]),
    "enum in other scripts": ({"enum": ["はい", "いいえ", "да"]}, ["はい", "да"], ["は", "нет"]),
    "enum with marks": ({"enum": ["a/b", "c\\d", 'e"f', "g\nh"]}, ["a/b", "c\\d", 'e"f', "g\nh"], ["a", "ef"]),
    "enum with null": ({"enum": ["a", None]}, ["a", None], ["null", ""]),
    "const number": ({"const": 7}, [7], [70, "7", -7]),
    "const below zero": ({"const": -12}, [-12], [12, -1]),
    "const null": ({"const": None}, [None], ["null", 0, False]),
    "const false": ({"const": False}, [False], [True, 0]),
    "const empty": ({"const": ""}, [""], [" ", None]),
    "const list": ({"const": [{"a": None}, "b"]}, [[{"a": None}, "b"]], [[{"a": None}], [], ["b"]]),
    "const deep": ({"const": {"a": {"b": {"c": []}}}}, [{"a": {"b": {"c": []}}}], [{"a": {"b": {}}}, {"a": {}}]),
    "const with line ends": ({"const": "a\n\tb"}, ["a\n\tb"], ["a b", "a\nb"]),
    "const in a list": ({"type": "array", "items": {"const": 0}, "maxItems": 3}, [[], [0, 0]], [[1], [0, 0, 0, 0]]),
    "grades": ({"enum": ["A+", "A", "A-", "B+"]}, ["A+", "A", "A-"], ["A*", "B", "+"]),
}

VALUE_SCHEMAS: dict[str, tuple[dict[str, Any], list[Any], list[Any]]] = _FORMATS | _TEXTS | _NUMBERS | _FIXED
"""Name -> (schema, values that satisfy it, values that do not)."""
