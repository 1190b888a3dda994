"""KV blocks that outlive the process: writes those that requests complete, and loads those that a request lacks.

Loading is a preparation before admission, like an image: the request waits aside, others pass it, and no step waits
for a file. A load begins only if it should take less time than computing, and is given up when computing would have
been faster. (SGLang's HiCache loads what would be faster to compute; see docs/kv-store.md.)
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from chairlift.base.prefix_keys import SHORT_KEY_BYTES
from chairlift.core.kv_cache.prefix_node import PrefixNode
from chairlift.core.kv_cache.stored import Missing, find_missing, restore_blocks
from chairlift.core.request import Request
from chairlift.core.scheduler.batch import Batch
from chairlift.engine.clock import POLL_SECONDS, Clock
from chairlift.engine.kv_store.report import StoreNews, StoreReport
from chairlift.engine.kv_store.store import BlockLoad, KVStore
from chairlift.executor.executor import BlockBytes

__all__ = ["BlockWait", "KVBlocks", "StoreSource"]

_log = logging.getLogger(__name__)

StoreSource = Callable[[], KVStore | None]
"""Function that returns the store when it is open; None until then."""

_MOST_NEW: Final = 8192
"""Number of completed blocks that may wait for the write rate. The oldest are dropped."""
_OPENING_SECONDS: Final = 0.05
"""Seconds between two looks at a store that is being opened."""
_PIECE_BYTES: Final = 4 << 20
_NEW_RATE: Final = 1.25
"""Ratio of two speeds of loads from which on the change is news."""
_SLACK: Final = 0.02
"""Seconds for which a load may be late before it is given up: a look at its result is that late."""


@dataclasses.dataclass(slots=True)
class BlockWait:
    """A request that waits for its blocks."""

    request: Request
    load: BlockLoad
    places: list[tuple[int, int]]
    """(block index, group) of each wanted block of the load."""
    until: float
    """Time at which computing the tokens would have ended."""
    num_tokens: int
    """Number of leading tokens that need not be computed with these blocks."""
    since: float = 0.0
    """Time at which the wait began."""
    num_restored: int = 0
    """Number of blocks of the load that were put into the cache or had no room there."""


class KVBlocks:
    """Stores and loads the blocks of an engine's requests. A :class:`~chairlift.engine.preparers.Preparer`.

    ``source`` gives the store once it is open. ``compute_seconds`` gives the seconds that a number of prompt tokens
    takes. Without a source nothing is stored.
    """

    def __init__(
        self,
        source: StoreSource | None = None,
        batch: Batch | None = None,
        blocks: BlockBytes | None = None,
        block_bytes: Sequence[int] = (),
        clock: Clock | None = None,
        compute_seconds: Callable[[int], float] | None = None,
    ) -> None:
        self._source = source
        self._batch = batch
        self._kv = None if batch is None else batch.kv
        self._blocks = blocks
        self.block_bytes = tuple(block_bytes)
        """Bytes of a block of each cache group."""
        self._clock = clock
        self._compute_seconds = compute_seconds
        self._store: KVStore | None = None
        self._directory = str(getattr(source, "directory", ""))
        self._waiting: dict[str, BlockWait] = {}
        self._looked_at: set[str] = set()
        """Ids of requests for which a load was considered."""
        self._new: deque[tuple[int, PrefixNode]] = deque()
        self.piece_bytes = _PIECE_BYTES
        """Number of bytes of a load that are put into the cache while the rest is read, so that few are left at its
        end."""
        self.num_tokens = 0
        """Number of prompt tokens whose KV was loaded."""
        self.num_dropped = 0
        """Number of completed blocks that were not written, because the store was too slow."""
        self.num_loads = 0
        self.load_seconds = 0.0
        """Seconds for which requests waited for their blocks."""
        self.num_given_up = 0
        """Number of loads that computing would have overtaken."""
        spans = [] if self._kv is None else [kind.span for kind in self._kv.layout.kinds]
        self._finest = spans.index(min(spans)) if spans else 0
        """Cache group whose blocks have the fewest tokens."""
        self._told_rate = 1.0
        """Speed of loads, in bytes per second, that the newest news had."""
        self._num_asked = 0
        """Number of questions for a report whose answer does not need the store."""
        if source is not None and self._kv is not None and self._kv.prefix_cache is not None:
            self._kv.prefix_cache.published = []

    @property
    def is_used(self) -> bool:
        """Whether there is a store, or one is being opened."""
        return self._store is not None or self._source is not None

    @property
    def is_loading(self) -> bool:
        """Whether a request waits for its blocks."""
        return bool(self._waiting)

    @property
    def bytes_per_token(self) -> float:
        spans = [] if self._kv is None else [kind.span for kind in self._kv.layout.kinds]
        return sum(size / span for size, span in zip(self.block_bytes, spans, strict=True))

    def write(self, group: int, block: int, content: bytes) -> None:
        """Put content that was read into a block."""
        if self._blocks is not None:
            self._blocks.put(group, block, content)

    @property
    def store(self) -> KVStore | None:
        """The store, if it is open."""
        if self._store is None and self._source is not None:
            self._store = self._source()
            if self._store is not None:
                self._source = None
        return self._store

    def wait_for_store(self) -> KVStore | None:
        """The store, after the model's files have been read; None if there is none, or if it could not be opened."""
        wait = getattr(self._source, "wait", None)
        if wait is not None:
            wait()
        return self.store

    # -- before a step -------------------------------------------------------------------------------------------------

    def look_at(self, requests: Sequence[Request]) -> None:
        """Load what waiting requests lack, if that is faster than computing it. Such a request is held back until its
        blocks have come. Each request is considered once."""
        store = self.store
        if store is None or self._batch is None:
            return
        if requests:
            store.poll()
        for request in requests:
            if request.request_id not in self._looked_at and request in self._batch.waiting:
                self._looked_at.add(request.request_id)
                if self._begin(store, request):
                    self._batch.hold_back(request)
                    request.waits_for = "kv_load"

    def _begin(self, store: KVStore, request: Request) -> bool:
        """Whether a load was begun for the request."""
        if self._kv is None or self._clock is None or self._compute_seconds is None:
            return False
        missing = find_missing(self._kv, request, lambda group, key: store.find(group, key) is not None)
        if missing is None:
            return False
        nbytes = sum(self.block_bytes[group] for _, group, _ in missing.blocks)
        seconds = self._compute_seconds(missing.num_tokens - missing.present)
        if (nbytes + self._loading_bytes()) / store.bytes_per_second >= seconds:
            return False
        self.num_loads += 1
        now = self._clock.now()
        wait = self._waiting[request.request_id] = self._load(store, request, missing, now + seconds + _SLACK)
        wait.since = now
        return True

    @staticmethod
    def _load(store: KVStore, request: Request, missing: Missing, until: float) -> BlockWait:
        found = [store.find(group, key) for _, group, key in missing.blocks]
        load = store.load([each for each in found if each is not None])
        return BlockWait(
            request, load, [(index, group) for index, group, _ in missing.blocks], until, missing.num_tokens
        )

    def fetch(self, request: Request) -> BlockWait | None:
        """Begin to load all that the store has for a request that may come later. None: it has nothing that the cache
        lacks. The caller calls :meth:`restore` when the load has ended."""
        store = self.store
        if store is None or self._kv is None:
            return None
        missing = find_missing(self._kv, request, lambda group, key: store.find(group, key) is not None)
        return None if missing is None else self._load(store, request, missing, math.inf)

    def num_present(self, request: Request) -> int:
        """Number of the request's leading tokens whose KV is in the cache."""
        return 0 if self._kv is None else self._kv.num_shared(request)

    def put_now(self, group: int, node: PrefixNode) -> int | None:
        """Write a block although the write rate does not allow it. Returns the number of bytes that were accepted: 0 if
        there is nothing to do, None if the queue is full."""
        store, block = self.store, node.blocks[group]
        if store is None or block is None or node.parent is None or self._blocks is None:
            return 0
        if not store.wants(group, node.key):
            return 0
        if not store.may_write(self.block_bytes[group], urgent=True):
            return None
        store.put(group, node.key, node.parent.key, node.tokens, self._blocks.take(group, block))
        return self.block_bytes[group]

    def expected(self, now: float) -> dict[str, float]:
        """Id of each request that waits for its blocks -> time at which they should be there, or at which it goes on
        without them."""
        if not self._waiting or self._store is None:
            return {}
        found: dict[str, float] = {}
        end = now
        for name, each in self._waiting.items():
            end += self._bytes_of(each) / self._store.bytes_per_second
            found[name] = min(end, each.until)
        return found

    def _bytes_of(self, each: BlockWait) -> int:
        """Number of bytes that are still to be read for a request."""
        return sum(self.block_bytes[group] for _, group in each.places[len(each.load.blocks) :])

    def _loading_bytes(self) -> int:
        """Number of bytes that are still to be read for earlier requests."""
        return sum(map(self._bytes_of, self._waiting.values()))

    def store_blocks(self) -> None:
        """Hand completed blocks to the store, as many as its write rate allows. Called between two steps."""
        cache = None if self._kv is None else self._kv.prefix_cache
        if cache is None or cache.published is None:
            return
        if cache.published:
            self._new += cache.published
            cache.published = []
        forgotten = cache.forgotten
        if forgotten:
            cache.forgotten = []
        store = self.store
        while len(self._new) > _MOST_NEW:
            self._new.popleft()
            self.num_dropped += 1
        if store is None:
            return
        store.poll()
        for key in forgotten:
            for group in range(len(self.block_bytes)):
                store.forget(group, key)
        while self._new and self._put(store, *self._new[0]):
            self._new.popleft()

    def _put(self, store: KVStore, group: int, node: PrefixNode) -> bool:
        """Whether the block needs no further attempt."""
        block = node.blocks[group]
        if block is None or node.parent is None or self._blocks is None:
            self.num_dropped += block is None
            return True
        if not store.wants(group, node.key):
            return True
        if not store.may_write(self.block_bytes[group]):
            return False
        store.put(group, node.key, node.parent.key, node.tokens, self._blocks.take(group, block))
        return True

    # -- the preparer --------------------------------------------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        return False

    def take_ready(self) -> tuple[list[Request], list[tuple[Request, str]]]:
        """Requests whose blocks have come, or that will compute them after all. None fails."""
        ready: list[Request] = []
        if not self._waiting or self._clock is None:
            return ready, []
        now = self._clock.now()
        for name, each in list(self._waiting.items()):
            late = now >= each.until
            if each.load.is_done or late:
                del self._waiting[name]
                self.load_seconds += now - each.since
                self.num_given_up += late and not each.load.is_done
                self.restore(each)
                each.request.waits_for = ""
                ready.append(each.request)
            elif self._num_new_bytes(each) >= self.piece_bytes:
                self._put_back(each)
        return ready, []

    def _num_new_bytes(self, each: BlockWait) -> int:
        """Number of bytes that were read for a request and are not in the cache yet."""
        return sum(map(len, each.load.blocks[each.num_restored :]))

    def restore(self, each: BlockWait) -> None:
        """Put what a load has read into the cache, and end the load."""
        if self._store is not None:
            self._store.loaded(each.load)
        self._put_back(each)

    def _put_back(self, each: BlockWait) -> None:
        """Put what a load has read since the last call into the cache."""
        blocks = each.load.blocks[each.num_restored :]
        places = each.places[each.num_restored :]
        if self._kv is None or self._blocks is None or self._store is None or not blocks:
            return
        each.num_restored += len(blocks)
        before = self._kv.num_shared(each.request)
        restore_blocks(self._kv, each.request, dict(zip(places, blocks, strict=False)), self._blocks.put)
        gained = self._kv.num_shared(each.request) - before
        self.num_tokens += gained
        each.request.num_disk_tokens += gained

    def waits(self, request: Request) -> bool:
        return request.request_id in self._waiting

    def next_event(self, now: float) -> float | None:
        """Time at which completed blocks may be written; None if there are none. (The loop looks at requests that wait
        by itself.)"""
        store = self._store
        if store is None and self._source is not None and not getattr(self._source, "failed", False):
            return now + _OPENING_SECONDS  # others want to know what it has as soon as it is open
        if self._num_asked or (store is not None and store.is_surveying):
            return now + POLL_SECONDS
        if store is None or store.stopped or not (self._new or store.queued_bytes):
            return None
        return now + POLL_SECONDS

    def forget(self, request: Request) -> None:
        self._looked_at.discard(request.request_id)
        each = self._waiting.pop(request.request_id, None)
        if each is not None and self._store is not None:
            each.request.waits_for = ""
            self._store.loaded(each.load)

    def weights_changed(self) -> None:
        """Store and load nothing any more, because the files belong to the old weights."""
        self._source = None
        self._new.clear()
        for each in self._waiting.values():
            each.load.is_cancelled = True
            each.places = []
        if self._store is not None:
            self._store.stop("the weights were replaced")
        if self._kv is not None and self._kv.prefix_cache is not None:
            self._kv.prefix_cache.published = None

    # -- what is in it -------------------------------------------------------------------------------------------------

    def ask(self, clear: str = "") -> None:
        """Ask for a report, after the blocks of this namespace (``own``) or of all (``all``) were removed."""
        if self.store is None:
            self._num_asked += 1
            return
        if clear:
            self._new.clear()
        self.store.survey(clear)

    def take_reports(self) -> list[StoreReport]:
        """The answers that are known, in the order of the questions."""
        count, self._num_asked = self._num_asked, 0
        if self._store is not None and self._store.is_surveying:
            count += self._store.take_surveys()
        return [self._report() for _ in range(count)]

    def _report(self) -> StoreReport:
        directory = self._directory
        if self._store is None:
            if self._source is None:
                return StoreReport(state="off")
            return StoreReport(
                state="failed" if getattr(self._source, "failed", False) else "opening", directory=directory
            )
        report = self._store.report()
        report.directory = directory
        report.loads = self.num_loads
        report.given_up = self.num_given_up
        report.loaded_tokens = self.num_tokens
        report.rejected = self._rejected(self._store)
        return report

    def _rejected(self, store: KVStore) -> dict[str, int]:
        """Reason -> number of blocks that were not written or not used."""
        return {**store.rejected, "too_fast": self.num_dropped} if self.num_dropped else dict(store.rejected)

    def take_news(self) -> StoreNews | None:
        """What can be loaded since the last call, or no longer; None if nothing has changed. The first news has all
        blocks."""
        store = self.store
        if store is None or self._kv is None:
            return None
        added, removed = store.changes(self._finest)
        rate = store.bytes_per_second
        if not added and not removed and rate < _NEW_RATE * self._told_rate and self._told_rate < _NEW_RATE * rate:
            return None
        self._told_rate = rate
        short = [b"".join(key[:SHORT_KEY_BYTES] for key in keys) for keys in (added, removed)]
        return StoreNews(short[0], short[1], self.bytes_per_token / rate)

    def counts(self) -> dict[str, Any]:
        store = self._store
        if store is None:
            return {}
        return {
            "kv_store_blocks": store.num_blocks,
            "num_kv_loaded_tokens": self.num_tokens,
            "num_kv_loads": self.num_loads,
            "num_kv_load_seconds": self.load_seconds,
            "num_kv_bytes_read": store.num_read,
            "num_kv_bytes_written": store.num_written,
            "kv_blocks_rejected": self._rejected(store),
        }

    def shutdown(self) -> None:
        """Write what has been completed, and close the store."""
        self._waiting.clear()
        if self._store is not None:
            self._store.hurry()
            self.store_blocks()
            self._store.close()
            self._store = None
        self._source = None
