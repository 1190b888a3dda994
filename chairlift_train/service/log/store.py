"""The training log: sessions, models, their calls with results, checkpoints and samplers.

The table of calls is reorder buffer, retry table and result store at once. A call is acknowledged when its row is on
disk. Its result is on disk before a client can read it. After kill -9 the calls without a result run again, and the
effect of those with one is in the model's newest saved state or comes from computing them again. Both give the same
bits, so no step is lost and none is applied twice.

What nobody needs again leaves the database: the request of a call that need not be computed again, a result that its
client has retrieved, and all calls of a session that has ended.
"""

from __future__ import annotations

import dataclasses
import hashlib
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from chairlift.base.locked_database import LockedDatabase
from chairlift.errors import StorageError
from chairlift_train.service.compute.calls import AdapterConfig
from chairlift_train.service.log.records import (
    CallAnswer,
    CheckpointRecord,
    LoggedCall,
    ModelRecord,
    SamplerRecord,
    SessionRecord,
)

__all__ = ["ReusedSeqError", "TrainingLog"]

_VERSION: Final = 2
_SCHEMA: Final = """
CREATE TABLE sessions (
    session_id TEXT PRIMARY KEY, owner TEXT NOT NULL, created_at REAL NOT NULL, metadata TEXT NOT NULL,
    display_name TEXT NOT NULL, ended INTEGER NOT NULL
);
CREATE TABLE models (
    model_id TEXT PRIMARY KEY, session_id TEXT NOT NULL, owner TEXT NOT NULL, base_model TEXT NOT NULL,
    config TEXT NOT NULL, metadata TEXT NOT NULL, created_at REAL NOT NULL, state_seq INTEGER, ended INTEGER NOT NULL
);
CREATE TABLE calls (
    model_id TEXT NOT NULL, seq_id INTEGER NOT NULL, kind TEXT NOT NULL, digest BLOB NOT NULL, body BLOB,
    form TEXT, payload BLOB, answered_at REAL, PRIMARY KEY (model_id, seq_id)
);
CREATE INDEX answers ON calls (answered_at) WHERE payload IS NOT NULL;
CREATE TABLE checkpoints (
    model_id TEXT NOT NULL, kind TEXT NOT NULL, name TEXT NOT NULL, owner TEXT NOT NULL, created_at REAL NOT NULL,
    num_bytes INTEGER NOT NULL, expires_at REAL, metadata TEXT NOT NULL, optimizer INTEGER NOT NULL,
    PRIMARY KEY (model_id, kind, name)
);
CREATE TABLE samplers (
    sampler_id TEXT PRIMARY KEY, session_id TEXT NOT NULL, owner TEXT NOT NULL, model_path TEXT NOT NULL,
    directory TEXT NOT NULL, follows TEXT NOT NULL
);
"""
_SESSION: Final = "session_id, owner, created_at, metadata, display_name, ended"
_MODEL: Final = "model_id, session_id, owner, base_model, config, metadata, created_at, state_seq, ended"
_CHECKPOINT: Final = "model_id, kind, name, owner, created_at, num_bytes, expires_at, metadata, optimizer"
_SAMPLER: Final = "sampler_id, session_id, owner, model_path, directory, follows"
_CALL: Final = "model_id, seq_id, kind, body, form, payload"


class ReusedSeqError(Exception):
    """Raised for a second call with the sequence id of another one."""


def _nothing() -> int:
    return 0


class TrainingLog:
    """The log in ``directory``, which is created if needed.

    One process at a time may open it, and one thread at a time may call it. ``max_bytes`` is the maximum size of the
    database, of all checkpoints, and of what ``beside`` counts; ``max_owner_bytes`` that of the checkpoints of one
    owner. Raises ConfigError for a directory that cannot be used. Methods raise StorageError if something would exceed
    the maximum size, and OSError or sqlite3.Error for disk errors; the change that failed is undone.
    """

    def __init__(
        self,
        directory: Path,
        max_bytes: int = 1 << 60,
        *,
        max_owner_bytes: int = 1 << 60,
        beside: Callable[[], int] = _nothing,
    ) -> None:
        self.directory = directory
        self.max_bytes = max_bytes
        self._max_owner_bytes = max_owner_bytes
        self._beside = beside
        self._database = LockedDatabase(
            directory,
            "training.sqlite3",
            schema=_SCHEMA,
            version=_VERSION,
            what="training runs",
            setting="--training-dir",
        )
        self._db = self._database.db

    def close(self) -> None:
        """Close the database and unlock the directory."""
        self._database.close()

    # -- room ------------------------------------------------------------------------------------------------------

    def num_bytes(self) -> int:
        """Size in bytes of the database, of all checkpoints, and of all else that the service keeps."""
        saved = self._db.execute("SELECT COALESCE(SUM(num_bytes), 0) FROM checkpoints").fetchone()[0]
        return int(saved) + self._database.num_bytes() + self._beside()

    def check_owner(self, owner: str, num_bytes: int) -> None:
        """Raise StorageError if a checkpoint of ``num_bytes`` would exceed the maximum size of the owner's."""
        used = self._db.execute(
            "SELECT COALESCE(SUM(num_bytes), 0) FROM checkpoints WHERE owner = ?", (owner,)
        ).fetchone()[0]
        if used + num_bytes > self._max_owner_bytes:
            raise StorageError(
                f"the checkpoints of this API key have {used:,} bytes, and at most {self._max_owner_bytes:,} are kept;"
                f" this one has {num_bytes:,} more: delete checkpoints, or start the server with a larger"
                " --max-training-bytes-per-key",
                is_quota=True,
            )

    def check_room(self, num_bytes: int, what: str) -> None:
        """Raise StorageError if ``what``, which has ``num_bytes``, would exceed the maximum size."""
        used = self.num_bytes()
        if used + num_bytes > self.max_bytes:
            raise StorageError(
                f"training runs have {used:,} bytes on disk, and at most {self.max_bytes:,} are kept; {what} has"
                f" {num_bytes:,} more: delete checkpoints, or start the server with a larger --max-training-dir-bytes",
                is_quota=True,
            )

    # -- sessions and models ---------------------------------------------------------------------------------------

    def add_session(self, session: SessionRecord) -> None:
        """Add a session."""
        with self._database.transaction() as db:
            _insert(db, "sessions", _SESSION, dataclasses.astuple(session))

    def session(self, session_id: str) -> SessionRecord | None:
        """The session with this id; None if there is none."""
        rows = self._rows("sessions", _SESSION, "session_id = ?", session_id)
        return _session(rows[0]) if rows else None

    def sessions(self, *, ended: bool) -> list[SessionRecord]:
        """All sessions that have ended, or all that have not."""
        return [_session(row) for row in self._rows("sessions", _SESSION, "ended = ?", int(ended))]

    def end_session(self, session_id: str) -> None:
        """Note that a session takes no further calls. Its models end, too. Its calls with their results, and its
        sampling sessions are forgotten."""
        with self._database.transaction() as db:
            db.execute(
                "DELETE FROM calls WHERE model_id IN (SELECT model_id FROM models WHERE session_id = ?)", (session_id,)
            )
            db.execute("DELETE FROM samplers WHERE session_id = ?", (session_id,))
            db.execute("UPDATE sessions SET ended = 1 WHERE session_id = ?", (session_id,))
            db.execute("UPDATE models SET ended = 1 WHERE session_id = ?", (session_id,))

    def add_model(self, model: ModelRecord) -> None:
        """Add a model. A known id is left as it is."""
        with self._database.transaction() as db:
            _insert_model(db, model)

    def model(self, model_id: str) -> ModelRecord | None:
        """The model with this id; None if there is none."""
        found = self._models("model_id = ?", model_id)
        return found[0] if found else None

    def models(self, *, ended: bool | None = None, owner: str | None = None) -> list[ModelRecord]:
        """Models in the order of their creation."""
        wheres, values = [], []
        for name, value in (("ended", None if ended is None else int(ended)), ("owner", owner)):
            if value is not None:
                wheres.append(f"{name} = ?")
                values.append(value)
        return self._models(" AND ".join(wheres) or "1", *values)

    def _models(self, where: str, *values: Any) -> list[ModelRecord]:
        return [_model(row) for row in self._rows("models", _MODEL, where, *values)]

    def end_model(self, model_id: str) -> None:
        """Note that a model takes no further calls. The requests of its calls are forgotten."""
        with self._database.transaction() as db:
            db.execute("UPDATE calls SET body = NULL WHERE model_id = ?", (model_id,))
            db.execute("UPDATE models SET ended = 1 WHERE model_id = ?", (model_id,))

    def state_saved(self, model_id: str, seq_id: int) -> None:
        """Note that a saved state has the effect of all calls up to ``seq_id``. Their requests are forgotten; their
        results stay."""
        with self._database.transaction() as db:
            _note_state(db, model_id, seq_id)

    # -- calls -----------------------------------------------------------------------------------------------------

    def append(self, model_id: str, seq_id: int, kind: str, body: bytes, model: ModelRecord | None = None) -> bool:
        """Log a call, together with its ``model`` if it makes one. Returns False if the same call was logged before.
        Raises ReusedSeqError if another call has its id."""
        digest = hashlib.sha256(kind.encode() + b"\0" + body).digest()
        with self._database.transaction() as db:
            row = db.execute(
                "SELECT digest FROM calls WHERE model_id = ? AND seq_id = ?", (model_id, seq_id)
            ).fetchone()
            if row is None:
                self.check_room(len(body), "a call")
                db.execute(
                    "INSERT INTO calls (model_id, seq_id, kind, digest, body) VALUES (?, ?, ?, ?, ?)",
                    (model_id, seq_id, kind, digest, body),
                )
                if model is not None:
                    _insert_model(db, model)
                return True
        if row[0] != digest:
            raise ReusedSeqError(
                f"call {seq_id} of {model_id} was another call before; a repeated call must be the same, and a new one"
                " needs the next seq_id"
            )
        return False

    def finish(
        self,
        answers: Sequence[tuple[str, int, CallAnswer]],
        *,
        now: float = 0.0,
        checkpoint: CheckpointRecord | None = None,
        sampler: SamplerRecord | None = None,
        has_state: bool = False,
    ) -> None:
        """Store the answers of calls, by model id and seq id, with what the calls have made. ``now`` is in seconds
        since 1970. A call keeps its first answer. Requests of calls that have changed no model are forgotten.
        ``has_state``: the state of the models after these calls is saved."""
        with self._database.transaction() as db:
            db.executemany(
                "UPDATE calls SET form = :form, payload = :payload, answered_at = :now,"
                " body = CASE WHEN :form = 'error' OR kind = 'forward' THEN NULL ELSE body END"
                " WHERE model_id = :model AND seq_id = :seq AND form IS NULL",
                [
                    {"form": answer.form, "payload": answer.payload, "now": now, "model": model_id, "seq": seq_id}
                    for model_id, seq_id, answer in answers
                ],
            )
            if checkpoint is not None:
                _insert(db, "checkpoints", _CHECKPOINT, dataclasses.astuple(checkpoint))
            if sampler is not None:
                _insert(db, "samplers", _SAMPLER, dataclasses.astuple(sampler))
            for model_id, seq_id, _ in answers if has_state else ():
                _note_state(db, model_id, seq_id)

    def drop_results(self, retrieved: Sequence[tuple[str, int]], before: float) -> None:
        """Forget the results of the calls with these ids, and all from before this time. The calls stay known."""
        with self._database.transaction() as db:
            db.executemany("UPDATE calls SET payload = NULL WHERE model_id = ? AND seq_id = ?", retrieved)
            db.execute("UPDATE calls SET payload = NULL WHERE payload IS NOT NULL AND answered_at < ?", (before,))

    def call(self, model_id: str, seq_id: int) -> LoggedCall | None:
        """One call; None if it was not logged."""
        found = self._calls("model_id = ? AND seq_id = ?", model_id, seq_id)
        return found[0] if found else None

    def calls_after(self, model_id: str, seq_id: int) -> list[LoggedCall]:
        """Calls of a model with larger ids, in order."""
        return self._calls("model_id = ? AND seq_id > ? ORDER BY seq_id", model_id, seq_id)

    def _calls(self, where: str, *values: Any) -> list[LoggedCall]:
        return [_call(row) for row in self._rows("calls", _CALL, where, *values)]

    # -- checkpoints and samplers ----------------------------------------------------------------------------------

    def checkpoint(self, model_id: str, kind: str, name: str) -> CheckpointRecord | None:
        """One checkpoint; None if there is none."""
        found = self.checkpoints("model_id = ? AND kind = ? AND name = ?", model_id, kind, name)
        return found[0] if found else None

    def checkpoints(self, where: str = "1", *values: Any) -> list[CheckpointRecord]:
        """Checkpoints for which the SQL condition holds, the oldest first."""
        rows = self._rows("checkpoints", _CHECKPOINT, f"{where} ORDER BY created_at, name", *values)
        return [_checkpoint(row) for row in rows]

    def set_expiry(self, checkpoint: CheckpointRecord, expires_at: float | None) -> None:
        """Change when a checkpoint expires."""
        with self._database.transaction() as db:
            db.execute(
                "UPDATE checkpoints SET expires_at = ? WHERE model_id = ? AND kind = ? AND name = ?",
                (expires_at, checkpoint.model_id, checkpoint.kind, checkpoint.name),
            )

    def remove_checkpoint(self, checkpoint: CheckpointRecord) -> None:
        """Forget a checkpoint. The caller deletes its directory afterwards."""
        with self._database.transaction() as db:
            db.execute(
                "DELETE FROM checkpoints WHERE model_id = ? AND kind = ? AND name = ?",
                (checkpoint.model_id, checkpoint.kind, checkpoint.name),
            )

    def add_sampler(self, sampler: SamplerRecord) -> None:
        """Add a sampling session, or replace the one with its id."""
        with self._database.transaction() as db:
            _insert(db, "samplers", _SAMPLER, dataclasses.astuple(sampler))

    def sampler(self, sampler_id: str) -> SamplerRecord | None:
        """The sampling session with this id; None if there is none."""
        rows = self._rows("samplers", _SAMPLER, "sampler_id = ?", sampler_id)
        return SamplerRecord(*rows[0]) if rows else None

    def samplers(self, session_id: str) -> list[SamplerRecord]:
        """The sampling sessions of a session."""
        return [SamplerRecord(*row) for row in self._rows("samplers", _SAMPLER, "session_id = ?", session_id)]

    # -- SQL -------------------------------------------------------------------------------------------------------

    def _rows(self, table: str, columns: str, where: str, *values: Any) -> list[tuple[Any, ...]]:
        return self._db.execute(f"SELECT {columns} FROM {table} WHERE {where}", values).fetchall()


def _insert(db: sqlite3.Connection, table: str, columns: str, values: Sequence[Any]) -> None:
    marks = ", ".join("?" * len(values))
    db.execute(f"INSERT OR REPLACE INTO {table} ({columns}) VALUES ({marks})", values)


def _insert_model(db: sqlite3.Connection, model: ModelRecord) -> None:
    values = {name: getattr(model, name) for name in _MODEL.split(", ")}
    values["config"] = msgspec.json.encode(model.config)
    marks = ", ".join(f":{name}" for name in values)
    db.execute(f"INSERT OR IGNORE INTO models ({_MODEL}) VALUES ({marks})", values)


def _note_state(db: sqlite3.Connection, model_id: str, seq_id: int) -> None:
    db.execute("UPDATE models SET state_seq = ? WHERE model_id = ?", (seq_id, model_id))
    db.execute("UPDATE calls SET body = NULL WHERE model_id = ? AND seq_id <= ?", (model_id, seq_id))


def _named(columns: str, row: Sequence[Any]) -> dict[str, Any]:
    return dict(zip(columns.split(", "), row, strict=True))


def _session(row: Sequence[Any]) -> SessionRecord:
    values = _named(_SESSION, row)
    return SessionRecord(**{**values, "ended": bool(values["ended"])})


def _model(row: Sequence[Any]) -> ModelRecord:
    values = _named(_MODEL, row)
    config = msgspec.json.decode(values["config"], type=AdapterConfig)
    return ModelRecord(**{**values, "config": config, "ended": bool(values["ended"])})


def _call(row: Sequence[Any]) -> LoggedCall:
    values = _named(_CALL, row)
    form, payload = values.pop("form"), values.pop("payload")
    answer = None if form is None else CallAnswer(form, payload or b"")
    return LoggedCall(**values, answer=answer, is_dropped=form is not None and payload is None)


def _checkpoint(row: Sequence[Any]) -> CheckpointRecord:
    values = _named(_CHECKPOINT, row)
    return CheckpointRecord(**{**values, "optimizer": bool(values["optimizer"])})
