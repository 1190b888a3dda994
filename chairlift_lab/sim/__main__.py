"""Run simulated worlds: ``python -m chairlift_lab.sim --seeds 1000``, or a single world with ``--seed 17``."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from chairlift_lab.sim.minimise import failure_of, minimise
from chairlift_lab.sim.simulator import Violation, run_world
from chairlift_lab.sim.world import make_world

__all__ = ["main", "report", "run_seeds"]


def report(seed: int) -> str | None:
    """Run the world of ``seed``. Returns None if all checks pass.

    Otherwise returns the message of the failed check, the events that the failure needs, and a command to reproduce it.
    """
    world = make_world(seed)
    failure = failure_of(world)
    if failure is None:
        return None
    small = minimise(world)
    lines = [f"seed {seed}: {failure}", f"with {len(small.events)} of {len(world.events)} events: {failure_of(small)}"]
    settings = {name: getattr(world, name) for name in ("block_size", "windows", "num_blocks", "max_model_len")}
    lines += [
        f"  {settings} {world.scheduler}",
        f"  prefix caching {world.enable_prefix_caching}, hash {world.hash_bits}",
    ]
    lines += [f"  {event}" for event in small.events]
    return "\n".join([*lines, f"replay: python -m chairlift_lab.sim --seed {seed}"])


def run_seeds(seeds: Sequence[int]) -> int:
    """Run the worlds of ``seeds`` up to the first failure, and print a report. Returns 1 for a failure, otherwise 0."""
    start = time.perf_counter()
    steps = 0
    for seed in seeds:
        try:
            steps += run_world(make_world(seed)).num_steps
        except Violation:
            print(report(seed))
            return 1
    print(f"{len(seeds)} seeds, {steps} steps, no violation, {time.perf_counter() - start:.1f} s")
    return 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m chairlift_lab.sim", description=__doc__)
    parser.add_argument("--seed", type=int, help="run only this seed, and show how it fails")
    parser.add_argument("--seeds", type=int, default=1000, help="number of seeds to run (default 1000)")
    parser.add_argument("--first", type=int, default=0, help="first seed (default 0)")
    args = parser.parse_args(argv)
    return run_seeds([args.seed] if args.seed is not None else range(args.first, args.first + args.seeds))


if __name__ == "__main__":
    sys.exit(main())
