"""Lark grammars as regular expressions.

OpenAI's custom tools describe their input by a grammar in the language of the parser library Lark. A grammar whose
rules do not refer back to themselves describes a regular language, so it is equal to a regular expression. A regular
expression can also be enforced for a text inside a JSON string.

The language of the whole grammar counts: rules and terminals, literals, regular expressions, alternatives, groups,
``[]``, ``?``, ``*``, ``+``, ``~``, ranges, ``%ignore`` and ``%import common.NAME``. Names of trees (``->``, ``?rule``,
``!rule``) and priorities change only the tree, so they have no effect.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Final, NoReturn

from chairlift.errors import RequestError

__all__ = ["lark_regex"]

_MAX_CHARS: Final = 65_536
"""Maximum number of characters of a regular expression."""
_START: Final = "start"
_INT: Final = "[0-9]+"
_FLOAT: Final = r"(?:[0-9]+[eE][+-]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)"
_COMMON: Final = {
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[0-9a-fA-F]",
    "INT": _INT,
    "SIGNED_INT": f"[+-]?{_INT}",
    "DECIMAL": r"(?:[0-9]+\.[0-9]*|\.[0-9]+)",
    "FLOAT": _FLOAT,
    "SIGNED_FLOAT": f"[+-]?{_FLOAT}",
    "NUMBER": f"(?:{_FLOAT}|{_INT})",
    "SIGNED_NUMBER": f"[+-]?(?:{_FLOAT}|{_INT})",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\[^\n])*"',
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[a-zA-Z]",
    "WORD": "[a-zA-Z]+",
    "CNAME": "[_a-zA-Z][_a-zA-Z0-9]*",
    "WS_INLINE": "[ \\t]+",
    "WS": "[ \\t\\f\\r\\n]+",
    "CR": "\\r",
    "LF": "\\n",
    "NEWLINE": "(?:\\r?\\n)+",
    "SH_COMMENT": "#[^\\n]*",
    "CPP_COMMENT": "//[^\\n]*",
    "C_COMMENT": r"/\*(?:[^*]|\*+[^*/])*\*+/",
    "SQL_COMMENT": "--[^\\n]*",
}
"""Terminal of Lark's module ``common`` -> regular expression."""
_TOKEN: Final = re.compile(
    r"""(?P<space>[ \t\f\r]+|(?://|\#)[^\n]*|\\\n)
    |(?P<line>\n)
    |(?P<text>"(?:[^"\\\n]|\\.)*"i?)
    |(?P<regex>/(?!/)(?:[^/\\\n]|\\.)+/[imslux]*)
    |(?P<name>[!?]{0,2}_*[a-zA-Z][_a-zA-Z0-9]*)
    |(?P<keyword>%[a-z]+)
    |(?P<number>-?[0-9]+)
    |(?P<mark>->|\.\.|[:|()\[\]?*+~.,{}@<>])""",
    re.VERBOSE,
)
_INSTEAD: Final = {
    "{": "templates and {} are not read; write the rule out, or repeat with ~2..3",
    "@": "grammars inside grammars are not read; write the rules out",
    "<": "special tokens are not read; write their text in quotation marks",
}
_LOOK: Final = re.compile(r"(?<!\\)(?:\\\\)*\(\?<?[=!]")

_Token = tuple[str, str, int]
"""Kind, text and line of a part of the grammar."""


def lark_regex(definition: str) -> str:
    """Regular expression for the texts that a Lark grammar describes. It is not anchored.

    Raises RequestError with the line and the construct if the grammar is not regular, or not understood.
    """
    return _Grammar(definition).regex()


def _wrong(line: int, what: str) -> NoReturn:
    raise RequestError(f"line {line} of the lark grammar: {what}")


def _tokens(definition: str) -> Iterator[_Token]:
    at, line = 0, 1
    while at < len(definition):
        found = _TOKEN.match(definition, at)
        if found is None:
            _wrong(line, f"{definition[at : at + 20]!r} is not understood; write rules as 'name: ...'")
        kind = str(found.lastgroup)
        if kind != "space":
            yield kind, found[0], line
        line += found[0].count("\n")
        at = found.end()


class _Grammar:
    """The statements of a grammar, and the regular expressions of its rules and terminals."""

    def __init__(self, definition: str) -> None:
        self._bodies: dict[str, list[_Token]] = {}
        """Name of a rule or terminal -> tokens of its definition."""
        self._lines: dict[str, int] = {}
        self._ignored: list[list[_Token]] = []
        self._done: dict[str, str] = {}
        """Name -> regular expression."""
        self._open: list[str] = []
        """Names whose regular expression is being made."""
        self._between = ""
        """Regular expression for the ignored text after a terminal of a rule."""
        for statement in _statements(list(_tokens(definition))):
            self._add(statement)

    def regex(self) -> str:
        if _START not in self._bodies:
            raise RequestError(f"the lark grammar has no rule {_START!r}; call its first rule so")
        ignored = [_Expression(self, tokens, False).read() for tokens in self._ignored]
        self._between = f"(?:{'|'.join(ignored)})*" if ignored else ""
        return self._between + self.named(_START, 1, True)

    def between(self) -> str:
        """Regular expression for the text that may follow a terminal of a rule."""
        return self._between

    def named(self, name: str, line: int, in_rule: bool) -> str:
        """Regular expression of a rule or terminal. Raises RequestError if it refers back to itself."""
        if name in self._open:
            _wrong(
                self._lines.get(name, line),
                f"the rule {name!r} refers to itself, and a call can be held only to rules that do not; write the"
                " repetition with * or +, or the levels as rules of their own",
            )
        if name not in self._done:
            if name not in self._bodies:
                _wrong(line, f"{name!r} is not defined")
            self._open.append(name)
            is_rule = name.lstrip("_")[:1].islower()
            self._done[name] = f"(?:{_Expression(self, self._bodies[name], is_rule).read()})"
            self._open.pop()
            if len(self._done[name]) > _MAX_CHARS:
                _wrong(line, f"{name!r} is longer than {_MAX_CHARS:,} characters as a regular expression; shorten it")
        is_terminal = not name.lstrip("_")[:1].islower()
        return self._done[name] + (self._between if is_terminal and in_rule else "")

    def _add(self, tokens: list[_Token]) -> None:
        kind, text, line = tokens[0]
        if kind == "keyword":
            self._directive(text, line, tokens[1:])
            return
        if kind != "name":
            _wrong(line, f"{text!r} cannot begin a statement; write rules as 'name: ...'")
        colon = next((at for at, token in enumerate(tokens) if token[1] == ":"), None)
        head = [token[1] for token in tokens[1:colon]]
        if colon is None or (head and (head[0] != "." or len(head) != 2)):
            bad = next((each for each in head if each in "{[@<"), head[0] if head else text)
            _wrong(line, _INSTEAD.get(bad, f"the rule {text!r} must be followed by ':' and what it stands for"))
        self._define(text.lstrip("!?"), line, tokens[colon + 1 :])

    def _define(self, name: str, line: int, body: list[_Token]) -> None:
        if name in self._bodies:
            _wrong(line, f"{name!r} is defined again; join both by '|'")
        self._bodies[name] = body
        self._lines[name] = line

    def _directive(self, keyword: str, line: int, tokens: list[_Token]) -> None:
        texts = [text for _, text, _ in tokens]
        if keyword == "%ignore":
            self._ignored.append(tokens)
        elif keyword == "%import" and texts[:2] == ["common", "."]:
            names, alias = (texts[2:], "") if "->" not in texts else (texts[2:3], texts[-1])
            for name in names:
                if name not in _COMMON:
                    _wrong(line, f"common.{name} is not known; there are {', '.join(_COMMON)}")
                self._done[alias or name] = f"(?:{_COMMON[name]})"
        elif keyword == "%import" and "common" in texts[:2]:
            for name in texts[texts.index("(") + 1 : -1 if texts[-1] == ")" else None]:
                if name != ",":
                    self._directive(keyword, line, [("name", "common", line), ("mark", ".", line), ("", name, line)])
        else:
            _wrong(line, f"{keyword} {' '.join(texts)!s:.60} is not read; write the rule out, or import from common")


def _statements(tokens: list[_Token]) -> Iterator[list[_Token]]:
    """Yield the tokens of each statement. A line that begins with ``|``, or inside parentheses, continues one."""
    statement: list[_Token] = []
    depth = 0
    for at, (kind, text, line) in enumerate(tokens):
        depth += (text in ("(", "[")) - (text in (")", "]"))
        if kind != "line":
            statement.append((kind, text, line))
            continue
        follows = next((token[1] for token in tokens[at:] if token[0] != "line"), "")
        if statement and depth <= 0 and follows != "|":
            yield statement
            statement = []
    if statement:
        yield statement


class _Expression:
    """Reads the right side of a rule, and makes a regular expression of it."""

    def __init__(self, grammar: _Grammar, tokens: list[_Token], in_rule: bool) -> None:
        self._grammar = grammar
        self._tokens = [*tokens, ("end", "", tokens[-1][2] if tokens else 1)]
        self._at = 0
        self._in_rule = in_rule

    def read(self) -> str:
        found = self._alternatives()
        kind, text, line = self._tokens[self._at]
        if kind != "end":
            _wrong(line, _INSTEAD.get(text, f"{text!r} is not understood here"))
        return found

    def _next(self) -> _Token:
        token = self._tokens[self._at]
        self._at += 1
        return token

    def _takes(self, *texts: str) -> str:
        """The next token, taken if it is one of ``texts``; empty if not."""
        kind, text, _ = self._tokens[self._at]
        if kind in ("mark", "name") and text in texts:
            self._at += 1
            return text
        return ""

    def _alternatives(self) -> str:
        branches = [self._sequence()]
        while self._takes("|"):
            branches.append(self._sequence())
        return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"

    def _sequence(self) -> str:
        parts = []
        while self._tokens[self._at][0] in ("text", "regex", "name") or self._tokens[self._at][1] in ("(", "["):
            parts.append(self._repeated())
        if self._takes("->"):
            self._next()  # the name of the tree
        return "".join(parts)

    def _repeated(self) -> str:
        one = self._item()
        if mark := self._takes("?", "*", "+"):
            return f"(?:{one}){mark}"
        if not self._takes("~"):
            return one
        least = self._number()
        most = self._number() if self._takes("..") else least
        return f"(?:{one}){{{least},{most}}}"

    def _number(self) -> int:
        kind, text, line = self._next()
        if kind != "number":
            _wrong(line, f"a number must follow ~ and .., got {text!r}")
        return int(text)

    def _item(self) -> str:
        kind, text, line = self._next()
        if text in ("(", "["):
            inner = self._alternatives()
            closes = ")" if text == "(" else "]"
            if not self._takes(closes):
                got = self._tokens[self._at][1]
                _wrong(line, _INSTEAD.get(got, f"{text!r} is not closed"))
            return f"(?:{inner})" if text == "(" else f"(?:{inner})?"
        if kind == "name":
            if text[0] in "!?":
                _wrong(line, f"{text!r} is not understood here")
            return self._grammar.named(text, line, self._in_rule)
        after = self._grammar.between() if self._in_rule else ""
        if kind == "regex":
            return _of_regex(text, line) + after
        if self._takes(".."):
            _, last, _ = self._next()
            first, last = _read(text, line), _read(last, line)
            if len(first) != 1 or len(last) != 1 or first > last:
                _wrong(line, f"a range must have one character on each side, got {text}")
            return f"[{re.escape(first)}-{re.escape(last)}]" + after
        insensitive = text.endswith("i")
        written = _escaped(_read(text, line))
        return (f"(?i:{written})" if insensitive else written) + after


def _read(text: str, line: int) -> str:
    """The value of a literal."""
    try:
        value: str = json.loads(text.removesuffix("i"))
    except ValueError:
        _wrong(line, f"the text {text} has an escape that is not known; write it as in JSON")
    return value


def _escaped(text: str) -> str:
    escaped = re.escape(text).replace("\n", "n").replace("\r", "r").replace("\t", "t").replace("\\ ", " ")
    return f"(?:{escaped})" if len(text) != 1 else escaped


def _of_regex(token: str, line: int) -> str:
    """A regular expression of the grammar, with its flags as a group."""
    pattern, _, flags = token[1:].rpartition("/")
    if _LOOK.search(pattern):
        _wrong(line, f"{token!s:.60} has look-around ((?=, (?!, (?<), and a call cannot be held to that")
    pattern = pattern.replace("\\/", "/")
    kept = "".join(flag for flag in "imsx" if flag in flags)
    return f"(?{kept}:{pattern})" if kept else f"(?:{pattern})"
