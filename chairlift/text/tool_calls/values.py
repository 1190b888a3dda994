"""Parses arguments of tool calls: finds the end of a JSON value, reads Python and Gemma literals, and converts text to
the type of a schema.

For security, nothing is evaluated (CVE-2025-9141 was a parser that did), no regular expression has nested quantifiers,
and the depth of values is limited.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

__all__ = [
    "HALF",
    "MAX_DEPTH",
    "PYTHON_TYPES",
    "JsonScanner",
    "JsonTextDecoder",
    "NotReadable",
    "by_schema",
    "complete_part",
    "described_call",
    "gemma_call",
    "holds_json",
    "json_object",
    "json_value",
    "python_calls",
    "referred",
    "types_of",
]

MAX_DEPTH: Final = 64
"""Maximum depth of nested lists and objects."""


class NotReadable(ValueError):
    """The text does not have the expected form. The message says why."""


_PLAIN: Final = re.compile(r'[^"\\]+')
_SPACE: Final = re.compile(r"[ \t\r\n]+")
_SCALAR: Final = re.compile(r"[-+.0-9A-Za-z_]+")
_NUMBER: Final = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_ESCAPES: Final = '"\\/bfnrtu'
_HEX: Final = "0123456789abcdefABCDEF"
_ESCAPE: Final = re.compile(r"\\(?:u[0-9a-fA-F]{4}|[^u])")
_HIGH_HALF: Final = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}")
HALF: Final = re.compile("[\ud800-\udfff]")
"""Half of a surrogate pair, which UTF-8 cannot hold."""


class JsonScanner:
    """Finds the end of one JSON object or list, or the first invalid character, in text that arrives in pieces.

    Raw control characters inside strings are accepted, because models write line breaks there.
    """

    def __init__(self) -> None:
        self.done = False
        self.fault = ""
        """Reason why the text is invalid; empty while it may be valid."""
        self._stack: list[str] = []
        self._want = "value"
        self._scalar = ""
        self._escape = 0
        """Number of characters that an escape sequence still needs."""

    @property
    def in_text(self) -> bool:
        """Whether the text so far ends inside a string."""
        return not self.fault and self._want in ("key text", "text")

    @property
    def is_between(self) -> bool:
        """Whether the text so far, or the text before the error, ends after an item of the outermost list."""
        return self._stack == ["["] and self._want == "next"

    def feed(self, text: str, at: int) -> int:
        """Read ``text`` from the offset ``at``. Returns the offset after the part that was read. Stops at the end of
        the value and at an error."""
        while at < len(text) and not self.done and not self.fault:
            at = self._in_string(text, at) if self._want in ("key text", "text") else self._outside(text, at)
        return at

    def feed_text(self, text: str, at: int) -> int:
        """Read the next part of a string, at most up to its end. Returns the offset after it."""
        return self._in_string(text, at)

    def _in_string(self, text: str, at: int) -> int:
        if self._escape:
            char = text[at]
            if self._escape == 5:
                self._escape = 4 if char == "u" else 0
                self.fault = "" if char in _ESCAPES else "a string has an escape that JSON does not know"
            elif char in _HEX:
                self._escape -= 1
            else:
                self.fault = "a string has a broken \\u escape"
            return at if self.fault else at + 1
        if (plain := _PLAIN.match(text, at)) is not None:
            return plain.end()
        if text[at] == "\\":
            self._escape = 5
        else:
            self._want = "colon" if self._want == "key text" else "next"
        return at + 1

    def _outside(self, text: str, at: int) -> int:
        scalar = _SCALAR.match(text, at)
        if scalar is not None:
            if self._want not in ("value", "first value") or not self._stack:
                self.fault = "there is a word where JSON has none"
                return at
            self._scalar += scalar[0]
            if len(self._scalar) > 400:
                self.fault = "a number is too long"
            return scalar.end()
        if self._scalar:
            if self._scalar not in ("true", "false", "null") and not _NUMBER.fullmatch(self._scalar):
                self.fault = f"{self._scalar[:40]} is no JSON value"
                return at
            self._scalar = ""
            self._want = "next"
        if (space := _SPACE.match(text, at)) is not None:
            return space.end()
        return self._sign(text[at], at)

    def _sign(self, char: str, at: int) -> int:
        want = self._want
        inside = self._stack[-1] if self._stack else ""
        if want in ("value", "first value") and char in "{[" and len(self._stack) < MAX_DEPTH:
            self._stack.append(char)
            self._want = "first key" if char == "{" else "first value"
        elif want in ("value", "first value") and char == '"' and inside:
            self._want = "text"
        elif want in ("first key", "key") and char == '"':
            self._want = "key text"
        elif want == "colon" and char == ":":
            self._want = "value"
        elif want == "next" and char == ",":
            self._want = "key" if inside == "{" else "value"
        elif (want in ("next", "first key") and char == "}" and inside == "{") or (
            want in ("next", "first value") and char == "]" and inside == "["
        ):
            self._stack.pop()
            self._want = "next"
            self.done = not self._stack
        else:
            self.fault = f"there is {char!r} where JSON has something else" if inside else "there is no JSON object"
            return at
        return at + 1


class JsonTextDecoder:
    """Decodes a JSON text that arrives in pieces, from after its first quotation mark to its last one. Half of a
    surrogate pair becomes U+FFFD."""

    def __init__(self) -> None:
        self.done = False
        """Whether the quotation mark at the end was read."""
        self.fault = ""
        """Reason why the text is invalid; empty while it may be valid."""
        self._scanner = JsonScanner()
        self._scanner.feed('["', 0)
        self._pending = ""
        """Text that was read and not decoded. It begins outside of an escape sequence."""

    def feed(self, text: str, at: int) -> int:
        """Read ``text`` from the offset ``at``. Returns the offset after the part that was read."""
        start = at
        while at < len(text) and self._scanner.in_text:
            at = self._scanner.feed_text(text, at)
        self.fault = self._scanner.fault
        self.done = not self.fault and not self._scanner.in_text
        self._pending += text[start : at - 1 if self.done else at]
        return at

    def take(self) -> str:
        """The decoded text since the last call, without an escape sequence that is incomplete."""
        size = len(self._pending)
        if not self.done:
            last = None
            end = 0
            for last in _ESCAPE.finditer(self._pending):
                end = last.end()
            if (begins := self._pending.find("\\", end)) >= 0:
                size = begins
            if last is not None and end == size and _HIGH_HALF.fullmatch(last[0]):
                size = last.start()  # the other half of the pair may follow
        text = self._pending[:size]
        self._pending = self._pending[size:]
        return HALF.sub("\ufffd", json.loads(f'"{text}"', strict=False)) if text else ""


def json_value(text: str) -> Any:
    """Value of a text that a model wrote as JSON. Strings may hold raw control characters. Raises NotReadable."""
    return _loads(text, False)


def json_object(text: str) -> dict[str, Any]:
    """Like :func:`json_value`, for an object."""
    value = json_value(text)
    if not isinstance(value, dict):
        raise NotReadable("the arguments are no object")
    return value


def described_call(value: Any, *, keyed: bool) -> tuple[str, dict[str, Any]]:
    """(function's name, arguments) of the call that a JSON value describes. If ``keyed``, the value has the name as its
    only key. Raises NotReadable."""
    if not isinstance(value, dict):
        raise NotReadable("a call is no object")
    if keyed:
        if len(value) != 1:
            raise NotReadable("a call must have one key, the name of the function")
        value = {"name": next(iter(value)), "arguments": next(iter(value.values()))}
    value = value["function"] if isinstance(value.get("function"), dict) else value
    name = next((value[key] for key in ("name", "tool_name", "function") if key in value), None)
    arguments = next((value[key] for key in ("arguments", "parameters") if key in value), None)
    if not isinstance(name, str):
        raise NotReadable("a call has no name")
    if isinstance(arguments, str):
        arguments = json_object(arguments or "{}")
    if not isinstance(arguments, (dict, type(None))):
        raise NotReadable("the arguments are no object")
    return name, arguments or {}


def holds_json(text: str) -> bool:
    """Whether :func:`json_value` can read the text."""
    try:
        json_value(text.strip())
    except NotReadable:
        return False
    return True


def _loads(text: str, strict: bool) -> Any:
    try:
        return json.loads(
            text, strict=strict, object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite
        )
    except NotReadable:
        raise
    except (ValueError, RecursionError) as error:
        raise NotReadable(f"it is no JSON ({str(error)[:80]})") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise NotReadable("an object has the same name twice")
    return found


def _no_constant(name: str) -> Any:
    raise NotReadable(f"{name} is no JSON value")


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise NotReadable("a number is too large")
    return value


def complete_part(text: str) -> str:
    """JSON text of the values in the beginning of a JSON object or list that are complete. Open lists and objects are
    closed; a text without its end and a name without a value are left out, as in jiter's partial mode, which
    Anthropic's clients use. An empty text gives an empty object."""
    at = _after_space(text, 0)
    return _complete(text, at) if text[at : at + 1] in ("{", "[") else "{}"


_DECODER: Final = json.JSONDecoder(strict=False)


def _after_space(text: str, at: int) -> int:
    space = _SPACE.match(text, at)
    return space.end() if space is not None else at


def _complete(text: str, at: int) -> str:
    """Like :func:`complete_part`, for the object or list that begins at the offset ``at`` and does not end."""
    is_object = text[at] == "{"
    items = list[str]()
    at = _after_space(text, at + 1)
    while at < len(text):
        start = at
        try:
            if is_object:
                at = _after_space(text, _DECODER.raw_decode(text, at)[1])
                at = _after_space(text, at + 1)
            end = _DECODER.raw_decode(text, at)[1]
        except ValueError:
            if text[at : at + 1] in ("{", "[") and (at > start or not is_object):
                items.append(text[start:at] + _complete(text, at))
            break
        at = _after_space(text, end)
        if text[at : at + 1] not in ("", ",", "}", "]"):
            break  # a number that may go on
        items.append(text[start:end])
        if text[at : at + 1] != ",":
            break
        at = _after_space(text, at + 1)
    return f"{{{', '.join(items)}}}" if is_object else f"[{', '.join(items)}]"


# --- literals that are no JSON ----------------------------------------------------------------------------------------

_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_WORDS: Final = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_PYTHON_ESCAPES: Final = {
    "n": "\n",
    "t": "\t",
    "r": "\r",
    "b": "\b",
    "f": "\f",
    "\\": "\\",
    "'": "'",
    '"': '"',
    "\n": "",
}
_GEMMA_QUOTE: Final = '<|"|>'
_GEMMA_NAME: Final = re.compile(r"[^\s:,{}\[\]<][^:,{}\[\]<]*")
_RAW_END: Final = {
    quote: re.compile(quote + r"(?=\s*(?:,\s*[A-Za-z_][\w.-]*\s*=|\)\s*(?:\]\s*$|,\s*[A-Za-z_][\w.-]*\s*\()))")
    for quote in "'\""
}
"""The end of a text without escapes: the quotation mark before the next argument, or before the end of the call."""


class _Literals:
    """Reads Python or Gemma literals from a text. ``names`` matches keys without quotation marks. With ``raw``, the
    texts that are arguments have no escapes. Raises NotReadable."""

    def __init__(
        self, text: str, *, names: re.Pattern[str] = _NAME, raw: bool = False, quote: str = _GEMMA_QUOTE
    ) -> None:
        self.text = text
        self._quote = quote
        self.at = 0
        self._names = names
        self._raw = raw

    def peek(self) -> str:
        space = _SPACE.match(self.text, self.at)
        self.at = space.end() if space else self.at
        return self.text[self.at : self.at + 1]

    def take(self, sign: str) -> None:
        if self.peek() != sign:
            raise NotReadable(f"there is {self.peek() or 'the end'!r} where {sign!r} must be")
        self.at += 1

    def name(self, names: re.Pattern[str] = _NAME) -> str:
        self.peek()
        found = names.match(self.text, self.at)
        if found is None:
            raise NotReadable(f"there is {self.peek() or 'the end'!r} where a name must be")
        self.at = found.end()
        return found[0]

    def value(self, depth: int = 0) -> Any:
        sign = self.peek()
        if depth > MAX_DEPTH:
            raise NotReadable(f"lists and objects are more than {MAX_DEPTH} deep")
        if self.text.startswith(self._quote, self.at):
            return self._gemma_text()
        if sign in ("'", '"'):
            return self._python_text(sign)
        if sign == "[":
            return self._items("[", "]", lambda: self.value(depth + 1))
        if sign == "(":
            return self._items("(", ")", lambda: self.value(depth + 1))
        if sign == "{":
            return _unique(self._items("{", "}", lambda: self._pair(depth)))
        scalar = _SCALAR.match(self.text, self.at)
        if scalar is None:
            raise NotReadable(f"there is {sign or 'the end'!r} where a value must be")
        self.at = scalar.end()
        if scalar[0] in _WORDS:
            return _WORDS[scalar[0]]
        if not _NUMBER.fullmatch(scalar[0]) or len(scalar[0]) > 400:
            raise NotReadable(f"{scalar[0][:40]} is no value")
        return _loads(scalar[0], True)

    def _items(self, begin: str, end: str, item: Callable[[], Any]) -> list[Any]:
        self.take(begin)
        items = []
        while self.peek() != end:
            items.append(item())
            if self.peek() != end:
                self.take(",")
        self.at += 1
        return items

    def _pair(self, depth: int) -> tuple[str, Any]:
        sign = self.peek()
        quoted = sign in ("'", '"') or self.text.startswith(self._quote, self.at)
        key = self.value(depth + 1) if quoted else self.name(self._names).rstrip()
        self.take(":")
        return key, self.value(depth + 1)

    def _gemma_text(self) -> str:
        begin = self.at + len(self._quote)
        end = self.text.find(self._quote, begin)
        if end < 0:
            raise NotReadable("a text has no end")
        self.at = end + len(self._quote)
        return self.text[begin:end]

    def _python_text(self, quote: str) -> str:
        pieces = list[str]()
        at = self.at + 1
        while at < len(self.text) and self.text[at] != quote:
            char = self.text[at]
            if char != "\\":
                pieces.append(char)
                at += 1
                continue
            sign = self.text[at + 1 : at + 2]
            digits = {"x": 2, "u": 4, "U": 8}.get(sign, 0)
            code = self.text[at + 2 : at + 2 + digits]
            if digits and len(code) == digits and all(each in _HEX for each in code) and int(code, 16) < 0x110000:
                pieces.append(chr(int(code, 16)))
                at += 2 + digits
            else:
                pieces.append(_PYTHON_ESCAPES.get(sign, "\\" + sign))
                at += 2
        if at >= len(self.text):
            raise NotReadable("a text has no end")
        self.at = at + 1
        return "".join(pieces)

    def call(self) -> tuple[str, dict[str, Any]]:
        name = self.name()
        arguments = dict[str, Any]()

        def argument() -> None:
            key = self.name()
            self.take("=")
            if key in arguments:
                raise NotReadable(f"the argument {key[:40]} is there twice")
            arguments[key] = self._argument()

        self._items("(", ")", argument)
        return name, arguments

    def _argument(self) -> Any:
        sign = self.peek()
        ends = _RAW_END[sign].search(self.text, self.at + 1) if self._raw and sign in _RAW_END else None
        if ends is None:
            return self.value()
        begin = self.at + 1
        self.at = ends.end()
        return self.text[begin : ends.start()]

    def end(self) -> None:
        if self.peek():
            raise NotReadable(f"there is more text behind the call: {self.text[self.at : self.at + 20]!r}")


def python_calls(text: str, *, raw: bool = False, listed: bool = True) -> list[tuple[str, dict[str, Any]]]:
    """(name, arguments) of each call in ``[look(place="Ulm"), ...]``; values are literals. With ``raw``, a text that is
    an argument has no escapes. If ``listed`` is false, white space separates the calls, and there are no brackets.
    Raises NotReadable."""
    reader = _Literals(text, raw=raw)
    calls = []
    while not listed and reader.peek():
        calls.append(reader.call())
    if listed:
        calls = reader._items("[", "]", reader.call)
    reader.end()
    if not calls:
        raise NotReadable("the list of calls is empty")
    return calls


def gemma_call(text: str, quote: str = _GEMMA_QUOTE) -> tuple[str, dict[str, Any]]:
    """(name, arguments) of ``look{place:<|"|>Ulm<|"|>,days:2}``, with ``quote`` around texts. Raises NotReadable."""
    reader = _Literals(text, names=_GEMMA_NAME, quote=quote)
    name = reader.name()
    if reader.peek() != "{":
        raise NotReadable("there is no object with the arguments")
    arguments = reader.value()
    reader.end()
    return name, arguments


# --- text read by a schema --------------------------------------------------------------------------------------------

PYTHON_TYPES: Final[Mapping[str, tuple[type, ...]]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}
"""JSON type -> the Python types of its values."""


def by_schema(text: str, schema: Any, root: Mapping[str, Any]) -> Any:
    """Value of an argument, converted from text to the type in the argument's JSON schema.

    ``root`` is the schema in which ``$ref`` is resolved. Templates print a text as it is, so the text is not converted
    if the schema allows only texts, if it is a text in quotation marks, or if it fits none of the allowed types.
    """
    types = types_of(schema, root)
    if types == {"string"}:
        return text
    word = text.strip()
    candidate: Any = NotReadable
    try:
        candidate = _loads(word, True)
    except NotReadable:
        try:
            reader = _Literals(word)
            candidate = reader.value()
            reader.end()
        except NotReadable:
            candidate = _WORDS.get(word.capitalize(), NotReadable)
    if candidate is NotReadable or isinstance(candidate, str):
        return text
    if not types:
        return candidate
    if isinstance(candidate, float) and candidate.is_integer() and "integer" in types and "number" not in types:
        return int(candidate)
    fits = any(type(candidate) in PYTHON_TYPES.get(each, ()) for each in types)
    return candidate if fits else text


def types_of(schema: Any, root: Mapping[str, Any]) -> set[str]:
    """Types that a schema allows; empty if the schema does not restrict them. ``root`` is the schema in which ``$ref``
    is resolved."""
    return _types(schema, root, {}, 0) or set()


def referred(reference: str, root: Mapping[str, Any]) -> Any:
    """The schema to which a ``$ref`` like ``#/$defs/colour`` points; None if there is none."""
    target: Any = root
    for step in reference.removeprefix("#").split("/")[1:]:
        target = target.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(target, Mapping) else None
    return target


def _types(schema: Any, root: Mapping[str, Any], known: dict[str, set[str] | None], depth: int) -> set[str] | None:
    """None for a reference that is being followed, which adds nothing. ``known`` has the types of each reference,
    because schemas may refer to themselves many times."""
    if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
        return set()
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        if reference not in known:
            known[reference] = None
            known[reference] = _types(referred(reference, root), root, known, depth + 1)
        return known[reference]
    kind = schema.get("type")
    if isinstance(kind, str):
        return {kind}
    if isinstance(kind, list):
        return {each for each in kind if isinstance(each, str)}
    given = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if isinstance(given, list) and given:
        return {name for name, kinds in PYTHON_TYPES.items() for each in given if type(each) in kinds}
    found = set[str]()
    for key in ("anyOf", "oneOf", "allOf"):
        listed = schema.get(key)
        options = [_types(each, root, known, depth + 1) for each in listed] if isinstance(listed, list) else []
        allowed = [each for each in options if each is not None]
        if key == "allOf" or all(allowed):
            found = found.union(*allowed)
    return found
