"""Plans which sequences share a pack, from their lengths alone. Uses the standard library only.

Packing sequences is bin packing (Johnson, 1973). The lengths are small integers, and many are equal, as in packing by
histogram (Krell et al., 2021). The packer holds a limited number of pending sequences, and fills one pack at a time as
completely as these sequences allow (minimum bin slack; Gupta and Ho, 1999). It looks only for one or two sequences that
fill the remaining room exactly. Bit operations on sets of lengths find them without a loop.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from typing import Literal

from chairlift.errors import ConfigError

__all__ = ["LookaheadPacker", "lower_bound", "pack_indices"]

_Opens = Literal["oldest", "longest"]
_OFFLINE: tuple[tuple[int, _Opens], ...] = ((2**63, "longest"), (256, "oldest"), (1024, "oldest"))
"""Arguments (pool, opens) of :class:`LookaheadPacker` that are tried one after another when the whole data set is
known."""


class _Shelf:
    """Pending sequences that may share a pack: one queue per size, and two bitsets of the sizes of these sequences."""

    __slots__ = ("capacity", "have", "mirror", "queues", "spare")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.queues: dict[int, deque[int]] = {}  # size -> serial numbers, oldest first; empty queues are removed
        self.spare: list[deque[int]] = []
        self.have = 0  # bit x: a sequence of size x is pending
        self.mirror = 0  # bit capacity - x: a sequence of size x is pending

    def add(self, size: int, serial: int) -> None:
        queue = self.queues.get(size)
        if queue is None:
            queue = self.queues[size] = self.spare.pop() if self.spare else deque()
            self.have ^= 1 << size
            self.mirror ^= 1 << (self.capacity - size)
        queue.append(serial)

    def take(self, size: int) -> int:
        """Remove the oldest sequence of this size, and return its serial number."""
        queue = self.queues[size]
        serial = queue.popleft()
        if not queue:
            self.spare.append(self.queues.pop(size))
            self.have ^= 1 << size
            self.mirror ^= 1 << (self.capacity - size)
        return serial

    def complete(self, room: int, max_sequences: int, pack: list[int]) -> None:
        """Add at most ``max_sequences`` sequences to ``pack``, in the remaining ``room``.

        One or two sequences that fill the room exactly are preferred. Otherwise the largest sequence that fits is
        added, and the search is repeated.
        """
        while room and max_sequences:
            if room in self.queues:
                pack.append(self.take(room))
                return
            if max_sequences > 1:
                # Bit a is set if sizes a and room - a are both pending. The largest a is room / 2 only if no other pair
                # exists; then two sequences of this size are needed.
                pairs = self.have & (self.mirror >> (self.capacity - room))
                size = pairs.bit_length() - 1
                if size > 0 and (size + size != room or len(self.queues[size]) > 1):
                    pack.append(self.take(size))
                    pack.append(self.take(room - size))
                    return
            size = (self.have & ((2 << room) - 1)).bit_length() - 1
            if size < 0:
                return
            pack.append(self.take(size))
            room -= size
            max_sequences -= 1


class LookaheadPacker:
    """Packs sequences as they arrive, with at most ``pool`` pending sequences.

    Each pack begins with the oldest pending sequence, so no sequence waits for more than ``pool`` packs. Sequences with
    different keys never share a pack; the oldest sequence determines the key of the pack. The packs depend only on the
    order of the calls. A call costs O(capacity / 64) machine words for each sequence of the pack, and needs no loop
    over the pending sequences.
    """

    def __init__(
        self,
        capacity: int,
        pool: int = 256,
        *,
        align: int = 1,
        max_sequences: int | None = None,
        opens: _Opens = "oldest",
    ) -> None:
        """Create a packer.

        ``capacity`` is in tokens. Each length is rounded up to a multiple of ``align`` tokens. ``opens`` selects the
        first sequence of a pack: ``oldest``, or ``longest`` (among the sequences with the key of the oldest), which
        does not limit the delay and is meant for a complete data set. Raises ConfigError for numbers below 1, and for a
        capacity that is not a multiple of ``align``.
        """
        # also of NumPy
        capacity = operator.index(capacity)
        pool = operator.index(pool)
        align = operator.index(align)
        smallest = min(capacity, pool, align, 1 if max_sequences is None else max_sequences)
        if smallest < 1 or capacity % align:
            raise ConfigError(
                f"capacity, pool, align and max_sequences must be at least 1, and capacity a multiple of align; got "
                f"capacity {capacity}, pool {pool}, align {align}, max_sequences {max_sequences}"
            )
        self.capacity = capacity
        self.pool = pool
        self.align = align
        self._room = capacity // align
        self._max_sequences = self._room if max_sequences is None else max_sequences
        self._opens = opens
        self._shelves: dict[Hashable, _Shelf] = {}
        self._arrivals: deque[tuple[int, int, Hashable]] = deque()  # (serial, size, key); may contain packed sequences
        self._count = 0

    def __len__(self) -> int:
        """Number of pending sequences."""
        return self._count

    @property
    def full(self) -> bool:
        """Whether ``pool`` sequences are pending, so that :meth:`next_pack` must be called before :meth:`add`."""
        return self._count >= self.pool

    def add(self, serial: int, length: int, key: Hashable = None) -> None:
        """Add a pending sequence of ``length`` tokens. ``serial`` must be larger than all earlier serial numbers.

        Raises ConfigError for a length of 0, and for a length above the capacity.
        """
        size = length if self.align == 1 else -(-length // self.align)
        if not 1 <= size <= self._room:
            raise ConfigError(
                f"sequence {serial} has {length} tokens, but a pack has room for 1 to {self.capacity}; "
                "drop or cut the sequence, or raise the capacity"
            )
        shelf = self._shelves.get(key)
        if shelf is None:
            shelf = self._shelves[key] = _Shelf(self._room)
        shelf.add(size, serial)
        self._arrivals.append((serial, size, key))
        self._count += 1

    def next_pack(self) -> list[int]:
        """Serial numbers of the sequences of the next pack, in order. Raises ConfigError when no sequence is
        pending."""
        if not self._count:
            raise ConfigError("no sequence is pending; add one first")
        arrivals = self._arrivals
        while True:
            serial, size, key = arrivals[0]
            shelf = self._shelves.get(key)
            # Queues are in order of arrival. So the sequence is still pending if the first sequence of its queue is not
            # newer.
            if shelf is not None and size in shelf.queues and shelf.queues[size][0] <= serial:
                break
            arrivals.popleft()
        if self._opens == "longest":
            size = shelf.have.bit_length() - 1
        pack = [shelf.take(size)]
        shelf.complete(self._room - size, self._max_sequences - 1, pack)
        self._count -= len(pack)
        if not shelf.queues:
            del self._shelves[key]
        if not self._count:
            arrivals.clear()
        return pack

    def pending(self) -> list[int]:
        """Serial numbers of the pending sequences, oldest first. Adding these sequences in this order to a new packer
        restores the state of this packer."""
        return sorted(serial for shelf in self._shelves.values() for queue in shelf.queues.values() for serial in queue)


def pack_indices(
    lengths: Iterable[int], capacity: int, *, pool: int | None = None, align: int = 1, max_sequences: int | None = None
) -> list[list[int]]:
    """Plan packs of at most ``capacity`` tokens. Returns a list of indices into ``lengths`` for each pack.

    With a ``pool``, the packs are those of :class:`LookaheadPacker`. Without a pool, several methods are tried on the
    whole data set, and the result with the fewest packs is returned. One of the methods is best-fit decreasing, which
    needs at most 11/9 of the optimal number of packs plus one (Johnson, 1973). The result depends on the arguments
    only. Raises ConfigError for numbers below 1, and for lengths that are not whole numbers from 1 to ``capacity``.
    """
    try:
        lengths = [operator.index(length) for length in lengths]
        capacity = operator.index(capacity)
    except TypeError as error:
        raise ConfigError(f"lengths and capacity must be whole numbers of tokens: {error}") from None
    if pool is not None:
        return _in_order(lengths, LookaheadPacker(capacity, pool, align=align, max_sequences=max_sequences))
    best: list[list[int]] | None = None
    for size, opens in _OFFLINE:
        packer = LookaheadPacker(capacity, size, align=align, max_sequences=max_sequences, opens=opens)
        packs = _in_order(lengths, packer)
        if best is None or len(packs) < len(best):
            best = packs
        if len(best) == lower_bound(lengths, capacity, align=align):
            return best
    packs = _best_fit_decreasing(lengths, capacity, align, max_sequences or capacity)
    return min(best or packs, packs, key=len)


def lower_bound(lengths: Sequence[int], capacity: int, *, align: int = 1) -> int:
    """Lower bound of the number of packs: by the sum of the lengths, and by the number of sequences that are longer
    than half of a pack."""
    sizes = [-(-operator.index(length) // align) for length in lengths]
    room = operator.index(capacity) // align
    return max(-(-sum(sizes) // room), sum(size + size > room for size in sizes))


def _in_order(lengths: Sequence[int], packer: LookaheadPacker) -> list[list[int]]:
    packs: list[list[int]] = []
    for serial, length in enumerate(lengths):
        packer.add(serial, length)
        if packer.full:
            packs.append(packer.next_pack())
    while packer:
        packs.append(packer.next_pack())
    return packs


def _best_fit_decreasing(lengths: Sequence[int], capacity: int, align: int, max_sequences: int) -> list[list[int]]:
    """Pack sequences longest first, each into the fullest pack that has room."""
    sizes = [-(-length // align) for length in lengths]
    packs: list[list[int]] = []
    by_room: dict[int, list[int]] = {}
    rooms = 0  # bit r: some pack has room for r more tokens
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        size = sizes[index]
        fits = rooms >> size
        if fits:
            room = size + (fits & -fits).bit_length() - 1
            pack = by_room[room].pop()
            if not by_room[room]:
                rooms ^= 1 << room
        else:
            room = capacity // align
            pack = len(packs)
            packs.append([])
        packs[pack].append(index)
        remaining = room - size
        if remaining and len(packs[pack]) < max_sequences:
            waiting = by_room.setdefault(remaining, [])
            if not waiting:
                rooms ^= 1 << remaining
            waiting.append(pack)
    return packs
