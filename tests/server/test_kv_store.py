"""GET and DELETE /v1/kv_store: the admin's alone, and told what is there."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from chairlift.engine.kv_store.report import StoreReport
from chairlift.server.http.app import make_app
from tests.e2e.server_process import ServerProcess
from tests.server.fake_engine import FakeEngine, make_state

ADMIN = {"Authorization": "Bearer sk-admin"}


class Storing(FakeEngine):
    """Notes what it was asked to remove."""

    def __init__(self, state: str = "open") -> None:
        super().__init__()
        self.asked: list[str] = []
        self.report = StoreReport(state=state, blocks=3, rejected={"unreadable": 2})

    async def kv_store(self, clear: str = "") -> list[StoreReport]:
        self.asked.append(clear)
        return [self.report]


def ask(engine: FakeEngine, tmp_path: Path, method: str, path: str = "/v1/kv_store", key: str = "sk-admin") -> Any:
    file = tmp_path / "keys"
    file.write_text("alice sk-alice\nadmin sk-admin\n")
    app = make_app(make_state(engine, api_key_file=str(file)))
    with TestClient(app, base_url="http://localhost") as client:
        return client.request(method, path, headers={"Authorization": f"Bearer {key}"})


@pytest.mark.parametrize(
    ("method", "path", "clear"),
    [
        ("GET", "/v1/kv_store", ""),
        ("DELETE", "/v1/kv_store", "own"),
        ("DELETE", "/v1/kv_store?all=false", "own"),
        ("DELETE", "/v1/kv_store?all=true", "all"),
    ],
)
def test_the_admin_sees_and_empties_the_store(method: str, path: str, clear: str, tmp_path: Path) -> None:
    engine = Storing()
    reply = ask(engine, tmp_path, method, path)
    assert (reply.status_code, engine.asked) == (200, [clear])
    (shown,) = reply.json()["engines"]
    assert (shown["state"], shown["blocks"], shown["rejected"]) == ("open", 3, {"unreadable": 2})


@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_nobody_else_does(method: str, tmp_path: Path) -> None:
    engine = Storing()
    reply = ask(engine, tmp_path, method, key="sk-alice")
    assert (reply.status_code, reply.json()["error"]["code"]) == (403, "admin_key_needed")
    with TestClient(make_app(make_state(engine)), base_url="http://localhost") as client:  # a server without keys
        assert client.request(method, "/v1/kv_store").status_code == 403
    assert not engine.asked


@pytest.mark.parametrize(
    ("state", "method", "path", "status", "words"),
    [
        ("off", "GET", "/v1/kv_store", 404, "--kv-store DIR"),
        ("read_only", "DELETE", "/v1/kv_store", 400, "nothing was removed"),
        ("read_only", "GET", "/v1/kv_store", 200, ""),
        ("open", "DELETE", "/v1/kv_store?all=yes", 400, "all must be true or false"),
    ],
)
def test_what_cannot_be_says_why(state: str, method: str, path: str, status: int, words: str, tmp_path: Path) -> None:
    reply = ask(Storing(state), tmp_path, method, path)
    assert reply.status_code == status and words in reply.text


def call(server: ServerProcess, method: str, path: str = "/v1/kv_store", body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    headers = {**ADMIN, "Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{server.port}{path}", data, headers, method=method)
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_server_shows_its_store_and_empties_it(replicas: int, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("admin sk-admin\n")
    flags = "--kv-store", str(tmp_path / "store"), "--kv-store-bytes", "64MB", "--replicas", str(replicas)

    def stores(server: ServerProcess, method: str = "GET") -> list[dict[str, Any]]:
        engines: list[dict[str, Any]] = call(server, method)["engines"]
        assert len(engines) == replicas
        return engines

    with ServerProcess("bundled", *flags, "--api-key-file", str(keys)) as server:
        while any(each["state"] == "opening" for each in stores(server)):
            pass
        body = {"prompt": "snow " * 60, "max_tokens": 4, "temperature": 0}
        call(server, "POST", "/v1/completions", body)
        while not any(each["own_blocks"] for each in stores(server)):
            pass
        emptied = stores(server, "DELETE")
        assert [(each["state"], each["own_blocks"]) for each in emptied] == [("open", 0)] * replicas
        assert sorted(each["writer"] for each in emptied) == list(range(replicas))
