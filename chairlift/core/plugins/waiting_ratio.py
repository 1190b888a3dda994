"""TGI's rule of when to pause decoding for prompts.

Source: the router of Text Generation Inference (waiting_served_ratio, max_waiting_tokens). Claim: running answers are
interrupted only for a batch of prompts that is worth it.
"""

from __future__ import annotations

from chairlift.core.scheduler.prefill_mode import Turn
from chairlift.core.scheduler.view import View

__all__ = ["WaitingRatio"]


class WaitingRatio:
    """Steps decode until the waiting requests are a fraction ``ratio`` of the running ones, or until they have waited
    for ``patience`` steps. Then steps compute prompts until they are done."""

    name = "waiting_ratio"
    ratio = 0.3
    patience = 20

    def __init__(self) -> None:
        self._skipped = 0

    def turn(self, view: View) -> Turn:
        if any(request.num_computed_tokens < request.progress_mark for request in view.prompts):
            return Turn.PREFILL
        if not view.num_waiting or not view.free_rows:
            return Turn.MIXED
        self._skipped += 1
        if view.num_waiting < self.ratio * view.num_decodes and self._skipped <= self.patience:
            return Turn.DECODE
        self._skipped = 0
        return Turn.PREFILL
