"""A store of KV blocks that outlives the process: the index in memory, and a thread that reads and writes the files.

The engine's thread owns the index: it decides what is written where, and what may be read. The thread owns the files.
So no step waits for a disk, and a disk that is full, slow or broken costs hits and nothing else. Every block is
verified when it is read: its checksum begins with its key, slot and generation. (vLLM's file tier and SGLang's HiCache
trust the name of a file.)
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Final

from chairlift.engine.kv_store.files import StoreFiles
from chairlift.engine.kv_store.index import BlockIndex, Stored
from chairlift.engine.kv_store.record import Record, payload_checksum
from chairlift.engine.kv_store.report import StoreReport

__all__ = ["BlockLoad", "KVStore", "Lookup", "Place"]

_log = logging.getLogger(__name__)

_MOST_QUEUED: Final = 64 << 20
"""Number of bytes that may wait to be written. More are not accepted."""
_SYNC_BYTES: Final = 64 << 20
_SYNC_SECONDS: Final = 5.0
_FOLLOW_SECONDS: Final = 1.0
"""Least time between two looks at the files of other writers."""
_MOST_READ_ERRORS: Final = 16
"""Number of failed reads in a row after which the files are not read any more."""
_FIRST_RATE: Final = 200e6
"""Bytes per second that a load is expected to take before one was measured: a plain disk."""
_MEMORY: Final = 0.2


@dataclasses.dataclass(slots=True)
class BlockLoad:
    """Blocks to read, in the order in which they are needed. The thread appends their bytes to ``blocks`` and ends at
    the first one that cannot be used."""

    wanted: list[Stored]
    blocks: list[bytes] = dataclasses.field(default_factory=list)
    is_done: bool = False
    is_cancelled: bool = False
    """Set by the engine's thread when nobody needs the blocks any more."""
    seconds: float = 0.0


Place = tuple[int, int, int]
"""(writer, cache group, slot) of a block in the files."""


@dataclasses.dataclass(slots=True)
class Lookup:
    """Places whose records are to be read, because another process says that it wrote them."""

    places: Sequence[Place]
    is_done: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class _Write:
    record: Record
    payload: bytes


@dataclasses.dataclass(frozen=True, slots=True)
class _Erase:
    group: int
    slot: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Survey:
    """A question for what is in the directory, after something was removed from it."""

    clear: str
    """``own`` namespace, ``all`` namespaces, or nothing."""


class KVStore:
    """Blocks by (cache group, key). Not thread-safe: only the engine's thread may call it.

    ``num_slots`` of ``files`` says how many blocks this process may write; the least recently used one is overwritten.
    ``write_rate`` is the maximum number of bytes per second that are written, averaged over a second. With
    ``threaded`` False, the caller runs :meth:`work` itself.
    """

    def __init__(
        self,
        files: StoreFiles,
        write_rate: float,
        now: Callable[[], float] = time.monotonic,
        *,
        unix_time: Callable[[], float] = time.time,
        threaded: bool = True,
    ) -> None:
        self._files = files
        self._now = now
        self._unix_time = unix_time
        self._index = BlockIndex()
        self._index.own = files.writer
        self._own: list[OrderedDict[int, bytes]] = [OrderedDict() for _ in files.num_slots]
        """Per group: slot -> key of the block in it, least recently used first."""
        self._free = [list(range(count - 1, -1, -1)) for count in files.num_slots]
        self._others: dict[tuple[int, int, int], Stored] = {}
        """(writer, group, slot) of other writers -> the newest block that is known to be there."""
        self._pending: dict[tuple[int, bytes], int] = {}
        """(group, key) of each block that is accepted and not yet written -> its slot."""
        self._pinned: Counter[tuple[int, int]] = Counter()
        """(group, own slot) -> number of loads that read it."""
        # Processes that follow a writer's files look at larger generations only, also when its files were removed and
        # another process has made them again.
        self._generation = int(unix_time() * 1e6)
        self._queued = 0
        self._write_rate = write_rate
        self._allowance = write_rate
        self._filled_at = now()
        self.bytes_per_second = _FIRST_RATE
        """Measured speed of loads, with checksums."""
        self.num_written = self.num_read = 0
        """Numbers of bytes."""
        self.rejected: Counter[str] = Counter()
        """Reason -> number of blocks that were not written or not used."""
        self.stopped = ""
        """Why nothing is written any more; empty while blocks are written."""
        self._is_over = False
        self._reads_failed = 0
        self._recover()
        if files.writer < 0:
            self.stopped = "the store is read only"
        self._loads: deque[BlockLoad] = deque()
        self._writes: deque[_Write | _Erase | _Survey] = deque()
        self._results: deque[tuple[_Write | _Erase | _Survey, OSError | None]] = deque()
        self._is_clearing = False
        self._namespaces: dict[str, int] = {}
        self._num_surveys = 0
        """Number of questions whose answer has not been taken."""
        self._num_surveyed = 0
        self._lookups: deque[Lookup] = deque()
        self._news: deque[tuple[int, Record]] = deque()
        """Blocks of other writers that the thread has found."""
        self._followed_at = now()
        self._unsynced = 0
        self._synced_at = now()
        self._ended = False
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None
        if threaded:
            self._thread = threading.Thread(target=self._run, name="kv-store", daemon=True)
            self._thread.start()

    def _recover(self) -> None:
        found = sorted(self._files.recover(), key=lambda entry: entry[1].used)
        own = self._files.writer
        for writer, record in found:
            if writer != own:
                self._note_other(writer, record)
            elif record.slot < self._files.num_slots[record.group]:
                self._note_own(record)
        self._generation = max([self._generation, *(record.generation for _, record in found)])
        for group, count in enumerate(self._files.num_slots):
            taken = self._own[group]
            self._free[group] = [slot for slot in range(count - 1, -1, -1) if slot not in taken]

    def _note_own(self, record: Record) -> None:
        """Find a block of this writer from now on, and no other copy of this writer."""
        taken = self._own[record.group]
        known = self._index.get((record.group, record.key))
        if known is not None and known.writer == self._files.writer:
            del taken[known.record.slot]
            self._index.remove(known)
        taken[record.slot] = record.key
        self._index.add(Stored(self._files.writer, record))

    def _note_other(self, writer: int, record: Record) -> None:
        """Find a block of another writer from now on, and not the one that it has overwritten."""
        place = writer, record.group, record.slot
        before = self._others.get(place)
        if before is not None:
            if before.record.generation >= record.generation:
                return
            self._index.remove(before)
        self._others[place] = stored = Stored(writer, record)
        self._index.add(stored)

    @property
    def num_blocks(self) -> int:
        """Number of blocks that can be found."""
        return len(self._index)

    @property
    def queued_bytes(self) -> int:
        """Number of bytes that wait to be written."""
        return self._queued

    def find(self, group: int, key: bytes) -> Stored | None:
        """The stored block with this key; None if there is none."""
        return self._index.get((group, key))

    def changes(self, group: int) -> tuple[list[bytes], list[bytes]]:
        """Keys of blocks that can be found since the last call, and of those that cannot any more; see
        :meth:`BlockIndex.changes`."""
        return self._index.changes(group)

    def verify(self) -> tuple[int, int]:
        """Read every block that can be found. Returns (number of bytes that are right, number of blocks that are not).
        Use it only while nothing else uses the store."""
        nbytes = damaged = 0
        for stored in self._index.values():
            try:
                payload = self._files.read(stored.writer, stored.record)
            except OSError:
                payload = None
            nbytes += 0 if payload is None else len(payload)
            damaged += payload is None
        return nbytes, damaged

    # -- writing -------------------------------------------------------------------------------------------------------

    def wants(self, group: int, key: bytes) -> bool:
        """Whether :meth:`put` should be called for this block: it is neither stored nor on its way."""
        name = group, key
        return not (self.stopped or self._is_clearing or name in self._index or name in self._pending)

    def may_write(self, nbytes: int, *, urgent: bool = False) -> bool:
        """Whether the write rate and the queue have room for ``nbytes`` now. ``urgent``: whether the queue has."""
        now = self._now()
        passed = max(0.0, now - self._filled_at)
        self._filled_at = now
        self._allowance = min(self._write_rate, self._allowance + passed * self._write_rate)
        return (urgent or self._allowance > 0) and self._queued + nbytes <= _MOST_QUEUED

    def hurry(self) -> None:
        """Accept blocks as fast as the queue takes them, because the process is about to end."""
        self._write_rate = self._allowance = 1e18

    def put(self, group: int, key: bytes, parent: bytes, content: bytes, payload: bytes) -> bool:
        """Write a block. Returns False, and counts why, if it is not written. The block can be found when it has been
        written."""
        slot = self._take_slot(group)
        if slot is None:
            self.rejected["no_slot"] += 1
            return False
        self._generation += 1
        checksum = payload_checksum(payload, key, slot, self._generation)
        record = Record(group, slot, self._generation, int(self._unix_time()), checksum, key, parent, content)
        if not record.fits(self._files.record_bytes):
            self._free[group].append(slot)
            self.rejected["marks"] += 1
            return False
        self._allowance -= len(payload)
        self._queued += len(payload)
        self._pending[group, key] = slot
        self._send(_Write(record, payload))
        return True

    def _take_slot(self, group: int) -> int | None:
        """A slot whose block, if it had one, can no longer be found there. None if all are being read or written."""
        if self._free[group]:
            return self._free[group].pop()
        own = self._own[group]
        slot = next((slot for slot in own if not self._pinned[group, slot]), None)
        if slot is not None:
            self._index.remove(self._index[group, own.pop(slot)])
        return slot

    def forget(self, group: int, key: bytes) -> None:
        """Never find this block again, because its content may be wrong."""
        slot = self._pending.pop((group, key), None)
        if slot is not None:  # the thread writes it first
            self._send(_Erase(group, slot))
        known = self._index.pop((group, key), None)
        if known is None:
            return
        self.rejected["forgotten"] += 1
        if known.writer == self._files.writer:
            del self._own[group][known.record.slot]
            self._send(_Erase(group, known.record.slot))

    def stop(self, reason: str) -> None:
        """Find and write nothing any more."""
        self.stopped = reason
        self._is_over = True
        self._index.clear()
        self._pending.clear()
        for own in self._own:
            own.clear()

    # -- what is in it -------------------------------------------------------------------------------------------------

    def survey(self, clear: str = "") -> None:
        """Begin to look what is in the directory. :meth:`take_surveys` tells when that is known.

        With ``clear``, first remove all blocks of this namespace (``own``) or of all namespaces (``all``), except those
        that other processes write. Nothing is found or written meanwhile.
        """
        if clear:
            self._index.clear()
            self._others.clear()
            self._pending.clear()
            self._is_clearing = True
        self._num_surveys += 1
        self._send(_Survey(clear))

    def take_surveys(self) -> int:
        """Number of surveys that have ended since the last call."""
        self.poll()
        count, self._num_surveyed = self._num_surveyed, 0
        self._num_surveys -= count
        return count

    @property
    def is_surveying(self) -> bool:
        """Whether a survey has begun whose end was not taken."""
        return self._num_surveys > 0

    def report(self) -> StoreReport:
        """The state of the store, with the sizes that the newest survey has found."""
        state = "open"
        if self.stopped:
            state = "read_only" if self._files.writer < 0 and not self._is_over else "stopped"
        return StoreReport(
            state=state,
            why=self.stopped,
            namespace=self._files.namespace,
            writer=self._files.writer,
            blocks=self.num_blocks,
            own_blocks=sum(map(len, self._own)),
            most_own_blocks=sum(self._files.num_slots),
            namespaces=self._namespaces,
            queued_bytes=self._queued,
            written_bytes=self.num_written,
            read_bytes=self.num_read,
            read_bytes_per_second=round(self.bytes_per_second),
            rejected=dict(self.rejected),
        )

    def _surveyed(self, job: _Survey) -> None:
        self._num_surveyed += 1
        if job.clear:
            self._is_clearing = False
            for group, count in enumerate(self._files.num_slots):
                self._own[group].clear()
                self._free[group] = list(range(count - 1, -1, -1))

    # -- reading -------------------------------------------------------------------------------------------------------

    def load(self, wanted: Sequence[Stored]) -> BlockLoad:
        """Begin to read blocks. Their slots are not overwritten before :meth:`loaded` was called for the load."""
        job = BlockLoad(list(wanted))
        for each in job.wanted:
            if each.writer == self._files.writer:
                place = each.record.group, each.record.slot
                self._pinned[place] += 1
                if place[1] in self._own[place[0]]:
                    self._own[place[0]].move_to_end(place[1])
        with self._wake:
            self._loads.append(job)
            self._wake.notify()
        return job

    def loaded(self, job: BlockLoad) -> None:
        """Take note of a load that has ended, or that nobody waits for any more."""
        job.is_cancelled = True
        for each in job.wanted:
            if each.writer == self._files.writer:
                place = each.record.group, each.record.slot
                self._pinned[place] -= 1
                if not self._pinned[place]:
                    del self._pinned[place]
        nbytes = sum(map(len, job.blocks))
        self.num_read += nbytes
        if nbytes and job.seconds > 0:
            self.bytes_per_second += (nbytes / job.seconds - self.bytes_per_second) * _MEMORY
        if job.is_done and len(job.blocks) < len(job.wanted):
            wrong = job.wanted[len(job.blocks)]
            if self._index.get((wrong.record.group, wrong.record.key)) is wrong:
                self.rejected["unreadable"] += 1
                self._drop(wrong)

    def look_up(self, places: Sequence[Place]) -> Lookup:
        """Begin to read the records of blocks that other processes have just written. After the lookup, :meth:`poll`
        lets them be found. (The thread finds them by itself, but later.)"""
        job = Lookup(places)
        with self._wake:
            self._lookups.append(job)
            self._wake.notify()
        return job

    def _drop(self, wrong: Stored) -> None:
        """Never find a copy of a block again that could not be read, and use its slot again."""
        group = wrong.record.group
        self._index.remove(wrong)
        if wrong.writer == self._files.writer:
            del self._own[group][wrong.record.slot]
            self._free[group].insert(0, wrong.record.slot)

    # -- the border to the thread --------------------------------------------------------------------------------------

    def _send(self, job: _Write | _Erase | _Survey) -> None:
        with self._wake:
            self._writes.append(job)
            self._wake.notify()

    def poll(self) -> None:
        """Take note of what the thread has written, and of what it has found in the files of others."""
        while self._news:
            writer, record = self._news.popleft()
            self._generation = max(self._generation, record.generation)
            if not self._is_over:
                self._note_other(writer, record)
        while self._results:
            job, error = self._results.popleft()
            if error is not None and not self.stopped and job != _Survey(""):
                self.stopped = f"a write failed: {error.strerror or error}"
                _log.warning("kv_store: %s; blocks are still read, and none are written any more", self.stopped)
            if isinstance(job, _Write):
                self._written(job, error)
            elif isinstance(job, _Survey):
                self._surveyed(job)
            elif error is None and not self.stopped:
                self._free[job.group].insert(0, job.slot)

    def _written(self, job: _Write, error: OSError | None) -> None:
        record = job.record
        name = record.group, record.key
        self._queued -= len(job.payload)
        if error is not None:
            self._pending.pop(name, None)
            self.rejected["write_failed"] += 1
            return
        self.num_written += len(job.payload)
        if self._pending.get(name) != record.slot:  # forgotten meanwhile
            return
        del self._pending[name]
        self._own[record.group][record.slot] = record.key
        self._index.add(Stored(self._files.writer, record))

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._wake:
                while not (self._loads or self._lookups or self._writes or self._ended):
                    if not self._wake.wait(_FOLLOW_SECONDS):
                        break
                if self._ended and not self._writes:
                    break
            self.work()
        self._sync(always=True)

    def work(self) -> bool:
        """Do the next piece of work of the thread: read a block before writing one. False: there was none."""
        if self._loads:
            self._read(self._loads[0])
            return True
        if self._lookups:
            self._look(self._lookups.popleft())
            return True
        if self._writes:
            self._write(self._writes.popleft())
            self._sync()
            self._follow()
            return True
        self._sync()
        self._follow()
        return False

    def _follow(self) -> None:
        """Look for blocks that other writers have added, at most once per second."""
        if self._is_over or self._now() - self._followed_at < _FOLLOW_SECONDS:
            return
        self._news.extend(self._files.follow())
        self._followed_at = self._now()

    def _read(self, job: BlockLoad) -> None:
        start = self._now()
        payload: bytes | None = None
        if not job.is_cancelled and self._reads_failed < _MOST_READ_ERRORS and len(job.blocks) < len(job.wanted):
            wanted = job.wanted[len(job.blocks)]
            try:
                payload = self._files.read(wanted.writer, wanted.record)
                self._reads_failed = 0
            except OSError as error:
                self._reads_failed += 1
                _log.warning("kv_store: a block could not be read: %s", error.strerror or error)
        job.seconds += self._now() - start
        if payload is not None:
            job.blocks.append(payload)
        if payload is None or len(job.blocks) == len(job.wanted):
            self._loads.popleft()
            job.is_done = True

    def _look(self, job: Lookup) -> None:
        for writer, group, slot in job.places:
            try:
                record = self._files.record(writer, group, slot)
            except OSError:
                break
            if record is not None and writer != self._files.writer:
                self._news.append((writer, record))
        job.is_done = True

    def _write(self, job: _Write | _Erase | _Survey) -> None:
        try:
            if isinstance(job, _Write):
                self._files.write(job.record, job.payload)
                self._unsynced += len(job.payload)
            elif isinstance(job, _Survey):
                if job.clear:
                    self._files.clear(job.clear == "all")
                self._namespaces = self._files.namespaces()
            else:
                self._files.erase(job.group, job.slot)
        except OSError as error:
            self._results.append((job, error))
            return
        self._results.append((job, None))

    def _sync(self, always: bool = False) -> None:
        due = self._unsynced >= _SYNC_BYTES or self._now() - self._synced_at >= _SYNC_SECONDS
        if not self._unsynced or not (due or always):
            return
        self._synced_at = self._now()
        self._unsynced = 0
        try:
            self._files.sync()
        except OSError as error:  # the pages count as written now, so a second attempt would prove nothing
            if not self.stopped:
                self.stopped = f"a sync failed: {error.strerror or error}"
                _log.warning("kv_store: %s; blocks are still read, and none are written any more", self.stopped)

    def close(self) -> None:
        """Write what was accepted, and close the files."""
        if self._thread is not None:
            with self._wake:
                self._ended = True
                self._wake.notify()
            self._thread.join()
            self._thread = None
        else:
            while self.work():
                pass
            self._sync(always=True)
        self.poll()
        self._files.close()
