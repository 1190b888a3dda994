"""Divides the prompt budget of a step: a fraction in policy order, the rest to the smallest requests."""

from __future__ import annotations

import math

from chairlift.errors import ConfigError

__all__ = ["DEFAULT_POLICY_SHARE", "PromptShare"]

DEFAULT_POLICY_SHARE = 0.75
"""Default of ``policy_share``, measured with ``benchmarks/fair_share.py`` (see benchmarks/README.md)."""

_ROWS_PER_RESERVED = 32
"""One of this many rows is reserved for short requests. A batch with fewer rows reserves no row, because a reserved row
would cost throughput."""
_BLOCK_RESERVE = 1 / 64
"""Fraction of the blocks that only short requests may take when they join. In a cache of default size, these blocks
hold a few short prompts."""


class PromptShare:
    """Divides each step's prompt budget into a part in policy order and a part for the smallest requests, and reserves
    rows for short requests.

    A request is *short* if the tokens that it has to compute fit into the part for the smallest requests of one full
    step.

    Bound: let a request have p prompt tokens, let f be ``fraction``, V the prompt tokens of requests before it in
    policy order, and S the prompt tokens of smaller requests. Its prompt is computed when
    ``min((V + p) / f, (p + S) / (1 - f))`` prompt tokens were assigned since it joined, plus one step and the
    look-ahead. The size of a request is the number of tokens that it has to compute when it joins; it does not change
    while the request runs. A prompt that reads images may wait longer beside decode rows, because the step has a second
    limit for the tokens of such prompts (:class:`~chairlift.core.rows.images.ImageRows`).

    Args:
        fraction: Fraction of the budget in policy order, from 0.25 to 1. With 1 the smallest requests get no part.

    Raises:
        ConfigError: The fraction is outside these limits.
    """

    def __init__(self, fraction: float = DEFAULT_POLICY_SHARE) -> None:
        if not 0.25 <= fraction <= 1.0:
            raise ConfigError(f"policy_share must be from 0.25 to 1, got {fraction}; 1 hands out all in policy order")
        self.fraction = fraction
        self.carried = 1.0 - fraction
        """Rounding remainder of earlier steps: fraction of a token, at most 1, that the part in policy order still has
        to get. Its initial value gives the first token to this part."""

    @property
    def by_size(self) -> bool:
        """Whether a part of the budget goes to the smallest requests."""
        return self.fraction < 1.0

    def split(self, budget: int, reserved: int) -> int:
        """Number of tokens of ``budget`` that are assigned in policy order. The rest goes to the smallest requests.

        The result includes the ``reserved`` tokens, which the policy reserves for some requests.
        """
        part = budget - (1.0 - self.fraction) * max(0, budget - reserved) + self.carried
        whole = min(budget, math.floor(part))
        self.carried = min(1.0, part - whole)
        return whole

    def short_tokens(self, token_budget: int) -> int:
        """Maximum number of tokens that a short request has to compute."""
        return int((1.0 - self.fraction) * token_budget)

    def reserved_rows(self, rows: int) -> int:
        """Number of rows, out of ``rows``, that only short requests may take."""
        return rows // _ROWS_PER_RESERVED if self.by_size else 0

    def reserved_blocks(self, rows: int) -> float:
        """Fraction of each block pool that only short requests may take when they join, if there are ``rows`` rows."""
        return _BLOCK_RESERVE if self.reserved_rows(rows) else 0.0
