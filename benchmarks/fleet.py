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
trace. The simulation gets only the mean time of a step in that round, including the host's part. Results are simulated
values divided by measured values.
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

from chairlift.config import EngineConfig
from chairlift.distributed.fleet import ConnectReplica, Fleet
from chairlift.distributed.local import local_replicas
from chairlift.engine.async_engine import AsyncEngine
from chairlift.loading import read_tokenizer
from chairlift.replay.fleet import FleetPlan, replay_fleet
from chairlift.replay.machines import Deployment
from chairlift.replay.traced_request import TracedRequest
from chairlift.sampling_params import SamplingParams
from chairlift.scheduler.cost_model import CostModel, StepFeatures
from chairlift.workbench.bench.machine import describe_machine

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
    from chairlift.distributed.ray import ray_replicas

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
            trace = poisson(300, rate, number)
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
                "ttft_p50": served.ttft.p50,
                "ttft_p99": served.ttft.p99,
            }
            found.append({"step_ms": 1000 * step, "measured": measured, "simulated": simulated})
    names = list(found[0]["measured"])
    ratios = {name: [each["simulated"][name] / each["measured"][name] for each in found] for name in names}
    return {
        "routing": routing,
        "requests_per_second": rate,
        "ratio": {name: statistics.median(values) for name, values in ratios.items()},
        "range": {name: [min(values), max(values)] for name, values in ratios.items()},
        "rounds": found,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--step-ms", type=float, default=20.0, help="time of a step for the comparison")
    parser.add_argument("--only", choices=("door", "ray", "simulation"))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results: dict[str, Any] = {"machine": dataclasses.asdict(describe_machine())}
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if args.only == "ray":
            results["ray"] = runner.run(with_ray(args.rounds))
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
