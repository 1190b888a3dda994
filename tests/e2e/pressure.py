"""Measures how clients that do not read, and too many clients, affect other clients."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import json
import random
import statistics
import time

from tests.e2e.load import (
    Ask,
    Client,
    Connection,
    End,
    History,
    Violation,
    exact,
    held,
    idle,
    percentile,
    rest,
    settled,
    until,
)
from tests.e2e.server_process import PATIENCE, ServerProcess

__all__ = ["overload", "stall", "stall_cut"]

Figures = dict[str, float]
_BACK_SECONDS = 60.0
_LONG_NAME = "hashlm-" + 121 * "x"
_LATE_SECONDS = 14.0
"""Possible delay of a timer on a busy machine, in seconds. If the server cut clients off one after another, the last
one would be later than this."""
_STALLING = 400
"""Number of tokens whose events exceed the buffers of the kernel and the server for a client that does not read. Every
event contains the model's name."""


# --- readers that do not read ----------------------------------------------------------------------------------------


async def stall_cut(count: int, rng: random.Random, *, timeout: float = 2.0) -> Figures:
    """Run ``count`` clients that never read, and others that read normally. Expected: the former are cut off after
    ``timeout`` seconds, and after another ``timeout`` seconds the server holds nothing for them.

    On a busy machine, the first clients are cut off before the last have connected. The test therefore does not count
    the stuck clients at any one time. It checks that each is cut off, and that other clients are answered during the
    ``timeout`` seconds before.
    """
    model = "hashlm:2ms"
    with ServerProcess(model, "--stall-timeout", str(timeout)) as server:
        client = Client(server.port, model)
        base = await settled(server, client, rng)
        start = time.time()
        connections = [await _never_read(client, _wordy(rng, _STALLING // 2)) for _ in range(count)]

        async def all_cut() -> bool:
            await exact(client, rng, 4)
            return len(_cut_off(server)) >= count

        async def computed() -> bool:
            return await all_cut() or (await _in_progress(client) >= count and await idle(client))

        await until(computed, 4 * PATIENCE, what="the computing of what nobody reads")
        idle_at = time.time()
        await until(all_cut, timeout + _LATE_SECONDS, what="the end of their answers")

        async def closed() -> bool:
            return await held(server, client) == base

        await until(closed, timeout + _LATE_SECONDS, what="the end of their connections")
        gone = time.time()
        for connection in connections:
            connection.reset()
        await exact(client, rng)
        client.history.check()
        ends = _cut_off(server)
    if len(ends) != count or ends[0] < start + timeout:
        raise Violation(f"{len(ends)} of {count} readers were cut off, the first after {ends[0] - start:.2f} s")
    since = time.time() - time.monotonic()
    streams = [submit for submit in client.history.submits if submit.ask.stream]
    lives = [(since + submit.began, since + submit.ended) for submit in streams]
    beside = sum(any(end - timeout <= began and ended <= end for end in ends) for began, ended in lives)
    if not beside:
        raise Violation(f"no stream began and ended in the {timeout:g} s in which another was stuck")
    return {
        "stalled": count,
        "timeout s": timeout,
        "cut off within s": max(0.0, ends[-1] - idle_at),
        "connections closed within s": gone - idle_at,
        "streams beside": beside,
    }


def _cut_off(server: ServerProcess) -> list[float]:
    """Unix times in seconds at which clients were cut off, read from the log."""
    lines = [line for line in server.log().splitlines() if line.endswith("the connection is closed")]
    return sorted(datetime.datetime.fromisoformat(line.split(" ")[0]).timestamp() for line in lines)


async def stall(count: int, rng: random.Random, *, seconds: float = 4.0, rounds: int = 1) -> Figures:
    """Measure how ``count`` clients that never read affect the inter-token latency (p99) of a few clients that do read.
    The latency is measured in four situations: without other clients (alone); with responses stuck in the connections
    of clients that do not read (stuck); and, while the engine computes for ``count`` other clients, with clients that
    read (readers) and with clients that do not (stalled). The situations take turns ``rounds`` times; results are
    medians."""
    worst: dict[str, list[float]] = {name: [] for name in ("alone", "stuck", "readers", "stalled")}
    history = History()
    with ServerProcess("hashlm:10ms", "--served-model-name", _LONG_NAME, "--num-kv-blocks", "8192") as server:
        client = Client(server.port, _LONG_NAME, history)
        length = _STALLING + int(seconds / 0.012)
        for _ in range(rounds):
            worst["alone"].append(await _inter_token(client, rng, seconds))
            readers = [
                asyncio.create_task(client.ask(_steady(rng, length), patience=4 * PATIENCE)) for _ in range(count)
            ]
            await _computed(client, count * _STALLING)
            worst["readers"].append(await _inter_token(client, rng, seconds))
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)
            await rest(client)
            connections = [await _never_read(client, _steady(rng, length)) for _ in range(count)]
            await _computed(client, count * _STALLING)
            worst["stalled"].append(await _inter_token(client, rng, seconds))
            await rest(client)
            worst["stuck"].append(await _inter_token(client, rng, seconds))
            if (left := await _in_progress(client)) != count:
                raise Violation(f"{left} of {count} answers are stuck; all should be")
            for connection in connections:
                connection.reset()
            await until(lambda: _nobody(client), what="the end of those who left")
        history.check()
    stuck = [many / few for many, few in zip(worst["stuck"], worst["alone"], strict=True)]
    stalled = [many / few for many, few in zip(worst["stalled"], worst["readers"], strict=True)]
    return {
        "stalled readers": count,
        **{f"ITL p99 ms, {name}": statistics.median(each) for name, each in worst.items()},
        "stuck / alone": statistics.median(stuck),
        "stalled / readers": statistics.median(stalled),
    }


def _steady(rng: random.Random, length: int) -> Ask:
    return Ask(prompt="steady", max_tokens=length, seed=rng.randrange(1 << 30))


def _wordy(rng: random.Random, length: int) -> Ask:
    """A request whose output has more than a kilobyte per token, sent as many events or as the few large events of a
    busy server."""
    return dataclasses.replace(_steady(rng, length), chat=True, logprobs=20)


async def _never_read(client: Client, ask: Ask) -> Connection:
    connection = await Connection.open(client.port, tiny=True)
    connection.writer.transport.pause_reading()  # type: ignore[attr-defined]
    connection.writer.write(ask.request(client.model))
    return connection


async def _inter_token(client: Client, rng: random.Random, seconds: float, num_clients: int = 4) -> float:
    """p99 of the inter-token latency of a few streams, in milliseconds."""
    end = time.monotonic() + seconds
    gaps: list[float] = []

    async def one() -> None:
        while time.monotonic() < end:
            gaps.extend((await client.ask(_steady(rng, 50))).gaps)

    await asyncio.gather(*(one() for _ in range(num_clients)))
    return 1000 * percentile(gaps, 0.99)


async def _computed(client: Client, count: int) -> None:
    """Wait until the engine has computed ``count`` more tokens."""

    async def tokens() -> float:
        return (await client.metrics())["iteration_tokens_total_sum"]

    wanted = await tokens() + count

    async def enough() -> bool:
        return await tokens() >= wanted

    await until(enough, look=0.1, what=f"the computing of {count} tokens")


async def _in_progress(client: Client) -> int:
    return int(json.loads((await client.get("/load"))[1])["server_load"])


async def _nobody(client: Client) -> bool:
    return await _in_progress(client) == 0


# --- more than there is room for -------------------------------------------------------------------------------------


async def overload(seconds: float, rng: random.Random, *, factor: float = 10.0, queue: int = 16) -> Figures:
    """Send requests at ``factor`` times the capacity, in an open loop. Expected: surplus requests are refused at once,
    and the server keeps its full throughput."""
    model = "hashlm:5ms"
    deepest: list[float] = []
    running: list[float] = []
    with ServerProcess(model, "--max-num-seqs", "4", "--max-num-queued-reqs", str(queue)) as server:
        client, rush = Client(server.port, model), Client(server.port, model)
        await _closed_loop(client, rng, 1.0)
        peak, alone = await _closed_loop(client, rng, seconds)
        client.history.check()
        before = server.memory()
        watch = asyncio.create_task(_watch(client, deepest, running))
        start = time.monotonic()
        tasks = await _open_loop(rush, rng, factor * peak, start + seconds)
        end = time.monotonic()
        memory = server.memory()

        async def recovered() -> bool:
            submit = await client.ask(_small(rng))
            return submit.end is End.ANSWERED and submit.seconds < 2 * alone

        await until(recovered, _BACK_SECONDS, look=0.05, what="an answer as fast as before")
        recovery = time.monotonic() - end
        watch.cancel()
        await asyncio.gather(*tasks)
        await rest(client)
    rush.history.check(End.REFUSED, refusals=("rate_limit_exceeded",))
    client.history.check(End.REFUSED, refusals=("rate_limit_exceeded",))
    if max(deepest) > queue:
        raise Violation(f"{max(deepest):.0f} requests waited, and {queue} may")
    refused = [1000 * submit.seconds for submit in rush.history.of(End.REFUSED)]
    answered = [1000 * submit.seconds for submit in rush.history.of(End.ANSWERED)]
    within = [submit for submit in rush.history.of(End.ANSWERED) if start + 1 <= submit.ended <= end]
    return {
        "peak requests/s": peak,
        "offered / peak": len(tasks) / (end - start) / peak,
        "goodput / peak": len(within) / (end - start - 1) / peak,
        "429 p50 ms": percentile(refused, 0.5),
        "429 p99 ms": percentile(refused, 0.99),
        "answers p50 ms": percentile(answered, 0.5),
        "batch": statistics.median(running),
        "deepest queue": max(deepest),
        "queue cap": queue,
        "recovery s": recovery,
        "memory / before": memory / before,
        **rush.history.figures(),
    }


def _small(rng: random.Random) -> Ask:
    return Ask(prompt="small", max_tokens=32, seed=rng.randrange(1 << 30), stream=rng.random() < 0.5)


async def _open_loop(client: Client, rng: random.Random, rate: float, end: float) -> list[asyncio.Task[object]]:
    """Send requests at random times that do not depend on earlier requests."""
    tasks: list[asyncio.Task[object]] = []
    due = time.monotonic()
    while (due := due + rng.expovariate(rate)) < end:
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        tasks.append(asyncio.create_task(client.ask(_small(rng), due=due)))
    return tasks


async def _closed_loop(client: Client, rng: random.Random, seconds: float) -> tuple[float, float]:
    """(requests per second of eight clients, which is twice the batch size; seconds of one request alone)."""
    count = 0
    end = time.monotonic() + seconds

    async def one() -> None:
        nonlocal count
        while time.monotonic() < end:
            submit = await client.ask(_small(rng))
            count += submit.ended <= end

    await asyncio.gather(*(one() for _ in range(8)))
    alone = [(await client.ask(_small(rng))).seconds for _ in range(3)]
    return count / seconds, sorted(alone)[1]


async def _watch(client: Client, waiting: list[float], running: list[float]) -> None:
    """Record the queue length in ``waiting``, and, while there is a queue, the batch size in ``running``."""
    while True:
        metrics = await client.metrics()
        waiting.append(metrics["num_requests_waiting"])
        if waiting[-1]:
            running.append(metrics["num_requests_running"])
        await asyncio.sleep(0.05)
