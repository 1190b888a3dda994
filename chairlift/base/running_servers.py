"""The running servers of this user: each keeps a file in a runtime directory, which ``chairlift ps`` reads.

A server holds a lock on its file. The system releases the lock when the process ends, however it ends, so a file
without a lock belongs to a server that was killed. A process id alone would not say so: ids are used again. Standard
library only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

__all__ = ["RunningServer", "announced", "running_servers"]

_FOLDER: Final = "chairlift"
_MAX_BYTES: Final = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunningServer:
    """What a server says about itself when it binds its port."""

    pid: int
    url: str
    models: tuple[str, ...]
    """Names of the model for clients."""
    loaded: tuple[str, ...]
    """The models as the settings name them: absolute paths, or ids of the Hub."""
    started_at: float
    """Unix time."""
    version: str


@contextlib.contextmanager
def announced(server: RunningServer) -> Iterator[None]:
    """Context manager: ``chairlift ps`` lists the server while the block runs.

    Without a directory that only this user can write, or on a full disk, the server is not listed; nothing is raised.
    """
    file = None
    path = None
    try:
        path = _folder(make=True) / f"{server.pid}.json"
        part = path.with_suffix(".part")
        file = part.open("w", encoding="utf-8")
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        json.dump(dataclasses.asdict(server), file)
        file.flush()
        part.rename(path)  # only now, because a reader removes a file without a lock
    except OSError:
        pass
    try:
        yield
    finally:
        if file is not None and path is not None:
            with contextlib.suppress(OSError):
                path.unlink()
            file.close()


def running_servers() -> list[RunningServer]:
    """Servers of this user that run on this machine, the oldest first. Files of servers that were killed are
    removed."""
    found = []
    with contextlib.suppress(OSError):
        for path in _folder(make=False).glob("*.json"):
            with contextlib.suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
                if (server := _read(path)) is not None:
                    found.append(server)
    return sorted(found, key=lambda each: each.started_at)


def _read(path: Path) -> RunningServer | None:
    """The server of a file; None if it has ended."""
    with path.open("rb") as file:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if os.fstat(file.fileno()).st_nlink:  # otherwise another process has removed it
                path.unlink()
            return None
        given: dict[str, Any] = json.loads(file.read(_MAX_BYTES))
    return RunningServer(
        pid=int(given["pid"]),
        url=str(given["url"]),
        models=tuple(map(str, given["models"])),
        loaded=tuple(map(str, given["loaded"])),
        started_at=float(given["started_at"]),
        version=str(given["version"]),
    )


def _folder(*, make: bool) -> Path:
    """The directory of the files. Raises OSError if it does not exist, or if another user could write into it."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    if base and os.path.isdir(base):
        folder = Path(base) / _FOLDER
    else:
        folder = Path(tempfile.gettempdir()) / f"{_FOLDER}-{os.getuid()}"
    if make:
        folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(f"{folder} is not a directory of this user alone")
    return folder
