"""Runs transformers as a child of ``compare.py``, inside the environment that ``setup_transformers.sh`` creates.

    ENV/bin/python benchmarks/peers/run_transformers.py --model DIR --engine continuous
    ENV/bin/python benchmarks/peers/run_transformers.py --model DIR --engine padded --rows 16

``continuous`` is transformers' continuous batching with a paged KV cache, as in ``generate_batch``. ``padded`` is plain
``generate``: batches in the order of arrival, prompts padded on the left, every row computed until the longest output
of its batch has ended. Weights, activations and KV cache are bfloat16, or float32 if the processor has no 16-bit
arithmetic. On a GPU, ``continuous`` chooses the size of its pages and cache itself.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from protocol import Requests, serve

Answer = Callable[[Requests], Sequence[int]]
NO_END = -1
"""A token id that no model generates. Given as the end token, it keeps an output from ending early."""
KV_BYTES = 2 << 30
PATIENCE = 1800
"""Seconds without a finished request after which the run is aborted."""


def load(args: argparse.Namespace, at_end: ExitStack) -> tuple[Answer, dict[str, Any]]:
    import torch
    import transformers

    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    model = (
        transformers.AutoModelForCausalLM.from_pretrained(
            args.model, dtype=getattr(torch, args.dtype), attn_implementation="sdpa", local_files_only=True
        )
        .eval()
        .to(args.device)
    )
    settings: dict[str, Any] = {"engine": args.engine, "threads": args.threads, "dtype": args.dtype}
    if args.engine == "padded":
        settings |= {"rows": args.rows}
        answer = padded(model, args.rows)
    else:
        settings["batching"] = {"max_batch_tokens": args.max_batch_tokens, "max_requests_per_batch": args.max_requests}
        settings["batching"] |= {"allow_block_sharing": False}
        if args.device == "cpu":
            blocks = kv_blocks(model.config, args.block_size, model.dtype.itemsize)
            settings["batching"] |= {"page_size": args.block_size, "num_blocks": blocks}
        answer = continuous(model, settings, at_end)
    return answer, {"version": transformers.__version__, "torch": torch.__version__, "settings": settings}


def kv_blocks(config: Any, block_size: int, itemsize: int) -> int:
    """Number of blocks of ``block_size`` tokens that fit into 2 GiB of KV cache, for all layers together."""
    heads = config.num_key_value_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return KV_BYTES // (2 * itemsize * config.num_hidden_layers * heads * width * block_size)


def padded(model: Any, rows: int) -> Answer:
    import torch

    def answer(requests: Requests) -> list[int]:
        produced = []
        for first in range(0, len(requests), rows):
            batch = requests[first : first + rows]
            longest, most = max(len(prompt) for prompt, _ in batch), max(count for _, count in batch)
            ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt, _ in batch], device=model.device)
            mask = torch.tensor(
                [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt, _ in batch], device=model.device
            )
            options = {"do_sample": False, "min_new_tokens": most, "max_new_tokens": most}
            with torch.inference_mode():
                output = model.generate(
                    input_ids=ids, attention_mask=mask, eos_token_id=None, pad_token_id=0, use_cache=True, **options
                )
            # Tokens beyond the requested number are not counted.
            produced += [min(count, output.shape[1] - longest) for _, count in batch]
        return produced

    return answer


def continuous(model: Any, settings: dict[str, Any], at_end: ExitStack) -> Answer:
    import transformers

    config = transformers.GenerationConfig(do_sample=False, eos_token_id=NO_END, pad_token_id=0, max_new_tokens=1)
    batching = transformers.ContinuousBatchingConfig(**settings["batching"])
    manager = model.init_continuous_batching(generation_config=config, continuous_batching_config=batching)
    manager.start()
    at_end.callback(manager.stop, block=True, timeout=5, hard_stop=True)  # its thread would keep the process alive

    def answer(requests: Requests) -> list[int]:
        ids = [manager.add_request(prompt, max_new_tokens=count, eos_token_id=NO_END) for prompt, count in requests]
        done: dict[str, int] = {}
        last = time.monotonic()
        while len(done) < len(requests):
            result = manager.get_result(timeout=1)
            if result is not None and result.error is not None:
                raise SystemExit(f"transformers failed: {result.error}")
            if result is not None and result.is_finished():
                done[result.request_id] = len(result.generated_tokens)
                last = time.monotonic()
            elif not manager.is_running() or time.monotonic() - last > PATIENCE:
                raise SystemExit("transformers stopped answering")
        return [done[name] for name in ids]

    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--engine", choices=["continuous", "padded"], default="continuous")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rows", type=int, default=16, help="rows of a padded batch")
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--max-batch-tokens", type=int, default=512)
    parser.add_argument("--max-requests", type=int, default=128)
    args = parser.parse_args()
    with ExitStack() as at_end:
        serve(lambda: load(args, at_end))


if __name__ == "__main__":
    main()
