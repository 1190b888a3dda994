"""Measures many models behind one server: lost and wrong answers under Zipf traffic, and what a load costs the others.

    python benchmarks/many_models.py --json benchmarks/results/many_models.json
    python benchmarks/many_models.py --real --json benchmarks/results/many_models_real.json

``--models`` copies of HashLM with different seeds have memory for ``--places`` of them; with ``--real``, they are
models of 10 MB with random weights. Every answer is compared with that of the same model in this process. With
``--kills``, an engine is killed from time to time; requests that it loses get a 503 and are sent again. Then one model
that stays loaded answers requests at a fixed rate, first alone and then while others are loaded and unloaded, in turns;
the ratio of the two p99 is the cost of the other models. With ``--real``, one stream of that model is read in the same
two ways. A gap is the time between two tokens; the ratios of their medians and of their p99 are what a load costs a
stream.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

from chairlift import LLM, SamplingParams, __version__
from chairlift.config import EngineConfig
from chairlift.loading.sizes import needed_bytes
from chairlift.models.random_weights import write_random_model

_BLOCKS = 512
_REAL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
_PROMPTS = [[65 + number, 66, 67] for number in range(8)]
_TOKENS = 16


def expected(models: list[str]) -> list[list[list[int]]]:
    """Model -> prompt -> token ids of its answer."""
    params = SamplingParams(max_tokens=_TOKENS, seed=7, ignore_eos=True)
    found = []
    for model in models:
        llm = LLM(model, num_kv_blocks=_BLOCKS, skip_tokenizer_init=True)
        found.append([output.outputs[0].token_ids for output in llm.generate(_PROMPTS, params)])
    return found


def send(url: str, model: int, prompt: int) -> tuple[int, list[int], float]:
    """(status, token ids, seconds) of one request."""
    body = {
        "model": f"m{model}",
        "prompt": _PROMPTS[prompt],
        "max_tokens": _TOKENS,
        "seed": 7,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    begin = time.monotonic()
    try:
        with urllib.request.urlopen(request, timeout=600) as reply:
            content = json.load(reply)
            return reply.status, content["choices"][0]["token_ids"], time.monotonic() - begin
    except urllib.error.HTTPError as error:
        error.read()
        return error.code, [], time.monotonic() - begin


def engines(server: int) -> list[int]:
    """Process ids of the engines of a server."""
    found = []
    for each in Path("/proc").iterdir():
        if each.name.isdigit():
            try:
                fields = (each / "stat").read_text().rpartition(")")[2].split()
                command = (each / "cmdline").read_bytes()
            except OSError:
                continue
            if int(fields[1]) == server and b"engine_process" in command:
                found.append(int(each.name))
    return found


async def zipf(args: argparse.Namespace, url: str, server: int, known: list[list[list[int]]]) -> dict[str, Any]:
    """Random requests, most of them for few models. Every request must be answered, by its own model."""
    rng = random.Random(args.seed)
    weights = [1 / (rank + 1) for rank in range(args.models)]
    counts: Counter[str] = Counter()

    async def one(model: int, prompt: int) -> None:
        for _ in range(100):
            status, tokens, _ = await asyncio.to_thread(send, url, model, prompt)
            if status == 200:
                counts["right" if tokens == known[model][prompt] else "wrong"] += 1
                return
            counts[f"status {status}"] += 1
            if status not in (429, 503):
                break
            await asyncio.sleep(1)
        counts["lost"] += 1

    async def kill() -> None:
        while True:
            await asyncio.sleep(args.kill_every)
            if found := engines(server):
                os.kill(rng.choice(found), signal.SIGKILL)
                counts["kills"] += 1

    killer = asyncio.create_task(kill()) if args.kills else None
    begin = time.monotonic()
    tasks = []
    for _ in range(args.requests):
        await asyncio.sleep(rng.expovariate(args.rate))
        model = rng.choices(range(args.models), weights)[0]
        tasks.append(asyncio.create_task(one(model, rng.randrange(len(_PROMPTS)))))
    await asyncio.gather(*tasks)
    if killer is not None:
        killer.cancel()
    seconds = time.monotonic() - begin
    with urllib.request.urlopen(f"{url}/metrics") as reply:
        lines = reply.read().decode().splitlines()
    loads = sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("chairlift:model_loads_total{"))
    return {"requests": args.requests, "seconds": round(seconds, 1), "loads": int(loads), **counts}


async def gaps_of(url: str, count: int) -> list[float]:
    """Seconds between the tokens of one stream of the model that stays loaded."""
    body = {
        "model": "m0",
        "prompt": _PROMPTS[0],
        "max_tokens": count,
        "seed": 7,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }

    def read() -> list[float]:
        request = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=600) as reply:
            return [time.monotonic() for line in reply if line.startswith(b"data: {")]

    times = await asyncio.to_thread(read)
    return [later - earlier for earlier, later in itertools.pairwise(times)]


async def streams(args: argparse.Namespace, url: str) -> dict[str, Any]:
    """Gaps of a stream, alone and while another model loads, in turns."""
    gaps: dict[str, list[float]] = {"alone": [], "while another loads": []}
    model = args.models - 1
    await gaps_of(url, 1000)
    for _ in range(2 * args.rounds):
        gaps["alone"] += await gaps_of(url, 1000)
        load = asyncio.create_task(asyncio.to_thread(send, url, model, 0))
        while not load.done():
            gaps["while another loads"] += await gaps_of(url, 200)
        await load
        model = max(1, model - 1)
    medians = {kind: statistics.median(values) for kind, values in gaps.items()}
    p99 = {kind: sorted(values)[int(len(values) * 0.99)] for kind, values in gaps.items()}
    return {
        "median_ms": {kind: round(1000 * value, 2) for kind, value in medians.items()},
        "p99_ms": {kind: round(1000 * value, 2) for kind, value in p99.items()},
        "ratio": {
            name: round(found["while another loads"] / found["alone"], 2)
            for name, found in (("median", medians), ("p99", p99))
        },
        "gaps": {kind: len(values) for kind, values in gaps.items()},
    }


async def resident(args: argparse.Namespace, url: str) -> dict[str, Any]:
    """p99 of a model that stays loaded, alone and while others come and go, in turns."""
    times: dict[str, list[float]] = {"alone": [], "with others": []}
    await asyncio.to_thread(send, url, 0, 0)

    async def others(stop: asyncio.Event) -> None:
        model = args.models - 1
        while not stop.is_set():
            await asyncio.to_thread(send, url, model, 0)
            model = max(1, model - 1)

    for _ in range(args.rounds):
        for kind, taken in times.items():
            stop = asyncio.Event()
            task = asyncio.create_task(others(stop)) if kind == "with others" else None
            end = time.monotonic() + args.round_seconds
            while time.monotonic() < end:
                taken.append((await asyncio.to_thread(send, url, 0, 1))[2])
                await asyncio.sleep(0.05)
            stop.set()
            if task is not None:
                await task
    p99 = {kind: sorted(taken)[int(len(taken) * 0.99)] for kind, taken in times.items()}
    return {
        "p99_ms": {kind: round(1000 * value, 1) for kind, value in p99.items()},
        "ratio": round(p99["with others"] / p99["alone"], 3),
        "requests": {kind: len(taken) for kind, taken in times.items()},
    }


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        numbers = range(args.models)
        models = [f"hashlm:{args.delay}:seed={number + 1}" for number in numbers]
        if args.real:
            models = [str(write_random_model(Path(folder, str(each)), _REAL, seed=each)) for each in numbers]
        known = expected(models)
        entries: dict[str, dict[str, Any]] = {
            f"m{number}": {"model": model, "num_kv_blocks": _BLOCKS, "skip_tokenizer_init": True}
            for number, model in enumerate(models)
        }
        entries["m0"]["pinned"] = True
        size = needed_bytes(EngineConfig.from_flat({"model": models[0], "num_kv_blocks": _BLOCKS}))
        path = Path(folder) / "models.json"
        path.write_text(json.dumps({"models": entries}))
        command = [sys.executable, "-m", "chairlift", "serve", "--models", str(path), "--port", "0"]
        command += ["--models-memory-bytes", str(args.places * size)]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            url = server.stdout.readline().split()[-1]
            found = {"zipf": await zipf(args, url, server.pid, known)}
            print(json.dumps(found), flush=True)
            found["resident"] = await resident(args, url)
            if args.real:
                found["stream"] = await streams(args, url)
        finally:
            server.terminate()
            server.wait()
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=20)
    parser.add_argument("--real", action="store_true", help="models with random weights instead of HashLM")
    parser.add_argument("--places", type=int, default=3, help="number of models that fit into the memory")
    parser.add_argument("--delay", default="5ms", help="time of a step")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--rate", type=float, default=2.0, help="requests per second")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kills", action="store_true", help="kill engines meanwhile")
    parser.add_argument("--kill-every", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--round-seconds", type=float, default=15.0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    settings = {name: value for name, value in vars(args).items() if name != "json"}
    found = {"version": __version__, "settings": settings, **asyncio.run(measure(args))}
    text = json.dumps(found, indent=2)
    print(text)
    if args.json is not None:
        args.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
