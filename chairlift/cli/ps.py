"""``chairlift ps``: the running servers of this user."""

from __future__ import annotations

import argparse
import contextlib
import time
from typing import Any, Final

from chairlift.base.running_servers import RunningServer, running_servers
from chairlift.cli.remote_server import MAX_BYTES, RemoteServer, parse_object, plain
from chairlift.cli.table import duration, print_table
from chairlift.errors import ChairliftError

__all__ = ["DESCRIPTION", "SUMMARY", "add_arguments", "run"]

SUMMARY: Final = "list your running servers and their models"
DESCRIPTION: Final = """List the servers that you run on this machine (chairlift serve), and their models.

Servers of other users and in other containers are not listed. chairlift top shows the requests of one."""

_ASK_SECONDS: Final = 2.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``chairlift ps``: there are none."""


def run(args: argparse.Namespace) -> int:
    """Print the list. Returns 0."""
    servers = running_servers()
    if not servers:
        print("you run no server on this machine; start one with: chairlift serve")
        return 0
    rows = []
    for server in servers:
        up = duration(time.time() - server.started_at)
        rows.append((str(server.pid), server.url, _state(server), up, ", ".join(map(plain, _models(server)))))
    print_table(("PID", "URL", "STATE", "UP", "MODELS"), rows)
    return 0


def _state(server: RunningServer) -> str:
    """State of the server, in the words of its path /ready."""
    try:
        answer = _get(server, "/ready", (200, 503))
    except ChairliftError:
        return "does not answer"
    reason = answer.get("reason")
    return plain(str(reason)).removeprefix("the ") if isinstance(reason, str) else "ready"


def _models(server: RunningServer) -> list[str]:
    """Names of the models that the server lists now; those of its start if it wants a key or does not answer."""
    with contextlib.suppress(ChairliftError):
        listed = _get(server, "/v1/models", (200,)).get("data")
        names = [each.get("id") for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []
        if names and all(isinstance(name, str) for name in names):
            return [str(name) for name in names]
    return list(server.models)


def _get(server: RunningServer, path: str, statuses: tuple[int, ...]) -> dict[str, Any]:
    remote = RemoteServer(server.url)
    with remote.request("GET", path, seconds=_ASK_SECONDS, whole=True, statuses=statuses) as response:
        return parse_object(response.read(MAX_BYTES))
