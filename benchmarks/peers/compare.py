"""Compares Chairlift, vLLM's CPU backend, OpenVINO GenAI, llama.cpp and transformers: same requests, same precision,
interleaved rounds.

    sh benchmarks/peers/setup_vllm.sh /tmp/vllm        (likewise openvino, llama_cpp, transformers)
    python benchmarks/make_random_model.py /tmp/q05
    python benchmarks/peers/compare.py --model /tmp/q05 --vllm /tmp/vllm --openvino /tmp/openvino \\
        --llama-cpp /tmp/llama --transformers /tmp/transformers \\
        --limits --rounds 3 --json benchmarks/results/peers.json

All 64 requests of ``workload.py``, or those of ``--workload``, arrive at once. Decoding is greedy; end of sequence is
ignored; weights, activations and the KV cache of 2 GiB have 16 bits; there is no prefix caching. Each engine is a child
process with its model loaded and warmed up, and is stopped while another engine computes. The minimum time is computed
from the machine's limits: ``--bandwidth`` and ``--peak``, or with ``--limits`` measurements before and after each turn.
(The memory bandwidth of a virtual machine may change over time.)
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import platform
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import run_llama_cpp
import run_openvino
import torch
from protocol import Child, Place, Requests

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from floor import floor_seconds, model_cost  # noqa: E402
from workload import draw, totals  # noqa: E402

from chairlift.kernels.roof import Roof  # noqa: E402
from chairlift_lab.bench.limits import measure_limits  # noqa: E402
from chairlift_lab.bench.machine import describe_machine  # noqa: E402

NGRAM = {"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_min": 3}
"""Drafts of ``--ngram``. vLLM takes the longest match, of up to 3 tokens here, so all look for the same matches."""
LLAMA_NGRAM = "--spec-type ngram-simple --spec-ngram-simple-size-n 3 --spec-ngram-simple-size-m 8"
"""The same drafts for llama.cpp's server."""
ISA_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")


def commands(args: argparse.Namespace, work: Path) -> dict[str, list[str]]:
    """Name of an engine -> its command, in the order of a round."""
    model = str(args.model)
    engines = {"chairlift": [sys.executable, str(HERE / "run_chairlift.py"), "--model", model]}
    engines["chairlift"] += shlex.split(args.chairlift_args)
    if args.vllm:
        vllm = [str(args.vllm / "bin" / "python"), str(HERE / "run_vllm.py"), "--model", model]
        engines["vllm"] = [*vllm, *shlex.split(args.vllm_args)]
        if args.vllm_default:
            engines["vllm-default"] = [*vllm, "--engine", "processes", "--cores", "auto"]
    if args.ngram:
        for name, more in (("chairlift", {}), ("vllm", {"prompt_lookup_max": NGRAM["prompt_lookup_min"]})):
            if name in engines:
                drafts = ["--speculative-config", json.dumps({**NGRAM, **more})]
                engines[f"{name}-ngram"] = [*engines[name], *drafts]
    if args.openvino:
        exported = args.openvino_model or run_openvino.exported(Place(args.openvino, args.model, work), 16)
        openvino = [str(args.openvino / "bin" / "python"), str(HERE / "run_openvino.py"), "--model", str(exported)]
        engines["openvino"] = [*openvino, *shlex.split(args.openvino_args)]
    if args.llama_cpp:
        python = str(args.llama_cpp / "bin" / "python")
        file = args.llama_cpp_model or run_llama_cpp.converted(Place(args.llama_cpp, args.model, work), 16)
        command = [python, str(HERE / "run_llama_cpp.py"), "--model", str(file)]
        engines["llama.cpp"] = [*command, *shlex.split(args.llama_cpp_args)]
        if args.ngram:  # its server, because the library has no drafts; without drafts too, so that HTTP does not count
            command = [python, str(HERE / "run_llama_server.py"), "--model", str(file)]
            engines["llama-server"] = command
            engines["llama-ngram"] = [*command, "--", *shlex.split(LLAMA_NGRAM)]
    if args.transformers:
        command = [str(args.transformers / "bin" / "python"), str(HERE / "run_transformers.py"), "--model", model]
        engines["transformers"] = [*command, *shlex.split(args.transformers_args)]
        if args.transformers_padded:
            engines["padded"] = [*command, "--engine", "padded"]
    return engines


def limits() -> Roof:
    """Bytes per second that all cores can read now, and operations per second with 16-bit operands."""
    machine = describe_machine()
    found = measure_limits(machine, machine.processors, quick=True)
    return found.roof(machine.isas[-1], torch.bfloat16, machine.processors)


def measure(
    engines: dict[str, list[str]], requests: Path, rounds: int, work: Path, with_limits: bool
) -> tuple[dict[str, Any], ...]:
    """Returns (name of an engine -> its description of itself, name of an engine -> results of its rounds)."""
    children: list[Child] = []
    results: dict[str, list[dict[str, float]]] = {name: [] for name in engines}
    try:
        for name, command in engines.items():
            print(f"starting {name} ...", flush=True)
            children.append(Child(name, command, work / f"{name}.log"))
        before = limits() if with_limits else None
        for number in range(rounds):
            for child in children:
                result = child.run(requests) | {"load_before": os.getloadavg()[0]}
                if before is not None:
                    after = limits()
                    result["bandwidth"] = (before.bandwidth + after.bandwidth) / 2
                    result["peak"] = (before.peak + after.peak) / 2
                    before = after
                results[child.name].append(result)
                times = f"{result['seconds']:7.2f} s, processor {result['cpu_seconds']:7.2f} s"
                print(f"round {number + 1}  {child.name:13s} {times}", flush=True)
        return {child.name: child.about for child in children}, results
    finally:
        for child in children:
            child.kill()


def summarise(
    results: dict[str, list[dict[str, float]]], tokens: int, floor: Callable[[dict[str, float]], float | None]
) -> dict[str, Any]:
    """Summary per engine: median and range of the seconds; tokens per second; the minimum time (``floor``, the median
    over the rounds) divided by the measured time; and time relative to Chairlift (ratio of the medians, and the lowest
    and highest ratio within a round)."""
    summary: dict[str, Any] = {}
    ours = [result["seconds"] for result in results["chairlift"]]
    for name, rounds in results.items():
        seconds = [result["seconds"] for result in rounds]
        median = statistics.median(seconds)
        ratios = [theirs / mine for theirs, mine in zip(seconds, ours, strict=False)]
        floors = [(floor(turn), turn["seconds"]) for turn in rounds]
        shares = [least / taken for least, taken in floors if least is not None]
        summary[name] = {
            "median_seconds": round(median, 2),
            "least_seconds": round(min(seconds), 2),
            "most_seconds": round(max(seconds), 2),
            "output_tokens_per_second": round(tokens / median, 1),
            "percent_of_floor": round(100 * statistics.median(shares), 1) if shares else None,
            "percent_of_floor_range": [round(100 * min(shares), 1), round(100 * max(shares), 1)] if shares else None,
            "times_chairlift": round(median / statistics.median(ours), 2),
            "times_chairlift_range": [round(min(ratios), 2), round(max(ratios), 2)],
        }
    return summary


def print_table(summary: dict[str, Any], about: dict[str, Any]) -> None:
    print(f"\n{'engine':13s} {'version':26s} {'median s':>8s} {'spread s':>15s} {'tok/s':>7s} {'% floor':>7s} against")
    for name, row in summary.items():
        spread = f"{row['least_seconds']:.2f}..{row['most_seconds']:.2f}"
        share = "-" if row["percent_of_floor"] is None else f"{row['percent_of_floor']:.1f}"
        low, high = row["times_chairlift_range"]
        ratio = "" if name == "chairlift" else f"Chairlift {row['times_chairlift']:.2f}x ({low:.2f} to {high:.2f})"
        print(
            f"{name:13s} {about[name]['version']:26.26s} {row['median_seconds']:8.2f} {spread:>15s}"
            f" {row['output_tokens_per_second']:7.1f} {share:>7s} {ratio}"
        )


def save(file: Path, model: Path, requests: Requests, record: dict[str, Any]) -> None:
    """Write ``record`` to ``file``, with the model, the requests and the commit."""
    head = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(head, cwd=HERE, capture_output=True, text=True).stdout if shutil.which("git") else ""
    prompt_tokens, output_tokens = totals(requests)
    about = {
        "date": datetime.date.today().isoformat(),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "commit": commit.strip(),
        "python": platform.python_version(),
        "model": json.loads((model / "config.json").read_text()),
        "requests": len(requests),
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(about | record, indent=1) + "\n")


def hardware() -> dict[str, Any]:
    """Description of the machine: processor, usable cores, relevant instruction sets, memory in GiB, kernel."""
    lines = [line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines()]
    cpu = {key.strip(): value.strip() for key, _, value in lines}
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": cpu.get("model name", platform.processor()),
        "cores": len(os.sched_getaffinity(0)),
        "isa": [flag for flag in ISA_FLAGS if flag in cpu.get("flags", "").split()],
        "memory_gib": round(memory / 2**30, 1),
        "kernel": platform.release(),
    }


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--vllm", type=Path, help="environment made by setup_vllm.sh; left out: not compared")
    parser.add_argument(
        "--vllm-default", action="store_true", help="also vLLM with the processes and binding it chooses"
    )
    parser.add_argument("--openvino", type=Path, help="environment made by setup_openvino.sh; left out: not compared")
    parser.add_argument("--openvino-model", type=Path, help="the exported model; left out: exported now")
    parser.add_argument("--llama-cpp", type=Path, help="environment made by setup_llama_cpp.sh; left out: not compared")
    parser.add_argument("--llama-cpp-model", type=Path, help="the GGUF file; left out: converted now")
    parser.add_argument(
        "--transformers", type=Path, help="environment made by setup_transformers.sh; left out: not compared"
    )
    parser.add_argument("--transformers-padded", action="store_true", help="also its plain generate, in padded batches")
    parser.add_argument("--ngram", action="store_true", help="also each engine with n-gram drafts")
    parser.add_argument("--workload", type=Path, help="requests as speculation.py --write saves them, instead of draws")
    for name in ("chairlift", "vllm", "openvino", "llama-cpp", "transformers"):
        script = name.replace("-", "_")
        parser.add_argument(f"--{name}-args", default="", help=f"more options for run_{script}.py, in one string")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limits", action="store_true", help="measure the machine's limits between the turns")
    parser.add_argument("--bandwidth", type=float, help="bytes per second that memory can be read with")
    parser.add_argument("--peak", type=float, help="FLOP per second with 16-bit operands")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "chairlift-peers", help="for logs")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if (args.bandwidth is None) != (args.peak is None):
        parser.error("the floor needs both --bandwidth and --peak; give both or neither")
    if args.limits and args.bandwidth is not None:
        parser.error("--limits measures what --bandwidth and --peak give; take one or the other")
    if args.rounds < 1 or args.requests < 1:
        parser.error(f"--rounds and --requests must be at least 1, got {args.rounds} and {args.requests}")
    return args


def main() -> None:
    args = parse_args()
    # SIGTERM raises SystemExit, so that measure() ends the children, which have process groups of their own.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    args.work.mkdir(parents=True, exist_ok=True)
    requests = draw(args.requests) if args.workload is None else json.loads(args.workload.read_text())
    prompt_tokens, output_tokens = totals(requests)
    workload = args.work.resolve() / "workload.json"
    workload.write_text(json.dumps(requests))
    cost = model_cost(json.loads((args.model / "config.json").read_text()))

    def floor(turn: dict[str, float]) -> float | None:
        return floor_seconds(requests, *cost, turn["bandwidth"], turn["peak"]) if "bandwidth" in turn else None

    about, results = measure(commands(args, args.work), workload, args.rounds, args.work, args.limits)
    if args.bandwidth is not None:
        for turn in itertools.chain.from_iterable(results.values()):
            turn |= {"bandwidth": args.bandwidth, "peak": args.peak}
    summary = summarise(results, output_tokens, floor)
    print_table(summary, about)
    print(f"{len(requests)} requests, {prompt_tokens} prompt tokens, {output_tokens} output tokens")
    turns = [turn for turn in itertools.chain.from_iterable(results.values()) if "bandwidth" in turn]
    if turns:
        for name, unit, factor in (("bandwidth", "GB/s", 1e9), ("peak", "TFLOP/s", 1e12)):
            values = [turn[name] / factor for turn in turns]
            print(f"{name}: median {statistics.median(values):.3g} {unit}, {min(values):.3g} to {max(values):.3g}")
    if args.json:
        record = {"hardware": hardware(), "summary": summary, "engines": about, "rounds": results}
        save(args.json, args.model, requests, record)


if __name__ == "__main__":
    main()
