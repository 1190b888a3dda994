"""Anthropic's and OpenAI's own clients ask a real server to keep prompts, and read what it kept."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from tests.e2e.server_process import ServerProcess

pytestmark = pytest.mark.full

FLAGS = ("--num-kv-blocks", "129", "--max-model-len", "1024", "--max-num-seqs", "4", "--cache-eviction")
KEYS = "ours k1\ntheirs k2\n"
MANUAL = "Here is how a lift is built. " * 8
"""System text of about 230 tokens; HashLM has a token per byte."""


@pytest.fixture(scope="module", params=["lease", "lru"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(KEYS)
    with ServerProcess("hashlm", *FLAGS, request.param, "--api-key-file", str(keys)) as process:
        yield f"http://127.0.0.1:{process.port}", request.param


def messages_client(url: str, key: str = "k1") -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url, api_key=key, max_retries=0)


def ask(client: anthropic.Anthropic, manual: str, said: str, ttl: str | None) -> Any:
    control: Any = None if ttl is None else {"type": "ephemeral", "ttl": ttl}
    system: Any = [{"type": "text", "text": manual, "cache_control": control}]
    reply = client.messages.create(
        model="hashlm", max_tokens=1, system=system, messages=[{"role": "user", "content": said}]
    )
    counted = client.messages.count_tokens(
        model="hashlm", system=system, messages=[{"role": "user", "content": said}]
    ).input_tokens
    usage = reply.usage
    parts = usage.input_tokens, usage.cache_creation_input_tokens, usage.cache_read_input_tokens
    assert sum(part or 0 for part in parts) == counted
    return usage


def flood(client: anthropic.Anthropic, name: str, ttl: str | None = None) -> None:
    """Send more tokens than the cache holds (2,048)."""
    for number in range(8):
        ask(client, (f"{name} {number} " * 60)[:800], "Hi", ttl)


@pytest.mark.parametrize("ttl", ["5m", "1h"])
def test_a_kept_prompt_survives_a_flood(server: tuple[str, str], ttl: str) -> None:
    """It does with leases, and not with LRU."""
    url, rule = server
    client = messages_client(url)
    manual = f"{ttl}. {MANUAL}"
    first = ask(client, manual, "What is a chair?", ttl)
    assert first.cache_read_input_tokens == 0
    created = first.cache_creation
    assert created is not None
    of_ttl = created.ephemeral_1h_input_tokens if ttl == "1h" else created.ephemeral_5m_input_tokens
    assert of_ttl == first.cache_creation_input_tokens >= len(manual) - 16
    flood(client, f"flood {ttl}")
    second = ask(client, manual, "And what is a lift?", ttl)
    if rule == "lease":
        assert second.cache_read_input_tokens >= first.cache_creation_input_tokens
        assert second.cache_creation_input_tokens == 0
    else:
        assert second.cache_read_input_tokens == 0
        assert second.cache_creation_input_tokens == first.cache_creation_input_tokens


def test_another_key_reads_nothing_and_cannot_take_the_share_of_the_first(server: tuple[str, str]) -> None:
    url, rule = server
    ours, theirs = messages_client(url), messages_client(url, "k2")
    manual = f"Ours. {MANUAL}"
    ask(ours, manual, "Hi", "5m")
    foreign = ask(theirs, manual, "Hi", "1h")
    assert foreign.cache_read_input_tokens == 0
    flood(theirs, "greedy", "1h")
    again = ask(ours, manual, "Hi again", "5m")
    assert (again.cache_read_input_tokens > len(manual) - 32) is (rule == "lease")


def test_openais_client_reads_what_it_asked_to_keep(server: tuple[str, str]) -> None:
    url, rule = server
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="k1", max_retries=0)
    said: list[Any] = [{"role": "user", "content": f"OpenAI. {MANUAL}"}]
    fields: dict[str, Any] = {"prompt_cache_key": "chat 1", "prompt_cache_retention": "24h"}

    def usage() -> Any:
        reply = client.chat.completions.create(model="hashlm", messages=said, max_tokens=1, **fields)
        assert reply.usage is not None and reply.usage.prompt_tokens_details is not None
        return reply.usage.prompt_tokens_details

    first = usage()
    assert (first.cached_tokens, first.cache_write_tokens > 200) == (0, True)
    flood(messages_client(url), "flood of OpenAI")
    second = usage()
    assert (second.cached_tokens > 200) is (rule == "lease")
