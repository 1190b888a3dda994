"""A SQLite database in a directory that one process at a time may use."""

from __future__ import annotations

import contextlib
import fcntl
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from chairlift.errors import ConfigError

__all__ = ["LockedDatabase"]


class LockedDatabase:
    """The database ``FILE`` in ``directory``, which is created if needed, with its subdirectories ``folders``.

    ``schema`` is the SQL that makes the tables of a new database, whose format is ``version``. ``what`` says in the
    plural what the directory keeps, and ``setting`` is the setting that names it; both are for messages. The database
    uses a write-ahead log (WAL) that is flushed at each commit, so committed changes also survive a power failure. One
    thread at a time may use it. Raises ConfigError for a directory that cannot be used, or that another process uses.
    """

    def __init__(
        self,
        directory: Path,
        file: str,
        *,
        schema: str,
        version: int,
        what: str,
        setting: str,
        folders: Sequence[str] = (),
    ) -> None:
        self._lock: IO[str] | None = None
        another = f"give another {setting}"
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            for name in folders:
                (directory / name).mkdir(exist_ok=True, mode=0o700)
            self._lock = (directory / "lock").open("w")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.db = sqlite3.connect(directory / file, isolation_level=None, check_same_thread=False)
            found = self._opened(schema, version)
        except BlockingIOError:
            self._unlock()
            raise ConfigError(
                f"another server uses the {what} in {directory}; give each its own {setting}, or stop the other one"
            ) from None
        except (OSError, sqlite3.Error) as error:
            self._unlock()
            reason = error.strerror if isinstance(error, OSError) else str(error)
            if isinstance(error, FileExistsError):
                reason = "it is not a directory"
            raise ConfigError(f"cannot keep {what} in {directory}: {reason}; {another}") from None
        if found != version:
            self.close()
            raise ConfigError(
                f"{directory / file} has format {found}, and this version reads format {version}; {another}"
            )

    def _opened(self, schema: str, version: int) -> int:
        """Format of the database, whose tables are made if it is new."""
        try:
            self.db.execute("PRAGMA journal_mode = WAL")
            self.db.execute("PRAGMA synchronous = FULL")
            found = int(self.db.execute("PRAGMA user_version").fetchone()[0])
            if found:
                return found
            self.db.executescript(f"BEGIN;{schema}PRAGMA user_version = {version};COMMIT;")
            return version
        except BaseException:
            self.db.close()
            raise

    def close(self) -> None:
        """Close the database and unlock the directory. Uncommitted changes are undone."""
        self.db.close()
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.close()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Context manager: run the whole block as one transaction. An error undoes all of it."""
        self.db.execute("BEGIN IMMEDIATE")
        try:
            yield self.db
            self._commit()
        except BaseException:
            if self.db.in_transaction:  # SQLite itself undoes a transaction for which the disk has no room
                self.db.execute("ROLLBACK")
            raise

    def _commit(self) -> None:
        self.db.execute("COMMIT")

    def num_bytes(self) -> int:
        """Size in bytes of what the database holds. Pages that are free do not count."""
        pages, free, size = (
            self.db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size")
        )
        return int((pages - free) * size)
