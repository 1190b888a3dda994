"""Which adapter is in which slot of a pool on a device, and when a slot's memory may be overwritten and read.

Steps are queued on one stream, and adapters are copied on a second one, while steps are computed. Events order them: a
slot is overwritten only after the last step that reads it, and a step starts only after the copies of its adapters.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch

from chairlift.errors import InvariantError
from chairlift.kernels.low_rank_pool import LowRankPool, PackedSlot

__all__ = ["CudaQueues", "PoolSlots", "Queue", "Queues"]


class Queue(Protocol):
    """A stream of a device: it computes in order what is queued."""

    def record_event(self) -> Any:
        """An event that happens when everything queued so far is done."""
        ...

    def wait_event(self, event: Any) -> None:
        """Begin nothing that is queued from now on before the event has happened."""
        ...


class Queues(Protocol):
    """The two streams of a device."""

    @property
    def steps(self) -> Queue:
        """The stream on which steps are queued."""
        ...

    @property
    def copies(self) -> Queue:
        """The stream on which adapters are copied."""
        ...

    def copy(self, slot: int, adapter: PackedSlot) -> None:
        """Queue the copy of an adapter into a slot on :attr:`copies`."""
        ...


class _Now:
    """Stream of a device without streams, which computes at once."""

    def record_event(self) -> None:
        """There is nothing to wait for."""

    def wait_event(self, event: None) -> None:
        """Everything earlier is done."""


class CudaQueues:
    """The streams of a pool's device; on the CPU, copies are done at once."""

    def __init__(self, pool: LowRankPool) -> None:
        self._pool = pool
        self._device = pool.numbers.device
        on_gpu = self._device.type == "cuda"
        self._stream: Any = torch.cuda.Stream(self._device) if on_gpu else None  # type: ignore[no-untyped-call]

    @property
    def steps(self) -> Queue:
        return _Now() if self._stream is None else torch.cuda.current_stream(self._device)

    @property
    def copies(self) -> Queue:
        return _Now() if self._stream is None else self._stream

    def copy(self, slot: int, adapter: PackedSlot) -> None:
        with contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            self._pool.copy(slot, adapter)


class PoolSlots:
    """The ``num_slots`` slots of a pool. ``source`` returns an adapter by its number."""

    def __init__(self, num_slots: int, queues: Queues, source: Callable[[int], PackedSlot]) -> None:
        self._queues = queues
        self._source = source
        self._held: dict[int, int] = {}
        """Number of an adapter -> its slot, the longest unused first."""
        self._free = list(range(num_slots - 1, -1, -1))
        self._open = set(range(num_slots))
        """Slots that steps may read, or write before, which are not followed by an event yet."""
        self._read: dict[int, Any] = {}
        """Slot -> event after the last step that reads it."""
        self._written: dict[int, Any] = {}
        """Slot -> event after its copy, for which steps have not waited yet."""
        self._copied: dict[int, PackedSlot] = {}
        """Slot -> its adapter in host memory, which lives at least as long as the copy."""

    def place(self, adapter_ids: Iterable[int]) -> Mapping[int, int]:
        """Slots of the adapters of a step, which is queued after this call and before :meth:`queued`.

        Adapters without a slot are copied, in place of those that were not used for the longest time. Raises
        InvariantError if a step has more adapters than there are slots.
        """
        wanted = list(dict.fromkeys(adapter_ids))
        if len(wanted) > len(self._held) + len(self._free):
            total = len(self._held) + len(self._free)
            raise InvariantError(f"a step has {len(wanted)} adapters, and the pool has {total} slots (max_loras)")
        for adapter_id in wanted:
            if adapter_id in self._held:
                self._held[adapter_id] = self._held.pop(adapter_id)
        for adapter_id in wanted:
            if adapter_id not in self._held:
                if not self._free:
                    self.drop(next(iter(self._held)))  # the step's own are the newest
                self.load(adapter_id)
        slots = {adapter_id: self._held[adapter_id] for adapter_id in wanted}
        for slot in slots.values():
            if slot in self._written:
                self._queues.steps.wait_event(self._written.pop(slot))
        self._open.update(slots.values())
        return slots

    def queued(self) -> None:
        """Note that the steps whose adapters were placed are queued."""
        if self._open:
            event = self._queues.steps.record_event()
            self._read |= dict.fromkeys(self._open, event)
            self._open.clear()

    def load(self, adapter_id: int) -> None:
        """Begin to copy an adapter into a free slot, if there is one, and if it has none."""
        if adapter_id in self._held or not self._free:
            return
        slot = self._free.pop()
        try:
            adapter = self._source(adapter_id)
        except Exception:
            self._free.append(slot)
            raise
        if slot in self._open:
            self.queued()
        if slot in self._read:
            self._queues.copies.wait_event(self._read.pop(slot))
        self._queues.copy(slot, adapter)
        self._written[slot] = self._queues.copies.record_event()
        self._held[adapter_id], self._copied[slot] = slot, adapter

    def drop(self, adapter_id: int) -> None:
        """Free the slot of an adapter, if it has one."""
        slot = self._held.pop(adapter_id, None)
        if slot is not None:
            self._free.append(slot)
            self._free.sort(reverse=True)

    def check_invariants(self) -> None:
        """Raise InvariantError if a slot is lost, or in use twice."""
        total = sorted(itertools.chain(self._held.values(), self._free))
        if total != list(range(len(total))):
            raise InvariantError(f"the slots {total} are not each in use once")
