"""A port for what is told where to listen, in a process that starts later."""

from __future__ import annotations

import contextlib
import random
import socket

__all__ = ["free_port"]


def free_port() -> int:
    """A free port of this machine, of those that nobody gets who asks for any (on Linux they begin at 32,768)."""
    while True:
        port = random.SystemRandom().randrange(10_000, 30_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
