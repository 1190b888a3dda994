r"""Compares quantised models in Chairlift, OpenVINO GenAI and llama.cpp: the same shape, interleaved rounds.

    sh benchmarks/peers/setup_openvino.sh /tmp/openvino       (likewise llama_cpp)
    python benchmarks/make_random_model.py /tmp/q05
    python benchmarks/peers/formats.py --model /tmp/q05 --openvino /tmp/openvino --llama-cpp /tmp/llama \\
        --rounds 3 --json benchmarks/results/formats-qwen2.5-0.5b.json

Each engine is a child process with its model loaded and warmed up, and is stopped while another engine computes. A
round runs every case on every engine. A case is a number of equal requests that arrive at once: prompts of 64 tokens,
or one prompt of 512 or 2,048 tokens and one token of output. Decoding is greedy, and the end of sequence is ignored.
The other engines use their own defaults for the KV cache and the activations; Chairlift keeps its KV cache in 16 bits.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from compare import HERE, convert, hardware, save
from protocol import Child, Requests


class Case(NamedTuple):
    """A number of equal requests that arrive at once."""

    requests: int
    prompt: int
    output: int

    @property
    def name(self) -> str:
        return f"prompt of {self.prompt}" if self.output == 1 else f"{self.requests} requests"

    def draw(self) -> Requests:
        """Prompts of random token ids with different beginnings."""
        rng = random.Random(self.requests * self.prompt)
        return [([rng.randrange(1_000, 30_000) for _ in range(self.prompt)], self.output) for _ in range(self.requests)]


CASES = (
    Case(1, 64, 96),
    Case(4, 64, 64),
    Case(16, 64, 32),
    Case(64, 64, 32),
    Case(1, 512, 1),
    Case(1, 2_048, 1),
)
OPENVINO_FORMATS = {"openvino int8": "int8", "openvino int4": "int4"}
LLAMA_CPP_FORMATS = {
    "llama.cpp Q8_0": "LLAMA_FTYPE_MOSTLY_Q8_0",
    "llama.cpp Q4_0": "LLAMA_FTYPE_MOSTLY_Q4_0",
    "llama.cpp Q4_K_M": "LLAMA_FTYPE_MOSTLY_Q4_K_M",
}
QUANTIZE = """
import sys, llama_cpp
params = llama_cpp.llama_model_quantize_default_params()
params.ftype = getattr(llama_cpp, sys.argv[1])
sys.exit(llama_cpp.llama_model_quantize(sys.argv[2].encode(), sys.argv[3].encode(), params))
"""


def chairlift(model: Path, work: Path, formats: Sequence[str]) -> dict[str, list[str]]:
    """Name of a format -> command. Checkpoints with groups of 128 are written once; other formats are created at
    load."""
    runs = {}
    for name in formats:
        path, settings = model, {"kv_cache_memory_bytes": 1 << 30}
        if name.startswith("int4-"):
            path = work / f"{model.name}-{name}"
            if not path.exists():
                command = [sys.executable, "-m", "chairlift", "quantize", str(model), str(path), "--format", name]
                subprocess.run(command, check=True)
        elif name != "bf16":
            settings["quantization"] = name
        command = [sys.executable, str(HERE / "run_chairlift.py"), "--model", str(path)]
        runs[f"chairlift {name}"] = [*command, "--settings", json.dumps(settings)]
    return runs


def openvino(environment: Path, model: Path, work: Path) -> dict[str, list[str]]:
    """Name of a format -> command, each for an exported copy of the model below ``work``."""
    runs = {}
    for name, weights in OPENVINO_FORMATS.items():
        target = work / f"openvino-{model.name}-{weights}"
        if not target.exists():
            command = [str(environment / "bin" / "optimum-cli"), "export", "openvino", "--model", str(model)]
            command += ["--task", "text-generation-with-past", "--weight-format", weights]
            with (work / "export.log").open("ab") as log:
                done = subprocess.run([*command, "--disable-convert-tokenizer", str(target)], stdout=log, stderr=log)
            if done.returncode:
                raise SystemExit(f"optimum-cli could not export {model}; its messages are in {work / 'export.log'}")
        script = [str(environment / "bin" / "python"), str(HERE / "run_openvino.py"), "--model", str(target)]
        runs[name] = [*script, "--defaults"]
    return runs


def llama_cpp(environment: Path, model: Path, work: Path, rows: int) -> dict[str, list[str]]:
    """Name of a format -> command, each for a quantised GGUF file below ``work``."""
    python, runs = str(environment / "bin" / "python"), {}
    source = work / f"{model.name}-bf16.gguf"
    for name, kind in LLAMA_CPP_FORMATS.items():
        target = work / f"{model.name}-{kind}.gguf"
        if not target.exists():
            if not source.exists():
                convert(environment, model, work)
            library = {"LLAMA_CPP_LIB_PATH": str(environment / "build" / "bin")}
            if subprocess.run([python, "-c", QUANTIZE, kind, str(source), str(target)], env=library).returncode:
                print(f"{name}: llama.cpp cannot quantise this shape; left out", flush=True)
                continue
        script = [python, str(HERE / "run_llama_cpp.py"), "--model", str(target)]
        runs[name] = [*script, "--rows", str(rows), "--unified"]
    return runs


def measure(engines: Mapping[str, list[str]], cases: Sequence[Case], rounds: int, work: Path) -> dict[str, Any]:
    """Measure all engines. Returns the seconds of each round for each engine and case, and each engine's description of
    itself."""
    seconds: dict[str, dict[str, list[float]]] = {name: {case.name: [] for case in cases} for name in engines}
    files = {case: work / f"case-{case.requests}-{case.prompt}.json" for case in cases}
    for case, file in files.items():
        file.write_text(json.dumps(case.draw()))
    children: list[Child] = []
    try:
        for name, command in engines.items():
            print(f"starting {name} ...", flush=True)
            children.append(Child(name, command, work / f"{name.replace(' ', '-')}.log"))
        for number in range(rounds):
            for case in cases:
                for child in children if number % 2 else reversed(children):
                    seconds[child.name][case.name].append(child.run(files[case])["seconds"])
            print(f"round {number + 1} done", flush=True)
        return {"seconds": seconds, "engines": {child.name: child.about for child in children}}
    finally:
        for child in children:
            child.kill()


def rates(seconds: Mapping[str, Mapping[str, Sequence[float]]], cases: Sequence[Case]) -> dict[str, dict[str, Any]]:
    """Rates per engine and case: tokens per second as the median of the rounds, and the median ratio to the first
    engine within a round. Output tokens are counted, or prompt tokens if the output is a single token."""
    base = next(iter(seconds.values()))
    table: dict[str, dict[str, Any]] = {}
    for name, by_case in seconds.items():
        table[name] = {}
        for case in cases:
            times, reference = by_case[case.name], base[case.name]
            tokens = case.prompt if case.output == 1 else case.requests * case.output
            ratio = statistics.median(first / mine for first, mine in zip(reference, times, strict=True))
            rate = tokens / statistics.median(times)
            table[name][case.name] = {"tokens_per_second": round(rate, 1), "against_first": round(ratio, 2)}
    return table


def print_table(table: Mapping[str, Mapping[str, Any]], cases: Sequence[Case]) -> None:
    print("\ntokens/s, and how many times as many as the first engine")
    print(f"{'engine':20s}" + "".join(f"{case.name:>18s}" for case in cases))
    for name, row in table.items():
        cells = (row[case.name] for case in cases)
        print(f"{name:20s}" + "".join(f"{c['tokens_per_second']:10.1f} {c['against_first']:5.2f}x " for c in cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument(
        "--formats", default="bf16,int8,int4,int4-g128", help="Chairlift's formats, separated by commas"
    )
    parser.add_argument("--openvino", type=Path, help="environment made by setup_openvino.sh; left out: not compared")
    parser.add_argument("--llama-cpp", type=Path, help="environment made by setup_llama_cpp.sh; left out: not compared")
    parser.add_argument("--requests", default="1,4,16,64", help="numbers of requests to run, separated by commas")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--work", type=Path, default=Path(tempfile.gettempdir()) / "chairlift-formats", help="folder for files"
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    # SIGTERM raises SystemExit, so that measure() ends the children, which have process groups of their own.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    model, work = args.model.resolve(), args.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    counts = {int(number) for number in args.requests.split(",")}
    cases = [case for case in CASES if case.output == 1 or case.requests in counts]
    engines = chairlift(model, work, args.formats.split(","))
    if args.openvino:
        engines |= openvino(args.openvino, model, work)
    if args.llama_cpp:
        engines |= llama_cpp(args.llama_cpp, model, work, max(case.requests for case in cases))
    found = measure(engines, cases, args.rounds, work)
    table = rates(found["seconds"], cases)
    print_table(table, cases)
    if args.json:
        save(args.json, model, [], {"hardware": hardware(), "summary": table, **found})


if __name__ == "__main__":
    main()
