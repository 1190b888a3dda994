"""A server whose model is divided among processes: equal answers, and what a client sees when a process is killed."""

from __future__ import annotations

import http.client
import json
import os
import signal
import time
from typing import Any

import pytest

from tests.e2e.server_process import PATIENCE, ServerProcess, _command_line, _parent, alive
from tests.native import needs_kernels

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
        [newer] = others(server)
        os.kill(server.engine(), signal.SIGKILL)
        end = time.monotonic() + PATIENCE
        while alive(newer) and time.monotonic() < end:
            pass
        assert not alive(newer), "it outlived the engine's process"
