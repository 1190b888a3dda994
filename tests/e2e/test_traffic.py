"""A recording of a real server is what was sent to it, and replays as it was."""

from __future__ import annotations

import http.client
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from chairlift_lab.workload.trace import prompt_token_ids, read_trace
from tests.e2e.served import KEY, Served
from tests.e2e.server_process import PATIENCE

SHARED, BLOCK = 96, 32


@contextmanager
def recording(served: Served, file: Path, requests: int) -> Iterator[subprocess.Popen[str]]:
    """``chairlift trace record``, once the server knows of it."""
    (file.parent / "key").write_text(KEY)
    flags = ("--requests", str(requests), "--block-size", str(BLOCK), "--api-key-file", str(file.parent / "key"))
    command = [sys.executable, "-m", "chairlift", "trace", "record", "--base-url", served.url, "-o", str(file), *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        end = time.monotonic() + PATIENCE
        while served.load()["server_load"] != 1:
            assert process.poll() is None and time.monotonic() < end
        yield process
    finally:
        process.kill()
        process.wait()


def send(served: Served, body: dict[str, Any]) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection("127.0.0.1", served.server.port, timeout=PATIENCE)
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps({"model": "hashlm", "ignore_eos": True, **body}), headers)
    return connection


def test_a_recording_is_what_was_sent(served: Served, tmp_path: Path) -> None:
    rng, file = random.Random(3), tmp_path / "t.jsonl"
    shared = [rng.randrange(200) for _ in range(SHARED)]
    sent: list[tuple[list[int], int]] = []
    with recording(served, file, 7) as process:
        leaving = send(served, {"prompt": [1] * 50, "max_tokens": 30_000, "stream": True})
        answer = leaving.getresponse()
        answer.readline()
        for i in range(6):
            own = [rng.randrange(200) for _ in range(rng.randrange(1, 200))]
            sent.append((shared + own if i % 2 else own, rng.randrange(1, 12)))
            connection = send(served, {"prompt": sent[-1][0], "max_tokens": sent[-1][1]})
            assert connection.getresponse().status == 200
            connection.close()
        answer.close()
        leaving.close()
        out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, err) == (0, ""), err
    assert "7 requests" in out and "1 cancelled by their clients" in out
    cancelled, *traced = read_trace(file)
    assert cancelled.cancel_ms is not None and cancelled.prompt_tokens == 50 and 0 < cancelled.output_tokens < 30_000
    assert [(each.prompt_tokens, each.output_tokens) for each in traced] == [(len(ids), most) for ids, most in sent]
    assert all(each.cancel_ms is None and each.prefix_block == BLOCK for each in traced)
    assert [each.arrival for each in traced] == sorted(each.arrival for each in traced)
    prompts = [prompt_token_ids(each, index, 250) for index, each in enumerate(traced)]
    for one in range(6):
        for two in range(one):
            same = SHARED if one % 2 and two % 2 else 0
            alike = next(
                i for i, pair in enumerate(zip(prompts[one], prompts[two], strict=False)) if pair[0] != pair[1]
            )
            assert alike // BLOCK == same // BLOCK
    line = json.loads(file.read_text().splitlines()[1])
    assert set(line) == {"timestamp", "input_length", "output_length", "hash_ids", "block_size", "tenant"}
