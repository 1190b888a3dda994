"""Estimates the probability that drafts are accepted, for each request, each source of drafts and each position.

The position of a draft is its place among the drafts of its row in a step. Its chance is the probability that it is
right, given that all drafts before it are right. Chances differ by position: each Medusa head is worse than the head
before it, and an n-gram whose first token is right usually copies more of a passage. A draft is accepted if it and all
drafts before it are right, so the probability of this is the product of the chances up to its position. Medusa (Cai et
al., 2024) builds its trees from such products, with accuracies that were measured before. Here the chances are learnt
while requests run.

A request differs from the other requests by one factor, which multiplies the odds ``chance / (1 - chance)`` of every
position. So drafts at the first positions tell something about later positions, too. The factor is the common odds
ratio of Mantel and Haenszel (1959), with positions as strata. It compares the request's drafts with the chances of the
source at the same positions.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from typing import Final

__all__ = ["Acceptance", "Source", "SourceAcceptance"]

_KEPT: Final = 0.95
"""Factor by which the weight of a request's earlier drafts falls with each new draft that is checked. So newer drafts
count more in the estimate."""
_SHARED_WEIGHTS: Final = (2.0, 8.0, 32.0, 128.0)
"""Possible weights of a source's chances when they are mixed into a request's own estimate. A weight of 8 counts as
much as 8 drafts of the request."""
_FIRST_LOSSES: Final = (1.5, 1.0, 0.5, 0.0)
"""Squared errors that each of ``_SHARED_WEIGHTS`` has at the start. So requests are assumed to be alike at first."""
_LOSS_KEPT: Final = 0.996
"""Factor by which the weight of earlier squared errors falls with each row that is checked. The errors decide which of
``_SHARED_WEIGHTS`` is used."""
_ASSUMED_WEIGHTS: Final = (6.0, 2.0)
"""Weight of the assumed chance of the first position and of later positions, as a number of drafts. The assumption
counts as much as this many drafts."""
_OPTIMISM: Final = 0.3
"""The assumed chance of a position lies between the chance of the position before it (0) and 1 (1). If an assumed
chance is too high, drafts are tried and correct it. If it is too low, no draft is tried at this position."""
_SHARED_KEPT: Final = 0.995
"""Factor by which the weight of a source's earlier drafts falls with each row that is checked, of any request."""
_STALE: Final = 0.125
"""The chances of a source are computed again if new rows are at least this fraction of the rows they come from."""
_MAX_CHANCE: Final = 0.98
"""Upper limit of an estimated chance. Without this limit, after many accepted drafts the estimated gain would exceed
any cost."""


class Source(enum.Enum):
    """Source of drafts. The value is the first estimate of the chance of a row's first draft."""

    FORCED = 0.95
    """Drafts from a grammar that allows only one text now. The text is certain, but the model may divide it into other
    tokens."""
    PREDICTED = 0.9
    """Drafts from the predicted output that the request supplied (``prediction``)."""
    PROPOSED = 0.5
    """Drafts from the engine's proposer: n-grams, a small model or heads."""


class _Own:
    """How the drafts of one request differ from the chances of their source."""

    __slots__ = ("above", "below", "factor", "spread", "survivals", "version", "weight")

    def __init__(self) -> None:
        self.above = self.below = 0.0
        """Sums over the drafts: 1 - the source's chance for each right draft, and the source's chance for each wrong
        draft. Their ratio is the factor of the request's odds."""
        self.spread = 0.0
        """Sum over the drafts of chance * (1 - chance). Both sums are expected to have this value if the request is
        like the others."""
        self.weight = 0.0
        """Weight of the drafts in these sums."""
        self.factor = 1.0
        self.version = -1
        self.survivals: list[float] = []
        """Result of :meth:`SourceAcceptance.survivals`, valid for one version of the source's chances."""

    def factor_with(self, shared: float) -> float:
        """Factor of the request's odds if the source's chances have the weight ``shared``."""
        if not self.weight:
            return 1.0
        extra = shared * self.spread / self.weight
        return (self.above + extra) / (self.below + extra)


class SourceAcceptance:
    """Estimates for the drafts of one source.

    The chances of the source come from the drafts of all requests. The odds of a request are these, times its factor.
    The weight of the source's chances in the factor is the one of several that predicted the newest drafts best: high
    where requests are alike, low where they differ.

    Args:
        first: First estimate of the chance of a row's first draft.
    """

    def __init__(self, first: float) -> None:
        self._first = first
        self.requests: dict[str, _Own] = {}
        """Request id -> what is known about its own drafts."""
        self._right: list[float] = []
        """Entry p: weight of the right drafts at position p."""
        self._checked: list[float] = []
        """Entry p: weight of the drafts at position p that were checked after only right drafts."""
        self._num_new = 0
        """Number of rows that were learnt after the chances were computed."""
        self._chances: list[float] = []
        """Entry p: chance at position p. Only as long as was needed so far."""
        self._survivals: list[float] = []
        """Result of :meth:`survivals` for requests without checked drafts."""
        self._version = 0
        self._losses = list(_FIRST_LOSSES)
        """One number per entry of ``_SHARED_WEIGHTS``: sum of the squared errors of the estimates made with this
        weight."""
        self._weight = _SHARED_WEIGHTS[-1]
        """The entry of ``_SHARED_WEIGHTS`` that is now used."""

    def survivals(self, request_id: str, number: int) -> Sequence[float]:
        """Probability that the drafts of this request are all right up to position p, for each p. The result has
        ``number`` entries or more."""
        if self._num_new:
            self._settle()
        own = self.requests.get(request_id)
        factor = 1.0 if own is None else self._factor(own)
        found = self._survivals if own is None else own.survivals
        if len(found) < number:
            survival = found[-1] if found else 1.0
            chances = self._chances_of(number)
            for at in range(len(found), number):
                odds = factor * chances[at]
                chance = odds / (1 - chances[at] + odds)
                survival *= chance if chance < _MAX_CHANCE else _MAX_CHANCE
                found.append(survival)
        return found

    def best(self, request_ids: Iterable[str], number: int) -> Sequence[float]:
        """:meth:`survivals` of the request with the most probable drafts. They are the most probable at every position,
        because requests differ by one factor."""
        if self._num_new:
            self._settle()
        best = ""
        highest = -1.0
        for name in request_ids:
            own = self.requests.get(name)
            factor = 1.0 if own is None else self._factor(own)
            if factor > highest:
                best = name
                highest = factor
        return self.survivals(best, number)

    def weight(self, request_id: str) -> float:
        """Weight of the request's own drafts in its estimate, as a number of drafts."""
        own = self.requests.get(request_id)
        return 0.0 if own is None else own.weight

    def learn(self, request_id: str, num_drafts: int, num_accepted: int) -> None:
        """Learn from the drafts of a row. Drafts after the first wrong one give no information."""
        if not num_drafts:
            return
        chances = self._chances_of(num_checked := min(num_drafts, num_accepted + 1))
        own = self.requests.get(request_id)
        right = self._right
        checked = self._checked
        if own is None:
            own = self.requests.setdefault(request_id, _Own())
            factor = 1.0
        else:
            factor = own.factor_with(self._weight)
            self._compare(own, chances[:num_checked], num_accepted)
        missing = num_checked - len(checked)
        right += [0.0] * missing
        checked += [0.0] * missing
        above = own.above
        below = own.below
        spread = own.spread
        weight = own.weight
        for at in range(num_checked):
            chance = chances[at]
            rest = 1 - chance
            above = _KEPT * above
            below = _KEPT * below
            spread = _KEPT * spread + chance * rest
            weight = _KEPT * weight + 1
            # Drafts of a request with other odds count for the source as if the request had the source's odds.
            share = 1 / (rest + factor * chance)
            if at < num_accepted:
                above += rest
                right[at] += share
            else:
                below += chance
                share *= factor
            checked[at] += share
        own.above = above
        own.below = below
        own.spread = spread
        own.weight = weight
        self._num_new += 1
        if self._num_new >= _STALE * checked[0]:
            self._settle()

    def _compare(self, own: _Own, chances: Sequence[float], num_accepted: int) -> None:
        """Choose the weight of the source's chances whose estimates for the newest drafts were best."""
        losses = self._losses
        above = own.above
        below = own.below
        spread = own.spread / own.weight
        for i, shared in enumerate(_SHARED_WEIGHTS):
            factor = (above + shared * spread) / (below + shared * spread)
            loss = _LOSS_KEPT * losses[i]
            for at, chance in enumerate(chances):
                odds = factor * chance
                error = odds / (1 - chance + odds) - (at < num_accepted)
                loss += error * error
            losses[i] = loss
        self._weight = _SHARED_WEIGHTS[losses.index(min(losses))]

    def _factor(self, own: _Own) -> float:
        """Factor of a request's odds. Its other results are removed if they are old."""
        if own.version != self._version:
            own.version, own.survivals, own.factor = self._version, [], own.factor_with(self._weight)
        return own.factor

    def _settle(self) -> None:
        """Reduce the weight of earlier drafts, and let the chances be computed again when they are needed."""
        kept = _SHARED_KEPT**self._num_new
        self._right = [kept * weight for weight in self._right]
        self._checked = [kept * weight for weight in self._checked]
        self._num_new = 0
        self._chances = []
        self._survivals = []
        self._version += 1

    def _chances_of(self, number: int) -> Sequence[float]:
        """Chances of the first ``number`` positions, or of more."""
        chances = self._chances
        for at in range(len(chances), number):
            assumed = chances[-1] + _OPTIMISM * (1 - chances[-1]) if at else self._first
            if at < len(self._checked):
                weight = _ASSUMED_WEIGHTS[at > 0]
                assumed = (self._right[at] + weight * assumed) / (self._checked[at] + weight)
            chances.append(assumed)
        return chances


class Acceptance:
    """Estimates for all sources of drafts."""

    def __init__(self) -> None:
        self._sources = {source: SourceAcceptance(source.value) for source in Source}

    def __len__(self) -> int:
        """Number of requests that have their own estimates."""
        return len(set().union(*(each.requests for each in self._sources.values())))

    def __getitem__(self, source: Source) -> SourceAcceptance:
        return self._sources[source]

    def forget(self, request_id: str) -> None:
        """Remove a request's own estimates, because it has ended."""
        for each in self._sources.values():
            each.requests.pop(request_id, None)
