"""Stored responses in memory. A response is visible only to the API key that made it.

Their number and their bytes are limited. At the limit, the least recently used response of the key with the most bytes
is dropped, so that no key displaces the responses of others.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict

__all__ = ["ResponseStore", "StoredResponse"]


@dataclasses.dataclass(frozen=True, slots=True)
class StoredResponse:
    """One response."""

    body: bytes
    """JSON of the response, as GET returns it."""
    items: bytes
    """JSON list of all items of the conversation, including the answer's."""
    num_input: int = 0
    """Number of items before the answer's."""

    @property
    def num_bytes(self) -> int:
        """Bytes that count for the limit."""
        return len(self.body) + len(self.items)


class ResponseStore:
    """Responses by holder (see :class:`~chairlift.server.auth.Caller`) and id."""

    def __init__(self) -> None:
        self._kept: dict[str, OrderedDict[str, StoredResponse]] = {}
        self._bytes: dict[str, int] = {}
        self.num_stored = 0
        self.num_bytes = 0

    def put(self, holder: str, response_id: str, stored: StoredResponse, most: int, most_bytes: int) -> bool:
        """Store a response within the limits ``most`` and ``most_bytes``. Returns False if it alone exceeds them."""
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
        """The response, if it exists and belongs to this holder."""
        own = self._kept.get(holder, OrderedDict())
        if response_id in own:
            own.move_to_end(response_id)
        return own.get(response_id)

    def delete(self, holder: str, response_id: str) -> bool:
        """Delete a response. Returns whether it existed."""
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
