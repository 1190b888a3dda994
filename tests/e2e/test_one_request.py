"""One request takes neither time nor memory from everybody: a real server, and somebody else who asks meanwhile."""

from __future__ import annotations

import asyncio
import http.client
import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.e2e.server_process import PATIENCE, ServerProcess

pytestmark = pytest.mark.nightly

LONGEST_WAIT = 0.5
"""Seconds that others may wait for /health meanwhile: ten times what they do, a fifth of what they did."""
MIB = 1 << 20


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess("hashlm", "--max-model-len", "32768", "--num-kv-blocks", "30000") as server:
        yield server


@pytest.fixture(scope="module")
def bundled() -> Iterator[ServerProcess]:
    with ServerProcess("bundled") as server:
        yield server


def ask(server: ServerProcess, path: str, body: Any = None) -> tuple[int, int]:
    """Status and length of the answer, which is read and thrown away."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
    if body is None:
        connection.request("GET", path)
    else:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    reply, size = connection.getresponse(), 0
    while piece := reply.read(1 << 16):
        size += len(piece)
    connection.close()
    return reply.status, size


def meanwhile(server: ServerProcess, work: Callable[[], Any], times: int) -> tuple[list[Any], float, int]:
    """What the works at once bring, the longest that /health took, and the most bytes that the API process had."""
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(work())) for _ in range(times)]
    for thread in threads:
        thread.start()
    longest, most = 0.0, 0
    while any(thread.is_alive() for thread in threads):
        start = time.perf_counter()
        ask(server, "/health")
        longest, most = max(longest, time.perf_counter() - start), max(most, server.memory())
    return found, longest, most


def odd_text(rng: random.Random, length: int) -> str:
    return "".join(chr(rng.randrange(0x20, 0x3000)) for _ in range(length))


def test_many_texts_hold_up_nobody(bundled: ServerProcess) -> None:
    rng = random.Random(1)
    texts = [odd_text(rng, 4096) for _ in range(64)]
    body = {"prompt": texts, "max_tokens": 1, "truncate_prompt_tokens": 8}
    answers, longest, _ = meanwhile(bundled, lambda: ask(bundled, "/v1/completions", body)[0], 3)
    assert (answers, longest < LONGEST_WAIT) == ([200] * 3, True), longest
    assert ask(bundled, "/v1/completions", {**body, "prompt": [*texts[1:], texts[0] + "x"]})[0] == 400


def test_bad_words_hold_up_nobody(bundled: ServerProcess) -> None:
    rng = random.Random(2)
    body = {"prompt": ["a"] * 32, "max_tokens": 1, "bad_words": [odd_text(rng, 63) for _ in range(128)]}
    answers, longest, _ = meanwhile(bundled, lambda: ask(bundled, "/v1/completions", body)[0], 3)
    assert (set(answers) <= {200, 429}, longest < LONGEST_WAIT) == (True, True), (answers, longest)


@pytest.mark.parametrize("more", [{"prompt_logprobs": 20}, {"echo": True, "logprobs": 5}, {"stream": True}])
def test_log_probabilities_take_little_memory_and_hold_up_nobody(server: ServerProcess, more: dict[str, Any]) -> None:
    ids = [(i * 7) % 200 for i in range(32_000)]
    asked = {"max_tokens": 1, "echo": True, "logprobs": 5} if "stream" in more else {"max_tokens": 1}
    refused = {"max_tokens": 1, "prompt_logprobs": 20, "prompt": [ids] * 9}
    assert ask(server, "/v1/completions", refused)[0] == 400
    body = {**asked, **more, "prompt": ids}
    answers, longest, most = meanwhile(server, lambda: ask(server, "/v1/completions", body), 4)
    assert {status for status, _ in answers} <= {200, 429} and max(size for _, size in answers) > 5_000_000
    assert longest < LONGEST_WAIT and most < 300 * MIB, (longest, most)


def test_answers_with_log_probabilities_take_little_memory(server: ServerProcess) -> None:
    chat = [{"role": "user", "content": "Hi"}]
    body = {"messages": chat, "max_tokens": 2000, "n": 8, "logprobs": True, "top_logprobs": 20, "ignore_eos": True}
    answers, longest, most = meanwhile(server, lambda: ask(server, "/v1/chat/completions", body), 2)
    assert all(status == 200 and size > 10_000_000 for status, size in answers)
    assert longest < LONGEST_WAIT and most < 300 * MIB, (longest, most)


def test_a_steady_slow_reader_of_a_stream_gets_it_and_one_that_does_not_read_is_cut_off() -> None:
    chat = [{"role": "user", "content": "Hi"}]
    asked = {"messages": chat, "max_tokens": 30_000, "stream": True, "logprobs": True, "ignore_eos": True}
    body = json.dumps(asked).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    timeout = 12.0

    async def reader(port: int, rate: int, seconds: float) -> int:
        sock = socket.create_connection(("127.0.0.1", port))
        sock.sendall(request)
        sock.setblocking(False)
        loop, got, start = asyncio.get_running_loop(), 0, time.monotonic()
        with sock:
            while (passed := time.monotonic() - start) < seconds:
                if rate:
                    got += len(await loop.sock_recv(sock, rate // 10))
                await asyncio.sleep(max(0.0, (got / rate if rate else passed + 0.1) - passed))
        return got

    async def main(server: ServerProcess) -> None:
        slow = asyncio.create_task(reader(server.port, 10_000, 4 * timeout))
        silent = asyncio.create_task(reader(server.port, 0, 4 * timeout))
        await asyncio.sleep(2.5 * timeout)
        assert (await asyncio.to_thread(running, server)) == 1
        assert await slow > 9_000 * 4 * timeout
        await silent

    flags = ("--max-model-len", "32768", "--num-kv-blocks", "30000", "--stall-timeout", f"{timeout:g}")
    with ServerProcess("hashlm", *flags) as server:
        asyncio.run(main(server))


def running(server: ServerProcess) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
    connection.request("GET", "/load")
    load: int = json.loads(connection.getresponse().read())["server_load"]
    connection.close()
    return load
