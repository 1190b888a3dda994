"""GET /v1/queue: the line, what is expected of it, and who may see what."""

from __future__ import annotations

import time
from typing import Any

import pytest
from starlette.testclient import TestClient

from chairlift.base.service_class import parse_service_classes
from chairlift.core.request import Service
from chairlift.core.scheduler.forecast import Forecast
from chairlift.engine.intake import Place
from chairlift.server.http.app import make_app
from tests.server.fake_engine import FakeEngine, FakeStream, make_state


def ask(engine: FakeEngine, path: str = "/v1/queue", key: str = "", **settings: Any) -> Any:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with TestClient(make_app(make_state(engine, **settings)), base_url="http://localhost") as client:
        return client.get(path, headers=headers)


def put(
    engine: FakeEngine, name: str, tenant: str = "", start: float | None = None, tier: str = "default"
) -> FakeStream:
    """A request that waits behind those that are there."""
    stream = FakeStream(engine, [1, 2, 3], [], Service(tier, tenant), name)
    engine.streams.add(stream)
    engine.queued.append((stream, Place(stream.request_id, len(engine.queued) + 1, 0.25, start)))
    engine.num_queued = len(engine.queued)
    return stream


def test_an_empty_queue_has_no_wait() -> None:
    reply = ask(FakeEngine()).json()
    assert reply == {
        "object": "queue",
        "running": 0,
        "waiting": 0,
        "expected_wait_seconds": {"default": 0.0},
        "forecast_age_seconds": None,
        "calibration": {
            "samples": 0,
            "actual_over_predicted": {"p10": None, "p50": None, "p90": None},
            "within_ratio": {"1": None, "1.25": None, "2": None},
            "mean_absolute_error_seconds": None,
        },
        "autoscaling": None,
        "requests": [],
    }


def test_a_queue_with_a_forecast_shows_waits_by_class() -> None:
    engine = FakeEngine()
    engine.service_classes = parse_service_classes("")
    engine.waits = {"default": 4.5678, "flex": None}
    engine.stats.engine.num_running = 7
    engine.intake.foreseen(Forecast(time.monotonic() - 2, {}, {}, 0.0))
    for _ in range(20):
        engine.intake.calibration.add(2.0, 2.5)
    put(engine, "mine-1", start=1.23456)
    put(engine, "mine-2", tier="flex")
    reply = ask(engine).json()
    assert (reply["running"], reply["waiting"]) == (7, 2)
    assert reply["expected_wait_seconds"] == {"priority": 0.0, "default": 4.568, "flex": None}
    assert 2 <= reply["forecast_age_seconds"] < 5
    assert reply["calibration"] == {
        "samples": 20,
        "actual_over_predicted": {"p10": 1.25, "p50": 1.25, "p90": 1.25},
        "within_ratio": {"1": 0.0, "1.25": 1.0, "2": 1.0},
        "mean_absolute_error_seconds": 0.5,
    }
    common = {"waited_seconds": 0.25, "prompt_tokens": 3, "expected_load_seconds": None}
    assert reply["requests"] == [
        {"id": "mine-1", "position": 1, "expected_start_seconds": 1.235, "service_tier": "default", **common},
        {"id": "mine-2", "position": 2, "expected_start_seconds": None, "service_tier": "flex", **common},
    ]


def test_one_request_is_followed_until_it_has_ended() -> None:
    engine = FakeEngine()
    for name in ("first", "mine", "mine"):
        stream = put(engine, name)
    found = ask(engine, "/v1/queue?request_id=mine").json()
    assert [(each["id"], each["position"]) for each in found["requests"]] == [("mine", 2), ("mine", 3)]
    assert found["waiting"] == 3
    engine.queued.pop()
    found = ask(engine, "/v1/queue?request_id=mine").json()
    places = [(each["position"], each["expected_start_seconds"], each["waited_seconds"]) for each in found["requests"]]
    assert places == [(2, None, 0.25), (0, 0.0, None)]
    engine.queued.clear()
    engine.streams.clear()
    assert stream.name == "mine"
    gone = ask(engine, "/v1/queue?request_id=mine")
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "request_not_found")
    assert gone.json()["error"]["param"] == "request_id"
    assert ask(engine, "/v1/queue?request_id=%0d%0aX:%201").status_code == 404


def test_a_key_sees_its_own_tenants_requests_only(tmp_path: Any) -> None:
    file = tmp_path / "keys"
    file.write_text("alice sk-a\nbob sk-b\nalice sk-c\n")
    engine = FakeEngine()
    put(engine, "r1", "alice")
    put(engine, "r2", "bob")
    started = put(engine, "r3", "bob")
    engine.queued = [pair for pair in engine.queued if pair[0] is not started]
    settings = {"api_key_file": str(file)}
    assert ask(engine, **settings).status_code == 401
    for key, seen in (("sk-a", ["r1"]), ("sk-b", ["r2"]), ("sk-c", ["r1"])):
        reply = ask(engine, key=key, **settings).json()
        assert [each["id"] for each in reply["requests"]] == seen
        assert reply["waiting"] == 3
    assert ask(engine, "/v1/queue?request_id=r3", "sk-b", **settings).json()["requests"][0]["position"] == 0
    for name in ("r2", "r3"):
        assert ask(engine, f"/v1/queue?request_id={name}", "sk-a", **settings).status_code == 404


def test_one_key_sees_all() -> None:
    engine = FakeEngine()
    put(engine, "r1", "somebody")
    assert len(ask(engine, key="sk", api_key=("sk",)).json()["requests"]) == 1


def test_a_long_list_of_waiting_requests_is_cut() -> None:
    engine = FakeEngine()
    for index in range(1005):
        put(engine, f"r{index}")
    reply = ask(engine).json()
    assert (reply["waiting"], len(reply["requests"])) == (1005, 1000)
    assert ask(engine, "/v1/queue?request_id=r1004").json()["requests"][0]["position"] == 1005


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_requests_are_known_by_the_id_of_their_reply(path: str) -> None:
    engine = FakeEngine()
    body = {"prompt": ["a", "b"]} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "Hi"}]}
    with TestClient(make_app(make_state(engine)), base_url="http://localhost") as client:
        reply = client.post(path, json={**body, "max_tokens": 2}, headers={"X-Request-Id": "mine-17"})
        assert reply.headers["x-request-id"] == "mine-17"
        unnamed = client.post(path, json={**body, "max_tokens": 2}).headers["x-request-id"]
    count = len(body.get("prompt", "x"))
    assert engine.names == ["mine-17"] * count + [unnamed] * count
