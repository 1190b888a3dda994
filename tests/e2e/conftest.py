"""Servers that several tests share."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.e2e.served import KEY, SMALL, Served
from tests.e2e.server_process import ServerProcess


@pytest.fixture(scope="session")
def shared_server() -> Iterator[ServerProcess]:
    with ServerProcess("hashlm:5ms", *SMALL) as server:
        yield server


@pytest.fixture
def served(shared_server: ServerProcess) -> Iterator[Served]:
    """A server with HashLM that takes 5 ms per step and computes four sequences at once. It must be idle after every
    test."""
    served = Served(shared_server)
    yield served
    served.wait_until_idle()


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    """OpenAI's official client, connected to ``served``, without retries."""
    with openai.OpenAI(base_url=served.base_url, api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture(scope="session")
def bundled_server() -> Iterator[ServerProcess]:
    with ServerProcess("bundled", "--num-kv-blocks", "128", "--api-key", KEY) as server:
        yield server
