"""Measures the gain of saving evicted prefixes. Conversations continue after other conversations have evicted their
part of the cache.

    python benchmarks/make_random_model.py /tmp/smollm --shape smollm-135m
    python benchmarks/prefix_offload.py --model /tmp/smollm --rounds 5 --json benchmarks/results/prefix-offload.json

``--chats`` conversations of ``--turns`` turns alternate. Each turn sends the whole conversation and ``--added`` more
tokens. The KV cache has room for a third of the final conversations. The engines are: without swap space (``off``),
with ``--prefix-offload`` to memory and to a file, and with a KV cache for everything (``ample``), which is the best
possible case. Each round has its own prompts. Outputs have ``--answer`` tokens; they are greedy, and must be equal on
all engines.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from chairlift import LLM, SamplingParams, __version__

if __package__:
    from benchmarks.offline import cpu_name
else:
    from offline import cpu_name

BLOCK = 16


def engines(args: argparse.Namespace, directory: str) -> dict[str, LLM]:
    longest = args.first + args.turns * (args.added + args.answer)
    blocks = args.chats * -(-longest // BLOCK)
    space = {"prefix_offload": True, "swap_space_bytes": args.swap_bytes}
    settings: dict[str, dict[str, Any]] = {
        "off": {"num_kv_blocks": blocks // 3, "swap_space_bytes": 0},
        "memory": {"num_kv_blocks": blocks // 3, **space},
        "file": {"num_kv_blocks": blocks // 3, **space, "swap_directory": directory},
        "ample": {"num_kv_blocks": blocks * 2, "swap_space_bytes": 0},
    }
    return {
        name: LLM(args.model, skip_tokenizer_init=True, max_num_seqs=8, threads=args.threads, **own)
        for name, own in settings.items()
    }


def chat(llm: LLM, args: argparse.Namespace, seed: int) -> tuple[dict[str, float], list[list[int]]]:
    """Run all turns of all conversations. Returns (name of a time -> its value, all outputs)."""
    rng = random.Random(seed)
    said = [[rng.randrange(8000) for _ in range(args.first)] for _ in range(args.chats)]
    params = SamplingParams(temperature=0.0, max_tokens=args.answer, ignore_eos=True)
    answers, cached, prompts = [], 0, 0
    before = llm.engine.core.stats()
    begin = time.perf_counter()
    for _ in range(args.turns):
        outputs = llm.generate(said, params)
        for number, output in enumerate(outputs):
            answer = list(output.outputs[0].token_ids)
            answers.append(answer)
            cached += output.num_cached_tokens
            prompts += len(said[number])
            said[number] = said[number] + answer + [rng.randrange(8000) for _ in range(args.added)]
    seconds = time.perf_counter() - begin
    stats = llm.engine.core.stats()
    return {
        "seconds": seconds,
        "cached_share": cached / prompts,
        "offloaded_blocks": stats.num_offloaded_blocks - before.num_offloaded_blocks,
        "brought_back_blocks": stats.num_brought_back_blocks - before.num_brought_back_blocks,
    }, answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--chats", type=int, default=24)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--first", type=int, default=500, help="tokens of a conversation's first prompt")
    parser.add_argument("--added", type=int, default=50, help="tokens that each turn adds")
    parser.add_argument("--answer", type=int, default=20)
    parser.add_argument("--swap-bytes", type=int, default=1 << 30)
    parser.add_argument("--directory", help="directory of the file (default: a temporary directory)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        llms = engines(args, directory)
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in llms}
        for number in range(args.rounds + 1):  # the first round warms up, and fills the cache
            said: list[list[list[int]]] = []
            for name, llm in llms.items():
                run, answers = chat(llm, args, number)
                said.append(answers)
                if number:
                    runs[name].append(run)
                    print(f"{name:8s} {run['seconds']:6.2f} s, {run['cached_share']:.0%} of prompts cached", flush=True)
            if any(answers != said[0] for answers in said):
                raise SystemExit("engines generated different outputs")
    seconds = {name: statistics.median(run["seconds"] for run in own) for name, own in runs.items()}
    ratios = {f"{name} / off": round(seconds["off"] / seconds[name], 2) for name in seconds if name != "off"}
    print("  ".join(f"{name}: {ratio:.2f}x" for name, ratio in ratios.items()))
    if args.json:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
        record = {
            "command": shlex.join(["prefix_offload.py", *sys.argv[1:]]),
            "commit": commit,
            "chairlift": __version__,
            "cpu": cpu_name(),
            "threads": args.threads,
            "ratios": ratios,
            "runs": runs,
        }
        args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
