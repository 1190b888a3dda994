"""Minimum time that a machine's memory and arithmetic allow for a set of requests that all arrive at the start.

    python benchmarks/floor.py --model DIR --bandwidth 45e9 --peak 1.05e12

The time of a step is the longer of reading the weights and computing with them, plus the time to read the keys and
values of every decoding request. Nothing else is counted: no attention arithmetic, no activations, no Python.
``benchmarks/peers/compare.py`` compares the time of each engine with this minimum. The module imports only the standard
library.
"""

from __future__ import annotations

import argparse
import json
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["ModelCost", "floor_seconds", "model_cost"]

TOKEN_BUDGETS = (192, 256, 384, 512, 1024)
"""Token budgets per step that are tried. Small budgets spread prompts over decode steps, which are limited by memory
bandwidth."""


class ModelCost(NamedTuple):
    """Cost of a model: numbers of weights, and bytes of KV cache per token."""

    body_params: int
    """Number of weights that every token passes through. The embedding is not counted, because it is only looked up."""
    head_params: int
    """Number of weights that only sampled rows pass through: the output head, and the part after the last layer's keys
    and values."""
    kv_bytes_per_token: int
    """Bytes of keys and values per token and sequence, with 16 bits per element."""


def model_cost(config: Mapping[str, Any]) -> ModelCost:
    """Cost from the content of a Hugging Face ``config.json``. Raises ValueError for a model that is not a dense
    decoder."""
    kinds = ("llama", "mistral", "qwen2", "qwen3")
    kind = config.get("model_type")
    if kind not in kinds:
        raise ValueError(f"model_type {kind!r} has no cost formula here; there is one for {', '.join(kinds)}")
    hidden, layers, heads = config["hidden_size"], config["num_hidden_layers"], config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or hidden // heads
    query, kv = heads * head_dim, kv_heads * head_dim
    attention = 2 * hidden * query + 2 * hidden * kv
    biased = kind == "qwen2" or bool(config.get("attention_bias"))
    if biased:
        attention += query + 2 * kv + (0 if kind == "qwen2" else hidden)
    if kind == "qwen3":
        attention += 2 * head_dim
    layer = attention + 3 * hidden * config["intermediate_size"] + 2 * hidden
    keys_and_values = 2 * kv * (hidden + biased) + head_dim * (kind == "qwen3") + hidden  # with the norms before them
    tail = layer - keys_and_values + hidden
    return ModelCost(layers * layer + hidden - tail, config["vocab_size"] * hidden + tail, layers * 2 * kv * 2)


@dataclass(slots=True)
class _Sequence:
    prompt_left: int
    output_left: int
    context: int = 0


def floor_seconds(
    requests: Sequence[tuple[Sequence[int], int]],
    body_params: int,
    head_params: int,
    kv_bytes_per_token: int,
    bandwidth: float,
    peak: float,
    weight_bytes: float = 2,
    *,
    max_num_seqs: int = 128,
    token_budgets: Iterable[int] = TOKEN_BUDGETS,
) -> float:
    """Minimum seconds for ``requests`` (prompt ids, output tokens), with the best of ``token_budgets`` (tokens per
    step).

    ``bandwidth`` is in bytes per second; ``peak`` in FLOP per second with 16-bit operands. Weights of ``weight_bytes``
    bytes are assumed to compute at ``2 / weight_bytes`` times the peak (the roofline model of Williams et al., 2009,
    with the weights shared by the rows of a step).
    """
    best = float("inf")
    for budget in token_budgets:
        seconds = 0.0
        for rows, sampled, kv_tokens in _steps(requests, budget, max_num_seqs):
            stream = (body_params + (head_params if sampled else 0)) * weight_bytes / bandwidth
            compute = 2 * (rows * body_params + sampled * head_params) / peak * (weight_bytes / 2)
            seconds += max(stream, compute) + kv_tokens * kv_bytes_per_token / bandwidth
        best = min(best, seconds)
    return best


def _steps(
    requests: Sequence[tuple[Sequence[int], int]], budget: int, max_num_seqs: int
) -> Iterable[tuple[int, int, int]]:
    """(tokens, sampled rows, KV tokens read) of each step: decodes first, then prefill chunks in order."""
    waiting = deque(_Sequence(len(prompt), count) for prompt, count in requests)
    running: list[_Sequence] = []
    while waiting or running:
        decoding = [sequence for sequence in running if not sequence.prompt_left]
        sampling = list(decoding)
        kv_tokens = sum(sequence.context for sequence in decoding)
        prompts = deque(sequence for sequence in running if sequence.prompt_left)
        rows = len(decoding)
        while rows < budget:
            if not prompts:
                if not waiting or len(running) >= max_num_seqs:
                    break
                running.append(waiting.popleft())
                prompts.append(running[-1])
            sequence = prompts[0]
            chunk = min(budget - rows, sequence.prompt_left)
            sequence.prompt_left -= chunk
            sequence.context += chunk
            rows += chunk
            if not sequence.prompt_left:
                sampling.append(prompts.popleft())
        for sequence in decoding:
            sequence.context += 1
        for sequence in sampling:
            sequence.output_left -= 1
        yield rows, len(sampling), kv_tokens
        running = [sequence for sequence in running if sequence.output_left > 0]


def main() -> None:
    from workload import draw, totals

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="directory with config.json")
    parser.add_argument("--bandwidth", type=float, required=True, help="bytes per second that memory can be read with")
    parser.add_argument("--peak", type=float, required=True, help="FLOP per second with 16-bit operands")
    parser.add_argument("--weight-bytes", type=float, default=2)
    parser.add_argument("--requests", type=int, default=64)
    args = parser.parse_args()
    requests = draw(args.requests)
    cost = model_cost(json.loads((args.model / "config.json").read_text()))
    seconds = floor_seconds(requests, *cost, args.bandwidth, args.peak, args.weight_bytes)
    print(f"floor {seconds:.2f} s, {totals(requests)[1] / seconds:.0f} output tokens/s")


if __name__ == "__main__":
    main()
