"""Files of a store: what is written is found by the next process, and nothing else is ever found."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest

from chairlift.core.kv_cache.prefix_node import PrefixNode
from chairlift.engine.kv_blocks import KVBlocks
from chairlift.engine.kv_store.disk import Disk, OsDisk
from chairlift.engine.kv_store.files import SECRET, StoreFiles, read_secret
from chairlift.engine.kv_store.record import Record, payload_checksum, record_bytes, records
from chairlift.engine.kv_store.store import KVStore
from chairlift.errors import ConfigError
from tests.engine.kv_store.fake_disk import FakeDisk, Faults

BLOCK, BYTES = 4, 640


def key_of(number: int) -> bytes:
    return bytes([number % 256, number // 256]) * 16


def payload_of(number: int) -> bytes:
    return random.Random(number).randbytes(BYTES)


def open_files(disk: Disk, namespace: str = "model", nbytes: int = 100_000, **settings: Any) -> StoreFiles:
    about = {"name": namespace}
    sizes = {"block_size": BLOCK, "block_bytes": [BYTES], "spans": [BLOCK]}
    return StoreFiles(disk, namespace, about, nbytes=nbytes, **{**sizes, **settings})


def open_store(disk: Disk, namespace: str = "model", nbytes: int = 100_000, **settings: Any) -> KVStore:
    return KVStore(open_files(disk, namespace, nbytes, **settings), 1e9, threaded=False)


def put(store: KVStore, *numbers: int) -> None:
    """Write blocks, and wait until they are written."""
    for number in numbers:
        parent = key_of(number - 1)
        assert store.put(0, key_of(number), parent, bytes(8 * BLOCK), payload_of(number))
    while store.work():
        pass
    store.poll()


def get(store: KVStore, *numbers: int) -> list[bytes]:
    """The blocks that a load of these numbers gives."""
    found = [store.find(0, key_of(number)) for number in numbers]
    load = store.load([each for each in found if each is not None])
    while not load.is_done:
        store.work()
    store.loaded(load)
    return load.blocks


def test_a_record_comes_back_and_a_damaged_one_does_not() -> None:
    record = Record(1, 7, 2**40, 1_700_000_000, b"c" * 16, key_of(1), key_of(0), bytes(range(32)))
    size = record_bytes(BLOCK)
    data = record.encode(size)
    assert len(data) == size and Record.decode(data, 7) == record
    assert Record.decode(data, 8) is None
    assert Record.decode(bytes(size), 0) is None
    for place in range(size):
        damaged = bytearray(data)
        damaged[place] ^= 1
        assert Record.decode(bytes(damaged), 7) is None, place


def test_records_of_an_index_are_the_whole_ones_above_a_generation() -> None:
    size = record_bytes(BLOCK)
    written = [Record(0, slot, 10 + slot, 0, b"c" * 16, key_of(slot), key_of(0), bytes(32)) for slot in range(5, 11)]
    data = bytearray(b"".join(each.encode(size) for each in written))
    data[size : 2 * size] = bytes(size)  # slot 6 is empty
    data[2 * size + 50] ^= 1  # slot 7 is damaged
    data[3 * size : 4 * size] = written[5].encode(size)  # slot 8 has the record of another
    assert list(records(bytes(data), size, 5)) == [written[0], *written[4:]]
    assert list(records(bytes(data[:-1]), size, 5, newer_than=15)) == [written[4]]


@pytest.mark.parametrize("changed", ["payload", "key", "slot", "generation"])
def test_a_checksum_is_of_one_payload_key_slot_and_generation(changed: str) -> None:
    arguments: dict[str, Any] = {"payload": b"payload", "key": key_of(1), "slot": 3, "generation": 4}
    others = {"payload": b"paYload", "key": key_of(2), "slot": 4, "generation": 5}
    assert payload_checksum(**arguments) != payload_checksum(**{**arguments, changed: others[changed]})


def test_blocks_outlive_the_process(tmp_path: Path) -> None:
    directory = tmp_path / "store"
    first = open_store(OsDisk(str(directory)))
    put(first, 1, 2, 3)
    first.close()
    second = open_store(OsDisk(str(directory)))
    assert second.num_blocks == 3
    assert get(second, 1, 2, 3) == [payload_of(1), payload_of(2), payload_of(3)]
    second.close()
    for path in directory.rglob("*"):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path


def test_the_least_recently_used_block_is_overwritten() -> None:
    store = open_store(FakeDisk(random.Random(0)), nbytes=4 * (BYTES + record_bytes(BLOCK)))
    put(store, 1, 2, 3, 4)
    get(store, 1)
    put(store, 5)
    assert [number for number in range(1, 6) if store.find(0, key_of(number))] == [1, 3, 4, 5]
    assert get(store, 1, 5) == [payload_of(1), payload_of(5)]


def test_a_block_that_is_being_read_is_not_overwritten() -> None:
    store = open_store(FakeDisk(random.Random(0)), nbytes=2 * (BYTES + record_bytes(BLOCK)))
    put(store, 1, 2)
    found = [store.find(0, key_of(number)) for number in (1, 2)]
    load = store.load([each for each in found if each is not None])
    assert not store.put(0, key_of(3), key_of(2), b"", payload_of(3))
    assert store.rejected["no_slot"] == 1
    while not load.is_done:
        store.work()
    store.loaded(load)
    assert load.blocks == [payload_of(1), payload_of(2)]
    put(store, 3)


def test_a_damaged_block_is_a_miss_and_is_not_read_again() -> None:
    disk = FakeDisk(random.Random(0))
    store = open_store(disk)
    put(store, 1, 2)
    disk.files["model/blocks-0-0"][BYTES + 5] ^= 4
    assert get(store, 1, 2) == [payload_of(1)]
    assert store.find(0, key_of(2)) is None
    assert store.rejected["unreadable"] == 1


def test_a_forgotten_block_is_not_found_by_the_next_process() -> None:
    disk = FakeDisk(random.Random(0))
    store = open_store(disk)
    put(store, 1, 2)
    store.forget(0, key_of(1))
    store.close()
    again = open_store(disk)
    assert again.find(0, key_of(1)) is None
    assert again.find(0, key_of(2)) is not None


def test_a_block_forgotten_while_it_is_written_is_not_found() -> None:
    disk = FakeDisk(random.Random(0))
    store = open_store(disk)
    store.put(0, key_of(1), key_of(0), b"", payload_of(1))
    store.forget(0, key_of(1))
    store.close()
    assert store.find(0, key_of(1)) is None
    assert open_store(disk).num_blocks == 0


@pytest.mark.parametrize("fault", ["write_error", "sync_error"])
def test_a_failing_disk_ends_writing_and_nothing_else(fault: str) -> None:
    disk = FakeDisk(random.Random(0))
    store = open_store(disk)
    put(store, 1)
    setattr(disk.faults, fault, 1.0)
    store.put(0, key_of(2), key_of(1), b"", payload_of(2))
    while store.work():
        pass
    store._sync(always=True)
    store.poll()
    assert store.stopped and not store.wants(0, key_of(3))
    assert get(store, 1) == [payload_of(1)]


def test_a_disk_that_cannot_be_read_is_asked_a_few_times_only() -> None:
    disk = FakeDisk(random.Random(0), Faults(read_error=0.0))
    store = open_store(disk)
    put(store, *range(1, 40))
    disk.faults.read_error = 1.0
    for number in range(1, 40):
        assert get(store, number) == []
    assert disk.num_faults == 16


def test_two_writers_read_each_other(tmp_path: Path) -> None:
    first = open_store(OsDisk(str(tmp_path / "store")))
    put(first, 1, 2)
    second = open_store(OsDisk(str(tmp_path / "store")))
    assert get(second, 1, 2) == [payload_of(1), payload_of(2)]
    put(second, 3)
    assert second._files.writer == 1
    first.close()
    second.close()
    third = open_store(OsDisk(str(tmp_path / "store")), nbytes=300_000)
    assert get(third, 1, 2, 3) == [payload_of(1), payload_of(2), payload_of(3)]


def test_a_block_that_another_writer_has_overwritten_is_a_miss() -> None:
    disk = FakeDisk(random.Random(0))
    first = open_store(disk, nbytes=2 * (BYTES + record_bytes(BLOCK)))
    put(first, 1)
    reader = open_store(disk, read_only=True)
    assert get(reader, 1) == [payload_of(1)]
    put(first, 2, 3)
    assert get(reader, 1) == []


def test_a_reader_writes_nothing() -> None:
    disk = FakeDisk(random.Random(0))
    put(open_store(disk), 1)
    disk.close()
    before = {name: bytes(data) for name, data in disk.files.items()}
    reader = open_store(disk, read_only=True)
    assert not reader.wants(0, key_of(2))
    assert get(reader, 1) == [payload_of(1)]
    reader.close()
    assert before == {name: bytes(data) for name, data in disk.files.items()}


def test_another_namespace_is_never_found() -> None:
    disk = FakeDisk(random.Random(0))
    store = open_store(disk, "model")
    put(store, 1)
    store.close()
    assert open_store(disk, "other").num_blocks == 0


def test_all_files_together_keep_to_the_limit_and_the_oldest_go_first() -> None:
    disk = FakeDisk(random.Random(0))
    for number, name in enumerate(("old", "middle", "new")):
        disk.now = float(number)
        store = open_store(disk, name, nbytes=13_000)
        put(store, 1)
        store.close()
    disk.now = 9.0
    open_store(disk, "newest", nbytes=40_000)
    sizes = disk.sizes()
    counted = {name: size for name, size in sizes.items() if "blocks" in name or "index" in name}
    assert sum(counted.values()) <= 40_000
    assert {name.partition("/")[0] for name in counted} == {"new", "newest"}


def test_files_of_a_running_process_are_not_removed() -> None:
    disk = FakeDisk(random.Random(0))
    running = open_store(disk, "running", nbytes=40_000)
    put(running, 1)
    with pytest.raises(ConfigError, match="raise kv_store_bytes"):
        open_store(disk, "other", nbytes=40_000)
    assert get(running, 1) == [payload_of(1)]


@pytest.mark.parametrize("kind", ["file", "link", "writable", "missing parent"])
def test_a_directory_that_is_not_ours_is_refused(kind: str, tmp_path: Path) -> None:
    directory = tmp_path / "store"
    if kind == "file":
        directory.write_text("")
    elif kind == "link":
        (tmp_path / "real").mkdir(mode=0o700)
        directory.symlink_to(tmp_path / "real")
    elif kind == "writable":
        directory.mkdir()
        directory.chmod(0o777)
    else:
        (tmp_path / "file").write_text("")
        directory = tmp_path / "file" / "store"
    with pytest.raises(ConfigError, match="kv_store is"):
        OsDisk(str(directory))


def test_a_link_in_the_directory_is_not_followed(tmp_path: Path) -> None:
    disk = OsDisk(str(tmp_path / "store"))
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    os.symlink(victim, tmp_path / "store" / SECRET)
    with pytest.raises(ConfigError, match="cannot be used"):
        read_secret(disk, read_only=False)
    assert victim.read_bytes() == b"precious"


def test_the_secret_is_made_once(tmp_path: Path) -> None:
    disk = OsDisk(str(tmp_path / "store"))
    with pytest.raises(ConfigError, match="use rw to fill it"):
        read_secret(disk, read_only=True)
    secret = read_secret(disk, read_only=False)
    assert len(secret) == 32
    assert read_secret(disk, read_only=True) == secret


def test_engines_that_start_at_once_get_one_secret(tmp_path: Path) -> None:
    """Between the look at the directory and the write, another engine makes its secret."""

    class Slow(OsDisk):
        def create(self, name: str, data: bytes) -> None:
            others.append(read_secret(OsDisk(str(tmp_path / "store")), read_only=False))
            super().create(name, data)

    others: list[bytes] = []
    assert read_secret(Slow(str(tmp_path / "store")), read_only=False) == others[0]
    assert [path.name for path in (tmp_path / "store").iterdir()] == [SECRET]  # no draft is left


@pytest.mark.parametrize("content", [b"", b"short", bytes(33)])
def test_a_secret_that_is_not_ours_is_refused_and_kept(content: bytes, tmp_path: Path) -> None:
    disk = OsDisk(str(tmp_path / "store"))
    (tmp_path / "store" / SECRET).write_bytes(content)
    with pytest.raises(ConfigError, match="that is not ours"):
        read_secret(disk, read_only=False)
    assert (tmp_path / "store" / SECRET).read_bytes() == content


def test_the_write_rate_and_the_queue_are_bounded() -> None:
    now = [0.0]
    store = KVStore(open_files(FakeDisk(random.Random(0))), 2 * BYTES, lambda: now[0], threaded=False)
    assert store.may_write(BYTES)
    for number in (1, 2):
        store.put(0, key_of(number), key_of(0), b"", payload_of(number))
    assert not store.may_write(BYTES)
    now[0] = 0.6
    assert store.may_write(BYTES)
    assert not store.may_write(1 << 30)
    now[0] = -5.0  # the clock was set back
    assert store.may_write(BYTES)


def test_a_block_that_was_evicted_before_it_was_written_is_dropped() -> None:
    store = open_store(FakeDisk(random.Random(0)))
    blocks = KVBlocks(lambda: store, block_bytes=[BYTES])
    parent = PrefixNode(key_of(0), None, b"", 1)
    evicted = PrefixNode(key_of(1), parent, bytes(8 * BLOCK), 1)
    assert blocks._put(store, 0, evicted), "no further attempt is needed"
    assert (blocks.num_dropped, store.queued_bytes) == (1, 0)


@pytest.fixture
def clock() -> list[float]:
    return [0.0]


def beside(disk: FakeDisk, clock: list[float], **settings: Any) -> KVStore:
    return KVStore(open_files(disk, **settings), 1e9, lambda: clock[0], threaded=False)


def follow(store: KVStore, disk: FakeDisk, clock: list[float]) -> None:
    """Let a second pass, and a store look at the files of others."""
    clock[0] += 1.5
    disk.now = clock[0]
    while store.work():
        pass
    store.poll()


def test_engines_find_what_others_write_while_they_run(clock: list[float]) -> None:
    disk = FakeDisk(random.Random(0))
    first, second = beside(disk, clock), beside(disk, clock, read_only=True)
    put(first, 1, 2)
    assert second.find(0, key_of(1)) is None
    while second.work():
        pass
    second.poll()
    assert second.find(0, key_of(1)) is None, "others are looked at once per second"
    follow(second, disk, clock)
    assert get(second, 1, 2) == [payload_of(1), payload_of(2)]
    put(first, 3)
    follow(second, disk, clock)
    assert get(second, 3) == [payload_of(3)]


def test_files_of_others_that_have_not_changed_are_not_read(clock: list[float]) -> None:
    disk = FakeDisk(random.Random(0))
    first, second = beside(disk, clock), beside(disk, clock)
    put(first, 1)
    for _ in range(3):
        follow(second, disk, clock)
    disk.faults.read_error = 1.0
    for _ in range(3):
        follow(second, disk, clock)
    assert disk.num_faults == 0


def test_a_block_that_another_writer_overwrites_is_forgotten_and_written_again(clock: list[float]) -> None:
    disk = FakeDisk(random.Random(0))
    room = 2 * (BYTES + record_bytes(BLOCK))
    first, second = beside(disk, clock, nbytes=room), beside(disk, clock, nbytes=4 * room)
    put(first, 1, 2)
    follow(second, disk, clock)
    assert not second.wants(0, key_of(1))
    put(first, 3)
    follow(second, disk, clock)
    assert second.wants(0, key_of(1)) and second.find(0, key_of(3)) is not None


def stores_with_one_block(disk: FakeDisk, clock: list[float]) -> tuple[KVStore, KVStore]:
    """Two stores that both have written block 1. The second has two slots, and knows the copy of the first."""
    room = 2 * (BYTES + record_bytes(BLOCK))
    first, second = beside(disk, clock, nbytes=4 * room), beside(disk, clock, nbytes=room)
    put(first, 1)
    put(second, 1)
    follow(second, disk, clock)
    return first, second


def test_an_evicted_block_that_another_writer_has_too_is_found_there(clock: list[float]) -> None:
    disk = FakeDisk(random.Random(0))
    first, second = stores_with_one_block(disk, clock)
    put(second, 2, 3)
    found = second.find(0, key_of(1))
    assert found is not None and found.writer == first._files.writer
    assert get(second, 1, 2, 3) == [payload_of(1), payload_of(2), payload_of(3)]


def test_a_block_whose_copy_cannot_be_read_is_found_at_another_writer(clock: list[float]) -> None:
    disk = FakeDisk(random.Random(0))
    _, second = stores_with_one_block(disk, clock)
    blocks = disk.files["model/blocks-1-0"]
    blocks[:] = bytes(len(blocks))
    assert get(second, 1) == []
    assert get(second, 1) == [payload_of(1)]


def test_no_copy_of_a_forgotten_block_is_found(clock: list[float]) -> None:
    disk = FakeDisk(random.Random(0))
    _, second = stores_with_one_block(disk, clock)
    second.forget(0, key_of(1))
    put(second, 1)
    follow(second, disk, clock)
    put(second, 2, 3)
    assert second.find(0, key_of(1)) is None


def test_a_block_of_two_other_writers_is_found_while_one_has_it(clock: list[float]) -> None:
    disk = FakeDisk(random.Random(0))
    first, second = stores_with_one_block(disk, clock)
    reader = beside(disk, clock, read_only=True)
    follow(reader, disk, clock)
    put(second, 2, 3)
    follow(reader, disk, clock)
    found = reader.find(0, key_of(1))
    assert found is not None and found.writer == first._files.writer


def test_a_block_that_another_engine_forgets_is_not_read(clock: list[float]) -> None:
    disk = FakeDisk(random.Random(0))
    first, second = beside(disk, clock), beside(disk, clock)
    put(first, 1, 2)
    follow(second, disk, clock)
    first.forget(0, key_of(1))
    while first.work():
        pass
    assert get(second, 2) == [payload_of(2)]
    assert get(second, 1) == []


def test_a_store_that_has_ended_takes_no_blocks_of_others(clock: list[float]) -> None:
    disk = FakeDisk(random.Random(0))
    first, second = beside(disk, clock), beside(disk, clock)
    put(first, 1)
    clock[0] = 1.5
    second.work()
    second.stop("the weights were replaced")
    second.poll()
    follow(second, disk, clock)
    assert second.num_blocks == 0


def test_another_process_takes_the_place_of_a_removed_writer(tmp_path: Path) -> None:
    clock = [0.0]
    directory = str(tmp_path / "store")
    first = KVStore(open_files(OsDisk(directory), read_only=False), 1e9, lambda: clock[0], threaded=False)
    second = KVStore(open_files(OsDisk(directory)), 1e9, lambda: clock[0], threaded=False)
    put(second, 1)
    follow(first, FakeDisk(random.Random(0)), clock)
    assert get(first, 1) == [payload_of(1)]
    second.close()
    for name in ("index-1-0", "blocks-1-0"):
        (tmp_path / "store" / "model" / name).unlink()
    third = KVStore(open_files(OsDisk(directory)), 1e9, lambda: clock[0], threaded=False)
    put(third, 2, 3)
    assert third._files.writer == 1
    for _ in range(2):
        follow(first, FakeDisk(random.Random(0)), clock)
    assert get(first, 2, 3) == [payload_of(2), payload_of(3)]


def test_a_block_that_another_writer_has_moved_is_found_at_its_new_place(clock: list[float]) -> None:
    disk = FakeDisk(random.Random(0))
    first, second = beside(disk, clock, nbytes=2 * (BYTES + record_bytes(BLOCK))), beside(disk, clock)
    put(first, 1, 2)
    follow(second, disk, clock)
    for number in (3, 4, 2):  # block 2 moves from the second slot to the first
        put(first, number)
    follow(second, disk, clock)
    assert get(second, 4, 2) == [payload_of(4), payload_of(2)]


def survey(store: KVStore, clear: str = "") -> dict[str, int]:
    store.survey(clear)
    assert store.is_surveying
    while store.work():
        pass
    assert store.take_surveys() == 1 and not store.is_surveying
    return store.report().namespaces


def test_a_namespace_is_emptied_and_can_be_filled_again() -> None:
    disk = FakeDisk(random.Random(0))
    other = open_store(disk, "other", nbytes=4 * (BYTES + record_bytes(BLOCK)))
    put(other, 1, 2)
    other.close()
    store = open_store(disk, nbytes=40_000)
    put(store, 1, 2)
    before = survey(store)
    assert set(before) == {"other", "model"} and before["other"] > 0
    store.put(0, key_of(3), key_of(2), b"", payload_of(3))  # on its way
    assert survey(store, "own") == before, "the space stays reserved"
    assert (store.num_blocks, store.report().own_blocks) == (0, 0)
    assert not any(any(data) for name, data in disk.files.items() if "model/blocks" in name)
    put(store, 4, 5, 6, 7)
    assert get(store, 4, 5, 6, 7) == [payload_of(number) for number in (4, 5, 6, 7)]
    disk.close()
    assert open_store(disk, "other").num_blocks == 2
    disk.close()
    again = open_store(disk, nbytes=40_000)
    assert set(survey(again, "all")) == {"model"}


def test_files_that_another_process_writes_are_not_emptied() -> None:
    disk = FakeDisk(random.Random(0))
    running, store = open_store(disk), open_store(disk)
    put(running, 1)
    survey(store, "all")
    assert get(running, 1) == [payload_of(1)]


def test_nothing_is_written_while_a_namespace_is_emptied() -> None:
    store = open_store(FakeDisk(random.Random(0)))
    store.survey("own")
    assert not store.wants(0, key_of(1))
    while store.work():
        pass
    store.poll()
    assert store.wants(0, key_of(1))


def test_engines_that_start_again_keep_their_numbers(tmp_path: Path) -> None:
    for _ in range(2):
        stores = [open_store(OsDisk(str(tmp_path / "store"))) for _ in range(3)]
        assert [store._files.writer for store in stores] == [0, 1, 2]
        for store in stores:
            store.close()
