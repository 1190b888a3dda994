"""Drafts from the request's own text: the tokens that followed an earlier occurrence of the last few tokens.

This is prompt lookup decoding (Saxena, 2023). It pays where an answer repeats its prompt: editing, extraction, code,
summaries.
"""

from __future__ import annotations

from collections.abc import Sequence

from chairlift.request import Request

__all__ = ["NgramIndex", "NgramProposer"]

_MOST_PER_CALL = 4096
"""Most tokens that one call adds to the index, so that a long prompt does not delay a step."""


class NgramIndex:
    """Last place of each n-gram of ``size`` tokens in one text, which only grows.

    Args:
        size: Tokens that must be equal.
    """

    __slots__ = ("_ends", "_num_indexed", "_size")

    def __init__(self, size: int) -> None:
        self._size = size
        self._ends: dict[tuple[int, ...], int] = {}
        """Run -> index of the token behind it."""
        self._num_indexed = 0
        """Leading tokens of the text whose runs are in the index."""

    def propose(self, token_ids: Sequence[int], most: int) -> Sequence[int]:
        """Up to ``most`` tokens that may follow ``token_ids``."""
        self._index(token_ids)
        if self._num_indexed < len(token_ids) - 1:
            return ()
        end = self._ends.get(tuple(token_ids[-self._size :]))
        if end is None:
            return ()
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


class NgramProposer:
    """An index per request. See :class:`~chairlift.spec_decode.adaptive.Proposer`.

    Args:
        size: Tokens that must be equal for a draft.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._indexes: dict[str, NgramIndex] = {}

    def __len__(self) -> int:
        """Requests that have an index."""
        return len(self._indexes)

    def propose(self, rows: Sequence[tuple[Request, int]]) -> Sequence[Sequence[int]]:
        """Tokens that followed an earlier occurrence of each row's last tokens."""
        return [self._index(request).propose(request.token_ids, most) for request, most in rows]

    def seconds(self, num_rows: int) -> float:
        """Next to nothing."""
        return 0.0

    def _index(self, request: Request) -> NgramIndex:
        index = self._indexes.get(request.request_id)
        if index is None:
            index = self._indexes[request.request_id] = NgramIndex(self._size)
        return index

    def forget(self, request: Request) -> None:
        """The request has left for good."""
        self._indexes.pop(request.request_id, None)
