"""Publishes which blocks the prefix cache holds, for routers that send a prompt to the server with its beginning.

The messages have vLLM's form: ZeroMQ's PUB socket sends three parts, an empty topic, a sequence number (8 bytes, big
endian) and a msgpack array ``[time, events]``. An event is a map whose ``type`` is BlockStored, BlockRemoved or
AllBlocksCleared. BlockStored contains token ids, so whoever can connect can read prompts and answers.
"""

from __future__ import annotations

import logging
import time
from array import array
from typing import Any, Final

import msgspec

from chairlift.core.kv_cache.prefix_cache import PrefixCache
from chairlift.errors import ConfigError

__all__ = ["KVEventPublisher", "events_of"]

_log = logging.getLogger(__name__)

_MAX_QUEUED: Final = 10_000
"""Maximum number of messages that wait for a slow subscriber. Further ones are dropped: the subscriber sees a gap in
the sequence numbers."""
_LOCAL: Final = ("tcp://127.0.0.1:", "tcp://localhost:", "tcp://[::1]:", "ipc://", "inproc://")
_MASK: Final = (1 << 63) - 1


class KVEventPublisher:
    """Subscriber to the events of a core: after each step it sends the changes of the core's prefix cache.

    ``endpoint`` is an address of ZeroMQ, such as tcp://127.0.0.1:5557. Raises ConfigError without the package pyzmq,
    and for an address on which it cannot listen.
    """

    def __init__(self, cache: PrefixCache, endpoint: str) -> None:
        try:
            import zmq
        except ImportError:
            raise ConfigError("kv_events_endpoint needs pyzmq; pip install 'chairlift[kv-events]'") from None
        self._cache = cache
        self._sequence = 0
        self._socket: Any = zmq.Context.instance().socket(zmq.PUB)
        self._socket.set(zmq.SNDHWM, _MAX_QUEUED)
        self._socket.set(zmq.LINGER, 0)
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self._socket.close()
            raise ConfigError(
                f"kv_events_endpoint: cannot listen on {endpoint!r:.200} ({error}); name a free address such as"
                " tcp://127.0.0.1:5557"
            ) from None
        if not endpoint.startswith(_LOCAL):
            _log.warning("whoever can connect to %s can read the tokens of all prompts and answers", endpoint)
        cache.journal = []

    def landed(self, record: object) -> None:
        """Send the changes since the last call."""
        changes = self._cache.journal
        self._cache.journal = []
        if changes:
            payload = msgspec.msgpack.encode([time.time(), events_of(changes, self._cache.block_size)])
            self._socket.send_multipart((b"", self._sequence.to_bytes(8, "big"), payload))
            self._sequence += 1

    def close(self) -> None:
        """Stop publishing."""
        self._cache.journal = None
        self._socket.close()


def events_of(changes: list[tuple[Any, ...]], block_size: int) -> list[dict[str, Any]]:
    """Events for entries of :attr:`~chairlift.core.kv_cache.prefix_cache.PrefixCache.journal`. Blocks of one prompt
    that were stored one after another share an event."""
    events: list[dict[str, Any]] = []
    last = b""
    for kind, *rest in changes:
        if kind == "stored":
            key, parent, content, request = rest
            tokens = array("q", content[: 8 * block_size]).tolist()
            if events and parent == last and events[-1]["type"] == "BlockStored":
                events[-1]["block_hashes"].append(_number(key))
                events[-1]["token_ids"] += tokens
            else:
                events.append(
                    {
                        "type": "BlockStored",
                        "block_hashes": [_number(key)],
                        "parent_block_hash": None if parent is None else _number(parent),
                        "token_ids": tokens,
                        "block_size": block_size,
                        "lora_id": request.adapter_id or None,
                        "medium": "GPU",
                        "lora_name": None,
                    }
                )
            last = key
        elif kind == "removed":
            (key,) = rest
            if events and events[-1]["type"] == "BlockRemoved":
                events[-1]["block_hashes"].append(_number(key))
            else:
                events.append({"type": "BlockRemoved", "block_hashes": [_number(key)], "medium": "GPU"})
            last = b""
        else:
            events = [{"type": "AllBlocksCleared"}]
            last = b""
    return events


def _number(key: bytes) -> int:
    """A block's key as a number of 63 bits. It differs between processes, because the keys depend on a secret."""
    return int.from_bytes(key[:8], "big") & _MASK
