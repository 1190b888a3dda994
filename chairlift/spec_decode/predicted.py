"""Drafts from a text that the answer is expected to repeat: OpenAI's ``prediction``.

For example, an edited file mostly equals the old file, which the caller has. While the answer follows the text, the
next tokens of the text are drafted. After a difference, the place is found again from the last tokens of the answer.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from typing import Final

__all__ = ["PredictedText"]

_LEAST_MATCH: Final = 2
"""Number of equal tokens by which the place in the predicted text is found again."""
_MOST_MATCH: Final = 16
"""Longer matches are as good as this."""
_MOST_COMPARED: Final = 64
"""Most places of the expected text that are compared, nearest first. A long text has many places with the same
ending."""


class PredictedText:
    """Place of one growing answer in the expected text.

    Args:
        token_ids: The text. The answer is expected to begin like it.
    """

    __slots__ = ("_ends", "_lost_at", "_num_seen", "_place", "_text")

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._text = tuple(token_ids)
        self._ends: dict[tuple[int, ...], list[int]] | None = None
        """Two tokens -> places after them, ascending. Made when the answer first leaves the text."""
        self._place: int | None = 0
        """Index of the token that comes next; None while the answer is elsewhere."""
        self._lost_at = 0
        self._num_seen = 0

    def propose(self, token_ids: Sequence[int], num_prompt_tokens: int, most: int) -> Sequence[int]:
        """Up to ``most`` tokens that may follow ``token_ids``, of which the first ``num_prompt_tokens`` are the prompt.
        Empty while the answer has left the text."""
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
        """Place after the longest match of the answer's last tokens. Among equally long matches: the first after the
        place where the text was left, otherwise the nearest before it."""
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
        """Number of last tokens of ``answer`` that equal the text before ``end``."""
        most = min(len(answer), end)
        for count in range(_LEAST_MATCH, most):
            if answer[-count - 1] != self._text[end - count - 1]:
                return count
        return most
