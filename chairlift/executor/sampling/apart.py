"""Computes the rows of a failed step apart, so that only the request of the row at fault ends with an error."""

from __future__ import annotations

import logging
from collections.abc import Callable

from chairlift.base.row_failures import output_reason
from chairlift.base.step_batch import Masks, PromptLogprobs, SampledTokens, StepBatch

__all__ = ["compute_apart", "sample_rows"]

_log = logging.getLogger(__name__)


def sample_rows(
    batch: StepBatch, masks: Masks | None, sample: Callable[[slice, StepBatch, Masks | None], SampledTokens]
) -> SampledTokens:
    """Sample all sample positions of ``batch`` together. If that fails, each position is sampled alone.

    ``sample`` gets (range of the sample positions, the step with only these sample positions, their masks, numbered
    from 0). A position for which it raises an error alone, too, gets no token, and the reason in ``errors``.
    """
    try:
        return sample(slice(None), batch, masks)
    except Exception:  # often out of memory for what one row asked for
        _log.exception("a step could not be sampled as a whole, so its rows are sampled one by one")
    parts = []
    for position in range(len(batch.sample_tokens)):
        kept = slice(position, position + 1)
        try:
            parts.append(sample(kept, batch.sampled_at(position), _shifted(masks, position, position + 1)))
        except Exception as error:
            _log.exception("a row of the step cannot be sampled; its request ends with an error")
            parts.append(SampledTokens([-1], errors={0: output_reason(error)}))
    return SampledTokens.joined(parts)


def compute_apart(
    batch: StepBatch, masks: Masks | None, compute: Callable[[StepBatch, Masks | None], SampledTokens]
) -> SampledTokens:
    """Compute the rows of ``batch`` in parts. A part that fails is divided again, until it is a single row.

    ``compute`` gets a step of some rows, with their masks, and returns their tokens. A row for which it raises an error
    has no tokens, and the reason in ``errors``, or in ``prompt_logprobs`` if the row has no sample position.
    """

    def halves(first: int, end: int) -> list[SampledTokens]:
        middle = (first + end) // 2
        return [*attempt(first, middle), *attempt(middle, end)]

    def attempt(first: int, end: int) -> list[SampledTokens]:
        try:
            return [compute(batch.part(first, end), _shifted(masks, *batch.sample_range(first, end)))]
        except Exception as error:
            if end - first > 1:
                return halves(first, end)
            _log.exception("a row of the step cannot be computed; its request ends with an error")
            return [_failed(batch, first, output_reason(error))]

    count = len(batch.slots)
    return SampledTokens.joined(halves(0, count) if count > 1 else attempt(0, count))


def _failed(batch: StepBatch, row: int, reason: str) -> SampledTokens:
    first, end = batch.sample_range(row, row + 1)
    if first == end:
        return SampledTokens([], prompt_logprobs=[PromptLogprobs(int(batch.slots[row]), 0, [], reason)])
    return SampledTokens([-1] * (end - first), errors=dict.fromkeys(range(end - first), reason))


def _shifted(masks: Masks | None, first: int, end: int) -> Masks | None:
    """The masks of the sample positions ``first`` to ``end - 1``, numbered from 0."""
    if masks is None:
        return None
    return {position - first: mask for position, mask in masks.items() if first <= position < end} or None
