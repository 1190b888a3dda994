"""A queue as its clients see it: where they stand, when it will be their turn, and an early no."""

from __future__ import annotations

import http.client
import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

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


def test_clients_see_the_queue_and_are_told_early() -> None:
    with ServerProcess("hashlm:20ms", *FLAGS) as server, ThreadPoolExecutor(64) as threads:
        served, end = Served(server), time.monotonic() + PATIENCE
        # Those that come after the first has ended are forecast: a hundred, so that a slow client has time to look.
        jobs = [threads.submit(send, served, "POST", "/v1/completions", SHORT) for _ in range(170)]
        mine = threads.submit(send, served, "POST", "/v1/completions", SHORT, name="mine-17")
        while (seen := queue(served))["calibration"]["samples"] < 20 or seen["waiting"] < 20:
            assert time.monotonic() < end and not all(job.done() for job in jobs), seen
        wait = seen["expected_wait_seconds"]["default"]
        assert 0 < seen["running"] <= 2 and 0.3 < wait < 30 and seen["forecast_age_seconds"] < 5
        assert len(seen["requests"]) == seen["waiting"]
        starts = [at for each in seen["requests"] if (at := each["expected_start_seconds"]) is not None]
        assert starts and starts == sorted(starts)
        assert [each["position"] for each in seen["requests"]] == list(range(1, len(starts) + 1))
        assert queue(served, key="sk-of-another")["requests"] == []

        status, headers, body = send(served, "POST", "/v1/completions", SHORT | {"queue_timeout": 0.05})
        assert (status, body["error"]["code"]) == (429, "queue_too_long"), body
        assert "its queue_timeout allows 0.05 s" in body["error"]["message"]
        assert 1 <= int(headers["retry-after"]) <= wait + 2
        assert served.metric("admission_rejections_total") == 1

        before = 10_000
        while not mine.done():  # its place gets better, and then it has one
            status, _, body = send(served, "GET", "/v1/queue?request_id=mine-17")
            if status == 200:
                (found,) = body["requests"]
                assert found["id"] == "mine-17" and found["position"] <= before
                before = found["position"]
            assert send(served, "GET", "/v1/queue?request_id=mine-17", key="sk-of-another")[0] == 404
        assert mine.result()[0] == 200 and before < 10_000
        assert [job.result()[0] for job in jobs] == [200] * len(jobs)
        assert send(served, "GET", "/v1/queue?request_id=mine-17")[2]["error"]["code"] == "request_not_found"
        served.wait_until_idle()
        seen = queue(served)
        assert (seen["waiting"], seen["requests"], seen["expected_wait_seconds"]) == (0, [], {"default": 0.0})
        # How good it is with an idle machine is a matter of tests/engine; here others may keep it busy.
        assert 0.2 < seen["calibration"]["actual_over_predicted"]["p50"] < 5
