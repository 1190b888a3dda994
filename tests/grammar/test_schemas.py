"""Schemas: what satisfies one is let through, what does not is stopped, and what is sampled satisfies it."""

from __future__ import annotations

import json
from typing import Any

import jsonschema_rs
import pytest

from chairlift.errors import RequestError
from tests.grammar.models import compiled, sampled, verdict
from tests.grammar.schemas import REFUSED, SCHEMAS


def written(value: Any) -> list[str]:
    """As models write it: without spaces, with them, and over several lines."""
    texts = [json.dumps(value, ensure_ascii=False, separators=(",", ":")), json.dumps(value, ensure_ascii=False)]
    return [*texts, json.dumps(value, ensure_ascii=False, indent=1)]


def finite(text: str) -> float:
    """Numbers of JSON have no largest one; those of Python have."""
    return max(-1e300, min(1e300, float(text)))


def test_there_are_enough() -> None:
    assert len(SCHEMAS) >= 60
    for schema, valid, invalid in SCHEMAS.values():
        assert all(jsonschema_rs.is_valid(schema, value) for value in valid)
        checked = jsonschema_rs.validator_for(schema, validate_formats=True)
        assert not any(checked.is_valid(value) for value in invalid)


@pytest.mark.parametrize("name", SCHEMAS)
def test_verdicts(name: str) -> None:
    schema, valid, invalid = SCHEMAS[name]
    for value in valid:
        for text in written(value):
            assert verdict(text, json=schema) == "complete", text
            assert verdict(text[:-1], json=schema) != "refused", text
    for value in invalid:
        assert verdict(written(value)[1], json=schema) != "complete", value


@pytest.mark.parametrize("name", SCHEMAS)
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
            if name == "date-time":
                value = value.replace(":60", ":59")  # the validator knows on which days a leap second may be
            assert checked.is_valid(value), text


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_held_is_refused_by_name(name: str) -> None:
    schema, named = REFUSED[name]
    with pytest.raises(RequestError) as caught:
        compiled(json=schema)
    assert str(caught.value).startswith("structured_outputs cannot be followed: ")
    assert named in str(caught.value) and "\n" not in str(caught.value)
