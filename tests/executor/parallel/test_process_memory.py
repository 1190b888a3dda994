"""What each process of a divided model needs is compared with the memory of its node."""

from __future__ import annotations

from pathlib import Path

from chairlift.executor.parallel.process_memory import ProcessMemory, memory_notes, node_bytes, node_of

GIB = 1 << 30


def process(rank: int, node: int, gibibytes: float, of: int = 8) -> ProcessMemory:
    return ProcessMemory(
        rank=rank,
        processors=[0, 1, 2, 5],
        threads=4,
        node=node,
        node_bytes=of * GIB,
        weight_bytes=int(gibibytes * GIB),
        cache_bytes=GIB,
    )


def test_a_node_that_is_too_small_is_named() -> None:
    assert memory_notes([process(0, 0, 6.5), process(1, 1, 6.5)]) == []
    [note] = memory_notes([process(0, 0, 6.5), process(1, 1, 7.5)])
    assert note.startswith("memory node 1 has 8,192 MiB, but its processes of tensor_parallel_size (1) need 8,704 MiB")
    [note] = memory_notes([process(0, 0, 4), process(1, 0, 4)])
    assert "(0, 1) need 10,240 MiB" in note
    assert memory_notes([process(0, 0, 9, of=0)]) == []  # the system does not say


def test_a_process_is_described() -> None:
    words = process(0, 1, 2).words()
    assert (
        words
        == "2,048 MiB of weights and 1,024 MiB of cache on memory node 1 of 8,192 MiB; processors 0-2, 5, 4 threads"
    )


def test_nodes_are_read_from_the_system(tmp_path: Path) -> None:
    (tmp_path / "cpu/cpu3/node1").mkdir(parents=True)
    (tmp_path / "node/node1").mkdir(parents=True)
    (tmp_path / "node/node1/meminfo").write_text("Node 1 MemTotal:       1024 kB\nNode 1 MemFree:  5 kB\n")
    assert (node_of(3, tmp_path), node_of(4, tmp_path)) == (1, 0)
    assert (node_bytes(1, tmp_path), node_bytes(0, tmp_path)) == (1 << 20, 0)
