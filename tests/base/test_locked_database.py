"""A database that one process at a time may use: its tables, transactions, size, and what cannot be opened."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from chairlift.base.locked_database import LockedDatabase
from chairlift.errors import ConfigError


def opened(directory: Path, version: int = 3) -> LockedDatabase:
    schema = "CREATE TABLE notes (text TEXT UNIQUE);"
    how = {"what": "notes", "setting": "--note-dir", "folders": ("files",)}
    return LockedDatabase(directory, "notes.sqlite3", schema=schema, version=version, **how)  # type: ignore[arg-type]


def add(database: LockedDatabase, *given: str) -> None:
    with database.transaction() as db:
        for text in given:
            db.execute("INSERT INTO notes VALUES (?)", (text,))


def texts(database: LockedDatabase) -> list[str]:
    return [text for (text,) in database.db.execute("SELECT text FROM notes")]


def test_a_transaction_is_done_whole_or_not_at_all(tmp_path: Path) -> None:
    database = opened(tmp_path / "a" / "notes")
    assert (tmp_path / "a" / "notes" / "files").is_dir()
    add(database, "one")
    with pytest.raises(sqlite3.IntegrityError):
        add(database, "two", "one")
    assert texts(database) == ["one"]
    database.close()
    again = opened(tmp_path / "a" / "notes")
    assert texts(again) == ["one"]
    again.close()


def test_free_pages_do_not_count(tmp_path: Path) -> None:
    database = opened(tmp_path)
    empty = database.num_bytes()
    database.db.execute("INSERT INTO notes VALUES (?)", ("x" * 100_000,))
    assert database.num_bytes() > empty + 100_000
    database.db.execute("DELETE FROM notes")
    assert database.num_bytes() < empty + 10_000
    database.close()


def test_what_cannot_be_opened_is_refused_with_the_remedy(tmp_path: Path) -> None:
    database = opened(tmp_path / "notes")
    with pytest.raises(ConfigError, match=r"another server uses the notes in .*give each its own --note-dir"):
        opened(tmp_path / "notes")
    database.close()
    with pytest.raises(ConfigError, match=r"has format 3, and this version reads format 4; give another --note-dir"):
        opened(tmp_path / "notes", version=4)
    opened(tmp_path / "notes").close()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot keep notes in .*: it is not a directory"):
        opened(tmp_path / "file")
