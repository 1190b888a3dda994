"""What it costs to be watched: tokens per second of a server with ten open live views, and with none, in turns.

    python benchmarks/live_overhead.py [--model bundled] [--viewers 10] [--rounds 5] [--requests 32] [--json FILE]

There are two servers, of which one is never looked at; while one works the other is idle. A round sends the same
requests at once to each, and takes the time until the last answer is complete. The viewers read everything they are
sent, in a process of their own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import subprocess
import sys
import time
from multiprocessing.synchronize import Event

import aiohttp


def look(url: str, viewers: int, ready: Event, over: Event) -> None:
    """Open views until told to stop."""

    async def one(session: aiohttp.ClientSession) -> None:
        async with session.get(f"{url}/live/events") as response:
            async for _ in response.content.iter_any():
                pass

    async def main() -> None:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
            tasks = [asyncio.create_task(one(session)) for _ in range(viewers)]
            await asyncio.sleep(0.5)
            ready.set()
            while not over.is_set():
                await asyncio.sleep(0.05)
            for task in tasks:
                task.cancel()

    asyncio.run(main())


async def send(url: str, model: str, requests: int, tokens: int) -> float:
    """Tokens per second of so many requests at once."""

    async def one(session: aiohttp.ClientSession, number: int) -> int:
        body = {"model": model, "prompt": [5 + number] * 40, "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
        async with session.post(f"{url}/v1/completions", json=body) as response:
            answer = await response.json()
            return int(answer["usage"]["completion_tokens"])

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as session:
        begin = time.perf_counter()
        counts = await asyncio.gather(*(one(session, number) for number in range(requests)))
        return sum(counts) / (time.perf_counter() - begin)


def measure(url: str, args: argparse.Namespace, viewers: int) -> float:
    """One round."""
    ready, over = multiprocessing.Event(), multiprocessing.Event()
    process = multiprocessing.Process(target=look, args=(url, viewers, ready, over))
    process.start()
    ready.wait(20)
    try:
        return asyncio.run(send(url, args.name, args.requests, args.tokens))
    finally:
        over.set()
        process.join(10)


def start(args: argparse.Namespace) -> subprocess.Popen[str]:
    """A server of its own."""
    flags = ["--port", "0", "--served-model-name", args.name, "--status-interval", "0"]
    command = [sys.executable, "-m", "chairlift", "serve", args.model, *flags]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def address(server: subprocess.Popen[str]) -> str:
    """Where it is, once it is ready."""
    lines = []
    for line in server.stdout or ():
        lines.append(line)
        if "ready at " in line:
            return line.split("ready at ")[1].split()[0]
    raise SystemExit("the server did not start: " + "".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bundled", help="what is served")
    parser.add_argument("--viewers", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=200, help="of each answer")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    args.name = "model"
    servers = [start(args), start(args)]
    try:
        urls = {viewers: address(server) for viewers, server in zip((0, args.viewers), servers, strict=True)}
        for url in urls.values():  # warm up
            asyncio.run(send(url, args.name, args.requests, args.tokens))
        rounds = []
        for number in range(args.rounds):
            sides = (0, args.viewers) if number % 2 else (args.viewers, 0)
            rounds.append({viewers: measure(urls[viewers], args, viewers) for viewers in sides})
            alone, watched = rounds[-1][0], rounds[-1][args.viewers]
            print(f"round {number}: {alone:,.0f} tokens/s alone, {watched:,.0f} watched, {watched / alone - 1:+.2%}")
        change = [each[args.viewers] / each[0] - 1 for each in rounds]
        print(f"median {statistics.median(change):+.2%}, from {min(change):+.2%} to {max(change):+.2%}")
        if args.json:
            record = {"benchmark": "live_overhead", "viewers": args.viewers, "rounds": rounds, "change": change}
            with open(args.json, "w") as file:
                json.dump(record, file, indent=1)
    finally:
        for server in servers:
            server.terminate()
            server.wait(20)


if __name__ == "__main__":
    main()
