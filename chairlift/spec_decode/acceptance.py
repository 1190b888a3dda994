"""Estimates the probability that a draft is accepted, for each request and each source of drafts.

A request without checked drafts gets the estimate of the source, which slowly follows the drafts of all requests.
"""

from __future__ import annotations

import enum
from typing import Final

__all__ = ["Acceptance", "Source"]

_MEMORY: Final = 0.15
"""Weight of the newest draft in the estimate of its own request."""
_SHARED_MEMORY: Final = 0.005
"""Weight of each new draft, of any request, in the estimate for new requests."""
_MAX_CHANCE: Final = 0.98
"""Maximum of an estimated probability. Without this limit, after many accepted drafts the estimated gain would exceed
any cost."""


class Source(enum.Enum):
    """Source of drafts. The value is the first estimate of the probability that a draft is accepted."""

    FORCED = 0.95
    """Drafts from a grammar that allows only one text now. The text is certain, but the model may divide it into other
    tokens."""
    PREDICTED = 0.9
    """Drafts from the text that the caller expects (``prediction``)."""
    PROPOSED = 0.5
    """Drafts from the engine's proposer: n-grams, a small model or heads."""


class Acceptance:
    """Estimates the probability that a draft is right, given that all earlier drafts of its row are right."""

    def __init__(self) -> None:
        self._common = {source: source.value for source in Source}
        self._own: dict[str, dict[Source, float]] = {}

    def __len__(self) -> int:
        """Number of requests that have their own estimate."""
        return len(self._own)

    def chance(self, request_id: str, source: Source) -> float:
        """Probability that a draft of this request from this source is right."""
        own = self._own.get(request_id)
        return self._common[source] if own is None else own.get(source, self._common[source])

    def is_tried(self, request_id: str, source: Source) -> bool:
        """Whether drafts of this request from this source were ever checked."""
        return source in self._own.get(request_id, ())

    def learn(self, request_id: str, source: Source, num_drafts: int, num_accepted: int) -> None:
        """Learn from the drafts of a row. Drafts after the first wrong one give no information."""
        chance, common = self.chance(request_id, source), self._common[source]
        for right in [1.0] * num_accepted + [0.0] * (num_accepted < num_drafts):
            chance += _MEMORY * (right - chance)
            common += _SHARED_MEMORY * (right - common)
        self._own.setdefault(request_id, {})[source] = min(chance, _MAX_CHANCE)
        self._common[source] = min(common, _MAX_CHANCE)

    def forget(self, request_id: str) -> None:
        """Remove the estimates of a request that has ended."""
        self._own.pop(request_id, None)
