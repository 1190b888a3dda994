"""Adapters of a model that several processes share: each process has the matrices of its own outputs."""

from __future__ import annotations

import itertools
import weakref
from pathlib import Path

from chairlift.errors import ModelLoadError
from chairlift.executor.parallel.messages import Messages
from chairlift.executor.parallel.orders import Orders
from chairlift.lora.bank import NativeAdapters
from chairlift.lora.held import Held

__all__ = ["HeldByAll", "ParallelAdapters"]


class HeldByAll:
    """An adapter that every process has read."""

    def __init__(self, own: Held, key: int, nbytes: int) -> None:
        self.own = own
        """The part of process 0."""
        self.key = key
        """Number by which the other processes know their parts."""
        self.digest = own.digest
        """Digest of the adapter's files."""
        self.nbytes = nbytes
        """Bytes of the matrices of all processes."""
        self.left: weakref.finalize[[int], HeldByAll] | None = None
        """Has the other processes forget their parts when this object is gone."""


class ParallelAdapters:
    """An :class:`~chairlift.executor.executor.AdapterMemory` of process 0, whose own part is ``own``. Each process
    reads the adapter's files. So they must have the same files, and these must not change between."""

    def __init__(self, own: NativeAdapters, messages: Messages, orders: Orders) -> None:
        self._own = own
        self._messages = messages
        self._orders = orders
        self._keys = itertools.count()
        self._unused: list[int] = []
        """Keys of adapters that were read and then not put into memory. The other processes forget them with the next
        order."""

    def read(self, path: Path, root: Path | None) -> HeldByAll:
        """Have every process read the adapter. Any thread may call this. Raises ModelLoadError, and EngineDeadError if
        a process ended."""
        own = self._own.read(path, root)
        key = next(self._keys)
        forget = self._unused[:]
        del self._unused[: len(forget)]
        order = {"do": "adapter", "key": key, "path": str(path.absolute() if path.exists() else path)}
        try:
            answers = self._orders.give(order | {"root": None if root is None else str(root), "forget": forget})
        except ModelLoadError:
            self._unused.append(key)
            raise
        if any(each["digest"] != own.digest for each in answers):
            self._unused.append(key)
            raise ModelLoadError(f"{path}: the files changed while the processes of the model read them; load it again")
        held = HeldByAll(own, key, own.nbytes + sum(each["nbytes"] for each in answers))
        held.left = weakref.finalize(held, self._unused.append, key)
        held.left.atexit = False
        return held

    def put(self, adapter_id: int, adapter: HeldByAll) -> None:
        """Add an adapter under the number ``adapter_id``, in every process."""
        if adapter.left is not None:  # orders overtake messages, so this part would be forgotten before it is put
            adapter.left.detach()
        self._messages.send_adapter(adapter_id, adapter.key)
        self._own.put(adapter_id, adapter.own)

    def drop(self, adapter_id: int) -> None:
        """Remove the adapter with this number, in every process."""
        self._messages.send_drop(adapter_id)
        self._own.drop(adapter_id)

    def weights_replaced(self) -> None:
        """Compute again what depends on the model's weights, in this process. The others do so themselves."""
        self._own.weights_replaced()
