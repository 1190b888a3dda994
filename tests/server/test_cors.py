"""Pages of other origins: refused, unless --cors-origin names theirs."""

from __future__ import annotations

import pytest
from starlette.testclient import TestClient

from chairlift.config import ServerConfig
from chairlift.errors import ConfigError
from chairlift.server.http.app import make_app
from tests.server.fake_engine import make_state

APP, EVIL = "https://app.example.org", "https://evil.example.org"
BODY = {"prompt": "x", "max_tokens": 2}


def client(*origins: str, key: str = "") -> TestClient:
    state = make_state(cors_origin=origins, api_key=(key,) if key else ())
    return TestClient(make_app(state), base_url="http://localhost")


def ask(http: TestClient, origin: str, **headers: str) -> tuple[int, str | None]:
    headers |= {"origin": origin, "sec-fetch-site": "cross-site"}
    reply = http.post("/v1/completions", json=BODY, headers=headers)
    return reply.status_code, reply.headers.get("access-control-allow-origin")


def test_cors_is_off_by_default() -> None:
    http = client()
    assert ask(http, APP) == (403, None)
    preflight = http.options("/v1/completions", headers={"origin": APP, "access-control-request-method": "POST"})
    assert "access-control-allow-origin" not in preflight.headers


def test_a_named_origin_may_ask_and_others_may_not() -> None:
    http = client(APP, "http://localhost:3000")
    assert ask(http, APP) == (200, APP)
    assert ask(http, "http://localhost:3000") == (200, "http://localhost:3000")
    for origin in (EVIL, APP + ":8443", APP + ".evil.org", "null", "http://app.example.org"):
        assert ask(http, origin) == (403, None)
    reply = http.post("/v1/completions", json={**BODY, "n": 99}, headers={"origin": APP})
    assert reply.status_code == 400 and reply.headers["access-control-allow-origin"] == APP
    assert "x-request-id" in reply.headers["access-control-expose-headers"]
    assert "access-control-allow-credentials" not in reply.headers and "Origin" in reply.headers["vary"]


def test_a_preflight_request_is_answered() -> None:
    http = client(APP, key="secret-key")
    wanted = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    good = http.options("/v1/completions", headers={"origin": APP, **wanted})
    assert good.status_code == 200 and good.headers["access-control-allow-origin"] == APP
    assert "authorization" in good.headers["access-control-allow-headers"]
    assert http.options("/v1/completions", headers={"origin": EVIL, **wanted}).status_code == 400
    assert ask(http, APP) == (401, APP), "a page may read that it needs a key"
    assert ask(http, APP, authorization="Bearer secret-key") == (200, APP)


def test_any_origin_may_ask_only_where_the_setting_is_a_star() -> None:
    http = client("*")
    assert ask(http, EVIL) == (200, "*")
    reply = http.post("/v1/completions", json=BODY, headers={"origin": EVIL, "cookie": "a=b"})
    assert "access-control-allow-credentials" not in reply.headers


@pytest.mark.parametrize(
    "origin",
    ["app.example.org", "https://", "https://a/", "https://a/b", "HTTPS://a", "https://*.a", "null", "https://a b"],
)
def test_a_malformed_origin_is_refused(origin: str) -> None:
    with pytest.raises(ConfigError, match="cors_origin must be"):
        ServerConfig(cors_origin=(origin,))
