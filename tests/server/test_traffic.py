"""GET /v1/requests and GET /v1/traffic: all that is said is true, nobody hears of strangers, and nobody of texts."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import gc
import itertools
import json
import time
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift.base.outputs import FinishReason, OutputKind
from chairlift.base.sampling_params import SHAPED_REASONS, SamplingParams
from chairlift.config import EngineConfig, ServerConfig
from chairlift.engine import events
from chairlift.engine.async_engine import AsyncEngine
from chairlift.engine.core_outputs import CoreOutputs, FinishedSequence, Progress
from chairlift.engine.input_processor import InputProcessor, ModelLimits, PreparedRequest
from chairlift.engine.output_processor import RequestState
from chairlift.engine.output_stream import OutputStream
from chairlift.engine.process.messages import FrameReader, Refused, Step, encode
from chairlift.engine.replicas import SingleProcess
from chairlift.metrics.stats import EngineStats
from chairlift.server.http.app import make_app
from chairlift.server.http.auth import Caller, load_keys
from chairlift.server.http.state import ServerState
from chairlift.server.operations import traffic
from chairlift.server.operations.traffic import TrafficRecording, prefix_hashes
from tests.engine.make import greedy, make_engine
from tests.server.fake_engine import INFO, byte_tokenizer
from tests.server.harness import PATIENCE, Client, Connection, StateOnlyEngine, run, serving, until

LETTER = byte_tokenizer().encode("Q")[0]
"""The token that every answer is made of."""


class ScriptedCore:
    """Stands in for the engine's process: steps bring what the test says, in frames that are encoded and decoded."""

    replicas = SingleProcess()
    last_heard = 0.0

    def __init__(self, events: AsyncEngine) -> None:
        self.requests: list[PreparedRequest] = []
        self.aborted: list[str] = []
        self._events = events

    def add(self, request: PreparedRequest) -> None:
        self.requests.append(request)

    def abort(self, sequence_ids: Sequence[str]) -> None:
        self.aborted += sequence_ids

    stop = abort

    async def close(self) -> None:
        return

    def step(self, **news: Any) -> None:
        frame = encode(Step(CoreOutputs(**news), EngineStats(num_running=len(news.get("sequence_ids", ())))))
        (step,) = FrameReader().feed(frame)
        assert isinstance(step, Step)
        self._events.on_step(step)

    def join(self, request: PreparedRequest, cached: int = 0) -> None:
        self.step(joined=[(name, cached, request.arrival_time + 0.25) for name in request.sequence_ids])

    def tokens(self, request: PreparedRequest, count: int) -> None:
        """So many of each of its answers."""
        for _ in range(count):
            names = request.sequence_ids
            self.step(sequence_ids=list(names), token_ids=[LETTER] * len(names))

    def end(self, request: PreparedRequest, reason: FinishReason = FinishReason.LENGTH) -> None:
        self.step(finished=[FinishedSequence(name, reason, num_preemptions=1) for name in request.sequence_ids])

    def answer(self, request: PreparedRequest, count: int) -> None:
        self.join(request)
        self.tokens(request, count)
        self.end(request)


@dataclasses.dataclass
class Server:
    client: Client
    engine: AsyncEngine
    core: ScriptedCore
    state: ServerState

    async def ask(self, prompt: Any, *headers: str, **fields: Any) -> Connection:
        """Send a completion and wait until the engine has it."""
        connection = await self.client.connect()
        known = len(self.core.requests)
        connection.post("/v1/completions", json.dumps({"prompt": prompt, **fields}).encode(), *headers)
        await until(lambda: len(self.core.requests) > known)
        return connection

    async def listed(self, query: str = "", *headers: str) -> Any:
        return (await self.client.get(f"/v1/requests{query}", *headers)).json()

    async def record(self, query: str = "", *headers: str) -> Events:
        connection = await self.client.connect()
        connection.get(f"/v1/traffic{query}", *headers)
        status, found = await connection.head()
        assert (status, found["content-type"]) == (200, "text/event-stream; charset=utf-8"), found
        return Events(connection)


class Events:
    """Records that a listener gets, and all their bytes."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.seen = b""

    async def next(self) -> tuple[str, int, Any]:
        """Name, number and data; for a comment the name is ``:``, for the end of the answer ``gone``."""
        body = await self.connection.chunk()
        self.seen += body
        if not body:
            return "gone", 0, None
        assert body.endswith(b"\n\n")
        if body.startswith(b":"):
            return ":", 0, body.decode()
        fields = dict(line.split(": ", 1) for line in body.decode().strip().split("\n"))
        return fields.get("event", ""), int(fields.get("id", 0)), json.loads(fields["data"])

    async def record(self) -> Any:
        name, _, data = await self.next()
        assert name == "", (name, data)
        return data


@contextlib.asynccontextmanager
async def served(tmp_path: Path | None = None, keys: str = "", **settings: Any) -> AsyncIterator[Server]:
    engine = AsyncEngine(
        EngineConfig.from_flat({"model": "hashlm", "skip_tokenizer_init": True} | settings), read_tokenizer=lambda *_: 1
    )
    core = ScriptedCore(engine)
    engine._client = core  # type: ignore[assignment]
    engine.prompts.tokenizer = copy.copy(byte_tokenizer())
    engine.prompts.tokenizer.chat_template = None  # no process for it
    await engine._prepare(INFO)
    config = ServerConfig()
    if tmp_path is not None:
        (tmp_path / "keys").write_text(keys)
        config = ServerConfig(api_key_file=str(tmp_path / "keys"))
    state = ServerState(config, engine, ("tiny",), api_keys=load_keys(config))
    async with serving(make_app(state)) as client:
        yield Server(client, engine, core, state)
        engine._fail_all()


def asynchronous(function: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Let a coroutine be a test; it takes no fixtures."""
    return lambda: run(function())


# --- what there is now ------------------------------------------------------------------------------------------------


@asynchronous
async def test_an_idle_server_lists_no_requests() -> None:
    async with served() as server:
        assert await server.listed() == {"object": "requests", "running": 0, "waiting": 0, "requests": []}


@asynchronous
async def test_each_phase_of_a_request_is_listed() -> None:
    async with served() as server:
        await server.ask("a" * 100, "X-Request-Id: mine", max_tokens=20)
        (one,) = (await server.listed())["requests"]
        wanted = {"id": "mine", "status": "waiting", "service_tier": "default", "priority": 0, "tenant": "", "n": 1}
        wanted |= {
            "prompt_tokens": 100,
            "cached_tokens": 0,
            "host_tokens": 0,
            "disk_tokens": 0,
            "computed_tokens": 0,
            "output_tokens": 0,
            "max_tokens": 20,
        }
        wanted |= dict.fromkeys(("first_token_seconds", "expected_start_seconds", "expected_token_seconds"))
        wanted["expected_load_seconds"] = None
        times = {name: one.pop(name) for name in ("age_seconds", "queue_seconds")}
        assert one == wanted and 0 <= times["queue_seconds"] == times["age_seconds"] < PATIENCE

        (request,) = server.core.requests
        name = request.request_id
        server.core.join(request, cached=32)
        (one,) = (await server.listed())["requests"]
        assert (one["status"], one["cached_tokens"], one["computed_tokens"]) == ("prefill", 32, 32)
        assert one["queue_seconds"] == pytest.approx(0.25) and one["expected_token_seconds"] is None

        server.core.step(progress=[Progress(name, 0, 64, False, 30.0)])
        (one,) = (await server.listed())["requests"]
        assert (one["status"], one["computed_tokens"]) == ("prefill", 64)
        assert 0 < one["expected_token_seconds"] <= 30
        server.core.step(progress=[Progress(name, 0, 80, False, 0.0)])  # overdue is now
        assert (await server.listed())["requests"][0]["expected_token_seconds"] == 0.0

        server.core.tokens(request, 3)
        (one,) = (await server.listed())["requests"]
        assert (one["status"], one["computed_tokens"], one["output_tokens"]) == ("decode", 102, 3)
        assert one["first_token_seconds"] > 0 and one["expected_token_seconds"] is None

        server.core.step(progress=[Progress(name, 3, 0, True)])
        (one,) = (await server.listed())["requests"]
        assert (one["status"], one["computed_tokens"], one["output_tokens"]) == ("preempted", 0, 3)
        server.core.step(progress=[Progress(name, 3, 48, True, 5.0)])
        (one,) = (await server.listed())["requests"]
        assert (one["status"], one["computed_tokens"]) == ("preempted", 48) and one["expected_token_seconds"] <= 5
        server.core.tokens(request, 1)
        assert (await server.listed())["requests"][0]["status"] == "decode"
        server.core.step(progress=[Progress(name, 3, 48, True, 5.0)])  # which was so a token ago
        assert (await server.listed())["requests"][0]["status"] == "decode"

        server.core.end(request)
        assert (await server.listed())["requests"] == []


@asynchronous
async def test_the_line_comes_last_and_long_lists_are_cut() -> None:
    async with served() as server:
        for index in range(4):
            await server.ask(["x", "yy"], f"X-Request-Id: r{index}", n=2, max_tokens=7)
        for request in (server.core.requests[5], server.core.requests[2]):
            server.core.join(request)
        server.core.tokens(server.core.requests[2], 3)
        reply = await server.listed()
        ids = [(each["id"], each["prompt_tokens"], each["status"]) for each in reply["requests"]]
        assert ids[:3] == [("r1", 1, "decode"), ("r2", 2, "prefill"), ("r0", 1, "waiting")] and len(ids) == 8
        first = reply["requests"][0]
        assert (first["n"], first["output_tokens"], first["max_tokens"], first["computed_tokens"]) == (2, 6, 7, 3)
        assert reply["waiting"] == 6
        assert [each["id"] for each in (await server.listed("?limit=2"))["requests"]] == ["r1", "r2"]


@pytest.mark.parametrize(
    ("path", "name"),
    [
        *((f"/v1/requests?limit={value}", "limit") for value in ("0", "1001", "-1", "x", "1.5", "", "1&limit=2")),
        *((f"/v1/traffic?block_size={value}", "block_size") for value in ("8", "513", "64.0")),
        ("/v1/traffic?requests=0", "requests"),
        *((f"/v1/traffic?duration={value}", "duration") for value in ("0", "nan", "inf", "1e10", "ten")),
    ],
)
def test_bad_numbers_are_named(path: str, name: str) -> None:
    async def ask() -> None:
        async with served() as server:
            reply = await server.client.get(path)
            assert (reply.status, reply.error["param"]) == (400, name)
            message = reply.error["message"]
            assert f"{name} must be" in message and "e+" not in message.partition("got")[0]
            assert not server.engine.events.subscribers

    run(ask())


# --- recordings -------------------------------------------------------------------------------------------------------


@asynchronous
async def test_a_recording_has_the_requests_that_came() -> None:
    async with served() as server:
        began = time.time()
        await server.ask("it was there before")
        events = await server.record("?block_size=16&requests=4")
        name, _, start = await events.next()
        assert (name, start["block_size"], start["model"]) == ("start", 16, "tiny")
        assert began - 1 < start["began_unix"] < time.time() + 1

        same = "The same beginning, that is 33 long"[:33]
        await server.ask(same + "x" * 7, max_tokens=5)
        await server.ask(same + "y" * 30, max_tokens=9, n=3)
        leaving = await server.ask([5] * 16, max_tokens=90)
        await server.ask("last")
        await server.ask("one too many")
        before, one, three, left, last, more = server.core.requests
        server.core.answer(before, 2)
        server.core.join(left)
        server.core.tokens(left, 4)
        await leaving.close()
        gone = await events.record()
        assert server.core.aborted == [left.request_id]
        for request in (three, more):
            server.core.answer(request, 3)
        server.core.join(one, cached=32)
        server.core.tokens(one, 5)
        server.core.end(one, FinishReason.STOP)
        server.engine.on_refused(Refused(last.request_id, False, "no"))
        n_answers, stopped, failed = [await events.record() for _ in range(3)]
        assert (await events.next())[0::2] == ("end", {"reason": "complete"})
        assert (await events.next())[0] == "gone" and not server.engine.events.subscribers

        told = ("prompt_tokens", "output_tokens", "answer_tokens", "finish_reason", "cached_tokens", "max_tokens")
        assert [gone[each] for each in told] == [16, 4, [4], "abort", 0, 90]
        assert [n_answers[each] for each in told] == [63, 9, [3, 3, 3], "length", 0, 9]
        assert [stopped[each] for each in told] == [40, 5, [5], "stop", 32, 5]
        assert [failed[each] for each in told] == [4, 0, [0], "error", 0, 16]
        arrivals = [each["arrival_seconds"] for each in (stopped, n_answers, gone, failed)]
        assert arrivals == sorted(arrivals) and arrivals[0] >= 0
        assert gone["cancel_ms"] == pytest.approx(gone["e2e_seconds"] * 1000, abs=0.01)
        assert [each["cancel_ms"] for each in (stopped, n_answers, failed)] == [None] * 3
        assert (stopped["preemptions"], stopped["queue_seconds"]) == (1, pytest.approx(0.25))
        assert 0 < stopped["ttft_seconds"] <= stopped["e2e_seconds"] and stopped["tpot_seconds"] >= 0
        assert (failed["ttft_seconds"], failed["tpot_seconds"], failed["queue_seconds"]) == (None, None, None)
        assert stopped["arrival_unix"] == pytest.approx(start["began_unix"] + stopped["arrival_seconds"], abs=1e-5)
        # 33 equal tokens are two blocks of 16.
        assert [len(each["hash_ids"]) for each in (stopped, n_answers, gone, failed)] == [3, 4, 1, 1]
        assert stopped["hash_ids"][:2] == n_answers["hash_ids"][:2] and gone["hash_ids"] != stopped["hash_ids"][:1]
        assert not set(stopped["hash_ids"][2:]) & set(n_answers["hash_ids"])


@asynchronous
async def test_one_of_several_answers_that_fails_says_why_the_request_ended() -> None:
    shaped = sorted(SHAPED_REASONS)[0]
    cases = [
        (FinishReason.DEADLINE, "late", "deadline"),
        (FinishReason.ERROR, "NaN", "error"),
        (FinishReason.ERROR, shaped, "abort"),
    ]
    async with served() as server:
        events = await server.record("?requests=3")
        await events.next()
        for reason, error, told in cases:
            connection = await server.ask([7] * 16, max_tokens=90, n=2, stream=True)
            request = server.core.requests[-1]
            server.core.join(request)
            server.core.tokens(request, 2)
            server.core.step(finished=[FinishedSequence(request.sequence_ids[1], reason, error=error)])
            assert b"error" in (await connection.reply()).body
            record = await events.record()
            assert (record["finish_reason"], record["cancel_ms"] is None) == (told, told != "abort")
        assert server.engine.stats.finished == {told: 1 for _, _, told in cases}
        assert len(server.core.aborted) == 3  # the answers that went on


@asynchronous
async def test_no_text_leaves_the_server() -> None:
    async with served() as server:
        events = await server.record("?requests=2")
        await events.next()
        for prompt in ("my SECRET question", [201, 202, 203]):
            connection = await server.ask(prompt, "X-Request-Id: SECRET-id", max_tokens=4, user="SECRET-user")
            server.core.answer(server.core.requests[-1], 4)
            assert (await connection.reply()).json()["choices"][0]["text"] == "QQQQ"
        while (await events.next())[0] != "gone":
            pass
        assert b"SECRET" not in events.seen and b"question" not in events.seen
        assert b"QQQQ" not in events.seen and b"201,202" not in events.seen


@asynchronous
async def test_promises_and_tenants_are_recorded() -> None:
    async with served(scheduling_policy="priority") as server:
        events = await server.record("?requests=4")
        await events.next()
        fields = {"priority": -3, "ttft_ms": 500, "tpot_ms": 40.5, "deadline_ms": 9000, "service_tier": "flex"}
        for user, more in (("zoe", fields), ("adam", {}), ("zoe", {"service_tier": "priority"}), ("", {})):
            await server.ask("Hi", **({"user": user} if user else {}), **more)
        (first, *_) = (await server.listed("?limit=4"))["requests"]
        assert (first["tenant"], first["priority"], first["service_tier"]) == ("zoe", -3, "flex")
        for request in reversed(server.core.requests):
            server.core.answer(request, 2)
        found = [await events.record() for _ in range(4)][::-1]
        assert [each["tenant"] for each in found] == ["tenant-1", "tenant-2", "tenant-1", ""]
        assert {name: found[0][name] for name in fields} == fields
        assert [each["service_tier"] for each in found[1:]] == ["default", "priority", "default"]
        assert [each[name] for each in found[1:] for name in ("priority", "ttft_ms", "tpot_ms", "deadline_ms")] == [
            *([0, None, None, None] * 3)
        ]


def test_a_key_hears_of_its_own_tenant_and_the_administrator_of_all(tmp_path: Path) -> None:
    async def ask() -> None:
        async with served(tmp_path, "alice sk-a\nbob sk-b\nadmin sk-all\n") as server:
            alice, bob, admin = (f"Authorization: Bearer sk-{each}" for each in ("a", "b", "all"))
            for path in ("/v1/requests", "/v1/traffic"):
                assert (await server.client.get(path)).status == 401
            own, everybody = await server.record("?requests=1", alice), await server.record("?requests=2", admin)
            for events in (own, everybody):
                await events.next()
            await server.ask("Hi, this is Bob", bob, "X-Request-Id: b1")
            await server.ask("Hi", alice, "X-Request-Id: a1")
            assert [each["id"] for each in (await server.listed("", alice))["requests"]] == ["a1"]
            assert [each["id"] for each in (await server.listed("", admin))["requests"]] == ["b1", "a1"]
            queue = (await server.client.get("/v1/queue", admin)).json()["requests"]
            assert [each["id"] for each in queue] == ["b1", "a1"]
            assert (await server.listed("", alice))["waiting"] == 2
            for request in server.core.requests:
                server.core.answer(request, 1)
            mine = await own.record()
            assert mine["prompt_tokens"] == 2 and (await own.next())[0] == "end"
            both = [await everybody.record() for _ in range(2)]
            assert [each["tenant"] for each in (mine, *both)] == ["tenant-1", "tenant-1", "tenant-2"]
            # Keys share no cache, so equal prompts do not count as equal; and recordings share no secret.
            assert len({number for each in (mine, *both) for number in each["hash_ids"]}) == 3

    run(ask())


@asynchronous
async def test_a_recording_waits_for_its_listener() -> None:
    async with served() as server:
        events = await server.record("?requests=3")
        recording = (await events.next())[2]["recording"]
        for prompt in ("The same text", "The same text", "The same text"):
            await server.ask(prompt)
        server.core.answer(server.core.requests[0], 1)
        before = await events.next()
        await events.connection.close()
        await until(lambda: len(server.client.server.requests()) == 3)
        for request in server.core.requests[1:]:
            server.core.answer(request, 1)
        again = await server.record(f"?recording={recording}&block_size=128")
        assert (await again.next())[2]["block_size"] == 64
        after = [await again.next() for _ in range(2)]
        assert [number for _, number, _ in (before, *after)] == [1, 2, 3]
        assert before[2]["hash_ids"] == after[0][2]["hash_ids"] == after[1][2]["hash_ids"]
        assert (await again.next())[0] == "end"
        reply = await server.client.get(f"/v1/traffic?recording={recording}")
        assert (reply.status, reply.error["code"]) == (404, "recording_not_found")


def test_a_recording_belongs_to_the_key_that_began_it(tmp_path: Path) -> None:
    async def ask() -> None:
        async with served(tmp_path, "alice sk-a\nbob sk-b\n") as server:
            events = await server.record("", "Authorization: Bearer sk-a")
            recording = (await events.next())[2]["recording"]
            path = f"/v1/traffic?recording={recording}"
            assert (await server.client.get(path, "Authorization: Bearer sk-b")).status == 404
            newer = await server.record(f"?recording={recording}", "Authorization: Bearer sk-a")
            assert (await newer.next())[0] == "start"
            assert (await events.next())[0] == "gone"  # it has been replaced, and says no end

    run(ask())


@asynchronous
async def test_the_number_of_recordings_is_limited() -> None:
    async with served() as server:
        tracer: Any = object()
        server.engine.events.subscribe("traces", tracer)  # takes nobody's place
        for _ in range(8):
            await (await server.record()).next()
        server.engine.events.unsubscribe("traces")
        reply = await server.client.get("/v1/traffic")
        assert (reply.status, reply.error["code"]) == (429, "too_many_recordings")
        assert reply.headers["retry-after"] == "60"
        assert (await server.client.get("/v1/traffic", method="HEAD")).status == 200
        assert len(server.engine.events.subscribers) == 8


def test_one_tenant_cannot_take_all_recordings(tmp_path: Path) -> None:
    async def ask() -> None:
        async with served(tmp_path, "a sk-a\na sk-a2\nb sk-b\n") as server:
            for key in ("sk-a", "sk-a2", "sk-a"):
                await (await server.record("", f"Authorization: Bearer {key}")).next()
            reply = await server.client.get("/v1/traffic", "Authorization: Bearer sk-a2")
            assert (reply.status, reply.error["code"], reply.headers["retry-after"]) == (
                429,
                "too_many_recordings",
                "60",
            )
            assert "recording=ID" in reply.error["message"]
            assert (await (await server.record("", "Authorization: Bearer sk-b")).next())[0] == "start"

    run(ask())


@asynchronous
async def test_the_drain_ends_it_when_everybody_has_been_heard() -> None:
    async with served() as server:
        idle, busy = await server.record(), await server.record()
        for events in (idle, busy):
            await events.next()
        await server.ask("Hi")
        server.state.draining = True
        for recording in server.engine.events.subscribers.values():
            recording.news.set()
        server.core.answer(server.core.requests[0], 2)
        for events in (idle, busy):
            assert (await events.record())["output_tokens"] == 2
            assert (await events.next())[0::2] == ("end", {"reason": "draining"})
            assert (await events.next())[0] == "gone"


def test_silence_is_broken_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic, "_HEARTBEAT_SECONDS", 0.001)

    async def ask() -> None:
        async with served() as server:
            events = await server.record()
            assert (await events.next())[0] == "start"
            await server.ask("Hi")
            while (heard := await events.next())[2] != ": 1 requests are under way\n\n":
                assert heard[0] == ":"

    run(ask())


# --- the pieces -------------------------------------------------------------------------------------------------------


def a_stream(number: int, tokens: int = 20, arrival: float = 101.0, tenant: str = "") -> OutputStream:
    limits = ModelLimits(256, 1 << 20)
    room = dataclasses.replace(INFO, capacity_tokens=1 << 20)
    door = InputProcessor(limits, None, room)
    prepared = door.prepare(f"r{number}", [7] * tokens, SamplingParams(), arrival, tenant=tenant)
    return OutputStream(RequestState(prepared, None, True), OutputKind.FINAL, lambda _: None)


def a_recording(**limits: float) -> TrafficRecording:
    return TrafficRecording(Caller(), 16, now=100.0, unix=1e9, **limits)


@asynchronous
async def test_only_what_comes_within_the_limits_counts() -> None:
    recording = a_recording(seconds=10.0)
    arrivals = (99.9, 100.0, 105.0, 109.9, 110.0)
    streams = [a_stream(i, arrival=arrival) for i, arrival in enumerate(arrivals)]
    for stream in streams:
        recording.began(stream)
    assert recording.num_under_way == 3
    assert not recording.is_complete(200.0)  # those under way are heard to their end
    for stream in streams:
        recording.ended(stream, FinishReason.ABORT, 120.0)
    heard = [taken async for taken in all_of(recording)]
    assert [(number, each.arrival_seconds) for number, each in heard] == [(1, 0.0), (2, 5.0), (3, 9.9)]
    assert [each.cancel_ms for _, each in heard] == [20_000, 15_000, 10_100]
    assert recording.is_complete(110.0) and not recording.is_complete(109.9)


def test_waiting_lines_of_a_recording_hold_no_answers() -> None:
    """They may be megabytes each, with log-probabilities: those of a recording that nobody reads filled the memory."""
    recording, stream = a_recording(), a_stream(0)
    recording.began(stream)
    recording.ended(stream, None, 110.0)
    state = weakref.ref(stream.state)
    del stream
    gc.collect()
    assert state() is None


@asynchronous
async def test_a_slow_listener_loses_the_oldest_and_is_told() -> None:
    by_number, by_size = a_recording(), a_recording()
    for recording, count, tokens in ((by_number, 5000, 20), (by_size, 6, 1 << 20)):
        for i in range(count):
            stream = a_stream(i, min(tokens, 1 << 19))
            recording.began(stream)
            recording.ended(stream, None, 102.0)
    assert (by_number.num_lost, by_size.num_lost) == (5000 - 4096, 0)
    first = await by_number.take()
    assert first is not None and first[0] == 5000 - 4096 + 1
    for i in range(6, 10):
        stream = a_stream(i, 1 << 19)
        by_size.began(stream)
        by_size.ended(stream, None, 102.0)
    assert by_size.num_lost == 2
    state = ServerState(ServerConfig(), StateOnlyEngine(), ("tiny",))  # type: ignore[arg-type]
    told = [body async for body in first_of(traffic._listen(state, by_size)._events, 3)]
    assert b"event: lost" in told[1] and b'{"lost":2}' in told[1]
    assert told[2].startswith(b"id: 3\n")


@asynchronous
async def test_a_listener_who_keeps_up_loses_nothing_however_much_there_was() -> None:
    recording = a_recording()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(traffic, "_MAX_WAITING_TOKENS", 100)
        for i in range(12):
            stream = a_stream(i)
            recording.began(stream)
            recording.ended(stream, None, 102.0)
            if i:
                assert await recording.take() is not None
    assert recording.num_lost == 0


@asynchronous
async def test_a_listener_who_reads_nothing_is_cut_off() -> None:
    recording = a_recording()
    state = ServerState(ServerConfig(), StateOnlyEngine(), ("tiny",))  # type: ignore[arg-type]
    state.engine.events = events.Events("began", "ended")
    state.engine.events.subscribe(recording.id, recording)
    bodies: list[Any] = []

    async def send(message: Any) -> None:
        bodies.append(message.get("body"))
        if len(bodies) > 2:
            await asyncio.Event().wait()

    for i in range(3):
        stream = a_stream(i)
        recording.began(stream)
        recording.ended(stream, None, 102.0)
    task = asyncio.ensure_future(traffic._listen(state, recording)({}, None, send))  # type: ignore[arg-type]
    while len(bodies) < 3:
        await asyncio.sleep(0)
    task.cancel()  # as the end of its connection does
    with pytest.raises(asyncio.CancelledError):
        await task
    assert recording.id in state.engine.events.subscribers  # for a while
    taken = await recording.take()
    assert taken is not None and taken[0] == 2  # the first has gone, and its number tells


@asynchronous
async def test_tenants_beyond_all_bounds_share_a_name() -> None:
    recording = a_recording()
    recording._tenants |= {f"t{i}": f"tenant-{i}" for i in range(1, 10_001)}
    stream = a_stream(1, tenant="the last straw")
    recording.began(stream)
    recording.ended(stream, None, 102.0)
    taken = await recording.take()
    assert taken is not None and taken[1].tenant == "others" and len(recording._tenants) == 10_001


async def all_of(recording: TrafficRecording) -> AsyncIterator[tuple[int, traffic.TrafficRecord]]:
    while (taken := await recording.take()) is not None:
        yield taken


async def first_of(items: AsyncIterator[bytes], count: int) -> AsyncIterator[bytes]:
    async for item in items:
        yield item
        count -= 1
        if not count:
            return


TOKENS = st.lists(st.integers(0, 2**31), max_size=100)


@given(TOKENS, TOKENS, TOKENS, st.integers(1, 40))
def test_hashes_are_equal_as_far_as_prompts_are(prefix: list[int], one: list[int], two: list[int], size: int) -> None:
    first, second = prefix + one, prefix + two
    same = next((i for i, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]), None)
    same = min(len(first), len(second)) if same is None else same
    hashes = [prefix_hashes(ids, size, b"secret") for ids in (first, second)]
    assert [len(each) for each in hashes] == [-(-len(ids) // size) for ids in (first, second)]
    assert all(0 <= number < 2**62 for each in hashes for number in each)
    equal = same // size if first != second else -(-same // size)
    assert hashes[0][:equal] == hashes[1][:equal]
    assert not set(hashes[0][equal:]) & set(hashes[1][equal:])


def test_hashes_depend_on_the_secret_and_on_the_salt() -> None:
    prompt = list(range(100))
    kinds = [(b"one", ""), (b"two", ""), (b"one", "salt")]
    found = [set(prefix_hashes(prompt, 16, secret, salt)) for secret, salt in kinds]
    assert not any(one & two for one, two in itertools.combinations(found, 2))


def test_the_engine_tells_how_far_long_prompts_are() -> None:
    """The list shows what the scheduler knows, and its expected times are those of coming steps."""
    engine = make_engine(max_num_batched_tokens=8)
    core = engine.core
    name = engine.add_request([1 + i % 7 for i in range(30)], greedy(4))
    seen: list[Progress] = []
    while engine.has_unfinished:
        outputs = core.step()
        assert outputs is not None
        seen += outputs.progress
        engine._take(outputs)
    assert [(each.sequence_id, each.num_computed, each.preempted) for each in seen] == [
        (name, computed, False) for computed in (8, 16, 24)
    ]
    left = [each.seconds_left or 0.0 for each in seen]
    assert left[0] > left[1] > left[2] > 0
    assert left[0] == pytest.approx(3 * left[2], rel=0.35)  # three more steps, and one


def test_the_engine_tells_which_request_was_preempted() -> None:
    engine = make_engine(num_blocks=13, caching=False, max_num_batched_tokens=8)
    names = [engine.add_request([1 + i] * 10, greedy(16)) for i in range(3)]
    gave_way: set[str] = set()
    while engine.has_unfinished:
        requests = dict(engine.scheduler.requests)
        outputs = engine.core.step()
        for each in outputs.progress if outputs is not None else ():
            request = requests[each.sequence_id]
            if each.preempted and each.seconds_left is None:
                gave_way.add(each.sequence_id)
                assert request.num_preemptions > 0 and each.num_computed < request.num_tokens
        if outputs is not None:
            engine._take(outputs)
    assert engine.scheduler.num_preemptions > 0 and gave_way and gave_way <= set(names)
