"""Batches of a real server that is killed, again and again: each request is answered once."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e.server_process import PATIENCE, ServerProcess

pytestmark = pytest.mark.full

_LOOK = 0.01


def _line(index: int) -> dict[str, Any]:
    body = {"prompt": f"request {index}", "seed": index, "max_tokens": 8 + index % 24, "ignore_eos": True}
    return {"custom_id": f"r{index}", "method": "POST", "url": "/v1/completions", "body": body}


def _client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0)


def _wait(server: ServerProcess, batch_id: str, most: int) -> Any:
    """Wait until ``most`` requests of a batch are answered, or it has ended."""
    end = time.monotonic() + PATIENCE
    with _client(server) as client:
        while True:
            batch = client.batches.retrieve(batch_id)
            if batch.request_counts.completed >= most or batch.status == "completed":
                return batch
            assert time.monotonic() < end, f"the batch stands still: {batch}"
            time.sleep(_LOOK)


@pytest.mark.parametrize(("kills", "count"), [(2, 60), pytest.param(50, 500, marks=pytest.mark.nightly)])
def test_a_batch_survives_kills_of_server_and_engine(kills: int, count: int, tmp_path: Path) -> None:
    """SIGKILL for the server, or for its engine, at random points; the server is started again."""
    rng = random.Random(kills)
    with ServerProcess("hashlm:2ms", "--max-num-seqs", "4", "--batch-dir", str(tmp_path / "kept")) as server:
        with _client(server) as client:
            lines = "".join(json.dumps(_line(index)) + "\n" for index in range(count))
            source = client.files.create(file=("in.jsonl", lines.encode()), purpose="batch")
            batch_id = client.batches.create(
                input_file_id=source.id, endpoint="/v1/completions", completion_window="24h"
            ).id
        for kill in range(kills):
            _wait(server, batch_id, rng.randrange(kill * count // (kills + 1), (kill + 1) * count // (kills + 1)))
            time.sleep(rng.random() * 0.02)
            if kill % 5 == 4:
                if (engine := server.engine_pid()) is not None:
                    os.kill(engine, signal.SIGKILL)
                continue
            server.process.kill()
            asyncio.run(server.ended())
            server.start()
        batch = _wait(server, batch_id, count + 1)
        assert (batch.request_counts.total, batch.request_counts.completed) == (count, count), batch
        with _client(server) as client:
            answers = [json.loads(line) for line in client.files.content(batch.output_file_id).content.splitlines()]
            assert [answer["custom_id"] for answer in answers] == [f"r{index}" for index in range(count)]
            assert batch.error_file_id is None
            for index in rng.sample(range(count), 10):
                alone = client.completions.create(
                    model=batch.model,
                    prompt=f"request {index}",
                    seed=index,
                    max_tokens=8 + index % 24,
                    extra_body={"ignore_eos": True},
                )
                assert answers[index]["response"]["body"]["choices"][0]["text"] == alone.choices[0].text
