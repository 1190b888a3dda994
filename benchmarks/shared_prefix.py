"""Decode steps of many answers to one prompt: rows that read shared KV blocks together against rows that read apart.

    python benchmarks/shared_prefix.py                                       # 16 answers to a prompt of 2,000 tokens
    python benchmarks/shared_prefix.py --answers 4 16 64 --prompts 500 2000 --kernels avx2 --json shared.json

A model of SmolLM2-135M's shape with random weights in bfloat16 answers one prompt ``--answers`` times, or, with
``--apart``, that many different prompts, whose rows share nothing. Steps with and without the sharing of blocks take
turns, in pairs of random order. The bits of a step do not depend on it. Results are the median and the minimum time of
a decode step, the median ratio within the pairs, and the same for its attention alone: a step of attention operations
on the same block tables.

``--first-tokens`` measures something else: the time from the arrival of ``--answers`` equal prompts until each has its
first token, divided by the time of one such prompt alone. One and all take turns.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.make_random_model import make
from chairlift import LLM, SamplingParams
from chairlift.kernels.cpu import library as lib
from chairlift.kernels.cpu.fused_op import OpFlag, OpKind
from chairlift_lab.bench.machine import describe_machine

CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}


def switch(llm: LLM, *, shares: bool) -> None:
    """Let the attention of the next steps read shared blocks together, or apart."""
    program = llm.engine.core.executor._runner.program  # type: ignore[attr-defined]
    for op in program._ops:
        if op.kind == OpKind.ATTENTION:
            op.flags = op.flags & ~int(OpFlag.APART) if shares else op.flags | int(OpFlag.APART)


def attention_seconds(llm: LLM, clock: Any, *, shares: bool) -> float:
    """Seconds of all attention operations of the newest step, computed again."""
    program = llm.engine.core.executor._runner.program  # type: ignore[attr-defined]
    switch(llm, shares=shares)
    ops = [op for op in program._ops if op.kind == OpKind.ATTENTION]
    part = lib.Program.from_buffer_copy(program._program)
    array = (lib.OpStruct * len(ops))(*ops)
    part.ops, part.num_ops = array, len(ops)
    begin = clock()
    done = lib.require().cl_run(llm.engine.core.executor._runner._pool.handle, part, program._batch, 0)  # type: ignore[attr-defined]
    seconds = clock() - begin
    if done != len(ops):
        raise SystemExit(f"the kernels refused the attention of a step ({done})")
    return float(seconds)


def measure(llm: LLM, answers: int, prompt: int, args: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of steps that decode all answers, and of their attention: with ("shared") and without ("apart")."""
    rng, clock = random.Random(prompt), CLOCKS[args.clock]
    text = [rng.randrange(2, 30_000) for _ in range(prompt)]
    for seed in range(answers):
        own = [rng.randrange(2, 30_000) for _ in range(prompt)] if args.apart else text
        params = SamplingParams(temperature=1.0, seed=seed, max_tokens=2 * args.pairs + 40, ignore_eos=True)
        llm.engine.add_request(own, params)
    taken: dict[str, list[float]] = {}
    order: list[bool] = []
    while llm.engine.has_unfinished:
        if not order:
            order = rng.sample((True, False), 2)
        shares = order[-1]
        switch(llm, shares=shares)
        begin = clock()
        llm.engine.step()
        end, step = clock(), llm.engine.step_log[-1].features
        if step.num_decodes != answers or step.prefill_tokens:
            continue
        order.pop()
        name = "shared" if shares else "apart"
        taken.setdefault(name, []).append(end - begin)
        taken.setdefault(f"attention {name}", []).append(attention_seconds(llm, clock, shares=shares))
    return taken


def first_tokens(llm: LLM, answers: int, prompt: int, args: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds until the first tokens of one prompt ("one"), and of ``answers`` equal prompts that arrive together
    ("all"). Each time the prompt is new."""
    rng, clock = random.Random(prompt), CLOCKS[args.clock]
    taken: dict[str, list[float]] = {"one": [], "all": []}
    for _ in range(args.pairs):
        for name, count in rng.sample((("one", 1), ("all", answers)), 2):
            text = [rng.randrange(2, 30_000) for _ in range(prompt)]
            begin = clock()
            for _ in range(count):
                llm.engine.add_request(text, SamplingParams(max_tokens=1, ignore_eos=True))
            while llm.engine.has_unfinished:
                llm.engine.step()
            taken[name].append(clock() - begin)
    return taken


def report_first_tokens(name: str, taken: dict[str, list[float]]) -> dict[str, float]:
    """Print and return the ratio of all equal prompts to one."""
    ratios = sorted(many / one for one, many in list(zip(taken["one"], taken["all"], strict=True))[1:])
    least = min(taken["all"]) / min(taken["one"])
    print(
        f"{name} first tokens: one prompt {1e3 * statistics.median(taken['one']):.0f} ms,"
        f" all {1e3 * statistics.median(taken['all']):.0f} ms, ratio {statistics.median(ratios):.2f}"
        f" ({ratios[0]:.2f} to {ratios[-1]:.2f}), of minima {least:.2f}"
    )
    return {"ratio": statistics.median(ratios), "ratio of minima": least}


def report(name: str, taken: dict[str, list[float]]) -> dict[str, float]:
    """Print and return the median ratio of apart to shared within the pairs, for steps and for their attention."""
    found = {}
    for what in ("", "attention "):
        pairs = list(zip(taken[f"{what}apart"], taken[f"{what}shared"], strict=False))[2:]
        ratios = sorted(apart / shared for apart, shared in pairs)
        apart, shared = ([pair[i] for pair in pairs] for i in (0, 1))
        found[f"{what}ratio"] = statistics.median(ratios)
        found[f"{what}ratio of minima"] = min(apart) / min(shared)
        low, high = ratios[len(ratios) // 10], ratios[-1 - len(ratios) // 10]
        print(
            f"{name} {what or 'step '}apart {1e3 * statistics.median(apart):7.2f} ms (min {1e3 * min(apart):.2f}),"
            f" shared {1e3 * statistics.median(shared):7.2f} ms (min {1e3 * min(shared):.2f}), ratio"
            f" {statistics.median(ratios):.2f} ({low:.2f} to {high:.2f}),"
            f" of minima {min(apart) / min(shared):.2f}"
        )
    return found


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="smollm-135m")
    parser.add_argument("--answers", type=int, nargs="*", default=[16])
    parser.add_argument("--prompts", type=int, nargs="*", default=[2000], help="lengths of the prompt in tokens")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--kernels", nargs="*", default=["auto"])
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--apart", action="store_true", help="different prompts, which share nothing")
    parser.add_argument("--first-tokens", action="store_true", help="equal prompts that arrive together")
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    results, longest = [], max(args.prompts) + 2 * args.pairs + 64
    with tempfile.TemporaryDirectory() as directory:
        where = make(Path(directory), args.shape)
        config = json.loads((where / "config.json").read_text())
        (where / "config.json").write_text(json.dumps({**config, "max_position_embeddings": longest}))
        for kernels in args.kernels:
            llm = LLM(
                where,
                **{"skip_tokenizer_init": True, "threads": args.threads, "kernels": kernels},
                **{"max_num_seqs": max(args.answers), "max_model_len": longest, "kv_cache_dtype": args.kv_cache_dtype},
                num_kv_blocks=(max(args.answers) if args.apart else 2) * (longest // 16 + 2) + 20 * max(args.answers),
            )
            for answers in args.answers:
                for prompt in args.prompts:
                    name = f"{kernels:11s} {answers:3d} x {prompt:5d}"
                    if args.first_tokens:
                        taken = first_tokens(llm, answers, prompt, args)
                        found = report_first_tokens(name, taken)
                    else:
                        taken = measure(llm, answers, prompt, args)
                        found = report(name, taken)
                    results.append(
                        {"kernels": kernels, "answers": answers, "prompt": prompt, **found, "seconds": taken}
                    )
            llm.engine.core.shutdown()
    if args.json:
        record = {"machine": describe_machine(), "settings": {**vars(args), "json": None}, "results": results}
        args.json.write_text(json.dumps(record, indent=2, default=str) + "\n")


if __name__ == "__main__":
    main()
