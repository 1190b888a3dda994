"""Many concurrent streams of a real model: no error, and every answer as if it were alone."""

from __future__ import annotations

import asyncio
import json
import random
import time
from typing import Any

import pytest

from tests.e2e.load import Client, Connection, rest
from tests.e2e.server_process import ServerProcess

pytestmark = pytest.mark.full

QUESTIONS = [
    "What is a KV cache?",
    "What is preemption?",
    "What does TTFT mean?",
    "Who made Orca?",
    "What is a block table?",
]
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0, "max_tokens": 40},
    {"temperature": 0.9, "seed": 7, "max_tokens": 60, "top_p": 0.9},
    {"temperature": 1.0, "seed": 8, "max_tokens": 25, "n": 2},
]


async def stream(port: int, question: str, params: dict[str, Any]) -> list[str]:
    """The texts of a streamed chat."""
    messages = [{"role": "user", "content": question}]
    body = json.dumps({"model": "bundled", "messages": messages, "stream": True, **params}).encode()
    connection = await Connection.open(port)
    try:
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection.writer.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
        status, headers = await connection.head()
        data = b"".join([piece async for piece in connection.pieces(headers)])
    finally:
        connection.close()
    assert status == 200 and data.endswith(b"data: [DONE]\n\n"), data[-300:]
    texts = [""] * params.get("n", 1)
    for event in data.split(b"\n\n")[:-2]:
        for choice in json.loads(event[6:])["choices"]:
            texts[choice["index"]] += choice["delta"].get("content") or ""
    return texts


async def client(port: int, index: int, until: float, alone: dict[tuple[int, int], list[str]]) -> int:
    """One user after another, until the time is over; how many there were."""
    rng = random.Random(index)
    count = 0
    while time.monotonic() < until:
        which = (rng.randrange(len(QUESTIONS)), rng.randrange(len(PARAMS)))
        assert await stream(port, QUESTIONS[which[0]], PARAMS[which[1]]) == alone[which]
        count += 1
    return count


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("clients", "seconds"), [(50, 10.0), pytest.param(500, 180.0, marks=pytest.mark.nightly)], ids=str
)
def test_many_streams_end_without_an_error(clients: int, seconds: float) -> None:
    async def run(server: ServerProcess) -> int:
        every = [(q, p) for q in range(len(QUESTIONS)) for p in range(len(PARAMS))]
        alone = {(q, p): await stream(server.port, QUESTIONS[q], PARAMS[p]) for q, p in every}
        until = time.monotonic() + seconds
        counts = await asyncio.gather(*(client(server.port, i, until, alone) for i in range(clients)))
        await rest(Client(server.port))
        assert (await Client(server.port).metrics())["admission_rejections_total"] == 0
        server.terminate()
        assert await server.ended() == 0
        return sum(counts)

    with ServerProcess("bundled", "--max-num-queued-reqs", "2000", "--status-interval", "0") as server:
        total = asyncio.run(run(server))
    print(f"{clients} concurrent streams for {seconds:g} s: {total} answers")
    assert total >= clients
