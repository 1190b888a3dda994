"""A soak test with a verdict: ``python -m tests.e2e.soak --minutes 120``.

A server with HashLM gets an open-loop mix of requests (chats with common beginnings, long prompts, several outputs,
stop strings, bursts, one in ten cancelled, one in fifty invalid), and every response is compared with the oracle. Each
minute gives one sample of memory, descriptors, threads, tasks, blocks and latency. At the start, at the end, and at the
end of each hour, the load pauses; the server must then hold the same resources as at the start. At the end the samples
are checked:

- memory of both processes: its growth in the last half of the run, when the allocator has settled. The growth per
  request is the Theil-Sen slope: the median of all slopes between two samples, so that no single minute decides. The
  limit is 50 bytes per request, but at least 8 MiB in total, which the allocator may keep or release at any time, and
  at most 100 MiB. Growth in a single step is not a leak. A run with fewer than 84,000 requests in its last half cannot
  detect a leak of 100 bytes per request, and reports this; it detects larger leaks;
- latency: the p99 of the last third is at most 1.05 times the p99 of the first third, plus 5 ms of noise;
- golden outputs: reference requests at the beginning and at the end get exactly the oracle's outputs;
- resources: the server holds as many descriptors, threads, tasks and blocks as at the beginning.

The exit code is 0 if all checks pass, otherwise 1.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import random
import statistics
import sys
import time
from itertools import combinations
from pathlib import Path

from tests.e2e.load import Ask, Client, Cut, End, History, Violation, percentile, until
from tests.e2e.server_process import Held, ServerProcess

MAX_BYTES_PER_REQUEST = 50
"""Maximum growth of a server's memory after its warm-up, in bytes per request. Normally it grows by 20 to 40."""
LEAK_BYTES_PER_REQUEST = 100
"""Size of a leak, in bytes per request, that a run must be able to detect."""
NOISE_BYTES = 8 * 2**20
"""Bytes of memory that the allocator may keep or release at any time."""
MAX_GROWTH = 100 * 2**20
MAX_DRIFT, NOISE_SECONDS = 1.05, 0.005
GOLDEN = [Ask(prompt=f"golden {i}", max_tokens=60, seed=i, chat=i % 2 == 0, n=1 + i % 3) for i in range(8)]


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """Measurements of the server in one minute of a soak test."""

    requests: int
    """Number of requests served since the start."""
    server_bytes: int
    """Private (anonymous) resident memory of the API process, in bytes."""
    engine_bytes: int
    p50: float
    """Median time of a request, in seconds."""
    p99: float


class Soak:
    """One run of the soak test against one server."""

    def __init__(self, server: ServerProcess, rate: float, seed: int) -> None:
        self.server = server
        self.client = Client(server.port)
        self.rng = random.Random(seed)
        self.rate = rate
        self.samples: list[Sample] = []
        self.served = 0
        self.ends: dict[str, int] = {}

    async def run(self, minutes: float, sample_seconds: float) -> None:
        """Run the load, and take a sample every ``sample_seconds``."""
        end = time.monotonic() + 60 * minutes
        while time.monotonic() < end:
            self.client.history = history = History()
            await self.load(sample_seconds)
            history.check(End.REFUSED, refusals=("invalid_value", "model_not_found", "rate_limit_exceeded"))
            self.served += len(history.submits)
            for kind, count in history.counts().items():
                self.ends[kind] = self.ends.get(kind, 0) + count
            times = [submit.seconds for submit in history.of(End.ANSWERED)]
            engine = anonymous_bytes(self.server.engine())
            sample = Sample(
                self.served,
                anonymous_bytes(self.server.pid),
                engine,
                percentile(times, 0.5),
                percentile(times, 0.99),
            )
            self.samples.append(sample)
            print(
                f"{self.served:8,} requests  server {sample.server_bytes / 2**20:6.1f} MiB "
                f" engine {sample.engine_bytes / 2**20:6.1f} MiB "
                f" p50 {1000 * sample.p50:6.1f} ms  p99 {1000 * sample.p99:6.1f} ms",
                flush=True,
            )

    async def load(self, seconds: float) -> None:
        """Send requests at random times (Poisson) with bursts, independent of the responses."""
        tasks: set[asyncio.Task[object]] = set()
        start = time.monotonic()
        due = 0.0
        while due < seconds:
            due += self.rng.expovariate(self.rate)
            await asyncio.sleep(max(0.0, start + due - time.monotonic()))
            for _ in range(20 if self.rng.random() < 0.002 else 1):
                task: asyncio.Task[object] = asyncio.create_task(self.one())
                tasks.add(task)
                task.add_done_callback(tasks.discard)
        await asyncio.gather(*tasks)

    async def one(self) -> None:
        ask = Ask.draw(self.rng)
        kind = self.rng.random()
        if kind < 0.02:
            await Client(self.client.port, "no-such-model", self.client.history).ask(ask)
        elif kind < 0.12:
            await self.client.ask(ask, cut=self.rng.choice(list(Cut)), after=self.rng.randint(-1, 6))
        elif kind < 0.15:
            await self.client.ask(dataclasses.replace(ask, prompt=ask.prompt * 20, max_tokens=8))
        else:
            await self.client.ask(ask)

    async def golden(self) -> str:
        """Send the reference requests. Returns a description of outputs that differ from the oracle's; empty if all are
        equal."""
        asks = [await self.client.ask(ask) for ask in GOLDEN]
        return "; ".join(f"golden question {s.ask.seed}: {s.end} {s.reason}" for s in asks if s.end is not End.ANSWERED)

    async def rest(self, before: Held | None = None) -> Held:
        """Wait at most a minute until nothing runs and the server holds no more than ``before``. Returns the held
        resources."""
        found = Held(0, 0, 0, 0)

        async def quiet() -> bool:
            nonlocal found
            metrics = await self.client.metrics()
            found = self.server.held(int(metrics["event_loop_tasks"]))
            running = metrics["num_requests_running"] or metrics["num_requests_waiting"]
            return not running and (before is None or more(before, found) == [])

        with contextlib.suppress(Violation):
            await until(quiet, 60.0, look=0.2)
        return found


def more(before: Held, after: Held) -> list[str]:
    """Resources of which ``after`` has more than ``before``."""
    names = [field.name for field in dataclasses.fields(Held)]
    pairs = [(name, getattr(before, name), getattr(after, name)) for name in names]
    return [f"{name}: {was} before, {now} after" for name, was, now in pairs if now > was]


def anonymous_bytes(pid: int) -> int:
    """Private memory of a process in bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"the kernel does not tell the memory of process {pid}")


def theil_sen(points: list[tuple[float, float]]) -> float:
    """The median of the slopes between all pairs of points (Theil, 1950; Sen, 1968)."""
    slopes = [(y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in combinations(points, 2) if x2 != x1]
    return statistics.median(slopes) if slopes else 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Growth:
    """Growth of one process's memory in the last half of the samples, when the allocator has settled."""

    name: str
    slope: float
    """Growth in bytes per request."""
    least: float
    """The samples are divided into two halves, and each half has a slope; this is the lower slope. A leak is in both
    halves; a step of the allocator is only in one."""
    requests: int

    @classmethod
    def of(cls, name: str, samples: list[Sample]) -> Growth:
        """Compute the growth of ``server_bytes`` or ``engine_bytes``."""
        points = [(float(sample.requests), float(getattr(sample, name))) for sample in samples[len(samples) // 2 :]]
        middle = len(points) // 2
        least = min(theil_sen(points[: middle + 1]), theil_sen(points[middle:]))
        return cls(name, theil_sen(points), least, int(points[-1][0] - points[0][0]))

    @property
    def bytes(self) -> float:
        return self.slope * self.requests

    @property
    def too_much(self) -> bool:
        limit = min(MAX_GROWTH, max(NOISE_BYTES, MAX_BYTES_PER_REQUEST * self.requests))
        return self.bytes > limit and self.least * self.requests > limit / 2

    @property
    def told(self) -> bool:
        """Whether there were enough requests to detect a leak."""
        return self.too_much or LEAK_BYTES_PER_REQUEST * self.requests > NOISE_BYTES

    def __str__(self) -> str:
        return (
            f"{self.name} grow by {self.slope:.0f} bytes per request, {self.bytes / 2**20:.1f} MiB in the last"
            f" {self.requests:,} requests" + ("" if self.told else ": too short to tell")
        )


def growths(samples: list[Sample]) -> list[Growth]:
    """Memory growth of the API process and of the engine."""
    return [Growth.of(name, samples) for name in ("server_bytes", "engine_bytes")]


def verdict(samples: list[Sample], before: Held, after: Held) -> list[str]:
    """Faults that the run found; empty if there are none. The latency of the first quarter is ignored as warm-up."""
    print(*growths(samples), sep="\n")
    wrong = [str(growth) for growth in growths(samples) if growth.too_much]
    warm = samples[len(samples) // 4 :]
    third = max(1, len(warm) // 3)
    first, last = (statistics.median(s.p99 for s in part) for part in (warm[:third], warm[-third:]))
    print(f"p99: {1000 * first:.1f} ms at the beginning, {1000 * last:.1f} ms at the end")
    if last > first * MAX_DRIFT + NOISE_SECONDS:
        wrong.append(f"the p99 drifted from {1000 * first:.1f} to {1000 * last:.1f} ms")
    wrong += more(before, after)
    return wrong


async def soak(minutes: float, rate: float, seed: int, sample_seconds: float) -> tuple[list[str], list[Sample]]:
    """Run a soak test. Returns (faults, samples)."""
    with ServerProcess("hashlm:2ms", "--served-model-name", "hashlm", "--status-interval", "0") as server:
        run = Soak(server, rate, seed)
        wrong = [await run.golden()]
        # Template workers start when several chats arrive at once. They are then kept, so they must have started before
        # the first sample.
        for _ in range(5):
            await asyncio.gather(*[run.client.ask(GOLDEN[0]) for _ in range(12)])
        await run.load(2.0)
        before = await run.rest()
        left = minutes
        while left > 0:
            await run.run(min(60.0, left), sample_seconds)
            left -= 60.0
            pause = await run.rest(before)
            print(f"at rest: {pause}", flush=True)
        wrong += [*verdict(run.samples, before, await run.rest(before)), await run.golden()]
        print(f"ended: {run.ends}")
        server.terminate()
        code = await server.ended()
        if code:
            wrong.append(f"the server ended with exit code {code}")
        return [each for each in wrong if each], run.samples


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=120.0, help="(default: 120)")
    parser.add_argument("--rate", type=float, default=30.0, help="requests per second (default: 30)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sample-seconds", type=float, default=60.0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    wrong, samples = asyncio.run(soak(args.minutes, args.rate, args.seed, args.sample_seconds))
    for each in wrong:
        print(f"WRONG: {each}")
    told = all(growth.told for growth in growths(samples))
    print("verdict:", "not good" if wrong else "good" if told else "good, but too short to tell whether memory grows")
    if args.json is not None:
        record = {"processors": os.cpu_count(), "arguments": vars(args) | {"json": None}, "wrong": wrong}
        args.json.write_text(
            json.dumps(record | {"samples": [dataclasses.asdict(s) for s in samples]}, indent=1) + "\n"
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
