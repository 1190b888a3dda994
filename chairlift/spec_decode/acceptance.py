"""Estimates the probability that a draft is accepted, for each request and each source of drafts.

A request without checked drafts gets the estimate of the source, which slowly follows the drafts of all requests.
"""

from __future__ import annotations

import enum
from typing import Final

__all__ = ["Acceptance", "Source"]

_KEPT: Final = 0.95
"""Factor by which the weight of a request's earlier drafts falls with each new draft that is checked. So newer drafts
count more in the estimate."""
_SHARED_WEIGHTS: Final = (2.0, 8.0, 32.0, 128.0)
"""Possible weights of a source's shared estimate when it is mixed into a request's own estimate. A weight of 8 counts
as much as 8 drafts of the request."""
_LOSS_KEPT: Final = 0.998
"""Factor by which the weight of earlier squared errors falls with each new draft. The errors decide which of
``_SHARED_WEIGHTS`` is used."""
_FIRST_WEIGHT: Final = 6.0
"""Weight of a source's initial estimate, as a number of drafts: the initial estimate counts as much as this many
drafts."""
_SHARED_MEMORY: Final = 0.005
"""Minimum weight of each newly checked draft, of any request, in the estimate that a source's requests share."""
_MAX_CHANCE: Final = 0.98
"""Upper limit of an estimated acceptance probability. Without this limit, after many accepted drafts the estimated gain
would exceed any cost."""


class Source(enum.Enum):
    """Source of drafts. The value is the first estimate of the probability that a draft is accepted."""

    FORCED = 0.95
    """Drafts from a grammar that allows only one text now. The text is certain, but the model may divide it into other
    tokens."""
    PREDICTED = 0.9
    """Drafts from the predicted output that the request supplied (``prediction``)."""
    PROPOSED = 0.5
    """Drafts from the engine's proposer: n-grams, a small model or heads."""


class Acceptance:
    """Estimates the probability that a draft is right, given that all earlier drafts of its row are right.

    The estimate of a source is a mean over the drafts of all requests. The estimate of a request is a mean over its own
    drafts and the estimate of the source. The weight of the latter is the one of several that predicted the newest
    drafts best: high where requests are alike, low where they differ.
    """

    def __init__(self) -> None:
        self._common = {source: source.value for source in Source}
        self._counts = dict.fromkeys(Source, 0)
        """Source -> number of drafts from this source that were checked so far."""
        self._losses = {source: [0.0] * len(_SHARED_WEIGHTS) for source in Source}
        """Source -> one number per entry of ``_SHARED_WEIGHTS``: sum of the squared errors of the estimates made with
        this weight."""
        self._weights = dict.fromkeys(Source, _SHARED_WEIGHTS[1])
        """Source -> the entry of ``_SHARED_WEIGHTS`` that is now used for it."""
        self._own: dict[str, dict[Source, tuple[float, float]]] = {}
        """Request id -> source -> (weight of the right drafts, weight of all drafts)."""

    def __len__(self) -> int:
        """Number of requests that have their own estimate of the acceptance probability."""
        return len(self._own)

    def chance(self, request_id: str, source: Source) -> float:
        """Estimated probability that a draft of this request from this source is accepted."""
        common, own = self._common[source], self._own.get(request_id)
        if own is None or source not in own:
            return min(common, _MAX_CHANCE)
        (right, weight), shared = own[source], self._weights[source]
        return min((right + shared * common) / (weight + shared), _MAX_CHANCE)

    def weight(self, request_id: str, source: Source) -> float:
        """Weight of the request's own drafts in its estimate, as a number of drafts."""
        return self._own.get(request_id, {}).get(source, (0.0, 0.0))[1]

    def is_tried(self, request_id: str, source: Source) -> bool:
        """Whether drafts of this request from this source were ever checked."""
        return source in self._own.get(request_id, ())

    def learn(self, request_id: str, source: Source, num_drafts: int, num_accepted: int) -> None:
        """Learn from the drafts of a row. Drafts after the first wrong one give no information."""
        right, weight = self._own.get(request_id, {}).get(source, (0.0, 0.0))
        common, count, losses = self._common[source], self._counts[source], self._losses[source]
        for value in [1.0] * num_accepted + [0.0] * (num_accepted < num_drafts):
            for i, shared in enumerate(_SHARED_WEIGHTS):
                error = (right + shared * common) / (weight + shared) - value
                losses[i] = _LOSS_KEPT * losses[i] + error * error
            right, weight = _KEPT * right + value, _KEPT * weight + 1
            count += 1
            common += max(_SHARED_MEMORY, 1 / (_FIRST_WEIGHT + count)) * (value - common)
        self._own.setdefault(request_id, {})[source] = right, weight
        self._common[source], self._counts[source] = common, count
        self._weights[source] = _SHARED_WEIGHTS[losses.index(min(losses))]

    def forget(self, request_id: str) -> None:
        """Remove a request's own estimates, because it has ended."""
        self._own.pop(request_id, None)
