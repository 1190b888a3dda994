"""Measures the cost of the router process in front of replicas, and the accuracy of a simulated fleet of two
replicas.

    python benchmarks/fleet.py --json benchmarks/results/fleet.json

``door`` serves the same requests in turns with one engine process and with one replica behind the router. The model
is HashLM, with no time per step (so that the front end is the bottleneck) and with 5 ms per step. Each pair of rounds
gives the difference of the median times to the first token, and the ratio of tokens/s.

``ray`` (only with ``--only ray``, and with ``pip install 'ray[serve]'``) serves the same requests with an engine
process, with one replica behind the router, and with one replica as an actor of Ray, in turns. Beside them an echo of
Ray Serve sends as many numbers through a handle as an answer has tokens.

``simulation`` serves Poisson arrivals with two real replicas whose steps take a fixed time, and simulates the same
trace. The simulation gets the mean time of a step in that round, including the host's part, and the time that the front
end needs for a request that is alone. Results are simulated values divided by measured values.

``routing`` (only with ``--only routing``) sends the same traffic through the routers forecast, round robin and two
choices to two real replicas whose steps take a fixed time, and to one engine with the rows and the KV memory of both.
The traffic has chats of several turns, bursts, and a beginning that many prompts share. Printed are times to the first
token, the fraction of requests whose first token came within ten steps (goodput), and the fraction of prompt tokens
found in prefix caches.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import random
import statistics
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import uvloop

from chairlift.base.sampling_params import SamplingParams
from chairlift.config import EngineConfig
from chairlift.core.scheduler.cost_model import CostModel, StepFeatures
from chairlift.engine.async_engine import AsyncEngine
from chairlift.fleet.fleet import Fleet
from chairlift.fleet.local import local_replicas
from chairlift.fleet.member import ConnectReplica
from chairlift.loading.model import read_tokenizer
from chairlift_lab.bench.machine import describe_machine
from chairlift_lab.replay.fleet import FleetPlan, replay_fleet
from chairlift_lab.replay.machines import Deployment
from chairlift_lab.replay.traced_request import TracedRequest

_BLOCKS = 4000


class FixedSteps(CostModel):
    """Cost model in which every step takes the same fixed time."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def step_seconds(self, step: StepFeatures) -> float:
        return self.seconds

    def prefill_seconds(self, num_tokens: int, *args: Any, **more: Any) -> float:
        return self.seconds


@asynccontextmanager
async def running(
    config: EngineConfig, replicas: int, routing: str = "forecast", connect: ConnectReplica | None = None
) -> AsyncIterator[AsyncEngine]:
    """An engine with ``replicas`` replicas behind a router process; 0 means one engine process without a router.

    ``connect`` starts the replicas; by default, they are processes of this machine.
    """

    def behind_a_door(engine: AsyncEngine) -> Fleet:
        start = connect or local_replicas(config, replicas)
        return Fleet(config, engine, start, replicas=replicas, routing=routing)

    engine = AsyncEngine.start(
        config,
        read_tokenizer=read_tokenizer,
        connect=behind_a_door if replicas else None,
        max_queued_requests=100_000,
        max_queued_tokens=1 << 30,
    )
    try:
        await engine.wait_ready()
        yield engine
    finally:
        await engine.shutdown()


async def answer(engine: AsyncEngine, prompt: list[int], tokens: int) -> tuple[float, float]:
    """Serve one request as a stream. Returns seconds to the first token and to the end."""
    began, first = time.perf_counter(), 0.0
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, seed=1)
    async for _ in await engine.submit(prompt, params):
        first = first or time.perf_counter()
    return first - began, time.perf_counter() - began


async def closed_loop(engine: AsyncEngine, streams: int, each: int, tokens: int, seed: int) -> tuple[float, float]:
    """Run ``streams`` clients that each send ``each`` requests one after another. Returns (median seconds to the first
    token, tokens/s)."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(1, 250) for _ in range(64)] for _ in range(streams * each)]
    firsts: list[float] = []

    async def client(number: int) -> None:
        for turn in range(each):
            firsts.append((await answer(engine, prompts[number * each + turn], tokens))[0])

    began = time.perf_counter()
    await asyncio.gather(*(client(number) for number in range(streams)))
    return statistics.median(firsts), streams * each * tokens / (time.perf_counter() - began)


async def door(model: str, rounds: int) -> dict[str, Any]:
    """Compare one replica behind the router with an engine without a router: difference of times, ratio of rates."""
    settings = {"model": model, "max_num_seqs": 32, "num_kv_blocks": _BLOCKS}
    config = EngineConfig.from_flat(settings)
    pairs = []
    async with running(config, 0) as plain, running(config, 1) as behind:
        for number in range(-1, rounds):
            order = (plain, behind) if number % 2 else (behind, plain)
            found = {engine: await closed_loop(engine, 32, 6, 64, number) for engine in order}
            if number >= 0:  # the first warms up
                pairs.append((found[plain], found[behind]))
    differences = [1000 * (there[0] - here[0]) for here, there in pairs]
    ratios = [there[1] / here[1] for here, there in pairs]
    return {
        "model": model,
        "ttft_ms_without": 1000 * statistics.median(here[0] for here, _ in pairs),
        "ttft_ms_more": statistics.median(differences),
        "ttft_ms_more_range": [min(differences), max(differences)],
        "tokens_per_second_without": statistics.median(here[1] for here, _ in pairs),
        "tokens_per_second_ratio": statistics.median(ratios),
        "tokens_per_second_ratio_range": [min(ratios), max(ratios)],
    }


async def serve_echo(tokens: int) -> Callable[[], AsyncIterator[int]]:
    """Start a deployment of Ray Serve that sends ``tokens`` numbers at once. Returns a function that asks for them."""
    from ray import serve

    @serve.deployment(ray_actor_options={"num_cpus": 0}, max_ongoing_requests=1000)
    class Echo:
        async def __call__(self) -> AsyncIterator[int]:
            for number in range(tokens):
                yield number

    await asyncio.to_thread(serve.start, proxy_location="Disabled")
    handle = await asyncio.to_thread(lambda: serve.run(Echo.bind(), name="echo", route_prefix=None))
    streaming = handle.options(stream=True)
    return lambda: streaming.remote()


async def echo_loop(ask: Callable[[], AsyncIterator[int]], streams: int, each: int, tokens: int) -> tuple[float, float]:
    """Run ``streams`` clients that each call ``ask`` (the echo of Ray Serve) ``each`` times. Returns (median seconds to
    the first number, numbers/s)."""
    firsts: list[float] = []

    async def client() -> None:
        for _ in range(each):
            began, first = time.perf_counter(), 0.0
            async for _ in ask():
                first = first or time.perf_counter()
            firsts.append(first - began)

    began = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(streams)))
    return statistics.median(firsts), streams * each * tokens / (time.perf_counter() - began)


async def with_ray(rounds: int) -> dict[str, Any]:
    """Compare an engine without a router, a replica in a process, and a replica as an actor of Ray. An echo of Ray
    Serve, which only sends numbers, is measured for comparison."""
    from chairlift.fleet.ray import ray_replicas

    streams, each, tokens = 32, 3, 64
    config = EngineConfig.from_flat({"model": "hashlm", "max_num_seqs": streams, "num_kv_blocks": _BLOCKS})
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ("plain", "process", "ray", "echo")}
    async with (
        running(config, 0) as plain,
        running(config, 1) as process,
        running(config, 1, connect=ray_replicas(config, 1, "local")) as actor,
    ):
        ask = await serve_echo(tokens)
        engines = {"plain": plain, "process": process, "ray": actor}
        for number in range(-1, rounds):
            names = list(found)
            for name in [*names[number % 4 :], *names[: number % 4]]:
                if name == "echo":
                    times = await echo_loop(ask, streams, each, tokens)
                else:
                    times = await closed_loop(engines[name], streams, each, tokens, number)
                if number >= 0:  # the first warms up
                    found[name].append(times)
        await asyncio.to_thread(__import__("ray").serve.shutdown)
    more = {
        name: [1000 * (mine[0] - here[0]) for mine, here in zip(found[name], found["plain"], strict=True)]
        for name in ("process", "ray")
    }
    return {
        "first_ms": {name: 1000 * statistics.median(first for first, _ in times) for name, times in found.items()},
        "per_second": {name: statistics.median(rate for _, rate in times) for name, times in found.items()},
        "ttft_ms_more": {name: statistics.median(values) for name, values in more.items()},
        "ttft_ms_more_range": {name: [min(values), max(values)] for name, values in more.items()},
    }


def poisson(count: int, rate: float, seed: int) -> list[TracedRequest]:
    rng, now, trace = random.Random(seed), 0.0, []
    for _ in range(count):
        now += rng.expovariate(rate)
        lengths = {"prompt_tokens": rng.randrange(20, 200), "output_tokens": rng.randrange(20, 61)}
        trace.append(TracedRequest(arrival=now, **lengths))
    return trace


async def serve(engine: AsyncEngine, trace: list[TracedRequest]) -> dict[str, float]:
    """Serve a trace in real time. Returns tokens/s and percentiles of the time to the first token."""
    rng, began = random.Random(7), time.perf_counter()

    async def one(request: TracedRequest) -> tuple[float, float]:
        prompt = [rng.randrange(1, 250) for _ in range(request.prompt_tokens)]
        await asyncio.sleep(began + request.arrival - time.perf_counter())
        return await answer(engine, prompt, request.output_tokens)

    times = await asyncio.gather(*(one(request) for request in trace))
    seconds = time.perf_counter() - began - trace[0].arrival
    firsts = sorted(first for first, _ in times)
    return {
        "output_tokens_per_second": sum(request.output_tokens for request in trace) / seconds,
        "ttft_p50": firsts[len(firsts) // 2],
        "ttft_p99": firsts[int(0.99 * len(firsts))],
    }


async def front_seconds(engine: AsyncEngine, requests: int = 15) -> float:
    """Time to the first token of a request that is alone, without its step: median in seconds. The front end and the
    connection to the replica take this time. The simulation does not include it."""
    rng, gaps, times = random.Random(5), engine.stats.inter_token, list[float]()
    total, count = gaps.total, sum(gaps.counts)
    for _ in range(requests):
        times.append((await answer(engine, [rng.randrange(1, 250) for _ in range(100)], 4))[0])
    return max(0.0, statistics.median(times) - (gaps.total - total) / (sum(gaps.counts) - count))


async def simulation(step_ms: float, rounds: int, routing: str) -> dict[str, Any]:
    """Simulated values divided by measured values of two replicas, per round."""
    rows = 16
    settings = {"model": f"hashlm:{step_ms:g}ms", "max_num_seqs": rows, "max_num_batched_tokens": 512}
    config = EngineConfig.from_flat(settings | {"num_kv_blocks": _BLOCKS})
    rate = 0.75 * 2 * rows / (40.0 * (step_ms + 1) / 1000)
    found = []
    async with running(config, 2, routing) as engine:
        await closed_loop(engine, 2 * rows, 1, 60, 99)
        gaps = engine.stats.inter_token
        for number in range(rounds):
            trace, front = poisson(300, rate, number), await front_seconds(engine)
            total, count = gaps.total, sum(gaps.counts)
            measured = await serve(engine, trace)
            step = (gaps.total - total) / (sum(gaps.counts) - count)  # a stream has a token per step
            machine = Deployment(
                machine="this one",
                model=config.model.model,
                cost=FixedSteps(step),
                kv_bytes_per_token=8,
                kv_memory_bytes=_BLOCKS * 16 * 8,
                max_model_len=4096,
            )
            plan = FleetPlan(replicas=2, routing=routing)
            served = (await asyncio.to_thread(replay_fleet, trace, config, machine, plan)).served
            simulated = {
                "output_tokens_per_second": served.output_tokens_per_second,
                "ttft_p50": served.ttft.p50 + front,
                "ttft_p99": served.ttft.p99 + front,
            }
            found.append(
                {"step_ms": 1000 * step, "front_ms": 1000 * front, "measured": measured, "simulated": simulated}
            )
    names = list(found[0]["measured"])
    ratios = {name: [each["simulated"][name] / each["measured"][name] for each in found] for name in names}
    return {
        "routing": routing,
        "requests_per_second": rate,
        "ratio": {name: statistics.median(values) for name, values in ratios.items()},
        "range": {name: [min(values), max(values)] for name, values in ratios.items()},
        "rounds": found,
    }


@dataclasses.dataclass(frozen=True)
class Chat:
    """A chat of several turns. A turn waits for the answer to the turn before, and its prompt contains that answer."""

    arrival: float
    turns: list[tuple[list[int], int]]
    """(new prompt tokens, length of the answer) of each turn."""


def chats_in_bursts(seed: int, chats: int = 80, seconds: float = 10.0) -> list[Chat]:
    """Chats of one to four turns. Half of them arrive alone, half in bursts of ten, and two in five begin with the same
    512 tokens."""
    rng = random.Random(seed)
    hot = [rng.randrange(1, 250) for _ in range(512)]
    bursts = [rng.uniform(0, seconds) for _ in range(chats // 20)]
    found = []
    for number in range(chats):
        arrival = bursts[number % len(bursts)] if number % 2 else rng.uniform(0, seconds)
        turns = []
        for turn in range(rng.randrange(1, 5)):
            text = [
                rng.randrange(1, 250) for _ in range(rng.randrange(200, 700) if turn == 0 else rng.randrange(20, 80))
            ]
            turns.append(([*hot, *text] if turn == 0 and number % 5 < 2 else text, rng.randrange(10, 40)))
        found.append(Chat(arrival, turns))
    return found


async def hold_chats(engine: AsyncEngine, chats: list[Chat], within: float) -> dict[str, float]:
    """Hold chats in real time. Returns percentiles of the time to the first token in seconds, the fraction of turns
    whose first token came ``within`` seconds, and the fraction of prompt tokens found in prefix caches."""
    stats, began, firsts = engine.stats, time.perf_counter(), list[float]()
    before = stats.engine.prefix_cache_hits, stats.engine.prefix_cache_queries

    async def hold(chat: Chat) -> None:
        await asyncio.sleep(max(0.0, began + chat.arrival - time.perf_counter()))
        known: list[int] = []
        for text, length in chat.turns:
            known += text
            sent, first = time.perf_counter(), 0.0
            params = SamplingParams(max_tokens=length, ignore_eos=True, seed=1)
            async for output in await engine.submit(list(known), params):
                first = first or time.perf_counter() - sent
                known += output.outputs[0].token_ids
            firsts.append(first)
            await asyncio.sleep(0.3)

    await asyncio.gather(*map(hold, chats))
    hits, queries = stats.engine.prefix_cache_hits - before[0], stats.engine.prefix_cache_queries - before[1]
    firsts.sort()
    return {
        "ttft_p50": firsts[len(firsts) // 2],
        "ttft_p99": firsts[int(0.99 * len(firsts))],
        "goodput": sum(first <= within for first in firsts) / len(firsts),
        "hit_rate": hits / queries,
    }


async def routing(step_ms: float, rounds: int) -> dict[str, Any]:
    """Compare routers on two real replicas, and with one engine that has the rows and the KV memory of both."""
    settings = {"model": f"hashlm:{step_ms:g}ms", "max_num_seqs": 16, "max_num_batched_tokens": 256}
    blocks = 1500  # 24,000 tokens, about half of what all chats together need
    found: dict[str, list[dict[str, float]]] = {name: [] for name in ("forecast", "rr", "p2c", "one")}
    for number in range(rounds):
        chats = chats_in_bursts(number)
        for name in sorted(found, key=lambda each: random.Random(f"{each} {number}").random()):
            times = 2 if name == "one" else 1
            more = {"num_kv_blocks": times * blocks, "max_num_seqs": times * 16}
            config = EngineConfig.from_flat(settings | more)
            async with running(config, 0 if name == "one" else 2, "forecast" if name == "one" else name) as engine:
                found[name].append(await hold_chats(engine, chats, 10 * step_ms / 1000))
    names = list(found["one"][0])
    return {
        "median": {
            router: {name: statistics.median(each[name] for each in results) for name in names}
            for router, results in found.items()
        },
        "over_rr": {
            router: {
                name: statistics.median(a[name] / b[name] for a, b in zip(results, found["rr"], strict=True))
                for name in names
            }
            for router, results in found.items()
        },
        "hit_rate_over_one": statistics.median(
            a["hit_rate"] / b["hit_rate"] for a, b in zip(found["forecast"], found["one"], strict=True)
        ),
        "rounds": found,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--step-ms", type=float, default=20.0, help="time of a step for the comparison")
    parser.add_argument("--only", choices=("door", "ray", "simulation", "routing"))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results: dict[str, Any] = {"machine": dataclasses.asdict(describe_machine())}
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if args.only == "ray":
            results["ray"] = runner.run(with_ray(args.rounds))
        if args.only == "routing":
            results["routing"] = runner.run(routing(args.step_ms, min(2, args.rounds)))
        if args.only in (None, "door"):
            results["door"] = [runner.run(door(model, args.rounds)) for model in ("hashlm", "hashlm:5ms")]
        if args.only in (None, "simulation"):
            rounds = min(3, args.rounds)
            results["simulation"] = runner.run(simulation(args.step_ms, rounds, "forecast"))
    print(json.dumps(results, indent=1))
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
