"""LPRS and APC: an order with linear ageing, a budget from the predicted step time, and few prompts per step.

Source: arXiv 2606.09061. Claim: mean latency 10 % below that of first come, first served.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from chairlift.core.plugins.keyed_policy import KeyedPolicy
from chairlift.core.request import Request
from chairlift.core.scheduler.view import View

__all__ = ["LprsApc"]


class LprsApc(KeyedPolicy):
    """The largest ``weight * waited - remaining prompt`` goes first. Both sides grow alike with time, so this is a
    fixed key."""

    name = "lprs"
    weight = 37.5
    """Prompt tokens that a second of waiting is worth."""
    target_seconds = 0.05
    """Wanted duration of a step."""
    grid = 64
    """Budgets are multiples of this number of prompt tokens."""
    overflow = 10.0
    """Weight of a second above the target; a second below it has weight 1."""
    max_prompts = 8
    """Maximum number of prompts in a step."""
    min_chunk = 64
    """Tokens of a chunk below which a prompt waits for the next step, if anything else makes progress."""

    def key(self, request: Request) -> tuple[float, ...]:
        return (self.view.uncached_tokens(request) + self.weight * request.arrival_time,)

    def budget(self, view: View) -> int:
        best = (float("inf"), self.grid)
        for tokens in range(self.grid, max(view.token_budget, self.grid) + 1, self.grid):
            seconds = view.step_seconds(tokens=tokens) - self.target_seconds
            best = min(best, (seconds * self.overflow if seconds > 0 else -seconds, tokens))
            if seconds > 0:
                break
        return best[1]

    def admits(self, request: Request, view: View) -> bool:
        return len(list(view.prompts)) < self.max_prompts

    def share(self, needs: Sequence[tuple[Request, int]], budget: int) -> Iterable[tuple[Request, int]]:
        most = max(1, min(self.max_prompts, budget // self.min_chunk))
        given = 0
        for request, tokens in super().share(needs, budget):
            if given < most and (not given or tokens >= min(self.min_chunk, dict(needs)[request])):
                given += 1
                yield request, tokens
