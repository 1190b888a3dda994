"""Batches that nobody joins while they run: baselines for comparison. ``--batching`` takes their names.

The scheduler keeps what they need of it: rows that compute on after their end (``held``), and batches that begin whole
(``closed``). In the laboratory both lose on every trace (docs/laboratory.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from chairlift.core.request import Request
from chairlift.core.scheduler.membership import Membership

__all__ = ["ClosedBatch", "Dynamic", "Static"]


class ClosedBatch(Membership):
    """Requests join only when the batch is empty, all at the same time: when it can be full, when a preferred number
    waits, or when the oldest has waited for ``batch_wait`` seconds."""

    def places(self, waiting: Any, num_running: int, free_slots: int, now: float) -> int:
        if num_running or not len(waiting):
            return 0
        if now >= waiting.oldest_arrival + self.batch_wait:
            return free_slots
        return self._ready_size(waiting, free_slots)

    def fires_at(self, waiting: Any, free_slots: int) -> float:
        oldest: float = waiting.oldest_arrival
        return oldest + (0.0 if self._ready_size(waiting, free_slots) else self.batch_wait)

    def lacks(self, places: int) -> str:
        return "tokens" if places else "batch"

    def needs_budget(self) -> int:
        return 0


class Dynamic(ClosedBatch):
    """A batch that delivers each answer as it ends (Triton's dynamic batcher)."""

    def __init__(self, batch_wait: float, preferred_sizes: tuple[int, ...]) -> None:
        super().__init__("dynamic", closed=True, held=False, batch_wait=batch_wait, preferred_sizes=preferred_sizes)


class Static(ClosedBatch):
    """A batch whose finished rows compute on, and whose answers all come at its end (FasterTransformer)."""

    def __init__(self, batch_wait: float, preferred_sizes: tuple[int, ...]) -> None:
        super().__init__("static", closed=True, held=True, batch_wait=batch_wait, preferred_sizes=preferred_sizes)

    def prepare(self, batch: Sequence[Request], limit: int) -> None:
        longest = max((request.max_total_tokens - request.num_prompt_tokens for request in batch), default=0)
        for request in batch:
            own = request.max_total_tokens - 1
            request.limit = max(own, min(request.num_prompt_tokens + longest - 1, limit))
