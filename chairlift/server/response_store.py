"""Responses that clients asked to be kept, in memory, each seen only with the API key that made it.

Both their number and their bytes are bounded. Where there are too many, the least recently used response of the key
with the most bytes is dropped, so that one key does not push out what others keep.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict

__all__ = ["ResponseStore", "StoredResponse"]


@dataclasses.dataclass(frozen=True, slots=True)
class StoredResponse:
    """One response."""

    body: bytes
    """JSON of the response, as GET has it."""
    items: bytes
    """JSON of the list of all items of the conversation, the answer's included."""

    @property
    def num_bytes(self) -> int:
        """What it counts for."""
        return len(self.body) + len(self.items)


class ResponseStore:
    """Responses by holder (of an API key, see :class:`~chairlift.server.auth.Caller`) and id."""

    def __init__(self) -> None:
        self._kept: dict[str, OrderedDict[str, StoredResponse]] = {}
        self._bytes: dict[str, int] = {}
        self.num_stored = 0
        self.num_bytes = 0

    def put(self, holder: str, response_id: str, stored: StoredResponse, most: int, most_bytes: int) -> bool:
        """Keep a response, within ``most`` of them and ``most_bytes``. False: it alone is larger, and is not kept."""
        if most < 1 or stored.num_bytes > most_bytes:
            return False
        self._kept.setdefault(holder, OrderedDict())[response_id] = stored
        self._count(holder, 1, stored.num_bytes)
        while self.num_stored > most or self.num_bytes > most_bytes:
            largest = max(self._bytes, key=self._bytes.__getitem__)
            _, dropped = self._kept[largest].popitem(last=False)
            self._count(largest, -1, -dropped.num_bytes)
        return True

    def get(self, holder: str, response_id: str) -> StoredResponse | None:
        """The response, if it is this holder's and still there."""
        own = self._kept.get(holder, OrderedDict())
        if response_id in own:
            own.move_to_end(response_id)
        return own.get(response_id)

    def delete(self, holder: str, response_id: str) -> bool:
        """Drop a response; whether it was there."""
        stored = self._kept.get(holder, OrderedDict()).pop(response_id, None)
        if stored is not None:
            self._count(holder, -1, -stored.num_bytes)
        return stored is not None

    def _count(self, holder: str, num: int, num_bytes: int) -> None:
        self.num_stored += num
        self.num_bytes += num_bytes
        self._bytes[holder] = self._bytes.get(holder, 0) + num_bytes
        if not self._kept[holder]:
            del self._kept[holder], self._bytes[holder]
