"""What prepares parts of requests beside the loop: a grammar, an adapter, images. The loop asks only
:class:`Preparers`, which asks each preparer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from chairlift.config import CacheConfig
from chairlift.core.request import Request
from chairlift.core.rows.images import ImageRows
from chairlift.core.rows.kind import RowKind
from chairlift.core.scheduler.costs import Costs
from chairlift.core.scheduler.scheduler import Scheduler
from chairlift.engine.adapters import Adapters
from chairlift.engine.clock import Clock
from chairlift.engine.grammars import Grammars
from chairlift.engine.image_turns import ImageTurns
from chairlift.engine.images import Images
from chairlift.engine.input_processor import PreparedRequest
from chairlift.engine.kv_blocks import KVBlocks, StoreSource
from chairlift.engine.kv_moves import KVMoves
from chairlift.engine.kv_store.pauses import KVPauses
from chairlift.executor.executor import Executor

__all__ = ["Preparer", "Preparers"]


class Preparer(Protocol):
    """Prepares one part of each request that has it. The request waits until all its parts are ready. Requests without
    the part are unknown to it."""

    @property
    def is_busy(self) -> bool:
        """Whether :meth:`take_ready` must be called although no request may wait."""
        ...

    def take_ready(self) -> tuple[list[Request], list[tuple[Request, str]]]:
        """(requests whose part has become ready since the last call, (request, reason) of those whose part failed)."""
        ...

    def waits(self, request: Request) -> bool:
        """Whether the request waits for its part."""
        ...

    def next_event(self, now: float) -> float | None:
        """Time at which the loop should make a step for the preparer alone; None if it need not."""
        ...

    def forget(self, request: Request) -> None:
        """Note that a request has ended."""
        ...

    def counts(self) -> dict[str, Any]:
        """Fields of :class:`~chairlift.metrics.stats.EngineStats`."""
        ...

    def shutdown(self) -> None:
        """Drop all requests, and end the threads."""
        ...


class Preparers:
    """The preparers of an engine. None: requests with this part are refused."""

    def __init__(
        self,
        grammars: Grammars | None = None,
        adapters: Adapters | None = None,
        kv_store: StoreSource | None = None,
    ) -> None:
        self.grammars = Grammars(None) if grammars is None else grammars
        self.adapters = adapters or Adapters()
        self.images = Images()
        self.image_rows = ImageRows()
        """What the scheduler must know of requests with images."""
        self._image_turns: ImageTurns | None = None
        self._kv_store = kv_store
        self.kv_blocks = KVBlocks()
        self.kv_moves = KVMoves()
        self.kv_pauses = KVPauses()

    def attach(self, executor: Executor, scheduler: Scheduler, costs: Costs, clock: Clock, cache: CacheConfig) -> None:
        """Prepare the requests of this scheduler and this executor. Call this once, before the first request."""
        known = scheduler.batch.num_known
        seconds = costs.recompute_seconds
        memory = getattr(executor, "images", None)
        self.images = Images(memory, clock, limit=cache.image_memory_bytes, num_known=known, compute_seconds=seconds)
        self._image_turns = ImageTurns(scheduler.batch, self.image_rows, costs, clock)
        blocks = getattr(executor, "blocks", None)
        if self._kv_store is not None and blocks is not None:
            self.kv_blocks = KVBlocks(self._kv_store, scheduler.batch, blocks, executor.block_bytes, clock, seconds)
        self.kv_moves = KVMoves(self.kv_blocks, scheduler)
        self.kv_pauses = KVPauses(self.kv_blocks, scheduler.kv, clock)

    @property
    def all(self) -> Sequence[Preparer]:
        """The preparers, in the order in which they are asked."""
        return self.grammars, self.adapters, self.images, self.kv_blocks, self.kv_moves, self.kv_pauses

    def kinds(self, executor: Executor) -> Sequence[RowKind]:
        """What the scheduler must know of the requests with a part that this engine can prepare."""
        kinds: list[RowKind] = []
        if self.adapters.rows is not None:
            kinds.append(self.adapters.rows)
        if getattr(executor, "images", None) is not None:
            kinds.append(self.image_rows)
        return kinds

    @property
    def is_busy(self) -> bool:
        """Whether a preparer may have results although no request waits."""
        return self.grammars.is_busy or self.adapters.is_busy or self.images.is_busy or self.kv_moves.is_busy

    def add(self, request: PreparedRequest, sequences: Sequence[Request]) -> None:
        """Prepare the parts of a new request. Sequences that must wait are marked as not ready. Raises RequestError;
        the caller then forgets the sequences."""
        setting = request.params.structured_outputs
        if request.adapter_id:
            self.adapters.add(sequences, request.adapter_id)
        if request.image_spans:
            self.images.add(sequences, request.image_tiles)
        if setting is not None:
            self.grammars.add(sequences, setting.value)
        elif request.params.thinking is not None:
            self.grammars.limit(sequences, request.params.thinking)

    def queued(self, requests: Sequence[Request]) -> None:
        """Look at requests whose parts are ready, and that are in the queue: a request may have to wait once more."""
        self.kv_blocks.look_at(requests)

    def requests_ended(self) -> None:
        """Keep what ended requests have computed, even if no step follows."""
        self.kv_blocks.store_blocks()

    def weights_changed(self) -> None:
        """Note that the model has other weights from now on."""
        self.kv_moves.weights_changed()
        self.kv_pauses.weights_changed()
        self.kv_blocks.weights_changed()

    def before_step(self) -> None:
        """Do the work that needs the engine's thread between two steps."""
        self.kv_blocks.store_blocks()
        self.kv_moves.before_step()
        self.kv_pauses.before_step()
        if self.images.is_used and self._image_turns is not None:
            self._image_turns.begin(self.images)

    def take_ready(self) -> Iterator[tuple[list[Request], list[tuple[Request, str]]]]:
        """For each preparer: (requests whose parts are now all ready, (request, reason) of those whose part failed).
        The caller ends failed requests before it asks for the next pair."""
        for preparer in self.all:
            ready, failed = preparer.take_ready()
            yield [each for each in ready if not any(other.waits(each) for other in self.all)], failed

    def next_event(self, now: float) -> float | None:
        """Time at which the loop should make a step for the preparers alone; None if it need not."""
        times = [each.next_event(now) for each in self.all]
        return min((time for time in times if time is not None), default=None)

    def forget(self, request: Request) -> None:
        """Note that a request has ended, or was not added."""
        for preparer in self.all:
            preparer.forget(request)

    def since_step(self) -> tuple[int, int, int, int]:
        """Work between steps since the last call, for the step's record."""
        return self.images.since_step()

    def counts(self) -> dict[str, Any]:
        """Fields of :class:`~chairlift.metrics.stats.EngineStats`."""
        return {name: value for each in self.all for name, value in each.counts().items()}

    def shutdown(self) -> None:
        """Drop all requests, and end the threads."""
        for preparer in self.all:
            preparer.shutdown()
