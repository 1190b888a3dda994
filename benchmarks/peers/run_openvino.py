"""Runs OpenVINO GenAI as a child of ``compare.py`` or ``table.py``, inside the environment
that ``setup_openvino.sh`` creates.

    ENV/bin/optimum-cli export openvino --model DIR --task text-generation-with-past --weight-format fp16 \\
        --disable-convert-tokenizer OUT
    ENV/bin/python benchmarks/peers/run_openvino.py --model OUT

In 16 bits, weights (float16 on disk), activations (bfloat16) and KV cache have 16 bits. Each precision is set
explicitly, because the defaults of some versions (an 8-bit cache, 8-bit activations) would make the comparison unfair.
In 8 and 4 bits, the library chooses its own, faster precisions (``--defaults``): an 8-bit cache and activations rounded
in groups. Weights in 4 bits are symmetric, in groups of 128 columns, or of 64 if 128 does not divide the columns.
The scheduler has dynamic split-fuse, a cache for all rows, and 512 tokens per step.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from protocol import Place, Requests, made, serve


def exported(place: Place, bits: int) -> Path:
    """The model in OpenVINO's format, exported once."""
    config = json.loads((place.model / "config.json").read_text())
    group = 128 if all(config[name] % 128 == 0 for name in ("hidden_size", "intermediate_size")) else 64
    formats = {16: ["fp16"], 8: ["int8"], 4: ["int4", "--sym", "--group-size", str(group), "--ratio", "1.0"]}
    target = place.work / f"openvino-{place.model.name}-{bits}"
    program = [str(place.environment / "bin" / "optimum-cli"), "export", "openvino", "--model", str(place.model)]
    program += ["--task", "text-generation-with-past", "--disable-convert-tokenizer", "--weight-format", *formats[bits]]
    return made(target, [*program, str(target)], place.work / "export.log")


def command(place: Place, bits: int) -> list[str]:
    words = [place.python, __file__, "--model", str(exported(place, bits)), "--cache-gib", str(place.kv_gib)]
    return words if bits == 16 else [*words, "--defaults"]


def load(args: argparse.Namespace) -> tuple[Callable[[Requests], Sequence[int]], dict[str, Any]]:
    import openvino
    import openvino_genai

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = args.cache_gib
    scheduler.max_num_seqs = args.max_num_seqs
    scheduler.max_num_batched_tokens = args.max_num_batched_tokens
    scheduler.enable_prefix_caching = False
    scheduler.dynamic_split_fuse = True
    properties = {
        "INFERENCE_PRECISION_HINT": args.precision,
        "KV_CACHE_PRECISION": args.kv_precision,
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
        "INFERENCE_NUM_THREADS": args.threads,
    }
    if args.defaults:
        properties = {"INFERENCE_NUM_THREADS": args.threads}
    pipeline = openvino_genai.ContinuousBatchingPipeline(str(args.model), scheduler, "CPU", properties)

    def answer(requests: Requests) -> list[int]:
        configs = []
        for _, count in requests:
            config = openvino_genai.GenerationConfig()
            config.max_new_tokens = count
            config.ignore_eos = True
            config.do_sample = False
            configs.append(config)
        prompts = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt, _ in requests]
        return [len(result.m_generation_ids[0]) for result in pipeline.generate(prompts, configs)]

    about = {
        "version": openvino_genai.__version__,
        "openvino": openvino.__version__,
        "settings": properties
        | {
            "cache_gib": args.cache_gib,
            "max_num_seqs": args.max_num_seqs,
            "max_num_batched_tokens": args.max_num_batched_tokens,
            "enable_prefix_caching": False,
        },
    }
    return answer, about


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="the exported model")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument(
        "--precision", choices=["bf16", "f16", "f32"], default="bf16", help="precision of the arithmetic"
    )
    parser.add_argument("--kv-precision", choices=["bf16", "f16", "f32"], default="bf16")
    parser.add_argument("--defaults", action="store_true", help="let the library choose all precisions")
    parser.add_argument("--cache-gib", type=int, default=2)
    parser.add_argument("--max-num-seqs", type=int, default=128)
    parser.add_argument("--max-num-batched-tokens", type=int, default=512)
    args = parser.parse_args()
    serve(lambda: load(args))


if __name__ == "__main__":
    main()
