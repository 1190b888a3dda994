"""GET /v1/replicas, POST /v1/replicas/restart and what /metrics and `chairlift top` show of replicas."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

from starlette.testclient import TestClient

from chairlift.cli.top_view import Metrics, Snapshot, text_of, view
from chairlift.errors import ConfigError, ReplicaStartError
from chairlift.metrics.stats import AutoscalingStats, ReplicaStats
from chairlift.server.http.app import make_app
from tests.server.fake_engine import FakeEngine, make_state


def replica(index: int, state: str, **more: Any) -> ReplicaStats:
    known = {"pid": os.getpid(), "unstarted": 1, "started": 2, "unstarted_tokens": 300, "kv_cache_usage": 0.123456}
    return ReplicaStats(index=index, state=state, **(known | {"sent": 40, "restarts": 0} | more))


def fleet() -> FakeEngine:
    """An engine with two replicas, one of which has no process."""
    engine = FakeEngine()
    gone = {"pid": None, "unstarted": 0, "started": 0, "unstarted_tokens": 0, "kv_cache_usage": 0.0}
    engine.replicas.known = [replica(0, "ready"), replica(1, "down", restarts=3, **gone)]
    return engine


def client(engine: FakeEngine, tmp_path: Path) -> TestClient:
    file = tmp_path / "keys"
    file.write_text("alice sk-alice\nadmin sk-admin\n")
    return TestClient(make_app(make_state(engine, api_key_file=str(file))), base_url="http://localhost")


def test_the_route_lists_every_replica_with_its_state(tmp_path: Path) -> None:
    with client(fleet(), tmp_path) as server:
        reply = server.get("/v1/replicas", headers={"Authorization": "Bearer sk-alice"}).json()
        assert reply["object"] == "replicas" and reply["waiting_at_door"] == 0
        assert reply["replicas"][0] == {
            **{"index": 0, "pid": os.getpid(), "state": "ready", "unstarted": 1, "started": 2},
            **{"unstarted_tokens": 300, "kv_cache_usage": 0.1235, "sent": 40, "restarts": 0},
        }
        assert (reply["replicas"][1]["state"], reply["replicas"][1]["pid"]) == ("down", None)
    with client(FakeEngine(), tmp_path) as server:
        reply = server.get("/v1/replicas", headers={"Authorization": "Bearer sk-alice"}).json()
        assert reply["replicas"] == []


def test_only_the_admin_restarts_replicas(tmp_path: Path) -> None:
    engine = fleet()
    with client(engine, tmp_path) as server:
        reply = server.post("/v1/replicas/restart", headers={"Authorization": "Bearer sk-alice"})
        assert (reply.status_code, reply.json()["error"]["code"]) == (403, "admin_key_needed")
        assert engine.replicas.patience == []
        reply = server.post("/v1/replicas/restart", headers={"Authorization": "Bearer sk-admin"})
        assert reply.status_code == 200 and len(reply.json()["replicas"]) == 2 and engine.replicas.patience == [30.0]
        engine.replicas.refusal = ConfigError("needs two replicas")
        reply = server.post("/v1/replicas/restart", headers={"Authorization": "Bearer sk-admin"})
        assert (reply.status_code, reply.json()["error"]["message"]) == (400, "needs two replicas")
        engine.replicas.refusal = ReplicaStartError("replica 0 cannot start: no such file")
        reply = server.post("/v1/replicas/restart", headers={"Authorization": "Bearer sk-admin"})
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "replica_not_started")
        assert reply.json()["error"]["message"] == "replica 0 cannot start: no such file"


def test_metrics_and_top_have_a_line_for_each(tmp_path: Path) -> None:
    with client(fleet(), tmp_path) as server:
        text = server.get("/metrics", headers={"Authorization": "Bearer sk-alice"}).text
    metrics = Metrics(text)
    assert [metrics.value("replica_up", replica=name) for name in "01"] == [1.0, 0.0]
    assert metrics.value("replica_requests_started", replica="0") == 2
    assert metrics.value("replica_unstarted_tokens", replica="0") == 300
    assert metrics.value("replica_requests_sent_total") == 80
    assert metrics.value("replica_restarts_total", replica="1") == 3
    memory = metrics.value("replica_resident_memory_bytes", replica="0")
    assert memory is not None and memory > 1e6 and metrics.value("replica_resident_memory_bytes", replica="1") is None
    assert metrics.value("engine_resident_memory_bytes") is None, "no single process is the engine"
    lines = [text_of(line) for line in view(Snapshot(1.0, "here", metrics=metrics), None, width=100, height=30)]
    assert "replica 0 ready  running    2  next    1  KV cache  12%  restarts 0" in lines
    assert "replica 1 away  running    0  next    0  KV cache   0%  restarts 3" in lines
    with client(FakeEngine(), tmp_path) as server:
        text = server.get("/metrics", headers={"Authorization": "Bearer sk-alice"}).text
    assert "replica_" not in text


def scaled() -> FakeEngine:
    """An engine with autoscaling, whose second replica is off."""
    engine = fleet()
    known = engine.replicas.known
    engine.replicas.known = [known[0], dataclasses.replace(known[1], state="off"), replica(2, "ready")]
    limits = {"min_replicas": 1, "max_replicas": 3, "wanted_replicas": 2, "starting_replicas": 1, "load": 0.45678}
    engine.replicas.scaling = AutoscalingStats(
        **limits, forecast_wait_seconds=0.25, num_added=4, last_change="from 1 to 2 replicas: ..."
    )
    return engine


def test_the_state_of_autoscaling_is_shown(tmp_path: Path) -> None:
    key = {"Authorization": "Bearer sk-alice"}
    with client(scaled(), tmp_path) as server:
        for path in ("/v1/replicas", "/v1/queue"):
            state = server.get(path, headers=key).json()["autoscaling"]
            assert (state["min_replicas"], state["wanted_replicas"], state["load"]) == (1, 2, 0.457)
            assert state["last_change"].startswith("from 1 to 2") and state["last_change_at"] is None
        assert [each["state"] for each in server.get("/v1/replicas", headers=key).json()["replicas"]][1] == "off"
        metrics = Metrics(server.get("/metrics", headers=key).text)
    assert metrics.value("autoscaling_replicas", what="max") == 3
    assert metrics.value("autoscaling_replicas", what="starting") == 1
    assert metrics.value("autoscaling_decisions_total", what="add") == 4
    assert metrics.value("autoscaling_forecast_wait_seconds") == 0.25
    assert list(metrics.values_of("replica_up", "replica")) == ["0", "2"], "a replica that is off is not down"
    lines = [text_of(line) for line in view(Snapshot(1.0, "here", metrics=metrics), None, width=100, height=30)]
    assert "replicas  2 wanted of 1-3, 1 starting  forecast wait 250ms  load 46%" in lines
    with client(fleet(), tmp_path) as server:
        assert server.get("/v1/replicas", headers=key).json()["autoscaling"] is None
        assert "autoscaling" not in server.get("/metrics", headers=key).text
