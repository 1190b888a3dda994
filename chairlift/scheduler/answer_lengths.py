"""How long will an answer be? The estimate comes from the answers that ended last."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict, deque
from typing import Final

from chairlift.outputs import FinishReason
from chairlift.request import Request

__all__ = ["AnswerLengths"]

_LEAST_OF_A_CLASS: Final = 20
"""Least number of ended answers for an estimate. A class with fewer uses the answers of all classes."""


class AnswerLengths:
    """Lengths of the newest ``capacity`` answers, over all classes of service and per class.

    An answer that ``max_tokens`` cut off would have been at least as long. Leaving it out, or counting it as it is,
    makes answers look too short. The estimate of Kaplan and Meier (1958) avoids both. Beyond the longest answer seen
    it continues as an exponential distribution (Brown, Hollander and Korwar, 1974).
    """

    def __init__(self, capacity: int = 512) -> None:
        self._all = _Curve(capacity)
        self._classes: defaultdict[str, _Curve] = defaultdict(lambda: _Curve(capacity))

    def add(self, request: Request) -> None:
        """Learn from the answer of an ended request."""
        reason = request.finish_reason
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            for curve in (self._all, self._classes[request.service.service_class]):
                curve.add(request.num_output_tokens, cut=reason is FinishReason.LENGTH)

    def knows(self, request: Request) -> bool:
        """Whether enough similar answers have ended by themselves, or ``min_tokens`` fixes this one's length."""
        most = request.max_total_tokens - request.num_prompt_tokens
        return request.min_tokens >= most or self._curve(request).num_ended >= _LEAST_OF_A_CLASS

    def expected(self, request: Request) -> int:
        """Expected total number of tokens of the request's answer."""
        curve = self._curve(request)
        longest = request.max_total_tokens - request.num_prompt_tokens
        so_far = request.num_output_tokens
        shortest = max(so_far + 1, request.min_tokens)
        if shortest >= longest:
            return longest
        return max(shortest, min(longest, round(so_far + curve.rest(so_far, longest))))

    def _curve(self, request: Request) -> _Curve:
        own = self._classes.get(request.service.service_class)
        return self._all if own is None or own.count < _LEAST_OF_A_CLASS else own


class _Curve:
    """Survival curve: the share of answers that are longer than a given number of tokens."""

    def __init__(self, capacity: int) -> None:
        self._recent: deque[tuple[int, bool]] = deque(maxlen=capacity)
        self._is_fitted = False
        self._at: list[int] = []
        """Lengths at which the share falls, ascending, from 0 on."""
        self._share: list[float] = []
        """Share of longer answers, from each of these lengths to the next."""
        self._area: list[float] = []
        """Area under the curve of those shares, from 0 to each of the lengths."""
        self._longest = 0

    @property
    def count(self) -> int:
        return len(self._recent)

    @property
    def num_ended(self) -> int:
        """Number of recent answers that ended by themselves, not cut off."""
        return sum(not cut for _, cut in self._recent)

    def add(self, num_tokens: int, *, cut: bool) -> None:
        self._recent.append((num_tokens, cut))
        self._is_fitted = False

    def rest(self, so_far: int, most: int) -> float:
        """Mean number of further tokens of answers longer than ``so_far``, if cut off at ``most`` tokens."""
        self._fit()
        share = self._upto(so_far)[1]
        if not share:  # no answer was that long
            return float(most - so_far)
        return (self._upto(most)[0] - self._upto(so_far)[0]) / share

    def _upto(self, length: int) -> tuple[float, float]:
        """(area under the curve up to a length, share at that length)."""
        index = bisect_right(self._at, length) - 1
        area, share, start = self._area[index], self._share[index], self._at[index]
        if length <= self._longest or not self._longest or share in (0.0, 1.0):
            return area + share * (length - start), share
        decay = math.log(share) / self._longest
        beyond = math.exp(decay * length)
        return area + share * (self._longest - start) + (beyond - share) / decay, beyond

    def _fit(self) -> None:
        if self._is_fitted:
            return
        self._is_fitted = True
        self._at, self._share, self._area, self._longest = [0], [1.0], [0.0], 0
        left = len(self._recent)
        for length, cut in sorted(self._recent):  # at equal length, answers that were cut off come last
            if not cut:
                if length > self._at[-1]:
                    self._area.append(self._area[-1] + self._share[-1] * (length - self._at[-1]))
                    self._at.append(length)
                    self._share.append(self._share[-1])
                self._share[-1] *= 1 - 1 / left
            left -= 1
            self._longest = length
