"""Starts an engine process on another machine, and connects it to the door (the server's process).

The other machine runs a :class:`NodeReplica`, for example in a Ray actor. It listens on a port for one connection,
which must begin with a secret that the door has created. It passes this connection to the engine process as standard
input. So the messages of :mod:`~chairlift.engine.process.messages` go directly between the engine process and the door.
The connection is not encrypted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hmac
import ipaddress
import os
import re
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from chairlift.engine.process.process_client import describe_exit, engine_command
from chairlift.errors import EngineDeadError
from chairlift.fleet.local import machine_processors
from chairlift.kernels.control_group import total_memory
from chairlift.version import __version__

__all__ = ["SECRET_BYTES", "NodeFacts", "NodeReplica", "addresses_of", "is_open", "keep_alive", "listening_addresses"]

SECRET_BYTES: Final = 32
_HELLO_SECONDS: Final = 2.0
"""Time in seconds within which a connection must send the secret."""
_OPEN_SECONDS: Final = 30.0
"""Time in seconds for which the port stays open for the connection from the server (the door)."""
_KEEP_ALIVE: Final = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 25_000}
"""TCP socket option -> value, so that a connection ends soon after the other machine fails: two times in seconds, a
number of probes, and a time in milliseconds."""
_RAY: Final = re.compile(rb"(^|/)ray(::|let\b|/)|(^|/)gcs_server\b")
_METRICS: Final = re.compile(rb"/ray/autoscaler/.*monitor\.py")
"""Command of Ray's process that shows metrics to everybody who can reach its port."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """Properties of another machine, which the server's process (the door) gets before an engine starts on that
    machine."""

    address: tuple[str, int]
    """Host and port on which the replica waits for the connection from the server (the door)."""
    version: str
    """Version of Chairlift on the machine."""
    processors: list[int]
    """Numbers of the processors that the replica may use, ordered by socket and core. Empty if they are unknown."""
    memory: int
    """Size of the memory that the replica may use, in bytes."""
    authenticated: bool
    """Whether Ray on the machine requires a token."""
    listening: dict[str, str]
    """Address on which a Ray process of the machine listens -> name of the process (``metrics`` for the port that needs
    no token)."""


class NodeReplica:
    """Starts an engine process on this machine, for a server (the door) on another machine.

    The methods must be called in order (listen, start, wait), in one thread: the operating system ends the engine when
    this thread ends.
    """

    def __init__(self) -> None:
        self._server: socket.socket | None = None
        self._secret = b""
        self._process: subprocess.Popen[bytes] | None = None

    def listen(self, host: str, secret: bytes) -> NodeFacts:
        """Open a port for a connection that begins with ``secret`` (SECRET_BYTES bytes). Returns facts about the
        machine."""
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
        """Wait for the connection from the server (the door), and start the engine process. Returns the id of the
        process.

        The engine runs on these ``processors``; if the list is empty, on all. Raises EngineDeadError if the server does
        not connect in time.
        """
        with self._accept() as sock:
            keep_alive(sock)
            environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
            self._process = subprocess.Popen(
                engine_command(processors), stdin=sock.fileno(), env=environment, start_new_session=True
            )
        return self._process.pid

    def wait(self) -> str:
        """Wait until the engine process has ended. Returns a text that says how it ended."""
        return describe_exit(None if self._process is None else self._process.wait())

    def _accept(self) -> socket.socket:
        """Accept connections until one of them sends the secret, and return that connection."""
        server = self._server
        self._server = None
        if server is None:
            raise EngineDeadError("the replica does not listen")
        with server:
            end = time.monotonic() + _OPEN_SECONDS
            while (remaining := end - time.monotonic()) > 0:
                server.settimeout(remaining)
                with contextlib.suppress(OSError):
                    sock, _ = server.accept()
                    if self._knows(sock):
                        sock.settimeout(None)
                        return sock
                    sock.close()
        raise EngineDeadError(f"the door did not connect within {_OPEN_SECONDS:g} s; check that it reaches this port")

    def _knows(self, sock: socket.socket) -> bool:
        received = b""
        end = time.monotonic() + _HELLO_SECONDS
        while len(received) < SECRET_BYTES and (remaining := end - time.monotonic()) > 0:
            sock.settimeout(remaining)
            try:
                part = sock.recv(SECRET_BYTES - len(received))
            except OSError:
                return False
            if not part:
                return False
            received += part
        return hmac.compare_digest(received, self._secret)


def keep_alive(sock: socket.socket) -> None:
    """Set a connection to end within half a minute when the other machine fails, and to send small messages at once."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE.items():
        if hasattr(socket, name):  # some systems do not have all options
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def listening_addresses() -> dict[str, str]:
    """TCP address on which a Ray process of this user listens -> name of the process. Empty on systems without
    ``/proc``."""
    sockets = _listening_sockets()
    found = dict[str, str]()
    for folder in Path("/proc").glob("[0-9]*") if sockets else ():
        with contextlib.suppress(OSError):  # the process has ended or belongs to another user
            command = (folder / "cmdline").read_bytes()
            if not _RAY.search(command):
                continue
            name = "metrics" if _METRICS.search(command) else (folder / "comm").read_text().strip()
            found |= dict.fromkeys(addresses_of(int(folder.name), sockets), name)
    return dict(sorted(found.items()))


def addresses_of(pid: int, sockets: Mapping[str, str] | None = None) -> list[str]:
    """TCP addresses on which a process of this user listens. Raises OSError if it has ended. Empty on systems without
    ``/proc``. ``sockets`` are the listening sockets, if the caller knows them."""
    known = _listening_sockets() if sockets is None else sockets
    found = []
    for link in Path("/proc", str(pid), "fd").iterdir() if known else ():
        with contextlib.suppress(OSError):
            found.append(known.get(os.readlink(link), ""))
    return sorted(filter(None, found))


def is_open(address: str) -> bool:
    """Whether other machines can reach a listening socket with this ``address``, which is ``HOST:PORT``."""
    host = ipaddress.ip_address(address.rpartition(":")[0].strip("[]"))
    mapped = getattr(host, "ipv4_mapped", None)
    return not (mapped or host).is_loopback


def _listening_sockets() -> dict[str, str]:
    """Name of a listening socket, as in ``/proc/PID/fd`` -> address on which the socket listens."""
    found = {}
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        with contextlib.suppress(OSError):
            for line in Path("/proc/net", table).read_text().splitlines()[1:]:
                fields = line.split()
                host, port = fields[1].split(":")
                if fields[3] == "0A":  # LISTEN
                    raw = bytes.fromhex(host)  # words of four bytes in the byte order of the machine
                    words = [raw[at : at + 4][::-1] for at in range(0, len(raw), 4)]
                    text = socket.inet_ntop(family, b"".join(words))
                    shown = f"[{text}]" if family == socket.AF_INET6 else text
                    found[f"socket:[{fields[9]}]"] = f"{shown}:{int(port, 16)}"
    return found
