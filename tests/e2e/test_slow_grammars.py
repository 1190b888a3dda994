"""Grammars with slow masks delay their own answers only: a real server, with a neighbour that streams meanwhile."""

from __future__ import annotations

import http.client
import json
import random
import statistics
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.server_process import PATIENCE, ServerProcess

pytestmark = pytest.mark.nightly

LONGEST_HEALTH = 0.2
"""Seconds that /health may take."""
SLACK = 0.05
"""Seconds that a gap between two tokens may take in addition to three usual gaps. The reason is the machine: on two
cores, the tests of the attackers' grammars and this client take the processor from the engine for some 10 ms at a time.
A mask without limits would delay each token by more: 16 masks of 48 ms."""
SHARE = 0.9
"""Fraction of the gaps that must keep the bound. Even beside simple grammars, the longest of 200 gaps is 14 to 500 ms
when the machine has other work."""
SLOWEST = {"a text after each choice": 0.2}
"""Attack -> further seconds that a gap may take beside eight attackers. 128 answers that follow a text of 20,000
characters after each choice were measured with 70 to 130 ms at the 90th percentile, and single gaps of 1 s."""
_RANDOM = random.Random(1)
LETTERS = "".join(_RANDOM.choice("abcdefgh ijklmnop") for _ in range(199_000))
ATTACKS: dict[str, dict[str, Any]] = {
    "a choice of 20,000 characters": {"choice": [LETTERS[:20_000]]},
    "a choice of 199,000 characters": {"choice": [LETTERS]},
    "1,000 choices": {"choice": [LETTERS[i * 40 : i * 40 + 40] for i in range(1_000)]},
    "a text after each choice": {"regex": f"((a|b){LETTERS[:20_000]}){{1,20}}"},
    "1,000 optional properties": {
        "json": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1_000)}}
    },
    "an ambiguous grammar": {"grammar": 'start: e\ne: e e | "a" | "b"'},
    "a long repetition": {"regex": "([a-z]{1,50} ){1,500}"},
    "many states": {"regex": "[ab]*a[ab]{12}[ab]*"},
}


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess("bundled", "--num-kv-blocks", "2000") as server:
        yield server


def post(server: ServerProcess, body: dict[str, Any]) -> Iterator[bytes]:
    """The status of the answer as bytes, then its lines."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        reply = connection.getresponse()
        yield str(reply.status).encode()
        yield from reply
    finally:
        connection.close()


def gaps(server: ServerProcess, done: threading.Event, found: list[float]) -> None:
    """Add the seconds between the tokens of a neighbour's streams to ``found``, until ``done`` is set. With their ids,
    tokens without text have an event too: the model writes about 100 of them in a row after its end token."""
    body = {"prompt": "One two", "max_tokens": 400, "ignore_eos": True, "stream": True, "return_token_ids": True}
    while not done.is_set():
        last = 0.0
        for line in post(server, body):
            if line.startswith(b"data: {"):
                now = time.perf_counter()
                if last:
                    found.append(now - last)
                last = now
            if done.is_set():
                break


def under(
    server: ServerProcess, grammar: Any, num_requests: int = 1, max_tokens: int = 60
) -> tuple[list[float], list[float], set[int]]:
    """(gaps of a neighbour, seconds of each /health, statuses) while requests with 16 answers follow a grammar, one
    after the other, until the neighbour has 200 gaps or 20 s are over."""
    done, statuses, found, health = threading.Event(), set[int](), list[float](), list[float]()
    body = {"prompt": "Hi", "max_tokens": max_tokens, "n": 16, "temperature": 1.0, "structured_outputs": grammar}

    def attack() -> None:
        while not done.is_set():
            lines = list(post(server, body))
            statuses.add(int(lines[0]))

    threads = [threading.Thread(target=attack) for _ in range(num_requests)]
    threads.append(threading.Thread(target=gaps, args=(server, done, found)))
    for thread in threads:
        thread.start()
    end = time.perf_counter() + 20
    while len(found) < 200 and time.perf_counter() < end:
        begin = time.perf_counter()
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
        connection.request("GET", "/health")
        connection.getresponse().read()
        connection.close()
        health.append(time.perf_counter() - begin)
        threads[0].join(0.02)
    done.set()
    for thread in threads:
        thread.join()
    return found, health, statuses


def most_of(seconds: list[float]) -> float:
    """The quantile :data:`SHARE`."""
    return sorted(seconds)[int(len(seconds) * SHARE)]


@pytest.fixture(scope="module")
def usual(server: ServerProcess) -> dict[int, float]:
    """Number of requests with a simple grammar, of 16 answers each -> median gap of a neighbour beside them, in
    seconds. The answers are long, so that all of them run at nearly all times."""
    simple = {"regex": "[a-z ]{300}"}
    under(server, simple)  # the first grammar builds the tokenizer's tables
    return {count: statistics.median(under(server, simple, count, 300)[0]) for count in (1, 8)}


@pytest.mark.parametrize("num_requests", [1, 8])
@pytest.mark.parametrize("name", sorted(ATTACKS))
def test_a_neighbour_hardly_notices(
    name: str, num_requests: int, server: ServerProcess, usual: dict[int, float]
) -> None:
    found, health, statuses = under(server, ATTACKS[name], num_requests)
    assert statuses <= {200, 400, 429}, statuses
    further = SLOWEST.get(name, 0.0) if num_requests == 8 else 0.0
    assert most_of(found) <= 3 * usual[num_requests] + SLACK + further
    assert max(health) <= LONGEST_HEALTH
