"""Sessions of clients: each lives while its client sends heartbeats."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Callable

import msgspec

from chairlift_train.service.log.records import SessionRecord
from chairlift_train.service.runs import TrainingRuns
from chairlift_train.service.wire.bodies import CreateSession

__all__ = ["Sessions"]


@dataclasses.dataclass(slots=True)
class _Session:
    record: SessionRecord
    heard_at: float


class Sessions:
    """The sessions that have not ended. ``on_end`` is called with the id of each that ends."""

    def __init__(self, runs: TrainingRuns, on_end: Callable[[str], None]) -> None:
        self._runs = runs
        self._on_end = on_end
        self._sessions: dict[str, _Session] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    async def restore(self) -> None:
        """Take up the sessions of the log. Their clients may have been cut off, so their time begins anew."""
        for record in await self._runs.log(lambda log: log.sessions(ended=False)):
            self._sessions[record.session_id] = _Session(record, self._runs.clock())

    async def create(self, owner: str, request: CreateSession) -> SessionRecord:
        """Begin a session."""
        metadata = msgspec.json.encode(request.user_metadata).decode()
        now = self._runs.wall_clock()
        record = SessionRecord(str(uuid.uuid4()), owner, now, metadata, request.display_name or "")
        await self._runs.log(lambda log: log.add_session(record))
        self._sessions[record.session_id] = _Session(record, self._runs.clock())
        return record

    def of(self, session_id: str, owner: str) -> SessionRecord | None:
        """A session of the owner that has not ended, whose client has just been heard. None if there is none."""
        session = self._sessions.get(session_id)
        if session is None or session.record.owner != owner:
            return None
        session.heard_at = self._runs.clock()
        return session.record

    async def end(self, session_id: str) -> None:
        """End a session and its training runs. Checkpoints stay."""
        self._sessions.pop(session_id, None)
        for model in await self._runs.log(lambda log: log.models(ended=False)):
            if model.session_id == session_id:
                await self._runs.forget(model.model_id)
        await self._runs.log(lambda log: log.end_session(session_id))
        self._on_end(session_id)

    async def end_silent(self) -> None:
        """End the sessions whose clients were silent for too long."""
        limit = self._runs.clock() - self._runs.settings.lease_seconds
        for session_id in [name for name, each in self._sessions.items() if each.heard_at < limit]:
            await self.end(session_id)
