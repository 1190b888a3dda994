"""Measures the scheduler's time per step: ``schedule`` plus ``update`` when all rows decode, with an executor that does
nothing.

    python benchmarks/step_overhead.py [--rows 128 1024] [--steps 2000] [--policy priority --waiting 500] [--json FILE]

The time includes stop checks, block allocation, block hashing for the prefix cache and the step record, but not HTTP,
detokenizing and the forward pass. The script prints the median, the mean and the 99th percentile in microseconds, over
all steps in which every row decodes. With ``--waiting N``, N requests of four tenants and three classes are always in
the queue. None of them may take the row of a running request.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time

from chairlift.config import CacheGroup, EngineConfig
from chairlift.core.kv_cache.manager import KVCacheManager
from chairlift.core.request import Request, Service
from chairlift.core.scheduler.policies import policy_from_config
from chairlift.core.scheduler.scheduler import Scheduler
from chairlift.engine.step_log import StepLog, StepRecord


def measure(rows: int, steps: int, policy: str, waiting: int, prompt: int = 40) -> dict[str, float | str]:
    """Microseconds per step with ``rows`` decoding requests and ``waiting`` requests in the queue."""
    kv = KVCacheManager([CacheGroup(rows * (-(-(prompt + steps + 64) // 16)) + 2)], 16, max_step_tokens=1 << 20)
    settings = {"scheduling_policy": policy, "max_num_seqs": rows, "ageing_seconds": 1e6}
    scheduler = Scheduler(
        kv,
        max_num_seqs=rows,
        max_num_batched_tokens=1 << 20,
        max_model_len=1 << 20,
        policy=policy_from_config(EngineConfig.from_flat(settings).scheduler),
    )
    for i in range(rows):
        ids = [
            (i * 7919 + j * 104729) % 32000 for j in range(prompt + i % 16)
        ]  # block boundaries are spread over the steps
        scheduler.add(Request(f"r{i}", ids, max_tokens=steps + 32, stop_token_ids=frozenset({32001})))
    for i in range(waiting):
        service = Service(("default", "flex", "priority")[i % 3], f"tenant {i % 4}")
        scheduler.add(Request(f"w{i}", [5] * prompt, max_tokens=steps, priority=1 + i % 3, service=service))
    log = StepLog(4096)
    first = scheduler.schedule(0.0)
    scheduler.update(first, [7] * rows, 0.0)
    micros = []
    for step in range(steps):
        tokens = [(step * 31 + row) % 32000 for row in range(rows)]
        begin = time.perf_counter()
        out = scheduler.schedule(float(step))
        result = scheduler.update(out, tokens, float(step))
        log.landed(StepRecord.of(out, result, float(step), float(step)))
        micros.append((time.perf_counter() - begin) * 1e6)
        if out.num_decodes != rows:
            raise SystemExit(f"step {step} had {out.num_decodes} decode rows instead of {rows}")
    micros.sort()
    return {
        "rows": rows,
        "steps": steps,
        "policy": policy,
        "waiting": waiting,
        "median_us": round(statistics.median(micros), 1),
        "mean_us": round(statistics.fmean(micros), 1),
        "p99_us": round(micros[int(len(micros) * 0.99)], 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[128, 1024])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--policy", default="fcfs")
    parser.add_argument("--waiting", type=int, default=0)
    parser.add_argument("--json", help="append the results to this file")
    args = parser.parse_args()
    results = [measure(rows, args.steps, args.policy, args.waiting) for rows in args.rows]
    for result in results:
        print("  ".join(f"{key} {value}" for key, value in result.items()))
    if args.json:
        record = {"python": platform.python_version(), "machine": platform.processor() or platform.machine()}
        with open(args.json, "a", encoding="utf-8") as file:
            file.write(json.dumps(record | {"results": results}) + "\n")


if __name__ == "__main__":
    main()
