"""Batch and wait: newcomers join together, when enough of them wait or the oldest has waited for the queue delay.

Source: Triton's dynamic batcher (max_queue_delay_microseconds, preferred_batch_size), here with continuous batching:
running requests go on meanwhile. Triton's own batches are ``--batching dynamic``. Claim: larger batches for a bounded
delay.
"""

from __future__ import annotations

from typing import Any

from chairlift.core.scheduler.membership import Membership

__all__ = ["QueueDelay"]


class QueueDelay(Membership):
    """Requests join when the free rows or a preferred number are reached, or ``--batch-wait-ms`` after the oldest
    arrived."""

    def __init__(self, batch_wait: float, preferred_sizes: tuple[int, ...]) -> None:
        super().__init__(
            "queue_delay", closed=False, held=False, batch_wait=batch_wait, preferred_sizes=preferred_sizes
        )

    def opens(self, waiting: Any, num_running: int, free_slots: int, now: float) -> bool:
        enough = self._ready_size(waiting, free_slots) > 0
        return enough or now >= waiting.oldest_arrival + self.batch_wait

    def fires_at(self, waiting: Any, free_slots: int) -> float:
        oldest: float = waiting.oldest_arrival
        return oldest if self._ready_size(waiting, free_slots) else oldest + self.batch_wait

    def lacks(self, places: int) -> str:
        return "tokens" if places else "batch"
