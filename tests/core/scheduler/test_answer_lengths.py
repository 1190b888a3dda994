"""Expected lengths of answers, estimated from answers of which some were cut off."""

from __future__ import annotations

import math
import random

import pytest

from chairlift.base.outputs import FinishReason
from chairlift.core.request import Request, Service
from chairlift.core.scheduler.answer_lengths import AnswerLengths


def answer(num_tokens: int, most: int = 100, service_class: str = "default", **settings: int) -> Request:
    request = Request("r", [1, 2], max_tokens=most, service=Service(service_class), **settings)
    request.token_ids += [7] * num_tokens
    return request


def seen(
    *lengths: int, cut: tuple[int, ...] = (), capacity: int = 512, service_class: str = "default"
) -> AnswerLengths:
    known = AnswerLengths(capacity)
    learn(known, *lengths, cut=cut, service_class=service_class)
    return known


def learn(known: AnswerLengths, *lengths: int, cut: tuple[int, ...] = (), service_class: str = "default") -> None:
    for length, reason in [(n, FinishReason.STOP) for n in lengths] + [(n, FinishReason.LENGTH) for n in cut]:
        request = answer(length, length, service_class)
        request.finish_reason = reason
        known.add(request)


def test_answers_are_expected_to_be_as_long_as_those_that_outlived_them() -> None:
    assert AnswerLengths().expected(answer(0)) == 100
    known = seen(1000, 10, 20, 30, 40, capacity=4)  # the first is forgotten
    assert known.expected(answer(0)) == 25
    assert known.expected(answer(20)) == 35
    assert known.expected(answer(0, 15)) == round((10 + 15 * 3) / 4)
    assert known.expected(answer(39, 40)) == 40
    assert known.expected(answer(40)) == 100, "none was that long: nothing is known but the limit"


def test_the_request_itself_says_how_short_it_may_be() -> None:
    known = seen(10, 20)
    assert known.expected(answer(0, min_tokens=50)) == 50
    assert known.expected(answer(0, min_tokens=100)) == 100
    assert known.expected(answer(60, min_tokens=50)) == 100


def test_answers_that_were_cut_off_would_have_been_longer() -> None:
    assert seen(cut=(10,) * 9).expected(answer(0)) == 100, "none has ended by itself: they are as long as they may be"
    # Four answers: one ends at 10, one is cut off at 10, one ends at 20 and one at 30.
    assert seen(10, 20, 30, cut=(10,)).expected(answer(0)) == round(10 + 0.75 * 10 + 0.375 * 10)


@pytest.mark.parametrize("share_cut", [0.0, 0.3, 0.7])
def test_length_limits_do_not_change_the_expected_length(share_cut: float) -> None:
    """Lengths of an exponential distribution, mean 100, each cut off at a limit of its own: the mean stays."""
    rng, known = random.Random(1), AnswerLengths(5000)
    mean_limit = math.inf if share_cut == 0 else 100 * (1 / share_cut - 1)
    cut_off = 0
    for _ in range(5000):
        length = math.ceil(rng.expovariate(1 / 100))
        limit = math.inf if share_cut == 0 else math.ceil(rng.expovariate(1 / mean_limit))
        cut_off += limit < length
        learn(known, *([length] if length <= limit else []), cut=() if length <= limit else (int(limit),))
    assert cut_off / 5000 == pytest.approx(share_cut, abs=0.03)
    assert known.expected(answer(0, 100_000)) == pytest.approx(100, rel=0.1)
    assert known.expected(answer(50, 100_000)) == pytest.approx(150, rel=0.1)


def test_classes_are_told_apart_once_enough_of_them_is_known() -> None:
    known = seen(*[10] * 19, service_class="short")
    learn(known, *[90] * 19, service_class="long")
    assert known.expected(answer(0, service_class="short")) == known.expected(answer(0, service_class="other")) == 50
    learn(known, 10, service_class="short")
    learn(known, 90, service_class="long")
    assert known.expected(answer(0, service_class="short")) == 10
    assert known.expected(answer(0, service_class="long")) == 90
    assert known.expected(answer(0, service_class="other")) == 50


def test_aborted_answers_do_not_change_the_expected_length() -> None:
    known, request = AnswerLengths(), answer(5)
    request.finish_reason = FinishReason.ABORT
    known.add(request)
    assert known.expected(answer(0)) == 100
