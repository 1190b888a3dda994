"""Responses of /v1/responses that are stored in memory.

A response is visible only to the API key that made it. The number and total size of the stored responses are limited.
At the limit, the server drops the least recently used response of the key that uses the most bytes. So one key cannot
push out the responses of other keys.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict

__all__ = ["ResponseStore", "StoredResponse"]


@dataclasses.dataclass(frozen=True, slots=True)
class StoredResponse:
    """One stored response."""

    body: bytes
    """JSON of the response, as GET returns it."""
    items: bytes
    """JSON list of all items of the conversation, including the items of the output."""
    num_input: int = 0
    """Number of items of the conversation before the items of the output."""
    output_ids: tuple[str, ...] = ()
    """Ids of the items of the output, in order."""

    @property
    def num_bytes(self) -> int:
        """Size in bytes of the stored response, which counts against the limit on the total size."""
        return len(self.body) + len(self.items)


class ResponseStore:
    """Stored responses: holder (see :class:`~chairlift.server.http.auth.Caller`) -> id -> response."""

    def __init__(self) -> None:
        self._stored: dict[str, OrderedDict[str, StoredResponse]] = {}
        self._bytes: dict[str, int] = {}
        self._of_items: dict[str, dict[str, str]] = {}
        """Holder -> id of an item of an output -> id of its response."""
        self.num_stored = 0
        self.num_bytes = 0

    def put(self, holder: str, response_id: str, stored: StoredResponse, max_responses: int, max_bytes: int) -> bool:
        """Store a response. ``max_responses`` is the maximum number of responses, ``max_bytes`` their maximum size.
        Returns False if the response alone exceeds the limits."""
        if max_responses < 1 or stored.num_bytes > max_bytes:
            return False
        self._stored.setdefault(holder, OrderedDict())[response_id] = stored
        self._of_items.setdefault(holder, {}).update(dict.fromkeys(stored.output_ids, response_id))
        self._count(holder, 1, stored.num_bytes)
        while self.num_stored > max_responses or self.num_bytes > max_bytes:
            largest = max(self._bytes, key=self._bytes.__getitem__)
            _, dropped = self._stored[largest].popitem(last=False)
            self._forget(largest, dropped)
        return True

    def get(self, holder: str, response_id: str) -> StoredResponse | None:
        """The response; None if it does not exist or belongs to another holder."""
        own = self._stored.get(holder, OrderedDict())
        if response_id in own:
            own.move_to_end(response_id)
        return own.get(response_id)

    def with_item(self, holder: str, item_id: str) -> StoredResponse | None:
        """The response with this item in its output; None if it does not exist or belongs to another holder."""
        response_id = self._of_items.get(holder, {}).get(item_id)
        return None if response_id is None else self.get(holder, response_id)

    def delete(self, holder: str, response_id: str) -> bool:
        """Delete a response. Returns whether it existed."""
        stored = self._stored.get(holder, OrderedDict()).pop(response_id, None)
        if stored is not None:
            self._forget(holder, stored)
        return stored is not None

    def _forget(self, holder: str, stored: StoredResponse) -> None:
        for item_id in stored.output_ids:
            self._of_items[holder].pop(item_id, None)
        self._count(holder, -1, -stored.num_bytes)

    def _count(self, holder: str, num: int, num_bytes: int) -> None:
        self.num_stored += num
        self.num_bytes += num_bytes
        self._bytes[holder] = self._bytes.get(holder, 0) + num_bytes
        if not self._stored[holder]:
            del self._stored[holder], self._bytes[holder], self._of_items[holder]
