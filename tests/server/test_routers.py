"""Headers of routers in front of the server: who is charged, whose headers count, and who may see what."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from chairlift.base.service_class import parse_service_classes
from chairlift.config import ServerConfig
from chairlift.errors import ConfigError
from chairlift.server.http.app import make_app
from chairlift.server.http.auth import Caller
from chairlift.server.http.errors import ApiError
from chairlift.server.http.routers import TrustedProxies
from tests.server.fake_engine import FakeEngine, make_state
from tests.server.harness import INFO, StateOnlyEngine, run, serving
from tests.server.harness import make_state as harness_state

GATEWAY, LLM_D = b"x-gateway-inference-fairness-id", b"x-llm-d-inference-fairness-id"
BODY = {"prompt": "Hi", "user": "bob", "max_tokens": 2}


def send(engine: FakeEngine, headers: dict[str, str], address: str = "10.1.2.3", **settings: Any) -> str:
    """Tenant of a request that came from this address with these headers."""
    state = make_state(engine, **settings)
    with TestClient(make_app(state), base_url="http://localhost", client=(address, 40000)) as client:
        reply = client.post("/v1/completions", json=BODY, headers=headers)
    assert reply.status_code == 200, reply.text
    tenant: str = engine.services[-1].tenant
    return tenant


@pytest.fixture
def engine() -> FakeEngine:
    engine = FakeEngine()
    engine.service_classes = parse_service_classes("")
    return engine


@pytest.mark.parametrize("name", [GATEWAY.decode(), LLM_D.decode()])
def test_the_header_of_a_trusted_router_names_the_tenant(engine: FakeEngine, name: str) -> None:
    trusted: dict[str, Any] = {"trusted_proxy": ("192.168.7.1", "10.0.0.0/8")}
    assert send(engine, {name: "team-a"}, **trusted) == "team-a"
    assert send(engine, {name: "team-a"}, address="::ffff:10.1.2.3", **trusted) == "team-a"
    assert send(engine, {}, **trusted) == "bob"
    assert send(engine, {name: " "}, **trusted) == "bob"
    for address in ("11.0.0.1", "192.168.7.2", "testclient", "fe80::1%eth0"):
        assert send(engine, {name: "team-a"}, address=address, **trusted) == "bob"
    assert send(engine, {name: "team-a"}) == "bob"
    engine.service_classes = None
    assert send(engine, {name: "team-a"}, **trusted) == ""


def test_with_keys_an_id_is_no_tenant_of_a_key(engine: FakeEngine, tmp_path: Path) -> None:
    """A client that names itself admin, or like another key's tenant, gets nothing by it."""
    (tmp_path / "keys").write_text("gateway sk-1\nalice sk-2\nadmin sk-3\n")
    settings: dict[str, Any] = {"trusted_proxy": ("10.0.0.0/8",), "api_key_file": str(tmp_path / "keys")}
    for name in ("alice", "admin"):
        headers = {"authorization": "Bearer sk-1", GATEWAY.decode(): name}
        assert send(engine, headers, **settings) == f"gateway/{name}"
        with TestClient(
            make_app(make_state(engine, **settings)), base_url="http://localhost", client=("10.1.2.3", 1)
        ) as client:
            assert client.post("/v1/replicas/restart", headers=headers).json()["error"]["code"] == "admin_key_needed"
    sees = {name: Caller("a holder", name).sees for name in ("gateway", "alice", "admin")}
    assert sees["gateway"]("gateway/alice") and sees["gateway"]("gateway") and not sees["gateway"]("alice")
    assert sees["admin"]("gateway/alice") and not sees["alice"]("gateway/alice") and sees["alice"]("alice")


@pytest.mark.parametrize(
    "headers",
    [
        [(GATEWAY, b"a"), (GATEWAY, b"b")],
        [(GATEWAY, b"a"), (LLM_D, b"b")],
        [(LLM_D, b"a b")],
        [(LLM_D, b"\xc3\xa9")],
        [(GATEWAY, b"x" * 129)],
    ],
)
def test_a_header_that_is_no_id_is_refused(headers: list[tuple[bytes, bytes]]) -> None:
    proxies = TrustedProxies(["10.0.0.0/8"])
    with pytest.raises(ApiError, match="one id of 1 to 128 visible ASCII") as caught:
        proxies.fairness_id(("10.0.0.1", 1), headers)
    assert caught.value.status == 400
    assert proxies.fairness_id(("11.0.0.1", 1), headers) == "" and proxies.fairness_id(None, headers) == ""


def test_the_same_id_in_both_headers_counts_once() -> None:
    proxies = TrustedProxies(["10.0.0.1"])
    assert proxies.fairness_id(("10.0.0.1", 1), [(GATEWAY, b"a"), (LLM_D, b" a "), (b"host", b"x")]) == "a"
    assert not TrustedProxies(())


def test_a_setting_that_is_no_network_is_refused() -> None:
    for text in ("gateway.local", "10.0.0.0/40", "10.0.0.0/8 x"):
        with pytest.raises(ConfigError, match="trusted_proxy must be addresses or networks such as"):
            ServerConfig(trusted_proxy=(text,))


READ_BY_ROUTERS = {
    "endpoint picker and llm-d": {
        "vllm:num_requests_waiting": ("gauge", 3.0),
        "vllm:num_requests_running": ("gauge", 5.0),
        "vllm:kv_cache_usage_perc": ("gauge", 0.25),
        "vllm:cache_config_info": ("gauge", 1.0),
        "vllm:lora_requests_info": ("gauge", None),
        "vllm:num_preemptions_total": ("counter", 7.0),
    },
    "production stack": {
        "vllm:num_requests_waiting": ("gauge", 3.0),
        "vllm:num_requests_running": ("gauge", 5.0),
        "vllm:gpu_cache_usage_perc": ("gauge", 0.25),
        "vllm:gpu_prefix_cache_hits_total": ("counter", 90.0),
        "vllm:gpu_prefix_cache_queries_total": ("counter", 200.0),
    },
}
"""Router -> names of metrics in its documentation -> (type, value in the test's state; None: the time)."""
INFO_LABELS = {
    "vllm:cache_config_info": {"block_size": str(INFO.block_size), "num_gpu_blocks": str(INFO.num_blocks)},
    "vllm:lora_requests_info": {
        "max_lora": "4",
        "running_lora_adapters": "sql,law",
        "waiting_lora_adapters": "law",
    },
}
"""Name of a metric -> labels that the endpoint picker reads."""


@pytest.mark.parametrize("router", READ_BY_ROUTERS)
def test_metrics_have_the_names_that_routers_read(router: str) -> None:
    engine = StateOnlyEngine()
    engine.num_queued, stats = 3, engine.stats.engine
    stats.num_running, stats.num_preemptions, stats.max_loras = 5, 7, 4
    stats.used_blocks, stats.cached_blocks, stats.free_blocks = 25, 15, 60
    stats.prefix_cache_hits, stats.prefix_cache_queries = 90, 200
    stats.running_adapters, stats.waiting_adapters = ["sql", "law"], ["law"]
    bodies: list[str] = []

    async def scrape() -> None:
        async with serving(make_app(harness_state(engine, metrics_prefix="vllm"))) as client:
            bodies.append((await client.get("/metrics")).body.decode())

    run(scrape())
    families = list(text_string_to_metric_families(bodies[0]))
    found = {sample.name: (family.type, sample) for family in families for sample in family.samples}
    for name, (kind, value) in READ_BY_ROUTERS[router].items():
        assert name in found, name
        assert found[name][0] == kind, name
        sample = found[name][1]
        assert value is None or sample.value == value, name
        assert INFO_LABELS.get(name, {}).items() <= sample.labels.items(), name


@pytest.mark.parametrize(
    "headers",
    [
        {"x-gateway-destination-endpoint": "10.0.0.7:8000"},
        {"x-gateway-model-name-rewrite": "other", "x-gateway-inference-objective": "batch"},
        {"x-envoy-attempt-count": "2", "x-forwarded-for": "1.2.3.4", "x-request-id": "from-envoy"},
    ],
    ids=["destination", "objective", "envoy"],
)
def test_other_headers_of_routers_change_nothing(engine: FakeEngine, headers: dict[str, str]) -> None:
    """The gateway, not the server, acts on these headers. A request id is the only one that comes back."""
    state = make_state(engine, trusted_proxy=("10.0.0.0/8",))
    with TestClient(make_app(state), base_url="http://localhost", client=("10.1.2.3", 1)) as client:
        plain = client.post("/v1/completions", json=BODY)
        reply = client.post("/v1/completions", json=BODY, headers=headers)
    assert (reply.status_code, reply.json()["choices"]) == (200, plain.json()["choices"])
    assert engine.services[-1] == engine.services[-2]
    if "x-request-id" in headers:
        assert reply.headers["x-request-id"] == "from-envoy"
