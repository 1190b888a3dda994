"""What is to be expected of a request, from what was measured, what has ended, and what is cached."""

from __future__ import annotations

from chairlift.kv_cache.manager import KVCacheManager
from chairlift.request import Request
from chairlift.scheduler.answer_lengths import AnswerLengths
from chairlift.scheduler.costs import Costs
from chairlift.scheduler.deadlines import Outlook, OutlookOf

__all__ = ["outlook_from"]


def outlook_from(costs: Costs, lengths: AnswerLengths, kv: KVCacheManager) -> OutlookOf:
    """A function that is asked about one request."""

    def outlook(request: Request) -> Outlook:
        source, num_shared = request.source, kv.num_shared(request)
        # A prompt that is being computed for another answer is there as soon as that one has its first token.
        if source is not None and not source.is_finished and not source.num_output_tokens:
            num_shared = request.num_prompt_tokens - 1
        expected = lengths.expected(request) if lengths.knows(request) else None
        return costs.outlook(request, expected, num_shared)

    return outlook
