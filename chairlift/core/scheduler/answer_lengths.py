"""Estimates how long an answer will be, from the lengths of recently ended answers."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict, deque
from typing import Final

from chairlift.base.outputs import FinishReason
from chairlift.core.request import Request

__all__ = ["AnswerLengths"]

_MIN_ANSWERS: Final = 20
"""Minimum number of ended answers that an estimate needs. For a class of service with fewer answers, the estimate uses
the answers of all classes."""


class AnswerLengths:
    """Lengths of the newest ``capacity`` answers, over all classes of service and per class.

    An answer that ``max_tokens`` cut off would have been longer. If such answers were left out, or counted with their
    cut length, the estimate would be too short. The Kaplan-Meier estimate (1958) avoids both errors. Beyond the longest
    answer seen, the curve continues as an exponential distribution (Brown, Hollander and Korwar, 1974).
    """

    def __init__(self, capacity: int = 512) -> None:
        self._all = _Curve(capacity)
        self._classes: defaultdict[str, _Curve] = defaultdict(lambda: _Curve(capacity))

    def add(self, request: Request) -> None:
        """Add the answer of an ended request to the statistics."""
        reason = request.finish_reason
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            for curve in (self._all, self._classes[request.service.service_class]):
                curve.add(request.num_output_tokens, cut=reason is FinishReason.LENGTH)

    def knows(self, request: Request) -> bool:
        """Whether the length of this request's answer can be estimated: enough similar answers have ended by
        themselves, or ``min_tokens`` fixes the length."""
        max_tokens = request.max_total_tokens - request.num_prompt_tokens
        return request.min_tokens >= max_tokens or self._curve(request).num_ended >= _MIN_ANSWERS

    def recent(self, request: Request) -> list[int]:
        """Lengths of the newest answers on which the estimate for this request is based, oldest first. Answers that
        were cut off have the length at which they were."""
        return self._curve(request).lengths

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
        return self._all if own is None or own.count < _MIN_ANSWERS else own


class _Curve:
    """Survival curve: the fraction of answers that are longer than a given number of tokens."""

    def __init__(self, capacity: int) -> None:
        self._recent: deque[tuple[int, bool]] = deque(maxlen=capacity)
        self._is_fitted = False
        self._at: list[int] = []
        """Answer lengths in tokens at which the fraction of longer answers decreases, ascending, beginning with 0."""
        self._share: list[float] = []
        """For each length in ``_at``: fraction of answers that are longer, up to the next length."""
        self._area: list[float] = []
        """For each length in ``_at``: area under the curve from 0 to this length."""
        self._longest = 0

    @property
    def count(self) -> int:
        return len(self._recent)

    @property
    def lengths(self) -> list[int]:
        """Lengths of the recent answers in tokens, oldest first."""
        return [num_tokens for num_tokens, _ in self._recent]

    @property
    def num_ended(self) -> int:
        """Number of recent answers that ended by themselves and were not cut off."""
        return sum(not cut for _, cut in self._recent)

    def add(self, num_tokens: int, *, cut: bool) -> None:
        self._recent.append((num_tokens, cut))
        self._is_fitted = False

    def rest(self, so_far: int, limit: int) -> float:
        """Expected number of further tokens of an answer that is longer than ``so_far`` and is cut off at ``limit``
        tokens."""
        self._fit()
        share = self._upto(so_far)[1]
        if not share:  # no answer was that long
            return float(limit - so_far)
        return (self._upto(limit)[0] - self._upto(so_far)[0]) / share

    def _upto(self, length: int) -> tuple[float, float]:
        """(area under the curve up to ``length``, fraction of longer answers at ``length``)."""
        index = bisect_right(self._at, length) - 1
        area = self._area[index]
        share = self._share[index]
        start = self._at[index]
        if length <= self._longest or not self._longest or share in (0.0, 1.0):
            return area + share * (length - start), share
        decay = math.log(share) / self._longest
        beyond = math.exp(decay * length)
        return area + share * (self._longest - start) + (beyond - share) / decay, beyond

    def _fit(self) -> None:
        if self._is_fitted:
            return
        self._is_fitted = True
        self._at = [0]
        self._share = [1.0]
        self._area = [0.0]
        self._longest = 0
        remaining = len(self._recent)
        for length, cut in sorted(self._recent):  # at equal length, answers that were cut off come last
            if not cut:
                if length > self._at[-1]:
                    self._area.append(self._area[-1] + self._share[-1] * (length - self._at[-1]))
                    self._at.append(length)
                    self._share.append(self._share[-1])
                self._share[-1] *= 1 - 1 / remaining
            remaining -= 1
            self._longest = length
