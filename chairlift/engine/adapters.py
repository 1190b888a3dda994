"""Adapters of an engine. Another thread reads adapters from files. The number of adapters in memory is limited. A
removed adapter is freed after its last request.

Each load of an adapter has a new number. So a second load under the same name is a different adapter, and no request
ever changes its adapter. Requests of two loads share KV only if the files have the same content. A request whose
adapter is in memory can be in the next step. Other requests wait in a separate queue until their adapter has been read
again.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from chairlift.config import LoRAConfig
from chairlift.core.request import Request
from chairlift.core.rows.adapters import AdapterRows
from chairlift.engine.clock import POLL_SECONDS
from chairlift.errors import ChairliftError, InvariantError, RequestError
from chairlift.executor.executor import AdapterMemory

__all__ = ["AdapterLoad", "AdapterState", "Adapters"]

_log = logging.getLogger(__name__)
_NOT_ENABLED: Final = "adapters are not served; start the engine with enable_lora"
_MAX_KNOWN: Final = 100_000
_MAX_NAMED: Final = 64

Beside = Callable[[Callable[[], Any]], "Future[Any]"]
"""Runs a function that reads an adapter outside the engine's thread; the future has its result."""


@dataclasses.dataclass(frozen=True, slots=True)
class AdapterLoad:
    """An adapter to load from files: its new number, its name and its directory."""

    adapter_id: int
    name: str
    path: str
    root: str | None = None
    """Directory that must contain all files of the adapter, after links are followed; None: any directory."""


@dataclasses.dataclass(frozen=True, slots=True)
class AdapterState:
    """Result of a load. ``error`` is empty if the adapter was loaded."""

    adapter_id: int
    error: str = ""
    digest: str = ""
    """Digest of the adapter's content, if it was loaded."""


@dataclasses.dataclass(slots=True, eq=False)
class _Known:
    load: AdapterLoad
    digest: str = ""
    """Digest of the adapter's files at the first read. Files with another digest are refused."""
    reading: Future[Any] | None = None
    resident: bool = False
    retired: bool = False
    """Whether the adapter's name was removed. The adapter leaves memory after its last request."""
    users: int = 0
    """Number of requests with this adapter that have not ended."""
    active: int = 0
    """Number of requests with this adapter that may be in a step. While this number is above 0, the adapter must stay
    in memory."""


class Adapters:
    """Adapters of an engine. ``memory`` holds at most ``config.num_cpu_loras`` adapters; both are None if the engine
    serves no adapters.

    ``beside`` runs the reads (default: a thread of this object). Only one thread may call the methods.
    """

    def __init__(
        self, memory: AdapterMemory | None = None, config: LoRAConfig | None = None, beside: Beside | None = None
    ) -> None:
        self._memory = memory
        self._config = config
        self._beside = beside
        self._known: dict[int, _Known] = {}
        self._resident: OrderedDict[int, _Known] = OrderedDict()
        """``adapter_id`` -> adapter in memory, least recently used first."""
        self._queue: list[tuple[_Known, Request]] = []
        """(adapter, request) pairs in order of arrival: requests whose adapter is not in memory. While memory has no
        room for such an adapter, all later requests wait here too, so that they keep no other adapters in memory."""
        self._blocked = False
        self._of: dict[str, _Known] = {}
        """Request id -> the request's adapter, for requests that have not ended."""
        self._states: list[AdapterState] = []
        self._failed: list[tuple[Request, str]] = []
        self._thread: ThreadPoolExecutor | None = None
        self.sizes: dict[int, int] = {}
        """``adapter_id`` -> bytes of the adapter, for all adapters that have been in memory and are not forgotten."""
        self._digests: dict[int, str] = {}
        """``adapter_id`` -> digest of the content, for the adapters in ``sizes``."""
        self._changing: set[int] = set()
        """``adapter_id`` of each adapter whose name had other content before, as in a training run. The next version
        will not need its KV, so the KV is not kept for later processes."""
        self._content: dict[str, str] = {}
        """Name of an adapter -> digest of the content with which it was loaded first."""
        self.rows = None
        if config is not None:
            self.rows = AdapterRows(config.max_loras, self.sizes, self._digests, self._changing)
        """What the scheduler must know of requests with adapters; None if the engine serves no adapters."""
        self._noted: tuple[list[str], list[str]] = [], []
        """Result of the newest call of :meth:`in_use`."""
        self.num_reads = self.num_hits = self.num_evictions = 0
        """Counters: adapters read from files; requests whose adapter was in memory when they arrived; adapters evicted
        from memory."""

    @property
    def capacity(self) -> int:
        """Maximum number of adapters in memory."""
        return 0 if self._config is None else self._config.num_cpu_loras

    @property
    def max_loras(self) -> int:
        """Maximum number of different adapters in a step; 0 if the engine serves no adapters."""
        return 0 if self._config is None else self._config.max_loras

    @property
    def is_busy(self) -> bool:
        """Whether an adapter is being read from files, or the result of such a read has not been taken yet."""
        return bool(self._states or self._failed) or any(known.reading is not None for known in self._known.values())

    @property
    def num_users(self) -> int:
        """Number of requests that have an adapter and have not ended."""
        return len(self._of)

    @property
    def resident(self) -> tuple[int, ...]:
        """``adapter_id`` of each adapter in memory, least recently used first."""
        return tuple(self._resident)

    def in_use(self) -> tuple[list[str], list[str]]:
        """(names of adapters with running requests, names of adapters with waiting requests only), at most 64 names
        each."""
        running = () if self.rows is None else self.rows.running
        used = [known.load for known in self._known.values() if known.users]
        names = sorted((load.adapter_id not in running, load.name) for load in used)
        running_names, waiting = ([name for waits, name in names if waits == which] for which in (False, True))
        return running_names[:_MAX_NAMED], waiting[:_MAX_NAMED]

    def note_use(self) -> None:
        """Note for :meth:`counts` which adapters are in use."""
        if self.max_loras:
            self._noted = self.in_use()

    def counts(self) -> dict[str, Any]:
        """Fields of :class:`~chairlift.metrics.stats.EngineStats`; empty if the engine serves no adapters."""
        if not self.max_loras:
            return {}
        return {
            "max_loras": self.max_loras,
            "running_adapters": self._noted[0],
            "waiting_adapters": self._noted[1],
            "num_adapter_reads": self.num_reads,
            "num_adapter_hits": self.num_hits,
            "num_adapter_evictions": self.num_evictions,
        }

    # -- loading ---------------------------------------------------------------------------------------------------

    def load(self, load: AdapterLoad) -> None:
        """Start to read an adapter in another thread; :meth:`take_states` returns the result later. Requests for it may
        be added at once."""
        if self._memory is None:
            self._states.append(AdapterState(load.adapter_id, _NOT_ENABLED))
        elif len(self._known) >= _MAX_KNOWN:
            self._states.append(AdapterState(load.adapter_id, f"{_MAX_KNOWN:,} adapters are loaded; unload some"))
        elif load.adapter_id in self._known:
            raise InvariantError(f"adapter {load.adapter_id} is known already")
        else:
            self._known[load.adapter_id] = known = _Known(load)
            self._read(known)

    def load_now(self, load: AdapterLoad) -> None:
        """Read an adapter in this thread. Raises ModelLoadError, and RequestError if the engine serves no adapters."""
        known = _Known(load)
        root = None if load.root is None else Path(load.root)
        self._arrived(known, self._served_memory().read(Path(load.path), root))
        self._known[load.adapter_id] = known

    def unload(self, adapter_id: int) -> None:
        """Remove an adapter. Running requests continue to use it; the adapter leaves memory after the last of these
        requests. Unknown ids are ignored."""
        known = self._known.get(adapter_id)
        if known is not None:
            known.retired = True
            self._let_go(known)

    def take_states(self) -> list[AdapterState]:
        """Results of the loads that have ended since the last call."""
        states = self._states
        self._states = []
        return states

    def take_ready(self) -> tuple[list[Request], list[tuple[Request, str]]]:
        """(requests whose adapter has come into memory; (request, reason) pairs of requests whose adapter could not be
        read)."""
        for known in [each for each in self._known.values() if each.reading is not None and each.reading.done()]:
            self._take(known)
        ready = self._advance() if self._queue else []
        failed = self._failed
        self._failed = []
        return ready, failed

    def _served_memory(self) -> AdapterMemory:
        if self._memory is None:
            raise RequestError(_NOT_ENABLED)
        return self._memory

    def _read(self, known: _Known) -> None:
        memory = self._served_memory()
        load = known.load
        root = None if load.root is None else Path(load.root)

        def work() -> Any:
            return memory.read(Path(load.path), root)

        if self._beside is not None:
            known.reading = self._beside(work)
            return
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "adapters")
        known.reading = self._thread.submit(work)

    def _take(self, known: _Known) -> None:
        """Handle the end of reading an adapter's files: store the adapter, or note the error."""
        future = known.reading
        known.reading = None
        first = not known.digest
        try:
            self._arrived(known, None if future is None else future.result())
        except Exception as error:
            why = str(error) if isinstance(error, ChairliftError) else f"it could not be read ({type(error).__name__})"
            if not isinstance(error, ChairliftError):
                _log.exception("adapter %r could not be read", known.load.name)
            self._failed += [
                (request, f"adapter {known.load.name!r}: {why}") for each, request in self._queue if each is known
            ]
            self._queue = [(each, request) for each, request in self._queue if each is not known]
            if first:
                self._states.append(AdapterState(known.load.adapter_id, why))
                known.retired = True
        else:
            if first:
                self._states.append(AdapterState(known.load.adapter_id, digest=known.digest))
        self._let_go(known)

    def _arrived(self, known: _Known, adapter: Any) -> None:
        self.num_reads += 1
        if known.digest and known.digest != adapter.digest:
            raise RequestError(
                f"its files in {known.load.path} were changed since it was loaded; load it again (load_inplace)"
            )
        known.digest = adapter.digest
        self.sizes[known.load.adapter_id] = adapter.nbytes
        self._digests[known.load.adapter_id] = adapter.digest
        if len(self._content) >= _MAX_KNOWN:
            self._content.pop(next(iter(self._content)))
        if self._content.setdefault(known.load.name, adapter.digest) != adapter.digest:
            self._changing.add(known.load.adapter_id)
        if self._make_room(reading=False):
            self._served_memory().put(known.load.adapter_id, adapter)
            known.resident = True
            self._resident[known.load.adapter_id] = known

    def _make_room(self, *, reading: bool = True) -> bool:
        """Whether one more adapter fits into memory. If necessary, unused adapters are evicted first."""
        num_reading = sum(known.reading is not None for known, _ in self._waiting()) if reading else 0
        while len(self._resident) + num_reading >= self.capacity:
            idle = next((known for known in self._resident.values() if not known.active), None)
            if idle is None:
                return False
            self._evict(idle)
            self.num_evictions += 1
        return True

    def _waiting(self) -> list[tuple[_Known, Request]]:
        """The waiting (adapter, request) pairs, reduced to one pair per adapter."""
        return list({id(known): (known, request) for known, request in self._queue}.values())

    def _evict(self, known: _Known) -> None:
        self._served_memory().drop(known.load.adapter_id)
        del self._resident[known.load.adapter_id]
        known.resident = False

    def _let_go(self, known: _Known) -> None:
        """Remove a retired adapter after its last request has ended."""
        if known.retired and not known.users and known.reading is None:
            if known.resident:
                self._evict(known)
            self._known.pop(known.load.adapter_id, None)
            self.sizes.pop(known.load.adapter_id, None)
            self._digests.pop(known.load.adapter_id, None)
            self._changing.discard(known.load.adapter_id)

    # -- requests --------------------------------------------------------------------------------------------------

    def add(self, requests: Sequence[Request], adapter_id: int) -> None:
        """Set the adapter of all sequences of one request. Sequences that must wait for the adapter are marked as not
        ready.

        Raises RequestError for an unknown adapter, and if the engine serves no adapters.
        """
        self._served_memory()
        known = self._known.get(adapter_id)
        if known is None or known.retired:
            raise RequestError("the adapter of this request was unloaded; ask for another model")
        known.users += len(requests)
        self._of |= {request.request_id: known for request in requests}
        if known.resident and not self._blocked:
            self.num_hits += len(requests)
            self._activate(known, len(requests))
            return
        self._queue += [(known, request) for request in requests]
        for request in requests:
            request.is_ready = False
            request.waits_for = "adapter"

    def next_event(self, now: float) -> float | None:
        """Time of the next look at the files that are being read; None if none are read. The result of a read is
        reported although no request may wait for it."""
        return now + POLL_SECONDS if self.is_busy else None

    def waits(self, request: Request) -> bool:
        """Whether the request waits until its adapter is in memory."""
        return request.waits_for == "adapter"

    def forget(self, request: Request) -> None:
        """Note that a request has ended. After the last request of a removed adapter, the adapter is freed."""
        known = self._of.pop(request.request_id, None)
        if known is None:
            return
        if request.waits_for == "adapter":
            self._queue = [entry for entry in self._queue if entry[1] is not request]
        else:
            known.active -= 1
        known.users -= 1
        self._let_go(known)

    def _activate(self, known: _Known, count: int) -> None:
        known.active += count
        self._resident.move_to_end(known.load.adapter_id)

    def _advance(self) -> list[Request]:
        """Requests that can run now, in order of arrival. For the other waiting requests, starts to read their
        adapters."""
        ready: list[Request] = []
        still_waiting: list[tuple[_Known, Request]] = []
        self._blocked = False
        for known, request in self._queue:
            if known.resident and not self._blocked:
                self._activate(known, 1)
                request.waits_for = ""
                ready.append(request)
                continue
            still_waiting.append((known, request))
            if known.reading is None and not self._blocked:
                if self._make_room():
                    self._read(known)
                else:
                    self._blocked = True
        self._queue = still_waiting
        return ready

    def check_invariants(self) -> None:
        """Raise InvariantError if a counter is wrong or a limit is exceeded."""
        if len(self._resident) > self.capacity:
            raise InvariantError(f"{len(self._resident)} adapters are in memory, and {self.capacity} may be")
        waiting = {request.request_id for _, request in self._queue}
        for known in self._known.values():
            names = [name for name, each in self._of.items() if each is known]
            if known.users != len(names) or known.active != sum(name not in waiting for name in names):
                raise InvariantError(f"adapter {known.load.name!r} has other requests than its counts say")
            if known.active and not known.resident:
                raise InvariantError(f"adapter {known.load.name!r} is not in memory, but may be in a step")

    def shutdown(self) -> None:
        """Drop all requests, and end the thread that reads adapters."""
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)
            self._thread = None
        self._queue.clear()
        self._of.clear()
