"""The engine's part in moves of running requests from one engine (the source) to another (the destination).

The server gives orders for one sequence at a time, and the engine reports when it has followed them:

- ``write``: the source writes the full blocks of the sequence now, past the write rate, and goes on to do so while it
  decodes. It reports each time that more leading tokens are in the files.
- ``fetch``: the destination reads those blocks into its prefix cache, as unused blocks. Every block is verified.
- ``pause``: the source computes the sequence no further. It keeps its row and its blocks.
- ``resume``: the source goes on.

The sequence itself comes to the destination as any request whose answer has begun. (Llumnix moves requests in similar
stages; it copies blocks from memory to memory.)
"""

from __future__ import annotations

import dataclasses
from typing import Any, Final

from chairlift.core.kv_cache.prefix_node import PrefixNode
from chairlift.core.request import Request
from chairlift.core.scheduler.batch import Batch
from chairlift.core.scheduler.scheduler import Scheduler
from chairlift.engine.clock import POLL_SECONDS
from chairlift.engine.core_outputs import MoveReport
from chairlift.engine.input_processor import PreparedRequest
from chairlift.engine.kv_blocks import BlockWait, KVBlocks
from chairlift.engine.kv_store.store import KVStore, Lookup

__all__ = ["KVMoves", "MoveOrder"]

_STEP_BYTES: Final = 8 << 20
"""Number of bytes that are copied for writing between two steps, so that no step waits long for it."""


@dataclasses.dataclass(frozen=True, slots=True)
class MoveOrder:
    """What an engine is to do for the move of a sequence."""

    sequence_id: str
    stage: str
    """``write``, ``fetch``, ``pause`` or ``resume``."""
    request: PreparedRequest | None = None
    """For ``fetch``: the request with the tokens that are known so far."""
    places: list[tuple[int, int, int, int]] = dataclasses.field(default_factory=list)
    """For ``fetch``: those of the source's report."""
    generation: int = 0
    """Number of the attempt, which comes back in the report."""


@dataclasses.dataclass(slots=True)
class _Leaving:
    """A sequence of a source."""

    request: Request
    nodes: list[PrefixNode] = dataclasses.field(default_factory=list)
    """The nodes of its published blocks."""
    last: PrefixNode | None = None
    num_put: int = 0
    """Number of leading nodes whose blocks are written or on their way."""
    seen: tuple[int, int] = (-1, -1)
    """(number of nodes, number of bytes written) when the files were last looked at."""
    num_reported: int = -1


@dataclasses.dataclass(slots=True)
class _Coming:
    """A sequence of a destination."""

    order: MoveOrder
    request: Request
    lookup: Lookup
    load: BlockWait | None = None


class KVMoves:
    """Follows the orders for moves. A :class:`~chairlift.engine.preparers.Preparer`: a paused request waits for the
    order to go on."""

    def __init__(self, blocks: KVBlocks | None = None, scheduler: Scheduler | None = None) -> None:
        self._blocks = blocks
        self._scheduler = scheduler
        self._leaving: dict[str, _Leaving] = {}
        self._coming: dict[str, _Coming] = {}
        self._paused: dict[str, Request] = {}
        self._resumed: list[Request] = []
        self._reports: list[MoveReport] = []

    def follow(self, order: MoveOrder) -> None:
        """Begin to follow an order. For ``pause``, no step may be in flight."""
        if order.stage == "write":
            self._begin_to_write(order)
        elif order.stage == "fetch":
            self._begin_to_fetch(order)
        elif order.stage == "pause":
            self._pause(order)
        elif (request := self._paused.pop(order.sequence_id, None)) is not None:
            self._resumed.append(request)

    def take_reports(self) -> list[MoveReport]:
        """Reports since the last call."""
        reports = self._reports
        self._reports = []
        return reports

    def _failed(self, name: str, stage: str, why: str, generation: int = 0) -> None:
        self._reports.append(MoveReport(name, stage, generation=generation, failure=why))

    @property
    def _batch(self) -> Batch | None:
        return None if self._scheduler is None else self._scheduler.batch

    @property
    def _store(self) -> KVStore | None:
        return None if self._blocks is None else self._blocks.store

    def before_step(self) -> None:
        """Go on with all orders. Called between two steps."""
        if not (self._leaving or self._coming):
            return
        room = _STEP_BYTES
        for each in list(self._leaving.values()):
            room = self._write(each, room)
        for coming in list(self._coming.values()):
            self._fetch(coming)

    # -- the source ----------------------------------------------------------------------------------------------------

    def _begin_to_write(self, order: MoveOrder) -> None:
        request = None if self._scheduler is None else self._scheduler.requests.get(order.sequence_id)
        cache = None if self._batch is None else self._batch.kv.prefix_cache
        if request is None:  # it has ended
            return
        store = self._store
        if store is None or store.stopped:
            self._failed(order.sequence_id, "write", f"nothing is written: {store.stopped if store else 'no store'}")
        elif cache is None or not request.may_share or not cache.outlives(request):
            self._failed(order.sequence_id, "write", "its KV is not stored")
        else:
            self._leaving[order.sequence_id] = _Leaving(request)

    def _write(self, each: _Leaving, room: int) -> int:
        """Hand the blocks of a request over for writing, at most ``room`` bytes. Returns the bytes that remain."""
        store, batch = self._store, self._batch
        if store is None or batch is None or self._blocks is None:
            return room
        request = each.request
        if request.last_node is not each.last:
            each.last = request.last_node
            each.nodes = _path(each.last)
            each.num_put = min(each.num_put, len(each.nodes))
        while each.num_put < len(each.nodes) and room > 0:
            node = each.nodes[each.num_put]
            accepted = [self._blocks.put_now(group, node) for group in range(len(node.blocks))]
            room -= sum(filter(None, accepted))
            if None in accepted:
                break
            each.num_put += 1
        state = each.num_put, store.num_written
        if state == each.seen:
            return room
        each.seen = state
        self._report_written(store, batch, each)
        if store.stopped:
            del self._leaving[request.request_id]
            self._failed(request.request_id, "write", store.stopped)
        return room

    def _report_written(self, store: KVStore, batch: Batch, each: _Leaving) -> None:
        """Report the tokens whose blocks the files have."""
        nodes, layout = each.nodes, batch.kv.layout

        def has(group: int, index: int) -> bool:
            return store.find(group, nodes[index].key) is not None

        num_blocks = layout.agreed(each.num_put, has)
        num_tokens = num_blocks * batch.kv.block_size
        if num_tokens <= each.num_reported:
            return
        each.num_reported = num_tokens
        places = []
        for group in range(len(batch.kv.pools)):
            for index in layout.in_reach(group, num_blocks):
                stored = store.find(group, nodes[index].key)
                if stored is not None:
                    places.append((index, stored.writer, group, stored.record.slot))
        self._reports.append(MoveReport(each.request.request_id, "write", num_tokens, sorted(places)))

    def _pause(self, order: MoveOrder) -> None:
        scheduler = self._scheduler
        request = None if scheduler is None else scheduler.requests.get(order.sequence_id)
        if scheduler is None or request is None or request.finish_reason is not None:  # its end is on the way
            return
        if request.slot >= 0:
            scheduler.unready(request)
        elif request in scheduler.batch.waiting:
            scheduler.batch.hold_back(request)
        if request.is_ready:
            self._failed(order.sequence_id, "pause", "it waits for another request", order.generation)
            return
        self._paused[order.sequence_id] = request
        self._reports.append(MoveReport(order.sequence_id, "pause", generation=order.generation))

    # -- the destination -----------------------------------------------------------------------------------------------

    def _begin_to_fetch(self, order: MoveOrder) -> None:
        store, batch = self._store, self._batch
        cache = None if batch is None else batch.kv.prefix_cache
        if store is None or batch is None or cache is None or order.request is None:
            self._failed(order.sequence_id, "fetch", "the destination has no store")
            return
        self._give_up(order.sequence_id)
        (request,) = order.request.make_sequences()
        request.kinds = tuple([kind for kind in batch.kinds if kind.has(request)])
        keys = list(cache.keys(request, 1 + max((index for index, *_ in order.places), default=-1)))
        unknown = [
            (writer, group, slot)
            for index, writer, group, slot in order.places
            if store.find(group, keys[index]) is None
        ]
        self._coming[order.sequence_id] = _Coming(order, request, store.look_up(unknown))

    def _give_up(self, name: str) -> None:
        """Forget an earlier order to fetch the blocks of a sequence."""
        earlier = self._coming.pop(name, None)
        if earlier is not None and earlier.load is not None and self._store is not None:
            self._store.loaded(earlier.load.load)

    def _fetch(self, each: _Coming) -> None:
        store = self._store
        if store is None or self._blocks is None:
            return
        if each.load is not None:
            if not each.load.load.is_done:
                return
            self._blocks.restore(each.load)
        elif each.lookup.is_done:
            store.poll()
            each.load = self._blocks.fetch(each.request)
            if each.load is not None:
                return
        else:
            return
        name = each.order.sequence_id
        del self._coming[name]
        self._reports.append(MoveReport(name, "fetch", self._blocks.num_present(each.request)))

    # -- the preparer --------------------------------------------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        return bool(self._resumed)

    def take_ready(self) -> tuple[list[Request], list[tuple[Request, str]]]:
        """Requests that go on. None fails."""
        ready = [request for request in self._resumed if not request.is_finished]
        self._resumed = []
        return ready, []

    def waits(self, request: Request) -> bool:
        return self._paused.get(request.request_id) is request

    def next_event(self, now: float) -> float | None:
        """Time at which blocks for a coming request may have arrived; None if none comes."""
        return now + POLL_SECONDS if self._coming or self._reports else None

    def forget(self, request: Request) -> None:
        for known in (self._leaving, self._paused):
            known.pop(request.request_id, None)

    def weights_changed(self) -> None:
        """End all orders that are about blocks, because the blocks of the old weights are not used any more."""
        for name in self._leaving:
            self._failed(name, "write", "the weights were replaced")
        self._leaving.clear()
        for name in list(self._coming):
            self._give_up(name)
            self._failed(name, "fetch", "the weights were replaced")

    def counts(self) -> dict[str, Any]:
        return {}

    def shutdown(self) -> None:
        self._leaving.clear()
        self._coming.clear()
        self._paused.clear()


def _path(last: PrefixNode | None) -> list[PrefixNode]:
    """The nodes from the first block to ``last``."""
    path: list[PrefixNode] = []
    while last is not None and last.parent is not None:
        path.append(last)
        last = last.parent
    return path[::-1]
