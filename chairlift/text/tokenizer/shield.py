"""Replaces, in the texts of a chat, the characters that control tokens are made of, so that a rendered chat shows which
control tokens the chat template wrote itself.

A template writes its marks as text, and joins them with the texts of the messages. In the result both look the same. So
the chat is rendered a second time, with a symbol in place of each such character (``<``, ``|``, ``[``, ...) of the
caller. No control token can form from these symbols: not in one text, not where two texts meet, and not if the template
changes letters to lower case. Each symbol stands for one character, so it can be changed back, and the template cannot
cut it in two.
"""

from __future__ import annotations

import dataclasses
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from chairlift.errors import RequestError

__all__ = ["ControlTexts", "Cover", "Given", "Shield", "Shielded", "mark_characters", "shielded_from"]

_ORDINARY: Final = frozenset("_-./\"'\\{}:,")
"""Marks of ordinary names and of JSON, which templates search for. They are replaced only for a control token that has
no other marks."""
_SYMBOLS: Final = (*range(0x2801, 0x2900), *range(0x4DC0, 0x4E00), *range(0x2500, 0x2580))
"""Characters that may replace others: Braille, hexagrams, box drawing. No normalization changes or removes them, they
have no case, are no letters, and Python prints them as they are."""
_SHORT: Final = 100
"""Maximum number of characters of a text that is compared with the words inside control tokens."""
_KINDS: Final = frozenset(
    ("function", "text", "image", "object", "array", "string", "number", "integer", "boolean", "null")
)
"""Values of the key ``type`` that templates compare with."""
_NO_WORD: Final = re.compile(r"\W+")

Given = tuple[list[dict[str, Any]], dict[str, Any]]
"""(messages, variables) as a template gets them."""
_Change = Callable[[str], str]


@dataclasses.dataclass(frozen=True, slots=True)
class ControlTexts:
    """Texts of a model's control tokens."""

    texts: Sequence[str]
    kept: Sequence[str] = ()
    """Marks of reasoning. They remain control tokens in the content of an assistant's message, because clients send
    answers back with them, and templates look for them there."""


@dataclasses.dataclass(frozen=True, slots=True)
class Shielded:
    """A rendered chat, with the information which of its control tokens the template wrote."""

    text: str
    covered: str | None = None
    """The same text with symbols in place of characters of the caller. None: the caller wrote no such characters."""
    symbols: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Symbol in ``covered`` -> character in ``text``."""
    bare: str | None = None
    """A text in which all such characters of the caller are symbols, if ``covered`` has symbols only in complete
    spellings of control tokens. Both must have the same control tokens."""


def shielded_from(fields: Mapping[str, Any]) -> Shielded:
    """The :class:`Shielded` with these fields, which come from another process. Raises ValueError for other types."""
    text, covered, symbols, bare = (fields.get(name) for name in ("text", "covered", "symbols", "bare"))
    pairs = symbols if isinstance(symbols, dict) else {}
    if not isinstance(text, str) or any(not isinstance(each, str | None) for each in (covered, bare)):
        raise ValueError("a rendered chat must be text")
    if any(not isinstance(char, str) or len(symbol + char) != 2 for symbol, char in pairs.items()):
        raise ValueError("the symbols of a rendered chat must be single characters")
    return Shielded(text, covered, pairs, bare)


def mark_characters(control: str) -> frozenset[str]:
    """Characters of a control token's text without which it cannot be spelled; empty if it has only letters, digits and
    white space."""
    marks = frozenset(char for char in control if not char.isalnum() and not char.isspace())
    return (marks - _ORDINARY) or marks


class Shield:
    """The characters to replace for one template and tokenizer.

    ``source`` is the template's source, whose characters cannot be symbols. ``names`` says whether the template reads a
    key by its name.
    """

    def __init__(self, texts: ControlTexts, source: str, names: Callable[[str], bool]) -> None:
        controls = [text for text in texts.texts if text]
        self.names = names
        self.kept = frozenset(texts.kept)
        marks = [mark_characters(text) for text in controls]
        self.marks = frozenset[str]().union(*marks)
        self.bare_words = [text for text, own in zip(controls, marks, strict=True) if not own]
        """Control tokens that have only letters, digits and white space."""
        cut = re.compile("[" + re.escape("".join(sorted(self.marks))) + "]") if self.marks else re.compile(r"(?!)")
        self._inner = frozenset(word for text in controls for piece in cut.split(text) if (word := _word(piece)))
        self._folded = frozenset(text.casefold() for text in controls)
        self.sizes = sorted({len(text) for text in controls}, reverse=True)
        firsts = {case for text in controls for case in (text[0], text[0].lower(), text[0].upper()) if len(case) == 1}
        self.first = _one_of(firsts)
        self.taken = frozenset(source).union(*controls)
        """Characters that cannot be symbols."""

    def is_inside(self, text: str) -> bool:
        """Whether a text is a word inside a control token, so that a template could make the token from it by writing
        marks around it."""
        return len(text) <= _SHORT and _word(text) in self._inner

    def spells(self, text: str) -> bool:
        """Whether a text is a control token, in any case of its letters."""
        return text.casefold() in self._folded


class Cover:
    """Replaces characters in one chat. ``given`` is the chat as the template gets it.

    Raises :class:`~chairlift.errors.RequestError` if the chat uses so many symbols itself that none is left.
    """

    def __init__(self, shield: Shield, given: Given) -> None:
        self._shield = shield
        self._given = given
        chars: set[str] = set()
        for text in _texts(given):
            chars.update(text)
        marks = {char for char in chars if _is_mark(char, shield.marks)}
        self._free = (chr(code) for code in _SYMBOLS if chr(code) not in chars and chr(code) not in shield.taken)
        self._symbol_of: dict[str, str] = {}
        self._table = {ord(char): self._symbol(char) for char in sorted(marks)}
        kept = "|".join(map(re.escape, sorted(shield.kept, key=len, reverse=True)))
        self._kept = re.compile(f"({kept})") if kept else None
        words = "|".join(map(re.escape, shield.bare_words))
        self._bare_words = re.compile(words, re.IGNORECASE) if words else None

    @property
    def symbols(self) -> dict[str, str]:
        """Symbol -> character."""
        return {symbol: char for char, symbol in self._symbol_of.items()}

    def everywhere(self) -> Given:
        """The chat with symbols for all characters that control tokens are made of."""
        return self._changed(self._blind)

    def in_spellings(self) -> Given:
        """The chat with symbols only inside complete spellings of control tokens, in any case of their letters."""
        return self._changed(self._disarm)

    def uncover(self, text: str) -> str:
        """The text with the characters in place of the symbols."""
        return text.translate({ord(symbol): char for symbol, char in self.symbols.items()})

    def unescape(self, text: str) -> str:
        """The text with symbols in place of their JSON escapes. A template may print JSON in ASCII only. Then the
        symbol of an ASCII character is escaped, but the character would not be."""
        for char, symbol in self._symbol_of.items():
            if char.isascii():
                text = text.replace(f"\\u{ord(symbol):04x}", symbol)
        return text

    def _symbol(self, char: str) -> str:
        if char not in self._symbol_of:
            symbol = next(self._free, None)
            if symbol is None:
                raise RequestError(
                    "the messages use nearly all Braille, hexagram and box drawing characters, but the server needs a "
                    "few of them to encode control tokens as plain text (plain_text_messages); leave some out"
                )
            self._symbol_of[char] = symbol
        return self._symbol_of[char]

    def _changed(self, change: Callable[[str, bool], str]) -> Given:
        messages, variables = self._given
        plain: _Change = lambda text: change(text, False)  # noqa: E731
        answer: _Change = lambda text: change(text, True)  # noqa: E731
        changed = []
        for message in messages:
            of_content = answer if message.get("role") == "assistant" else plain
            fields = {}
            for key, value in message.items():
                if key == "role":
                    fields[self._key(key, plain)] = self._key(value, plain)
                else:
                    fields[self._key(key, plain)] = self._walk(value, of_content if key == "content" else plain)
            changed.append(fields)
        return changed, {name: self._walk(value, plain) for name, value in variables.items()}

    def _walk(self, value: Any, change: _Change) -> Any:
        if isinstance(value, str):
            return change(value)
        if isinstance(value, list):
            return [self._walk(item, change) for item in value]
        if isinstance(value, dict):
            return {
                self._key(key, change): item
                if key == "type" and isinstance(item, str) and item in _KINDS
                else self._walk(item, change)
                for key, item in value.items()
            }
        return value

    def _key(self, key: str, change: _Change) -> str:
        """A key or role without control tokens. One that the template reads by name keeps its letters."""
        if self._shield.names(key) and not any(ord(char) in self._table for char in key):
            return key
        return change(key)

    def _blind(self, text: str, in_answer: bool) -> str:
        if in_answer and self._kept is not None:
            pieces = self._kept.split(text)
            covered = "".join(p if i % 2 else p.translate(self._table) for i, p in enumerate(pieces))
        else:
            covered = text.translate(self._table)
        if self._bare_words is not None:
            covered = self._bare_words.sub(lambda found: self._symbol(found[0][0]) + found[0][1:], covered)
        return self._without_word(covered) if self._shield.is_inside(text) else covered

    def _without_word(self, text: str) -> str:
        """The text with a symbol in place of its first letter or digit."""
        at = next((place for place, char in enumerate(text) if char.isalnum()), None)
        return text if at is None else text[:at] + self._symbol(text[at]) + text[at + 1 :]

    def _disarm(self, text: str, in_answer: bool) -> str:
        shield = self._shield
        pieces = list[str]()
        done = 0
        start = 0
        while (found := shield.first.search(text, start)) is not None:
            at = found.start()
            spelled = next((text[at : at + size] for size in shield.sizes if shield.spells(text[at : at + size])), "")
            start = at + max(1, len(spelled))
            if not spelled or (in_answer and spelled in shield.kept):
                continue
            inert = spelled.translate(self._table)
            pieces += [text[done:at], self._without_word(inert) if inert == spelled else inert]
            done = start
        return "".join([*pieces, text[done:]])


def _word(text: str) -> str:
    return _NO_WORD.sub("", text).casefold()


def _one_of(chars: Iterable[str]) -> re.Pattern[str]:
    """A pattern for one of the characters; it finds nothing if there are none."""
    listed = "".join(map(re.escape, sorted(chars)))
    return re.compile(f"[{listed}]" if listed else r"(?!)")


def _is_mark(char: str, marks: frozenset[str]) -> bool:
    """Whether a character is one of ``marks``, or a tokenizer may normalize it to one (a fullwidth ``<``)."""
    if char.isascii():
        return char in marks
    return char in marks or any(part in marks for part in unicodedata.normalize("NFKD", char))


def _texts(value: Any) -> Iterator[str]:
    """All texts and keys of plain data."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from value
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, Sequence):
        for item in value:
            yield from _texts(item)
