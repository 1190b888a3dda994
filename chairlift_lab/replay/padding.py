"""Padding of steps: engines that replay CUDA graphs round the tokens of a step up to a size that was captured."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from chairlift.core.scheduler.cost_model import StepFeatures

__all__ = ["padded", "vllm_capture_sizes"]


def padded(step: StepFeatures, sizes: Sequence[int]) -> StepFeatures:
    """Features of a step after padding. ``sizes`` are ascending numbers of tokens.

    The additional tokens have no context. They count as rows in a step that only decodes, and as prompt tokens in a
    step with prompts. A step with more tokens than the largest size runs without padding.
    """
    tokens = step.num_decodes + step.prefill_tokens
    at = bisect.bisect_left(sizes, tokens)
    if at == len(sizes) or sizes[at] == tokens:
        return step
    more = sizes[at] - tokens
    if step.prefill_tokens:
        return step._replace(prefill_tokens=step.prefill_tokens + more)
    return step._replace(num_decodes=step.num_decodes + more)


def vllm_capture_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Capture sizes that vLLM (V1) chooses by default: 1, 2, 4, multiples of 8 below 256, and multiples of 16, up to
    twice ``max_num_seqs`` and at most 512."""
    most = min(2 * max_num_seqs, 512)
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]
    return tuple(size for size in sizes if size <= most)
