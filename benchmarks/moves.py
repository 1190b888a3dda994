"""Measures how long streams pause when their replica is drained and they move to another one with their KV.

    python benchmarks/make_random_model.py /tmp/smollm --shape smollm-135m
    python benchmarks/moves.py --model /tmp/smollm --json benchmarks/results/moves.json

``--streams`` requests with prompts of ``--length`` tokens run on one of two replicas. When each has ``--begun`` tokens,
the replica is drained. The pause of a stream is its longest time between two tokens during the drain; a step is the
median time between two tokens before it. The same requests then run once more without a drain, and every stream must
have the same tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from chairlift import SamplingParams, __version__
from chairlift.config import EngineConfig
from chairlift.engine.async_engine import AsyncEngine
from chairlift.fleet.fleet import Fleet
from chairlift.fleet.local import local_replicas
from chairlift.loading.model import read_tokenizer

if __package__:
    from benchmarks.offline import cpu_name
else:
    from offline import cpu_name


class Stream:
    """Token ids of one request, and when they came."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.times: list[float] = []

    async def read(self, engine: AsyncEngine, prompt: list[int], params: SamplingParams) -> None:
        async for output in await engine.submit(prompt, params):
            for each in output.outputs:
                self.token_ids += each.token_ids
                self.times += [time.monotonic()] * len(each.token_ids)

    def gaps(self, begin: float, end: float) -> list[float]:
        """Seconds between two tokens, of those of which the later one came between ``begin`` and ``end``."""
        pairs = zip(self.times, self.times[1:], strict=False)
        return [later - earlier for earlier, later in pairs if begin <= later <= end]


async def run(args: argparse.Namespace, fleet: Fleet, engine: AsyncEngine, drains: bool) -> tuple[list[Stream], Any]:
    """The streams, and (begin, end) of the drain."""
    rng = random.Random(1)
    members = fleet.replicas
    source, other = members.everyone
    await members.drain(other, None)  # so that all requests begin on one replica
    streams = [Stream() for _ in range(args.streams)]
    jobs = []
    for number, stream in enumerate(streams):
        prompt = [rng.randrange(3000) for _ in range(args.length)]
        params = SamplingParams(max_tokens=args.tokens, ignore_eos=True, temperature=1.0, seed=number)
        jobs.append(asyncio.create_task(stream.read(engine, prompt, params)))
    while min(len(each.token_ids) for each in streams) < args.begun:
        await asyncio.sleep(0.01)
    members.undrain(other)
    begin = time.monotonic()
    if drains:
        await members.drain(source, 120.0, move=True)
    end = time.monotonic()
    await asyncio.gather(*jobs)
    members.undrain(source)
    return streams, (begin, end)


async def measure(args: argparse.Namespace, directory: str) -> dict[str, Any]:
    settings = {"model": args.model, "skip_tokenizer_init": True, "max_num_seqs": 2 * args.streams}
    settings |= {"kv_store": directory, "threads": args.threads, "enable_prefix_caching": True}
    config = EngineConfig.from_flat(settings)
    made: list[Fleet] = []

    def connect(engine: AsyncEngine) -> Fleet:
        made.append(Fleet(config, engine, local_replicas(config, 2), replicas=2))
        return made[-1]

    engine = AsyncEngine.start(config, read_tokenizer=read_tokenizer, connect=connect)
    try:
        await engine.wait_ready()
        await asyncio.sleep(args.settle)  # the model's files are read before the store is open
        moved, (begin, end) = await run(args, made[0], engine, True)
        moves = dict(engine.stats.moves)
        still, _ = await run(args, made[0], engine, False)
    finally:
        await engine.shutdown()
    for number, (one, two) in enumerate(zip(moved, still, strict=True)):
        if one.token_ids != two.token_ids:
            raise SystemExit(f"stream {number} has other tokens after its move")
    step = statistics.median([gap for each in moved for gap in each.gaps(begin - 2.0, begin)])
    pauses = sorted(max(each.gaps(begin, end + 1.0)) for each in moved)
    p99 = pauses[min(len(pauses) - 1, round(0.99 * (len(pauses) - 1)))]
    print(f"{args.streams} streams moved: {moves}; the drain took {end - begin:.2f} s")
    print(f"step {1e3 * step:.1f} ms; pause median {1e3 * statistics.median(pauses):.1f} ms, p99 {1e3 * p99:.1f} ms")
    print(f"p99 beyond a step: {1e3 * (p99 - step):.1f} ms; all tokens are those of streams that did not move")
    return {"step": step, "pauses": pauses, "drain": end - begin, "moves": moves}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--begun", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--settle", type=float, default=5.0, help="seconds to wait until the store is open")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        result = asyncio.run(measure(args, directory))
    if args.json is not None:
        facts = {"cpu": cpu_name(), "version": __version__, "model": args.model, "streams": args.streams}
        args.json.write_text(json.dumps({**facts, "length": args.length, **result}, indent=1) + "\n")


if __name__ == "__main__":
    main()
