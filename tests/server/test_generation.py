"""Endpoints for trainers: a pause keeps tokens, an abort ends all, and only the admin may do either."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from chairlift.engine.generation import Generation
from chairlift.errors import ConfigError
from chairlift.server.http.app import make_app
from chairlift.server.operations.generation import routes
from tests.e2e.served import answers
from tests.e2e.server_process import PATIENCE, ServerProcess, metrics_of
from tests.server.fake_engine import make_state
from tests.server.test_weights import Updating

PROMPT = list(range(40, 80))
LONG = 30_000
"""Tokens of an answer that takes minutes."""


class Core:
    """Notes what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def control(self, action: str) -> None:
        self.asked.append(action)
        if action == "recompute":
            raise ConfigError("a static batch stays together to its end")


def asked(
    tmp_path: Path, path: str, body: Any = None, key: str = "sk-admin", method: str = "POST"
) -> tuple[Core, Updating, Any]:
    """(core, engine, response) of one call of a server whose engine is fake."""
    core, engine = Core(), Updating()
    engine.generation = Generation(lambda: core, lambda: None, lambda: [], lambda _: None)  # type: ignore[attr-defined]
    file = tmp_path / "keys"
    file.write_text("alice sk-alice\nadmin sk-admin\n")
    app = make_app(make_state(engine, api_key_file=str(file)))
    with TestClient(app, base_url="http://localhost") as client:
        reply = client.request(method, path, json=body, headers={"Authorization": f"Bearer {key}"})
    return core, engine, reply


@pytest.mark.parametrize(
    ("path", "body", "orders"),
    [
        ("/pause", None, ["pause", "reset"]),
        ("/pause?mode=abort&clear_cache=false", None, ["pause"]),
        ("/pause?mode=keep", None, ["pause"]),
        ("/resume", None, ["resume"]),
        ("/abort_requests", {}, []),
        ("/reset_prefix_cache", None, ["reset"]),
        ("/pause_generation", {"mode": "in_place"}, ["pause"]),
        ("/pause_generation", {}, ["pause"]),
        ("/continue_generation", {"torch_empty_cache": True}, ["resume"]),
        ("/abort_request", {"abort_all": True}, []),
        ("/flush_cache?timeout=3", None, ["reset"]),
    ],
)
def test_each_name_gives_its_orders(path: str, body: Any, orders: list[str], tmp_path: Path) -> None:
    core, _, reply = asked(tmp_path, path, body)
    assert (reply.status_code, core.asked) == (200, orders), reply.text


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/pause?mode=wait", None, "to let requests end, send none"),
        ("/pause?mode=keep&clear_cache=no", None, "clear_cache must be true or false"),
        ("/pause_generation", {"mode": "retract"}, "a static batch stays together"),
        ("/reset_prefix_cache?reset_running_requests=true", None, "a static batch stays together"),
        ("/abort_request", {}, "abort_all"),
        ("/update_weights_from_disk", {"model_path": "/m", "flush_cache": False}, "never shared"),
        ("/update_weights_from_disk", {"model_path": "/m", "weight_version": "step-3"}, "weight_version"),
    ],
)
def test_what_cannot_be_says_why(path: str, body: Any, words: str, tmp_path: Path) -> None:
    core, engine, reply = asked(tmp_path, path, body)
    assert reply.status_code == 400 and words in reply.json()["error"]["message"]
    assert not engine.asked and core.asked in ([], ["recompute"], ["pause", "recompute", "resume"])


def test_nobody_but_the_admin_does_any_of_it(tmp_path: Path) -> None:
    for route in routes:
        for method in (route.methods or set()) - {"HEAD"}:
            core, engine, reply = asked(tmp_path, route.path, {}, "sk-alice", method)
            assert (reply.status_code, reply.json()["error"]["code"]) == (403, "admin_key_needed"), route.path
            assert not core.asked and not engine.asked


def test_weights_come_under_the_name_of_sglang(tmp_path: Path) -> None:
    _, engine, reply = asked(tmp_path, "/update_weights_from_disk", {"model_path": "/m", "token_step": 3})
    assert reply.json() == {"success": True, "message": "version 1 is in use", "num_paused_requests": 0}
    assert engine.asked == [("/m", 1, "continue")]
    _, engine, reply = asked(tmp_path, "/update_weights_from_disk", {"model_path": "/m", "weight_version": "9"})
    assert engine.asked == [("/m", 9, "continue")]


class Server:
    """A real server, and its admin."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.connections: list[http.client.HTTPConnection] = []

    def close(self) -> None:
        """Close the connections, after all that was read from them."""
        for connection in self.connections:
            connection.close()
        self.connections.clear()

    def open(self, method: str, path: str, body: Any = None, name: str = "") -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        self.connections.append(connection)
        headers = {"Authorization": "Bearer sk-admin", "Content-Type": "application/json", "X-Request-Id": name or "x"}
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        return connection.getresponse()

    def call(self, method: str, path: str, body: Any = None) -> Any:
        reply = self.open(method, path, body)
        text = reply.read()
        assert reply.status == 200, text
        return json.loads(text)

    def generated(self) -> float:
        """Number of tokens that the server has generated."""
        return metrics_of(self.open("GET", "/metrics").read().decode())["chairlift:generation_tokens_total"]

    def begin(self, max_tokens: int, name: str = "") -> tuple[Iterator[dict[str, Any]], list[int]]:
        """(choices of a stream, token ids of the first)."""
        fields = {"max_tokens": max_tokens, "seed": 7, "ignore_eos": True, "return_token_ids": True, "stream": True}
        reply = self.open("POST", "/v1/completions", {"model": "m", "prompt": PROMPT, **fields}, name)
        events = (json.loads(line[6:]) for line in reply if line.startswith(b"data: {"))
        choices = (choice for event in events for choice in event["choices"])
        return choices, list(next(choices).get("token_ids") or ())


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("admin sk-admin\n")
    flags = ("--api-key-file", str(keys), "--served-model-name", "m", "--max-model-len", "32768")
    with ServerProcess("hashlm", *flags) as process:
        yield Server(process.port)


@pytest.fixture(autouse=True)
def resumed(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that fails leaves no paused server behind."""
    yield
    if "server" in request.fixturenames:
        server = request.getfixturevalue("server")
        server.call("POST", "/resume")
        server.call("POST", "/abort_requests")
        server.close()


def rest(choices: Iterator[dict[str, Any]]) -> tuple[list[int], str]:
    """(token ids of the other choices of a stream, its finish reason)."""
    tokens: list[int] = []
    for choice in choices:
        tokens += choice.get("token_ids") or ()
        if choice["finish_reason"]:
            return tokens, choice["finish_reason"]
    raise AssertionError("the stream has no end")


@pytest.mark.parametrize(
    ("pause", "resume"),
    [
        (("/pause?mode=keep", None), "/resume"),
        (("/pause_generation", {"mode": "in_place"}), "/continue_generation"),
        (("/pause_generation", {"mode": "retract"}), "/continue_generation"),
    ],
)
def test_a_paused_stream_goes_on_with_the_same_tokens(server: Server, pause: Any, resume: str) -> None:
    expected = answers(PROMPT, seed=7, max_tokens=1000, ignore_eos=True)[0].token_ids
    choices, first = server.begin(1000)
    server.call("POST", *pause)
    assert server.call("GET", "/is_paused") == {"is_paused": True}
    before = server.generated()
    assert server.call("POST", "/reset_prefix_cache")["status"] == "ok"
    assert server.call("GET", "/load")["server_load"] == 1 and server.generated() == before
    assert server.call("GET", "/health")
    server.call("POST", resume)
    more, reason = rest(choices)
    assert (first + more, reason) == (expected, "length")
    assert server.call("GET", "/is_paused") == {"is_paused": False}


@pytest.mark.parametrize("end", [("/abort_request", {"abort_all": True}), ("/abort_requests", None), ("/pause", None)])
def test_an_abort_ends_all_with_what_they_have(server: Server, end: Any) -> None:
    expected = answers(PROMPT, seed=7, max_tokens=60, ignore_eos=True)[0].token_ids
    streams = [server.begin(LONG) for _ in range(3)]
    server.call("POST", *end)
    for choices, first in streams:
        more, reason = rest(choices)
        tokens = first + more
        assert reason == "abort" and tokens[:60] == expected[: len(tokens)]


def test_an_abort_ends_one_by_its_name(server: Server) -> None:
    (one, _), (other, _) = server.begin(LONG, "one"), server.begin(1000, "other")
    assert server.call("POST", "/abort_request", {"rid": "one"}) == {"aborted": 1}
    assert rest(one)[1] == "abort"
    assert rest(other)[1] == "length"


def test_a_reset_forgets_cached_prefixes(server: Server) -> None:
    def cached() -> int:
        body = {"model": "m", "prompt": PROMPT, "max_tokens": 1}
        found: int = server.call("POST", "/v1/completions", body)["usage"]["prompt_tokens_details"]["cached_tokens"]
        return found

    cached()
    assert cached() > 0
    server.call("POST", "/reset_prefix_cache")
    assert cached() == 0
