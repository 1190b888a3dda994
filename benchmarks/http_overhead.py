"""Measures the cost of HTTP: serves the same requests offline and as concurrent streams of the server, in turns.

    python benchmarks/make_random_model.py DIR
    python benchmarks/http_overhead.py --model DIR --rounds 5 --json benchmarks/results/http-overhead.json

The server is started once, with the same settings as the offline engine. Each of the two sleeps while the other is
measured. The client is part of the measured cost, because it runs on the same processors. It is therefore kept cheap:
it only reads bytes, and takes the number of tokens from the end of each stream.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from chairlift import LLM
from chairlift_lab.bench.offline import fit, room_of, run_offline
from chairlift_lab.workload.lengths import Workload

Requests = list[tuple[list[int], int]]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def start_server(model: str, port: int, kv_bytes: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "chairlift", "serve", model, "--port", str(port), "--served-model-name", "bench"]
    command += ["--kv-cache-memory-bytes", str(kv_bytes), "--status-interval", "0"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and server.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5):
                return server
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise SystemExit("the server did not become ready")


async def stream(port: int, prompt: list[int], count: int) -> int:
    """Read one streamed completion. Returns its number of output tokens, as the server counts them."""
    body = json.dumps(
        {
            "model": "bench",
            "prompt": prompt,
            "max_tokens": count,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nConnection: close\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
    tail = b""
    while data := await reader.read(1 << 16):
        tail = (tail + data)[-4096:]
    writer.close()
    at = tail.rfind(b'"completion_tokens":')
    if at < 0 or b"[DONE]" not in tail:
        raise SystemExit(f"a stream ended early: {tail!r}")
    return int(tail[at + 20 : at + 30].split(b",")[0].split(b"}")[0])


async def run_http(port: int, requests: Requests) -> float:
    """Seconds until all requests, sent at the same time, have ended."""
    begin = time.perf_counter()
    counts = await asyncio.gather(*(stream(port, prompt, count) for prompt, count in requests))
    seconds = time.perf_counter() - begin
    if list(counts) != [count for _, count in requests]:
        raise SystemExit("an answer has another length than asked for")
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--num-prompts", type=int, default=64)
    parser.add_argument("--kv-bytes", type=int, default=1 << 30)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    port = free_port()
    server = start_server(args.model, port, args.kv_bytes)
    try:
        llm = LLM(
            args.model, kv_cache_memory_bytes=args.kv_bytes, skip_tokenizer_init=True, enable_prefix_caching=False
        )
        requests, _ = fit(Workload(count=args.num_prompts).requests(), room_of(llm))
        tokens = sum(count for _, count in requests)
        asyncio.run(run_http(port, requests[:4]))
        rounds: list[dict[str, float]] = []
        for index in range(args.rounds):
            # A different seed in each round, so that the server's prefix cache finds nothing.
            drawn, _ = fit(Workload(count=args.num_prompts, seed=index + 1).requests(), room_of(llm))
            tokens = sum(count for _, count in drawn)
            offline = run_offline(llm, drawn).seconds
            http = asyncio.run(run_http(port, drawn))
            rounds.append(
                {"tokens": tokens, "offline": tokens / offline, "http": tokens / http, "ratio": offline / http}
            )
            print(f"round {index + 1}: offline {tokens / offline:.1f}, http {tokens / http:.1f} tokens/s", flush=True)
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)
    ratio = statistics.median(each["ratio"] for each in rounds)
    print(f"http / offline: {ratio:.3f} (median of {len(rounds)} rounds)")
    if args.json is not None:
        record: dict[str, Any] = {
            "machine": platform.processor() or platform.machine(),
            "processors": os.cpu_count(),
            "command": " ".join(sys.argv),
            "rounds": rounds,
            "median_ratio": ratio,
        }
        args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
