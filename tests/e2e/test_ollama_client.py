"""The ``ollama`` package, as it is installed, against a real server with the bundled model."""

from __future__ import annotations

import json

import ollama
import pytest

from tests.e2e.server_process import ServerProcess

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
