"""Makes drafts from a text that the answer is expected to repeat: OpenAI's ``prediction``.

For example, an edited file is mostly equal to the old file, which the caller has. While the answer follows the text,
the next tokens of the text are the drafts. After a difference, the last tokens of the answer are searched in the text,
to find the position again.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from typing import Final

__all__ = ["PredictedText"]

_MIN_MATCH: Final = 2
"""After a difference between answer and text, at least this many last tokens must match to find the position in the
expected text again."""
_MAX_MATCH: Final = 16
"""Maximum number of tokens that are compared to find the position in the expected text; longer matches are not
better."""
_MAX_COMPARED: Final = 64
"""Maximum number of positions in the expected text that are compared in each direction, nearest first. A long text may
have many positions with the same last tokens."""


class PredictedText:
    """Position of one growing answer in the expected text.

    Args:
        token_ids: Token ids of the text. The answer is expected to begin like it.
    """

    __slots__ = ("_ends", "_lost_at", "_num_seen", "_place", "_text")

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._text = tuple(token_ids)
        self._ends: dict[tuple[int, ...], list[int]] | None = None
        """Pair of tokens -> indices after each occurrence of this pair in the expected text, ascending. Made when the
        answer first differs from the text."""
        self._place: int | None = 0
        """Index in the expected text of the token that is expected next; None while the answer differs from the
        text."""
        self._lost_at = 0
        self._num_seen = 0

    def propose(self, token_ids: Sequence[int], num_prompt_tokens: int, limit: int) -> Sequence[int]:
        """Up to ``limit`` tokens that may follow ``token_ids``. The first ``num_prompt_tokens`` of ``token_ids`` are
        the prompt. Empty while the answer differs from the text."""
        text = self._text
        fresh = tuple(token_ids[num_prompt_tokens + self._num_seen :])
        self._num_seen += len(fresh)
        if self._place is not None:
            begin, end = self._place, self._place + len(fresh)
            self._place = end if text[begin:end] == fresh else None
            if self._place is None:
                same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(text[begin:], fresh, strict=False))
                self._lost_at = begin + len(list(same))
        if self._place is None:
            self._place = self._find(token_ids, num_prompt_tokens)
        return () if self._place is None else text[self._place : self._place + limit]

    def _find(self, token_ids: Sequence[int], num_prompt_tokens: int) -> int | None:
        """Index in the expected text after the longest match of the answer's last tokens; None if there is no match. Of
        equally long matches, the first one after the position where the answer left the text is taken, otherwise the
        nearest one before it."""
        if self._num_seen < _MIN_MATCH:
            return None
        if self._ends is None:
            self._ends = {}
            for end in range(_MIN_MATCH, len(self._text) + 1):
                self._ends.setdefault(self._text[end - _MIN_MATCH : end], []).append(end)
        ends = self._ends.get(tuple(token_ids[-_MIN_MATCH:]), ())
        middle = bisect.bisect_left(ends, self._lost_at)
        near = [*ends[middle : middle + _MAX_COMPARED], *reversed(ends[max(0, middle - _MAX_COMPARED) : middle])]
        answer = token_ids[max(num_prompt_tokens, len(token_ids) - _MAX_MATCH) :]
        return max(near, key=lambda end: self._match(answer, end), default=None)  # of equal ones the first

    def _match(self, answer: Sequence[int], end: int) -> int:
        """Number of last tokens of ``answer`` that equal the last tokens before index ``end`` of the expected text."""
        limit = min(len(answer), end)
        for count in range(_MIN_MATCH, limit):
            if answer[-count - 1] != self._text[end - count - 1]:
                return count
        return limit
