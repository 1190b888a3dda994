"""Headers of routers in front of the server: who is charged, whose headers count, and who may see what."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from chairlift.config import ServerConfig
from chairlift.errors import ConfigError
from chairlift.server.app import make_app
from chairlift.server.auth import Caller
from chairlift.server.errors import ApiError
from chairlift.server.routers import TrustedProxies
from chairlift.service_class import parse_service_classes
from tests.server.fake_engine import FakeEngine, make_state

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
def test_what_is_no_id_is_refused(headers: list[tuple[bytes, bytes]]) -> None:
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
