"""Reads the guide: the questions, wordings and answers from which the bundled model is trained.

A page of docs/guide has the questions and answers. The page of the same name in tools/wordings has further wordings of
the same questions, in the same order. docs/guide/README.md explains both. The module imports only the standard library.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

__all__ = [
    "GUIDE_DIR",
    "MAX_JACCARD",
    "WORDINGS_DIR",
    "Entry",
    "GuideError",
    "HeldBack",
    "fingerprint",
    "jaccard",
    "normalise",
    "read_guide",
    "violations",
    "words",
]

WORDINGS_DIR = Path(__file__).resolve().parent / "wordings"
GUIDE_DIR = WORDINGS_DIR.parents[1] / "docs" / "guide"
MAX_JACCARD = 0.8
"""A held-back wording must have a lower Jaccard index than this with every wording in the training data."""

_LISTS = {"- Also asked: ": "asked", "- Held back: ": "held_back"}


class GuideError(ValueError):
    """Error: a page of the guide does not follow its format. The message names the page and the line."""


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """One question of the guide with its answer."""

    page: str
    questions: tuple[str, ...]
    """Wordings for training: the heading first, then the wordings under ``Also asked``."""
    held_back: tuple[str, ...]
    """Wordings that are never used for training."""
    answer: str
    """One paragraph of plain text."""


def read_guide(guide: Path = GUIDE_DIR, wordings: Path = WORDINGS_DIR) -> list[Entry]:
    """Read all entries of all pages except README.md. Pages are in alphabetical order.

    Raises :class:`GuideError` for a page that breaks the format or for a wording that two entries share.
    """
    pages = [path for path in sorted(guide.glob("*.md")) if path.name != "README.md"]
    lonely = {path.name for path in wordings.glob("*.md")} ^ {path.name for path in pages}
    if lonely:
        raise GuideError(f"{guide} and {wordings} must have the same pages; one of them lacks {sorted(lonely)}")
    entries = [entry for path in pages for entry in _read_page(path, wordings / path.name)]
    seen: dict[str, str] = {}
    for entry in entries:
        for question in (*entry.questions, *entry.held_back):
            key = normalise(question)
            if key in seen:
                raise GuideError(f"{entry.page}: {question!r} is asked twice, the other time on {seen[key]}")
            seen[key] = entry.page
    return entries


def fingerprint(entries: Sequence[Entry]) -> str:
    """SHA-256 of the training text, in hexadecimal. It does not depend on line breaks inside an answer."""
    text = json.dumps([dataclasses.asdict(entry) for entry in entries])
    return hashlib.sha256(text.encode()).hexdigest()


def _read_page(answers: Path, wordings: Path) -> list[Entry]:
    answered, worded = _blocks(answers), _blocks(wordings)
    if [heading for heading, _ in answered] != [heading for heading, _ in worded]:
        raise GuideError(f"{answers} and {wordings} must have the same headings in the same order")
    entries: list[Entry] = []
    for (heading, paragraph), (_, lines) in zip(answered, worded, strict=True):
        lists: dict[str, tuple[str, ...]] = {"asked": (), "held_back": ()}
        for line in lines:
            prefix = next((prefix for prefix in _LISTS if line.startswith(prefix)), None)
            if prefix is None:
                raise GuideError(f"{wordings.name}: the entry {heading!r} has a line without {' or '.join(_LISTS)}")
            lists[_LISTS[prefix]] = tuple(item.strip() for item in line.removeprefix(prefix).split("|"))
        if not paragraph or not all((*lists["asked"], *lists["held_back"])):
            raise GuideError(f"{answers.name}: the entry {heading!r} has no answer, or an empty wording between two |")
        answer = " ".join(paragraph).replace("`", "")
        questions = tuple(question.replace("`", "") for question in (heading, *lists["asked"]))
        entries.append(Entry(answers.name, questions, lists["held_back"], answer))
    return entries


def _blocks(path: Path) -> list[tuple[str, list[str]]]:
    """(heading, the lines below it that are not empty) of each entry on a page."""
    blocks = re.split(r"^### ", path.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    lines = [[line.strip() for line in block.splitlines() if line.strip()] for block in blocks]
    return [(heading, rest) for heading, *rest in lines]


def words(text: str) -> frozenset[str]:
    """The set of words of a wording: lower case, without punctuation."""
    return frozenset(re.findall(r"\w+", text.lower()))


def normalise(text: str) -> str:
    """Text in lower case, with every run of spaces and punctuation replaced by one space. Two answers count as equal if
    their normalised texts are equal."""
    return " ".join(re.findall(r"\w+", text.lower()))


def jaccard(a: frozenset[str], b: frozenset[str]) -> float:
    """Number of shared words divided by the number of all words (Jaccard, 1901); 0 for two empty sets."""
    return len(a & b) / max(1, len(a | b))


class HeldBack:
    """Held-back wordings, indexed so that the closest one to a text is found quickly."""

    def __init__(self, held_back: Iterable[str]) -> None:
        sets = [words(text) for text in held_back]
        self._bits = {word: i for i, word in enumerate(sorted(frozenset().union(*sets)))}
        self._masks = [self._mask(item) for item in sets]

    def _mask(self, item: Iterable[str]) -> int:
        return sum(1 << self._bits[word] for word in item if word in self._bits)

    def nearest(self, text: str) -> float:
        """The largest Jaccard index of ``text`` with a held-back wording."""
        own = words(text)
        mask, size = self._mask(own), len(own)
        best = 0.0
        for other in self._masks:
            shared = (mask & other).bit_count()
            best = max(best, shared / max(1, size + other.bit_count() - shared))
        return best

    def too_close(self, text: str) -> bool:
        """Whether ``text`` must not be used for training, because it is too similar to a held-out text."""
        return self.nearest(text) >= MAX_JACCARD


def violations(entries: Sequence[Entry]) -> list[str]:
    """Wordings in the guide that are too close to a held-back wording, one readable line each."""
    held = HeldBack(text for entry in entries for text in entry.held_back)
    asked = [question for entry in entries for question in entry.questions]
    return [f"{held.nearest(question):.2f} {question!r}" for question in asked if held.too_close(question)]
