"""Compares Chairlift on one GPU with transformers' continuous batching, and measures the gain of CUDA graphs and
look-ahead.

    python benchmarks/make_random_model.py /tmp/qwen3 --shape qwen3-0.6b
    python benchmarks/gpu.py --model /tmp/qwen3 --rounds 2 --json benchmarks/results/gpu-qwen3-0.6b.json

The requests are those of nano-vllm's benchmark: 256 requests that arrive at the start, with prompts and outputs of 100
to 1,024 tokens each, uniformly distributed, seed 0. Chairlift samples at temperature 0.6; transformers takes the most
likely token, which is less work. Engines take turns: each is started, warmed up, timed once and ended, so that it has
the whole GPU memory. The minimum time is computed from the GPU's limits, which are measured at the end. ``--device
cpu`` tests the script, without a minimum time.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PEERS = HERE / "peers"
sys.path.insert(0, str(PEERS))

from compare import print_table, save, summarise  # noqa: E402
from protocol import Child, Requests  # noqa: E402
from workload import totals  # noqa: E402

VARIANTS: dict[str, dict[str, Any]] = {
    "chairlift": {},
    "graphs off": {"cuda_graphs": "off"},
    "in turns": {"num_lookahead_steps": 0},
    "fp8": {"quantization": "fp8"},
    "batch-invariant": {"batch_invariant": True},
}
"""Name of a variant -> its settings that differ from the first variant's. In the variant ``in turns``, host and GPU
wait for each other."""


def draw(count: int, longest: int) -> Requests:
    """Draw ``count`` prompts and output lengths, in the order in which nano-vllm draws them (its ``longest`` is
    1,024)."""
    rng = random.Random(0)
    prompts = [[rng.randint(0, 10000) for _ in range(rng.randint(100, longest))] for _ in range(count)]
    return [(prompt, rng.randint(100, longest)) for prompt in prompts]


def commands(args: argparse.Namespace) -> dict[str, list[str]]:
    """Commands of the engines, in the order of a round."""
    settings = {"device": args.device, "num_lookahead_steps": 1, "cuda_graphs": "start", "max_num_seqs": 256}
    settings |= {"kv_cache_memory_bytes": None if args.device == "cuda" else 2 << 30}
    settings |= {"max_num_batched_tokens": args.max_num_batched_tokens}
    chairlift = [sys.executable, str(PEERS / "run_chairlift.py"), "--model", str(args.model), "--temperature", "0.6"]
    engines = {name: [*chairlift, "--settings", json.dumps(settings | own)] for name, own in VARIANTS.items()}
    peer = [sys.executable, str(PEERS / "run_transformers.py"), "--model", str(args.model), "--device", args.device]
    engines["transformers"] = [*peer, "--max-batch-tokens", str(args.max_num_batched_tokens), "--max-requests", "256"]
    return {name: engines[name] for name in engines if name == "chairlift" or name in args.only}


def measure(
    engines: dict[str, list[str]], requests: Path, rounds: int, work: Path
) -> Iterator[tuple[str, dict[str, Any], dict[str, float]]]:
    """Yield after each run: the engine, its description of itself, and the result. An engine that fails is not run
    again.

    Raises SystemExit when Chairlift itself fails, because all other engines are compared with it, or when this process
    is told to end.
    """
    for number in range(rounds):
        for name, command in list(engines.items()):
            try:
                child = Child(name, command, work / f"{name.replace(' ', '-')}.log")
                try:
                    result = child.run(requests)
                finally:
                    child.kill()
            except SystemExit as failure:
                if name == "chairlift" or not isinstance(failure.code, str):
                    raise
                print(f"round {number + 1}  {failure.code}; the others go on", flush=True)
                del engines[name]
                continue
            print(f"round {number + 1}  {name:13s} {result['seconds']:7.2f} s", flush=True)
            yield name, child.about, result


def floor_of(model: Path, requests: Requests) -> tuple[float, dict[str, Any]]:
    """(minimum seconds that the GPU's limits allow, the limits as a mapping)."""
    import torch

    from chairlift.kernels.roof import GPU
    from chairlift.models.model_files import read_config
    from chairlift.models.step_cost import ModelCost
    from chairlift_lab.bench.floor import GPU_BUDGETS, workload_floor
    from chairlift_lab.bench.kernel_report import limits_record, limits_table
    from chairlift_lab.bench.limits import measure_device
    from chairlift_lab.bench.report import text

    limits = measure_device(torch.device("cuda"), torch.bfloat16)
    print("", *text(limits_table(limits_record(limits))), sep="\n")
    lengths = [(len(prompt), count) for prompt, count in requests]
    cost, roof = ModelCost.of(read_config(model), torch.bfloat16), limits.roof(GPU, torch.bfloat16, 1)
    floor = workload_floor(lengths, cost, roof, max_num_seqs=256, budgets=GPU_BUDGETS)
    return floor.seconds, limits_record(limits) | {"gpu": torch.cuda.get_device_name()}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    names = [*VARIANTS, "transformers"][1:]
    parser.add_argument(
        "--only", nargs="*", choices=names, default=names, help="engines to run besides Chairlift itself"
    )
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument(
        "--longest", type=int, default=1024, help="maximum number of tokens of prompts and outputs, at least 100"
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "chairlift-gpu", help="for logs")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.rounds < 1 or args.requests < 1 or args.longest < 100:
        parser.error("--rounds and --requests must be at least 1, and --longest at least 100")
    return args


def main() -> None:
    args = parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that measure() ends the child
    args.work.mkdir(parents=True, exist_ok=True)
    requests = draw(args.requests, args.longest)
    prompt_tokens, output_tokens = totals(requests)
    workload = args.work.resolve() / "workload.json"
    workload.write_text(json.dumps(requests))
    about: dict[str, Any] = {}
    results: dict[str, list[dict[str, float]]] = {}

    def keep(floor: float | None, limits: dict[str, Any]) -> dict[str, Any]:
        summary = summarise(results, output_tokens, lambda turn: floor)
        if args.json:
            record = {"summary": summary, "engines": about, "rounds": results}
            device = {"device": args.device, "limits": limits, "floor_seconds": floor}
            save(args.json, args.model, requests, device | record)
        return summary

    for name, child_about, result in measure(commands(args), workload, args.rounds, args.work):
        about[name] = child_about
        results.setdefault(name, []).append(result)
        keep(None, {})  # the next steps may fail
    floor, limits = floor_of(args.model, requests) if args.device == "cuda" else (None, {})
    print_table(keep(floor, limits), about)
    floor_text = "" if floor is None else f"; the floor is {floor:.2f} s, {output_tokens / floor:,.0f} output tokens/s"
    print(f"{len(requests)} requests, {prompt_tokens:,} prompt tokens, {output_tokens:,} output tokens{floor_text}")


if __name__ == "__main__":
    main()
