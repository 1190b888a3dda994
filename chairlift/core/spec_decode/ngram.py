"""Makes drafts from the request's own text: the tokens that followed an earlier occurrence of the text's last few
tokens.

This is prompt lookup decoding (Saxena, 2023). It helps if an answer repeats parts of its prompt: editing, extraction,
code, summaries.
"""

from __future__ import annotations

from collections.abc import Sequence

from chairlift.core.request import Request

__all__ = ["NgramIndex", "NgramProposer"]

_MAX_PER_CALL = 4096
"""Maximum number of tokens that one call adds to the index, so that a long prompt does not delay a step."""


class NgramIndex:
    """Last position of each n-gram of ``size`` tokens in one text. The text only grows.

    Args:
        size: Length of an n-gram in tokens.
    """

    __slots__ = ("_ends", "_num_indexed", "_size")

    def __init__(self, size: int) -> None:
        self._size = size
        self._ends: dict[tuple[int, ...], int] = {}
        """N-gram -> index in the text of the token after the n-gram's last occurrence."""
        self._num_indexed = 0
        """Number of leading tokens of the text whose n-grams are in the index."""

    def propose(self, token_ids: Sequence[int], limit: int) -> Sequence[int]:
        """Up to ``limit`` tokens that may follow ``token_ids``; empty if the last n-gram did not occur before."""
        self._index(token_ids)
        if self._num_indexed < len(token_ids) - 1:
            return ()
        end = self._ends.get(tuple(token_ids[-self._size :]))
        if end is None:
            return ()
        found = token_ids[end : end + limit]
        if len(found) < limit:  # the text repeats itself
            period = len(token_ids) - end
            found = [token_ids[end + i % period] for i in range(limit)]
        return found

    def _index(self, token_ids: Sequence[int]) -> None:
        """Add all n-grams to the index that end before the last token of the text. For these n-grams the next token is
        known."""
        size = self._size
        ends = self._ends
        last = min(len(token_ids) - 1, self._num_indexed + _MAX_PER_CALL)
        for end in range(max(size, self._num_indexed + 1), last + 1):
            ends[tuple(token_ids[end - size : end])] = end
        self._num_indexed = max(self._num_indexed, last)


class NgramProposer:
    """Makes drafts with one index per request. See :class:`~chairlift.core.spec_decode.adaptive.Proposer`.

    Args:
        size: Number of last tokens that must have occurred before.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._indexes: dict[str, NgramIndex] = {}

    def __len__(self) -> int:
        """Number of requests for which an n-gram index exists."""
        return len(self._indexes)

    def propose(self, rows: Sequence[tuple[Request, int]]) -> Sequence[Sequence[int]]:
        """Drafts for each row: the tokens that followed an earlier occurrence of the row's last tokens."""
        return [self._index(request).propose(request.token_ids, limit) for request, limit in rows]

    def seconds(self, num_rows: int) -> float:
        """Always 0: these drafts cost almost no time."""
        return 0.0

    def _index(self, request: Request) -> NgramIndex:
        index = self._indexes.get(request.request_id)
        if index is None:
            index = self._indexes[request.request_id] = NgramIndex(self._size)
        return index

    def forget(self, request: Request) -> None:
        """Remove the n-gram index of a request that has ended."""
        self._indexes.pop(request.request_id, None)
