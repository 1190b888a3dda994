"""Drafts from a text that the caller expects the answer to repeat: OpenAI's ``prediction``.

An edited file is mostly the old file, and who asks for the edit has it. While the answer follows the text, what comes
next in the text is drafted. Where they part, the place is found again by what the answer ends with.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from typing import Final

__all__ = ["PredictedText"]

_LEAST_MATCH: Final = 2
"""Tokens that must be equal for the place to be found again."""
_MOST_MATCH: Final = 16
"""Longer matches are as good as this."""
_MOST_COMPARED: Final = 64
"""Places that are compared, the nearest to where the text was lost: a long text has many that end alike."""


class PredictedText:
    """Where an answer stands in the text that was expected. One per answer: it follows the answer as that grows.

    Args:
        token_ids: The text. The answer is expected to begin at its beginning.
    """

    __slots__ = ("_ends", "_lost_at", "_num_seen", "_place", "_text")

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._text = tuple(token_ids)
        self._ends: dict[tuple[int, ...], list[int]] | None = None
        """Two tokens -> places behind them, ascending. Made when the text is lost for the first time."""
        self._place: int | None = 0
        """Index of the token that comes next; None while the answer is elsewhere."""
        self._lost_at = 0
        self._num_seen = 0

    def propose(self, token_ids: Sequence[int], num_prompt_tokens: int, most: int) -> Sequence[int]:
        """Up to ``most`` tokens that may follow ``token_ids``, of which the first ``num_prompt_tokens`` are the
        prompt. None while the answer has left the text."""
        text, fresh = self._text, tuple(token_ids[num_prompt_tokens + self._num_seen :])
        self._num_seen += len(fresh)
        if self._place is not None:
            begin, end = self._place, self._place + len(fresh)
            self._place = end if text[begin:end] == fresh else None
            if self._place is None:
                same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(text[begin:], fresh, strict=False))
                self._lost_at = begin + len(list(same))
        if self._place is None:
            self._place = self._find(token_ids, num_prompt_tokens)
        return () if self._place is None else text[self._place : self._place + most]

    def _find(self, token_ids: Sequence[int], num_prompt_tokens: int) -> int | None:
        """The place behind the longest run of tokens that the answer ends with; of equally long ones the first behind
        where the text was lost, or else the nearest before."""
        if self._num_seen < _LEAST_MATCH:
            return None
        if self._ends is None:
            self._ends = {}
            for end in range(_LEAST_MATCH, len(self._text) + 1):
                self._ends.setdefault(self._text[end - _LEAST_MATCH : end], []).append(end)
        ends = self._ends.get(tuple(token_ids[-_LEAST_MATCH:]), ())
        middle = bisect.bisect_left(ends, self._lost_at)
        near = [*ends[middle : middle + _MOST_COMPARED], *reversed(ends[max(0, middle - _MOST_COMPARED) : middle])]
        answer = token_ids[max(num_prompt_tokens, len(token_ids) - _MOST_MATCH) :]
        return max(near, key=lambda end: self._match(answer, end), default=None)  # of equal ones the first

    def _match(self, answer: Sequence[int], end: int) -> int:
        """How many of the last tokens of ``answer`` stand before ``end`` in the text."""
        most = min(len(answer), end)
        for count in range(_LEAST_MATCH, most):
            if answer[-count - 1] != self._text[end - count - 1]:
                return count
        return most
