"""Adapters of an engine: they are read beside the loop, limited in number, and freed after their last request.

Each load of an adapter has a new number. So another load under the same name is another adapter: its requests share no
KV with earlier ones, and no request ever changes its adapter. Requests whose adapter is in memory can be in the next
step. Others wait in a queue of their own until their adapter has been read again.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from chairlift.config import LoRAConfig
from chairlift.errors import ChairliftError, InvariantError, RequestError
from chairlift.executor.executor import AdapterMemory
from chairlift.request import Request

__all__ = ["AdapterLoad", "AdapterState", "Adapters"]

_log = logging.getLogger(__name__)
_NOT_ENABLED: Final = "adapters are not served; start the engine with enable_lora"
_MOST_KNOWN: Final = 100_000
_MOST_NAMED: Final = 64

Beside = Callable[[Callable[[], Any]], "Future[Any]"]
"""Reads an adapter beside the loop."""


@dataclasses.dataclass(frozen=True, slots=True)
class AdapterLoad:
    """An adapter to be known from now on."""

    adapter_id: int
    name: str
    path: str
    root: str | None = None
    """Where its files must lie, links followed; None: anywhere."""


@dataclasses.dataclass(frozen=True, slots=True)
class AdapterState:
    """Result of a load; ``error`` is empty after success."""

    adapter_id: int
    error: str = ""


@dataclasses.dataclass(slots=True, eq=False)
class _Known:
    load: AdapterLoad
    digest: str = ""
    """Digest of the first read. Content with another digest is another adapter."""
    reading: Future[Any] | None = None
    resident: bool = False
    retired: bool = False
    """Whether its name was removed. It leaves with its last request."""
    users: int = 0
    """Requests that have not ended."""
    active: int = 0
    """Requests with this adapter that may be in a step. While there are any, the adapter must be in memory."""


class Adapters:
    """Adapters of an engine. ``memory`` holds ``config.num_cpu_loras`` of them; both are None if the engine serves
    none.

    ``beside`` reads (default: on a thread). One thread owns the object.
    """

    def __init__(
        self, memory: AdapterMemory | None = None, config: LoRAConfig | None = None, beside: Beside | None = None
    ) -> None:
        self._memory, self._config, self._beside = memory, config, beside
        self._known: dict[int, _Known] = {}
        self._resident: OrderedDict[int, _Known] = OrderedDict()
        """Adapters in memory, least recently used first."""
        self._line: list[tuple[_Known, Request]] = []
        """Requests whose adapter is not in memory, and later requests while there is no room for it, so that these keep
        no other adapter in memory."""
        self._blocked = False
        self._of: dict[str, _Known] = {}
        """Requests that have not ended."""
        self._states: list[AdapterState] = []
        self._failed: list[tuple[Request, str]] = []
        self._thread: ThreadPoolExecutor | None = None
        self.sizes: dict[int, int] = {}
        """Adapter -> its bytes, for all that have been in memory and are not forgotten."""
        self.num_reads = self.num_hits = self.num_evictions = 0
        """Adapters read, requests whose adapter was in memory, adapters evicted."""

    @property
    def capacity(self) -> int:
        """Most adapters in memory."""
        return 0 if self._config is None else self._config.num_cpu_loras

    @property
    def max_loras(self) -> int:
        """Most adapters in a step; 0 if none are served."""
        return 0 if self._config is None else self._config.max_loras

    @property
    def is_reading(self) -> bool:
        """Whether an adapter is being read, or there is news of one."""
        return bool(self._states or self._failed) or any(known.reading is not None for known in self._known.values())

    @property
    def num_users(self) -> int:
        """Requests with an adapter that have not ended."""
        return len(self._of)

    @property
    def resident(self) -> tuple[int, ...]:
        """Adapters in memory, least recently used first."""
        return tuple(self._resident)

    def in_use(self, running: Collection[int]) -> tuple[list[str], list[str]]:
        """Names of adapters with running requests, and of those with waiting ones only; at most 64 of each."""
        used = [known.load for known in self._known.values() if known.users]
        names = sorted((load.adapter_id not in running, load.name) for load in used)
        running_names, waiting = ([name for waits, name in names if waits == which] for which in (False, True))
        return running_names[:_MOST_NAMED], waiting[:_MOST_NAMED]

    # -- loading ---------------------------------------------------------------------------------------------------

    def load(self, load: AdapterLoad) -> None:
        """Read an adapter beside the loop; :meth:`take_states` returns the result. Requests may use it already."""
        if self._memory is None:
            self._states.append(AdapterState(load.adapter_id, _NOT_ENABLED))
        elif len(self._known) >= _MOST_KNOWN:
            self._states.append(AdapterState(load.adapter_id, f"{_MOST_KNOWN:,} adapters are loaded; unload some"))
        elif load.adapter_id in self._known:
            raise InvariantError(f"adapter {load.adapter_id} is known already")
        else:
            self._known[load.adapter_id] = known = _Known(load)
            self._read(known)

    def load_now(self, load: AdapterLoad) -> None:
        """Read an adapter here and now. Raises ModelLoadError, and RequestError where none are served."""
        known, root = _Known(load), None if load.root is None else Path(load.root)
        self._arrived(known, self._held().read(Path(load.path), root))
        self._known[load.adapter_id] = known

    def unload(self, adapter_id: int) -> None:
        """Remove an adapter. Its requests continue, and it leaves memory with the last of them. Unknown ids are
        ignored."""
        known = self._known.get(adapter_id)
        if known is not None:
            known.retired = True
            self._let_go(known)

    def take_states(self) -> list[AdapterState]:
        """Results of loads since the last call."""
        states, self._states = self._states, []
        return states

    def take_ready(self) -> tuple[list[Request], list[tuple[Request, str]]]:
        """Requests whose adapter is in memory now, and those whose adapter could not be read, with the reason."""
        for known in [each for each in self._known.values() if each.reading is not None and each.reading.done()]:
            self._take(known)
        ready = self._advance() if self._line else []
        failed, self._failed = self._failed, []
        return ready, failed

    def _held(self) -> AdapterMemory:
        if self._memory is None:
            raise RequestError(_NOT_ENABLED)
        return self._memory

    def _read(self, known: _Known) -> None:
        memory, load = self._held(), known.load
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
        """Take the result of a read."""
        future, known.reading = known.reading, None
        first = not known.digest
        try:
            self._arrived(known, None if future is None else future.result())
        except Exception as error:
            why = str(error) if isinstance(error, ChairliftError) else f"it could not be read ({type(error).__name__})"
            if not isinstance(error, ChairliftError):
                _log.exception("adapter %r could not be read", known.load.name)
            self._failed += [
                (request, f"adapter {known.load.name!r}: {why}") for each, request in self._line if each is known
            ]
            self._line = [(each, request) for each, request in self._line if each is not known]
            if first:
                self._states.append(AdapterState(known.load.adapter_id, why))
                known.retired = True
        else:
            if first:
                self._states.append(AdapterState(known.load.adapter_id))
        self._let_go(known)

    def _arrived(self, known: _Known, adapter: Any) -> None:
        self.num_reads += 1
        if known.digest and known.digest != adapter.digest:
            raise RequestError(
                f"its files in {known.load.path} were changed since it was loaded; load it again (load_inplace)"
            )
        known.digest = adapter.digest
        self.sizes[known.load.adapter_id] = adapter.nbytes
        if self._make_room(reading=False):
            self._held().put(known.load.adapter_id, adapter)
            known.resident = True
            self._resident[known.load.adapter_id] = known

    def _make_room(self, *, reading: bool = True) -> bool:
        """Whether there is room for one more adapter in memory. An unused one may be evicted for it."""
        coming = sum(known.reading is not None for known, _ in self._waiting()) if reading else 0
        while len(self._resident) + coming >= self.capacity:
            idle = next((known for known in self._resident.values() if not known.active), None)
            if idle is None:
                return False
            self._evict(idle)
            self.num_evictions += 1
        return True

    def _waiting(self) -> list[tuple[_Known, Request]]:
        """The queue, with one request per adapter."""
        return list({id(known): (known, request) for known, request in self._line}.values())

    def _evict(self, known: _Known) -> None:
        self._held().drop(known.load.adapter_id)
        del self._resident[known.load.adapter_id]
        known.resident = False

    def _let_go(self, known: _Known) -> None:
        """Forget a retired adapter whose last request has ended."""
        if known.retired and not known.users and known.reading is None:
            if known.resident:
                self._evict(known)
            self._known.pop(known.load.adapter_id, None)
            self.sizes.pop(known.load.adapter_id, None)

    # -- requests --------------------------------------------------------------------------------------------------

    def add(self, requests: Sequence[Request], adapter_id: int) -> None:
        """Set the adapter of the answers of one request. Answers that must wait for it are marked as not ready.

        Raises RequestError for an unknown adapter.
        """
        self._held()
        known = self._known.get(adapter_id)
        if known is None or known.retired:
            raise RequestError("the adapter of this request was unloaded; ask for another model")
        known.users += len(requests)
        self._of |= {request.request_id: known for request in requests}
        if known.resident and not self._blocked:
            self.num_hits += len(requests)
            self._activate(known, len(requests))
            return
        self._line += [(known, request) for request in requests]
        for request in requests:
            request.is_ready, request.waits_for = False, "adapter"

    def waits(self, request: Request) -> bool:
        """Whether a request is in the line for its adapter."""
        return request.waits_for == "adapter"

    def forget(self, request: Request) -> None:
        """Note that a request has left; the adapter is freed after its last request."""
        known = self._of.pop(request.request_id, None)
        if known is None:
            return
        if request.waits_for == "adapter":
            self._line = [entry for entry in self._line if entry[1] is not request]
        else:
            known.active -= 1
        known.users -= 1
        self._let_go(known)

    def _activate(self, known: _Known, count: int) -> None:
        known.active += count
        self._resident.move_to_end(known.load.adapter_id)

    def _advance(self) -> list[Request]:
        """Requests in the queue that are now ready, in order. Starts to read the adapters of the others."""
        ready: list[Request] = []
        kept: list[tuple[_Known, Request]] = []
        self._blocked = False
        for known, request in self._line:
            if known.resident and not self._blocked:
                self._activate(known, 1)
                request.waits_for = ""
                ready.append(request)
                continue
            kept.append((known, request))
            if known.reading is None and not self._blocked:
                if self._make_room():
                    self._read(known)
                else:
                    self._blocked = True
        self._line = kept
        return ready

    def check_invariants(self) -> None:
        """Raise InvariantError unless counts agree and bounds are kept."""
        if len(self._resident) > self.capacity:
            raise InvariantError(f"{len(self._resident)} adapters are in memory, and {self.capacity} may be")
        waiting = {request.request_id for _, request in self._line}
        for known in self._known.values():
            names = [name for name, each in self._of.items() if each is known]
            if known.users != len(names) or known.active != sum(name not in waiting for name in names):
                raise InvariantError(f"adapter {known.load.name!r} has other requests than its counts say")
            if known.active and not known.resident:
                raise InvariantError(f"adapter {known.load.name!r} is not in memory, but may be in a step")

    def shutdown(self) -> None:
        """Forget everything, and end the thread."""
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)
            self._thread = None
        self._line.clear()
        self._of.clear()
