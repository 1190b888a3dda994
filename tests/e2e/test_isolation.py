"""Nothing of a client reaches another: not through its ids, not through the cache that all share."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Sequence
from typing import Any

import pytest

from chairlift.base.sampling_params import SamplingParams
from tests.e2e.fuzz import Answer, Connection, read_answer
from tests.e2e.oracle import expected_hashlm
from tests.e2e.server_process import PATIENCE, ServerProcess


def message(body: dict[str, Any], *headers: str) -> bytes:
    data = json.dumps(body).encode()
    head = ["POST /v1/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json", *headers]
    return "\r\n".join([*head, f"Content-Length: {len(data)}", "", ""]).encode() + data


def plain(name: str) -> str:
    """``name`` as the header may contain it: without ``#``."""
    return name.replace("#", ".")


# --- ids -------------------------------------------------------------------------------------------------------------


def test_equal_ids_and_ids_that_begin_alike_end_each_for_itself() -> None:
    """Clients that call their requests alike, or as the server calls its own, share nothing by that."""

    async def one(server: ServerProcess, number: int, name: str, leaves: bool) -> Answer | None:
        body = {"prompt": f"{number}", "max_tokens": 60, "seed": number, "stream": True, "ignore_eos": True}
        names = {"request_id": name, "user": name, "session_id": name}
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(message(body | names, f"X-Request-Id: {plain(name)}"))
        answer = None
        if leaves:
            await reader.readuntil(b"data: ")
            writer.transport.abort()
        else:
            answer = await read_answer(reader)
        writer.close()
        return answer

    async def test(server: ServerProcess) -> None:
        first = await one(server, 0, "a", leaves=False)
        assert first is not None
        given = json.loads(first.body.split(b"\n\n")[0][6:])["id"].removeprefix("cmpl-")
        names = ["a", "a", "ab", "a", "a#1", "a#1", given, given, given[:8], given[:-1]] * 3
        jobs = [one(server, number, name, leaves=number % 3 == 0) for number, name in enumerate(names)]
        for number, answer in enumerate(await asyncio.wait_for(asyncio.gather(*jobs), PATIENCE)):
            if answer is None:
                continue
            assert (answer.status, answer.headers["x-request-id"]) == (200, plain(names[number]))
            chunks = [json.loads(event[6:]) for event in answer.body.split(b"\n\n")[:-2]]
            text = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
            params = SamplingParams(max_tokens=60, seed=number, ignore_eos=True)
            assert text == expected_hashlm(list(str(number).encode()), params).text
            (own,) = {chunk["id"] for chunk in chunks}
            assert own.removeprefix("cmpl-") not in names and len(own) >= len("cmpl-") + 32

    with ServerProcess("hashlm:2ms") as server:
        asyncio.run(test(server))


# --- the cache -------------------------------------------------------------------------------------------------------


def cached(server: ServerProcess, prompt: str, salt: str | None) -> int:
    """How many tokens of the prompt came from the cache. The answer is the right one, cached or not."""

    async def ask() -> Answer:
        connection = Connection(server.port)
        body = {"prompt": prompt, "max_tokens": 8, "seed": 5, "return_token_ids": True, "cache_salt": salt}
        answer = await asyncio.wait_for(connection.post("/v1/completions", json.dumps(body).encode()), PATIENCE)
        connection.close()
        return answer

    answer = asyncio.run(ask())
    assert answer.status == 200
    reply = json.loads(answer.body)
    params = SamplingParams(max_tokens=8, seed=5)
    wanted = expected_hashlm(list(prompt.encode()), params, salt=salt or "").token_ids
    assert reply["choices"][0]["token_ids"] == wanted
    return int(reply["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_prompts_are_shared_with_the_same_salt_only() -> None:
    prompt = "the system prompt of somebody " * 4
    with ServerProcess("hashlm") as server:
        assert cached(server, prompt, "a") == 0
        assert cached(server, prompt, "a") > 90
        for other in ("b", "A", "aa", "a-", None, ""):
            assert cached(server, prompt, other) == (0 if other != "" else cached(server, prompt, None))
        assert cached(server, prompt, None) > 90


def test_sharing_can_be_turned_off() -> None:
    with ServerProcess("hashlm", "--no-enable-prefix-caching") as server:
        assert [cached(server, "the same prompt, again and again " * 4, "a") for _ in range(3)] == [0, 0, 0]


@pytest.mark.nightly
def test_time_does_not_tell_what_others_asked() -> None:
    """To somebody with another salt, prompts that are in the cache take as long as new ones (Mann-Whitney U)."""
    num_prompts = 500

    async def measure(server: ServerProcess) -> tuple[list[float], list[float], list[float]]:
        connection = Connection(server.port)

        async def seconds(number: int, salt: str) -> float:
            text = f"{number:06d}" + "x" * 3000
            body = json.dumps({"prompt": text, "max_tokens": 1, "cache_salt": salt}).encode()
            start = time.perf_counter()
            assert (await connection.post("/v1/completions", body)).status == 200
            return time.perf_counter() - start

        others, new, own = [], [], []
        for number in range(num_prompts):
            await seconds(number, "theirs")
            pairs = [(others, number), (new, number + num_prompts)]
            for times, which in pairs if number % 2 else reversed(pairs):
                times.append(await seconds(which, "mine"))
            own.append(await seconds(number, "mine"))
        connection.close()
        return others, new, own

    with ServerProcess("hashlm", "--num-kv-blocks", "4096") as server:
        others, new, own = asyncio.run(measure(server))
    assert p_value(own, new) < 0.01  # what is cached does show; so the test can see it
    assert p_value(others, new) > 0.01


def p_value(first: Sequence[float], second: Sequence[float]) -> float:
    """That two samples come from one distribution; two-sided, by the normal approximation."""
    ranked = sorted([(value, 0) for value in first] + [(value, 1) for value in second])
    ranks = sum(rank for rank, (_, which) in enumerate(ranked, start=1) if which == 0)
    n, m = len(first), len(second)
    u = ranks - n * (n + 1) / 2
    z = (u - n * m / 2) / math.sqrt(n * m * (n + m + 1) / 12)
    return math.erfc(abs(z) / math.sqrt(2))


def test_the_statistic_tells_samples_apart() -> None:
    assert p_value(range(0, 100, 2), range(1, 100, 2)) > 0.5
    assert p_value(range(100), range(30, 130)) < 1e-6
