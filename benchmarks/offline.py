"""Compares Chairlift, transformers' padded ``generate`` and Chairlift's own static batches, in one interleaved run.

    python benchmarks/make_random_model.py /tmp/q05
    python benchmarks/offline.py --model /tmp/q05 --rounds 3 --json benchmarks/results/offline.json

All requests arrive at once. Every engine produces exactly the same number of tokens for each (end of sequence is
ignored), greedily, in bfloat16, with the same number of threads, without a prefix cache. ``transformers`` pads each
batch of 16 to its longest prompt and runs it until its longest output has ended; only requested tokens are counted.
Processors without bf16 instructions are faster with ``--transformers-dtype float32``. Rounds interleave the engines, so
that a slow minute of the machine affects all of them. The last line has the ratios that the README quotes.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from chairlift import LLM, SamplingParams, __version__

if __package__:
    from benchmarks.workload import draw, totals
else:
    from workload import draw, totals

Requests = list[tuple[list[int], int]]


def chairlift_engine(model: Path, **settings: Any) -> Callable[[Requests], dict[str, float]]:
    """Function that serves requests with Chairlift, and reports time, padding, wasted rows and preemptions."""
    # All rounds send the same requests. With a prefix cache, only the first round would compute the prompts.
    settings |= {"skip_tokenizer_init": True, "enable_prefix_caching": False}
    llm = LLM(model, dtype="bfloat16", kv_cache_memory_bytes=2 << 30, **settings)

    def run(requests: Requests) -> dict[str, float]:
        params = [SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for _, count in requests]
        first = llm.engine.scheduler.step
        begin = time.perf_counter()
        outputs = llm.generate([prompt for prompt, _ in requests], params)
        seconds = time.perf_counter() - begin
        if [len(output.outputs[0].token_ids) for output in outputs] != [count for _, count in requests]:
            raise SystemExit("Chairlift did not produce the tokens it was asked for")
        records = [record for record in llm.engine.step_log if record.step > first]
        return {
            "seconds": seconds,
            "steps": len(records),
            "held_row_tokens": sum(record.num_held for record in records),
            "padding_avoided": sum(record.padding_avoided for record in records),
            "preemptions": llm.engine.scheduler.num_preemptions,
        }

    return run


def transformers_engine(model: Path, batch_size: int, dtype: torch.dtype) -> Callable[[Requests], dict[str, float]]:
    """Function that serves requests with transformers' ``generate``, left-padded, in batches in the order of
    arrival."""
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    network.eval()

    def run(requests: Requests) -> dict[str, float]:
        begin = time.perf_counter()
        for start in range(0, len(requests), batch_size):
            batch = requests[start : start + batch_size]
            width = max(len(prompt) for prompt, _ in batch)
            count = max(count for _, count in batch)
            ids = torch.zeros(len(batch), width, dtype=torch.int64)
            mask = torch.zeros_like(ids)
            for row, (prompt, _) in enumerate(batch):
                ids[row, width - len(prompt) :] = torch.tensor(prompt)
                mask[row, width - len(prompt) :] = 1
            with torch.inference_mode():
                out = network.generate(
                    ids,
                    attention_mask=mask,
                    do_sample=False,
                    min_new_tokens=count,
                    max_new_tokens=count,
                    pad_token_id=0,
                )
            if out.shape[1] != width + count:
                raise SystemExit("transformers did not produce the tokens it was asked for")
        return {"seconds": time.perf_counter() - begin}

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--skip-transformers", action="store_true")
    parser.add_argument("--transformers-dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    requests = draw(args.requests)
    prompt_tokens, output_tokens = totals(requests)
    engines: dict[str, Callable[[Requests], dict[str, float]]] = {
        "continuous": chairlift_engine(args.model),
        "continuous-16": chairlift_engine(args.model, max_num_seqs=16),
        "static-16": chairlift_engine(args.model, max_num_seqs=16, batching="static"),
    }
    if not args.skip_transformers:
        engines["transformers-16"] = transformers_engine(args.model, 16, getattr(torch, args.transformers_dtype))
    print(f"{len(requests)} requests, {prompt_tokens} prompt tokens, {output_tokens} output tokens", flush=True)
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in engines}
    for run in engines.values():
        run(requests[:2])  # warm-up
    for _ in range(args.rounds):
        for name, run in engines.items():
            gc.collect()
            runs[name].append(run(requests))
            seconds = runs[name][-1]["seconds"]
            print(f"{name:16s} {seconds:7.2f} s  {output_tokens / seconds:7.1f} output tokens/s", flush=True)
    rates = {name: output_tokens / statistics.median(r["seconds"] for r in runs[name]) for name in runs}
    ratios = {"continuous-16 / static-16": rates["continuous-16"] / rates["static-16"]}
    if "transformers-16" in rates:
        ratios["continuous / transformers-16"] = rates["continuous"] / rates["transformers-16"]
    print("  ".join(f"{name}: {ratio:.2f}x" for name, ratio in ratios.items()))
    if args.json:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
        record = {
            "command": shlex.join(["offline.py", *sys.argv[1:]]),
            "commit": commit,
            "chairlift": __version__,
            "torch": torch.__version__,
            "cpu": cpu_name(),
            "threads": args.threads,
            "prompt_tokens": prompt_tokens,
            "output_tokens": output_tokens,
            "output_tokens_per_second": {name: round(rate, 1) for name, rate in rates.items()},
            "ratios": {name: round(ratio, 2) for name, ratio in ratios.items()},
            "runs": runs,
        }
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(record, indent=1) + "\n")


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            flags = Path("/proc/cpuinfo").read_text()
            amx = "AMX" if "amx_bf16" in flags else "AVX-512 BF16" if "avx512_bf16" in flags else "no bf16 instructions"
            return f"{line.split(':', 1)[1].strip()}, {os.cpu_count()} cores, {amx}"
    return platform.processor()


if __name__ == "__main__":
    main()
