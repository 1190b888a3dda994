"""A real server with several models whose engines take turns; one of them is killed."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.server_process import PATIENCE, ServerProcess

MODELS = (
    "models: {a: {model: 'hashlm:5ms', weight: 2}, b: {model: 'hashlm:5ms:seed=2'}, c: {model: 'hashlm:5ms:seed=3'}}"
)


def engines(server: ServerProcess) -> dict[str, int]:
    """Slot -> process id of the engines. The slot is the first argument after those of every engine."""
    found = {}
    for pid in server.children():
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
        if "turnstile.engine_process" in words[3]:
            found[words[7]] = pid
    return found


async def ask(client: httpx.AsyncClient, model: str, num_tokens: int) -> tuple[int, Any]:
    body = {"model": model, "prompt": [7, 8, 9], "max_tokens": num_tokens, "ignore_eos": True, "seed": 1}
    reply = await client.post("/v1/completions", json=body)
    return reply.status_code, reply.json()["choices"][0]["text"] if reply.status_code == 200 else reply.json()


async def num_running(client: httpx.AsyncClient, model: str) -> int:
    """Number of requests that a model computes."""
    reply = await client.get(f"/v1/requests?model={model}")
    return int(reply.json()["running"])


@pytest.mark.full
def test_an_engine_that_is_killed_takes_no_answer_of_other_models_with_it(tmp_path: Path) -> None:
    (tmp_path / "models.yaml").write_text(MODELS)

    async def check(server: ServerProcess) -> None:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=PATIENCE) as client:
            alone = {name: await ask(client, name, 600) for name in "abc"}
            assert all(status == 200 for status, _ in alone.values())
            pids = engines(server)
            assert sorted(pids) == ["0", "1", "2"]
            tasks = {name: asyncio.create_task(ask(client, name, 600 if name != "b" else 3000)) for name in "abc"}
            while not all([await num_running(client, name) for name in "abc"]):
                await asyncio.sleep(0.01)
            os.kill(pids["1"], signal.SIGKILL)
            status, body = await tasks["b"]
            assert status == 503, body
            assert await tasks["a"] == alone["a"] and await tasks["c"] == alone["c"]
            while (answer := await ask(client, "b", 600))[0] != 200:
                await asyncio.sleep(0.1)
            assert answer == alone["b"] and engines(server)["1"] != pids["1"]
        assert "has no effect" not in server.log()

    with ServerProcess(f"--models={tmp_path / 'models.yaml'}", "--models-memory-bytes", "4GB") as server:
        asyncio.run(check(server))
