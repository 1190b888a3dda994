"""POST /update_weights: the admin's alone, checked like every body, and told what became of it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from chairlift.engine.info import EngineInfo
from chairlift.errors import ModelLoadError
from chairlift.server.http.app import make_app
from tests.server.fake_engine import INFO, FakeEngine, make_state

BODY = {"path": "/models/new", "version": 4}


class Updating(FakeEngine):
    """Notes what it was asked to serve."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.asked: list[tuple[str, int, str]] = []
        self.error = error

    async def update_weights(self, source: str, version: int, *, in_flight: str) -> EngineInfo:
        if self.error is not None:
            raise self.error
        self.asked.append((source, version, in_flight))
        return INFO.updated(source, version, ())


def post(engine: FakeEngine, tmp_path: Path, body: Any = BODY, key: str = "sk-admin", keys: str = "") -> Any:
    file = tmp_path / "keys"
    file.write_text(keys or "alice sk-alice\nadmin sk-admin\n")
    app = make_app(make_state(engine, api_key_file=str(file)))
    with TestClient(app, base_url="http://localhost") as client:
        return client.post("/update_weights", json=body, headers={"Authorization": f"Bearer {key}"})


def test_the_admin_replaces_the_weights(tmp_path: Path) -> None:
    engine = Updating()
    reply = post(engine, tmp_path, BODY | {"in_flight": "recompute"})
    assert engine.asked == [("/models/new", 4, "recompute")]
    assert reply.json() == {"version": 4, "system_fingerprint": INFO.updated("/models/new", 4, ()).fingerprint}
    assert post(engine, tmp_path, keys="admin sk-admin\n").status_code == 200, "also when there is no other key"
    fingerprints = {
        info.fingerprint
        for info in (INFO, INFO.updated("a", 1, ()), INFO.updated("a", 2, ()), INFO.updated("b", 2, ()))
    }
    assert len(fingerprints) == 4
    assert (
        dataclasses.replace(INFO.updated("a", 1, ()), fingerprint=INFO.fingerprint, weights="", weight_version=0)
        == INFO
    )


@pytest.mark.parametrize("keys", ["alice sk-alice\nadmin sk-admin\n", "sk-alice\n"])
def test_only_the_admin_replaces_the_weights(tmp_path: Path, keys: str) -> None:
    engine = Updating()
    reply = post(engine, tmp_path, key="sk-alice", keys=keys)
    assert (reply.status_code, reply.json()["error"]["code"]) == (403, "admin_key_needed")
    with TestClient(make_app(make_state(engine)), base_url="http://localhost") as client:  # a server without keys
        assert client.post("/update_weights", json=BODY).status_code == 403
    assert not engine.asked


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"path": ""}, "path"),
        ({"version": -1}, "version"),
        ({"version": "4"}, "version"),
        ({"in_flight": "x"}, "in_flight"),
    ],
)
def test_bad_bodies_name_the_field(tmp_path: Path, change: dict[str, Any], field: str) -> None:
    engine = Updating()
    reply = post(engine, tmp_path, BODY | change)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, field)
    assert not engine.asked


def test_weights_that_do_not_fit_are_told_in_a_sentence(tmp_path: Path) -> None:
    reply = post(Updating(ModelLoadError("a.b has shape [1], but config.json asks for [2]")), tmp_path)
    assert reply.status_code == 400
    assert reply.json()["error"]["message"] == (
        "a.b has shape [1], but config.json asks for [2]; the weights are those from before"
    )
