"""Finds a free port for a process that starts later and needs its port as an argument."""

from __future__ import annotations

import contextlib
import random
import socket

__all__ = ["free_port"]


def free_port() -> int:
    """Free port outside the range from which the system assigns ports itself (on Linux from 32,768 on)."""
    while True:
        port = random.SystemRandom().randrange(10_000, 30_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
