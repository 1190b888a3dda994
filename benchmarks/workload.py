"""The shared workload: requests with clipped log-normal lengths, as chat traffic has them, drawn from a seed."""

from __future__ import annotations

import numpy as np

__all__ = ["draw", "totals"]


def draw(
    count: int = 64,
    seed: int = 0,
    vocab: int = 8000,
    prompt: tuple[float, float, int, int] = (4.6, 0.8, 8, 1024),
    output: tuple[float, float, int, int] = (4.2, 0.9, 4, 512),
) -> list[tuple[list[int], int]]:
    """``count`` pairs of prompt token ids and output length. ``prompt`` and ``output``: mu, sigma, least, most.

    The order of the draws is part of the definition: prompt lengths, output lengths, then the ids of each prompt.
    """
    rng = np.random.default_rng(seed)

    def lengths(mu: float, sigma: float, least: int, most: int) -> list[int]:
        return np.clip(rng.lognormal(mu, sigma, count).astype(int), least, most).tolist()

    prompts, outputs = lengths(*prompt), lengths(*output)
    return [(rng.integers(10, vocab, p).tolist(), o) for p, o in zip(prompts, outputs, strict=True)]


def totals(requests: list[tuple[list[int], int]]) -> tuple[int, int]:
    """Prompt tokens and output tokens in all."""
    return sum(len(prompt) for prompt, _ in requests), sum(count for _, count in requests)
