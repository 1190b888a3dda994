"""Every request passes ids, errors and the drain, and its task ends when the client leaves."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

import chairlift
from chairlift.engine.async_engine import EngineState
from chairlift.errors import (
    EngineDeadError,
    OverloadedError,
    PromptTooLongError,
    QueueFullError,
    QueueTimeoutError,
    RequestError,
    TemplateError,
    WorkerLostError,
)
from chairlift.server.http.app import make_app
from chairlift.server.http.errors import ApiError
from chairlift.server.operations import health
from tests.server.harness import PATIENCE, Client, Endpoints, StateOnlyEngine, make_state, run, serving, until

SECRET = "0x7f3a /srv/models/secret"


def with_shell(test: Callable[[Client, Endpoints, StateOnlyEngine], Awaitable[None]], **settings: object) -> None:
    async def body() -> None:
        engine, endpoints = StateOnlyEngine(), Endpoints()
        state = make_state(engine, **settings)
        async with serving(make_app(state, [*health.routes, *endpoints.routes])) as client:
            client.state = state  # type: ignore[attr-defined]
            await test(client, endpoints, engine)
        assert state.num_in_progress == 0

    run(body())


# --- about the server itself -----------------------------------------------------------------------------------------


def test_health_tells_whether_requests_make_progress() -> None:
    async def test(client: Client, _: Endpoints, engine: StateOnlyEngine) -> None:
        async def health() -> tuple[int, int, int]:
            replies = [await client.get(path) for path in ("/health", "/ping", "/ready")]
            return replies[0].status, replies[1].status, replies[2].status

        assert (await client.get("/health")).json() == {"status": "ok"}
        assert await health() == (200, 200, 200)
        engine.trouble = "no step for 31 s, and 4 requests wait"
        assert await health() == (503, 503, 200)
        assert (await client.get("/health")).json()["reason"] == engine.trouble
        engine.trouble, engine.failure = "", SECRET
        for state in (EngineState.LOADING, EngineState.DOWN, EngineState.STOPPED):
            engine.state = state
            assert await health() == (503, 503, 503)
            reply = await client.get("/health")
            assert state.value in reply.json()["reason"]
            assert SECRET not in reply.body.decode()
        engine.state = EngineState.READY
        client.state.completing = True  # type: ignore[attr-defined]
        assert await health() == (200, 200, 503)
        assert (await client.get("/ready")).json()["reason"] == "the server is starting"
        client.state.completing = False  # type: ignore[attr-defined]
        client.state.draining = True  # type: ignore[attr-defined]
        assert await health() == (200, 200, 503)

    with_shell(test)


def test_version_load_and_metrics_are_answered() -> None:
    async def test(client: Client, endpoints: Endpoints, engine: StateOnlyEngine) -> None:
        assert (await client.get("/version")).json() == {"version": chairlift.__version__}
        engine.stats.engine.num_running, engine.num_queued = 3, 2
        assert (await client.get("/load")).json() == {"server_load": 0, "running": 3, "waiting": 2}
        connection = await client.connect()
        connection.get("/v1/wait")
        await endpoints.arrived.wait()
        assert (await client.get("/load")).json()["server_load"] == 1
        await connection.close()
        await endpoints.cancelled.wait()
        await until(lambda: not client.state.num_in_progress)  # type: ignore[attr-defined]
        engine.intake.enter("a", 1, now=time.monotonic() - 100.0)
        engine.replicas.engine_pid = os.getpid()
        reply = await client.get("/metrics")
        assert reply.headers["content-type"].startswith("text/plain")
        found = {line.partition("{")[0]: line.split()[-1] for line in reply.body.decode().splitlines() if "{" in line}
        assert float(found["chairlift:num_requests_running"]) == 3
        assert 100 <= float(found["chairlift:oldest_waiting_request_seconds"]) < 200
        assert float(found["chairlift:engine_resident_memory_bytes"]) > 1e6

    with_shell(test)


def test_responses_are_counted_by_route_under_the_names_of_vllms_server() -> None:
    async def test(client: Client, _: Endpoints, __: StateOnlyEngine) -> None:
        async def counts() -> dict[str, float]:
            lines = (await client.get("/metrics")).body.decode().splitlines()
            names = ("http_requests_total{", "http_request_duration_seconds_count{")
            return {line.rpartition(" ")[0]: float(line.split()[-1]) for line in lines if line.startswith(names)}

        assert await counts() == {}
        connection = await client.connect()
        for number in range(30):
            connection.get(f"/v1/models/{number}", method=("TRACE", "GET", "PUT")[number % 3])
            if (await connection.reply()).headers.get("connection") == "close":
                connection = await client.connect()
        found = await counts()
        assert len(found) <= 6, "neither paths nor methods of a client become labels"
        assert sum(value for key, value in found.items() if key.startswith("http_requests_total")) == 30
        assert not any("TRACE" in key or "/29" in key for key in found)

    with_shell(test, metrics_prefix="vllm")


def test_metrics_do_not_grow_with_what_clients_send() -> None:
    async def test(client: Client, _: Endpoints, __: StateOnlyEngine) -> None:
        def names(body: bytes) -> set[bytes]:
            return {line.rpartition(b" ")[0] for line in body.splitlines()}

        before = names((await client.get("/metrics")).body)
        connection = await client.connect()
        for number in range(50):
            connection.get(f"/v1/{number}", f"X-Request-Id: id-{number}", method=("BREW", "GET", "PUT")[number % 3])
            if (await connection.reply()).headers.get("connection") == "close":
                connection = await client.connect()
        assert names((await client.get("/metrics")).body) == before

    with_shell(test)


def test_head_is_get_without_a_body() -> None:
    async def test(client: Client, _: Endpoints, __: StateOnlyEngine) -> None:
        connection = await client.connect()
        for path in ("/health", "/v1/models", "/metrics"):
            connection.get(path, method="HEAD")
            reply = await connection.reply(has_body=False)
            assert (reply.status, int(reply.headers["content-length"]) > 0) == (200, True)

    with_shell(test)


# --- errors ----------------------------------------------------------------------------------------------------------

ERRORS: list[tuple[Exception, int, str, str, str | None]] = [
    (ApiError(418, "short", code="teapot", param="pot"), 418, "teapot", "invalid_request_error", None),
    (ApiError(404, "no model", code="model_not_found"), 404, "model_not_found", "not_found_error", None),
    (RequestError("n is 0"), 400, "invalid_value", "invalid_request_error", None),
    (TemplateError("no template"), 400, "invalid_value", "invalid_request_error", None),
    (PromptTooLongError("5 > 4"), 400, "context_length_exceeded", "invalid_request_error", None),
    (QueueFullError("full", 3.2), 429, "rate_limit_exceeded", "rate_limit_error", "4"),
    (QueueFullError("full", 1e9), 429, "rate_limit_exceeded", "rate_limit_error", "60"),
    (QueueFullError("long", 3.2, "forecast"), 429, "queue_too_long", "rate_limit_error", "4"),
    (QueueTimeoutError("waited", 0.0), 503, "queue_timeout", "overloaded_error", "1"),
    (WorkerLostError("killed", 2.0), 503, "worker_lost", "overloaded_error", "2"),
    (OverloadedError("late", 2.0), 503, "timeout", "overloaded_error", "2"),
    (EngineDeadError("dead"), 503, "engine_unavailable", "overloaded_error", "8"),
    (RuntimeError(SECRET), 500, "internal_error", "server_error", None),
    (KeyError(SECRET), 500, "internal_error", "server_error", None),
    (AssertionError(SECRET), 500, "internal_error", "server_error", None),
]


@pytest.mark.parametrize(("error", "status", "code", "kind", "retry"), ERRORS, ids=lambda value: repr(value)[:40])
def test_errors_become_error_objects(
    error: Exception, status: int, code: str, kind: str, retry: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(request: Request) -> Response:
        raise error

    async def test() -> None:
        state = make_state()
        async with serving(make_app(state, [Route("/v1/fail", fail)])) as client:
            reply = await client.get("/v1/fail", "X-Request-Id: mine")
            assert state.engine.stats.responses == {str(status): 1}
            assert state.engine.stats.rejected["unavailable"] == (code == "engine_unavailable")
            assert reply.status == status
            assert (reply.error["code"], reply.error["type"]) == (code, kind)
            assert reply.headers.get("retry-after") == retry
            assert SECRET not in reply.body.decode()
            if status == 500:
                assert "mine" in reply.error["message"]
                assert SECRET in caplog.text  # the log is where to look
            elif isinstance(error, EngineDeadError):
                assert str(error) not in reply.error["message"]  # it may name files of the machine
            else:
                more = ". This model's maximum context length is 4096 tokens." * isinstance(error, PromptTooLongError)
                assert reply.error["message"] == str(error) + more

    run(test())


def test_unknown_paths_and_methods_are_404_and_405() -> None:
    async def test(client: Client, _: Endpoints, __: StateOnlyEngine) -> None:
        for path in ("/elsewhere", "/v1/models/", "/v1//models", "/V1/models", "/v1/echo%00"):
            reply = await client.get(path)
            assert (reply.status, reply.error["code"]) == (404, "not_found")
            assert path.strip("/") not in reply.error["message"]
        for path, named in (
            ("/v1/audio/speech", "audio"),
            ("/v1/threads", "/v1/responses"),
            ("/v1/uploads/x", "/v1/files"),
        ):
            reply = await client.get(path, method="POST")
            assert (reply.status, reply.error["code"]) == (404, "not_found") and named in reply.error["message"]
        assert "nothing at this path" in (await client.get("/v1/audiobook")).error["message"]
        for method in ("POST", "DELETE", "OPTIONS", "PATCH", "PROPFIND"):
            reply = await client.get("/health", method=method)
            assert (reply.status, reply.error["code"]) == (405, "method_not_allowed")
            assert "GET" in reply.headers["allow"]

    with_shell(test)


def test_a_failure_in_mid_stream_ends_the_connection(caplog: pytest.LogCaptureFixture) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield b"first"
        raise RuntimeError("broke")

    async def fail(request: Request) -> Response:
        return StreamingResponse(pieces())

    async def test() -> None:
        async with serving(make_app(make_state(), [Route("/v1/fail", fail)])) as client:
            connection = await client.connect()
            connection.get("/v1/fail")
            assert (await connection.head())[0] == 200
            assert await connection.chunk() == b"first"
            assert await connection.is_closed()  # without the last chunk, so that it cannot pass for an end

    run(test())
    assert "broke" in caplog.text


# --- request ids and the log -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["abc", "A.b_c-1", "x" * 128])
def test_a_plain_request_id_is_given_back(given: str) -> None:
    async def test(client: Client, _: Endpoints, __: StateOnlyEngine) -> None:
        for path in ("/health", "/nothing", "/v1/models"):
            assert (await client.get(path, f"X-Request-Id: {given}")).headers["x-request-id"] == given

    with_shell(test)


@pytest.mark.parametrize("given", ["", "x" * 129, "a b", "a/b", "\u00e4", "a;b", "%0a", '"'])
def test_other_request_ids_are_replaced(given: str) -> None:
    async def test(client: Client, _: Endpoints, __: StateOnlyEngine) -> None:
        ids = {(await client.get("/health", f"X-Request-Id: {given}")).headers["x-request-id"] for _ in range(2)}
        ids.add((await client.get("/health", "X-Request-Id: a", "X-Request-Id: b")).headers["x-request-id"])
        assert len(ids) == 3
        assert all(len(value) == 36 and value.startswith("req-") for value in ids)

    with_shell(test)


def test_requests_are_logged_without_what_they_say(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "chairlift")

    async def test(client: Client, _: Endpoints, __: StateOnlyEngine) -> None:
        body = json.dumps({"prompt": "a secret"}).encode()
        await client.post("/v1/echo?secret=1", body, "X-Request-Id: id-1", "Authorization: Bearer secret")
        await client.get("/v1/secret")

    with_shell(test, log_requests=True)
    first, second = (record for record in caplog.records if record.message == "request")
    fields = first.fields  # type: ignore[attr-defined]
    assert fields["bytes_in"] == fields["bytes_out"] == 22
    assert (fields["id"], fields["method"], fields["route"], fields["status"]) == ("id-1", "POST", "/v1/echo", 200)
    assert 0 <= fields["first_byte_seconds"] <= fields["seconds"]
    assert (second.fields["route"], second.fields["status"]) == ("none", 404)  # type: ignore[attr-defined]
    assert "secret" not in str([record.__dict__ for record in caplog.records])
    caplog.clear()
    with_shell(test)
    assert not caplog.records


@pytest.mark.parametrize("taken", [True, False])
def test_a_request_that_died_with_its_engine_is_not_counted_as_turned_away_too(taken: bool) -> None:
    error = EngineDeadError("dead", taken=taken)

    async def fail(request: Request) -> Response:
        raise error

    async def test() -> None:
        state = make_state()
        async with serving(make_app(state, [Route("/v1/fail", fail)])) as client:
            reply = await client.get("/v1/fail")
            assert (reply.status, reply.error["code"]) == (503, "engine_unavailable")
            assert state.engine.stats.rejected["unavailable"] == (not taken)

    run(test())


@pytest.mark.parametrize("gone", ["draining", "stopped"])
def test_an_answer_cut_off_at_the_end_is_not_told_to_come_back(gone: str) -> None:
    async def fail(request: Request) -> Response:
        state.draining = gone == "draining"  # after it was let in
        if gone == "stopped":
            state.engine.state = EngineState.STOPPED
        raise EngineDeadError("the engine has been shut down")

    async def test() -> None:
        async with serving(make_app(state, [Route("/v1/fail", fail)])) as client:
            reply = await client.get("/v1/fail")
            assert (reply.status, reply.error["code"]) == (503, "server_draining")
            assert reply.error["message"] == "the server stopped before the answer was complete; try another one"
            assert state.engine.stats.rejected["unavailable"] == 0

    state = make_state()
    run(test())


# --- the drain, and clients that leave -------------------------------------------------------------------------------


def test_a_draining_server_takes_no_work_and_still_tells() -> None:
    async def test(client: Client, endpoints: Endpoints, engine: StateOnlyEngine) -> None:
        waiting = await client.connect()
        waiting.get("/v1/wait")
        await endpoints.arrived.wait()
        client.state.draining = True  # type: ignore[attr-defined]
        for path in ("/v1/echo", "/tokenize"):
            connection = await client.connect()
            connection.get(path, "Content-Type: application/json", "Content-Length: 2", method="POST")
            reply = await connection.reply()  # before the body is there
            assert (reply.status, reply.error["code"]) == (503, "server_draining")
            assert reply.headers["connection"] == "close"
            assert int(reply.headers["retry-after"]) > 0
            connection.send(b"{}")
            assert await connection.is_closed()
        assert engine.stats.rejected["draining"] == 2
        assert (await client.get("/v1/models")).status == 200
        endpoints.go_on.set()
        assert (await waiting.reply()).body == b"done"

    with_shell(test)


@pytest.mark.parametrize("path", ["/v1/wait", "/v1/stream"])
@pytest.mark.parametrize("how", ["close", "reset", "half"])
def test_work_ends_when_its_client_leaves(path: str, how: str, caplog: pytest.LogCaptureFixture) -> None:
    async def test(client: Client, endpoints: Endpoints, _: StateOnlyEngine) -> None:
        connection = await client.connect()
        connection.get(path)
        if path == "/v1/stream":
            assert (await connection.head())[0] == 200
            assert await connection.chunk() == b"first "
        await endpoints.arrived.wait()
        if how == "half":
            connection.writer.write_eof()
        elif how == "reset":
            connection.writer.transport.abort()
        else:
            await connection.close()
        await asyncio.wait_for(endpoints.cancelled.wait(), PATIENCE)
        await until(lambda: not client.server.requests())
        assert (endpoints.num_waiting, endpoints.num_cancelled) == (0, 1)
        assert (await client.get("/v1/models")).status == 200

    with_shell(test)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_client_that_leaves_within_its_body_leaves_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def test(client: Client, _: Endpoints, __: StateOnlyEngine) -> None:
        connection = await client.connect()
        connection.get("/v1/echo", "Content-Type: application/json", "Content-Length: 100", method="POST")
        connection.send(b'{"a"')
        await until(lambda: bool(client.server.requests()))
        await connection.close()
        await until(lambda: not client.server.requests())

    with_shell(test)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_nothing_is_left_of_many_clients_of_which_half_leave() -> None:
    async def test(client: Client, endpoints: Endpoints, _: StateOnlyEngine) -> None:
        tasks_before = len(asyncio.all_tasks())
        connections = [await client.connect() for _ in range(100)]
        for connection in connections:
            connection.get("/v1/stream")
        await until(lambda: endpoints.num_waiting == 100)
        for connection in connections[::2]:
            connection.writer.transport.abort()
        await until(lambda: endpoints.num_cancelled == 50)
        endpoints.go_on.set()
        assert {(await connection.reply()).body for connection in connections[1::2]} == {b"first last"}
        for connection in connections[1::2]:
            await connection.close()
        await until(lambda: not client.server.state.connections and not client.server.requests())
        assert len(asyncio.all_tasks()) == tasks_before

    with_shell(test)
