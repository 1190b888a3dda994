"""A server for tests: its address, its expected outputs, and checks that it is idle."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import time
import urllib.request
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from chairlift.base.sampling_params import SamplingParams
from tests.e2e.oracle import Expected, chat_ids, expected_hashlm
from tests.e2e.server_process import PATIENCE, ServerProcess, metrics_of

__all__ = [
    "HI",
    "KEY",
    "LONG",
    "ROOM",
    "SEEDED",
    "SMALL",
    "Served",
    "answers",
    "ends_of",
    "filled",
    "run",
    "stop_in",
    "texts_of",
]

KEY = "sk-of-the-tests"
ROOM = ("--max-model-len", "32768", "--api-key", KEY, "--served-model-name", "hashlm")
"""Flags of a server that accepts requests with :data:`LONG`."""
SMALL = ("--max-num-seqs", "4", "--max-num-queued-reqs", "3", *ROOM)
"""Flags of a server with a small batch and a small queue."""
LONG: dict[str, Any] = {"max_tokens": 30_000, "ignore_eos": True}
"""Sampling parameters of a request that takes at least 150 s at 5 ms per step."""
_SOON = 100.0
"""Seconds within which an aborted request must have ended. A request that takes longer was not aborted."""
HI: list[Any] = [{"role": "user", "content": "Hi"}]
SEEDED: dict[str, Any] = {"seed": 7, "max_tokens": 24}
_LOOK = 0.02


class Served:
    """A server's address for clients, and its state for tests."""

    def __init__(self, server: ServerProcess) -> None:
        self.server = server
        self.url = f"http://127.0.0.1:{server.port}"
        self.base_url = f"{self.url}/v1"

    def get(self, path: str) -> bytes:
        request = urllib.request.Request(self.url + path, headers={"Authorization": f"Bearer {KEY}"})
        with urllib.request.urlopen(request, timeout=PATIENCE) as reply:
            body: bytes = reply.read()
        return body

    def load(self) -> dict[str, int]:
        """Content of ``GET /load``: the numbers of requests in progress, running and waiting, by name."""
        found: dict[str, int] = json.loads(self.get("/load"))
        return found

    def metric(self, name: str) -> float:
        """A value of ``/metrics``, summed over the labels."""
        return metrics_of(self.get("/metrics").decode())[f"chairlift:{name}"]

    def wait_for(self, running: int, waiting: int) -> None:
        """Wait until this many sequences are running and this many requests are waiting."""
        self._until(self.load, lambda load: (load["running"], load["waiting"]) == (running, waiting))

    def wait_until_idle(self) -> None:
        """Wait until there is no client, no computation, and no held block of the KV cache."""
        idle = {"load": {"server_load": 0, "running": 0, "waiting": 0}, "sequences": 0.0, "blocks": 0.0}
        self._until(self._activity, lambda activity: activity == idle, _SOON)

    def _activity(self) -> dict[str, Any]:
        sequences, blocks = self.metric("num_requests_running"), self.metric("kv_cache_usage_perc")
        return {"load": self.load(), "sequences": sequences, "blocks": blocks}

    @staticmethod
    def _until(look: Callable[[], Any], done: Callable[[Any], bool], seconds: float = PATIENCE) -> None:
        end = time.monotonic() + seconds
        while not done(seen := look()):
            if time.monotonic() > end:
                raise AssertionError(f"after {seconds:g} s the server still says {seen}")
            time.sleep(_LOOK)


def answers(prompt: str | list[int], n: int = 1, **settings: Any) -> list[Expected]:
    """Expected outputs of HashLM for one user message, or for token ids."""
    ids = chat_ids(("user", prompt)) if isinstance(prompt, str) else prompt
    return [expected_hashlm(ids, SamplingParams(n=n, **settings), index) for index in range(n)]


@contextlib.contextmanager
def filled(served: Served) -> Iterator[contextlib.ExitStack]:
    """A server started with :data:`SMALL`, which is full of requests until the block ends or the stack is closed."""
    with contextlib.ExitStack() as stack:
        for n, running, waiting in ((4, 4, 0), (1, 4, 1), (1, 4, 2), (1, 4, 3)):
            connection = http.client.HTTPConnection("127.0.0.1", served.server.port, timeout=PATIENCE)
            stack.callback(connection.close)
            body = {"model": "hashlm", "messages": [{"role": "user", "content": "wait"}], "n": n, **LONG}
            headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
            connection.request("POST", "/v1/chat/completions", json.dumps({**body, "stream": True}), headers)
            served.wait_for(running, waiting)
        yield stack


def stop_in(text: str) -> str:
    """A character of ``text`` that first occurs in its middle, for use as a stop string."""
    return next(letter for i, letter in enumerate(text) if i >= 4 and letter.isascii() and text.find(letter) == i)


def texts_of(chunks: list[Any], n: int = 1) -> list[str]:
    """Texts of the ``n`` outputs in a stream's chunks."""
    texts = [""] * n
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    return texts


def ends_of(chunks: list[Any]) -> list[tuple[int, str]]:
    """(index of the output, finish reason) in a stream's chunks, in order of the index."""
    return sorted((c.index, c.finish_reason) for chunk in chunks for c in chunk.choices if c.finish_reason)


def run(test: Coroutine[Any, Any, None]) -> None:
    """Run a test's coroutine, with a time limit."""
    asyncio.run(asyncio.wait_for(test, 2 * PATIENCE))
