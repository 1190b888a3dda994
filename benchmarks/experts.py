"""A layer of experts on the native CPU kernels, compared with the minimum time that the machine needs for its bytes and
operations.

    python benchmarks/experts.py                            # 32 experts, 4 chosen, bfloat16, 768 MiB
    python benchmarks/experts.py --kind int4 --rows 1,16

The minimum time counts the bytes of the distinct experts that the rows of a run chose, and the operations of all rows.
Memory bandwidth and peak arithmetic speed are measured between the runs, because other programs may use the machine.
The script needs the compiled kernels.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from typing import Any

import numpy as np
import torch

from chairlift.base.step_batch import StepBatch
from chairlift.kernels import ops
from chairlift.kernels.cpu import library as lib
from chairlift.kernels.cpu.program import StepProgram
from chairlift.kernels.experts import route
from chairlift.kernels.recording import Recorder
from chairlift.kernels.roof import product_kind
from chairlift.kernels.routing import Routing
from chairlift.kernels.weights import NATIVE, QUANTIZED, MatrixShape

_TABLE_ROWS = 4096
"""Number of random rows from which the rows of each run are drawn."""


def main() -> None:
    """Print a line for each number of rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--chosen", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--inner", type=int, default=2048)
    parser.add_argument("--kind", choices=["float32", "bfloat16", "int8", "int4"], default="bfloat16")
    parser.add_argument("--rows", default="1,4,16,64")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=lib.default_threads())
    args = parser.parse_args()
    dtype = torch.float32 if args.kind == "float32" else torch.bfloat16
    routing = Routing(num_experts=args.experts, top_k=args.chosen, normalise=True)
    shapes = [
        MatrixShape(args.experts * 2 * args.inner, args.hidden, True, stack=args.experts),
        MatrixShape(args.experts * args.hidden, args.inner, stack=args.experts),
    ]
    weights = QUANTIZED.get(args.kind, NATIVE).empty(shapes, dtype, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    for weight, shape in zip(weights, shapes, strict=True):
        rows = shape.out_features // args.experts
        for first in range(0, shape.out_features, rows):
            weight.pack_rows(torch.randn(rows, shape.in_features, generator=generator) * 0.02, first)
    table = torch.randn(_TABLE_ROWS, args.hidden, generator=generator).to(dtype)
    router = torch.randn(args.experts, args.hidden, generator=generator).to(dtype)
    chosen = route(table.float() @ router.float().T, routing)[1]
    counts = [int(count) for count in args.rows.split(",")]
    pool, isa = lib.ThreadPool(args.threads), lib.best_isa()
    recorder: Any = Recorder(dtype)
    x = ops.embedding(recorder.token_ids, table)
    out: Any = ops.experts(x, None, *weights, router, routing)
    program = StepProgram(recorder, out, [], pool, isa=isa, max_tokens=max(counts))
    nbytes = sum(weight.memory.nbytes for weight in weights)
    size = f"{args.hidden} to {args.inner}, {args.kind}, {nbytes / 2**20:,.0f} MiB"
    print(f"{routing.words}, {size}, {isa}, {args.threads} threads")
    print(f"{'rows':>5} {'distinct':>8} {'time':>10} {'floor':>10} {'share':>6}")
    for count in counts:
        _measure(count, args, program, chosen, (pool, isa), nbytes)
    pool.close()


def _measure(
    count: int, args: argparse.Namespace, program: StepProgram, chosen: torch.Tensor, machine: Any, nbytes: int
) -> None:
    """Time runs of ``count`` rows, with different rows in each run, and print one line."""
    (pool, isa), library, rng = machine, lib.require(), random.Random(count)
    memory = lib.Memory(256 << 20)
    memory.tensor(torch.uint8, (memory.nbytes,)).fill_(1)
    found = []
    for repeat in range(args.repeats + 1):
        rows = rng.sample(range(_TABLE_ROWS), count)
        step = _step(rows)
        begin = time.perf_counter()
        program.run(step)
        seconds = time.perf_counter() - begin
        bandwidth = library.cl_measure_read(pool.handle, memory.address, memory.nbytes)
        kind = product_kind(isa, {"float32": torch.float32, "bfloat16": torch.bfloat16}.get(args.kind, torch.int8))
        peak = library.cl_measure_peak(pool.handle, lib.ISA_NAMES.index(isa), lib.PRODUCTS.index(kind), 0.01)
        touched = len(chosen[rows].unique())
        operations = 2 * count * args.chosen * 3 * args.hidden * args.inner
        floor = max(touched * nbytes / args.experts / bandwidth, operations / peak)
        if repeat:
            found.append((touched, seconds, floor, floor / seconds))
    distinct, seconds, floor, share = (statistics.median(each) for each in zip(*found, strict=True))
    print(f"{count:5} {distinct:8.0f} {seconds * 1e3:7.2f} ms {floor * 1e3:7.2f} ms {share:6.0%}", flush=True)


def _step(rows: list[int]) -> StepBatch:
    count = len(rows)
    spans = (np.array(each, dtype=np.int32) for each in (rows, range(count), [0, count], [count]))
    return StepBatch(*spans, np.zeros((0, 1, 0), dtype=np.int32), np.zeros((0, count), dtype=np.int64))


if __name__ == "__main__":
    main()
