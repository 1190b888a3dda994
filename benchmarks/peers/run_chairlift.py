"""Runs Chairlift as a child of ``compare.py`` or ``table.py``.

    python benchmarks/peers/run_chairlift.py --model DIR

The settings are the defaults, without a prefix cache. In 8 and 4 bits the weights are rounded at load, in groups of 32
columns; the KV cache keeps 16 bits.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from protocol import Place, Requests, serve


def command(place: Place, bits: int) -> list[str]:
    settings: dict[str, Any] = {"kv_cache_memory_bytes": place.kv_gib << 30, "max_num_seqs": max(place.rows, 16)}
    if bits < 16:
        settings["quantization"] = f"int{bits}"
    return [sys.executable, __file__, "--model", str(place.model), "--settings", json.dumps(settings)]


def load(
    model: Path, extra: dict[str, Any], temperature: float
) -> tuple[Callable[[Requests], Sequence[int]], dict[str, Any]]:
    import torch

    from chairlift import LLM, SamplingParams, __version__

    settings: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "kv_cache_memory_bytes": 2 << 30,
        "enable_prefix_caching": False,
    }
    settings |= extra
    llm = LLM(model, **settings)

    def answer(requests: Requests) -> list[int]:
        params = [SamplingParams(temperature=temperature, max_tokens=count, ignore_eos=True) for _, count in requests]
        outputs = llm.generate([prompt for prompt, _ in requests], params)
        return [len(output.outputs[0].token_ids) for output in outputs]

    about = {
        "version": __version__,
        "torch": torch.__version__,
        "settings": settings | {"torch_threads": torch.get_num_threads()},
    }
    return answer, about


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--settings", type=json.loads, default={}, help="more settings: '{\"max_num_seqs\": 64}'")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--speculative-config", metavar="JSON", help="drafts; default: none")
    args = parser.parse_args()
    if args.speculative_config:
        args.settings["speculative_config"] = args.speculative_config
    serve(lambda: load(args.model, args.settings, args.temperature))


if __name__ == "__main__":
    main()
