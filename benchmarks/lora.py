"""Measures the cost of adapters: steps without, with one and with many adapters, in turns, and one engine for all
adapters against one engine per adapter.

    python benchmarks/make_random_model.py /tmp/q05
    python benchmarks/lora.py steps --model /tmp/q05 --rounds 10 --json benchmarks/results/lora-steps.json
    python benchmarks/make_random_model.py /tmp/smollm --shape smollm-135m
    python benchmarks/lora.py engines --model /tmp/smollm --rows 8 --tokens 64 --rounds 4
    python benchmarks/make_random_model.py /tmp/stories --shape stories-15m
    python benchmarks/lora.py many --model /tmp/stories --adapters 1000 --rank 8 --rate 20

``steps`` runs two engines in one process, with and without ``enable_lora``, and 64 rows that decode. A window is one
call of ``generate``; its result is the median time of the steps in which all rows decode. Each round runs one window of
each kind in random order, and divides its result by that of the engine without adapters. One kind has adapters enabled
but unused. ``engines`` sends the same requests to one process with eight adapters, and to eight processes with one
adapter each. These start together and have one thread each, because with more threads than cores they would wait for
each other. ``many`` loads a large number of adapters, of which ``--in-memory`` fit into memory, and sends requests at
``--rate`` a second (Poisson) for adapters of Zipf's popularity (the n-th most popular one has 1/n of the requests of
the first): first all adapters in memory, then only some. The adapters are random, of ``--rank``, on all linear layers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

from chairlift import LLM, AsyncLLM, LoRARequest, SamplingParams, __version__
from chairlift.lora.sites import sites_in
from chairlift.models.hf_config import parse_config, read_json

Adapters = list[LoRARequest | None]


def write_adapter(model: Path, target: Path, rank: int, seed: int) -> LoRARequest:
    """Write a random adapter for all linear layers of a model."""
    sites = sites_in(parse_config(read_json(model / "config.json"), where=str(model)))
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, part in sites.parts.items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        for which, shape in (("A", (rank, part.shape[1])), ("B", (part.shape[0], rank))):
            tensors[f"{module}.lora_{which}.weight"] = 0.01 * torch.randn(shape, generator=generator)
    target.mkdir(parents=True)
    save_file(tensors, target / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank}
    (target / "adapter_config.json").write_text(json.dumps(settings))
    return LoRARequest(f"a{seed}", seed + 1, target)


def prompts(count: int, length: int) -> list[list[int]]:
    """``count`` different prompts of ``length`` token ids, without an end token."""
    return [[3 + (row * 31 + at * 7) % 250 for at in range(length)] for row in range(count)]


def window(llm: LLM, adapters: Adapters, tokens: int) -> float:
    """Run one window: a call of ``generate``. Returns the median seconds of the steps in which all rows decode."""
    rows, first = len(adapters), llm.engine.scheduler.step
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    llm.generate(prompts(rows, 8), params, lora_request=adapters)
    records = [r for r in llm.engine.step_log if r.step > first and len(r.decodes) == rows and not r.chunks]
    if len(records) < tokens // 2:
        raise SystemExit(f"only {len(records)} steps have {rows} decodes; give more --tokens")
    return statistics.median(record.end - record.start for record in records)


def summary(ratios: list[float], seed: int) -> dict[str, float]:
    """Mean of the ratios and its 95 % interval, from 4,000 resamples."""
    rng = random.Random(seed)
    means = sorted(statistics.fmean(rng.choices(ratios, k=len(ratios))) for _ in range(4000))
    return {"mean": statistics.fmean(ratios), "low": means[100], "high": means[-101]}


def steps(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Ratios of step times, one per round and kind of window."""
    known = [write_adapter(args.model, folder / f"a{n}", args.rank, n) for n in range(args.adapters)]
    how: dict[str, Any] = {
        **{"dtype": "bfloat16", "skip_tokenizer_init": True, "enable_prefix_caching": False},
        **{"max_num_seqs": args.rows, "kv_cache_memory_bytes": 256 << 20, "max_model_len": 256},
    }
    plain = LLM(args.model, **how)
    lora = LLM(args.model, enable_lora=True, max_loras=max(8, args.adapters), **how)
    mixed: Adapters = [known[row % len(known)] for row in range(args.rows)]
    kinds: dict[str, tuple[LLM, Adapters]] = {
        "without": (plain, [None] * args.rows),
        "unused": (lora, [None] * args.rows),
        "one adapter": (lora, [known[0]] * args.rows),
        f"{len(known)} adapters": (lora, mixed),
    }
    rng, found = random.Random(args.seed), dict[str, list[float]]()
    for llm, adapters in kinds.values():  # warms up, and reads the adapters
        window(llm, adapters, args.tokens)
    for round_ in range(args.rounds):
        times = {name: window(*kinds[name], args.tokens) for name in rng.sample(sorted(kinds), len(kinds))}
        for name, seconds in times.items():
            found.setdefault(name, []).append(seconds)
        told = ", ".join(f"{name} {times[name] / times['without']:.3f}" for name in kinds)
        print(f"round {round_}: {times['without'] * 1000:.1f} ms; {told}", flush=True)
    ratios = {
        name: [a / b for a, b in zip(found[name], found["without"], strict=True)] for name in kinds if name != "without"
    }
    return {"seconds": found, "ratios": {name: summary(each, args.seed) for name, each in ratios.items()}}


def work(args: argparse.Namespace) -> None:
    """Main function of a process of ``engines``: serves its part of the requests when it gets a signal, and reports
    when it has finished."""
    asked = [LoRARequest(f"a{n}", n + 1, path) for n, path in enumerate(args.paths)]
    how: dict[str, Any] = {"dtype": "bfloat16", "skip_tokenizer_init": True, "enable_prefix_caching": False}
    if args.threads:
        how["threads"] = args.threads
    llm = LLM(args.model, enable_lora=True, kv_cache_memory_bytes=128 << 20, max_model_len=512, **how)
    params = SamplingParams(temperature=0.0, max_tokens=args.tokens, ignore_eos=True)
    adapters: Adapters = [asked[row % len(asked)] for row in range(args.rows)]
    llm.generate(prompts(len(asked), 8), SamplingParams(temperature=0.0, max_tokens=2), lora_request=[*asked])
    print("ready", flush=True)
    for _ in sys.stdin:
        llm.generate(prompts(args.rows, 32), params, lora_request=adapters)
        print("done", flush=True)


class Workers:
    """Processes that serve the requests together."""

    def __init__(self, args: argparse.Namespace, groups: list[list[Path]], threads: int) -> None:
        command = [sys.executable, __file__, "work", "--model", str(args.model), "--tokens", str(args.tokens)]
        command += ["--rows", str(args.rows // len(groups)), "--threads", str(threads), "--paths"]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._processes = [subprocess.Popen([*command, *map(str, group)], **pipes) for group in groups]
        self._hear("ready")

    def _hear(self, word: str) -> None:
        for process in self._processes:
            if process.stdout is None or process.stdout.readline().strip() != word:
                raise SystemExit(f"a process ended before it was {word}")

    def seconds(self) -> float:
        """Seconds until all processes have finished."""
        begin = time.perf_counter()
        for process in self._processes:
            if process.stdin is not None:
                process.stdin.write("go\n")
                process.stdin.flush()
        self._hear("done")
        return time.perf_counter() - begin

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            if process.stdin is not None:
                process.stdin.close()
            process.wait(60)


def engines(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Time of one engine per adapter divided by the time of one engine for all adapters, per round."""
    paths = [Path(write_adapter(args.model, folder / f"a{n}", args.rank, n).lora_path) for n in range(args.adapters)]
    threads = os.cpu_count() or 1
    kinds = {
        "one engine": Workers(args, [paths], threads),
        "one each": Workers(args, [[path] for path in paths], 1),
    }
    rng, found = random.Random(args.seed), dict[str, list[float]]()
    try:
        for round_ in range(args.rounds):
            for name in rng.sample(sorted(kinds), len(kinds)):
                found.setdefault(name, []).append(kinds[name].seconds())
            print(f"round {round_}: " + ", ".join(f"{name} {found[name][-1]:.2f} s" for name in kinds), flush=True)
    finally:
        for workers in kinds.values():
            workers.close()
    ratios = {
        name: summary([a / b for a, b in zip(found[name], found["one engine"], strict=True)], args.seed)
        for name in kinds
        if name != "one engine"
    }
    return {"seconds": found, "ratios": ratios}


class Seen(NamedTuple):
    """Measurements of one request of the benchmark ``many``."""

    arrival: float
    first: float
    """Seconds until the request's first token."""


async def ask(llm: AsyncLLM, prompt: list[int], adapter: LoRARequest, tokens: int) -> Seen:
    """Send a request and read its output."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    arrival, first = time.perf_counter(), 0.0
    async for _ in llm.generate(prompt, params, lora_request=adapter):
        first = first or time.perf_counter() - arrival
    return Seen(arrival, first)


async def traffic(args: argparse.Namespace, known: list[LoRARequest], in_memory: int) -> dict[str, Any]:
    """Results of one engine that keeps ``in_memory`` adapters in memory."""
    rng, count = random.Random(args.seed), args.requests
    chosen = rng.choices(known, weights=[1 / (n + 1) for n in range(len(known))], k=count)
    how: dict[str, Any] = {"dtype": "bfloat16", "skip_tokenizer_init": True, "enable_prefix_caching": False}
    how |= {"max_num_seqs": args.rows, "kv_cache_memory_bytes": 256 << 20, "max_model_len": 256}
    async with AsyncLLM(
        args.model, enable_lora=True, max_loras=8, max_cpu_loras=in_memory, max_lora_rank=args.rank, **how
    ) as llm:
        for adapter in known:  # all are loaded once; the least popular ones leave memory first
            await ask(llm, prompts(1, 8)[0], adapter, 1)
        before = llm._started().stats.engine.num_adapter_hits
        tasks, due = [], time.perf_counter()
        for adapter, prompt in zip(chosen, prompts(count, 32), strict=True):
            due += rng.expovariate(args.rate)
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            tasks.append(asyncio.create_task(ask(llm, prompt, adapter, args.tokens)))
        seen = await asyncio.gather(*tasks)
        hits = llm._started().stats.engine.num_adapter_hits - before
    starts = sorted((each.arrival + each.first, each.arrival) for each in seen)
    passed = [sum(start < each.arrival + each.first and came > each.arrival for start, came in starts) for each in seen]
    firsts = sorted(each.first for each in seen)
    return {
        "in_memory": in_memory,
        "ttft_p50_ms": 1000 * firsts[count // 2],
        "ttft_p99_ms": 1000 * firsts[count * 99 // 100],
        "ttft_max_ms": 1000 * firsts[-1],
        "hit_rate": hits / count,
        "most_later_ones_first": max(passed),
    }


def many(args: argparse.Namespace, folder: Path) -> None:
    """Print the results with all adapters in memory and with only some."""
    known = [write_adapter(args.model, folder / f"a{n}", args.rank, n) for n in range(args.adapters)]
    found = [asyncio.run(traffic(args, known, room)) for room in (len(known), args.in_memory)]
    for each in found:
        print(", ".join(f"{name} {value:.3g}" for name, value in each.items()), flush=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "what",
        choices=("steps", "engines", "many", "work"),
        help="benchmark to run; work is used internally by engines",
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=64, help="requests at once")
    parser.add_argument("--tokens", type=int, default=24, help="tokens of each output")
    parser.add_argument(
        "--adapters", type=int, default=None, help="default: 16 for steps, 8 for engines, 1,000 for many"
    )
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--rate", type=float, default=20.0, help="requests per second in many")
    parser.add_argument("--requests", type=int, default=1500, help="number of requests in many")
    parser.add_argument("--in-memory", type=int, default=64, help="adapters in memory in many")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--paths", nargs="*", default=())
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    if args.what == "work":
        work(args)
        return
    args.adapters = args.adapters or {"steps": 16, "engines": 8, "many": 1000}[args.what]
    with tempfile.TemporaryDirectory() as folder:
        if args.what == "many":
            many(args, Path(folder))
            return
        found = (steps if args.what == "steps" else engines)(args, Path(folder))
    for name, ratio in found["ratios"].items():
        print(f"{name}: {ratio['mean']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f})")
    if args.json:
        about = {"machine": platform.processor() or platform.machine(), "processors": os.cpu_count()}
        settings = {key: getattr(args, key) for key in ("what", "rows", "tokens", "adapters", "rank", "rounds", "seed")}
        record = {"benchmark": "lora", "version": __version__, **about, **settings, "model": args.model.name, **found}
        args.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
