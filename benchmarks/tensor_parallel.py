"""Decode steps of a model on several processes of one thread each, against one process with as many threads.

    python benchmarks/tensor_parallel.py                                  # 1 and 16 rows, 2 processes
    python benchmarks/tensor_parallel.py --rows 1 4 16 --processes 2 --json tensor_parallel.json
    python benchmarks/tensor_parallel.py --meetings                       # the time of a meeting, without a model

A model of a real shape with random weights in bfloat16 is loaded three times: in one process with one thread, in one
process with ``--processes`` threads, and on ``--processes`` processes of one thread. Each decodes the same rows. Steps
of the three take turns, in rounds of random order. Results are the median time of a step, and the median ratios within
the rounds. On one socket, the processes share what the threads share, so a ratio of 1 means that the division costs
nothing. A gain needs a machine with several memory nodes.

With ``--meetings``, two processes meet many times. Then they exchange rows of several sizes, as layers do: each writes
its half to shared memory, they meet, and each reads the half of the other. The same number of bytes is copied within
one process for comparison.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.make_random_model import make
from chairlift import LLM, SamplingParams
from chairlift.kernels.cpu.communicator import Communicator, shared_file
from chairlift_lab.bench.machine import describe_machine


def prepare(llm: LLM, rows: int, prompt: int, steps: int) -> None:
    """Have the engine compute the prompts of ``rows`` requests, so that its next steps only decode."""
    rng = random.Random(rows)
    for seed in range(rows):
        text = [rng.randrange(2, 30_000) for _ in range(prompt)]
        llm.engine.add_request(text, SamplingParams(temperature=1.0, seed=seed, max_tokens=steps, ignore_eos=True))
    while True:
        llm.engine.step()
        step = llm.engine.step_log[-1].features
        if step.num_decodes == rows and not step.prefill_tokens:
            return


def finish(llm: LLM) -> list[tuple[int, ...]]:
    """Compute all other tokens. Returns the token ids of all requests."""
    found = []
    while llm.engine.has_unfinished:
        found += [each for each in llm.engine.step() if each.finished]
    return sorted(tuple(each.outputs[0].token_ids) for each in found)


def measure(engines: dict[str, LLM], rows: int, args: argparse.Namespace) -> dict[str, list[float]]:
    """Name -> seconds of each decode step."""
    rng = random.Random(rows)
    for llm in engines.values():
        prepare(llm, rows, args.prompt, args.rounds + 12)
    taken: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(args.rounds):
        for name in rng.sample(list(engines), len(engines)):
            begin = time.perf_counter()
            engines[name].engine.step()
            taken[name].append(time.perf_counter() - begin)
    texts = [finish(llm) for llm in engines.values()]
    if any(each != texts[0] for each in texts):
        raise SystemExit("the engines gave different tokens")
    return {name: seconds[3:] for name, seconds in taken.items()}


def report(rows: int, taken: dict[str, list[float]]) -> dict[str, float]:
    """Print and return medians and the ratios within rounds: above 1, the processes are faster."""
    found = {f"{name} ms": 1e3 * statistics.median(seconds) for name, seconds in taken.items()}
    for name in ("threads", "one"):
        ratios = sorted(other / own for other, own in zip(taken[name], taken["processes"], strict=True))
        low, high = ratios[len(ratios) // 10], ratios[-1 - len(ratios) // 10]
        found[f"{name} / processes"] = statistics.median(ratios)
        found[f"{name} / processes, of minima"] = min(taken[name]) / min(taken["processes"])
        print(
            f"{rows} rows: {name} {found[f'{name} ms']:.2f} ms, processes {found['processes ms']:.2f} ms, ratio"
            f" {statistics.median(ratios):.3f} ({low:.3f} to {high:.3f}),"
            f" of minima {found[f'{name} / processes, of minima']:.3f}"
        )
    return found


SIZES = (2 << 10, 32 << 10, 512 << 10, 4 << 20)
"""Bytes of an exchange, half of them written by each process: one row of 1,024 bfloat16 numbers, 16, 256 and 2,048."""
BATCHES = 15


def times(work: Any, rounds: int) -> float:
    """Seconds of one call of ``work``: the best of a few batches of calls, so that other work of the machine counts
    little."""
    found = []
    for _ in range(BATCHES):
        begin = time.perf_counter()
        for _ in range(rounds):
            work()
        found.append((time.perf_counter() - begin) / rounds)
    return min(found)


def meet(file: int, rank: int, rounds: int) -> dict[str, float]:
    """What one of two processes measures, in seconds. Both must call it with the same ``rounds``."""
    processors = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {processors[rank % len(processors)]})
    comm = Communicator(file, rank, 2)
    alone = Communicator(shared_file(), 0, 1)
    comm.meet()
    found = {"call": times(alone.meet, rounds), "meeting": times(comm.meet, rounds)}
    for size in SIZES:
        halves = comm.array(np.uint8, (2, size // 2))
        own, into = np.ones(size // 2, np.uint8), np.empty(size // 2, np.uint8)

        def exchange(halves: Any = halves, own: Any = own, into: Any = into) -> None:
            halves[rank] = own
            comm.meet()
            into[:] = halves[1 - rank]
            comm.meet()

        found[f"exchange of {size >> 10} KiB"] = times(exchange, max(1, rounds // 20))
        source, target = np.ones(size, np.uint8), np.empty(size, np.uint8)
        comm.meet()
        if rank == 0:

            def copy(source: Any = source, target: Any = target) -> None:
                target[:] = source

            found[f"copy of {size >> 10} KiB"] = times(copy, max(1, rounds // 20))
        comm.meet()
    return found


def measure_meetings(rounds: int = 4000) -> dict[str, float]:
    """Print and return microseconds of meetings and exchanges between this process and a second one."""
    file = shared_file()
    child = os.fork()
    if child == 0:
        meet(file, 1, rounds)
        os._exit(0)
    found = {name: 1e6 * seconds for name, seconds in meet(file, 0, rounds).items()}
    os.waitpid(child, 0)
    print(f"a meeting takes {found['meeting']:.2f} us, of which {found['call']:.2f} us are the call from Python")
    for size in SIZES:
        name = f"{size >> 10} KiB"
        exchange, copy = found[f"exchange of {name}"], found[f"copy of {name}"]
        print(f"{name}: exchange {exchange:.1f} us, copy in one process {copy:.1f} us, ratio {exchange / copy:.2f}")
    return found


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen2.5-0.5b")
    parser.add_argument("--model", help="directory with a model; default: random weights of --shape")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--meetings", action="store_true", help="measure meetings of two processes, without a model")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.meetings:
        write(args.json, measure_meetings())
        return
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or str(make(Path(folder), args.shape))
        sizes: dict[str, Any] = {"max_num_seqs": max(args.rows), "max_model_len": 2048, "skip_tokenizer_init": True}
        sizes |= {"enable_prefix_caching": False, "kv_cache_memory_bytes": 1 << 30}
        settings = {
            "one": {"threads": 1},
            "threads": {"threads": args.processes},
            "processes": {"threads": args.processes, "tensor_parallel_size": args.processes},
        }
        engines = {name: LLM(model, **sizes, **own) for name, own in settings.items()}
        results = {str(rows): report(rows, measure(engines, rows, args)) for rows in args.rows}
        runner = engines["processes"].engine.core.executor._runner  # type: ignore[attr-defined]
        waited, meetings = runner.collective_seconds(), runner.meetings
        print(f"the first process waited {1e6 * waited / max(1, meetings):.1f} us in each of {meetings} meetings")
    write(args.json, results)


def write(path: Path | None, results: Any) -> None:
    """Write a record of the results, if a file is given."""
    if path is not None:
        path.write_text(json.dumps({"machine": dataclasses.asdict(describe_machine()), "results": results}, indent=1))


if __name__ == "__main__":
    main()
