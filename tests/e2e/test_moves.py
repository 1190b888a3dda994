"""Streams of a real server go on at another replica while theirs is drained, whatever happens to the move."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import openai
import pytest

from chairlift.base.sampling_params import SamplingParams
from chairlift.cli.top_view import Metrics
from tests.e2e.oracle import expected_hashlm
from tests.e2e.server_process import PATIENCE, ServerProcess

_ADMIN = "sk-of-the-admin"
_STREAMS = 16
_TOKENS = 300


def _ask(server: ServerProcess, method: str, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
    connection.request(method, path, headers={"Authorization": f"Bearer {_ADMIN}"})
    response = connection.getresponse()
    found = response.status, response.read().decode()
    connection.close()
    return found


def _prompt(number: int) -> list[int]:
    return [(7 * number + place) % 200 + 3 for place in range(40 + 5 * number)]


def _params(number: int) -> dict[str, Any]:
    return {"max_tokens": _TOKENS, "seed": number, "temperature": float(number % 2)}


class _Streams:
    """Streams of one server. ``begun`` is set when each has some tokens."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server
        self._num_begun = 0
        self.begun = asyncio.Event()

    async def run(self) -> list[str]:
        url = f"http://127.0.0.1:{self._server.port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key=_ADMIN, max_retries=0) as client:
            return await asyncio.gather(*(self._one(client, number) for number in range(_STREAMS)))

    async def _one(self, client: openai.AsyncOpenAI, number: int) -> str:
        stream = await client.completions.create(
            model=self._server.model,
            prompt=_prompt(number),
            stream=True,
            extra_body={"ignore_eos": True},
            **_params(number),
        )
        parts: list[str] = []
        async for chunk in stream:
            parts += [each.text for each in chunk.choices]
            if len(parts) == 20:
                self._num_begun += 1
                if self._num_begun == _STREAMS:
                    self.begun.set()
        return "".join(parts)


async def _trouble(server: ServerProcess, what: str) -> None:
    """Lose or stop the replica to which requests move, as soon as the other one is drained."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        _, reply = await asyncio.to_thread(_ask, server, "GET", "/v1/replicas")
        states = {each["state"]: each["pid"] for each in json.loads(reply)["replicas"]}
        if "draining" in states and "ready" in states:
            os.kill(states["ready"], signal.SIGKILL if what == "lost" else signal.SIGSTOP)
            return
        await asyncio.sleep(0.005)
    raise AssertionError("no replica was drained")


@pytest.mark.parametrize(
    "what",
    [
        pytest.param("nothing", marks=pytest.mark.full),
        pytest.param("lost", marks=pytest.mark.nightly),
        pytest.param("hung", marks=pytest.mark.nightly),
    ],
)
def test_a_rolling_restart_loses_no_token(what: str, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"admin {_ADMIN}\n")
    flags = ["--replicas", "2", "--max-num-seqs", "32", "--api-key-file", str(keys), "--health-timeout", "3"]
    flags += ["--kv-store", str(tmp_path / "store"), "--kv-store-bytes", "64MB", "--shutdown-timeout", "60"]

    async def test(server: ServerProcess) -> tuple[list[str], int]:
        streams = _Streams(server)
        answers = asyncio.create_task(streams.run())
        await asyncio.wait_for(streams.begun.wait(), PATIENCE)
        trouble = asyncio.create_task(_trouble(server, what)) if what != "nothing" else None
        status, _ = await asyncio.to_thread(_ask, server, "POST", "/v1/replicas/restart")
        if trouble is not None:
            with contextlib.suppress(ProcessLookupError):
                await trouble
        return await answers, status

    with ServerProcess("hashlm:20ms", *flags) as server:
        texts, status = asyncio.run(test(server))
        for number, text in enumerate(texts):
            params = SamplingParams(**_params(number), ignore_eos=True)
            assert text == expected_hashlm(_prompt(number), params).text, f"stream {number}"
        metrics = Metrics(_ask(server, "GET", "/metrics")[1])
        if what == "nothing":
            assert status == 200
            assert (metrics.value("request_moves_total", kind="kv") or 0) >= _STREAMS // 2
            assert metrics.value("request_moves_total", kind="replay") == 0
