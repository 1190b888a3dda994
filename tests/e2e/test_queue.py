"""A queue as its clients see it: where they stand, when it will be their turn, and an early no."""

from __future__ import annotations

import http.client
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

from tests.e2e.served import KEY, Served
from tests.e2e.server_process import PATIENCE, ServerProcess

SHORT: dict[str, Any] = {"model": "hashlm", "prompt": [1, 2, 3], "max_tokens": 5, "ignore_eos": True}
FLAGS = ("--max-num-seqs", "2", "--max-num-queued-reqs", "200", "--api-key", KEY, "--served-model-name", "hashlm")
FLAGS += ("--api-key", "sk-of-another")


def send(served: Served, method: str, path: str, body: Any = None, key: str = KEY, name: str = "") -> Any:
    """Status, headers and JSON of a reply."""
    connection = http.client.HTTPConnection("127.0.0.1", served.server.port, timeout=PATIENCE)
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    if name:
        headers["X-Request-Id"] = name
    connection.request(method, path, None if body is None else json.dumps(body), headers)
    reply = connection.getresponse()
    answer = reply.status, dict(reply.headers), json.loads(reply.read())
    connection.close()
    return answer


def queue(served: Served, query: str = "", key: str = KEY) -> Any:
    return send(served, "GET", f"/v1/queue{query}", key=key)[2]


@pytest.mark.nightly
def test_clients_see_the_queue_and_are_told_early() -> None:
    with ServerProcess("hashlm:20ms", *FLAGS) as server, ThreadPoolExecutor(64) as threads, ExitStack() as stack:
        served, end, over = Served(server), time.monotonic() + PATIENCE, threading.Event()

        def keep_asking() -> set[int]:
            """Others, until this client has seen all it wants to see: it may be slow."""
            statuses = set()
            while not over.is_set():
                statuses.add(send(served, "POST", "/v1/completions", SHORT)[0])
            return statuses

        stack.callback(over.set)
        jobs = [threads.submit(keep_asking) for _ in range(60)]
        while (seen := queue(served))["calibration"]["samples"] < 20 or seen["waiting"] < 20 or not seen["running"]:
            assert time.monotonic() < end and not any(job.done() for job in jobs), seen
        wait = seen["expected_wait_seconds"]["default"]
        assert seen["running"] <= 2 and wait > 0.3 and seen["forecast_age_seconds"] < PATIENCE
        assert len(seen["requests"]) == seen["waiting"]
        starts = [at for each in seen["requests"] if (at := each["expected_start_seconds"]) is not None]
        assert starts and starts == sorted(starts)
        assert [each["position"] for each in seen["requests"]] == list(range(1, seen["waiting"] + 1))
        assert queue(served, key="sk-of-another")["requests"] == []

        status, headers, body = send(served, "POST", "/v1/completions", SHORT | {"queue_timeout": 0.05})
        assert (status, body["error"]["code"]) == (429, "queue_too_long"), body
        assert "its queue_timeout allows 0.05 s" in body["error"]["message"]
        assert 1 <= int(headers["retry-after"]) <= 60
        assert served.metric("admission_rejections_total") == 1

        mine = threads.submit(send, served, "POST", "/v1/completions", SHORT, name="mine-17")
        before = 10_000
        while not mine.done():  # its place gets better, and then it has one
            status, _, body = send(served, "GET", "/v1/queue?request_id=mine-17")
            if status == 200:
                (found,) = body["requests"]
                assert found["id"] == "mine-17" and found["position"] <= before
                before = found["position"]
            assert send(served, "GET", "/v1/queue?request_id=mine-17", key="sk-of-another")[0] == 404
        assert mine.result()[0] == 200 and before < 10_000
        over.set()
        assert set.union(*(job.result() for job in jobs)) == {200}
        assert send(served, "GET", "/v1/queue?request_id=mine-17")[2]["error"]["code"] == "request_not_found"
        served.wait_until_idle()
        seen = queue(served)
        assert (seen["waiting"], seen["requests"], seen["expected_wait_seconds"]) == (0, [], {"default": 0.0})
        # How good it is with an idle machine is a matter of tests/engine; here others may keep it busy.
        assert 0.05 < seen["calibration"]["actual_over_predicted"]["p50"] < 20
