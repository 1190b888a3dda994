"""A server whose model is divided among processes: equal answers, and what a client sees when a process is killed."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import re
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.server_process import PATIENCE, ServerProcess, _command_line, _parent, alive
from tests.native import needs_kernels
from tests.preloaded import run

pytestmark = [needs_kernels, pytest.mark.nightly]

ASKED: dict[str, Any] = {"model": "bundled", "prompt": "Once upon a time", "max_tokens": 24, "seed": 3}


def ask(server: ServerProcess) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
    connection.request("POST", "/v1/completions", json.dumps(ASKED), {"Content-Type": "application/json"})
    reply = connection.getresponse()
    answer = reply.status, json.loads(reply.read())
    connection.close()
    return answer


def others(server: ServerProcess) -> list[int]:
    """Ids of the processes beside the engine's."""
    engine = server.engine()
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return [pid for pid in pids if _parent(pid) == engine and "rank_process" in _command_line(pid)]


def test_a_killed_process_is_replaced_with_the_engine() -> None:
    with ServerProcess("bundled", "--threads", "2") as alone:
        status, answer = ask(alone)
        assert status == 200
        text = answer["choices"][0]["text"]
    with ServerProcess("bundled", "--threads", "2", "--tensor-parallel-size", "2") as server:
        status, answer = ask(server)
        assert (status, answer["choices"][0]["text"]) == (200, text)
        engine, [other] = server.engine(), others(server)
        os.kill(other, signal.SIGKILL)
        begin = time.monotonic()
        status, answer = ask(server)
        assert (status, time.monotonic() - begin < 30) == (503, True), answer
        end = time.monotonic() + PATIENCE
        while (again := ask(server))[0] != 200 and time.monotonic() < end:
            pass
        assert again[1]["choices"][0]["text"] == text
        assert server.engine() != engine
        assert "another process of tensor_parallel_size 2 ended" in server.log()
        share = measured_share(server)
        assert 0.0 < share < 1.0
        [newer] = others(server)
        os.kill(newer, signal.SIGSTOP)
        os.kill(server.engine(), signal.SIGKILL)
        end = time.monotonic() + PATIENCE
        while alive(newer) and time.monotonic() < end:
            pass
        assert not alive(newer), "it outlived the engine's process"


def measured_share(server: ServerProcess) -> float:
    """The share of time in which processes waited for each other, as ``bench serve`` prints it."""
    flags = ("--input-len", "16", "--output-len", "8", "--num-prompts", "4", "--num-warmups", "0")
    done = run(["bench", "serve", "--url", f"http://127.0.0.1:{server.port}", *flags])
    found = re.search(r"^processes +waited for each other for ([\d.]+)% of the time", done.stdout, re.MULTILINE)
    assert found is not None, done.stdout
    return float(found[1]) / 100


FAULTS: dict[str, Any] = {**ASKED, "max_tokens": 60, "ignore_eos": True}
TIMEOUT = 5
"""Seconds after which a process hangs. Seconds in which the processes that wait have no processor do not count."""
WHERE = ("idle", "first prompt", "decoding", "two streams")


class Stream:
    """A streamed answer."""

    def __init__(self, server: ServerProcess, seed: int) -> None:
        self.text = ""
        self.complete = False
        self._connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
        body = json.dumps({**FAULTS, "seed": seed, "stream": True})
        self._connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        self._events: Iterator[Any] | None = None

    def read(self, most: int = 1000) -> None:
        """Read at most so many events."""
        if self._events is None:
            self._events = self._all()
        for _ in range(most):
            event = next(self._events, None)
            if event is None or "choices" not in event:
                return
            self.text += event["choices"][0]["text"]
            self.complete |= event["choices"][0]["finish_reason"] == "length"

    def _all(self) -> Iterator[Any]:
        with contextlib.closing(self._connection), self._connection.getresponse() as reply:
            if reply.status == 200:
                for line in reply:
                    if line.startswith(b"data: {"):
                        yield json.loads(line[6:])


@pytest.mark.parametrize("seed", range(6))
def test_a_process_that_dies_or_hangs_anywhere_loses_what_one_engine_loses(seed: int) -> None:
    """A signal at a random point: idle, in the first step, while one or two answers are generated. The engine ends, and
    starts again. No answer has other tokens; an answer that ends early ends with an error, as with one process."""
    rng = random.Random(seed)
    with ServerProcess("bundled", "--threads", "1") as alone:
        texts = []
        for number in range(2):
            stream = Stream(alone, number)
            stream.read()
            assert stream.complete
            texts.append(stream.text)
    flags = ("--threads", "3", "--tensor-parallel-size", "3", "--tensor-parallel-timeout", str(TIMEOUT))
    with ServerProcess("bundled", *flags) as server:
        for where in rng.sample(WHERE, len(WHERE)):
            engine, victims = server.engine(), others(server)
            victim, signum = rng.choice(victims), rng.choice((signal.SIGKILL, signal.SIGSTOP))
            streams = [Stream(server, number) for number in range({"idle": 0, "two streams": 2}.get(where, 1))]
            if where in ("decoding", "two streams"):
                streams[0].read(rng.randrange(1, 20))
            os.kill(victim, signum)
            for stream in streams:
                stream.read()
            for stream, text in zip(streams, texts, strict=False):
                assert stream.text == text if stream.complete else text.startswith(stream.text), where
            end = time.monotonic() + PATIENCE
            while (server.engine_pid() in (None, engine) or len(others(server)) < 2) and time.monotonic() < end:
                time.sleep(0.05)
            assert server.engine() != engine, (where, signum)
            again = None
            while (again is None or not again.complete) and time.monotonic() < end:
                again = Stream(server, 0)
                again.read()
            assert again is not None
            assert again.text == texts[0]
            assert not any(map(alive, victims)), "a process outlived its engine"
        assert server.log().count("another process of tensor_parallel_size 3 ended") == len(WHERE)
