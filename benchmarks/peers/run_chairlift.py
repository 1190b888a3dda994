"""Runs Chairlift as a child of ``compare.py``: ``python benchmarks/peers/run_chairlift.py --model DIR``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from protocol import Requests, serve


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
