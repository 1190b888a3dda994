"""How the prompt budget of a step is divided: a fraction in policy order, the rest to the smallest requests."""

from __future__ import annotations

import math

from chairlift.errors import ConfigError

__all__ = ["DEFAULT_POLICY_SHARE", "PromptShare"]

DEFAULT_POLICY_SHARE = 0.75
"""Measured with ``benchmarks/fair_share.py``: see benchmarks/README.md."""

_ROWS_PER_RESERVED = 32
"""One in this many rows is reserved for short requests. With fewer rows none is: it would cost throughput."""
_BLOCK_RESERVE = 1 / 64
"""Share of the blocks that only short requests may take when they join. In the default cache it holds a few short
prompts."""


class PromptShare:
    """Divides each step's prompt budget between policy order and smallest first, and reserves rows for short requests.

    A *short* request has no more tokens to compute than the smallest-first part of one full step.

    With the fraction f in policy order, A the prompt tokens handed out since a request of p tokens joined, V the
    uncomputed prompt work before it in policy order and S the work with smaller keys, its prompt is computed by
    ``A = (V + p) / f`` and by ``A = (p + S) / (1 - f)``, each plus one step and the look-ahead depth. The key is
    the number of tokens that a request has to compute when it joins; it never changes while the request runs.

    Args:
        fraction: Share of the budget in policy order, from 0.25 to 1. With 1 nothing goes by size.

    Raises:
        ConfigError: The fraction is outside these limits.
    """

    def __init__(self, fraction: float = DEFAULT_POLICY_SHARE) -> None:
        if not 0.25 <= fraction <= 1.0:
            raise ConfigError(f"policy_share must be from 0.25 to 1, got {fraction}; 1 hands out all in policy order")
        self.fraction = fraction
        self.carried = 1.0 - fraction
        """Fraction of a token that the policy side is owed, at most 1. The policy side gets the first token."""

    @property
    def by_size(self) -> bool:
        """Whether a part of the budget goes to the smallest requests."""
        return self.fraction < 1.0

    def split(self, budget: int, reserved: int) -> int:
        """Tokens of ``budget`` that are handed out in policy order. The rest goes to the smallest requests.

        The policy reserves ``reserved`` of them for some requests. All of these are in the result.
        """
        part = budget - (1.0 - self.fraction) * max(0, budget - reserved) + self.carried
        whole = min(budget, math.floor(part))
        self.carried = min(1.0, part - whole)
        return whole

    def short_tokens(self, token_budget: int) -> int:
        """The most tokens that a short request has to compute."""
        return int((1.0 - self.fraction) * token_budget)

    def reserved_rows(self, rows: int) -> int:
        """Number of ``rows`` rows that only short requests may take."""
        return rows // _ROWS_PER_RESERVED if self.by_size else 0

    def reserved_blocks(self, rows: int) -> float:
        """Share of each block pool that only short requests may take when they join, with ``rows`` rows."""
        return _BLOCK_RESERVE if self.reserved_rows(rows) else 0.0
