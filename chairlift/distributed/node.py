"""An engine process on another machine: what runs there, and the connection to it.

The machine of the engine runs a :class:`NodeReplica`, for example in a Ray actor. It listens on a port of its own for
one connection, which must begin with a secret that the door has made for it. It hands that connection to the engine
process as standard input. So the frames of :mod:`~chairlift.engine.messages` go from the engine's process straight to
the door, and nothing else takes part while tokens are generated. The connection is not encrypted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hmac
import os
import re
import socket
import subprocess
import time
from pathlib import Path
from typing import Final

from chairlift.distributed.local import machine_processors
from chairlift.engine.process_client import describe_exit, engine_command
from chairlift.errors import EngineDeadError
from chairlift.kernels.control_group import total_memory
from chairlift.version import __version__

__all__ = ["SECRET_BYTES", "NodeFacts", "NodeReplica", "keep_alive", "listening_addresses"]

SECRET_BYTES: Final = 32
_HELLO_SECONDS: Final = 2.0
"""Seconds within which a connection must send the secret."""
_OPEN_SECONDS: Final = 30.0
"""Seconds that the port stays open for the door."""
_KEEP_ALIVE: Final = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 25_000}
"""Seconds, except for the last: milliseconds."""
_RAY: Final = re.compile(rb"(^|/)ray(::|let\b|/)|(^|/)gcs_server\b")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """What the door learns of a machine before it starts an engine there."""

    address: tuple[str, int]
    """Where the replica waits for the door's connection."""
    version: str
    """Version of Chairlift there."""
    processors: list[int]
    """Numbers of the processors that it may use, neighbours of a core and a socket together; empty if unknown."""
    memory: int
    """Bytes of memory that it may use."""
    authenticated: bool
    """Ray asks for a token there."""
    listening: dict[str, str]
    """Addresses on which Ray's processes there listen, and the process of each."""


class NodeReplica:
    """One engine process on this machine, for a door elsewhere. Methods are called in order, in one thread: the system
    ends the engine when this thread ends."""

    def __init__(self) -> None:
        self._server: socket.socket | None = None
        self._secret = b""
        self._process: subprocess.Popen[bytes] | None = None

    def listen(self, host: str, secret: bytes) -> NodeFacts:
        """Open a port for a connection that begins with ``secret`` (SECRET_BYTES bytes)."""
        if len(secret) != SECRET_BYTES:
            raise ValueError(f"the secret must have {SECRET_BYTES} bytes, got {len(secret)}")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._server = socket.create_server((host, 0), family=family)
        self._secret = secret
        return NodeFacts(
            address=(host, self._server.getsockname()[1]),
            version=__version__,
            processors=[number for *_, number in machine_processors()],
            memory=total_memory(),
            authenticated=os.environ.get("RAY_AUTH_MODE", "").lower() == "token",
            listening=listening_addresses(),
        )

    def start(self, processors: list[int]) -> int:
        """Wait for the door and start the engine, on these ``processors`` if there are any. Returns the process's id.
        Raises EngineDeadError if the door does not come."""
        with self._accept() as sock:
            keep_alive(sock)
            kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
            self._process = subprocess.Popen(
                engine_command(processors), stdin=sock.fileno(), env=kept, start_new_session=True
            )
        return self._process.pid

    def wait(self) -> str:
        """Wait for the end of the engine. Returns how it ended, in words."""
        return describe_exit(None if self._process is None else self._process.wait())

    def _accept(self) -> socket.socket:
        """The first connection that knows the secret."""
        server, self._server = self._server, None
        if server is None:
            raise EngineDeadError("the replica does not listen")
        with server:
            end = time.monotonic() + _OPEN_SECONDS
            while (left := end - time.monotonic()) > 0:
                server.settimeout(left)
                with contextlib.suppress(OSError):
                    sock, _ = server.accept()
                    if self._knows(sock):
                        sock.settimeout(None)
                        return sock
                    sock.close()
        raise EngineDeadError(f"the door did not connect within {_OPEN_SECONDS:g} s; check that it reaches this port")

    def _knows(self, sock: socket.socket) -> bool:
        told, end = b"", time.monotonic() + _HELLO_SECONDS
        while len(told) < SECRET_BYTES and (left := end - time.monotonic()) > 0:
            sock.settimeout(left)
            try:
                part = sock.recv(SECRET_BYTES - len(told))
            except OSError:
                return False
            if not part:
                return False
            told += part
        return hmac.compare_digest(told, self._secret)


def keep_alive(sock: socket.socket) -> None:
    """Let a connection end within half a minute when the other machine is gone, and send small frames at once."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE.items():
        if hasattr(socket, name):  # not on every system
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def listening_addresses() -> dict[str, str]:
    """TCP addresses on which Ray's processes of this user listen, and the name of each process. Empty where the system
    does not tell."""
    sockets = _listening_sockets()
    found: dict[str, str] = {}
    for folder in Path("/proc").glob("[0-9]*") if sockets else ():
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            command = (folder / "cmdline").read_bytes()
            if not _RAY.search(command):
                continue
            name = (folder / "comm").read_text().strip()
            for link in (folder / "fd").iterdir():
                with contextlib.suppress(OSError):
                    address = sockets.get(os.readlink(link))
                    if address is not None:
                        found[address] = name
    return dict(sorted(found.items()))


def _listening_sockets() -> dict[str, str]:
    """Address by the name of a listening socket in ``/proc/PID/fd``."""
    found = {}
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        with contextlib.suppress(OSError):
            for line in Path("/proc/net", table).read_text().splitlines()[1:]:
                fields = line.split()
                host, port = fields[1].split(":")
                if fields[3] == "0A":  # LISTEN
                    raw = bytes.fromhex(host)  # words of four bytes in the machine's order
                    words = [raw[at : at + 4][::-1] for at in range(0, len(raw), 4)]
                    text = socket.inet_ntop(family, b"".join(words))
                    shown = f"[{text}]" if family == socket.AF_INET6 else text
                    found[f"socket:[{fields[9]}]"] = f"{shown}:{int(port, 16)}"
    return found
