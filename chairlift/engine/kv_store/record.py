"""What the index of a store says about one block. A record is believed only if its checksum is right.

A block is verified when it is read, instead of ordering the writes: a crash between two writes leaves a record and a
payload that do not belong together, and the checksum of the payload begins with the record's key, slot and generation.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

__all__ = ["KEY_BYTES", "Record", "payload_checksum", "record_bytes", "records"]

KEY_BYTES = 32
"""Size of a key of the prefix cache."""

_HEADER = struct.Struct("<4sHHIQQ16s32s32s")
_CHECK = struct.Struct("<I")
_GENERATION_AT = struct.calcsize("<4sHHI")
_SEEDS = struct.Struct("<QI")
_PAYLOAD_SUMS = struct.Struct("<IIQ")
_MAGIC = b"CLK2"
_UNIT = 256
_ROOM_FOR_MARKS = 128


def record_bytes(block_size: int) -> int:
    """Size in bytes of the records of a store whose blocks have ``block_size`` tokens."""
    least = _HEADER.size + 8 * block_size + _ROOM_FOR_MARKS + _CHECK.size
    return -(-least // _UNIT) * _UNIT


def payload_checksum(payload: bytes | bytearray | memoryview, key: bytes, slot: int, generation: int) -> bytes:
    """16 bytes that say that a payload was written for this key, slot and generation.

    They are the payload's length, CRC-32 and sum of 64-bit words. CRC and sum begin with a digest of the other
    arguments. Damage of one kind that leaves one of the two as it was changes the other: a CRC knows the order of the
    words, and a sum is no remainder. Neither resists an attacker, who could write records as well.
    """
    digest = hashlib.sha256(struct.pack("<QQ", slot, generation) + key).digest()
    sum_seed, crc_seed = _SEEDS.unpack_from(digest)
    words = np.frombuffer(payload, "<u8", len(payload) // 8)
    total = (int(words.sum(dtype=np.uint64)) + sum_seed) % (1 << 64)
    return _PAYLOAD_SUMS.pack(len(payload), zlib.crc32(payload, crc_seed), total)


class Record(NamedTuple):
    """One stored block. A tuple, because a store makes one for each block when it is opened."""

    group: int
    """Index of the cache group."""
    slot: int
    generation: int
    """Number of the write: each write of a store has a larger one than all earlier writes."""
    used: int
    """Unix time in seconds of the write, or of the last read that was noted."""
    checksum: bytes
    """Result of :func:`payload_checksum`."""
    key: bytes
    """Key of the block's node in the prefix cache."""
    parent: bytes
    """Key of the node before it."""
    content: bytes
    """Token ids of the block and marks of kinds, as the node has them."""

    def fits(self, size: int) -> bool:
        """Whether :meth:`encode` can write the record in ``size`` bytes."""
        return _HEADER.size + len(self.content) + _CHECK.size <= size

    def encode(self, size: int) -> bytes:
        """The record as ``size`` bytes."""
        fields = self.group, len(self.content), self.slot, self.generation, self.used
        head = _HEADER.pack(_MAGIC, *fields, self.checksum, self.key, self.parent) + self.content
        body = head.ljust(size - _CHECK.size, b"\0")
        return body + _CHECK.pack(zlib.crc32(body))

    @classmethod
    def decode(cls, data: bytes, slot: int) -> Record | None:
        """The record that ``data`` holds for this slot; None if it holds none, or if the bytes are damaged."""
        return next(records(data, len(data), slot), None)


def records(data: bytes, size: int, first: int, newer_than: int = 0) -> Iterator[Record]:
    """The records of ``size`` bytes in ``data``, without those that are damaged or whose generation is not above
    ``newer_than``. They are those of consecutive slots from ``first`` on."""
    room = size - _HEADER.size - _CHECK.size
    if room < 0 or len(data) < size:  # a read at the end of a file gives fewer bytes, or none
        return
    count = len(data) // size
    # Most records of a file that is followed are known already, so they are not decoded.
    magics = np.ndarray((count,), "S4", data, 0, (size,))
    numbers = np.ndarray((count,), "<u8", data, _GENERATION_AT, (size,))
    candidates = np.flatnonzero((magics == _MAGIC) & (numbers > newer_than)).tolist()
    view = memoryview(data)
    unpack = struct.Struct(f"{_HEADER.format}{room}s{_CHECK.format[1:]}").unpack_from
    crc = zlib.crc32
    for index in candidates:
        at = index * size
        found = unpack(data, at)
        _, group, length, slot, generation, used, checksum, key, parent, content, check = found
        if slot == first + index and length <= room and crc(view[at : at + size - _CHECK.size]) == check:
            yield Record(group, slot, generation, used, checksum, key, parent, content[:length])
