"""Classes of service from settings: what is there, what is changed, and what the messages say."""

from __future__ import annotations

from typing import Any

import pytest

from chairlift.base.service_class import ServiceClass, parse_service_classes, parse_tenant_weights
from chairlift.errors import ConfigError


@pytest.mark.parametrize("empty", ["", "  ", "{}", {}])
def test_three_classes_are_there_from_the_start(empty: Any) -> None:
    classes = parse_service_classes(empty)
    assert sorted(classes) == ["default", "flex", "priority"]
    assert classes["priority"].priority < classes["default"].priority < classes["flex"].priority
    assert parse_tenant_weights(empty) == {}


def test_settings_change_one_class_and_add_another() -> None:
    classes = parse_service_classes('{"priority": {"min_seqs": 2}, "chat": {"ttft_ms": 300.5, "retention": 2}}')
    assert classes["priority"] == ServiceClass(priority=-10, min_seqs=2, retention=2)
    assert classes["chat"] == ServiceClass(ttft_ms=300.5, retention=2)
    assert parse_service_classes({"chat": {"tpot_ms": None}})["chat"].tpot_ms is None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("[1]", "service_classes must be a JSON object, got \\[1\\]"),
        ("{", "service_classes must be a JSON object: "),
        ({"a b": {}}, "letters, digits and '_', got 'a b'"),
        ({"": {}}, "letters, digits and '_', got ''"),
        ({"x" * 65: {}}, "letters, digits and '_'"),
        ({"chat": 3}, "class chat: its settings must be an object, got 3"),
        ({"chat": {"rows": 1}}, "class chat: unknown setting 'rows'; known: priority, min_seqs"),
        ({"chat": {"min_seqs": -1}}, "class chat: min_seqs must be a whole number from 0 to 65536, got -1"),
        ({"chat": {"min_seqs": 1.0}}, "whole number from 0 to 65536, got 1.0"),
        ({"chat": {"min_blocks": True}}, "min_blocks must be a whole number from 0 to 2147483648, got True"),
        ({"chat": {"retention": 3}}, "retention must be a whole number from 0 to 2, got 3"),
        ({"chat": {"priority": "high"}}, "priority must be a whole number from -2147483648 to 2147483647, got 'high'"),
        ({"chat": {"ttft_ms": 0}}, "ttft_ms must be a number of milliseconds above 0, got 0"),
        ({"chat": {"deadline_ms": "1"}}, "deadline_ms must be a number of milliseconds above 0, got '1'"),
        ({"chat": {"tpot_ms": float("nan")}}, "tpot_ms must be a number of milliseconds above 0, got nan"),
        ({f"c{number}": {} for number in range(30)}, "there may be 32 service classes, got 33"),
    ],
)
def test_messages_say_what_was_given_and_what_is_allowed(given: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_service_classes(given)


def test_tenant_weights_are_read_from_json() -> None:
    assert parse_tenant_weights('{"a": 2, "b": 0.5}') == {"a": 2.0, "b": 0.5}


@pytest.mark.parametrize("weight", [0, -1, 1001, "2", True, None, float("nan")])
def test_weight_out_of_range_is_refused(weight: Any) -> None:
    with pytest.raises(ConfigError, match=r"the weight of 'a' must be from 0\.001 to 1000, got"):
        parse_tenant_weights({"a": weight})
    with pytest.raises(ConfigError, match="tenant_weights must be a JSON object"):
        parse_tenant_weights("7")
