"""Adapters over HTTP: named by ``model``, listed with their parent, loaded and unloaded by the admin alone."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from chairlift.engine.adapter_names import AdapterEntry
from chairlift.engine.adapters import AdapterLoad
from chairlift.engine.served_adapters import ServedAdapters
from chairlift.errors import ConfigError, ModelLoadError, RequestError
from chairlift.server.http.app import make_app
from chairlift.server.operations.adapters import load_modules
from tests.server.fake_engine import FakeEngine, make_state

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}


class LoadedAtOnce(ServedAdapters):
    """Knows adapters by what it is told."""

    def __init__(self, error: Exception | None) -> None:
        super().__init__(lambda: None, lambda: None, enabled=True)
        self.error = error
        self.loads: list[tuple[str, str, str | None, bool]] = []

    async def load(
        self,
        name: str,
        path: str | Path,
        *,
        root: str | None = None,
        in_place: bool = False,
        int_id: int = 0,
        private: bool = False,
    ) -> None:
        if self.error is not None:
            raise self.error
        self.loads.append((name, str(path), root, in_place))
        self.names.add(AdapterEntry(self.names.next_load(name, str(path), root), is_private=private))


class LoadsNothing:
    """A core that must not be asked to load an adapter."""

    def load_adapter(self, load: AdapterLoad) -> None:
        raise AssertionError(f"{load.name} was loaded")

    def unload_adapter(self, adapter_id: int) -> None:
        raise AssertionError(f"adapter {adapter_id} was unloaded")


class Loading(FakeEngine):
    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.adapters: LoadedAtOnce = LoadedAtOnce(error)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "adapters" / "a").mkdir(parents=True)
    return tmp_path / "adapters"


def client_of(engine: FakeEngine, tmp_path: Path, root: Path | None, key: str = "sk-admin") -> TestClient:
    keys = tmp_path / "keys"
    keys.write_text("alice sk-alice\nadmin sk-admin\n")
    state = make_state(engine, api_key_file=str(keys), lora_dir=None if root is None else str(root))
    return TestClient(make_app(state), base_url="http://localhost", headers={"Authorization": f"Bearer {key}"})


def load(client: TestClient, path: str = "a", **more: Any) -> Any:
    return client.post("/v1/load_lora_adapter", json={"lora_name": "mine", "lora_path": path, **more})


def test_the_admin_loads_and_others_ask(tmp_path: Path, root: Path) -> None:
    engine = Loading()
    with client_of(engine, tmp_path, root) as client:
        assert load(client).json() == {"lora_name": "mine", "loaded": True}
        assert load(client, str(root / "a"), load_inplace=True).status_code == 200
    where = str((root / "a").resolve())
    assert engine.adapters.loads == [
        ("mine", where, str(root.resolve()), False),
        ("mine", where, str(root.resolve()), True),
    ]
    with client_of(engine, tmp_path, root, "sk-alice") as client:
        cards = {card["id"]: card for card in client.get("/v1/models").json()["data"]}
        assert cards["mine"]["parent"] == cards["mine"]["root"] == "fake" and cards["fake"]["parent"] is None
        assert client.get("/v1/models/mine").json()["parent"] == "fake"
        for model, adapter in (("mine", "mine"), ("fake", "")):
            reply = client.post("/v1/chat/completions", json={**CHAT, "model": model})
            assert reply.json()["model"] == model and engine.adapters_asked[-1] == adapter
            reply = client.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 2, "model": model})
            assert reply.json()["model"] == model and engine.adapters_asked[-1] == adapter
            reply = client.post("/v1/responses", json={"input": "Hi", "max_output_tokens": 16, "model": model})
            assert reply.json()["model"] == model and engine.adapters_asked[-1] == adapter
            reply = client.post("/v1/messages", json={**CHAT, "model": model})
            assert reply.json()["model"] == model and engine.adapters_asked[-1] == adapter
            assert client.post("/v1/messages/count_tokens", json={**CHAT, "model": model}).status_code == 200
        reply = client.post("/v1/chat/completions", json={**CHAT, "model": "yours"})
        assert reply.status_code == 404 and "mine" in reply.json()["error"]["message"]
    with client_of(engine, tmp_path, root) as client:
        body = {"lora_name": "mine"}
        assert client.post("/v1/unload_lora_adapter", json=body).json() == {"lora_name": "mine", "loaded": False}
        assert client.post("/v1/unload_lora_adapter", json=body).status_code == 404
        assert client.post("/v1/chat/completions", json={**CHAT, "model": "mine"}).status_code == 404


def test_no_request_sees_a_private_adapter(tmp_path: Path, root: Path) -> None:
    engine = Loading()
    asyncio.run(engine.adapters.load("hidden", root / "a", private=True))
    with client_of(engine, tmp_path, root) as client:
        assert {card["id"] for card in client.get("/v1/models").json()["data"]}.isdisjoint({"hidden"})
        assert "hidden" not in client.get("/api/tags").text
        replies = [client.get("/v1/models/hidden")]
        for path in ("/v1/chat/completions", "/v1/messages", "/api/chat"):
            body = {**CHAT, "model": "hidden"}
            if path == "/api/chat":
                del body["max_tokens"]
            replies.append(client.post(path, json=body))
        replies.append(client.post("/v1/unload_lora_adapter", json={"lora_name": "hidden"}))
        assert [reply.status_code for reply in replies] == [404] * 5
        assert all(reply.text.count("hidden") == 1 for reply in replies)
    assert engine.adapters.names.id_of("hidden") == 1


def test_a_private_adapter_and_a_public_one_do_not_replace_each_other() -> None:
    adapters = ServedAdapters(lambda: LoadsNothing(), lambda: None, enabled=True)
    adapters.names.add(AdapterEntry(adapters.names.next_load("hidden", "a"), is_private=True))
    adapters.names.add(AdapterEntry(adapters.names.next_load("shown", "a")))
    for name, private in (("hidden", False), ("shown", True)):
        with pytest.raises(RequestError, match="is loaded already"):
            asyncio.run(adapters.load(name, "b", in_place=True, private=private))


@pytest.mark.parametrize("path", ["/v1/load_lora_adapter", "/v1/unload_lora_adapter"])
def test_only_the_admin_loads_adapters(path: str, tmp_path: Path, root: Path) -> None:
    engine = Loading()
    with client_of(engine, tmp_path, root, "sk-alice") as client:
        reply = client.post(path, json={"lora_name": "mine", "lora_path": "a"})
        assert (reply.status_code, reply.json()["error"]["code"]) == (403, "admin_key_needed")
    with TestClient(make_app(make_state(engine)), base_url="http://localhost") as client:  # a server without keys
        assert client.post(path, json={"lora_name": "mine", "lora_path": "a"}).status_code == 403
    assert not engine.adapters.loads


@pytest.mark.parametrize("path", ["..", "/etc", "a/../../x", "link", "\0"])
def test_paths_outside_the_adapter_folder_are_refused_without_a_detail(path: str, tmp_path: Path, root: Path) -> None:
    (root / "link").symlink_to(tmp_path)
    engine = Loading()
    with client_of(engine, tmp_path, root) as client:
        reply = load(client, path)
    assert reply.status_code == 400 and "below the server's --lora-dir" in reply.json()["error"]["message"]
    assert not engine.adapters.loads


def test_refusals_say_what_to_do(tmp_path: Path, root: Path) -> None:
    with client_of(Loading(), tmp_path, None) as client:
        assert "--lora-dir" in load(client).json()["error"]["message"]
    with client_of(Loading(), tmp_path, root) as client:
        assert load(client, lora_name="fake").json()["error"]["param"] == "lora_name"
        assert load(client, lora_name="a b").json()["error"]["param"] == "lora_name"
        assert load(client, "").json()["error"]["param"] == "lora_path"
    for error in (ModelLoadError("rank 99"), RequestError("loaded already"), ConfigError("not served")):
        with client_of(Loading(error), tmp_path, root) as client:
            reply = load(client)
            assert reply.status_code == 400 and str(error) in reply.json()["error"]["message"]


def test_adapters_of_the_command_line_are_loaded(tmp_path: Path) -> None:
    async def test() -> None:
        engine = Loading()
        await load_modules(make_state(engine, lora_modules=(f"x={tmp_path}", "y=someone/adapter")))
        assert [each[:3] for each in engine.adapters.loads] == [
            ("x", str(tmp_path), None),
            ("y", "someone/adapter", None),
        ]
        in_json = '{"name": "z", "path": "someone/z", "base_model_name": "fake"}'
        await load_modules(make_state(engine, lora_modules=(in_json,)))
        assert engine.adapters.loads[-1][:2] == ("z", "someone/z")
        wrong = ('{"name": "z"}', '{"name": "z", "path": "a", "base_model_name": "other"}', "{")
        for module in ("x", "=a", "x=", "fake=a", *wrong):
            with pytest.raises(ConfigError, match="lora_modules"):
                await load_modules(make_state(engine, lora_modules=(module,)))
        with pytest.raises(ConfigError, match="rank 99"):
            await load_modules(make_state(Loading(ModelLoadError("rank 99")), lora_modules=("x=a",)))

    asyncio.run(test())
