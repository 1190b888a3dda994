"""Drafts from the request's own text: the tokens that followed an earlier occurrence of the last few tokens.

This is prompt lookup decoding (Saxena, 2023). It pays where an answer repeats its prompt: editing, extraction, code,
summaries.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["NgramIndex"]

_MOST_PER_CALL = 4096
"""Most tokens that one call adds to the index, so that a long prompt does not delay a step."""


class NgramIndex:
    """Last place of each n-gram of ``size`` tokens in one text, which only grows.

    Args:
        size: Length of an n-gram, in tokens.
        hint: A text that is expected in the answer, as a whole or in parts (OpenAI's ``prediction``). It is searched as
            if it came before the prompt.
    """

    __slots__ = ("_ends", "_hint", "_num_indexed", "_size")

    def __init__(self, size: int, hint: Sequence[int] = ()) -> None:
        self._size = size
        self._hint = list(hint)
        self._ends: dict[tuple[int, ...], int] = {}
        """N-gram -> index of the token after it; a negative index counts from the end of the hint."""
        self._num_indexed = 0
        """Number of leading tokens of the text whose n-grams are in the index."""
        for end in range(size, len(self._hint)):
            self._ends[tuple(self._hint[end - size : end])] = end - len(self._hint)

    def propose(self, token_ids: Sequence[int], num_prompt_tokens: int, most: int) -> Sequence[int]:
        """Up to ``most`` tokens that may follow ``token_ids``, of which the first ``num_prompt_tokens`` are the
        prompt."""
        begin = len(token_ids) - num_prompt_tokens
        if self._hint and begin < self._size and list(token_ids[num_prompt_tokens:]) == self._hint[:begin]:
            return self._hint[begin : begin + most]
        self._index(token_ids)
        if self._num_indexed < len(token_ids) - 1:
            return ()
        end = self._ends.get(tuple(token_ids[-self._size :]))
        if end is None:
            return ()
        if end < 0:
            begin = len(self._hint) + end
            return self._hint[begin : begin + most]
        found = token_ids[end : end + most]
        if len(found) < most:  # the text repeats itself
            period = len(token_ids) - end
            found = [token_ids[end + i % period] for i in range(most)]
        return found

    def _index(self, token_ids: Sequence[int]) -> None:
        """Add n-grams that end before the last token, because the token after them is known."""
        size, ends = self._size, self._ends
        last = min(len(token_ids) - 1, self._num_indexed + _MOST_PER_CALL)
        for end in range(max(size, self._num_indexed + 1), last + 1):
            ends[tuple(token_ids[end - size : end])] = end
        self._num_indexed = max(self._num_indexed, last)
