"""The ``ollama`` packages for Python (as it is installed) and for Node (the newest), against real servers."""

from __future__ import annotations

import base64
import io
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import ollama
import pytest

from tests.e2e.server_process import ServerProcess
from tests.e2e.test_newest_clients import fetch
from tests.models.pooled import pooled_model, write_tokenizer
from tests.models.vision.tiny import picture, tiny_vlm
from tests.native import needs_kernels

pytestmark = pytest.mark.nightly

ASK = [{"role": "user", "content": "What is a KV cache?"}]
BRIEF = {"num_predict": 24, "temperature": 0}
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}


def look(city: str) -> str:
    """The weather at a place.

    Args:
        city: Name of the place.
    """
    return f"rain at {city}"


def test_all_calls_of_the_client() -> None:
    """One server answers all calls, so that the test starts only one."""
    with (
        ServerProcess("bundled", "--num-kv-blocks", "256") as server,
        ollama.Client(f"http://127.0.0.1:{server.port}") as client,
    ):
        generates(client)
        chats(client)
        tells_of_models(client)
        refuses(client)


def generates(client: ollama.Client) -> None:
    whole = client.generate("bundled", ASK[0]["content"], options=BRIEF)
    pieces = list(client.generate("bundled", ASK[0]["content"], options=BRIEF, stream=True))
    assert whole.response == "".join(piece.response or "" for piece in pieces)
    assert whole.response
    last = pieces[-1]
    assert last.done
    assert (last.done_reason, last.eval_count) == (whole.done_reason, whole.eval_count)
    for each in (whole, last):
        assert each.context is not None
        assert len(each.context) == (each.prompt_eval_count or 0) + (each.eval_count or 0)
        parts = (each.prompt_eval_duration or 0) + (each.eval_duration or 0)
        assert 0 < parts <= (each.total_duration or 0)
    again = client.generate("bundled", "And then?", context=whole.context, options=BRIEF)
    assert (again.prompt_eval_count or 0) > len(whole.context or ())
    raw = client.generate("bundled", "Continuous batching", raw=True, options=BRIEF)
    assert raw.response
    assert raw.context is None


def chats(client: ollama.Client) -> None:
    whole = client.chat("bundled:latest", ASK, options=BRIEF)
    pieces = list(client.chat("bundled", ASK, options=BRIEF, stream=True, keep_alive="5m"))
    assert whole.message.content == "".join(piece.message.content or "" for piece in pieces)
    assert whole.model == "bundled:latest"
    held = client.chat("bundled", ASK, format=SCHEMA, options={"num_predict": 64})
    assert isinstance(json.loads(held.message.content or "")["ok"], bool)
    loose = client.chat("bundled", ASK, format="json", options={"num_predict": 200})
    assert loose.done_reason == "length" or isinstance(json.loads(loose.message.content or ""), dict)


def tells_of_models(client: ollama.Client) -> None:
    assert [each.model for each in client.list().models] == ["bundled:latest"]
    (running,) = client.ps().models
    assert (running.size or 0) > 1_000_000
    shown = client.show("bundled")
    assert shown.capabilities == ["completion"]
    assert shown.details is not None
    assert (shown.modelinfo or {})[f"{shown.details.family}.context_length"] > 0
    assert [state.status for state in client.pull("bundled", stream=True)][-1] == "success"
    assert client.pull("bundled").status == "success"


def refuses(client: ollama.Client) -> None:
    for call, status in (
        (lambda: client.chat("llama3", ASK), 404),
        (lambda: client.pull("llama3"), 404),
        (lambda: client.embed("bundled", "x"), 400),
        (lambda: client.embeddings("bundled", "x"), 400),
        (lambda: client.generate("bundled", "a", suffix="b"), 400),
        (lambda: client.chat("bundled", ASK, options={"mirostat": 2}), 400),
        (lambda: client.chat("bundled", ASK, tools=[look]), 400),  # its template has no room for tools
        (lambda: client.create("mine", from_="bundled"), 400),
        (lambda: client.push("bundled"), 400),
        (lambda: client.copy("bundled", "other"), 400),
        (lambda: client.delete("bundled"), 400),
    ):
        with pytest.raises(ollama.ResponseError) as caught:
            call()
        assert caught.value.status_code == status
        assert not caught.value.error.startswith("{")


# --- the package for Node, and models that embed and that see ---------------------------------------------------------


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the newest ``ollama`` package for Node and the script that uses it."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    folder = tmp_path_factory.mktemp("node")
    (folder / "package.json").write_text('{"private": true, "type": "module"}')
    fetch("npm", "install", "--no-audit", "--no-fund", "ollama", cwd=folder)
    return Path(shutil.copy(Path(__file__).with_name("ollama_node.mjs"), folder))


def run_node(script: Path, server: ServerProcess, *words: str) -> dict[str, Any]:
    command = ["node", str(script), f"http://127.0.0.1:{server.port}", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    seen: dict[str, Any] = json.loads(done.stdout)
    return seen


def test_the_node_client_chats_and_asks(node: Path) -> None:
    with ServerProcess("bundled", "--num-kv-blocks", "256") as server:
        seen = run_node(node, server, "texts")
    assert seen["whole"] == seen["streamed"] == seen["generated"] != ""
    assert isinstance(seen["formed"]["ok"], bool)
    assert (seen["shown"], seen["running"], seen["pulled"]) == ("llama", ["bundled:latest"], "success")
    assert seen["version"].count(".") == 2 and seen["error"][0] == 404 and "nothing" in seen["error"][1]


def test_an_embedder_serves_both_clients(node: Path, tmp_path: Path) -> None:
    folder, _ = pooled_model(tmp_path, "bert", labels=0)
    write_tokenizer(folder)
    with ServerProcess(str(folder), "--threads", "1") as server:
        seen = run_node(node, server, "embed")
        with ollama.Client(f"http://127.0.0.1:{server.port}") as client:
            vectors = client.embed(seen["model"], ["A chair", "lift"]).embeddings
            assert client.show(seen["model"]).capabilities == ["embedding"]
    assert seen["lengths"] == [len(vector) for vector in vectors] == [seen["older"]] * 2
    assert seen["norms"] == pytest.approx([1, 1], abs=1e-4) and seen["count"] > 0


@needs_kernels
def test_a_model_that_sees_serves_both_clients(node: Path, tmp_path: Path) -> None:
    folder = tiny_vlm(tmp_path / "model")
    buffer = io.BytesIO()
    picture(1, 70, 50).save(buffer, "PNG")
    image = base64.b64encode(buffer.getvalue()).decode()
    with ServerProcess(str(folder), "--num-kv-blocks", "80", "--threads", "1", "--dtype", "float32") as server:
        seen = run_node(node, server, "images", image)
        with ollama.Client(f"http://127.0.0.1:{server.port}") as client:
            asked = [{"role": "user", "content": "What is it?", "images": [buffer.getvalue()]}]
            reply = client.chat(seen["model"], asked, options={"num_predict": 12})
    assert seen["counts"][0] > seen["counts"][1] + 3 and "vision" in seen["capabilities"]
    assert reply.prompt_eval_count == seen["counts"][0]
