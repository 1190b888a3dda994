"""Schemas: what satisfies one is let through, what does not is stopped, and what is sampled satisfies it."""

from __future__ import annotations

import json
from typing import Any

import jsonschema_rs
import pytest

from chairlift.errors import RequestError
from chairlift.text.grammar.schemas import MAX_OPTIONAL_PROPERTIES
from tests.text.grammar.models import bundled, compiled, follow, sampled, verdict
from tests.text.grammar.part_schemas import closed
from tests.text.grammar.schemas import REFUSED, SCHEMAS
from tests.tiers import one_in


def written(value: Any) -> list[str]:
    """As models write it: without spaces, with them, and over several lines."""
    texts = [json.dumps(value, ensure_ascii=False, separators=(",", ":")), json.dumps(value, ensure_ascii=False)]
    return [*texts, json.dumps(value, ensure_ascii=False, indent=1)]


def finite(text: str) -> float:
    """Numbers of JSON have no largest one; those of Python have."""
    return max(-1e300, min(1e300, float(text)))


def test_the_suite_has_enough_schemas() -> None:
    assert len(SCHEMAS) >= 200
    for schema, valid, invalid in SCHEMAS.values():
        assert all(jsonschema_rs.is_valid(schema, value) for value in valid)
        checked = jsonschema_rs.validator_for(schema, validate_formats=True)
        assert not any(checked.is_valid(value) for value in invalid)


@pytest.mark.parametrize("name", SCHEMAS)
def test_texts_are_accepted_exactly_if_their_value_is_valid(name: str) -> None:
    schema, valid, invalid = SCHEMAS[name]
    for value in valid:
        for text in written(value):
            assert verdict(text, json=schema) == "complete", text
            assert verdict(text[:-1], json=schema) != "refused", text
    for value in invalid:
        assert verdict(written(value)[1], json=schema) != "complete", value


@pytest.mark.parametrize("name", one_in(3, SCHEMAS))
def test_samples_satisfy_the_schema(name: str) -> None:
    check_samples(name, 2)


@pytest.mark.nightly
@pytest.mark.parametrize("name", SCHEMAS)
def test_many_samples_satisfy_the_schema(name: str) -> None:
    check_samples(name, 40)


def check_samples(name: str, count: int) -> None:
    schema = SCHEMAS[name][0]
    made = compiled(json=schema)
    checked = jsonschema_rs.validator_for(schema, validate_formats=True)
    texts = [sampled(made, seed, most=100) for seed in range(count)]
    for text in texts:
        if text is not None:
            value = json.loads(text, parse_float=finite)
            assert checked.is_valid(value), text


@pytest.mark.parametrize("name", REFUSED)
def test_keywords_that_cannot_be_kept_are_refused_by_name(name: str) -> None:
    schema, named = REFUSED[name]
    with pytest.raises(RequestError) as caught:
        compiled(json=schema)
    assert str(caught.value).startswith("structured_outputs cannot be followed: ")
    assert named in str(caught.value) and "\n" not in str(caught.value)


def test_as_many_optional_properties_as_are_allowed_can_be_followed() -> None:
    names = [f"property_{i}" for i in range(MAX_OPTIONAL_PROPERTIES)]
    made = compiled(json=closed({name: {"type": "integer"} for name in names}, []))
    text = json.dumps({names[0]: 1, names[-1]: 2})
    end = bundled().eos_token_ids[0]
    assert follow(made, bundled().encode(text, add_special_tokens=False), end)[0] == "complete"


def test_names_of_properties_and_constants_are_no_keywords() -> None:
    schema = closed({"minProperties": {"const": {"minProperties": 9}}, "properties": {"type": "integer"}})
    assert verdict('{"minProperties": {"minProperties": 9}, "properties": 1}', json=schema) == "complete"


def test_a_key_that_is_repeated_counts_once() -> None:
    named = {"type": "object", "properties": {"a": {}, "b": {}}, "required": ["a", "b"], "minProperties": 2}
    assert verdict('{"a":1,"b":2}', json=named) == "complete"
    assert verdict('{"a":1,"a":2}', json=named) == "refused"
    assert verdict('{"a":1,"a":2}', json={"type": "object", "minProperties": 1}) == "complete"


STRICT = {
    "date-time": (["2016-12-31T23:59:60Z", "2016-12-31t23:59:60.5z", "2020-01-01T00:00:59+14:00"], "T12:00:60Z"),
    "time": (["23:59:60Z", "00:00:00.25Z"], "12:00:60Z"),
    "hostname": (["a" * 63 + ".de", "a-b.c--d", "x" * 49 + ("." + "y" * 50) * 4], "ab--cd"),
    "email": (["a@[127.0.0.1]", "a.b+c@d-e.org"], "a@" + "b" * 64 + ".org"),
}


@pytest.mark.parametrize("name", STRICT)
def test_formats_are_as_strict_as_those_of_a_validator(name: str) -> None:
    valid, invalid = STRICT[name]
    invalid = "2016-12-31" + invalid if name == "date-time" else invalid
    schema = {"type": "string", "format": name}
    checked = jsonschema_rs.validator_for(schema, validate_formats=True)
    assert all(checked.is_valid(text) for text in valid) and not checked.is_valid(invalid)
    assert all(verdict(json.dumps(text), json=schema) == "complete" for text in valid)
    assert verdict(json.dumps(invalid), json=schema) == "refused"


@pytest.mark.nightly
@pytest.mark.parametrize("name", [*STRICT, "date", "duration", "ipv4", "ipv6", "uuid"])
def test_random_texts_of_a_format_satisfy_a_validator(name: str) -> None:
    schema = {"type": "string", "format": name}
    made = compiled(json=schema)
    checked = jsonschema_rs.validator_for(schema, validate_formats=True)
    texts = [text for seed in range(500) if (text := sampled(made, seed)) is not None]
    assert len(texts) >= 250 and all(checked.is_valid(json.loads(text)) for text in texts)


def test_a_format_beside_other_demands_keeps_them() -> None:
    schema = {"type": "string", "format": "hostname", "maxLength": 5, "allOf": [{"pattern": "^a"}]}
    texts = ("abc", "bcd", "abcdef", "a..b")
    assert [verdict(json.dumps(each), json=schema) for each in texts] == ["complete", "refused", "refused", "refused"]
