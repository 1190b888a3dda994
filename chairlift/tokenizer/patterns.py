r"""Whether the regular expression of a tokenizer takes time that grows only as the text does, read from the expression.

A search backtracks: what must match behind a repetition without end is tried behind each of its characters, and when it
fails the search starts again one character on. The pattern ``\s+$`` takes 8 s for 20,000 spaces and a letter. Two kinds
of alternatives cannot do so, and a pattern of them alone is ``steady``:

* A *prompt* alternative has nothing that must match behind its first repetition without end. It fails after a few
  steps, and what it reads it also matches.
* A *run* alternative is ``P?X*Q``: an optional character, a run of one class, and a prompt ``Q`` (or ``P?X+`` and a
  look around, as in ``\s+$``). It may read a run in vain, or match only its front. So the next alternative must be
  ``P?X+`` and prompt, which takes all of a run that this one fails on, or another run alternative of the same ``P?X``
  before such a one. A run alternative takes the last place of the run where ``Q`` matches, and the rest of the run has
  no such place. Each one therefore reads a run twice at most, whatever the alternatives before it match.

As the end of such a chain ``\s+(?!\S)`` is prompt, too: it takes all of a run but one character, or the run is one.
What this module does not understand is not steady. Oniguruma takes ``{1,3}+`` for a repetition without end, and others
for a possessive one: it is held for the former.
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
"""One character that is in no class of its own: ``\\p{L}``, ``\\n``, ``\\.`` or itself."""
_ANCHOR: Final = re.compile(r"\\[bBAzZ]|[$^]")
_GROUP: Final = re.compile(r"\((?:\?(?::|i:|[=!]|<[=!]))?(?!\?)")
_TIMES: Final = re.compile(r"(?:([?*+])|\{([0-9]{0,3})(,?)([0-9]{0,3})\})(\+?)")
_RUNS: Final = ("*", "+", "*+", "++")
_DEEPEST: Final = 6
"""Largest depth of nested groups."""
_MOST_STEPS: Final = 1024
"""Most characters that may be read at a place where nothing matches; they take some microseconds."""


@dataclasses.dataclass(frozen=True)
class _Part:
    """One element of an alternative: an atom, its number of repetitions, and the alternatives inside it if it is a
    group."""

    atom: str
    least: int = 1
    most: float = 1
    times: str = ""
    inner: tuple[tuple[_Part, ...], ...] = ()
    empty: bool = False
    """Whether it is an anchor or a look-around: it may fail, and consumes no character."""

    @property
    def plain(self) -> bool:
        """Whether it is one class of characters."""
        return not self.inner and not self.empty

    @property
    def endless(self) -> bool:
        return not self.empty and (math.isinf(self.most) or any(each.endless for row in self.inner for each in row))


_Row = tuple[_Part, ...]


def is_steady(pattern: str) -> bool:
    """Whether splitting any text with the pattern takes time linear in the text's length."""
    rows = _read(pattern)
    if rows is None or _steps(rows) > _MOST_STEPS:
        return False
    run = None  # the run that earlier alternatives may have read without a match
    for row in rows:
        here = _run(row)
        if run is not None and here != run:
            return False
        if _prompt(row) or _leaves_one(row):
            run = None
        elif here is None or not _goes_on(row):
            return False
        else:
            run = here
    return run is None


def shortest(pattern: str) -> int:
    """Least number of characters in a match; 0 if unknown."""
    rows = _read(pattern)
    return 0 if rows is None else min(map(_least, rows))


def _least(row: _Row) -> int:
    # A group may ignore case, and then one character can match several letters.
    return sum(
        part.least * (min(1, min(map(_least, part.inner))) if part.inner else 1) for part in row if not part.empty
    )


def _run(row: _Row) -> tuple[str, str] | None:
    """(P, X) of an alternative that begins with ``P?X*`` or ``P?X+``."""
    before, rest = "", row
    if row and row[0].plain and row[0].times in ("?", "?+"):
        before, rest = row[0].atom, row[1:]
    if rest and rest[0].plain and rest[0].times in _RUNS:
        return before, rest[0].atom
    return None


def _goes_on(row: _Row) -> bool:
    """Whether an alternative that begins with ``P?X*`` continues only with a ``Q`` that is not found twice at one
    place."""
    start = 0 if row[0].times in _RUNS else 1
    rest = row[start + 1 :]
    return _prompt(rest) and (row[start].least > 0 or _least(rest) > 0)


def _leaves_one(row: _Row) -> bool:
    r"""Whether it is ``\s+(?!\S)``, for any class."""
    if len(row) != 2 or row[0].times != "+":
        return False
    kind = row[0].atom[1:]
    return row[0].atom[0] == "\\" and kind in ("s", "d", "w") and row[1].atom == rf"(?!\{kind.upper()})"


def _prompt(row: _Row) -> bool:
    """Whether it fails after a limited number of steps, and otherwise takes time linear in its match."""
    endless = False
    for part in row:
        if (endless and part.least) or not all(map(_prompt, part.inner)):
            return False
        if part.endless and part.inner and part.most > 1 and (part.least > 1 or min(map(_least, part.inner)) == 0):
            return False
        endless = endless or part.endless
    return True


def _steps(rows: tuple[_Row, ...]) -> float:
    """Most characters read to find that none of the alternatives matches, or that one more repetition does not."""
    return sum(max(1, len(row)) * math.prod(map(_tries, row)) for row in rows)


def _tries(part: _Part) -> float:
    if not part.inner:
        return max(1, part.least) if part.endless else max(1, part.most + (part.most > part.least))
    once = _steps(part.inner)
    if math.isinf(part.most) or part.most == part.least == 1:
        return once
    return math.inf if part.most > 9 else sum(once**count for count in range(part.least, int(part.most) + 1))


def _read(pattern: str) -> tuple[_Row, ...] | None:
    """Alternatives of a pattern; None for an unsupported one."""
    try:
        rows, end = _rows(pattern, 0, 0)
    except ValueError:
        return None
    return rows if end == len(pattern) else None


def _rows(text: str, at: int, depth: int) -> tuple[tuple[_Row, ...], int]:
    if depth > _DEEPEST:
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
        part, at = _Part(anchor[0], empty=True), anchor.end()
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
        part, at = _Part(atom[0]), atom.end()
    else:
        raise ValueError(text)
    if part.empty and any(each.endless for row in part.inner for each in row):
        raise ValueError(text)  # it would read without end, again from each place
    times = _TIMES.match(text, at)
    if times is not None:
        if part.empty:
            raise ValueError(text)
        part, at = _repeated(part, times), times.end()
    if text[at : at + 1] in ("?", "*", "+", "{"):  # "" is in no tuple
        raise ValueError(text)
    return part, at


def _repeated(part: _Part, times: re.Match[str]) -> _Part:
    sign, least, comma, most, twice = times.groups()
    if sign:
        return dataclasses.replace(part, least=int(sign == "+"), most=1 if sign == "?" else math.inf, times=times[0])
    if not (least or most) or (most and not comma):
        raise ValueError(times.string)
    low = int(least or 0)
    high = float(most) if most else math.inf if comma else float(low)
    if high < low:
        raise ValueError(times.string)
    return dataclasses.replace(part, least=low, most=math.inf if twice else high, times=times[0])


def _class_end(text: str, at: int) -> int:
    """End of the class that begins at ``at``. Nested classes are counted; ``[:alpha:]`` is not supported."""
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
