"""The file operations of a store: the seam at which tests put a disk that tears, loses, delays and damages writes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from chairlift.base.disk_space import reserve_space
from chairlift.errors import ConfigError

__all__ = ["Disk", "DiskFile", "OsDisk"]


class DiskFile(Protocol):
    """An open file. All methods raise OSError."""

    def read(self, at: int, nbytes: int) -> bytes:
        """Bytes from offset ``at`` on; fewer than ``nbytes`` at the end of the file."""
        ...

    def write(self, at: int, data: bytes | memoryview) -> None: ...

    def sync(self) -> None:
        """Wait until what was written is on the disk."""
        ...

    def close(self) -> None: ...


class Disk(Protocol):
    """A directory with files. All methods raise OSError, unless they say otherwise."""

    def open(self, name: str, nbytes: int | None = None) -> DiskFile:
        """Open a file for reading. With ``nbytes``, open it for writing too, make it if it is missing, and reserve its
        space."""
        ...

    def create(self, name: str, data: bytes) -> None:
        """Make a file that has this content from the first moment on. Raises FileExistsError if it is there."""
        ...

    def lock(self, name: str) -> bool:
        """Take a file's lock until this process ends or :meth:`close` is called. False: another process has it."""
        ...

    def unlock(self, name: str) -> None:
        """Release a lock that :meth:`lock` has taken."""
        ...

    def sizes(self) -> dict[str, int]:
        """Name of each file below the directory, with ``/`` between folders -> its size in bytes."""
        ...

    def written(self, name: str) -> float:
        """Time of the file's last change."""
        ...

    def remove(self, name: str) -> None:
        """Remove a file, and its folder if it was the last."""
        ...

    def close(self) -> None:
        """Release the locks."""
        ...


class _OsFile:
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def read(self, at: int, nbytes: int) -> bytes:
        parts = []
        while nbytes > 0:
            part = os.pread(self._descriptor, nbytes, at)
            if not part:
                break
            parts.append(part)
            at += len(part)
            nbytes -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def write(self, at: int, data: bytes | memoryview) -> None:
        rest = memoryview(data)
        while rest:
            done = os.pwrite(self._descriptor, rest, at)
            rest = rest[done:]
            at += done

    def sync(self) -> None:
        os.fdatasync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)


class OsDisk:
    """A directory of the operating system, with mode 0700 and files with mode 0600: prompts can be read from them.

    Raises ConfigError if the directory is a symbolic link, belongs to somebody else, or cannot be made.
    """

    def __init__(self, directory: str) -> None:
        self._root = Path(directory)
        self._locks: dict[str, int] = {}
        """Name of a file whose lock is held -> its descriptor."""
        try:
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = self._root.lstat()
        except OSError as error:
            raise ConfigError(
                f"kv_store is {directory!r}, which cannot be made: {error.strerror}; name one that you may write"
            ) from None
        if not stat.S_ISDIR(found.st_mode):
            raise ConfigError(f"kv_store is {directory!r}, which is not a directory (a link is refused); name another")
        if found.st_uid != os.getuid():
            raise ConfigError(
                f"kv_store is {directory!r}, which belongs to user {found.st_uid}, not to {os.getuid()};"
                " name a directory of your own, because whoever writes to it decides what the model reads"
            )
        if found.st_mode & 0o022:
            raise ConfigError(f"kv_store is {directory!r}, which others may write; run chmod 700 {directory}")

    def _open(self, name: str, flags: int) -> int:
        path = self._root / name
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        found = os.fstat(descriptor)
        if found.st_uid != os.getuid() or not stat.S_ISREG(found.st_mode):
            os.close(descriptor)
            raise PermissionError(1, f"{name} is not a file of this user")
        return descriptor

    def open(self, name: str, nbytes: int | None = None) -> DiskFile:
        if nbytes is None:
            return _OsFile(self._open(name, os.O_RDONLY))
        descriptor = self._open(name, os.O_RDWR | os.O_CREAT)
        try:
            os.ftruncate(descriptor, nbytes)
            if nbytes:
                reserve_space(descriptor, nbytes)
        except OSError:
            os.close(descriptor)
            raise
        return _OsFile(descriptor)

    def create(self, name: str, data: bytes) -> None:
        path = self._root / name
        draft = f"{name}.{os.getpid()}.{os.urandom(4).hex()}"
        file = _OsFile(self._open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL))
        try:
            file.write(0, data)
            file.sync()
            os.link(self._root / draft, path)  # fails if the file is there; a rename would replace it
        finally:
            file.close()
            (self._root / draft).unlink()

    def lock(self, name: str) -> bool:
        descriptor = self._open(name, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return False
        self._locks[name] = descriptor
        return True

    def unlock(self, name: str) -> None:
        os.close(self._locks.pop(name))

    def sizes(self) -> dict[str, int]:
        return {str(path.relative_to(self._root)): path.lstat().st_size for path in self._files()}

    def _files(self) -> Iterator[Path]:
        for path in sorted(self._root.rglob("*")):
            if not path.is_symlink() and path.is_file():
                yield path

    def written(self, name: str) -> float:
        return (self._root / name).lstat().st_mtime

    def remove(self, name: str) -> None:
        path = self._root / name
        path.unlink()
        with contextlib.suppress(OSError):
            path.parent.rmdir()

    def close(self) -> None:
        for descriptor in self._locks.values():
            os.close(descriptor)
        self._locks.clear()
