"""Marks in a conversation: they show which of its prompt's tokens come before a certain block.

A chat template may change the order of texts, or remove some. So the place of a block in the prompt is found by
experiment. The conversation is laid out a second time, with a mark after each such block. The two lists of token ids
differ where the marks are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

__all__ = ["MARK", "MARK_TOOL", "positions", "with_mark", "with_marked_tools"]

MARK: Final = "\u241e\u241f\u241e"
"""A text that no conversation has. If one has it, only its own leases are misplaced."""
MARK_TOOL: Final[dict[str, Any]] = {
    "type": "function",
    "function": {"name": MARK, "description": MARK, "parameters": {"type": "object", "properties": {}}},
}
"""A tool that marks the end of the tool before it."""
_LONGEST: Final = 512
"""Maximum number of tokens that a mark may add."""
_CHANGED: Final = 8
"""Maximum number of tokens before a mark that may be encoded differently because of it."""
_COMPARED: Final = 64
_CHUNK: Final = 4096


def with_mark(content: Any, part: Mapping[str, Any]) -> Any:
    """A content with a mark at its end: a text, or a list of parts, to which ``part`` is added."""
    if isinstance(content, list):
        return [*content, part]
    return f"{content or ''}{MARK}"


def with_marked_tools(
    marked: Iterable[Mapping[str, Any]], definitions: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """``definitions``, with marks between them where ``marked`` has marks between the same tools."""
    own = iter(definitions)
    made: list[Mapping[str, Any]] = []
    for tool in marked:
        if tool.get("function", {}).get("name") == MARK:
            made.append(MARK_TOOL)
        elif (definition := next(own, None)) is not None:
            made.append(definition)
    return made


def positions(plain: Sequence[int], marked: Sequence[int], count: int) -> list[int]:
    """For each of ``count`` marks, in the order of the prompt: the number of tokens of ``plain`` before it. ``marked``
    has the tokens with the marks. Marks that are not found get the place of the last one that is found."""
    found = list(_found(plain, marked))[:count]
    return found + [found[-1] if found else 0] * (count - len(found))


def _found(plain: Sequence[int], marked: Sequence[int]) -> Iterator[int]:
    here = there = 0
    while True:
        common = _num_equal(plain, here, marked, there)
        here += common
        there += common
        if there >= len(marked):
            return
        yield here
        step = _after_mark(plain[here : here + _CHANGED + _COMPARED], marked[there : there + _LONGEST + _COMPARED])
        if step is None:
            return
        here += step[0]
        there += step[1]


def _num_equal(plain: Sequence[int], here: int, marked: Sequence[int], there: int) -> int:
    """Number of equal tokens from ``plain[here]`` and ``marked[there]`` on."""
    count = 0
    size = min(len(plain) - here, len(marked) - there)
    while count < size:
        chunk = min(_CHUNK, size - count)
        if plain[here + count : here + count + chunk] == marked[there + count : there + count + chunk]:
            count += chunk
            continue
        while plain[here + count] == marked[there + count]:
            count += 1
        break
    return count


def _after_mark(plain: Sequence[int], marked: Sequence[int]) -> tuple[int, int] | None:
    """(number of tokens of ``plain``, number of tokens of ``marked``) after which both go on equally, behind a mark at
    their beginning; None if they do not. A mark seldom changes more than one token before it, so more are tried only
    then."""
    for most in (1, _CHANGED):
        best = 1
        step = None
        for skipped in range(1, min(_LONGEST, len(marked) - 1) + 1):
            for changed in range(min(most, len(plain) - 1) + 1):
                if plain[changed] != marked[skipped]:
                    continue
                equal = _num_equal(plain[: changed + _COMPARED], changed, marked[: skipped + _COMPARED], skipped)
                if equal > best:
                    best = equal
                    step = changed, skipped
        if step is not None:
            return step
    return None
