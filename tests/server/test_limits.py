"""Limits on what a client sends (heads, bodies, pauses, depth). The answer names the limit."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import math
import socket
import string
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Message

from chairlift.engine.info import EngineInfo
from chairlift.server.http.app import make_app
from chairlift.server.http.errors import ApiError
from chairlift.server.http.http_protocol import HttpLimits, HttpProtocol
from chairlift.server.http.limits import parse_json, read_json
from tests.server.harness import (
    INFO,
    PATIENCE,
    Client,
    Connection,
    Endpoints,
    StateOnlyEngine,
    make_state,
    run,
    serving,
    until,
)

HEAD = b"POST /v1/echo HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


# --- JSON ------------------------------------------------------------------------------------------------------------


def refusal(body: bytes) -> str:
    with pytest.raises(ApiError) as caught:
        parse_json(body)
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")
    return caught.value.message


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"{}{}",
        b"{} x",
        b"\xef\xbb\xbf{}",
        b'{"a": NaN}',
        b'{"a": Infinity}',
        b'{"a": -Infinity}',
        b'{"a": 1e999}',
        b'{"a": -1e999}',
        b'{"a": 01}',
        b'{"a": +1}',
        b'{"a": .5}',
        b"{'a': 1}",
        b'{"a": 1,}',
        b'{"a": "\xff"}',
        b'{"a": "\xed\xa0\x80"}',
        b'{"a": "\\ud800"}',
        b'{"a": "\\udc00"}',
        b'{"a": "\\ud800x"}',
        b'{"a": "\\ud800\\u0041"}',
        b'{"a": "\n"}',
        b'{"a": "\x00"}',
        b"{/**/}",
        b'{"a": ' + b"9" * 41 + b"}",
        b'{"a": ' + b"9" * 100_000 + b"}",
        '{"a": 1}'.encode("utf-16"),
        '{"a": 1}'.encode("utf-32"),
    ],
)
def test_a_body_that_is_no_json_is_refused(body: bytes) -> None:
    assert "not valid JSON" in refusal(body) or "digits" in refusal(body)


@pytest.mark.parametrize("body", [b"[]", b"null", b"1", b"1.5", b'"x"', b"true"])
def test_only_objects_are_taken(body: bytes) -> None:
    assert "must be a JSON object" in refusal(body)


@pytest.mark.parametrize(
    ("body", "name"),
    [
        (b'{"a": 1, "a": 2}', "the name 'a'"),
        (b'{"a": 1, "\\u0061": 1}', "the name 'a'"),
        (b'{"a": 1, "x": [{"b": {}, "c": 1, "b": {"a": 1}}]}', "the name 'b'"),
        (b'{"a": 1, "a": "%b"}' % (b"x" * 100_000), "the same name"),
    ],
)
def test_a_name_that_stands_twice_is_refused(body: bytes, name: str) -> None:
    assert f"{name} twice" in refusal(body)


@pytest.mark.parametrize(("opening", "closing"), [(b"[", b"]"), (b'{"a":', b"}"), (b'[{"a":[', b"]}]")])
def test_the_depth_of_a_body_is_limited(opening: bytes, closing: bytes) -> None:
    per_turn = opening.count(b"[") + opening.count(b"{")
    turns = 63 // per_turn

    def nested(n: int) -> bytes:
        return b'{"a":' + opening * n + b"1" + closing * n + b"}"

    assert parse_json(nested(turns))
    for n in (turns + 1, 500, 5_000, 200_000):
        assert "64 deep" in refusal(nested(n))
    refusal(b'{"a":' + opening * 200_000)


@pytest.mark.parametrize("item", [b"[]", b"{}", b'{"a":[]}', b"[[[[]]]]"])
def test_the_number_of_objects_and_lists_has_an_end(item: bytes) -> None:
    """4 MiB of them would take a whole process for seconds, which is refused before they are made."""
    per_item = item.count(b"[") + item.count(b"{")
    most = (65_536 - 2) // per_item
    assert len(parse_json(b'{"x":[' + b",".join([item] * most) + b"]}")["x"]) == most
    assert "65,536 objects and lists" in refusal(b'{"x":[' + b",".join([item] * (most + 1)) + b"]}")


def test_the_number_of_names_has_an_end() -> None:
    def named(count: int) -> bytes:
        return b"{" + b",".join(b'"%d":0' % number for number in range(count)) + b"}"

    assert len(parse_json(named(65_536))) == 65_536
    assert "65,536 names" in refusal(named(65_537))


def test_the_number_of_values_has_an_end() -> None:
    """A body of 4 MiB holds two million of them, which would take the loop for half a second."""
    most = b'{"x":[' + b"1," * (2**18 - 1) + b"1]}"
    assert len(parse_json(most)["x"]) == 2**18
    assert "262,144 values" in refusal(most.replace(b"[", b"[1,"))
    assert len(parse_json(most.replace(b"[", b"[1,"), max_values=2**18 + 1)["x"]) == 2**18 + 1


def test_marks_within_texts_do_not_count() -> None:
    text = '[{":' * 20_000 + "," * 300_000 + '\\" \n' * 100 + "9" * 100
    assert parse_json(json.dumps({"a": text, text: {"b": 1}}).encode()) == {"a": text, text: {"b": 1}}


@pytest.mark.parametrize("filling", ["", "A" * (1 << 20)], ids=["short", "long"])
@pytest.mark.parametrize("end", ["", "\\", "\\\\", '"', '\\"', '"\\', '\\"\\', "[{:,"])
def test_marks_beside_long_texts_count(filling: str, end: str) -> None:
    """Texts with few quotation marks, such as images, are cut at these; a backslash may escape one, or end a text."""
    known = {"image": filling + end, "end" + end: end, "many": [[]] * 65_000}
    assert parse_json(json.dumps(known).encode()) == known
    assert "65,536 objects" in refusal(json.dumps(known | {"more": [[]] * 600}).encode())
    assert "twice" in refusal(json.dumps(known).encode()[:-1] + b', "many": 1}')


def outcome_of(body: bytes) -> dict[str, Any] | ApiError:
    try:
        return parse_json(body)
    except ApiError as error:
        return error


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.text(), VALUES, max_size=5), st.booleans())
def test_any_json_is_read_as_the_standard_library_reads_it(value: dict[str, Any], ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only)
    assert parse_json(text.encode()) == json.loads(text)
    beside = json.dumps({"image": "A" * 50_000, "value": value}, ensure_ascii=ascii_only)
    assert parse_json(beside.encode()) == json.loads(beside)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60) | st.text(alphabet='{}[]":,\\u0d8e1+-.tfn ' + string.digits, max_size=60).map(str.encode))
def test_any_bytes_end_in_an_object_or_a_400(body: bytes) -> None:
    outcome = outcome_of(body)
    assert isinstance(outcome, dict) or outcome.status == 400


# --- bodies ----------------------------------------------------------------------------------------------------------


async def echo_server(test: Any, limits: HttpLimits | None = None, read_timeout: float = 30.0, **config: Any) -> None:
    endpoints = Endpoints()
    endpoints.read_timeout = read_timeout
    async with serving(make_app(make_state(**config), endpoints.routes), limits) as client:
        await test(client)
        client.server.limits, endpoints.read_timeout = HttpLimits(), 30.0
        reply = await client.post("/v1/echo", b'{"still": "here"}')  # whatever happened, others are served
        assert (reply.status, reply.json()) == (200, {"still": "here"})


@pytest.mark.parametrize(
    ("kind", "headers", "status"),
    [
        ("application/json", (), 200),
        ("Application/JSON; charset=UTF-8", (), 200),
        ('application/json;charset="utf-8"', (), 200),
        ("application/json", ("Content-Encoding: identity",), 200),
        (None, (), 415),
        ("", (), 415),
        ("text/plain", (), 415),
        ("application/x-www-form-urlencoded", (), 415),
        ("multipart/form-data; boundary=application/json", (), 415),
        ("text/plain; application/json", (), 415),
        ("application/json; charset=utf-16", (), 415),
        ("application/json", ("Content-Type: application/json",), 415),
        ("application/json", ("Content-Encoding: gzip",), 415),
        ("application/json", ("Content-Encoding: deflate",), 415),
        ("application/json", ("Content-Encoding: br",), 415),
    ],
)
def test_only_plain_json_bodies_are_accepted(kind: str | None, headers: tuple[str, ...], status: int) -> None:
    async def test(client: Client) -> None:
        reply = await client.post("/v1/echo", b'{"a": 1}', *headers, kind=kind)
        assert reply.status == status
        assert reply.json() == {"a": 1} if status == 200 else reply.error["code"].startswith("unsupported")

    run(echo_server(test))


def test_a_declared_length_over_the_cap_is_refused_before_the_body() -> None:
    async def test(client: Client) -> None:
        reply = await client.raw(HEAD + b"Content-Length: 2049\r\n\r\n")
        assert (reply.status, reply.error["code"]) == (413, "body_too_large")
        exactly = b'{"a": "' + b"x" * (2048 - 9) + b'"}'
        assert (await client.post("/v1/echo", exactly)).status == 200
        assert (await client.post("/v1/echo", exactly + b" ")).status == 413

    run(echo_server(test, max_body_bytes=2048))


@pytest.mark.parametrize(
    ("info", "config", "most"),
    [
        (INFO, {}, 4 << 20),
        (dataclasses.replace(INFO, takes_images=True), {}, 48 << 20),
        (dataclasses.replace(INFO, takes_images=True), {"max_body_bytes": 5000}, 5000),
        (None, {}, 48 << 20),  # the engine starts: the answer must not depend on the body's size
    ],
    ids=["texts", "images", "set", "unknown"],
)
def test_a_model_that_reads_images_takes_longer_bodies(info: EngineInfo | None, config: Any, most: int) -> None:
    async def test(client: Client) -> None:
        body = b'{"a":"' + b"A" * (most - 8) + b'"}'
        assert len(body) == most
        assert (await client.post("/v1/echo", body)).status == 200
        reply = await client.raw(HEAD + b"Content-Length: %d\r\n\r\n" % (most + 1))
        assert (reply.status, reply.error["code"]) == (413, "body_too_large")
        assert f"{most:,} bytes" in reply.error["message"]

    async def serve() -> None:
        engine = StateOnlyEngine()
        engine.info = info
        async with serving(make_app(make_state(engine, **config), Endpoints().routes)) as client:
            await test(client)

    run(serve())


def test_an_undeclared_length_is_counted_while_it_arrives() -> None:
    async def test(client: Client) -> None:
        connection = await client.connect()
        connection.send(CHUNKED)
        for _ in range(3):
            connection.send(b"400\r\n" + b" " * 1024 + b"\r\n")
        reply = await connection.reply()
        assert (reply.status, reply.error["code"]) == (413, "body_too_large")

    run(echo_server(test, max_body_bytes=2048))


def test_all_bodies_together_have_a_cap() -> None:
    """Many clients that never finish a long body cannot take the memory of the machine."""

    async def test(client: Client) -> None:
        connections = [await client.connect() for _ in range(70)]
        for connection in connections:
            connection.send(HEAD + b"Content-Length: 1024\r\n\r\n" + b" " * 1000)
        replies = [asyncio.ensure_future(connection.reply()) for connection in connections]
        await asyncio.wait(replies, return_when=asyncio.FIRST_COMPLETED)  # whoever was read last
        refused = next(reply for reply in replies if reply.done()).result()
        assert (refused.status, refused.error["code"]) == (503, "overloaded")
        assert refused.headers["retry-after"] == "1"
        for reply, connection in zip(replies, connections, strict=True):
            reply.cancel()
            await connection.close()

    run(echo_server(test, max_body_bytes=1024))


def test_long_bodies_are_read_one_at_a_time() -> None:
    """Each takes the loop for as much as a step: others have their turn in between."""

    async def test() -> None:
        app = SimpleNamespace(state=SimpleNamespace(server=make_state()))
        scope = {"type": "http", "headers": [(b"content-type", b"application/json")], "app": app}
        turn, read_in = 0, []

        async def read(body: bytes) -> None:
            async def receive() -> Message:
                return {"type": "http.request", "body": body, "more_body": False}

            await read_json(Request(scope | {"state": {}}, receive))
            read_in.append(turn)

        for length, num_turns in ((100, 1), (100_000, 5)):
            read_in.clear()
            tasks = [asyncio.create_task(read(b'{"a":"' + b"x" * length + b'"}')) for _ in range(5)]
            while not all(task.done() for task in tasks):
                await asyncio.sleep(0)
                turn += 1
            assert len(set(read_in)) == num_turns

    run(test())


def test_an_endless_body_is_cut_off_and_its_answer_arrives() -> None:
    """A client that reads only after it has sent gets the answer all the same, and one that never stops is left."""

    async def send(client: Client) -> Connection:
        connection = await client.connect()
        connection.send(HEAD + b"Content-Length: 99999999999\r\n\r\n")
        for _ in range(64):
            connection.send(b" " * 65536)
            await connection.writer.drain()
        return connection

    async def answered(client: Client) -> None:
        assert (await (await send(client)).reply()).status == 413

    async def left(client: Client) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):  # it may be left before it reads
            connection = await send(client)
            assert (await connection.reply()).status == 413
            assert await connection.is_closed()

    run(echo_server(answered, HttpLimits(linger_timeout=PATIENCE), max_body_bytes=2048))
    run(echo_server(left, HttpLimits(linger_timeout=0.2), max_body_bytes=2048))


def test_a_body_that_does_not_arrive_in_time_is_refused() -> None:
    async def test(client: Client) -> None:
        connection = await client.connect()
        connection.send(HEAD + b'Content-Length: 9\r\n\r\n{"a"')
        reply = await connection.reply()
        assert (reply.status, reply.error["code"]) == (408, "request_timeout")
        assert await connection.is_closed()

    run(echo_server(test, HttpLimits(linger_timeout=0.05), read_timeout=0.05))


def test_a_body_in_one_byte_chunks_is_read() -> None:
    async def test(client: Client) -> None:
        body = b'{"a": "' + b"x" * 20_000 + b'"}'
        chunks = b"".join(b"1\r\n" + bytes([byte]) + b"\r\n" for byte in body)
        reply = await client.raw(CHUNKED + chunks + b"0\r\n\r\n")
        assert reply.json() == {"a": "x" * 20_000}

    run(echo_server(test))


def test_a_request_may_arrive_byte_by_byte() -> None:
    async def test(client: Client) -> None:
        connection = await client.connect()
        for byte in HEAD + b'Content-Length: 8\r\n\r\n{"a": 1}':
            connection.send(bytes([byte]))
            await connection.writer.drain()
            await asyncio.sleep(0)
        assert (await connection.reply()).json() == {"a": 1}

    run(echo_server(test))


@pytest.mark.parametrize(
    "tail",
    [
        b"1;" + b"e" * 100_000,
        b"1;" + b"e" * 100_000_000,
        b"0\r\n" + b"X-Trailer: 1\r\n" * 10_000 + b"\r\n",
        b"0\r\nX-Trailer: " + b"x" * 100_000,
        b"0\r\n" + b"x" * 1_000_000,
    ],
)
def test_extensions_and_trailers_of_a_body_take_no_memory(tail: bytes) -> None:
    """Chunk extensions and trailers are read by nobody, so nobody counts them but the protocol."""

    async def test(client: Client) -> None:
        connection = await client.connect()
        connection.send(CHUNKED + tail)
        reply = await connection.reply()
        assert reply.status in (400, 431)
        assert reply.error["code"] in ("headers_too_large", "invalid_http")

    run(echo_server(test))


def test_trailers_are_not_headers() -> None:
    async def test(client: Client) -> None:
        connection = await client.connect()
        connection.send(CHUNKED + b"2\r\n{}\r\n0\r\nHost: evil.example\r\nAuthorization: x\r\n\r\n")
        assert (await connection.reply()).status == 200
        connection.get("/v1/models")
        assert (await connection.reply()).status == 200

    run(echo_server(test))


# --- heads -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET /" + b"x" * 8191 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
        (b"GET /" + b"x" * 8192 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", 414),
        (b"GET /" + b"x" * 1_000_000, 414),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"A: 1\r\n" * 63 + b"\r\n", 404),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"A: 1\r\n" * 64 + b"\r\n", 431),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nA: " + b"x" * (16 * 1024 - 14) + b"\r\n\r\n", 404),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nA: " + b"x" * (16 * 1024 - 13) + b"\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nA: " + b"x" * 64_000_000, 431),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"x" * 64_000_000, 431),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"A: 1\r\n" * 1_000_000, 431),
        (b"\r\n" * 1_000_000, 431),
        (b"x" * 1_000_000, 400),
        (b"POST /v1/echo HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n{}", 400),
        (b"POST /v1/echo HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n{}", 400),
        (b"POST /v1/echo HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}", 400),
        (b"POST /v1/echo HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n", 400),
        (b"POST /v1/echo HTTP/1.1\r\nHost: a\r\nContent-Length: 1e3\r\n\r\n", 400),
        (b"POST /v1/echo HTTP/1.1\r\nHost: a\r\nContent-Length: " + b"9" * 30 + b"\r\n\r\n", 400),
        (b"POST /v1/echo HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip\r\n\r\n", 400),
        (b"POST /v1/echo HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\nContent-Length: 2\r\n\r\n{}", 400),
        (b"POST /v1/echo HTTP/1.1\r\nHost: a\r\nContent-Length: 2, 2\r\n\r\n{}", 400),
        *(
            (HEAD + b"Transfer-Encoding: " + coding + b"\r\n\r\n2\r\n{}\r\n0\r\n\r\n", status)
            for coding, status in [
                (b"gzip, chunked", 501),
                (b"GZIP\t,\tChunked", 501),
                (b"identity, chunked", 501),
                (b"gzip\r\nTransfer-Encoding: chunked", 501),
                (b"gzip, chunked\r\nUpgrade: h2c\r\nConnection: upgrade", 501),
                (b"chunked, chunked", 400),
                (b"chunked\r\nTransfer-Encoding: chunked", 400),
                (b"chunked, gzip", 400),
                (b", chunked", 400),
                (b"chunked,", 400),
                (b"chunked;q=1", 400),
                (b"xchunked", 400),
                (b"\x0bchunked", 400),
                (b"", 400),
            ]
        ),
        *(
            (b"POST /v1/echo HTTP/" + version + CHUNKED.partition(b"HTTP/1.1")[2] + b"2\r\n{}\r\n0\r\n\r\n", status)
            for version, status in [(b"1.0", 400), (b"0.9", 505), (b"2.0", 505)]
        ),
        (b"GET /v1/models HTTP/2.0\r\nHost: localhost\r\n\r\n", 505),
        (b"GET /v1/models HTTP/1.2\r\nHost: localhost\r\n\r\n", 400),
        (b"GET * HTTP/2.0\r\nHost: localhost\r\n\r\n", 505),
        (b"POST /v1/echo HTTP/1.1\r\nHost : a\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\n b\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX: \x00\r\n\r\n", 400),
        (b"GET /\xff HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        (b"GET http://localhost/v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        (b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        (b"CONNECT localhost:80 HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"GET / HTTP/9.9\r\nHost: localhost\r\n\r\n", 400),
        (b"GET /v1/models HTTP/1.0\r\n\r\n", 400),
        (b"GET /v1/models HTTP/1.1\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
    ],
    ids=lambda value: repr(value[-40:]) if isinstance(value, bytes) else str(value),
)
def test_malformed_heads_are_refused(request_: bytes, status: int) -> None:
    async def test(client: Client) -> None:
        reply = await client.raw(request_)
        assert reply.status == status
        assert reply.error["code"]
        assert reply.error["type"] == "invalid_request_error" or status == 404

    run(echo_server(test, HttpLimits(linger_timeout=PATIENCE)))


@pytest.mark.parametrize("start", [b"", b"\r\n", b"GET / HTTP/1.1\r\n", b"GET / HTTP/1.1\r\nHost: localhost\r\nX: "])
def test_a_head_that_is_not_finished_in_time_ends_the_connection(start: bytes) -> None:
    async def test(client: Client) -> None:
        slow = [await client.connect() for _ in range(20)]
        for connection in slow:
            connection.send(start)
        for connection in slow:
            if start:
                assert (await connection.reply()).error["code"] == "request_timeout"
            assert await connection.is_closed()

    run(echo_server(test, HttpLimits(header_timeout=0.1, linger_timeout=0.05)))


def test_dripping_bytes_do_not_extend_the_time() -> None:
    async def test(client: Client) -> None:
        connection = await client.connect()
        connection.send(b"GET / HTTP/1.1\r\nHost: localhost\r\n")

        async def drip() -> None:
            while not connection.writer.is_closing():
                connection.send(b"X: 1\r\n")
                await asyncio.sleep(0.02)

        task = asyncio.create_task(drip())
        assert (await connection.reply()).status == 408
        task.cancel()

    run(echo_server(test, HttpLimits(header_timeout=0.2)))


def test_the_time_for_a_head_counts_again_on_a_kept_connection() -> None:
    async def test(client: Client) -> None:
        connection = await client.connect()
        for _ in range(2):
            connection.get("/v1/models")
            assert (await connection.reply()).status == 200
        (served,) = client.server.state.connections
        served._limits = HttpLimits(header_timeout=0.1)
        connection.send(b"GET /v1/models HTTP/1.1\r\nHost:")
        assert (await connection.reply()).status == 408

    run(echo_server(test))


def test_an_idle_connection_is_closed_whatever_line_ends_it_sends() -> None:
    async def test(client: Client) -> None:
        quiet, noisy = await client.connect(), await client.connect()
        for connection in (quiet, noisy):
            connection.get("/v1/models")
            assert (await connection.reply()).status == 200
        noisy.send(b"\r\n")
        assert await quiet.is_closed()
        assert await noisy.is_closed()

    run(echo_server(test, HttpLimits(idle_timeout=0.1)))


async def owed(client: Client) -> tuple[Connection, HttpProtocol]:
    """A client that was sent 16 MiB and has not read them, and the server's end of its connection."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", client.port))
    connection = Connection(*await asyncio.open_connection(sock=sock))
    connection.post("/v1/echo", json.dumps({"a": "x" * (16 << 20)}).encode())
    await until(lambda: any(each._stall for each in client.server.state.connections))
    (served,) = client.server.state.connections
    return connection, served


def test_a_reader_that_stands_still_is_cut_off_whatever_it_sends() -> None:
    async def test(client: Client) -> None:
        for more in (b"", b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"):
            connection, _ = await owed(client)
            await until(lambda: not client.server.requests())
            connection.send(more)
            await until(lambda: not client.server.state.connections)
            assert not client.server.requests()
            await connection.close()

    run(echo_server(test, HttpLimits(stall_timeout=0.1), max_body_bytes=32 << 20))


def test_a_slow_reader_is_not_cut_off() -> None:
    async def test(client: Client) -> None:
        connection, served = await owed(client)
        before = served._num_unread()
        await connection.reader.readexactly(1 << 17)  # far less than what the kernel asks for at once
        await until(lambda: before - served._num_unread() >= 1 << 16)
        left = served._num_unread()
        served._check_reading(served._num_written - before, before, 0.0)
        assert not served.transport.is_closing() and served._stall is not None
        served._check_reading(served._num_written - left, left, math.inf)
        assert not served.transport.is_closing()
        served._check_reading(served._num_written - left, left, 0.0)
        assert served.transport.is_closing()
        await connection.close()

    run(echo_server(test, max_body_bytes=32 << 20))


def test_a_slow_reader_of_the_end_is_not_cut_off() -> None:
    """Also where the connection closes behind the answer."""

    async def test(client: Client) -> None:
        connection, served = await owed(client)
        before = served._num_unread()
        served.finish()
        await connection.reader.readexactly(1 << 17)
        await until(lambda: before - served._num_unread() >= 1 << 16)
        left = served._num_unread()
        served._check_reading(served._num_written - before, before, 0.0)
        assert served.transport.get_write_buffer_size()
        served._check_reading(served._num_written - left, left, 0.0)
        await until(lambda: not client.server.state.connections)
        await connection.close()

    run(echo_server(test, max_body_bytes=32 << 20))


def test_a_reader_who_waits_for_the_answer_is_not_cut_off() -> None:
    async def test() -> None:
        endpoints = Endpoints()
        async with serving(make_app(make_state(), endpoints.routes), HttpLimits(stall_timeout=0.1)) as client:
            connection = await client.connect()
            connection.get("/v1/stream")
            asyncio.get_running_loop().call_later(0.5, endpoints.go_on.set)  # five times as long as a reader may take
            assert (await connection.reply()).body == b"first last"
            (served,) = client.server.state.connections
            await until(lambda: served._stall is None)  # no timer runs where nothing is owed

    run(test())


class Stream(Endpoints):
    """Sends so many kilobytes, in events of one, and waits."""

    def __init__(self, num_events: int) -> None:
        super().__init__()
        self.num_events = num_events

    async def stream(self, request: Request) -> Response:
        async def events() -> AsyncIterator[bytes]:
            for _ in range(self.num_events):
                yield b"x" * 1024
                await asyncio.sleep(0)
            await self.wait(request)

        return StreamingResponse(events())


async def listener(client: Client) -> tuple[Connection, HttpProtocol]:
    """A client of a stream whose machine holds little for it, and the server's end of its connection."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", client.port))
    connection = Connection(*await asyncio.open_connection(sock=sock, limit=4096))
    connection.get("/v1/stream")
    await until(lambda: bool(client.server.requests()))
    (served,) = client.server.state.connections
    return connection, served


def test_the_reader_of_a_stream_that_stands_still_is_cut_off_however_little_it_is_owed() -> None:
    async def test() -> None:
        endpoints = Stream(100)  # the kernel would take megabytes before anything here noticed
        async with serving(make_app(make_state(), endpoints.routes), HttpLimits(stall_timeout=0.2)) as client:
            connection, _ = await listener(client)
            await until(lambda: not client.server.state.connections)
            assert endpoints.num_cancelled == 1
            await connection.close()

    run(test())


def test_a_stream_that_grows_as_fast_as_it_is_read_is_not_cut_off() -> None:
    async def test() -> None:
        endpoints = Stream(4000)
        async with serving(make_app(make_state(), endpoints.routes)) as client:
            connection, served = await listener(client)
            await until(lambda: served._num_unread() > 1 << 17)
            for _ in range(10):
                read, owed = served._num_written - served._num_unread(), served._num_unread()
                await connection.reader.readexactly(1 << 17)
                await until(lambda read=read: served._num_written - served._num_unread() - read >= 1 << 16)  # type: ignore[misc]
                served._check_reading(read, owed, 0.0)
                assert not served.transport.is_closing()
            await connection.close()

    run(test())


@pytest.mark.skipif(not hasattr(socket, "TCP_NOTSENT_LOWAT"), reason="the kernel has no such setting")
def test_the_kernel_holds_little_for_a_reader_that_stands_still() -> None:
    async def test() -> None:
        async with serving(make_app(make_state(), Stream(100_000).routes)) as client:
            connection, served = await listener(client)
            await until(lambda: served.flow.write_paused)
            assert served._num_unread() < 1 << 19
            await connection.close()

    run(test())


def test_malformed_requests_are_counted() -> None:
    async def test() -> None:
        state = make_state()
        async with serving(make_app(state), on_refused=state.engine.stats.connection_refused) as client:
            for request in (b"GET /" + b"x" * 8192 + b" HTTP/1.1\r\nHost: a\r\n\r\n", b"\r\n" * 100_000, b"x" * 99_000):
                await client.raw(request)
            assert state.engine.stats.responses == {"414": 1, "431": 1, "400": 1}
            assert not state.engine.stats.rejected

    run(test())


def test_too_many_connections_are_told_so() -> None:
    async def test() -> None:
        endpoints = Endpoints()
        state = make_state(max_connections=3)
        stats = state.engine.stats
        app, limits = make_app(state, endpoints.routes), HttpLimits(max_connections=3)
        async with serving(app, limits, stats.connection_refused) as client:
            held = [await client.connect() for _ in range(3)]
            for connection in held:
                connection.get("/v1/models")
                assert (await connection.reply()).status == 200
            extra = await client.connect()
            reply = await extra.reply()
            assert (reply.status, reply.error["code"]) == (503, "too_many_connections")
            assert reply.headers["retry-after"] == "1"
            assert (stats.responses, stats.rejected) == ({"200": 3, "503": 1}, {"connections": 1})
            await extra.close()
            await held[0].close()
            await until(lambda: len(client.server.state.connections) <= 2)
            assert (await client.get("/v1/models")).status == 200

    run(test())


# --- one after the other ---------------------------------------------------------------------------------------------


def test_requests_sent_ahead_are_not_served() -> None:
    """Else a client could leave unnoticed behind a request that nobody reads yet."""

    async def test() -> None:
        endpoints = Endpoints()
        async with serving(make_app(make_state(), endpoints.routes)) as client:
            connection = await client.connect()
            connection.get("/v1/wait")
            await endpoints.arrived.wait()
            connection.get("/v1/models")
            connection.send(b"x" * 100_000)
            await until(lambda: all(c.cycle.keep_alive is False for c in client.server.state.connections))
            endpoints.go_on.set()
            assert (await connection.reply()).body == b"done"
            assert await connection.is_closed()
            endpoints.go_on.clear()
            endpoints.arrived.clear()
            connection = await client.connect()
            connection.get("/v1/wait")
            connection.get("/v1/models")
            await endpoints.arrived.wait()
            await connection.close()
            await asyncio.wait_for(endpoints.cancelled.wait(), PATIENCE)

    run(test())


@pytest.mark.parametrize("coding", [b"chunked", b" Chunked", b" \tchunked"])
def test_bodies_in_chunks_are_read(coding: bytes) -> None:
    async def test(client: Client) -> None:
        connection = await client.connect()
        for _ in range(2):
            connection.send(HEAD + b"Transfer-Encoding:" + coding + b"\r\n\r\n2\r\n{}\r\n0\r\n\r\n")
            assert (await connection.reply()).json() == {}

    run(echo_server(test))


def test_an_offered_upgrade_is_ignored() -> None:
    async def test(client: Client) -> None:
        connection = await client.connect()
        offer = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAAP__")
        for _ in range(2):
            connection.get("/v1/models", *offer)
            assert (await connection.reply()).status == 200
        connection.post("/v1/echo", b'{"a": 1}', *offer)
        assert (await connection.reply()).json() == {"a": 1}
        connection.get("/v1/echo", "Content-Type: application/json", "Content-Length: 8", *offer, method="POST")
        for byte in b'{"b": 2}':
            connection.send(bytes([byte]))
            await connection.writer.drain()
        assert (await connection.reply()).json() == {"b": 2}
        connection.get("/v1/models", "Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13")
        assert (await connection.reply()).status == 200
        chunked = ("Content-Type: application/json", "Transfer-Encoding: chunked", *offer)  # as Java's client does
        for pieces in ([b'3\r\n{"c\r\n5;x=y\r\n": 3}\r\n0\r\n\r\n'], [b"2\r", b"\n{", b"}\r\n0\r\nA: b\r\n\r", b"\n"]):
            connection.get("/v1/echo", *chunked, method="POST")
            for piece in pieces:
                connection.send(piece)
                await connection.writer.drain()
            assert (await connection.reply()).json() == ({"c": 3} if len(pieces) == 1 else {})
        connection.get("/v1/echo", *chunked, method="POST")
        connection.send(b"no length\r\n")
        assert (await connection.reply()).status == 400
        connection = await client.connect()
        connection.get("/v1/echo", "Transfer-Encoding: gzip", *offer, method="POST")
        assert (await connection.reply()).status == 400

    run(echo_server(test))


def test_a_client_that_asks_first_is_told_to_go_on() -> None:
    async def test(client: Client) -> None:
        connection = await client.connect()
        connection.send(HEAD + b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\n")
        assert (await connection.head())[0] == 100
        connection.send(b"{}")
        assert (await connection.reply()).json() == {}

    run(echo_server(test))


def test_an_http_1_0_client_gets_no_chunks() -> None:
    async def test() -> None:
        endpoints = Endpoints()
        endpoints.go_on.set()
        async with serving(make_app(make_state(), endpoints.routes)) as client:
            for path, body in (("/v1/stream", b"first last"), ("/v1/models", b"[]")):
                connection = await client.connect()
                connection.send(f"GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n".encode())
                status, headers = await connection.head()
                assert (status, headers["connection"]) == (200, "close") and "transfer-encoding" not in headers
                assert await asyncio.wait_for(connection.reader.read(), PATIENCE) == body

    run(test())
