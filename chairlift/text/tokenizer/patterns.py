r"""Finds out, from a tokenizer's regular expression, whether splitting a text takes time linear in the text's length.

A regular expression search backtracks. After an unlimited repetition it tries the rest of the pattern at each
character of the repetition. If that fails, it starts again one character later. So the pattern ``\s+$`` takes 8 s for
20,000 spaces followed by a letter. Two kinds of alternatives never take so long. A pattern of these kinds only is
``steady``:

* In a *prompt* alternative, nothing that must match comes after the first unlimited repetition. The alternative fails
  after a few steps, and otherwise matches everything that it has read.
* A *run* alternative is ``P?X*Q``: an optional character, a run of characters of one class, and a prompt ``Q``.
  (Another form is ``P?X+`` with a look-around, as in ``\s+$``.) It may read a run and fail, or match only the run's
  beginning. So the following alternative must be ``P?X+`` and prompt, which matches the whole run on which this one
  failed. Further run alternatives with the same ``P?X`` may come between the two. A run alternative matches up to the
  last position of the run where ``Q`` matches, and no later position can match. So each alternative reads a run at
  most twice, whatever the alternatives before it match.

At the end of such a chain ``\s+(?!\S)`` counts as prompt, too: it matches the whole run except one character, or the
run has only one character. Patterns with unsupported syntax are not steady. The library Oniguruma reads ``{1,3}+`` as
an unlimited repetition; other libraries read it as a possessive one. This module reads it as Oniguruma does.
"""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Final

__all__ = ["is_steady", "shortest"]

_ATOM: Final = re.compile(
    r"\\[pP]\{\^?\w{1,30}\}|\\x\{[0-9A-Fa-f]{1,8}\}|\\x[0-9A-Fa-f]{2}|\\u[0-9A-Fa-f]{4}|\\[dDhHnrsStwWaefv]"
    r"|\\\W|[^\\\[\](){}|?*+^$]"
)
"""Matches one character outside a bracketed class: ``\\p{L}``, ``\\n``, ``\\.`` or the character itself."""
_ANCHOR: Final = re.compile(r"\\[bBAzZ]|[$^]")
_GROUP: Final = re.compile(r"\((?:\?(?::|i:|[=!]|<[=!]))?(?!\?)")
_TIMES: Final = re.compile(r"(?:([?*+])|\{([0-9]{0,3})(,?)([0-9]{0,3})\})(\+?)")
_RUNS: Final = ("*", "+", "*+", "++")
_MAX_DEPTH: Final = 6
"""Maximum depth of nested groups."""
_MAX_STEPS: Final = 1024
"""Maximum number of characters that may be read at a position where the pattern does not match; this takes a few
microseconds."""


@dataclasses.dataclass(frozen=True)
class _Part:
    """One element of an alternative in a regular expression: an atom or a group, with its number of repetitions.
    ``inner`` are the alternatives inside a group."""

    atom: str
    minimum: int = 1
    maximum: float = 1
    times: str = ""
    inner: tuple[tuple[_Part, ...], ...] = ()
    empty: bool = False
    """Whether the element is an anchor or a look-around, which may fail and never consumes a character."""

    @property
    def plain(self) -> bool:
        """Whether the element matches one character of a class."""
        return not self.inner and not self.empty

    @property
    def endless(self) -> bool:
        return not self.empty and (math.isinf(self.maximum) or any(each.endless for row in self.inner for each in row))


_Row = tuple[_Part, ...]


def is_steady(pattern: str) -> bool:
    """Whether splitting a text with the pattern always takes time linear in the text's length."""
    rows = _read(pattern)
    if rows is None or _steps(rows) > _MAX_STEPS:
        return False
    run = None  # the run that earlier alternatives may have read without a match
    for row in rows:
        current = _run(row)
        if run is not None and current != run:
            return False
        if _is_prompt(row) or _is_all_but_last(row):
            run = None
        elif current is None or not _has_prompt_rest(row):
            return False
        else:
            run = current
    return run is None


def shortest(pattern: str) -> int:
    """Minimum number of characters in a match; 0 if unknown."""
    rows = _read(pattern)
    return 0 if rows is None else min(map(_min_chars, rows))


def _min_chars(row: _Row) -> int:
    # A group counts as one character at most: it may ignore case, and then one character can match several letters.
    return sum(
        part.minimum * (min(1, min(map(_min_chars, part.inner))) if part.inner else 1) for part in row if not part.empty
    )


def _run(row: _Row) -> tuple[str, str] | None:
    """(P, X) of an alternative that begins with ``P?X*`` or ``P?X+``; None for another alternative."""
    before = ""
    rest = row
    if row and row[0].plain and row[0].times in ("?", "?+"):
        before = row[0].atom
        rest = row[1:]
    if rest and rest[0].plain and rest[0].times in _RUNS:
        return before, rest[0].atom
    return None


def _has_prompt_rest(row: _Row) -> bool:
    """Whether the rest ``Q`` of an alternative ``P?X*Q`` is *prompt* (the module's text defines this term), and the
    alternative cannot match the empty text."""
    start = 0 if row[0].times in _RUNS else 1
    rest = row[start + 1 :]
    return _is_prompt(rest) and (row[start].minimum > 0 or _min_chars(rest) > 0)


def _is_all_but_last(row: _Row) -> bool:
    r"""Whether the alternative is ``\s+(?!\S)``, or the same with ``\d`` or ``\w``. It matches all characters of a run
    except the last."""
    if len(row) != 2 or row[0].times != "+":
        return False
    kind = row[0].atom[1:]
    return row[0].atom[0] == "\\" and kind in ("s", "d", "w") and row[1].atom == rf"(?!\{kind.upper()})"


def _is_prompt(row: _Row) -> bool:
    """Whether the alternative fails after a limited number of steps, and otherwise takes time linear in the length of
    its match."""
    endless = False
    for part in row:
        if (endless and part.minimum) or not all(map(_is_prompt, part.inner)):
            return False
        if (
            part.endless
            and part.inner
            and part.maximum > 1
            and (part.minimum > 1 or min(map(_min_chars, part.inner)) == 0)
        ):
            return False
        endless = endless or part.endless
    return True


def _steps(rows: tuple[_Row, ...]) -> float:
    """Maximum number of characters that the search reads at one position before it knows that no alternative matches
    there."""
    return sum(max(1, len(row)) * math.prod(map(_tries, row)) for row in rows)


def _tries(part: _Part) -> float:
    if not part.inner:
        return max(1, part.minimum) if part.endless else max(1, part.maximum + (part.maximum > part.minimum))
    once = _steps(part.inner)
    if math.isinf(part.maximum) or part.maximum == part.minimum == 1:
        return once
    return math.inf if part.maximum > 9 else sum(once**count for count in range(part.minimum, int(part.maximum) + 1))


def _read(pattern: str) -> tuple[_Row, ...] | None:
    """Alternatives of a pattern; None if the pattern contains unsupported syntax."""
    try:
        rows, end = _rows(pattern, 0, 0)
    except ValueError:
        return None
    return rows if end == len(pattern) else None


def _rows(text: str, at: int, depth: int) -> tuple[tuple[_Row, ...], int]:
    if depth > _MAX_DEPTH:
        raise ValueError(text)
    rows: list[list[_Part]] = [[]]
    while at < len(text) and text[at] != ")":
        if text[at] == "|":
            rows.append([])
            at += 1
        else:
            part, at = _part(text, at, depth)
            rows[-1].append(part)
    return tuple(map(tuple, rows)), at


def _part(text: str, at: int, depth: int) -> tuple[_Part, int]:
    start = at
    if anchor := _ANCHOR.match(text, at):
        part = _Part(anchor[0], empty=True)
        at = anchor.end()
    elif group := _GROUP.match(text, at):
        inner, at = _rows(text, group.end(), depth + 1)
        if not text.startswith(")", at):
            raise ValueError(text)
        at += 1
        part = _Part(text[start:at], inner=inner, empty=group[0][-1] in "=!")
    elif text[at] == "[":
        at = _class_end(text, at)
        part = _Part(text[start:at])
    elif atom := _ATOM.match(text, at):
        part = _Part(atom[0])
        at = atom.end()
    else:
        raise ValueError(text)
    if part.empty and any(each.endless for row in part.inner for each in row):
        raise ValueError(text)  # it would read without end, again from each place
    times = _TIMES.match(text, at)
    if times is not None:
        if part.empty:
            raise ValueError(text)
        part = _repeated(part, times)
        at = times.end()
    if text[at : at + 1] in ("?", "*", "+", "{"):  # "" is in no tuple
        raise ValueError(text)
    return part, at


def _repeated(part: _Part, times: re.Match[str]) -> _Part:
    sign, minimum, comma, maximum, twice = times.groups()
    if sign:
        return dataclasses.replace(
            part, minimum=int(sign == "+"), maximum=1 if sign == "?" else math.inf, times=times[0]
        )
    if not (minimum or maximum) or (maximum and not comma):
        raise ValueError(times.string)
    low = int(minimum or 0)
    if maximum:
        high = float(maximum)
    elif comma:
        high = math.inf
    else:
        high = float(low)
    if high < low:
        raise ValueError(times.string)
    return dataclasses.replace(part, minimum=low, maximum=math.inf if twice else high, times=times[0])


def _class_end(text: str, at: int) -> int:
    """Offset after the bracketed class that begins at ``at``. Nested classes are supported, ``[:alpha:]`` is not."""
    depth = 0
    while at < len(text):
        if text[at] == "[":
            depth += 1
            at += 2 if text.startswith("^", at + 1) else 1
            if text.startswith("]", at) or (depth > 1 and text.startswith(":", at)):
                break
        elif text[at] == "]":
            depth -= 1
            at += 1
            if depth == 0:
                return at
        else:
            at += 2 if text[at] == "\\" else 1
    raise ValueError(text)
