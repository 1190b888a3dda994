"""The workload that benchmarks share: requests with clipped log-normal lengths, as in chat traffic, drawn from a
seed."""

from __future__ import annotations

from chairlift_lab.workload.lengths import LogNormal, Workload

__all__ = ["draw", "totals"]


def draw(
    count: int = 64,
    seed: int = 0,
    vocab: int = 8000,
    prompt: tuple[float, float, int, int] = (4.6, 0.8, 8, 1024),
    output: tuple[float, float, int, int] = (4.2, 0.9, 4, 512),
) -> list[tuple[list[int], int]]:
    """Draw ``count`` pairs of (prompt token ids, output length). ``prompt`` and ``output`` are (mu, sigma, minimum,
    maximum) of the lengths."""
    lengths = {"prompt": LogNormal(*prompt), "output": LogNormal(*output)}
    return Workload(count=count, seed=seed, vocab_size=vocab, **lengths).requests()


def totals(requests: list[tuple[list[int], int]]) -> tuple[int, int]:
    """Total prompt tokens and output tokens."""
    return sum(len(prompt) for prompt, _ in requests), sum(count for _, count in requests)
