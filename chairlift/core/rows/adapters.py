"""Requests with an adapter. A step has a limited number of different adapters, and reads each of them once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from chairlift.core.request import Request
from chairlift.core.rows.kind import RowKind
from chairlift.errors import InvariantError

if TYPE_CHECKING:
    from chairlift.core.scheduler.batch import Batch

__all__ = ["AdapterRows", "adapter_key"]

_LOOKED_PAST = 64
"""Maximum number of waiting requests per step that are skipped because the step has no room for their adapter."""


def adapter_key(adapter_id: int, digest: str) -> bytes:
    """Key of an adapter in the prefix cache: that of its content if the digest of its content is known."""
    return f"sha256:{digest}".encode() if digest else str(adapter_id).encode()


class AdapterRows(RowKind):
    """Counts the adapters of the running requests. ``most`` is the maximum number of different adapters; 0: no limit.
    ``sizes`` maps ``adapter_id`` to the size of the adapter in bytes, and may change between steps (default: 0).
    ``digests`` maps it to a digest of the adapter's content, which must not change while a request uses the adapter.
    Adapters of equal content share blocks, also with later processes. Without a digest, a number shares with itself.
    Adapters in ``changing`` are about to be replaced by newer ones, so their blocks are not kept for later processes.

    Requests whose adapter does not fit are skipped. After a request was passed too often for this reason, no later
    request with an adapter joins until running adapters have ended.
    """

    name = "adapter"

    def __init__(
        self,
        most: int = 0,
        sizes: Mapping[int, int] | None = None,
        digests: Mapping[int, str] | None = None,
        changing: Collection[int] = (),
    ) -> None:
        self.most = most
        self.num_looked_past = _LOOKED_PAST if most else 0
        self.sizes: Mapping[int, int] = {} if sizes is None else sizes
        self.digests: Mapping[int, str] = {} if digests is None else digests
        self.changing = changing
        self.running: Counter[int] = Counter()
        """``adapter_id`` -> number of running requests with this adapter."""
        self._skipped: list[Request] = []
        """Waiting requests that were skipped because the step has no room for their adapter."""
        self._passes: dict[str, int] = {}
        """Request id -> number of later requests with adapters that were admitted while this one's did not fit."""
        self._decodes: list[Request] = []
        self._of_decodes: frozenset[int] = frozenset()
        """``adapter_id`` of each request in the list ``_decodes``; 0 stands for no adapter."""

    def has(self, request: Request) -> bool:
        return bool(request.adapter_id)

    def attach(self, batch: Batch) -> None:
        self._batch = batch

    def twin(self) -> AdapterRows:
        twin = AdapterRows(self.most, self.sizes, self.digests, self.changing)
        twin._passes = self._passes.copy()
        return twin

    def added(self, request: Request) -> None:
        # Kernels read the adapter's matrices once for all rows that lie next to each other.
        request.row_order = request.adapter_id

    def has_room(self, request: Request) -> bool:
        """Whether a step can use the adapter of a waiting request in addition to the adapters that it uses already."""
        return not self.most or request.adapter_id in self.running or len(self.running) < self.most

    def obstacle(self, request: Request) -> bool:
        return not self.has_room(request)

    def begin_pass(self) -> None:
        self._skipped = []

    def skips(self, request: Request) -> bool:
        return not self.has_room(request) or self._must_wait()

    def _must_wait(self) -> bool:
        """Whether later requests have passed a request too often because the step had no room for its adapter."""
        most = self._batch.waiting.max_times_passed
        return any(self._passes.get(other.request_id, 0) >= most for other in self._skipped)

    def skipped(self, request: Request) -> None:
        if not self.has_room(request):
            self._skipped.append(request)

    def passed(self, request: Request) -> None:
        for other in self._skipped:
            self._passes[other.request_id] = self._passes.get(other.request_id, 0) + 1

    def begin(self, num_decodes: int) -> None:
        self._skipped = []

    def joined(self, request: Request) -> None:
        self.running[request.adapter_id] += 1

    def num_bytes(self, chunks: Iterable[Request], decodes: list[Request]) -> int:
        """Number of bytes of the adapters of these rows, each adapter counted once."""
        if not self.running:
            return 0
        if decodes is not self._decodes:
            self._decodes = decodes
            self._of_decodes = frozenset([request.adapter_id for request in decodes])
        used = self._of_decodes.union([request.adapter_id for request in chunks])
        return sum([self.sizes.get(adapter, 0) for adapter in used])

    def key(self, request: Request) -> bytes:
        return adapter_key(request.adapter_id, self.digests.get(request.adapter_id, ""))

    def outlives(self, request: Request) -> bool:
        return request.adapter_id in self.digests and request.adapter_id not in self.changing

    def left(self, request: Request) -> None:
        self.running[request.adapter_id] -= 1
        if not self.running[request.adapter_id]:
            del self.running[request.adapter_id]
        # so that no request is kept that has left
        self._decodes = []
        self._of_decodes = frozenset()

    def ended(self, request: Request) -> None:
        self._passes.pop(request.request_id, None)

    def check_invariants(self) -> None:
        running = [request.adapter_id for request in self._batch.running.values() if request.adapter_id]
        if self.running != Counter(running):
            raise InvariantError(f"{self.running} are not the adapters of the running requests")
        if self.most and len(self.running) > self.most:
            raise InvariantError(f"{len(self.running)} adapters are in the steps, and {self.most} may be")
        most = self._batch.waiting.max_times_passed
        if any(self._passes.get(request.request_id, 0) > most for request in self._batch.waiting):
            raise InvariantError("a request was passed for its adapter more often than anybody may be")
        if self._passes.keys() - self._batch.requests.keys():
            raise InvariantError("a request has left, and its passes are still counted")
