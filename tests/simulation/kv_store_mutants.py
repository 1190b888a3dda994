"""Bugs of KV blocks that outlive the process, injected one at a time. The worlds on a disk must detect every one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from chairlift.core.kv_cache import stored
from chairlift.core.kv_cache.layout import CacheLayout
from chairlift.core.kv_cache.prefix_cache import PrefixCache
from chairlift.core.kv_cache.prefix_node import PrefixNode
from chairlift.core.request import Request
from chairlift.core.rows.adapters import AdapterRows
from chairlift.engine.kv_blocks import KVBlocks
from chairlift.engine.kv_store import files, record, store
from chairlift.engine.kv_store.files import StoreFiles
from chairlift.engine.kv_store.record import Record
from chairlift.engine.kv_store.store import KVStore
from tests.simulation.mutants import Patch

__all__ = ["KV_STORE_MUTANTS"]

KV_STORE_MUTANTS: dict[str, Callable[[Patch], None]] = {}


def mutant(plant: Callable[[Patch], None]) -> Callable[[Patch], None]:
    KV_STORE_MUTANTS[plant.__name__] = plant
    return plant


def _checksum_of(change: Callable[..., tuple[Any, bytes, int, int]]) -> Callable[[Patch], None]:
    """Make a bug in which the checksum of a payload covers the changed (payload, key, slot, generation)."""

    def wrong(*args: Any) -> bytes:
        return record.payload_checksum(*change(*args))

    def plant(patch: Patch) -> None:
        patch(files, "payload_checksum", wrong)
        patch(store, "payload_checksum", wrong)

    return plant


@mutant
def payload_not_verified(patch: Patch) -> None:
    _checksum_of(lambda payload, key, slot, generation: (b"", key, slot, generation))(patch)


@mutant
def only_the_first_bytes_verified(patch: Patch) -> None:
    _checksum_of(lambda payload, key, slot, generation: (payload[:16], key, slot, generation))(patch)


@mutant
def loaded_blocks_in_another_order(patch: Patch) -> None:
    restore = stored.restore_blocks

    def wrong(kv: Any, request: Request, blocks: Mapping[tuple[int, int], bytes], write: Any) -> int:
        return restore(kv, request, dict(zip(blocks, reversed(list(blocks.values())), strict=True)), write)

    patch(_module_of(KVBlocks), "restore_blocks", wrong)


@mutant
def keys_without_the_salt(patch: Patch) -> None:
    owner = PrefixCache._owner

    def wrong(self: PrefixCache, request: Request) -> bytes:
        salt, request.cache_salt = request.cache_salt, ""
        found = owner(self, request)
        request.cache_salt = salt
        return found

    patch(PrefixCache, "_owner", wrong)


@mutant
def keys_without_what_comes_before(patch: Patch) -> None:
    def wrong(self: PrefixCache, parent: PrefixNode, tokens: bytes) -> bytes:
        return self._hash(b"parent" + tokens)

    def keys(self: PrefixCache, request: Request, num_blocks: int) -> Iterator[bytes]:
        for index in range(num_blocks):
            yield self._hash(b"parent" + self._content(request, index))

    patch(PrefixCache, "_child_key", wrong)
    patch(PrefixCache, "keys", keys)


@mutant
def begins_after_a_window_that_is_not_there(patch: Patch) -> None:
    in_reach = CacheLayout.in_reach
    patch(CacheLayout, "in_reach", lambda self, group, num_blocks: in_reach(self, group, num_blocks)[-1:])


@mutant
def state_of_any_block_taken_for_a_snapshot(patch: Patch) -> None:
    def continues(self: CacheLayout, num_blocks: int, has: Callable[[int, int], bool]) -> bool:
        return all(has(group, index) for group in range(len(self.kinds)) for index in self.in_reach(group, num_blocks))

    patch(CacheLayout, "_continues", continues)


@mutant
def content_of_another_block_written(patch: Patch) -> None:
    put = KVBlocks._put

    def wrong(self: KVBlocks, store: KVStore, group: int, node: PrefixNode) -> bool:
        block = node.blocks[group]
        if block is None or block < 2:
            return put(self, store, group, node)
        node.blocks[group] = block - 1
        done = put(self, store, group, node)
        node.blocks[group] = block
        return done

    patch(KVBlocks, "_put", wrong)


@mutant
def record_of_another_slot_believed(patch: Patch) -> None:
    def wrong(data: bytes, size: int, first: int, newer_than: int = 0) -> Iterator[Record]:
        for at in range(0, len(data) - size + 1, size):
            found = Record.decode(data[at : at + size], int.from_bytes(data[at + 8 : at + 12], "little"))
            if found is not None and found.generation > newer_than:
                yield found._replace(slot=first + at // size, checksum=b"")

    def read(self: StoreFiles, writer: int, record: Record) -> bytes | None:
        _, blocks = self._names(writer, record.group)
        size = self._block_bytes[record.group]
        found = self._file(blocks).read(record.slot * size, size)
        return found if len(found) == size else None

    patch(files, "records", wrong)
    patch(StoreFiles, "read", read)


@mutant
def slot_overwritten_while_it_is_read(patch: Patch) -> None:
    def read(self: StoreFiles, writer: int, record: Record) -> bytes | None:
        _, blocks = self._names(writer, record.group)
        size = self._block_bytes[record.group]
        found = self._file(blocks).read(record.slot * size, size)
        return found if len(found) == size else None

    patch(StoreFiles, "read", read)


@mutant
def restored_block_not_attached_to_its_node(patch: Patch) -> None:
    restore = PrefixCache.restore

    def wrong(self: PrefixCache, request: Request, blocks: Mapping[tuple[int, int], bytes], put: Any) -> int:
        return restore(self, request, {(index + 1, group): each for (index, group), each in blocks.items()}, put)

    patch(PrefixCache, "restore", wrong)


@mutant
def keys_without_the_adapter(patch: Patch) -> None:
    patch(AdapterRows, "key", lambda self, request: b"")


@mutant
def keys_of_adapters_by_number(patch: Patch) -> None:
    patch(AdapterRows, "key", lambda self, request: str(request.adapter_id).encode())


@mutant
def blocks_of_others_not_verified(patch: Patch) -> None:
    read = StoreFiles.read

    def wrong(self: StoreFiles, writer: int, record: Record) -> bytes | None:
        _, blocks = self._names(writer, record.group)
        size = self._block_bytes[record.group]
        if writer == self.writer:
            return read(self, writer, record)
        found = self._file(blocks).read(record.slot * size, size)
        return found if len(found) == size else None

    patch(StoreFiles, "read", wrong)


@mutant
def blocks_of_others_not_followed(patch: Patch) -> None:
    patch(StoreFiles, "follow", lambda self: [])


@mutant
def older_blocks_of_others_taken_for_newer(patch: Patch) -> None:
    news = StoreFiles._news_of

    def wrong(self: StoreFiles, name: str, size: int) -> list[Record]:
        found = news(self, name, size)
        self._followed[name].newer_than = self._followed[name].newest + 3
        return found

    patch(StoreFiles, "_news_of", wrong)


def _module_of(cls: type) -> Any:
    import sys

    return sys.modules[cls.__module__]
