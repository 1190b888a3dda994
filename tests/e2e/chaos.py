"""Chaos tests of a real server with HashLM: processes are killed or stopped, connections cut, resources exhausted.

    python -m tests.e2e.chaos --kills 20                  all scenarios, with the counts of a release
    python -m tests.e2e.chaos overload --seconds 60       one of them

Each scenario raises :class:`~tests.e2e.load.Violation` when a rule is broken, and returns measured values.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import random
import resource
import signal
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, Final

from tests.e2e import pressure
from tests.e2e.load import (
    Ask,
    Client,
    Connection,
    Cut,
    End,
    History,
    Violation,
    exact,
    held,
    idle,
    rest,
    running,
    settled,
    status,
    until,
)
from tests.e2e.server_process import Held, ServerProcess, alive

__all__ = [
    "LITTLE_MEMORY",
    "SCENARIOS",
    "cut_off",
    "disconnects",
    "drain",
    "kill_api",
    "kill_engine",
    "kill_while_it_loads",
    "scarce_files",
    "stop_api",
    "stop_engine",
]

Figures = dict[str, float]
_HEALTH_SECONDS: Final = 20.0
"""Seconds allowed on a busy machine for work that normally takes two seconds. It is shorter than any timeout of the
server."""
_ORPHAN_SECONDS: Final = 20.0
_BACK_SECONDS: Final = 60.0
"""Seconds allowed for a restart of the engine, without the pause that precedes it."""
_LITTLE: Final = 400
_LONG: Final = 3500
"""Number of output tokens of a request that takes several seconds: ``_LONG`` with enough memory, ``_LITTLE`` with
:data:`LITTLE_MEMORY`. Half of all requests together keep the engine busy for longer than
:data:`_NOTHING_LEFT_SECONDS`."""
_NOTHING_LEFT_SECONDS: Final = 20.0
LITTLE_MEMORY: Final = (
    *("--num-kv-blocks", "64", "--max-model-len", "512"),
    *("--max-num-batched-tokens", "64", "--max-num-queued-tokens", "1000000"),
)
"""Flags for a KV cache that holds only a few sequences, so that requests are preempted all the time."""
_KILLS_PER_SERVER: Final = 5
"""Number of kills per server. It is small because the pause before a restart doubles with each death."""


@contextlib.asynccontextmanager
async def busy(client: Client, rng: random.Random, num_clients: int, *, pause: float = 0.02) -> AsyncIterator[None]:
    """While the ``async with`` block runs, run ``num_clients`` clients that send one request after another. At the end
    of the block they complete their last request."""
    over = asyncio.Event()

    async def one(rng: random.Random) -> None:
        while not over.is_set():
            submit = await client.ask(Ask.draw(rng))
            if submit.end is not End.ANSWERED:
                await asyncio.sleep(pause)  # clients that retry at once would be an attack

    tasks = [asyncio.create_task(one(random.Random(rng.random()))) for _ in range(num_clients)]
    try:
        yield
    finally:
        over.set()
        await asyncio.gather(*tasks)


async def answered(client: Client, count: int) -> None:
    """Wait until ``count`` more requests have been answered."""
    before = client.history.counts()[End.ANSWERED]

    async def enough() -> bool:
        return client.history.counts()[End.ANSWERED] >= before + count

    await until(enough, what=f"the answer to {count} requests")


async def kill_engine(kills: int, rng: random.Random, *, num_clients: int = 16, model: str = "hashlm:2ms") -> Figures:
    """Kill the engine (SIGKILL) under load. Expected: explicit errors, 503 on /health, an automatic restart, then
    correct outputs again."""
    unhealthy: list[float] = []
    back: list[float] = []
    history = History()
    for first in range(0, kills, _KILLS_PER_SERVER):
        with ServerProcess(model, "--max-num-seqs", "8") as server:
            client = Client(server.port, model, history)
            for number in range(min(_KILLS_PER_SERVER, kills - first)):
                async with busy(client, rng, num_clients):
                    await answered(client, rng.randint(1, 30))
                    seconds = await _kill_engine(server, client, 0.2 * 2**number + _BACK_SECONDS)
                    await answered(client, 5)
                unhealthy += seconds[:1] if seconds[0] is not None else []
                back.append(seconds[1])
                await exact(client, rng)
                await rest(client)
            server.terminate()
            if code := await server.ended():
                raise Violation(f"the server ended with {code} afterwards")
    history.check(End.FAILED, End.REFUSED, refusals=("engine_unavailable",))
    return {
        "kills": kills,
        "503 on /health": len(unhealthy),
        "503 on /health, worst s": max(unhealthy, default=0.0),
        "back, worst s": max(back),
        **history.figures(),
    }


async def _kill_engine(server: ServerProcess, client: Client, limit: float) -> tuple[float | None, float]:
    """Kill the engine once. Returns (seconds until /health reports the death, or None if the restart was faster;
    seconds until the restart). The restart may take ``limit`` seconds."""
    old = server.engine()
    told = False
    restarts = (await client.metrics())["engine_restarts_total"]

    async def told_or_over() -> bool:
        nonlocal told
        told = await _is(client, "/health", 503)
        return told or (await client.metrics())["engine_restarts_total"] > restarts

    os.kill(old, signal.SIGKILL)
    seconds = await until(told_or_over, _HEALTH_SECONDS, what="503")
    unhealthy = seconds if told else None
    back = await until(lambda: _is(client, "/ready", 200), limit, what="the next engine")
    if alive(old) or server.engine() == old:
        raise Violation("the old engine is still there")
    return unhealthy, back


async def kill_while_it_loads(rng: random.Random) -> Figures:
    """Kill the engine, and then kill the new engine while it starts."""
    with ServerProcess("hashlm") as server:
        client = Client(server.port, "hashlm")
        first = server.engine()
        os.kill(first, signal.SIGKILL)

        async def successor() -> bool:
            return server.engine_pid() not in (None, first)

        await until(successor, what="the next engine")
        os.kill(server.engine(), signal.SIGKILL)
        seconds = await until(lambda: _is(client, "/ready", 200), _BACK_SECONDS, what="the engine after the next")
        await exact(client, rng)
        client.history.check()
        return {"back s": seconds}


async def _is(client: Client, path: str, wanted: int) -> bool:
    return await status(client, path) == wanted


async def kill_api(kills: int, rng: random.Random, *, num_clients: int = 16, stopped: bool = False) -> Figures:
    """Kill the API process (SIGKILL) under load. Expected: connections break visibly, no process is left, a new server
    works.

    With ``stopped``, the engine is stopped (SIGSTOP) when the API process is killed.
    """
    gone = []
    history = History()
    with ServerProcess("hashlm:2ms", "--max-num-seqs", "8") as server:
        for _ in range(kills):
            client = Client(server.port, "hashlm:2ms", history)
            async with busy(client, rng, num_clients):
                await answered(client, rng.randint(1, 30))
                children = server.children()
                if len(children) < 2 or server.engine() not in children:
                    raise Violation(f"an engine and a template worker were expected: {children}")
                if stopped:
                    os.kill(server.engine(), signal.SIGSTOP)
                server.process.kill()
                await server.ended()

                async def no_child(children: Sequence[int] = tuple(children)) -> bool:
                    return not any(map(alive, children))

                gone.append(await until(no_child, _ORPHAN_SECONDS, what="the end of its children"))
                await asyncio.to_thread(server.start, server.port)
                await answered(client, 5)
            await exact(client, rng)
    history.check(End.LOST, End.REFUSED, refusals=("engine_unavailable",))  # the next server has to load first
    return {"kills": kills, "last child gone, worst s": max(gone), **history.figures()}


async def stop_engine(seconds: float, rng: random.Random) -> Figures:
    """Stop the engine (SIGSTOP) under load. Expected: /health reports it after its timeout, some requests are
    cancelled, and after SIGCONT all waiting requests are answered."""
    with ServerProcess("hashlm:2ms", "--max-num-seqs", "8", "--health-timeout", "0.5") as server:
        client = Client(server.port, "hashlm:2ms")
        async with busy(client, rng, 8):
            await answered(client, 10)
            os.kill(server.engine(), signal.SIGSTOP)
            stopped = time.monotonic()
            try:
                left = [asyncio.create_task(client.ask(Ask.draw(rng))) for _ in range(20)]
                await until(lambda: _is(client, "/health", 503), 0.5 + _HEALTH_SECONDS, what="503")
                unhealthy = time.monotonic() - stopped
                before = len(client.history.of(End.ANSWERED))
                for task in left[::2]:
                    task.cancel()
                await asyncio.gather(*left[::2], return_exceptions=True)
                await asyncio.sleep(max(0.0, seconds - (time.monotonic() - stopped)))
                if len(client.history.of(End.ANSWERED)) != before:
                    raise Violation("a stopped engine answered")
            finally:
                os.kill(server.engine(), signal.SIGCONT)
            back = await until(lambda: _is(client, "/health", 200), _BACK_SECONDS, what="health")
            await asyncio.gather(*left, return_exceptions=True)
        await rest(client)
        client.history.check()
        return {"503 on /health s": unhealthy, "healthy again s": back, **client.history.figures()}


async def stop_api(seconds: float, rng: random.Random) -> Figures:
    """Stop the API process (SIGSTOP) while it streams. Expected: the engine continues, and everything is delivered
    after SIGCONT."""
    with ServerProcess("hashlm:10ms") as server:
        client = Client(server.port, "hashlm:10ms")
        tasks = [asyncio.create_task(client.ask(Ask.draw(rng, most=300))) for _ in range(100)]
        await until(lambda: running(client, 10), what="their start")
        server.process.send_signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            server.process.send_signal(signal.SIGCONT)
        await asyncio.gather(*tasks)
        await exact(client, rng)
        await rest(client)
    client.history.check()
    longest = max(max(submit.gaps, default=0.0) for submit in client.history.submits)
    return {"stopped s": seconds, "longest gap s": longest, **client.history.figures()}


async def scarce_files(rng: random.Random) -> Figures:
    """Use up the file descriptors of the API process with connections, and kill the engine. Expected: the server
    recovers when the connections close."""
    with ServerProcess("hashlm:2ms") as server:
        client = Client(server.port, "hashlm:2ms")
        await settled(server, client, rng)
        limit = server.num_files() + 20
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (limit, limit))
        crowd = [await Connection.open(server.port) for _ in range(2 * limit)]
        await until(lambda: _is(client, "/health", 0), what="the end of its descriptors")
        first = len(server.log())
        os.kill(server.engine(), signal.SIGKILL)

        async def tried() -> bool:
            return server.log()[first:].count("starting it again") >= 2

        await until(tried, what="the second attempt to start an engine")
        for connection in crowd:
            connection.close()
        back = await until(lambda: _is(client, "/ready", 200), 2 * _BACK_SECONDS, what="the next engine")
        await exact(client, rng)
        await rest(client)
    client.history.check()
    return {"descriptors": limit, "back s": back}


async def disconnects(count: int, rng: random.Random, *, rounds: int = 1, flags: Sequence[str] = ()) -> Figures:
    """Send ``count`` requests at once, and cut off half of them in every way and at every point. Expected: all others
    are answered, and soon nothing of the cut requests is left."""
    times = []
    sizes = ("--max-num-seqs", "64", "--max-num-queued-reqs", str(4 * count), *flags)
    with ServerProcess("hashlm:2ms", *sizes) as server:
        client = Client(server.port, "hashlm:2ms")
        base = await settled(server, client, rng)
        for _ in range(rounds):
            asks = [_half_leave(client, rng, number, _LITTLE if flags else _LONG) for number in range(count)]
            await asyncio.gather(*asks)

            async def as_before(base: Held = base) -> bool:
                return await idle(client) and await held(server, client) == base

            try:
                times.append(await until(as_before, _NOTHING_LEFT_SECONDS, what="the state before"))
            except Violation as violation:
                now = await held(server, client)
                raise Violation(f"{violation}: {base} before, {now} now, idle: {await idle(client)}") from None
            await exact(client, rng)
        client.history.check()
        preemptions = (await client.metrics())["num_preemptions_total"]
    return {
        "requests": count * rounds,
        "nothing left, worst s": max(times),
        "preemptions": preemptions,
        **client.history.figures(),
    }


def _half_leave(client: Client, rng: random.Random, number: int, long: int) -> Coroutine[Any, Any, None]:
    """Send one request. Every second request is cut off; it would compute for several seconds if the server did not
    notice."""
    ask = Ask.draw(rng)
    how = rng.choice((*Cut, "wait")) if number % 2 else "stay"
    if how != "stay":
        ask = dataclasses.replace(ask, max_tokens=long, ignore_eos=True, stop=(), stream=ask.stream or how != "wait")
    after = rng.choice((-1, 0, 1, 2, rng.randint(1, 30)))
    begin, patience = rng.random() * 0.5, rng.random() * 0.2

    async def one() -> None:
        await asyncio.sleep(begin)
        if how != "wait":
            await client.ask(ask, cut=None if how == "stay" else Cut(how), after=after)
            return
        task = asyncio.create_task(client.ask(ask))
        await asyncio.wait({task}, timeout=patience)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    return one()


# --- how it ends -----------------------------------------------------------------------------------------------------


async def drain(rng: random.Random, *, num_clients: int = 20, terminal: bool = False) -> Figures:
    """Send SIGTERM during streams (with ``terminal``, SIGINT to all processes, as Ctrl-C does). Expected: all streams
    finish, new requests are refused, and the server exits with 0."""
    with ServerProcess("hashlm:5ms", "--max-num-seqs", "16") as server:
        client = Client(server.port, "hashlm:5ms")
        late = Client(server.port, "hashlm:5ms")
        asks = [dataclasses.replace(Ask.draw(rng), max_tokens=500, ignore_eos=True, n=1) for _ in range(num_clients)]
        tasks = [asyncio.create_task(client.ask(ask)) for ask in asks]
        await until(lambda: running(client, 4), what="streams under way")
        start = time.monotonic()
        if terminal:
            os.killpg(server.pid, signal.SIGINT)
        else:
            server.terminate()
        await until(lambda: _not(client, "/ready", 200), what="503 on /ready")
        await late.ask(Ask.draw(rng))
        await asyncio.gather(*tasks)
        code = await server.ended()
        seconds = time.monotonic() - start
    client.history.check()
    late.history.check(End.REFUSED, refusals=("server_draining",))
    if late.history.of(End.ANSWERED) or len(client.history.of(End.ANSWERED)) != num_clients or code != 0:
        raise Violation(f"exit code {code}, {client.history.counts()}, late: {late.history.counts()}")
    return {"streams": num_clients, "exit code": code, "drained in s": seconds}


async def cut_off(how: str, rng: random.Random) -> Figures:
    """Make the server exit before all requests are answered. Expected: the affected clients get an error. ``how`` is
    ``second signal``, ``timeout`` (of the drain), ``stopped engine`` (a drain while the engine is stopped) or ``no
    restart`` (the engine is killed and not restarted)."""
    flags = {"second signal": ("--shutdown-timeout", "30"), "no restart": ("--no-restart",)}
    expected = 3 if how == "no restart" else 1
    with ServerProcess("hashlm:50ms", *flags.get(how, ("--shutdown-timeout", "0.5"))) as server:
        client = Client(server.port, "hashlm:50ms")
        children = server.children()
        asks = [dataclasses.replace(Ask.draw(rng), max_tokens=2000, ignore_eos=True, stop=()) for _ in range(10)]
        tasks = [asyncio.create_task(client.ask(ask)) for ask in asks]
        await until(lambda: running(client, 10), what="the requests' start")
        start = time.monotonic()
        if how == "no restart":
            os.kill(server.engine(), signal.SIGKILL)
        else:
            if how == "stopped engine":
                os.kill(server.engine(), signal.SIGSTOP)
            server.terminate()
            if how == "second signal":
                await until(lambda: _not(client, "/ready", 200), what="503 on /ready")
                server.process.send_signal(signal.SIGINT)
        await asyncio.gather(*tasks)
        code = await server.ended()
        seconds = time.monotonic() - start
        left = [pid for pid in children if alive(pid)]
    # A chat whose template was not yet rendered gets the error of a stopping server.
    client.history.check(End.FAILED, End.REFUSED, refusals=("server_draining", "timeout"))
    if code != expected or left or client.history.of(End.ANSWERED):
        raise Violation(f"{how}: exit code {code}, not {expected}; processes left: {left}; {client.history.counts()}")
    return {"exit code": code, "ended after s": seconds, **client.history.figures()}


async def _not(client: Client, path: str, wanted: int) -> bool:
    return await status(client, path) != wanted


# --- by hand ---------------------------------------------------------------------------------------------------------

Scenario = Callable[[argparse.Namespace, random.Random], Coroutine[Any, Any, Figures]]

SCENARIOS: Final[dict[str, Scenario]] = {
    "kill-engine": lambda given, rng: kill_engine(given.kills, rng),
    "kill-while-it-loads": lambda given, rng: kill_while_it_loads(rng),
    "kill-api": lambda given, rng: kill_api(max(1, given.kills // 2), rng),
    "kill-api-engine-stopped": lambda given, rng: kill_api(1, rng, stopped=True),
    "stop-engine": lambda given, rng: stop_engine(given.seconds, rng),
    "stop-api": lambda given, rng: stop_api(given.seconds, rng),
    "scarce-files": lambda given, rng: scarce_files(rng),
    "disconnects": lambda given, rng: disconnects(given.streams, rng, rounds=given.rounds),
    "disconnects-little-memory": lambda given, rng: disconnects(
        given.streams, rng, rounds=given.rounds, flags=LITTLE_MEMORY
    ),
    "stall": lambda given, rng: pressure.stall(given.stalled, rng, seconds=given.seconds, rounds=given.rounds),
    "overload": lambda given, rng: pressure.overload(given.seconds, rng),
    "drain": lambda given, rng: drain(rng),
    "drain-terminal": lambda given, rng: drain(rng, terminal=True),
    "second-signal": lambda given, rng: cut_off("second signal", rng),
    "shutdown-timeout": lambda given, rng: cut_off("timeout", rng),
    "shutdown-engine-stopped": lambda given, rng: cut_off("stopped engine", rng),
    "no-restart": lambda given, rng: cut_off("no restart", rng),
}


def main() -> int:
    """Run the scenarios that the command line names, and print their results as JSON lines. Returns 1 if a rule was
    broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.chaos", description=__doc__.splitlines()[0])
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", help=", ".join(SCENARIOS))
    parser.add_argument("--kills", type=int, default=20, help="of the engine; the API process is killed half as often")
    parser.add_argument("--streams", type=int, default=500, help="at once, half of them cut off")
    parser.add_argument("--stalled", type=int, default=100, help="readers that do not read")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3, help="of what is repeated")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    if unknown := set(given.scenarios) - set(SCENARIOS):
        parser.error(f"no such scenario: {', '.join(sorted(unknown))}; there are {', '.join(SCENARIOS)}")
    failed = False
    for name in given.scenarios or SCENARIOS:
        start = time.monotonic()
        try:
            figures = asyncio.run(SCENARIOS[name](given, random.Random(given.seed)))
        except Violation as violation:
            print(json.dumps({"scenario": name, "violation": str(violation)}), flush=True)
            failed = True
            continue
        rounded = {key: round(value, 4) for key, value in figures.items()}
        print(json.dumps({"scenario": name, "seconds": round(time.monotonic() - start, 1), **rounded}), flush=True)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
