"""Estimates for one request, made from measured step times, lengths of ended answers, and cached prefixes."""

from __future__ import annotations

from chairlift.core.kv_cache.manager import KVCacheManager
from chairlift.core.request import Request
from chairlift.core.scheduler.answer_lengths import AnswerLengths
from chairlift.core.scheduler.costs import Costs
from chairlift.core.scheduler.deadlines import Estimate, EstimateOf

__all__ = ["estimator_from"]


def estimator_from(costs: Costs, lengths: AnswerLengths, kv: KVCacheManager) -> EstimateOf:
    """Return a function that estimates the times and the answer length of one request."""

    def estimate(request: Request) -> Estimate:
        source = request.source
        num_shared = kv.num_shared(request)
        # Another answer of the same request computes the prompt. Its KV can be shared when its first token is known.
        if source is not None and not source.is_finished and not source.num_output_tokens:
            num_shared = request.num_prompt_tokens - 1
        expected = lengths.expected(request) if lengths.knows(request) else None
        return costs.estimate(request, expected, num_shared)

    return estimate
