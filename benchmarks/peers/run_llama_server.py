"""Runs llama.cpp's server as a child of ``compare.py``, inside the environment that ``setup_llama_cpp.sh`` creates.

    ENV/bin/python benchmarks/peers/run_llama_server.py --model FILE.gguf -- --spec-type ngram-simple

llama.cpp drafts only in its own programs, so drafts are measured with its server. Each request has an HTTP connection
of its own. Weights (as in the file) and KV cache have 16 bits; decoding is greedy; there is no prefix caching.
Arguments after ``--`` go to the server. The processor seconds of DONE do not include the server.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from protocol import Requests, serve

START_SECONDS = 120
"""Maximum time in which the server must have loaded the model."""


def load(args: argparse.Namespace, more: Sequence[str]) -> tuple[Callable[[Requests], Sequence[int]], dict[str, Any]]:
    """Start the server and wait until it is healthy. Raises SystemExit if it ends or takes too long."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = str(Path(sys.prefix) / "build" / "bin" / "llama-server")
    command = [program, "--model", str(args.model), "--host", "127.0.0.1", "--port", str(port), "--no-ui"]
    command += ["--parallel", str(args.rows), "--ctx-size", str(args.rows * args.max_model_len), "--no-kv-unified"]
    command += ["--threads", str(args.threads), "--threads-batch", str(args.threads), "--no-context-shift"]
    command += ["--no-cache-prompt", "--cache-ram", "0", *more]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + START_SECONDS
    while not _is_healthy(url):
        if server.poll() is not None or time.monotonic() > deadline:
            raise SystemExit("llama-server did not start; the reason stands above")
        time.sleep(0.1)

    def answer(requests: Requests) -> list[int]:
        with ThreadPoolExecutor(len(requests)) as threads:
            return list(threads.map(lambda each: _tokens(url, *each), requests))

    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stderr
    settings = {"rows": args.rows, "threads": args.threads, "more": list(more)}
    return answer, {"version": " ".join(version.split()[:3]), "settings": settings}


def _is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, ConnectionError):
        return False


def _tokens(url: str, prompt: list[int], count: int) -> int:
    """Number of tokens that the server generated for the prompt."""
    body = {"prompt": prompt, "n_predict": count, "temperature": 0.0, "ignore_eos": True, "cache_prompt": False}
    request = urllib.request.Request(
        f"{url}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as reply:
        return int(json.loads(reply.read())["tokens_predicted"])


def main() -> None:
    cut = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="the GGUF file")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rows", type=int, default=16, help="requests at a time")
    parser.add_argument("--max-model-len", type=int, default=1024, help="tokens of prompt and output together")
    args = parser.parse_args(sys.argv[1:cut])
    serve(lambda: load(args, sys.argv[cut + 1 :]))


if __name__ == "__main__":
    main()
