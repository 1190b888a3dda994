"""Frames carry what they say, and nothing that arrives can do more than be dropped."""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
import random

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.base.image_spans import ImageSpan, ImageTile
from chairlift.base.outputs import FinishReason
from chairlift.base.sampling_params import SamplingParams
from chairlift.core.request import Service
from chairlift.engine.core_outputs import CoreOutputs, FinishedSequence, TokenRecord
from chairlift.engine.input_processor import PreparedRequest
from chairlift.engine.process.messages import (
    Add,
    FrameError,
    FrameReader,
    Leave,
    Message,
    Refused,
    Step,
    Watch,
    decode,
    encode,
)
from chairlift.errors import RequestError
from chairlift.metrics.stats import EngineStats

STEP = Step(
    CoreOutputs(
        ["a", "b#1"],
        [5, 7],
        [None, TokenRecord([7, 9], [-0.5, -1.25], 2)],
        [("a", 16, 1.5)],
        [("a", 1, [TokenRecord([3], [-2.0], 4)])],
        [FinishedSequence("a", FinishReason.STOP, 5, 1), FinishedSequence("c", FinishReason.ERROR, None, 0, "broken")],
    ),
    EngineStats(num_running=2, preemption_rate=0.25),
)
MESSAGES: list[Message] = [Watch(True), Leave(["a"], True), Refused("a", False, "no"), STEP]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
@pytest.mark.parametrize("cut", [1, 3, 1000])
def test_frames_arrive_as_they_were_sent_however_they_are_cut(message: Message, cut: int) -> None:
    data = encode(message) + encode(MESSAGES[0])
    reader = FrameReader()
    got = [each for start in range(0, len(data), cut) for each in reader.feed(data[start : start + cut])]
    assert got == [message, MESSAGES[0]]
    assert isinstance(got[0], type(message)) and reader.num_bad == 0


def test_a_request_is_the_same_on_the_other_side_of_the_border() -> None:
    params = SamplingParams(
        n=2,
        temperature=0.5,
        logit_bias={3: 1.5},
        stop=["x", "é"],
        stop_token_ids=[4, 5],
        allowed_token_ids=[1, 2, 3],
        bad_words=["no"],
        seed=-(2**63),
        max_tokens=None,
        logprobs=2,
        prompt_logprobs=0,
    )
    service = Service("chat", "team", 3.0, retention=2)  # the other times are infinite
    request = PreparedRequest(
        "id", None, [1, 2, 3], params, params.seed or 0, 7, (4, 5), ((1, 2), (3,)), "salt", 2.5, -4, service
    )
    images = {"image_spans": (ImageSpan(1, 2, b"key"),), "image_tiles": (ImageTile(b"key", b"pixels"),)}
    request = dataclasses.replace(request, **images)
    (message,) = FrameReader().feed(encode(Add.of(request)))
    assert isinstance(message, Add) and message.request() == request


def test_callers_own_kinds_of_text_and_numbers_cross_as_plain_ones() -> None:
    class Id(int):
        pass

    params = SamplingParams(temperature=np.float64(0.5), stop=[np.str_("x")], stop_token_ids=[Id(4)], max_tokens=Id(7))
    request = PreparedRequest(
        "id", None, [Id(1)], params, Id(5), Id(7), (Id(4),), service=Service("chat", np.str_("a"))
    )
    (message,) = FrameReader().feed(encode(Add.of(request)))
    assert isinstance(message, Add) and message.request() == request


def test_only_parameters_that_differ_from_the_default_are_sent() -> None:
    assert Add.of(PreparedRequest("id", None, [1], SamplingParams(), 1, 16)).params == {}


def test_parameters_are_checked_on_the_other_side_too() -> None:
    bad = Add("id", [1], {"temperature": "hot"}, 1, 16, (), (), "", 0.0, 0, Service())
    with pytest.raises(RequestError, match="temperature"):
        bad.request()


@pytest.mark.parametrize("count", [1_000, pytest.param(10_000, marks=pytest.mark.nightly)])
def test_random_frames_are_dropped_and_counted(count: int) -> None:
    """The good ones between them arrive."""
    source = random.Random(0)
    reader = FrameReader(1 << 20)
    good = encode(MESSAGES[1])
    for _ in range(count):
        body = source.randbytes(source.randrange(40))
        assert list(reader.feed(len(body).to_bytes(4, "big") + body + good)) == [MESSAGES[1]]
    assert reader.num_bad == count


def test_a_pickle_is_no_message() -> None:
    reader = FrameReader()
    body = pickle.dumps(MESSAGES)
    assert list(reader.feed(len(body).to_bytes(4, "big") + body)) == []
    assert reader.num_bad == 1


def test_an_absurd_length_ends_the_stream() -> None:
    with pytest.raises(FrameError, match="4,294,967,295"):
        list(FrameReader().feed(b"\xff\xff\xff\xff"))


WRONG = [
    {"type": "leave", "sequence_ids": "a", "stopped": True},
    {"type": "leave", "sequence_ids": [1], "stopped": True},
    {"type": "leave", "sequence_ids": ["a"]},
    {"type": "leave", "sequence_ids": ["a"], "stopped": True, "more": 1},
    {"type": "unknown"},
    {"sequence_ids": ["a"], "stopped": True},
    ["leave", ["a"], True],
]


@pytest.mark.parametrize("value", WRONG)
def test_other_types_are_refused(value: object) -> None:
    with pytest.raises(FrameError):
        decode(msgspec.msgpack.encode(value))


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_decoding_raises_only_the_error_of_a_bad_message(body: bytes) -> None:
    with contextlib.suppress(FrameError):
        assert isinstance(decode(body), msgspec.Struct)


def test_deeply_nested_messages_are_refused() -> None:
    with pytest.raises(FrameError):
        decode(b"\x91" * 100_000)
