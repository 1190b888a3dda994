"""The guard that keeps the whole suite on this machine does its work; it is installed in tests/conftest.py."""

from __future__ import annotations

import socket
import subprocess
import sys
from typing import Any

import pytest

from tests.network_guard import may_reach


@pytest.mark.parametrize(
    ("address", "allowed"),
    [
        (("127.0.0.1", 80), True),
        (("127.9.9.9", 80), True),
        (("localhost", 80), True),
        (("::1", 80, 0, 0), True),
        (("::ffff:127.0.0.1", 80, 0, 0), True),
        (("0.0.0.0", 80), True),
        (("", 80), True),
        ("/run/a.sock", True),
        (b"\0abstract", True),
        ((0, 0), True),
        (("93.184.215.14", 80), False),
        (("10.0.0.1", 80), False),
        (("169.254.169.254", 80), False),
        (("::ffff:8.8.8.8", 80, 0, 0), False),
        (("fe80::1%eth0", 80, 0, 2), False),
        (("2606:2800::1", 80, 0, 0), False),
        (("example.org", 80), False),
        ((b"example.org", 80), False),
        (("localhost.example.org", 80), False),
    ],
)
def test_only_this_machine_may_be_reached(address: Any, allowed: bool) -> None:
    assert may_reach(address) is allowed


GUARDED = """
import socket
from tests.network_guard import OutboundConnection, install
install()
install()
listener = socket.create_server(("127.0.0.1", 0))
socket.create_connection(listener.getsockname()).close()
for work in (
    lambda: socket.create_connection(("192.0.2.1", 80), timeout=0.1),
    lambda: socket.create_connection(("example.org", 80), timeout=0.1),
    lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("192.0.2.1", 53)),
    lambda: socket.socket().connect_ex(("192.0.2.1", 80)),
    lambda: __import__("urllib.request").request.urlopen("http://192.0.2.1/", timeout=0.1),
):
    try:
        work()
    except OutboundConnection:
        print("refused")
"""


def test_a_connection_that_leaves_the_machine_is_refused() -> None:
    done = subprocess.run([sys.executable, "-c", GUARDED], capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["refused"] * 5, done.stderr


def test_the_guard_is_on_in_this_suite() -> None:
    from tests.network_guard import OutboundConnection

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, pytest.raises(OutboundConnection):
        probe.connect(("192.0.2.1", 9))  # for documentation only; a datagram socket would send nothing
