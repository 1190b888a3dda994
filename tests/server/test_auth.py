"""No route but three without a key, under no spelling; no name but those that are known."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
from pathlib import Path
from typing import Any

import pytest

from chairlift.config import ServerConfig
from chairlift.errors import ConfigError
from chairlift.server.http import auth as auth_module
from chairlift.server.http.app import make_app
from chairlift.server.http.auth import (
    OPEN_PATHS,
    PAGES,
    Auth,
    HostCheck,
    check_exposure,
    check_origin,
    is_loopback,
    load_keys,
    salt_for,
)
from chairlift.server.http.errors import ApiError
from tests.server.harness import PATIENCE, Client, Endpoints, make_state, run, serving

KEY, OTHER = "sk-correct-horse", "sk-battery-staple"


def named(*keys: str) -> dict[str, str]:
    """Keys with a tenant each."""
    return {key: f"tenant of {key[-3:]}" for key in keys}


# --- the parts that decide -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sent", [KEY, OTHER])
def test_each_key_opens(sent: str) -> None:
    found = Auth(named(KEY, OTHER)).check("/v1/models", b"/v1/models", [f"Bearer {sent}".encode()])
    assert found.tenant == f"tenant of {sent[-3:]}"


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [b""],
        [b"Bearer"],
        [b"Bearer "],
        [b"Bearer sk-wrong"],
        [f"Bearer {KEY[:-1]}".encode()],
        [f"Bearer {KEY}x".encode()],
        [f"Bearer {KEY} {KEY}".encode()],
        [f"Basic {KEY}".encode()],
        [KEY.encode()],
        [f"Bearer {KEY}".encode(), f"Bearer {KEY}".encode()],
        [b"Bearer \xff\x00"],
    ],
)
def test_nothing_but_a_key_opens(headers: list[bytes]) -> None:
    with pytest.raises(ApiError) as caught:
        Auth(named(KEY, OTHER)).check("/v1/models", b"/v1/models", headers)
    assert caught.value.status == 401
    assert caught.value.headers["www-authenticate"] == "Bearer"
    assert not any(key in caught.value.message for key in (KEY, OTHER, "sk-wrong"))


def test_open_paths_are_matched_exactly() -> None:
    auth = Auth(named(KEY))
    for path in OPEN_PATHS:
        auth.check(path, path.encode(), [])
        for raw in (path.encode() + b"/", b"/" + path.encode(), path.replace("h", "%68").encode() + b"?", b"//"):
            with pytest.raises(ApiError):
                auth.check(path, raw, [])
    with pytest.raises(ApiError):
        auth.check("/health/", b"/health/", [])


def test_all_keys_are_compared_by_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time must not tell which key was close: each is compared, over digests of one length, also after a match."""
    compared: list[tuple[bytes, bytes]] = []
    compare = hmac.compare_digest

    def record(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return compare(a, b)

    monkeypatch.setattr(auth_module.hmac, "compare_digest", record)
    Auth(named(KEY, OTHER, "third")).check("/x", b"/x", [f"Bearer {KEY}".encode()])
    assert len(compared) == 3
    assert all(len(a) == len(b) == hashlib.sha256().digest_size for a, b in compared)


def test_keys_come_from_flags_and_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# staff\n{KEY}\n\n  {OTHER}  \n{KEY}\n")
    assert list(load_keys(ServerConfig(api_key=("first",), api_key_file=str(file)))) == ["first", KEY, OTHER]
    assert load_keys(ServerConfig()) == {}


def test_keys_have_names_and_names_do_not_give_keys_away(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"alice {KEY}\nbob\t{OTHER}\nalice sk-new\nsk-nameless\n")
    keys = load_keys(ServerConfig(api_key=("sk-flag", KEY), api_key_file=str(file)))
    assert (keys[KEY], keys[OTHER], keys["sk-new"]) == ("alice", "bob", "alice")
    for key in ("sk-flag", "sk-nameless"):
        assert re.fullmatch("key-[0-9a-f]{12}", keys[key])
        assert keys[key][4:] not in hashlib.sha256(key.encode()).hexdigest()
    assert keys["sk-flag"] != keys["sk-nameless"]
    assert load_keys(ServerConfig(api_key=("sk-flag",)))["sk-flag"] == keys["sk-flag"], "the same after a restart"
    auth = Auth(keys)
    assert auth.check("/v1/models", b"/v1/models", [f"Bearer {OTHER}".encode()]).tenant == "bob"
    file.write_text(f"alice {KEY}\n{KEY}\n")
    assert load_keys(ServerConfig(api_key_file=str(file))) == {KEY: "alice"}
    file.write_text(f"alice {KEY}\nbob {KEY}\n")
    with pytest.raises(ConfigError, match="as 'alice' and as 'bob'; give each key one name"):
        load_keys(ServerConfig(api_key_file=str(file)))
    with pytest.raises(ConfigError, match="without spaces"):
        load_keys(ServerConfig(api_key=("alice sk-1",)))


@pytest.mark.parametrize(
    "content", ["", "# nothing\n", "three words here\n", "1st key\n", "x" * 513, "schl\u00fcssel\n"]
)
def test_unusable_key_files_are_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "keys"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match="key"):
        load_keys(ServerConfig(api_key_file=str(file)))


def test_a_missing_key_file_is_no_open_door(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        load_keys(ServerConfig(api_key_file=str(tmp_path / "none")))


@pytest.mark.parametrize("address", ["127.0.0.1", "127.8.8.8", "::1"])
def test_a_loopback_address_needs_no_key(address: str) -> None:
    assert is_loopback(address)
    check_exposure(address, (), insecure=False)


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "192.168.1.5", "8.8.8.8", "fe80::1%eth0"])
def test_other_addresses_need_a_key(address: str) -> None:
    with pytest.raises(ConfigError, match=r"--api-key-file.*--insecure"):
        check_exposure(address, (), insecure=False)
    check_exposure(address, (KEY,), insecure=False)
    check_exposure(address, (), insecure=True)


def outcome(check: HostCheck, *hosts: bytes) -> int:
    try:
        check.check(hosts)
    except ApiError as error:
        return error.status
    return 200


@pytest.mark.parametrize(
    ("host", "status"),
    [
        (b"localhost", 200),
        (b"LOCALHOST:8000", 200),
        (b"localhost.", 200),
        (b"127.0.0.1:8000", 200),
        (b"[::1]:8000", 200),
        (b"models.example", 200),
        (b"evil.example", 421),
        (b"evil.models.example", 421),
        (b"localhost.evil.example", 421),
        (b"10.1.2.3", 421),
        (b"[::2]", 421),
        (b"", 400),
        (b"local host", 400),
        (b"localhost:port", 400),
        (b"localhost:8000:1", 400),
        (b"localhost/path", 400),
        (b"user@localhost", 400),
        (b"localhost,evil", 400),
        (b"::1", 400),
        (b"h\xf6st", 400),
    ],
)
def test_only_known_host_names_are_answered(host: bytes, status: int) -> None:
    assert outcome(HostCheck("127.0.0.1", ("models.example",), has_keys=False), host) == status


def test_a_request_needs_exactly_one_host_header() -> None:
    check = HostCheck("127.0.0.1", (), has_keys=False)
    assert outcome(check) == 400
    assert outcome(check, b"localhost", b"localhost") == 400


def test_every_address_is_known_by_its_numbers_and_with_keys_by_any_name() -> None:
    open_door = HostCheck("0.0.0.0", (), has_keys=False)
    assert [outcome(open_door, host) for host in (b"10.1.2.3:80", b"[fe80::2]", b"evil.example")] == [200, 200, 421]
    assert outcome(HostCheck("0.0.0.0", (), has_keys=True), b"pod.cluster.local") == 200
    assert outcome(HostCheck("0.0.0.0", ("models.example",), has_keys=True), b"pod.cluster.local") == 421
    assert outcome(HostCheck("10.0.0.5", (), has_keys=True), b"evil.example") == 421


# --- every route, every trick ----------------------------------------------------------------------------------------

PATHS = [
    *("/v1/models", "/v1/models/tiny", "/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"),
    *("/metrics", "/load", "/version", "/ping", "/docs", "/openapi.json", "/v1/stream"),
]


def spellings(path: str) -> list[str]:
    return [
        path,
        f"/{path}",
        f"{path}/",
        f"/health/..{path}",
        f"/health/%2e%2e{path}",
        f"/health/..;{path}",
        f"/.{path}",
        f"/%2e{path}",
        f"{path}?/health",
        f"{path}%00",
        f"{path}#/health",
        path.replace("/", "/%2f", 1),
        f"/%68ealth/..{path}",
        f"http://localhost/health/..{path}",
        f"/health%2f..{path}",
    ]


async def refused(client: Client, path: str, *headers: str, method: str = "GET", host: str = "localhost") -> int:
    reply = await client.get(path, *headers, method=method, host=host)
    if method != "HEAD":
        assert reply.error["message"]
    assert reply.status >= 400, (method, path, headers, host)
    return reply.status


def test_no_trick_opens_a_route() -> None:
    async def test() -> None:
        async with serving(make_app(make_state(api_key=(KEY,)))) as client:
            for path in PATHS:
                for spelling in spellings(path):
                    for headers in ((), ("Authorization: Bearer sk-wrong",), ("X-Forwarded-For: 127.0.0.1",)):
                        await refused(client, spelling, *headers)
                for method in ("HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "PROPFIND", "BREW"):
                    await refused(client, path, method=method)
                for host in ("localhost/health", "evil.example", "localhost@evil.example", "health"):
                    assert await refused(client, path, host=host) in (400, 421)
                reply = await client.get(path, "Host: localhost", f"Authorization: Bearer {KEY}")
                assert reply.status == 400  # two Host headers

    run(test())


def test_only_the_open_routes_are_answered_without_a_key() -> None:
    async def test() -> None:
        async with serving(make_app(make_state(api_key=(KEY, OTHER)))) as client:
            for path in OPEN_PATHS:
                assert (await client.get(path)).status == (307 if path == "/live/" else 200)
                assert (await client.get(path + "?x=1")).status == (307 if path == "/live/" else 200)
            for spelling in ("/%68ealth", "//health", "/health/", "/./health", "/ready/", "/%2f"):
                assert (await client.get(spelling)).status == 401
            for key in (KEY, OTHER):
                assert (await client.get("/version", f"Authorization: Bearer {key}")).status == 200

    run(test())


def test_no_cross_origin_permission_is_ever_given() -> None:
    async def test() -> None:
        async with serving(make_app(make_state(), Endpoints().routes)) as client:
            preflight = ("Origin: http://evil.example", "Access-Control-Request-Method: POST")
            replies = [
                await client.get("/v1/echo", *preflight, method="OPTIONS"),
                await client.get("/v1/models", "Origin: http://evil.example"),
                await client.post("/v1/echo", b"{}", "Origin: http://evil.example"),
            ]
            assert [reply.status for reply in replies] == [403, 403, 403]
            assert not [name for reply in replies for name in reply.headers if name.startswith("access-control")]

    run(test())


EVIL = "http://evil.example"
FORGED = {
    "a page's picture or script": ["Sec-Fetch-Site: cross-site", "Sec-Fetch-Mode: no-cors"],
    "a page's fetch": ["Sec-Fetch-Site: cross-site", "Sec-Fetch-Mode: cors", f"Origin: {EVIL}"],
    "a page on another port of this machine": ["Sec-Fetch-Site: same-site", "Origin: http://localhost:3000"],
    "a form": ["Sec-Fetch-Site: cross-site", "Sec-Fetch-Mode: navigate", f"Origin: {EVIL}"],
    "a link to an answer": ["Sec-Fetch-Site: cross-site", "Sec-Fetch-Mode: navigate"],
    "an old browser": [f"Origin: {EVIL}"],
    "a file, or a frame in a sandbox": ["Origin: null"],
    "a page that hides": ["Sec-Fetch-Site: cross-site", "Origin: http://localhost"],
    "another port": ["Origin: http://localhost:1"],
    "nonsense": ["Sec-Fetch-Site: "],
}
OWN = {
    "a program": [],
    "its own page": ["Sec-Fetch-Site: same-origin", "Sec-Fetch-Mode: cors"],
    "the address bar": ["Sec-Fetch-Site: none", "Sec-Fetch-Mode: navigate"],
    "its own page, posting": ["Sec-Fetch-Site: same-origin", "Origin: http://{host}"],
    "its own page in an old browser": ["Origin: http://{host}"],
    "its own page behind TLS": ["Origin: https://{host}"],
}


@pytest.mark.parametrize("whose", FORGED)
def test_no_page_of_another_origin_makes_the_server_work(whose: str) -> None:
    """Whatever there is: every path with every method, with and without a body that needs no preflight."""

    async def test() -> None:
        app: Any = make_app(make_state())
        routes = [(route.path, method) for route in app._router.routes for method in route.methods]
        assert len({path for path, _ in routes}) > 20
        async with serving(app) as client:
            host = f"localhost:{client.port}"
            for path, method in routes:
                headers = [f"Host: {host}", *FORGED[whose], "Content-Type: text/plain", "Content-Length: 0"]
                async with asyncio.timeout(PATIENCE):
                    connection = await client.connect()
                    connection.get(path.replace("{model:path}", "x"), *headers, method=method, host=None)
                    status, _ = await connection.head()
                    await connection.close()
                if path in PAGES:
                    assert status in (200, 307, 503)
                else:
                    assert status == 403, (path, method)
            assert app._state.live is None and app._state.num_in_progress == 0

    run(test())


@pytest.mark.parametrize("whose", OWN)
def test_its_own_pages_and_programs_are_answered(whose: str) -> None:
    async def test() -> None:
        async with serving(make_app(make_state(), Endpoints().routes)) as client:
            for host in (f"localhost:{client.port}", f"127.0.0.1:{client.port}", "localhost"):
                headers = [line.format(host=host) for line in OWN[whose]]
                connection = await client.connect()
                connection.get("/v1/models", *headers, host=host)
                assert (await connection.reply()).status == 200

    run(test())


def test_a_page_that_has_the_key_may_ask_and_one_that_has_none_may_not() -> None:
    """Behind a proxy that permits it, say. A browser adds no key by itself, so nothing can be forged."""

    async def test() -> None:
        async with serving(make_app(make_state(api_key=(KEY,)), Endpoints().routes)) as client:
            foreign = ["Sec-Fetch-Site: cross-site", f"Origin: {EVIL}"]
            assert (await client.get("/v1/models", *foreign, f"Authorization: Bearer {KEY}")).status == 200
            assert (await client.get("/v1/models", *foreign)).status == 401

    run(test())


def test_a_refused_page_is_told_what_to_do() -> None:
    with pytest.raises(ApiError) as caught:
        check_origin("/v1/traffic", b"localhost:8000", [b"cross-site"], [EVIL.encode()])
    assert (caught.value.status, caught.value.code) == (403, "cross_origin")
    assert f"for a page of '{EVIL}', but" in caught.value.message
    with pytest.raises(ApiError, match="for a page of another site, but"):
        check_origin("/v1/traffic", b"localhost:8000", [b"cross-site"], [])
    for part in (EVIL, "localhost:8000", "--api-key-file"):
        assert part in caught.value.message


def test_keys_share_no_cache_and_one_key_does() -> None:
    two, one = Auth(named("a", "b")), Auth(named("a"))

    def holder(auth: Auth, key: str) -> str:
        return auth.check("/v1/models", b"/v1/models", [b"Bearer " + key.encode()]).holder

    assert holder(one, "a") == "" and salt_for("", "mine") == "mine"
    first, second = holder(two, "a"), holder(two, "b")
    salts = {salt_for(name, salt) for name in (first, second) for salt in ("", "x")}
    assert len(salts) == 4 and all(re.fullmatch("[A-Za-z0-9_-]{1,64}", salt) for salt in salts)
    assert salt_for(first, "x") == salt_for(holder(two, "a"), "x")
