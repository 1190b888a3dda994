"""Files and batches in a directory: contents of files as files, all other data in a SQLite database.

The store stays consistent if the process is killed at any time, because of the order of changes. The content of a file
is complete and in its final path before the transaction that adds the file's record. A transaction that removes a
record is committed before the content is deleted. So after a kill there may be content without a record, but never a
record without its content. Content without a record is deleted when the store is opened.

Each response is stored in one transaction, which has no effect if the request already has a response. So a request
gets exactly one response, even if it was sent several times. Stored responses also survive a power failure.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final

from chairlift.base.locked_database import LockedDatabase
from chairlift.errors import ConfigError, StorageError
from chairlift.server.openai.batches.lines import BadLine, error_line, read_line
from chairlift.server.openai.batches.records import ACTIVE, BATCH_FIELDS, FILE_FIELDS, BatchRecord, FileRecord, Pending

__all__ = ["MAX_REQUESTS", "BatchStore", "storage_error"]

MAX_REQUESTS: Final = 50_000
"""Maximum number of requests in one input file, the same as OpenAI's limit."""
_VERSION: Final = 1
_SCHEMA: Final = """
CREATE TABLE files (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, filename TEXT NOT NULL, bytes INTEGER NOT NULL, purpose TEXT NOT NULL,
    created_at INTEGER NOT NULL, expires_at INTEGER
);
CREATE TABLE batches (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, endpoint TEXT NOT NULL, input_file_id TEXT NOT NULL,
    completion_window TEXT NOT NULL, status TEXT NOT NULL, metadata TEXT NOT NULL, errors TEXT NOT NULL,
    output_seconds INTEGER, created_at INTEGER NOT NULL, expires_at INTEGER NOT NULL, in_progress_at INTEGER,
    finalizing_at INTEGER, completed_at INTEGER, failed_at INTEGER, expired_at INTEGER, cancelling_at INTEGER,
    cancelled_at INTEGER, output_file_id TEXT, error_file_id TEXT, total INTEGER NOT NULL, completed INTEGER NOT NULL,
    failed INTEGER NOT NULL
);
CREATE TABLE requests (
    batch TEXT NOT NULL, line INTEGER NOT NULL, offset INTEGER NOT NULL, length INTEGER NOT NULL,
    good INTEGER, answer BLOB, PRIMARY KEY (batch, line)
);
"""
_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_UNFINISHED: Final = {
    "expired": ("batch_expired", "the request was not answered before the batch's completion window ended"),
    "cancelled": ("batch_cancelled", "the batch was cancelled before the request was answered"),
}
"""Final status of a batch -> (code, message) of the error for each request without a response."""


def storage_error(error: OSError | sqlite3.Error, what: str) -> StorageError:
    """The StorageError for an error of the operating system or of SQLite. ``what`` names the directory."""
    code = error.errno if isinstance(error, OSError) else getattr(error, "sqlite_errorcode", None)
    if code in _FULL if isinstance(error, OSError) else code == sqlite3.SQLITE_FULL:
        return StorageError(f"the disk of {what} is full; delete files, or try again later", is_full=True)
    return StorageError(f"{what} cannot be used now, because its disk fails or may only be read; try again later")


class BatchStore:
    """The store in ``directory``, which is created if needed.

    One process at a time may open a store, and one thread at a time may call it. ``max_bytes`` is the maximum size of
    all files and answers. Raises ConfigError for a directory that cannot be used. Methods raise StorageError if files
    or answers exceed the maximum size, and OSError or sqlite3.Error for disk errors. The change that failed is undone.
    """

    def __init__(self, directory: str | Path, max_bytes: int = 1 << 60) -> None:
        self._root = Path(directory)
        self._max_bytes = max_bytes
        self._files = self._root / "files"
        self._database = LockedDatabase(
            self._root,
            "batches.sqlite3",
            schema=_SCHEMA,
            version=_VERSION,
            what="batches",
            setting="--batch-dir",
            folders=("files",),
        )
        self._db = self._database.db
        try:
            self._remove_leftovers()
        except (OSError, sqlite3.Error) as error:
            self.close()
            raise ConfigError(f"cannot keep batches in {directory}: {error}; give another --batch-dir") from None

    def close(self) -> None:
        """Close the database and unlock the directory. Uncommitted changes are undone."""
        self._database.close()

    def _remove_leftovers(self) -> None:
        """Delete the contents of files that have no record, because the process was killed."""
        known = {name for (name,) in self._db.execute("SELECT id FROM files")}
        for path in self._files.iterdir():
            if path.name not in known:
                path.unlink()

    # -- files ---------------------------------------------------------------------------------------------------

    def num_bytes(self) -> int:
        """Size in bytes of all files and of the database."""
        files = self._db.execute("SELECT COALESCE(SUM(bytes), 0) FROM files").fetchone()[0]
        return int(files) + self._database.num_bytes()

    def check_room(self, num_bytes: int, what: str) -> None:
        """Raise StorageError if ``what``, which has ``num_bytes``, would exceed the maximum size."""
        used = self.num_bytes()
        if used + num_bytes > self._max_bytes:
            raise StorageError(
                f"files and answers of batches have {used:,} bytes, and at most {self._max_bytes:,} are kept; {what} "
                f"has {num_bytes:,} more: delete files, or start the server with a larger --max-batch-dir-bytes",
                is_quota=True,
            )

    def part(self) -> Path:
        """Temporary path for writing the content of a file, before :meth:`add_file` or a similar method adds the
        file."""
        return self._files / f"{secrets.token_hex(16)}.part"

    def path(self, file_id: str) -> Path:
        """Path of a file's content."""
        return self._files / file_id

    def add_file(
        self, content: BinaryIO, filename: str, purpose: str, *, owner: str, now: int, expires_at: int | None = None
    ) -> FileRecord:
        """Add a file with a copy of ``content``, which is read from its current position."""
        begin = content.tell()
        self.check_room(content.seek(0, os.SEEK_END) - begin, "the file")
        content.seek(begin)
        part = self.part()
        try:
            with part.open("wb") as file:
                shutil.copyfileobj(content, file, 1 << 20)
                record = self._flushed(file, filename, purpose, owner, now, expires_at)
            self._move_content(part, record)
        finally:
            part.unlink(missing_ok=True)
        with self._database.transaction() as db:
            _insert(db, record)
        return record

    def _flushed(
        self, file: BinaryIO, filename: str, purpose: str, owner: str, now: int, expires_at: int | None
    ) -> FileRecord:
        """Flush a written file to the disk, and return its record."""
        file.flush()
        os.fsync(file.fileno())
        return FileRecord(
            id=f"file-{secrets.token_hex(16)}",
            owner=owner,
            filename=filename,
            bytes=file.tell(),
            purpose=purpose,
            created_at=now,
            expires_at=expires_at,
        )

    def _move_content(self, part: Path, record: FileRecord) -> None:
        """Move the content of a file from its temporary path to its final path."""
        os.replace(part, self.path(record.id))
        folder = os.open(self._files, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def file(self, file_id: str, owner: str) -> FileRecord | None:
        """The file with this id; None if the owner has no such file."""
        row = self._db.execute(f"SELECT {_FILE} FROM files WHERE id = ? AND owner = ?", (file_id, owner)).fetchone()
        return None if row is None else _file(row)

    def files(
        self, owner: str, *, purpose: str | None = None, after: str | None = None, limit: int, newest_first: bool = True
    ) -> list[FileRecord]:
        """Files of the owner, in order of creation. With ``after``: only files that follow the file with this id."""
        where, values = _page("files", owner, after, newest_first)
        if purpose is not None:
            where = f"{where} AND purpose = ?"
            values = [*values, purpose]
        order = "DESC" if newest_first else "ASC"
        rows = self._db.execute(
            f"SELECT {_FILE} FROM files WHERE {where} ORDER BY rowid {order} LIMIT ?", [*values, limit]
        )
        return [_file(row) for row in rows]

    def num_files(self, owner: str) -> int:
        """Number of the owner's files."""
        return int(self._db.execute("SELECT COUNT(*) FROM files WHERE owner = ?", (owner,)).fetchone()[0])

    def reader_of(self, file_id: str) -> str | None:
        """Id of an unfinished batch that has the file as its input; None if there is none."""
        row = self._db.execute(
            f"SELECT id FROM batches WHERE input_file_id = ? AND status IN {_marks(ACTIVE)}", (file_id, *ACTIVE)
        ).fetchone()
        return None if row is None else str(row[0])

    def delete_file(self, file_id: str) -> None:
        """Delete a file."""
        with self._database.transaction() as db:
            db.execute("DELETE FROM files WHERE id = ?", (file_id,))
        self._remove(self.path(file_id))

    def _remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def expire_files(self, now: int) -> None:
        """Delete expired files, except input files of unfinished batches."""
        rows = self._db.execute("SELECT id FROM files WHERE expires_at <= ?", (now,)).fetchall()
        for (file_id,) in rows:
            if self.reader_of(file_id) is None:
                self.delete_file(file_id)

    # -- batches -------------------------------------------------------------------------------------------------

    def add_batch(
        self,
        input_file: FileRecord,
        endpoint: str,
        *,
        now: int,
        seconds: int,
        window: str,
        metadata: str = "null",
        output_seconds: int | None = None,
    ) -> BatchRecord:
        """Add a batch that processes the requests of ``input_file``. It expires ``seconds`` after ``now``, and belongs
        to the file's owner."""
        record = BatchRecord(
            id=f"batch_{secrets.token_hex(16)}",
            owner=input_file.owner,
            endpoint=endpoint,
            input_file_id=input_file.id,
            completion_window=window,
            status="validating",
            metadata=metadata,
            errors="[]",
            output_seconds=output_seconds,
            created_at=now,
            expires_at=now + seconds,
            in_progress_at=None,
            finalizing_at=None,
            completed_at=None,
            failed_at=None,
            expired_at=None,
            cancelling_at=None,
            cancelled_at=None,
            output_file_id=None,
            error_file_id=None,
            total=0,
            completed=0,
            failed=0,
        )
        with self._database.transaction() as db:
            values = [getattr(record, name) for name in BATCH_FIELDS]
            db.execute(f"INSERT INTO batches ({_BATCH}) VALUES {_marks(values)}", values)
        return record

    def batch(self, batch_id: str, owner: str | None = None) -> BatchRecord | None:
        """The batch with this id, if it belongs to ``owner`` or ``owner`` is None; otherwise None."""
        row = self._db.execute(f"SELECT {_BATCH} FROM batches WHERE id = ?", (batch_id,)).fetchone()
        found = None if row is None else _batch(row)
        return None if found is None or owner not in (None, found.owner) else found

    def batches(self, owner: str, *, after: str | None = None, limit: int) -> list[BatchRecord]:
        """Batches of the owner, the newest first. With ``after``: only batches that follow the batch with this id."""
        where, values = _page("batches", owner, after, True)
        rows = self._db.execute(
            f"SELECT {_BATCH} FROM batches WHERE {where} ORDER BY rowid DESC LIMIT ?", [*values, limit]
        )
        return [_batch(row) for row in rows]

    def active(self, owner: str | None = None) -> list[BatchRecord]:
        """Unfinished batches of the owner (of all owners if None), the oldest first."""
        mine, values = ("", []) if owner is None else (" AND owner = ?", [owner])
        rows = self._db.execute(
            f"SELECT {_BATCH} FROM batches WHERE status IN {_marks(ACTIVE)}{mine} ORDER BY rowid", [*ACTIVE, *values]
        )
        return [_batch(row) for row in rows]

    def cancel(self, batch_id: str, now: int) -> None:
        """Cancel an unfinished batch. Its stored responses are kept."""
        with self._database.transaction() as db:
            db.execute(
                "UPDATE batches SET status = 'cancelling', cancelling_at = ? WHERE id = ?"
                " AND status IN ('validating', 'in_progress')",
                (now, batch_id),
            )

    def begin(self, batch_id: str, now: int, max_line: int) -> None:
        """Read the lines of a batch's input file. Afterwards the batch is in progress, or failed.

        Invalid lines, and lines longer than ``max_line`` bytes, get an error as their result at once.
        """
        batch = self.batch(batch_id)
        if batch is None or batch.status != "validating":
            return
        problem = ""
        num_lines = 0
        num_bad = 0
        with self._database.transaction() as db:
            names: set[str] = set()
            for line, offset, length, answer in self._lines(batch, names, max_line):
                num_lines = num_lines + 1
                num_bad = num_bad + (answer is not None)
                if num_lines > MAX_REQUESTS:
                    problem = f"the input file has more than {MAX_REQUESTS:,} requests; split it"
                    break
                good = None if answer is None else 0
                db.execute(
                    "INSERT INTO requests VALUES (?, ?, ?, ?, ?, ?)", (batch_id, line, offset, length, good, answer)
                )
            if not num_lines:
                problem = "the input file has no requests; write one JSON object per line"
            if problem:
                db.execute("DELETE FROM requests WHERE batch = ?", (batch_id,))
                code = "too_many_requests" if num_lines else "empty_file"
                errors = json.dumps([{"code": code, "message": problem, "line": None, "param": "input_file_id"}])
                db.execute(
                    "UPDATE batches SET status = 'failed', failed_at = ?, errors = ? WHERE id = ?",
                    (now, errors, batch_id),
                )
            else:
                db.execute(
                    "UPDATE batches SET status = 'in_progress', in_progress_at = ?, total = ?, failed = ? WHERE id = ?",
                    (now, num_lines, num_bad, batch_id),
                )

    def _lines(
        self, batch: BatchRecord, names: set[str], max_line: int
    ) -> Iterator[tuple[int, int, int, bytes | None]]:
        """(number, offset, length, error) of each line that is not blank. The error is a line for the error file, or
        None if the line is valid."""
        with self.path(batch.input_file_id).open("rb") as file:
            number = offset = 0
            while content := file.readline(max_line + 1):
                number = number + 1
                length = len(content)
                is_long = length > max_line and not content.endswith(b"\n")
                while is_long and not content.endswith(b"\n") and (content := file.readline(1 << 20)):
                    length += len(content)
                if is_long:
                    message = f"the line has {length:,} bytes, and {max_line:,} are allowed; shorten the request"
                    yield number, offset, length, error_line(None, "line_too_long", message, line=number)
                elif content.strip():
                    yield number, offset, length, _problem(content, number, batch.endpoint, names)
                offset += length

    def pending(self, batch_id: str, after: int, limit: int) -> list[Pending]:
        """Requests without a response that come after line ``after``, in the order of the file; at most ``limit``."""
        rows = self._db.execute(
            "SELECT line, offset, length FROM requests WHERE batch = ? AND line > ? AND good IS NULL"
            " ORDER BY line LIMIT ?",
            (batch_id, after, limit),
        )
        return [Pending(*row) for row in rows]

    def read(self, file_id: str, pending: Pending) -> bytes:
        """The line of a request in the input file."""
        with self.path(file_id).open("rb") as file:
            file.seek(pending.offset)
            return file.read(pending.length)

    def record(self, batch_id: str, line: int, answer: bytes, good: bool) -> bool:
        """Store the result of a request: a line for the output file if ``good``, otherwise for the error file.

        Returns False and changes nothing if the request already has a result or the batch has ended.
        """
        self.check_room(len(answer), "an answer")
        with self._database.transaction() as db:
            changed = db.execute(
                "UPDATE requests SET good = ?, answer = ? WHERE batch = ? AND line = ? AND good IS NULL",
                (int(good), answer, batch_id, line),
            ).rowcount
            if changed:
                column = "completed" if good else "failed"
                db.execute(f"UPDATE batches SET {column} = {column} + 1 WHERE id = ?", (batch_id,))
        return bool(changed)

    def finalize(self, batch_id: str, now: int) -> None:
        """Set the status ``finalizing`` for a batch whose requests all have results. Its output files are written
        next."""
        with self._database.transaction() as db:
            db.execute(
                "UPDATE batches SET status = 'finalizing', finalizing_at = ? WHERE id = ? AND status = 'in_progress'",
                (now, batch_id),
            )

    def finish(self, batch_id: str, status: str, now: int) -> None:
        """Write the output and the error file of a batch, and set its status: ``completed``, ``expired`` or
        ``cancelled``.

        The error file gets a line for each request without a response, with the reason.
        """
        batch = self.batch(batch_id)
        if batch is None or batch.status not in ACTIVE:
            return
        new_files: dict[str, FileRecord] = {}
        parts: list[Path] = []
        try:
            for column, good in (("output_file_id", 1), ("error_file_id", 0)):
                part = self.part()
                parts.append(part)
                with part.open("wb") as file:
                    for answer in self._answers(batch, good, status):
                        file.write(answer)
                    name = f"{batch_id}_{'output' if good else 'error'}.jsonl"
                    expires = None if batch.output_seconds is None else now + batch.output_seconds
                    record = self._flushed(file, name, "batch_output", batch.owner, now, expires)
                if record.bytes:
                    self._move_content(part, record)
                    new_files[column] = record
        finally:
            for part in parts:
                part.unlink(missing_ok=True)
        with self._database.transaction() as db:
            for column, record in new_files.items():
                _insert(db, record)
                db.execute(f"UPDATE batches SET {column} = ? WHERE id = ?", (record.id, batch_id))
            db.execute(f"UPDATE batches SET status = ?, {status}_at = ? WHERE id = ?", (status, now, batch_id))
            db.execute("DELETE FROM requests WHERE batch = ?", (batch_id,))

    def _answers(self, batch: BatchRecord, good: int, status: str) -> Iterator[bytes]:
        """Lines of the output file (``good`` is 1) or of the error file (0), in the order of the input."""
        rows = self._db.execute(
            "SELECT line, offset, length, answer FROM requests"
            " WHERE batch = ? AND (good = ? OR (good IS NULL AND ? = 0)) ORDER BY line",
            (batch.id, good, good),
        )
        for line, offset, length, answer in rows:
            if answer is not None:
                yield answer
            else:
                code, message = _UNFINISHED[status]
                content = self.read(batch.input_file_id, Pending(line, offset, length))
                yield error_line(read_line(content, batch.endpoint).custom_id, code, message, line=line)


def _problem(content: bytes, number: int, endpoint: str, names: set[str]) -> bytes | None:
    """Line for the error file if the input line is invalid; None if it is valid. ``names`` are the ids of earlier
    lines."""
    try:
        custom_id = read_line(content, endpoint).custom_id
        if custom_id in names:
            message = f"custom_id {custom_id!r:.80} is that of a line before; give each request its own"
            raise BadLine(message, "duplicate_custom_id", "custom_id", custom_id)
        names.add(custom_id)
    except BadLine as error:
        return error_line(error.custom_id, error.code, str(error), line=number, param=error.param)
    return None


_FILE: Final = ", ".join(FILE_FIELDS)
_BATCH: Final = ", ".join(BATCH_FIELDS)


def _marks(values: Sequence[Any]) -> str:
    return f"({', '.join('?' * len(values))})"


def _insert(db: sqlite3.Connection, record: FileRecord) -> None:
    values = [getattr(record, name) for name in FILE_FIELDS]
    db.execute(f"INSERT INTO files ({_FILE}) VALUES {_marks(values)}", values)


def _page(table: str, owner: str, after: str | None, newest_first: bool) -> tuple[str, list[Any]]:
    if after is None:
        return "owner = ?", [owner]
    sign = "<" if newest_first else ">"
    return f"owner = ? AND rowid {sign} (SELECT rowid FROM {table} WHERE id = ? AND owner = ?)", [owner, after, owner]


def _file(row: Sequence[Any]) -> FileRecord:
    return FileRecord(**dict(zip(FILE_FIELDS, row, strict=True)))


def _batch(row: Sequence[Any]) -> BatchRecord:
    return BatchRecord(**dict(zip(BATCH_FIELDS, row, strict=True)))
