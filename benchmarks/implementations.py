"""Compares three implementations of one model: native, transformers' classes in Chairlift's engine, and transformers'
own continuous batching.

    python benchmarks/implementations.py                     # a Llama of 8 layers of 576, float32
    python benchmarks/implementations.py --shape experts     # 32 experts, 4 chosen, in 6 layers of 512

All requests arrive at once. Every engine generates the same number of tokens for each request, greedily, with the same
number of threads. Rounds interleave the engines. The last lines have the ratios of output tokens per second, round by
round. transformers' engine is ``generate_batch``, with a paged cache and 512 tokens per step.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from chairlift import LLM, SamplingParams
from chairlift.models.random_weights import write_random_model

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent / "peers"))
from peers import run_transformers
from workload import draw, totals

Requests = list[tuple[list[int], int]]

_COMMON = {"vocab_size": 8192, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "hidden_act": "silu"}
_COMMON |= {"tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 0}
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {
        **_COMMON,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 8,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
    },
    "experts": {
        **_COMMON,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 512,
        "intermediate_size": 1024,
        "moe_intermediate_size": 512,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
    },
}


def ours(model: Path, dtype: str, threads: int, impl: str) -> Callable[[Requests], None]:
    """Function that serves requests with Chairlift's engine, with the native model or transformers' classes."""
    memory = {"kv_cache_memory_bytes": 512 << 20, "enable_prefix_caching": False}
    llm = LLM(model, dtype=dtype, threads=threads, model_impl=impl, skip_tokenizer_init=True, **memory)

    def run(requests: Requests) -> None:
        params = [SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for _, count in requests]
        outputs = llm.generate([prompt for prompt, _ in requests], params)
        check([len(output.outputs[0].token_ids) for output in outputs], requests)

    return run


def theirs(model: Path, dtype: str, threads: int, at_end: ExitStack) -> Callable[[Requests], None]:
    """Function that serves requests with transformers' continuous batching."""
    sizes = {"block_size": 32, "max_batch_tokens": 512, "max_requests": 128, "device": "cpu", "engine": "continuous"}
    answer, _ = run_transformers.load(argparse.Namespace(model=model, dtype=dtype, threads=threads, **sizes), at_end)
    return lambda requests: check(list(answer(requests)), requests)


def check(produced: list[int], requests: Requests) -> None:
    """Stop if an engine generated other numbers of tokens than the requests ask for."""
    if produced != [count for _, count in requests]:
        raise SystemExit("an engine did not generate the requested number of tokens")


def main() -> None:
    """Measure the engines in turns, and print one line per engine and per ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    args = parser.parse_args()
    requests = draw(args.requests, prompt=(4.0, 0.8, 8, 256), output=(3.6, 0.7, 4, 128))
    prompts, outputs = totals(requests)
    print(f"{args.shape}, {args.dtype}, {len(requests)} requests: {prompts} prompt tokens, {outputs} output tokens")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as at_end:
        model = Path(folder) / "model"
        write_random_model(model, SHAPES[args.shape])
        engines = {impl: ours(model, args.dtype, args.threads, impl) for impl in ("native", "transformers")}
        engines["generate_batch"] = theirs(model, args.dtype, args.threads, at_end)
        rates: dict[str, list[float]] = {name: [] for name in engines}
        for run in engines.values():  # not counted
            run(requests[:2])
        for _ in range(args.rounds):
            for name, run in engines.items():
                begin = time.perf_counter()
                run(requests)
                rates[name].append(outputs / (time.perf_counter() - begin))
    for name, found in rates.items():
        listed = ", ".join(f"{rate:.0f}" for rate in found)
        print(f"{name:14} {statistics.median(found):7.0f} output tokens/s (of {listed})", flush=True)
    for one, other in (("transformers", "native"), ("transformers", "generate_batch"), ("native", "generate_batch")):
        ratios = [mine / base for mine, base in zip(rates[one], rates[other], strict=True)]
        print(f"{one} / {other}: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})", flush=True)


if __name__ == "__main__":
    main()
