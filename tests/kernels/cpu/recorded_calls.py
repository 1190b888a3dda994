"""Calls of the kernels, recorded with all memory that they read and the memory that they left behind.

``replay.cpp`` makes a recorded call again on another processor and compares the memory. A file has, in 64-bit integers
of little-endian byte order unless said otherwise: the function (0: cl_run, 1: cl_head, 2: cl_sample), the number of
threads, and four lists, each after its length. Regions of memory: address modulo 64, bytes of an element (2: bf16, 4:
float32, 1: anything else), 1 if the contents after the call do not matter, size, then the bytes. Pointers in regions:
region, offset, region and offset to which it points. Arguments after the pool: 1, region and offset, or 0, the number
and 0. Regions that the call changed: region, then the bytes. At last, the function's result.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from chairlift.kernels.cpu import library as lib

__all__ = ["recorded"]

FUNCTIONS = ("cl_run", "cl_head", "cl_sample")
ELEMENTS = {torch.bfloat16: 2, torch.float32: 4}


@contextlib.contextmanager
def recorded(folder: Path) -> Iterator[None]:
    """Write each call of the kernels to a file of ``folder``, until the context ends. Other calls are made as usual."""
    library = lib.require()
    real = {name: getattr(library, name) for name in FUNCTIONS}
    threads: dict[int, int] = {}
    begin = lib.ThreadPool.__init__

    def noted(pool: lib.ThreadPool, *args: Any, **kwargs: Any) -> None:
        begin(pool, *args, **kwargs)
        threads[pool.handle] = pool.num_threads

    def recording(name: str) -> Any:
        def call(pool: int, *args: Any) -> int:
            record = _Call(FUNCTIONS.index(name), threads.get(pool, 2))
            record.prepare(*args)
            record.snapshot()
            result: int = real[name](pool, *args)
            record.write(folder / f"{len(list(folder.iterdir())):05}-{name}.bin", result)
            return result

        return call

    gc.collect()
    gc.freeze()  # so that only what the context creates is looked through
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(lib.ThreadPool, "__init__", noted)
            for name in FUNCTIONS:
                patch.setattr(library, name, recording(name))
            yield
    finally:
        gc.unfreeze()


class _Arrays:
    """Address ranges of the arrays that exist: of ``everything``, or of new objects and of the callers' variables."""

    def __init__(self, everything: bool = False) -> None:
        objects = gc.get_objects()
        found = self._of(objects)
        if everything:  # the garbage collector does not track numpy's arrays, but what refers to them
            for each in objects:
                found |= self._of([one for one in gc.get_referents(each) if type(one) is np.ndarray])
        frame = sys._getframe(1)
        while frame is not None:
            found |= self._of(list(frame.f_locals.values()))
            frame = frame.f_back  # type: ignore[assignment]
        merged: list[tuple[int, int, int]] = []
        for start, end, element in sorted(found):
            if merged and start < merged[-1][1]:
                last = merged.pop()
                start, end, element = last[0], max(end, last[1]), element if element == last[2] else 1
            merged.append((start, end, element))
        self.ranges = merged
        self._starts = [start for start, _, _ in merged]

    @staticmethod
    def _of(objects: list[Any]) -> set[tuple[int, int, int]]:
        found = set()
        for each in objects:
            kind = type(each)
            if kind is torch.Tensor or kind is torch.nn.Parameter:
                storage = each.untyped_storage()
                if each.device.type == "cpu" and storage.nbytes():
                    start = storage.data_ptr()
                    found.add((start, start + storage.nbytes(), ELEMENTS.get(each.dtype, 1)))
            elif kind is np.ndarray and each.nbytes and each.flags.c_contiguous:
                start = each.ctypes.data
                found.add((start, start + each.nbytes, 4 if each.dtype == np.float32 else 1))
            elif issubclass(kind, ctypes.Array) and ctypes.sizeof(each):
                start = ctypes.addressof(each)
                found.add((start, start + ctypes.sizeof(each), 1))
        return found

    def around(self, address: int) -> tuple[int, int, int] | None:
        at = bisect.bisect_right(self._starts, address) - 1
        return self.ranges[at] if at >= 0 and address < self.ranges[at][1] else None


class _Call:
    def __init__(self, function: int, threads: int) -> None:
        self.function, self.threads = function, threads
        self.arrays = _Arrays()
        self.regions: list[tuple[int, int, int]] = []  # start, end, element
        self.scratch: set[int] = set()
        self.pointers: dict[int, int] = {}  # address of a pointer -> address to which it points
        self.arguments: list[tuple[int, int]] = []  # (1, address) or (0, number)
        self.vocab = 0

    # -- what is reachable -------------------------------------------------------------------------------------------

    def prepare(self, *args: Any) -> None:
        (self._run, self._head, self._sample)[self.function](*args)

    def _run(self, program: lib.Program, batch: lib.BatchStruct, first_op: int) -> None:
        self._program(program)
        self._batch(batch)
        self.arguments = [(1, ctypes.addressof(program)), (1, ctypes.addressof(batch)), (0, first_op)]

    def _head(self, program: Any, hidden: int, stride: int, token_rows: int, adapters: int | None, *rest: Any) -> None:
        num_rows, product, rows, logits, logits_rows = rest
        self._program(program)
        self.vocab = product.n
        self._op(ctypes.addressof(product))
        self._area(ctypes.addressof(product), ctypes.sizeof(product))
        self._array(hidden)
        self._area(token_rows, 4 * num_rows)
        if adapters:
            self._area(adapters, 4 * num_rows)
        self._rows(rows, num_rows)
        if logits:
            self._array(logits)
        self.arguments = [(1, ctypes.addressof(program)), (1, hidden), (0, stride), (1, token_rows)]
        self.arguments += [(1, adapters) if adapters else (0, 0), (0, num_rows), (1, ctypes.addressof(product))]
        self.arguments += [(1, rows), (1, logits) if logits else (0, 0), (0, logits_rows)]

    def _sample(self, logits: int, stride: int, num_rows: int, vocab: int, rows: int, isa: int) -> None:
        self.vocab = vocab
        self._array(logits)
        self._rows(rows, num_rows)
        self.arguments = [(1, logits), (0, stride), (0, num_rows), (0, vocab), (1, rows), (0, isa)]

    def _program(self, program: lib.Program) -> None:
        at = ctypes.addressof(program)
        self._area(at, ctypes.sizeof(program))
        sizes = {"ops": (lib.OpStruct, program.num_ops), "buffers": (ctypes.c_void_p, program.num_buffers)}
        sizes |= {"strides": (ctypes.c_int64, program.num_buffers), "rotary": (ctypes.c_void_p, program.num_rotary)}
        sizes |= {"kv_layers": (lib.KVLayer, program.num_kv_layers)}
        for name, (kind, count) in sizes.items():
            start = self._pointer(at + getattr(lib.Program, name).offset)
            if not start or not count:
                self.pointers.pop(at + getattr(lib.Program, name).offset, None)
                continue
            self._area(start, count * ctypes.sizeof(kind))
            for i in range(count):
                self._element(name, start + i * ctypes.sizeof(kind))
        for name in ("codes", "lora_rows"):
            start = self._pointer(at + getattr(lib.Program, name).offset)
            if start:
                self.scratch.add(self._array(start))
        for name, table in (("lora", lib.LowRankStruct), ("embeddings", lib.EmbeddingStruct)):
            start = self._pointer(at + getattr(lib.Program, name).offset)
            if start:
                end = self.regions[self._array(start)][1]
                for entry in range(start, end - ctypes.sizeof(table) + 1, ctypes.sizeof(table)):
                    self._fields(table, entry)

    def _element(self, name: str, address: int) -> None:
        if name == "ops":
            self._op(address)
        elif name == "kv_layers":
            self._fields(lib.KVLayer, address)
        elif name in ("buffers", "rotary") and (start := self._pointer(address)):
            self._array(start)

    def _op(self, address: int) -> None:
        self._fields(lib.OpStruct, address)
        experts = self._pointer(address + lib.OpStruct.experts.offset)
        if experts:
            self._area(experts, ctypes.sizeof(lib.Experts))
            self._fields(lib.Experts, experts)
            self.scratch.add(self._array(self._pointer(experts + lib.Experts.scratch.offset)))

    def _fields(self, kind: type[ctypes.Structure], address: int) -> None:
        """Follow all pointers of a struct whose type does not say to what they point."""
        for name, of in kind._fields_:  # type: ignore[misc]
            if of is ctypes.c_void_p and (start := self._pointer(address + getattr(kind, name).offset)):
                self._array(start)

    def _batch(self, batch: lib.BatchStruct) -> None:
        at, tokens, rows = ctypes.addressof(batch), batch.num_tokens, batch.num_rows
        tables = 4 * batch.num_groups * rows * batch.table_width
        sizes = {"token_ids": 4 * tokens, "positions": 4 * tokens, "cu_seqlens": 4 * rows + 4, "seq_lens": 4 * rows}
        sizes |= {"block_tables": tables, "slot_mapping": 8 * batch.num_groups * tokens, "axes": 12 * tokens}
        sizes |= {"adapters": 4 * tokens, "seen_ends": 4 * tokens}
        self._area(at, ctypes.sizeof(batch))
        for name, size in sizes.items():
            where = at + getattr(lib.BatchStruct, name).offset
            start = self._pointer(where)
            if start and size:
                self._area(start, size)
            else:
                self.pointers.pop(where, None)

    def _rows(self, address: int, count: int) -> None:
        kind = lib.SAMPLING_ROW
        assert kind.fields is not None
        self._area(address, count * kind.itemsize)
        rows = np.frombuffer(ctypes.string_at(address, count * kind.itemsize), kind)
        for i, row in enumerate(rows):
            sizes = {"history": row["history_len"], "allowed": row["num_allowed"], "bias_ids": row["num_bias"]}
            sizes |= {"bias": row["num_bias"], "masked": row["num_masked"], "mask_bits": -(-self.vocab // 32)}
            sizes |= dict.fromkeys(("top_ids", "top_logprobs"), row["num_logprobs"] + 1)
            for name, size in sizes.items():
                where = address + i * kind.itemsize + kind.fields[name][1]
                start = self._pointer(where)
                if start and size > 0:
                    self._area(start, 4 * int(size))
                else:
                    self.pointers.pop(where, None)

    def _pointer(self, address: int) -> int:
        to = ctypes.c_void_p.from_address(address).value or 0
        if to:
            self.pointers[address] = to
        return to

    def _area(self, start: int, size: int) -> None:
        self.regions.append((start, start + size, 1))

    def _array(self, address: int) -> int:
        found = self.arrays.around(address)
        if found is None:
            gc.unfreeze()
            self.arrays = _Arrays(everything=True)
            gc.freeze()
            found = self.arrays.around(address)
        assert found is not None, f"no array is at {address:#x}"
        if found not in self.regions:
            self.regions.append(found)
        return self.regions.index(found)

    # -- files -------------------------------------------------------------------------------------------------------

    def snapshot(self) -> None:
        """Copy the memory before the call, and give every byte one region."""
        scratch = {self.regions[i][0] for i in self.scratch}
        merged: list[tuple[int, int, int]] = []
        for start, end, element in sorted(self.regions):
            if merged and start < merged[-1][1]:
                last = merged.pop()
                start, end, element = last[0], max(last[1], end), max(last[2], element)
            merged.append((start, end, element))
        self.regions = merged
        self.scratch = {i for i, (start, _, _) in enumerate(merged) if start in scratch}
        self.before = [ctypes.string_at(start, end - start) for start, end, _ in merged]

    def _place(self, address: int) -> tuple[int, int]:
        at = bisect.bisect_right(self.regions, (address, 1 << 63, 0)) - 1
        start, end, _ = self.regions[at]
        assert start <= address <= end, f"no region has {address:#x}"
        return at, address - start

    def write(self, path: Path, result: int) -> None:
        parts: list[bytes] = []

        def put(*numbers: int) -> None:
            parts.append(np.array(numbers, np.int64).tobytes())

        put(self.function, self.threads, len(self.regions))
        for i, ((start, end, element), content) in enumerate(zip(self.regions, self.before, strict=True)):
            put(start % 64, element, int(i in self.scratch), end - start)
            parts.append(content)
        pointers = [(self._place(where), self._place(to)) for where, to in self.pointers.items()]
        put(len(pointers))
        for where, to in pointers:
            put(*where, *to)
        put(len(self.arguments))
        for is_address, value in self.arguments:
            put(is_address, *(self._place(value) if is_address else (value, 0)))
        changed = []
        for i, (start, end, _) in enumerate(self.regions):
            after = ctypes.string_at(start, end - start)
            if i not in self.scratch and after != self.before[i]:
                changed.append((i, after))
        put(len(changed))
        for i, after in changed:
            put(i)
            parts.append(after)
        put(result)
        path.write_bytes(b"".join(parts))
