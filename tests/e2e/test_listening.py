"""Each mode listens on the loopback address only, unless a flag says otherwise, and on no other port than its own."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from chairlift.fleet.node import addresses_of, is_open
from tests.e2e.server_process import PATIENCE, ServerProcess

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc needs Linux")


def family_of(pid: int) -> Iterator[int]:
    """The process and all processes that it has started, and so on."""
    yield pid
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            yield from family_of(int(child))


def listening(pid: int) -> list[str]:
    """Addresses on which the process and its children listen."""
    return sorted(address for each in family_of(pid) for address in addresses_of(each))


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--replicas", "2", "--batch-dir", "BATCHES"),
        pytest.param(("--max-replicas", "2", "--autoscale-wait", "0.5"), marks=pytest.mark.nightly),
        pytest.param(("--metrics-prefix", "vllm", "--no-enable-prefix-caching"), marks=pytest.mark.nightly),
    ],
    ids=["one engine", "replicas and batches", "autoscaling", "metrics"],
)
def test_a_server_listens_on_its_port_only(flags: tuple[str, ...], tmp_path: Path) -> None:
    flags = tuple(str(tmp_path / "batches") if flag == "BATCHES" else flag for flag in flags)
    with ServerProcess("hashlm", *flags) as server:
        assert len(list(family_of(server.process.pid))) >= 2, "the engine is a process of its own"
        assert listening(server.process.pid) == [f"127.0.0.1:{server.port}"]


@pytest.mark.skipif(importlib.util.find_spec("zmq") is None, reason="pyzmq is not installed")
def test_events_of_the_prefix_cache_listen_where_the_flag_says() -> None:
    with ServerProcess("hashlm", "--kv-events-endpoint", "tcp://127.0.0.1:*") as server:
        found = listening(server.process.pid)
        assert len(found) == 2 and not any(map(is_open, found))


def test_the_page_of_a_recording_is_on_this_machine_only() -> None:
    command = [sys.executable, "-m", "chairlift", "trace", "view", "--demo"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, process_group=0) as page:
        assert page.stdout is not None
        try:
            shown = re.match(r"http://(127\.0\.0\.1:\d+)/live", page.stdout.readline())
            assert shown is not None and listening(page.pid) == [shown[1]]
        finally:
            os.kill(page.pid, signal.SIGINT)
            page.wait(PATIENCE)


def test_an_address_is_open_unless_it_is_a_loopback_address() -> None:
    assert not any(map(is_open, ("127.0.0.1:80", "[::1]:80", "127.8.8.8:1", "[::ffff:127.0.0.1]:4000")))
    assert all(map(is_open, ("0.0.0.0:80", "[::]:80", "192.0.2.2:80", "[::ffff:192.0.2.2]:80", "[2001:db8::1]:80")))
