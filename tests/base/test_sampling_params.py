"""The allowed values of sampling parameters: every limit, and every wrong type, with one class of error."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from chairlift.base.sampling_params import SamplingParams
from chairlift.errors import RequestError

NAN, INF = float("nan"), float("inf")
NUMBERS: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 100.0),
    "min_p": (0.0, 1.0),
    "top_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
}
WHOLE: dict[str, tuple[int, int]] = {
    "n": (1, 16),
    "top_k": (-1, 2**31 - 1),
    "seed": (-(2**63), 2**63 - 1),
    "max_tokens": (1, 2**31 - 1),
    "logprobs": (0, 20),
    "prompt_logprobs": (0, 20),
    "priority": (-(2**31), 2**31 - 1),
}
ABOVE_ZERO = {"repetition_penalty": 10.0, "ttft_ms": 1e9, "tpot_ms": 1e9, "deadline_ms": 1e9}
SWITCHES = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens")
LISTS = ("stop_token_ids", "allowed_token_ids")
PROMISES = {"priority", "ttft_ms", "tpot_ms", "deadline_ms"}
OPTIONAL = {"seed", "max_tokens", "logprobs", "prompt_logprobs", "logit_bias", "stop", "bad_words", *PROMISES, *LISTS}
WRONG: list[Any] = [NAN, INF, -INF, 1e308, -1e308, 2**63, -(2**63) - 1, "1", b"1", True, None, [], [1], {}, object()]


def made(**fields: Any) -> SamplingParams:
    return SamplingParams(**fields)


def refused(**fields: Any) -> str:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**fields)
    return str(caught.value)


@pytest.mark.parametrize("name", [*NUMBERS, *WHOLE, *ABOVE_ZERO, "min_tokens"])
@pytest.mark.parametrize("value", WRONG, ids=lambda value: f"{type(value).__name__}-{str(value)[:6]}")
def test_wrong_values_are_one_kind_of_error_that_names_the_field(name: str, value: Any) -> None:
    if value is None and name in OPTIONAL:
        made(**{name: None})
    else:
        assert name in refused(**{name: value})


@pytest.mark.parametrize("name", [*NUMBERS, *ABOVE_ZERO])
def test_numbers_beyond_every_float_are_refused(name: str) -> None:
    assert name in refused(**{name: 10**400})


@pytest.mark.parametrize(("name", "edges"), [*NUMBERS.items(), *WHOLE.items()])
def test_numbers_are_accepted_up_to_the_edges_of_their_ranges_only(name: str, edges: tuple[float, float]) -> None:
    step = 1 if name in WHOLE else 1e-6
    for value in edges:
        made(**{name: value})
    assert name in refused(**{name: edges[0] - step})
    assert name in refused(**{name: edges[1] + step})


@pytest.mark.parametrize(("name", "high"), ABOVE_ZERO.items())
def test_ranges_without_zero_accept_the_smallest_number_and_refuse_zero(name: str, high: float) -> None:
    for value in (1e-300, high):
        made(**{name: value})
    for value in (0.0, -0.0, -1e-9, high + 1e-6):
        assert name in refused(**{name: value})


@pytest.mark.parametrize("name", SWITCHES)
@pytest.mark.parametrize("value", [0, 1, "true", None, []])
def test_switches_are_true_or_false(name: str, value: Any) -> None:
    assert f"{name} must be true or false" in refused(**{name: value})


@pytest.mark.parametrize("name", ["stop", "bad_words"])
@pytest.mark.parametrize(
    "value", [5, b"x", {"x": 1}, {"x"}, [5], [None], [""], ["x" * 257], ["x"] * 129, [b"x"], ["x\udc80"]]
)
def test_wrong_lists_of_strings_are_refused_by_name(name: str, value: Any) -> None:
    assert name in refused(**{name: value})


@pytest.mark.parametrize("name", LISTS)
@pytest.mark.parametrize("value", ["12", 5, {1}, [-1], [2**31], ["1"], [1.0], [True], [None], [NAN]])
def test_wrong_lists_of_token_ids_are_refused_by_name(name: str, value: Any) -> None:
    assert name in refused(**{name: value})


def test_lists_are_accepted_up_to_their_longest_size_only() -> None:
    SamplingParams(stop=["x" * 256] * 16, bad_words=["x"] * 128, stop_token_ids=range(4096))
    assert "at most 16" in refused(stop=["x"] * 17)
    assert "at most 128" in refused(bad_words=["x"] * 129)
    assert "at most 4096" in refused(stop_token_ids=range(4097))
    assert "at most 300" in refused(logit_bias=dict.fromkeys(range(301), 1.0))
    assert "no token could be generated" in refused(allowed_token_ids=[])


@pytest.mark.parametrize(
    "bias",
    [[(1, 2)], "x", 5, {-1: 1}, {1.5: 1}, {None: 1}, {"x": 1}, {"²": 1}, {True: 1}, {1: "1"}, {1: NAN}, {1: 101}],
)
def test_a_wrong_logit_bias_is_refused(bias: Any) -> None:
    assert "logit_bias" in refused(logit_bias=bias)


def test_logit_bias_takes_the_api_s_text_keys() -> None:
    assert made(logit_bias={"5": 1, 6: -100}).logit_bias == {5: 1.0, 6: -100.0}
    assert "logit_bias has the key '9999" in refused(logit_bias={"9" * 5000: 1})
    assert "logit_bias must have token ids from 0 to 2147483647 as keys" in refused(logit_bias={"9" * 10: 1})


@pytest.mark.parametrize(
    "key", ["050", " 50", "50 ", "50\n", "+50", "-0", "5_0", "٥٠", "５０", "5e1", "0x32", "", "00"]
)
def test_logit_bias_takes_plain_decimal_numbers_only(key: str) -> None:
    assert "plain decimal" in refused(logit_bias={"50": 1, key: 2})


def test_logit_bias_has_each_token_once() -> None:
    assert "token id 50 twice" in refused(logit_bias={"50": 1, 50: 2})


@pytest.mark.parametrize(
    ("fields", "greedy"),
    [({"top_p": 0}, True), ({"top_p": -0.0}, True), ({"temperature": 1e-6}, True), ({"temperature": 1e-4}, False),
     ({"top_p": 1e-9}, False), ({"top_k": 1}, False), ({"min_p": 1}, False)],
)  # fmt: skip
def test_parameters_that_add_no_noise_are_greedy(fields: dict[str, Any], greedy: bool) -> None:
    assert made(**fields).greedy is greedy


def test_min_tokens_stays_below_max_tokens() -> None:
    SamplingParams(min_tokens=4, max_tokens=4)
    SamplingParams(min_tokens=4, max_tokens=None)
    assert "min_tokens is 5 but max_tokens is 4" in refused(min_tokens=5, max_tokens=4)


def test_parameters_cannot_change_after_they_are_made() -> None:
    stop, ids, bias = ["a"], [1], {1: 1.0}
    params = SamplingParams(stop=stop, stop_token_ids=ids, logit_bias=bias)
    stop.append("b")
    ids.append(2)
    bias[2] = 1.0
    assert (params.stop, params.stop_token_ids, params.logit_bias) == (("a",), (1,), {1: 1.0})
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 2  # type: ignore[misc]


def test_equal_parameters_have_one_hash() -> None:
    one, two = (SamplingParams(stop=["a"], logit_bias={1: 1.0, 2: 2}) for _ in range(2))
    assert {one: "found"}[two] == "found"
    assert one != SamplingParams(stop=["a"])


def test_minus_one_is_no_seed() -> None:
    assert SamplingParams(seed=-1) == SamplingParams()
    assert "must be a whole number" in refused(seed=-1.0)


@pytest.mark.parametrize(
    ("name", "hint"), [("max_token", "did you mean 'max_tokens'"), ("zzz", "known: n, temperature"), (5, "known: n")]
)
def test_unknown_names_are_refused_with_a_suggestion(name: Any, hint: str) -> None:
    with pytest.raises(RequestError, match=hint):
        SamplingParams.from_dict({name: 1})


@pytest.mark.parametrize(("temperature", "greedy"), [(0, True), (0.0, True), (9e-6, True), (1e-5, False), (1, False)])
def test_a_temperature_of_zero_is_greedy(temperature: float, greedy: bool) -> None:
    assert SamplingParams(temperature=temperature).greedy == greedy
