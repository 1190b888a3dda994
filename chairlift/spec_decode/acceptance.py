"""Estimates how likely drafts are accepted, for each request and each source of drafts.

A request without verified drafts has the estimate of its source: a prior that slowly follows all requests.
"""

from __future__ import annotations

import enum
from typing import Final

__all__ = ["Acceptance", "Source"]

_MEMORY: Final = 0.15
"""Weight of the newest draft in a request's estimate."""
_SHARED_MEMORY: Final = 0.005
"""Weight of each new draft, of any request, in the prior for new requests."""
_MOST: Final = 0.98
"""Upper limit of an estimated acceptance. Without it a long run of accepted drafts would outweigh any cost."""


class Source(enum.Enum):
    """Source of drafts, and the prior acceptance of its first draft."""

    FORCED = 0.95
    """Drafts from a grammar that allows only one text: the text is certain, and its split into tokens is a guess."""
    PREDICTED = 0.9
    """The text that the caller expects."""
    PROPOSED = 0.5
    """The engine's proposer."""


class Acceptance:
    """Estimates of the probability that a draft is right, given that all before it in its row are."""

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
        """Whether drafts of this request from this source were ever verified."""
        return source in self._own.get(request_id, ())

    def learn(self, request_id: str, source: Source, num_drafts: int, num_accepted: int) -> None:
        """Learn from a row of drafts. Drafts after the first wrong one tell nothing."""
        chance, common = self.chance(request_id, source), self._common[source]
        for right in [1.0] * num_accepted + [0.0] * (num_accepted < num_drafts):
            chance += _MEMORY * (right - chance)
            common += _SHARED_MEMORY * (right - common)
        self._own.setdefault(request_id, {})[source] = min(chance, _MOST)
        self._common[source] = min(common, _MOST)

    def forget(self, request_id: str) -> None:
        """Forget a request that has left."""
        self._own.pop(request_id, None)
