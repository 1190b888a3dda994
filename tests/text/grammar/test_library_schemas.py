"""Schemas that zod and pydantic write: each kind is enforced, or refused with what to write instead."""

from __future__ import annotations

import ipaddress
import json
import random
import re
from datetime import date
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from chairlift.errors import RequestError
from chairlift.text.grammar.schemas import checked_schema
from chairlift.text.grammar.strings import ENFORCED_FORMATS, with_string_conditions
from tests.text.grammar.library_schemas import PYDANTIC, PYDANTIC_REFUSED, ZOD, ZOD_REFUSED
from tests.text.grammar.models import compiled, verdict
from tests.text.grammar.part_schemas import closed
from tests.text.grammar.schemas import SCHEMAS

KINDS = {f"zod {name}": each for name, each in ZOD.items()} | {
    f"pydantic {name}": each for name, each in PYDANTIC.items()
}


@pytest.mark.parametrize("name", KINDS)
def test_a_kind_of_schema_accepts_its_valid_values_and_no_invalid_ones(name: str) -> None:
    schema, valid, invalid = KINDS[name]
    for value in valid:
        assert verdict(json.dumps(value, ensure_ascii=False), json=schema) == "complete", value
    for value in invalid:
        assert verdict(json.dumps(value, ensure_ascii=False), json=schema) != "complete", value


@pytest.mark.parametrize("name", [*ZOD_REFUSED, *PYDANTIC_REFUSED])
def test_a_kind_that_cannot_be_enforced_is_refused_with_what_to_write_instead(name: str) -> None:
    schema, instead = {**ZOD_REFUSED, **PYDANTIC_REFUSED}[name]
    with pytest.raises(RequestError, match=re.escape(instead)):
        compiled(json=schema)


@pytest.mark.parametrize("name", [*KINDS, *SCHEMAS])
def test_a_rewritten_schema_accepts_no_value_that_the_original_refuses(name: str) -> None:
    schema, valid, invalid = ({**KINDS, **SCHEMAS})[name]
    drawn = [value for _, more, _ in (*KINDS.values(), *SCHEMAS.values()) for value in more]
    values = [*valid, *invalid, *random.Random(0).sample(drawn, 60)]
    rewritten = checked_schema(schema)
    original = jsonschema_rs.validator_for(without_look_around(schema))
    narrower = jsonschema_rs.validator_for(rewritten, validate_formats=False)
    assert not [value for value in values if narrower.is_valid(value) and not original.is_valid(value)]


def without_look_around(schema: Any) -> Any:
    """The schema without the patterns that the validator's regular expressions do not know."""
    if isinstance(schema, list):
        return [without_look_around(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    dropped = {"pattern"} if "(?" in str(schema.get("pattern")).replace("(?:", "") else set()
    dropped |= {key for key in ("exclusiveMinimum", "exclusiveMaximum") if isinstance(schema.get(key), bool)}
    dropped |= {"additionalItems", "items"} if isinstance(schema.get("items"), list) else set()
    return {key: without_look_around(each) for key, each in schema.items() if key not in dropped}


WITHOUT_EFFECT: dict[str, tuple[dict[str, Any], list[Any], list[Any]]] = {
    "names of any kind": ({"propertyNames": {}, "additionalProperties": {"type": "integer"}}, [{"a": 1}], [{"a": "b"}]),
    "names that are texts": (closed({"a": {}}, propertyNames={"type": ["string", "null"]}), [{"a": 1}], [{"b": 1}]),
    "if alone": ({"if": {"type": "string"}, "type": "integer"}, [1], ["a"]),
    "then alone": ({"then": False, "else": False, "type": "integer"}, [1], ["a"]),
    "contains of none": ({"type": "array", "contains": {}, "minContains": 0}, [[]], [{}]),
    "minContains alone": ({"type": "array", "minContains": 3}, [[]], [{}]),
    "items that may repeat": ({"type": "array", "uniqueItems": False}, [[1, 1]], [{}]),
    "one unique item": ({"type": "array", "uniqueItems": True, "maxItems": 1}, [[1]], [[1, 2]]),
    "not of nothing": ({"not": False, "type": "integer"}, [1], ["a"]),
    "dependencies of nothing": ({"dependentRequired": {}, "dependentSchemas": {"a": {}}, "type": "object"}, [{}], [1]),
    "dependency on a required key": (closed({"a": {}}, dependentRequired={"b": ["a"]}), [{"a": 1}], [{}]),
    "unevaluated of any kind": ({"unevaluatedProperties": {}, "unevaluatedItems": True, "type": "object"}, [{}], [1]),
    "unevaluated beside nothing else": (
        {"type": "object", "properties": {"a": {}}, "unevaluatedProperties": False},
        [{"a": 1}, {}],
        [{"b": 1}],
    ),
    "unevaluated items": ({"type": "array", "prefixItems": [{}], "unevaluatedItems": False}, [[1]], [[1, 2]]),
    "format of numbers": ({"type": "integer", "format": "int32"}, [1], ["a"]),
    "format that nobody knows": (closed({"a": {"type": "string", "format": "colour"}}), [{"a": "x"}], [{"a": 1}, {}]),
    "names of a list, beside properties": (
        {"properties": {"a": {"const": 1}, "c": {}}, "propertyNames": {"enum": ["a", "b"]}, "type": "object"},
        [{}, {"a": 1, "b": 2}],
        [{"c": 1}, {"a": 2}, {"d": 1}],
    ),
    "no names": ({"type": "object", "propertyNames": False}, [{}], [{"a": 1}]),
    "names that are numbers": ({"type": "object", "propertyNames": {"type": "integer"}}, [{}], [{"a": 1}]),
    "names behind a reference": (
        {"type": "object", "propertyNames": {"$ref": "#/$defs/n"}, "$defs": {"n": {"const": "a"}}},
        [{"a": 1}],
        [{"b": 1}],
    ),
}


@pytest.mark.parametrize("name", WITHOUT_EFFECT)
def test_keywords_without_an_effect_are_accepted_and_the_rest_is_enforced(name: str) -> None:
    schema, valid, invalid = WITHOUT_EFFECT[name]
    checked = jsonschema_rs.validator_for(schema)
    assert all(map(checked.is_valid, valid)) and not any(map(checked.is_valid, invalid))
    assert [verdict(json.dumps(value), json=schema) for value in valid] == ["complete"] * len(valid)
    assert "complete" not in [verdict(json.dumps(value), json=schema) for value in invalid]


def demanded(**schema: Any) -> list[re.Pattern[str]]:
    made = with_string_conditions({"type": "string", **schema})
    patterns = [made.get("pattern"), *(each.get("pattern") for each in made.get("allOf", []))]
    return [re.compile(each) for each in patterns if each is not None]


def test_dates_know_leap_years() -> None:
    (pattern,) = demanded(format="date")
    for year in (*range(1, 2500), 9999):
        for month, day in ((2, 28), (2, 29), (2, 30), (4, 30), (4, 31), (12, 31), (12, 32), (0, 1), (13, 1)):
            try:
                date(year, month, day)
            except ValueError:
                exists = False
            else:
                exists = True
            assert bool(pattern.search(f"{year:04}-{month:02}-{day:02}")) == exists
    for text in ("2023-02-29T00:00:00Z", "1900-02-29T23:59:59Z"):
        assert verdict(json.dumps(text), json={"format": "date-time"}) == "refused"
    assert verdict('"2000-02-29T00:00:00Z"', json={"format": "date-time"}) == "complete"


def test_all_forms_of_ipv6_addresses_are_known() -> None:
    (pattern,) = demanded(format="ipv6")
    rng = random.Random(1)
    num_valid = 0
    for _ in range(30_000):
        parts = [rng.choice(["", "0", "1", "ff", "abcd", "10.0.0.1", "256.0.0.1"]) for _ in range(rng.randint(2, 9))]
        text = ":".join(parts)
        try:
            ipaddress.IPv6Address(text)
        except ValueError:
            exists = False
        else:
            exists = True
        assert bool(pattern.search(text)) == exists, text
        num_valid += exists
    assert num_valid > 300


EQUAL = [
    (ZOD["email"][0]["pattern"], "a.'@-b+cd_1"),
    (ZOD["duration"][0]["pattern"], "PYMDWTHS1,."),
    (r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$", "+-.01"),
    (r"^(?=.{2,3}$)(?=a|b[)]\))a*b?[)]*$", "ab)"),
]


@pytest.mark.parametrize(("pattern", "letters"), EQUAL)
def test_a_pattern_without_look_around_matches_the_same_texts(pattern: str, letters: str) -> None:
    rng, original, others = random.Random(2), re.compile(pattern), demanded(pattern=pattern)
    assert not any("(?=" in each.pattern or "(?!" in each.pattern for each in others)
    samples = ["a@b.de", "o'b.c@d-e.f.gh", "P1Y2M3DT4H5M6.7S", "P3W", "PT1M", "P1D", "+1.5", ".5", "5.", "a)", "b))"]
    num_matched = 0
    for _ in range(60_000):
        text = list(rng.choice(samples))
        for _ in range(rng.randint(0, 3)):
            at = rng.randint(0, len(text))
            text[at : at + rng.randint(0, 1)] = [rng.choice(letters)] * rng.randint(0, 1)
        joined = "".join(text)
        expected = original.search(joined) is not None
        assert all(each.search(joined) for each in others) == expected, joined
        num_matched += expected
    assert num_matched > 500


KEYWORDS: dict[str, list[dict[str, Any]]] = {
    "enforced": [
        {"type": "integer"},
        {"enum": [1]},
        {"const": 1},
        {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
        {"type": "object", "additionalProperties": {"type": "integer"}},
        {"type": "object", "patternProperties": {"^a": {"type": "integer"}}},
        {"type": "object", "minProperties": 1},
        {"type": "object", "maxProperties": 0},
        {"type": "array", "items": {"type": "integer"}},
        {"type": "array", "prefixItems": [{"type": "integer"}]},
        {"type": "array", "minItems": 2},
        {"type": "array", "maxItems": 0},
        {"type": "string", "minLength": 2},
        {"type": "string", "maxLength": 0},
        {"type": "string", "pattern": "^b"},
        {"type": "string", "format": "date"},
        {"type": "integer", "minimum": 2},
        {"type": "integer", "maximum": 0},
        {"type": "integer", "exclusiveMinimum": 1},
        {"type": "integer", "exclusiveMaximum": 1},
        {"type": "integer", "multipleOf": 2},
        {"anyOf": [{"type": "boolean"}]},
        {"allOf": [{"type": "boolean"}]},
        {"oneOf": [{"type": "boolean"}, {"type": "null"}]},
        {"$ref": "#/$defs/a", "$defs": {"a": {"type": "boolean"}}},
        {"$ref": "#/definitions/a", "definitions": {"a": {"type": "boolean"}}},
    ],
    "accepted": [
        {"title": "t", "description": "d", "default": 1, "examples": [2], "deprecated": True, "readOnly": True},
        {"writeOnly": True, "$comment": "c", "$schema": "https://json-schema.org/draft/2020-12/schema", "$anchor": "a"},
        {"$id": "https://example.com/a", "contentEncoding": "base64", "contentMediaType": "a/b", "contentSchema": {}},
        {"discriminator": {"propertyName": "a"}, "nullable": False, "x-order": 1},
    ],
    "refused": [
        {"not": {"type": "string"}},
        {"if": {"type": "string"}, "then": {"minLength": 1}, "else": {"minimum": 1}},
        {"uniqueItems": True},
        {"contains": {"const": 1}},
        {"contains": {}, "minContains": 2, "maxContains": 3},
        {"dependentRequired": {"a": ["b"]}},
        {"dependentSchemas": {"a": {"required": ["b"]}}},
        {"dependencies": {"a": ["b"]}},
        {"$dynamicRef": "#a"},
        {"$recursiveRef": "#"},
        {"$ref": "#/$defs/a", "$defs": {"a": {}}, "unevaluatedProperties": False},
        {"$ref": "#/$defs/a", "$defs": {"a": {}}, "unevaluatedItems": False},
    ],
}
"""Column of the table of keywords -> schemas that show it. Values 1, "a", [""] and {"a": ""} tell whether a keyword is
enforced: a schema that accepts all of them enforces nothing."""


def _columns(line: str) -> list[str]:
    return [each.strip() for each in line.strip("|").split(" | ")]


def _page_rows() -> dict[str, list[str]]:
    page = (Path(__file__).parents[3] / "docs" / "structured-output.md").read_text(encoding="utf-8")
    rows = [_columns(line) for line in page.splitlines() if line.startswith("| ")]
    return {row[0]: re.findall(r"`([^`]+)`", " ".join(row[1:])) for row in rows}


@pytest.mark.parametrize("column", KEYWORDS)
def test_the_page_says_what_happens_to_each_keyword(column: str) -> None:
    listed = _page_rows()[column.capitalize()]
    beside = {"type", "$defs", "definitions", "$ref"}
    shown = {key for schema in KEYWORDS[column] for key in schema} - (beside if column == "refused" else set())
    assert shown <= set(listed) and set(listed) - shown <= {"x-"}
    for schema in KEYWORDS[column]:
        if column == "refused":
            with pytest.raises(RequestError, match=r"no answer can be held to that; [a-z]"):
                compiled(json=schema)
            continue
        results = {verdict(json.dumps(value), json=schema) for value in (1, "a", [""], {"a": ""})}
        assert (results == {"complete"}) is (column == "accepted")


def test_the_page_lists_the_formats_that_are_enforced() -> None:
    assert set(_page_rows()["Enforced formats"]) == set(ENFORCED_FORMATS)


def test_the_kinds_are_many() -> None:
    assert len(ZOD) >= 51 and len(PYDANTIC) >= 51 and all(valid for _, valid, _ in KINDS.values())
