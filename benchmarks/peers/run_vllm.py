"""Runs vLLM's CPU backend as a child of ``compare.py`` or ``table.py``, inside the environment
that ``setup_vllm.sh`` creates.

    ENV/bin/python benchmarks/peers/run_vllm.py --model DIR

Activations and KV cache are bfloat16, prefix caching is off, and tcmalloc and Intel's OpenMP are preloaded, as vLLM's
documentation advises. The engine is in this process with one thread on each core: by default, vLLM reserves a core for
its scheduler. On AMD processors with AVX-512 BF16, the setup script adds zentorch, which vLLM then uses by itself.
Weights of 8 bits have a scale per column, with activations rounded to 8 bits (W8A8); weights of 4 bits have groups of
128 or 32 columns. In both, the output head keeps 16 bits.
"""

from __future__ import annotations

import argparse
import glob
import importlib.metadata
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from protocol import Place, Requests, made, restart_with, serve


def command(place: Place, bits: int) -> list[str]:
    model = place.model if bits == 16 else place.work / f"{place.model.name}-vllm-{bits}"
    log = place.work / "quantize.log"
    if bits == 8:
        script = Path(__file__).with_name("to_w8a8.py")
        made(model, [sys.executable, str(script), str(place.model), str(model)], log)
    if bits == 4:
        config = json.loads((place.model / "config.json").read_text())
        group = 128 if all(config[name] % 128 == 0 for name in ("hidden_size", "intermediate_size")) else 32
        quantize = [sys.executable, "-m", "chairlift", "quantize", str(place.model), str(model)]
        made(model, [*quantize, "--format", f"int4-g{group}"], log)
    cores = sorted(os.sched_getaffinity(0))
    words = [place.python, __file__, "--model", str(model), "--cores", f"{cores[0]}-{cores[-1]}"]
    return [*words, "--kv-gib", str(place.kv_gib), "--max-model-len", str(place.longest)]


def environment(engine: str, cores: str, kv_gib: int) -> dict[str, str]:
    """Environment variables for the start of the process. vLLM itself binds the threads of worker processes to cores;
    for an engine in this process, OpenMP's variables bind them in the same way. Raises SystemExit for cores to which
    threads cannot be bound."""
    variables = {
        "LD_PRELOAD": ":".join(preloads(Path(sys.prefix))),
        "VLLM_CPU_KVCACHE_SPACE": str(kv_gib),
        "VLLM_CPU_OMP_THREADS_BIND": cores,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if engine == "processes" else "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    if engine == "in-process":
        first, _, last = cores.partition("-")
        if not (first.isdigit() and (last or first).isdigit()):
            raise SystemExit(f"--engine in-process needs --cores FIRST-LAST or one core, got {cores!r}")
        numbers = [str(core) for core in range(int(first), int(last or first) + 1)]
        variables |= {
            "OMP_NUM_THREADS": str(len(numbers)),
            "KMP_AFFINITY": f"granularity=fine,explicit,proclist=[{','.join(numbers)}]",
            "KMP_BLOCKTIME": "5",
            "KMP_TPAUSE": "0",
        }
    return variables


def preloads(prefix: Path) -> list[str]:
    """Paths of tcmalloc and of libiomp5 in the environment at ``prefix``. Raises SystemExit with the name of a missing
    library."""
    found = []
    for name, places, remedy in (
        ("tcmalloc", ["/usr/lib/*/libtcmalloc_minimal.so.4", "/usr/lib64/libtcmalloc_minimal.so.4"], "your system's"),
        ("libiomp5", [f"{prefix}/lib/libiomp5.so"], "the environment's intel-openmp"),
    ):
        paths = [path for place in places for path in sorted(glob.glob(place))]
        if not paths:
            raise SystemExit(f"{name} not found in {places}; install {remedy} package (setup_vllm.sh does)")
        found.append(paths[0])
    return found


def bound_threads() -> dict[str, int]:
    """Core -> number of threads of this process that are bound to it. If OpenMP has bound its threads, every core is
    listed. If the engine is another process, no core is listed (see vLLM's log)."""
    cores: Counter[str] = Counter()
    for path in glob.glob("/proc/self/task/*/status"):
        fields = dict(line.split(":\t", 1) for line in Path(path).read_text().splitlines() if ":\t" in line)
        if fields["Cpus_allowed_list"].isdigit():
            cores[fields["Cpus_allowed_list"]] += 1
    return dict(sorted(cores.items()))


def zentorch_version() -> str | None:
    """Version of zentorch in this environment."""
    try:
        return importlib.metadata.version("zentorch")
    except importlib.metadata.PackageNotFoundError:
        return None


def load(model: Path, args: argparse.Namespace) -> tuple[Callable[[Requests], Sequence[int]], dict[str, Any]]:
    import torch
    import vllm

    settings = {
        "dtype": args.dtype,
        "max_num_seqs": args.max_num_seqs,
        "max_num_batched_tokens": args.max_num_batched_tokens,
        "max_model_len": args.max_model_len,
        "enable_prefix_caching": False,
        "enforce_eager": args.eager,
        "skip_tokenizer_init": True,
    }
    if args.speculative_config:
        settings["speculative_config"] = json.loads(args.speculative_config)
    llm = vllm.LLM(model=str(model), disable_log_stats=True, **settings)

    def answer(requests: Requests) -> list[int]:
        params = [
            vllm.SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
            for _, count in requests
        ]
        prompts = [{"prompt_token_ids": prompt} for prompt, _ in requests]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [len(output.outputs[0].token_ids) for output in outputs]

    about = {
        "version": vllm.__version__,
        "torch": torch.__version__,
        "settings": settings | {"engine": args.engine, "cores": args.cores, "kv_cache_gib": args.kv_gib},
        "zentorch": zentorch_version(),
        "threads_bound_to": bound_threads(),
    }
    return answer, about


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--engine", choices=["in-process", "processes"], default="in-process")
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--cores", default="0-1", help="as VLLM_CPU_OMP_THREADS_BIND; auto is vLLM's default")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--kv-gib", type=int, default=2, help="GiB of KV cache")
    parser.add_argument("--max-model-len", type=int, default=2048, help="tokens of prompt and output together")
    parser.add_argument("--max-num-seqs", type=int, default=128)
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048)
    parser.add_argument("--speculative-config", metavar="JSON", help="drafts; default: none")
    args = parser.parse_args()
    restart_with(environment(args.engine, args.cores, args.kv_gib))
    serve(lambda: load(args.model, args))


if __name__ == "__main__":
    main()
