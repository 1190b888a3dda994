"""Makes drafts from the request's own tokens and from earlier answers: what followed the longest suffix of the text.

This is suffix decoding (Oliaro et al., 2024; Arctic Inference). It helps if answers resemble each other, as those of
agents that call the same tools again and again. A suffix tree has the number of times that each token followed a
suffix. Here an index of short runs finds the newest places of the text's last tokens, and the places are compared
backwards; among these places, the counts are the same as in a tree. So a token of a text costs one entry of a
dictionary instead of one node per length of a suffix.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from chairlift.base.cache_key import cache_key
from chairlift.core.request import Request

__all__ = ["SuffixIndex", "SuffixProposer", "likely_tokens"]

_MAX_PER_CALL: Final = 4096
"""Maximum number of tokens that one call adds to the index of a request, so that a long prompt does not delay a
step."""
_MAX_PLACES: Final = 8
"""Maximum number of places of a run that an index keeps, the newest ones. It bounds the time of a search."""
_MAX_TOKENS: Final = 200_000
"""Maximum number of tokens of all earlier answers, about 60 MB."""


class _Match(NamedTuple):
    """A place at which a text had the same last tokens as now."""

    length: int
    """Number of equal last tokens."""
    text: Sequence[int]
    at: int
    """Index in ``text`` of the token after the match."""


class SuffixIndex:
    """Places of all runs of ``run`` tokens in some texts.

    Args:
        run: Number of tokens of a run.
    """

    __slots__ = ("_ends", "_next", "_run", "_texts")

    def __init__(self, run: int) -> None:
        self._run = run
        self._texts: OrderedDict[int, Sequence[int]] = OrderedDict()
        self._next = 0
        self._ends: dict[tuple[int, ...], deque[tuple[int, int]]] = {}
        """Run -> (number of the text, index after the run) of its newest places, oldest first."""

    def __len__(self) -> int:
        """Number of texts."""
        return len(self._texts)

    @property
    def num_runs(self) -> int:
        """Number of different runs in the index."""
        return len(self._ends)

    def add(self, text: Sequence[int]) -> int:
        """Add a text without its runs. Returns its number, for :meth:`extend`."""
        number = self._next
        self._next += 1
        self._texts[number] = text
        return number

    def extend(self, number: int, first: int, last: int) -> None:
        """Add the runs of a text that end at the indices ``first`` to ``last``. A run that ends at index i has the
        tokens before i."""
        run = self._run
        text = self._texts[number]
        for end in range(max(run, first), last + 1):
            places = self._ends.setdefault(tuple(text[end - run : end]), deque(maxlen=_MAX_PLACES))
            places.append((number, end))

    def drop_oldest(self) -> int:
        """Remove the oldest text with its runs. Returns its number of tokens."""
        number, text = self._texts.popitem(last=False)
        run = self._run
        for end in range(run, len(text)):
            key = tuple(text[end - run : end])
            places = self._ends.get(key)
            while places and places[0][0] == number:
                places.popleft()
            if places is not None and not places:
                del self._ends[key]
        return len(text)

    def matches(self, token_ids: Sequence[int], depth: int) -> Iterable[_Match]:
        """Places with the same last tokens as ``token_ids``, newest first. At most ``depth`` tokens are compared."""
        run = self._run
        for number, end in reversed(self._ends.get(tuple(token_ids[-run:]), ())):
            text = self._texts[number]
            length = run
            most = min(depth, end, len(token_ids))
            while length < most and text[end - length - 1] == token_ids[-length - 1]:
                length += 1
            yield _Match(length, text, end)


def likely_tokens(
    matches: Sequence[_Match], token_ids: Sequence[int], limit: int, factor: float, least: float
) -> list[int]:
    """The most likely next tokens, at most ``limit``, after one of the lengths of ``matches``.

    For each length L, the places that match at least L tokens vote. The most frequent next token is drafted, and the
    places with another token drop out. The probability of a draft is the product of the fractions of the votes. Drafts
    end after ``factor`` times L tokens, or where the probability is below ``least``. The drafts with the highest sum of
    probabilities are returned. A place in ``token_ids`` itself may run over its end: then the text repeats itself.
    """
    best: list[int] = []
    best_score = 0.0
    for length in sorted({match.length for match in matches}, reverse=True):
        voters = [(match.text, match.at) for match in matches if match.length >= length]
        drafts: list[int] = []
        score = 0.0
        chance = 1.0
        while len(drafts) < min(limit, int(factor * length)):
            following = [_token_at(text, at, token_ids, drafts) for text, at in voters]
            votes = Counter(token for token in following if token >= 0)
            if not votes:
                break
            token, count = votes.most_common(1)[0]  # of equal ones the first, which has the newest place
            chance *= count / len(voters)
            if chance < least:
                break
            drafts.append(token)
            score += chance
            voters = [(text, at + 1) for (text, at), each in zip(voters, following, strict=True) if each == token]
        if score > best_score:
            best, best_score = drafts, score
    return best


def _token_at(text: Sequence[int], at: int, token_ids: Sequence[int], drafts: Sequence[int]) -> int:
    """The token at index ``at`` of a text; -1 behind its end. The text ``token_ids`` goes on with ``drafts``."""
    if at < len(text):
        return text[at]
    return drafts[at - len(text)] if text is token_ids and at - len(text) < len(drafts) else -1


class _Own:
    """Index of one request's own tokens."""

    __slots__ = ("index", "num_indexed", "number")

    def __init__(self, run: int, token_ids: Sequence[int]) -> None:
        self.index = SuffixIndex(run)
        self.number = self.index.add(token_ids)
        self.num_indexed = 0


class SuffixProposer:
    """Makes drafts with one index per request, and one index of the earlier answers of each group of callers that may
    share them. See :class:`~chairlift.core.spec_decode.adaptive.Proposer`.

    Args:
        run: Number of last tokens that must have occurred before.
        depth: Maximum number of last tokens that are compared.
        factor: Maximum number of drafts per matching token.
        least: Minimum probability of a draft, from 0 to 1.
        max_answers: Maximum number of earlier answers. 0: only the request's own tokens are used.
    """

    def __init__(self, run: int, depth: int, factor: float, least: float, max_answers: int) -> None:
        self._run = run
        self._depth = depth
        self._factor = factor
        self._least = least
        self._max_answers = max_answers
        self._own: dict[str, _Own] = {}
        self._answers: dict[bytes, SuffixIndex] = {}
        """Key of the callers that share answers -> index of their answers."""
        self._order: deque[bytes] = deque()
        """Key of each earlier answer, oldest first."""
        self.num_tokens = 0
        """Number of tokens of all earlier answers."""

    def __len__(self) -> int:
        """Number of requests for which an index exists."""
        return len(self._own)

    @property
    def num_answers(self) -> int:
        """Number of earlier answers in memory."""
        return len(self._order)

    def propose(self, rows: Sequence[tuple[Request, int]]) -> Sequence[Sequence[int]]:
        """Drafts for each row."""
        return [self._propose(request, limit) for request, limit in rows]

    def _propose(self, request: Request, limit: int) -> Sequence[int]:
        tokens = request.token_ids
        own = self._own.get(request.request_id)
        if own is None:
            own = self._own[request.request_id] = _Own(self._run, tokens)
        last = min(len(tokens) - 1, own.num_indexed + _MAX_PER_CALL)  # the run at the end has no next token yet
        own.index.extend(own.number, own.num_indexed + 1, last)
        own.num_indexed = max(own.num_indexed, last)
        found: list[_Match] = []
        if own.num_indexed >= len(tokens) - 1:
            found += own.index.matches(tokens, self._depth)
        answers = self._answers.get(_key_of(request))
        if answers is not None:
            found += answers.matches(tokens, self._depth)
        return likely_tokens(found, tokens, limit, self._factor, self._least) if found else ()

    def seconds(self, num_rows: int) -> float:
        """Always 0: these drafts cost almost no time."""
        return 0.0

    def forget(self, request: Request) -> None:
        """Remove the index of a request that has ended, and keep its answer for later requests."""
        self._own.pop(request.request_id, None)
        answer = tuple(request.token_ids[request.num_prompt_tokens :])
        if not self._max_answers or len(answer) <= self._run or len(answer) > _MAX_TOKENS:
            return
        key = _key_of(request)
        index = self._answers.setdefault(key, SuffixIndex(self._run))
        index.extend(index.add(answer), 0, len(answer) - 1)
        self._order.append(key)
        self.num_tokens += len(answer)
        while len(self._order) > self._max_answers or self.num_tokens > _MAX_TOKENS:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        key = self._order.popleft()
        index = self._answers[key]
        self.num_tokens -= index.drop_oldest()
        if not len(index):
            del self._answers[key]


def _key_of(request: Request) -> bytes:
    """Key of the callers whose answers may serve as drafts for the request, and of its adapter."""
    return cache_key("suffix", request.cache_salt, str(request.adapter_id).encode())
