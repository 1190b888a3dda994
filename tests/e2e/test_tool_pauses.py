"""An agent over HTTP: its conversation pauses while its tool runs, which can be seen, and goes on in the cache.

The model follows a script: each answer is a call of the tool. Its chat template takes tools, as that of the bundled
model does not.
"""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from chairlift.cli.top_view import Metrics
from tests.e2e.scripted_model import write_scripted_model
from tests.e2e.served import KEY, Served
from tests.e2e.server_process import PATIENCE, ServerProcess

TEMPLATE = (
    "{% if tools %}<|turn|>system {{ tools | tojson }}{% endif %}"
    "{% for message in messages %}<|turn|>{{ message.role }} {{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}[{{ call.function.name }}]{% endfor %}{% endfor %}"
    "{{ '<|again|>' if messages | selectattr('role', 'equalto', 'assistant') | list else '<|first|>' }}"
)
FIRST = ["<tool_call>", '{"name": "look_up", "arguments": {"word": "ski"}}', "</tool_call>"]
AGAIN = ["<tool_call>\n", '{"name": "look_up", "arguments": {"word": "lift"}}', "\n</tool_call>"]
TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}]
FLAGS = ("--cache-eviction", "lease", "--tool-call-parser", "hermes", "--num-kv-blocks", "256", "--kernels", "torch")


class Agent:
    """A client that keeps its conversation."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self.messages: list[dict[str, Any]] = [{"role": "user", "content": "What is a chairlift? " * 4}]

    def turn(self) -> dict[str, Any]:
        """Send the conversation, and answer the tool call of the reply. Returns the reply."""
        body = {"model": "scripted", "messages": self.messages, "tools": TOOLS, "temperature": 0, "return_timing": True}
        request = urllib.request.Request(
            f"{self.served.base_url}/chat/completions",
            json.dumps(body).encode(),
            {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=PATIENCE) as response:
            reply: dict[str, Any] = json.loads(response.read())
        message = reply["choices"][0]["message"]
        (call,) = message["tool_calls"]
        assert call["function"]["name"] == "look_up"
        result = {"role": "tool", "tool_call_id": call["id"], "content": "It carries skiers uphill. " * 3}
        self.messages += [{"role": "assistant", "content": None, "tool_calls": message["tool_calls"]}, result]
        return reply


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = write_scripted_model(tmp_path_factory.mktemp("model") / "scripted", FIRST, AGAIN, TEMPLATE)
    with ServerProcess(str(folder), *FLAGS, "--api-key", KEY) as server:
        yield Served(server)


def until(served: Served, name: str, value: float, **labels: str) -> Metrics:
    """Metrics of the server when one of them has this value. The engine's process reports a moment later."""
    end = time.monotonic() + PATIENCE
    while True:
        metrics = Metrics(served.get("/metrics").decode())
        if (metrics.value(name, **labels) or 0.0) == value:
            return metrics
        assert time.monotonic() < end, f"{name} is {metrics.value(name, **labels)}, not {value}"


def open_pauses(served: Served) -> list[list[Any]]:
    """[request, end, tools, tokens, end of the lease] of each pause that is not over, from the lines of the live
    view."""
    found: dict[int, list[Any]] = {}
    for line in map(json.loads, served.get("/live/export?format=jsonl").splitlines()):
        for pause in line.get("key", {}).get("pauses", []):
            found[pause[0]] = pause[:5]
        for kind, number, *fields in line.get("do", []):
            if kind == "pause":
                found[number] = [number, *fields]
            elif kind == "resume":
                found.pop(fields[1], None)
    return list(found.values())


def test_a_pause_is_seen_and_the_next_turn_finds_its_cache(served: Served) -> None:
    agent = Agent(served)
    assert "turn_cache" not in agent.turn()["timing"]
    metrics = until(served, "paused_conversations", 1, tool="look_up")
    assert (metrics.value("pauses_total"), metrics.value("pause_leases_total")) == (1, 1)
    leased = metrics.value("leased_blocks", level="3")
    assert leased and leased <= (metrics.value("lease_budget_blocks") or 0)
    ((_, ended, tools, num_tokens, lease_until),) = open_pauses(served)
    assert (tools, lease_until > ended, num_tokens > 100) == (["look_up"], True, True)

    reply = agent.turn()
    assert reply["timing"]["turn_cache"] == "kept"
    gap = reply["timing"]["pause_ms"] / 1000
    assert gap > 0
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] >= 0.9 * num_tokens - 32
    metrics = until(served, "pauses_total", 2)
    assert metrics.value("turns_after_pause_total", cache="kept") == 1
    assert (metrics.buckets("kv_block_reuse_gap_seconds")[float("inf")]) > 0
    metrics = until(served, "paused_conversations", 1, tool="look_up")  # the first pause is over, the second has begun
    ((_, ended, _, _, lease_until),) = open_pauses(served)
    assert lease_until - ended == pytest.approx(1.1 * gap, rel=0.05), "the lease follows from the pause that was learnt"
    agent.turn()
    metrics = until(served, "pauses_total", 3)
    assert metrics.value("turns_after_pause_total") == 2
