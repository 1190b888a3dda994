"""Shortest residual prompt first, with ageing.

Source: vLLM pull request 51375 (open). Claim: shorter waits where prompts share cached beginnings; TensorRT-LLM 12423
reports 7.5 % less median latency for the raw length.

Preempted requests go first, as with every policy. Then come requests older than ``age_seconds``, by arrival. Then the
fewest blocks of the prompt that are not in the prefix cache.
"""

from __future__ import annotations

from collections.abc import Iterable

from chairlift.core.plugins.keyed_policy import KeyedPolicy
from chairlift.core.request import Request

__all__ = ["ResidualShortestFirst"]


class ResidualShortestFirst(KeyedPolicy):
    """Fewest uncached blocks first, until a request is old."""

    name = "residual_sjf"
    age_seconds = 10.0

    def key(self, request: Request) -> tuple[float, ...]:
        size = self.view.block_size
        cached = self.view.cached_tokens(request)
        return (1.0, len(request.token_ids) // size - cached // size)

    def moved(self) -> Iterable[Request]:
        moved = []
        for name, request in self.waiting.items():
            if self.view.now - request.arrival_time < self.age_seconds:
                break  # the dictionary is in the order of arrival, but for preempted requests
            if self.keys[name]:
                self.keys[name] = ()
                moved.append(request)
        return moved

    def order(self, request: Request) -> tuple[float, ...]:
        return (*(self.keys[request.request_id] or (0.0, 0.0)), request.sequence)
