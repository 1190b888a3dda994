"""A server with many models: each request goes to the model that it names, which is loaded when needed."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from chairlift.config import EngineConfig, ServerConfig
from chairlift.engine.async_engine import EngineState
from chairlift.errors import ConfigError, EngineDeadError, ModelLoadError
from chairlift.fleet.models.catalog import read_catalog
from chairlift.server.http.state import ServerState
from chairlift.server.models.desk import PLACE_HEADER, make_models_app
from chairlift.server.models.engine import ManyModels, check_combines
from chairlift.server.ollama.keep_alive import keep_seconds
from tests.server.fake_engine import INFO, FakeEngine
from tests.server.harness import Client, run, serving


class ModelEngine(FakeEngine):
    """A fake engine that loads when it may, and can die."""

    def __init__(self, model: str, may_load: asyncio.Event, outcome: Exception | None) -> None:
        super().__init__(state=EngineState.LOADING)
        self.model = model
        self.stopped = asyncio.Event()
        self._may_load = may_load
        self._outcome = outcome

    async def wait_ready(self) -> None:
        await self._may_load.wait()
        if self._outcome is not None:
            raise self._outcome
        self.info = dataclasses.replace(INFO, model=self.model)
        self.state = EngineState.READY

    async def shutdown(self) -> None:
        self.state = EngineState.STOPPED
        self.stopped.set()

    def die(self) -> None:
        self.failure = "the engine's process was killed by SIGKILL"
        self.state = EngineState.STOPPED
        self.stopped.set()


@dataclasses.dataclass
class Desk:
    """The server of a test, and what its engines do."""

    client: Client
    many: ManyModels
    may_load: asyncio.Event
    outcomes: dict[str, Exception]
    engines: list[ModelEngine]
    now: list[float]

    async def ask(self, model: str | None, path: str = "/v1/completions", **fields: Any) -> tuple[int, dict[str, Any]]:
        body = {"prompt": "Hi", "max_tokens": 3, **fields} | ({} if model is None else {"model": model})
        reply = await self.client.post(path, json.dumps(body).encode())
        return reply.status, json.loads(reply.body)

    async def get(self, path: str) -> Any:
        return json.loads((await self.client.get(path)).body)

    async def states(self) -> dict[str, str]:
        return {each["id"]: each["state"] for each in (await self.get("/v1/models"))["data"]}


@contextlib.asynccontextmanager
async def many(path: Path, text: str, *, memory: int = 200, **settings: Any) -> AsyncIterator[Desk]:
    """A server for the models of a YAML text. Each needs 100 bytes, or is unreadable if its path is ``unreadable``."""
    (path / "models.yaml").write_text(text)
    config = ServerConfig(models=str(path / "models.yaml"), models_memory_bytes=memory, **settings)
    entries = read_catalog(str(config.models), {}, 1000)
    may_load = asyncio.Event()
    may_load.set()
    outcomes: dict[str, Exception] = {}
    engines: list[ModelEngine] = []
    now = [100.0]

    def start(engine: EngineConfig, server: ServerConfig, progress: Any, place: Any) -> Any:
        name = server.served_model_name[0]
        engines.append(ModelEngine(name, may_load, outcomes.pop(name, None)))
        return engines[-1]

    async def measure(given: Sequence[Mapping[str, Any]]) -> list[int | str]:
        return ["no such file" if each["model"] == "unreadable" else 100 for each in given]

    engine = ManyModels(config, entries, start, measure=measure, clock=lambda: now[0])
    state = ServerState(config, engine, (), started_at=1)
    async with serving(make_models_app(state)) as client:
        await engine.wait_ready()
        yield Desk(client, engine, may_load, outcomes, engines, now)
        await engine.shutdown()


ABC = "models: {a: {model: x, aliases: [alpha]}, b: y, c: z}"


def test_each_request_is_answered_by_its_model(tmp_path: Path) -> None:
    async def check() -> None:
        async with many(tmp_path, ABC) as desk:
            assert await desk.states() == {"a": "unloaded", "alpha": "unloaded", "b": "unloaded", "c": "unloaded"}
            for name, answers in (("a", "a"), ("b", "b"), ("alpha", "a"), ("b", "b")):
                status, body = await desk.ask(name)
                assert (status, body["model"]) == (200, answers)
            assert [each.model for each in desk.engines] == ["a", "b"]
            assert [len(each.submitted) for each in desk.engines] == [2, 2]
            status, body = await desk.ask("d")
            assert status == 404 and "ask for a, alpha, b, c" in body["error"]["message"]
            status, body = await desk.ask(None)
            assert status == 400 and body["error"]["param"] == "model"

    run(check())


def test_other_dialects_name_the_model_too(tmp_path: Path) -> None:
    async def check() -> None:
        async with many(tmp_path, ABC) as desk:
            message = [{"role": "user", "content": "Hi"}]
            for path, fields in (
                ("/v1/chat/completions", {"messages": message}),
                ("/v1/messages", {"messages": message}),
                ("/v1/responses", {"input": "Hi"}),
                ("/api/chat", {"messages": message, "stream": False}),
                ("/api/generate", {"stream": False}),
            ):
                body = {"model": "b", **fields} | ({"max_tokens": 3} if path.startswith("/v1/messages") else {})
                if path == "/api/generate":
                    body["prompt"] = "Hi"
                reply = await desk.client.post(path, json.dumps(body).encode())
                assert reply.status == 200, (path, reply.body)
            assert [each.model for each in desk.engines] == ["b"]
            status, body = await desk.ask("nobody", "/api/chat", messages=message)
            assert status == 404 and isinstance(body["error"], str)

    run(check())


def test_requests_wait_for_a_load_and_know_their_place(tmp_path: Path) -> None:
    async def check() -> None:
        async with many(tmp_path, ABC, max_num_loading_reqs=2) as desk:
            desk.may_load.clear()
            first = asyncio.create_task(desk.client.post("/v1/completions", b'{"model":"a","prompt":"Hi"}'))
            while not desk.engines:
                await asyncio.sleep(0)
            second = asyncio.create_task(desk.client.post("/v1/completions", b'{"model":"b","prompt":"Hi"}'))
            while desk.many.hosts is None or desk.many.hosts.policy.num_waiting < 2:
                await asyncio.sleep(0)
            found = {each["id"]: each for each in (await desk.get("/v1/models"))["data"]}
            assert found["a"]["state"] == "loading" and found["b"]["position"] == 1 and found["b"]["num_waiting"] == 1
            reply = await desk.client.post("/v1/completions", b'{"model":"c","prompt":"Hi"}')
            assert reply.status == 429 and int(reply.headers["retry-after"]) >= 1
            desk.may_load.set()
            replies = [await first, await second]
            assert [each.status for each in replies] == [200, 200]
            assert [each.headers[PLACE_HEADER] for each in replies] == ["1", "2"]

    run(check())


def test_a_caller_that_leaves_waits_no_longer(tmp_path: Path) -> None:
    async def check() -> None:
        async with many(tmp_path, ABC) as desk:
            desk.may_load.clear()
            connection = await desk.client.connect()
            connection.post("/v1/completions", b'{"model":"a","prompt":"Hi"}')
            hosts = desk.many.hosts
            assert hosts is not None
            while not hosts.policy.num_waiting:
                await asyncio.sleep(0)
            await connection.close()
            while hosts.policy.num_waiting:
                await asyncio.sleep(0)
            desk.may_load.set()

    run(check())


def test_the_least_recently_used_model_makes_room(tmp_path: Path) -> None:
    async def check() -> None:
        async with many(tmp_path, ABC) as desk:
            for name in "aba":
                desk.now[0] += 10
                assert (await desk.ask(name))[0] == 200
            desk.now[0] += 10
            assert (await desk.ask("c"))[0] == 200
            states = await desk.states()
            assert (states["a"], states["b"], states["c"]) == ("loaded", "unloaded", "loaded")
            assert desk.engines[1].model == "b" and desk.engines[1].state is EngineState.STOPPED

    run(check())


def test_a_model_that_cannot_be_loaded_says_why_and_stops_no_other(tmp_path: Path) -> None:
    async def check() -> None:
        text = "models: {a: x, gone: unreadable, bad: z}"
        async with many(tmp_path, text) as desk:
            desk.outcomes["bad"] = ModelLoadError("the weights are damaged")
            for name, reason in (("gone", "no such file"), ("bad", "the weights are damaged")):
                status, body = await desk.ask(name)
                assert status == 503 and body["error"]["code"] == "model_failed" and reason in body["error"]["message"]
            assert (await desk.ask("a"))[0] == 200
            cards = {each["id"]: each for each in (await desk.get("/v1/models"))["data"]}
            assert cards["gone"]["reason"] == "no such file" and cards["bad"]["state"] == "failed"
            desk.now[0] += 31  # after the pause it is tried again
            assert (await desk.ask("bad"))[0] == 200

    run(check())


def test_a_dead_engine_touches_no_other_model_and_is_started_again(tmp_path: Path) -> None:
    async def check() -> None:
        async with many(tmp_path, ABC) as desk:
            await desk.ask("a")
            await desk.ask("b")
            a, b = desk.engines
            a.failure_of_streams = EngineDeadError("killed", taken=True)
            status, body = await desk.ask("a")
            assert status == 503 and body["error"]["code"] == "engine_unavailable"
            a.die()
            while (await desk.states())["a"] == "loaded":
                await asyncio.sleep(0)
            assert (await desk.ask("b"))[0] == 200 and b.state is EngineState.READY
            desk.now[0] += 1
            assert (await desk.ask("a"))[0] == 200 and len(desk.engines) == 3

    run(check())


def test_ollama_unloads_by_keep_alive_and_lists_what_is_loaded(tmp_path: Path) -> None:
    async def check() -> None:
        async with many(tmp_path, ABC) as desk:
            assert (await desk.get("/api/ps"))["models"] == []
            assert len((await desk.get("/api/tags"))["models"]) == 4
            reply = await desk.client.post("/api/generate", b'{"model":"a:latest","prompt":"Hi","keep_alive":"5m"}')
            assert reply.status == 200
            names = [each["name"] for each in (await desk.get("/api/ps"))["models"]]
            assert names == ["a:latest", "alpha:latest"]
            reply = await desk.client.post("/api/chat", b'{"model":"a","keep_alive":0,"stream":false}')
            assert json.loads(reply.body)["done_reason"] == "unload"
            while (await desk.get("/api/ps"))["models"]:
                await asyncio.sleep(0)
            reply = await desk.client.post("/api/chat", b'{"model":"a","keep_alive":"soon","stream":false}')
            assert reply.status == 400

    run(check())


def test_questions_about_an_engine_need_a_loaded_model(tmp_path: Path) -> None:
    async def check() -> None:
        async with many(tmp_path, ABC) as desk:
            assert (await desk.client.get("/v1/queue?model=a")).status == 409
            await desk.ask("a")
            await desk.ask("b")
            for query, status in (("?model=a", 200), ("", 400), ("?model=x", 404)):
                assert (await desk.client.get(f"/v1/queue{query}")).status == status
            assert (await desk.get("/v1/requests"))["requests"] == []
            assert (await desk.get("/v1/requests?model=a"))["running"] == 0
            for path in ("/", "/docs", "/live", "/health", "/ready", "/version", "/openapi.json", "/load"):
                assert (await desk.client.get(path)).status == 200, path

    run(check())


def test_metrics_have_the_model_as_a_label(tmp_path: Path) -> None:
    async def check() -> None:
        async with many(tmp_path, ABC) as desk:
            await desk.ask("a")
            await desk.ask("b")
            page = (await desk.client.get("/metrics")).body.decode()
            families = {each.name: each for each in text_string_to_metric_families(page)}
            assert page.count("# TYPE process_start_time_seconds ") == 1
            loads = {each.labels["model_name"]: each.value for each in families["chairlift:model_loads"].samples}
            assert loads == {"a": 1, "b": 1, "c": 0}
            running = families["chairlift:num_requests_running"].samples
            assert {each.labels["model_name"] for each in running} == {"a", "b"}

    run(check())


def test_pinned_models_are_loaded_at_the_start_and_must_fit(tmp_path: Path) -> None:
    async def check() -> None:
        text = "models: {a: {model: x, pinned: true}, b: y, c: z}"
        async with many(tmp_path, text) as desk:
            while (await desk.states())["a"] != "loaded":
                await asyncio.sleep(0)
            for name in "bcb":
                desk.now[0] += 10
                assert (await desk.ask(name))[0] == 200
            assert (await desk.states())["a"] == "loaded"
        with pytest.raises(ConfigError, match="the pinned models a need 100 bytes"):
            async with many(tmp_path, text, memory=50):
                pass

    run(check())


@pytest.mark.parametrize(
    "setting", [{"replicas": 2}, {"batch_dir": "x"}, {"restart": False}, {"lora_modules": ("a=b",)}]
)
def test_settings_that_do_not_combine_are_refused_by_name(setting: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(setting))} does not combine with models"):
        check_combines(ServerConfig(models="x", **setting), None)
    with pytest.raises(ConfigError, match="leave one of them out"):
        check_combines(ServerConfig(models="x"), "hashlm")


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (0, 0),
        ("0", 0),
        (-1, float("inf")),
        ("-1", float("inf")),
        ("5m", 300),
        ("1h30m", 5400),
        (2.5, 2.5),
        ("-5m", float("inf")),
    ],
)
def test_keep_alive_is_read_as_ollama_does(value: Any, seconds: float) -> None:
    assert keep_seconds(value) == seconds
