"""Plans which sequences share a pack: bounded lookahead with exact completion, and its offline version.

Standard library only, and about lengths only. Packing is bin packing (Johnson, 1973). Lengths are small integers, many
of them equal, as in packing by histogram (Krell et al., 2021). One pack at a time is filled as well as the pending
sequences allow, which is the minimum bin slack idea (Gupta and Ho, 1999), reduced to one exact sequence or one exact
pair. Bit operations on whole sets of lengths find these without a loop.
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
"""(pool, opening rule) pairs that are tried when the whole data set is known."""


class _Shelf:
    """Pending sequences that may share a pack: one queue per size, and the present sizes as two bitsets."""

    __slots__ = ("capacity", "have", "mirror", "queues", "spare")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.queues: dict[int, deque[int]] = {}  # size -> serials, oldest first; never an empty queue
        self.spare: list[deque[int]] = []
        self.have = 0  # bit x: a sequence of size x is pending
        self.mirror = 0  # bit capacity - x, likewise

    def add(self, size: int, serial: int) -> None:
        queue = self.queues.get(size)
        if queue is None:
            queue = self.queues[size] = self.spare.pop() if self.spare else deque()
            self.have ^= 1 << size
            self.mirror ^= 1 << (self.capacity - size)
        queue.append(serial)

    def take(self, size: int) -> int:
        """Take the oldest sequence of this size."""
        queue = self.queues[size]
        serial = queue.popleft()
        if not queue:
            self.spare.append(self.queues.pop(size))
            self.have ^= 1 << size
            self.mirror ^= 1 << (self.capacity - size)
        return serial

    def complete(self, room: int, most: int, taken: list[int]) -> None:
        """Fill ``room`` with at most ``most`` sequences: exactly one, exactly two, or else the largest that fits."""
        while room and most:
            if room in self.queues:
                taken.append(self.take(room))
                return
            if most > 1:
                # Bit a: sizes a and room - a are both pending. The largest a is room / 2 only if there is no other.
                pairs = self.have & (self.mirror >> (self.capacity - room))
                size = pairs.bit_length() - 1
                if size > 0 and (size + size != room or len(self.queues[size]) > 1):
                    taken.append(self.take(size))
                    taken.append(self.take(room - size))
                    return
            size = (self.have & ((2 << room) - 1)).bit_length() - 1
            if size < 0:
                return
            taken.append(self.take(size))
            room -= size
            most -= 1


class LookaheadPacker:
    """Packs sequences as they come, with at most ``pool`` of them pending.

    The oldest pending sequence opens each pack, so none waits for more than ``pool`` packs. Sequences with different
    keys never share a pack; the oldest decides the key. What a pack holds depends only on the order of the calls.
    A call costs O(capacity / 64) machine words per sequence taken and no loop over what is pending.
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
        """``capacity`` is in tokens, and every length counts as the next multiple of ``align`` tokens. ``opens`` says
        which pending sequence opens a pack; ``longest`` (of the oldest's key) bounds no delay and suits a whole data
        set. Raises ConfigError for numbers below 1 and a capacity that is no multiple of ``align``.
        """
        capacity, pool, align = operator.index(capacity), operator.index(pool), operator.index(align)  # also NumPy's
        least = min(capacity, pool, align, 1 if max_sequences is None else max_sequences)
        if least < 1 or capacity % align:
            raise ConfigError(
                f"capacity, pool, align and max_sequences must be at least 1, and capacity a multiple of align; got "
                f"capacity {capacity}, pool {pool}, align {align}, max_sequences {max_sequences}"
            )
        self.capacity, self.pool, self.align = capacity, pool, align
        self._room = capacity // align
        self._most = self._room if max_sequences is None else max_sequences
        self._opens = opens
        self._shelves: dict[Hashable, _Shelf] = {}
        self._arrivals: deque[tuple[int, int, Hashable]] = deque()  # (serial, size, key); some are packed already
        self._count = 0

    def __len__(self) -> int:
        """Number of pending sequences."""
        return self._count

    @property
    def full(self) -> bool:
        """Whether a pack is due before another sequence may come."""
        return self._count >= self.pool

    def add(self, serial: int, length: int, key: Hashable = None) -> None:
        """Make a sequence pending. ``serial`` names it, above every one before; ``length`` is in tokens.

        Raises ConfigError for a length that no pack takes.
        """
        size = length if self.align == 1 else -(-length // self.align)
        if not 1 <= size <= self._room:
            raise ConfigError(
                f"sequence {serial} has {length} tokens, but a pack takes 1 to {self.capacity}; "
                "drop or cut the sequence, or raise the capacity"
            )
        shelf = self._shelves.get(key)
        if shelf is None:
            shelf = self._shelves[key] = _Shelf(self._room)
        shelf.add(size, serial)
        self._arrivals.append((serial, size, key))
        self._count += 1

    def next_pack(self) -> list[int]:
        """The serials of one pack, in the order in which they should lie. Raises ConfigError when none is pending."""
        if not self._count:
            raise ConfigError("no sequence is pending; add one first")
        arrivals = self._arrivals
        while True:
            serial, size, key = arrivals[0]
            shelf = self._shelves.get(key)
            # Each queue is in order of arrival, so this one is still pending unless its queue has moved past it.
            if shelf is not None and size in shelf.queues and shelf.queues[size][0] <= serial:
                break
            arrivals.popleft()
        if self._opens == "longest":
            size = shelf.have.bit_length() - 1
        taken = [shelf.take(size)]
        shelf.complete(self._room - size, self._most - 1, taken)
        self._count -= len(taken)
        if not shelf.queues:
            del self._shelves[key]
        if not self._count:
            arrivals.clear()
        return taken

    def pending(self) -> list[int]:
        """Serials of pending sequences, oldest first. Adding them in this order to a new packer restores the state."""
        return sorted(serial for shelf in self._shelves.values() for queue in shelf.queues.values() for serial in queue)


def pack_indices(
    lengths: Iterable[int], capacity: int, *, pool: int | None = None, align: int = 1, max_sequences: int | None = None
) -> list[list[int]]:
    """Plan packs of at most ``capacity`` tokens: the positions in ``lengths`` that share one, for each pack.

    With a ``pool``, exactly what :class:`LookaheadPacker` makes of the sequences in order. Without, the whole data set
    is looked at: the best of lookahead, longest first with exact completion, and best-fit decreasing, which needs at
    most 11/9 of the optimal number of packs plus one (Johnson, 1973). The result depends on the arguments only. Raises
    ConfigError for numbers below 1 and a length outside 1 to ``capacity`` or that is no whole number.
    """
    try:
        lengths, capacity = [operator.index(length) for length in lengths], operator.index(capacity)
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
    """Fewest packs that any packer needs, by tokens and by sequences of which no two fit together."""
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


def _best_fit_decreasing(lengths: Sequence[int], capacity: int, align: int, most: int) -> list[list[int]]:
    """Pack sequences longest first, each into the fullest pack that has room."""
    sizes = [-(-length // align) for length in lengths]
    packs: list[list[int]] = []
    by_room: dict[int, list[int]] = {}
    rooms = 0  # bit r: a pack with room r may take another sequence
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        size = sizes[index]
        fits = rooms >> size
        if fits:
            room = size + (fits & -fits).bit_length() - 1
            pack = by_room[room].pop()
            if not by_room[room]:
                rooms ^= 1 << room
        else:
            room, pack = capacity // align, len(packs)
            packs.append([])
        packs[pack].append(index)
        left = room - size
        if left and len(packs[pack]) < most:
            waiting = by_room.setdefault(left, [])
            if not waiting:
                rooms ^= 1 << left
            waiting.append(pack)
    return packs
