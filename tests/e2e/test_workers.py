"""A real server whose worker processes are killed again and again: no client notices."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.server_process import PATIENCE, ServerProcess

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(sys.platform != "linux", reason="/proc needs Linux"),
]
BUNDLED = str(Path(__file__).parents[2] / "chairlift" / "assets")
PROGRAMS = b"chairlift.text.tokenizer.template_worker", b"chairlift.text.grammar.checker"


def workers_of(pid: int) -> list[int]:
    """The worker processes of a server, also those that are starting."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            try:
                command = Path(f"/proc/{child}/cmdline").read_bytes()
            except OSError:
                continue
            found += [int(child)] if any(program in command for program in PROGRAMS) else []
    return found


def chat(number: int, model: str) -> dict[str, Any]:
    """A chat; every third one has a grammar of its own."""
    body: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": f"Hi {number}"}], "max_tokens": 3}
    if number % 3 == 0:
        schema = {"type": "object", "properties": {f"k{number}": {"type": "integer"}}}
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    return body


def test_kills_of_all_workers_are_not_noticed() -> None:
    async def test(server: ServerProcess) -> None:
        rng, statuses = random.Random(3), collections.Counter[int]()
        url = f"http://127.0.0.1:{server.port}"
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE, trust_env=False) as client:
            model = (await client.get("/v1/models")).json()["data"][0]["id"]

            async def ask(number: int) -> None:
                statuses[(await client.post("/v1/chat/completions", json=chat(number, model))).status_code] += 1

            number = kills = 0
            while kills < 30:
                asked = []
                for _ in range(7):
                    asked.append(asyncio.create_task(ask(number)))
                    number += 1
                for _ in range(rng.randrange(400)):
                    await asyncio.sleep(0)
                workers = workers_of(server.process.pid)
                kills += bool(workers)
                for pid in workers:
                    with contextlib.suppress(ProcessLookupError):  # it may have ended already
                        os.kill(pid, signal.SIGKILL)
                await asyncio.gather(*asked)
        assert statuses == {200: number}, statuses

    with ServerProcess(BUNDLED) as server:
        asyncio.run(test(server))
        assert "Traceback" not in server.log()
