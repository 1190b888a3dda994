"""Reads calls that a grammar guarantees while they grow: each piece of the arguments is returned as soon as it is
certain.

A grammar lets a call begin only with the texts of :func:`~chairlift.text.tool_calls.forced.call_texts`. So when the
head of a call is complete, the call is certain, and a call that the output ends inside is returned as it was cut. The
events, joined, depend only on the whole text, not on how the text was divided into pieces.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Final

from chairlift.base.json_text import json_text
from chairlift.text.tool_calls.events import INPUT, Broken, CallBegun, CallEnded, CallPiece, Event
from chairlift.text.tool_calls.forced import call_texts, series_texts
from chairlift.text.tool_calls.formats import Body, ToolFormat
from chairlift.text.tool_calls.scan import CUT_OFF, Reading, TextScanner, markers_of
from chairlift.text.tool_calls.values import JsonScanner, JsonTextDecoder, NotReadable, json_value, types_of

__all__ = ["GrowingCalls"]

_DIGITS: Final = re.compile("[0-9]{0,2}")
_JSON_SPACE: Final = " \t\r\n"


@dataclasses.dataclass(frozen=True, slots=True)
class _Head:
    """Text with which a call of one function begins. Between two parts of the text is a number."""

    name: str
    parts: tuple[str, ...]
    end: str
    """Text after the arguments."""

    def match(self, view: str) -> tuple[int, str]:
        """(length of the head at the beginning of ``view``, its number). The length is 0 if more text must decide, and
        -1 if another text is there."""
        at = 0
        number = ""
        for index, part in enumerate(self.parts):
            if index:
                digits = _DIGITS.match(view, at)
                number = digits[0] if digits else ""
                at += len(number)
                if at == len(view):
                    return 0, ""
                if not number:
                    return -1, ""
            there = view[at : at + len(part)]
            if there != part:
                return (0 if part.startswith(there) else -1), ""
            at += len(part)
        return at, number


class GrowingCalls:
    """Reads the calls of one output, in which a grammar describes every call outside of the reasoning.

    ``tools`` maps the names of the functions to the schemas of their arguments, and ``custom`` names the tools whose
    input is a text. ``emit`` takes the events.
    """

    def __init__(
        self,
        form: ToolFormat,
        tools: Mapping[str, Mapping[str, Any]],
        custom: Collection[str],
        text: TextScanner,
        emit: Callable[[Event], None],
    ) -> None:
        self._form = form
        self._tools = tools
        self._custom = custom
        self._text = text
        self._emit_event = emit
        self._written: list[str] = []
        """Pieces of the arguments of the current call."""
        self._cut = ""
        """Why the current call is not whole; empty if it is."""

    def series(self, marker: str) -> Reading[bool]:
        """Read the calls that follow a marker of the format; an empty marker is the beginning of the message. Returns
        False, and reads nothing, if the text after the marker is not the head of a call."""
        before, separator, after = series_texts(self._form)
        heads = list(self._heads(before, marker))
        found = yield from self._find(heads)
        if found is None:
            return False
        self._text.record = None
        while found is not None:
            head, number = found
            if not (yield from self.call(head.name, self._id(head, number))):
                return True
            yield from self._skip(head.end)
            if separator is None or not after:
                return True
            found = yield from self._find(list(self._heads(separator, None)))
        yield from self._skip(after)
        if self._text.ended and self._text.at < len(self._text.rest):
            self._emit_event(Broken(CUT_OFF))
        return True

    def call(self, name: str, call_id: str = "") -> Reading[bool]:
        """Read the arguments of a call, whose head was read. Returns False if the call is not whole."""
        self._text.record = None
        self._written = []
        self._cut = ""
        is_custom = name in self._custom
        self._emit_event(CallBegun(name, call_id, is_custom))
        try:
            if self._form.body is Body.TAGGED:
                yield from self._tagged(name, is_custom)
            elif is_custom:
                yield from self._custom_json()
            else:
                yield from self._json()
        except NotReadable as error:
            self._cut = str(error)
        self._emit_event(CallEnded(is_cut=bool(self._cut)))
        reason = self._cut or ("" if is_custom else self._fault())
        if reason:
            self._emit_event(Broken(reason))
        return not self._cut

    # --- heads ------------------------------------------------------------------------------------------------------

    def _heads(self, before: str, marker: str | None) -> Iterator[_Head]:
        """Heads of the calls of all functions, after ``before`` and without the ``marker``, which was read. None: no
        marker was read."""
        form = self._form
        for name in self._tools:
            begin, end = call_texts(form, name)
            whole = before + begin
            if marker:
                whole = whole.partition(form.section[0])[2]
            if marker and marker == form.call and form.bare_call:
                whole = whole.lstrip("\n").removeprefix(marker)
            end = end.removeprefix(form.call_end) if form.body is Body.TAGGED else end
            yield _Head(name, tuple(whole.split("{number}")), end)

    def _find(self, heads: list[_Head]) -> Reading[tuple[_Head, str] | None]:
        """Read one of the heads. Returns None, and reads nothing, if none of them is there."""
        text = self._text
        while True:
            view = text.rest[text.at :]
            may_follow = False
            for head in heads:
                size, number = head.match(view)
                if size > 0:
                    text.advance(text.at + size)
                    return head, number
                may_follow = may_follow or size == 0
            if not may_follow or not (yield from text.more()):
                return None

    def _id(self, head: _Head, number: str) -> str:
        return f"{self._form.prefix}{head.name}:{number}" if self._form.numbered else ""

    def _skip(self, literal: str) -> Reading[None]:
        """Read the text ``literal``, as far as it is there."""
        text = self._text
        for char in literal:
            while text.at == len(text.rest):
                if not (yield from text.more()):
                    return
            if text.rest[text.at] != char:
                return
            text.advance(text.at + 1)

    # --- arguments --------------------------------------------------------------------------------------------------

    def _emit(self, piece: str) -> None:
        if piece:
            self._written.append(piece)
            self._emit_event(CallPiece(piece))

    def _fault(self) -> str:
        """The fault of complete arguments that a grammar allows; usually empty."""
        try:
            json_value("".join(self._written))
        except NotReadable as error:
            return str(error)
        return ""

    def _json(self) -> Reading[None]:
        text = self._text
        scanner = JsonScanner()
        yield from text.skip_space()
        while True:
            self._emit(text.advance(scanner.feed(text.rest, text.at)))
            if scanner.done:
                return
            if scanner.fault:
                raise NotReadable(scanner.fault)
            if not (yield from text.more()):
                raise NotReadable(CUT_OFF)

    def _custom_json(self) -> Reading[None]:
        """Read the input of a custom tool: the only text in an object."""
        yield from self._expect("{", f'"{INPUT}"', ":", '"')
        text = self._text
        decoder = JsonTextDecoder()
        while not decoder.done:
            end = decoder.feed(text.rest, text.at)
            text.advance(end)
            self._emit(decoder.take())
            if decoder.fault:
                raise NotReadable(decoder.fault)
            if not decoder.done and not (yield from text.more()):
                raise NotReadable(CUT_OFF)
        yield from self._expect("}")

    def _expect(self, *signs: str) -> Reading[None]:
        """Read ``signs``, with white space before each."""
        for sign in signs:
            if not (yield from self._text.skip_space()):
                raise NotReadable(CUT_OFF)
            if not (yield from self._text.take((sign,))):
                raise NotReadable(CUT_OFF if self._text.ended else f"{sign} is missing")

    def _tagged(self, name: str, is_custom: bool) -> Reading[None]:
        form = self._form
        text = self._text
        opening = "{"
        while True:
            yield from text.skip_space()
            mark = yield from text.take((form.key, form.call_end))
            if not mark:
                raise NotReadable(CUT_OFF if text.ended else "there is text between the arguments")
            if mark == form.call_end:
                break
            key, _ = yield from text.word((form.key_end,))
            key = form.plain_key(key)
            how = form.values[0][1]
            if form.values[0][0]:
                yield from text.skip_space()
                how = dict(form.values).get((yield from text.take([each for each, _ in form.values])), "")
            if not how:
                raise NotReadable(CUT_OFF if text.ended else f"no value follows the argument {key[:40]!r}")
            if not is_custom:
                self._emit(f"{opening}{json_text(key)}: ")
                opening = ", "
            properties = self._tools[name].get("properties")
            schema = properties.get(key) if isinstance(properties, Mapping) else None
            if how == "text" or (how == "schema" and types_of(schema, self._tools[name]) == {"string"}):
                yield from self._text_value(quoted=not is_custom)
            else:
                yield from self._json_value()
        if not is_custom:
            self._emit("{}" if opening == "{" else "}")

    def _text_value(self, *, quoted: bool) -> Reading[None]:
        """Read a text up to the end of its tag. If ``quoted``, it is returned as a JSON text."""
        form = self._form
        text = self._text
        if quoted:
            self._emit('"')
        if form.own_line:
            yield from text.take(("\n",))
        ends = ("\n" + form.value_end, form.value_end) if form.own_line else (form.value_end,)
        markers = markers_of(ends)
        while True:
            place, found = markers.find(text.rest, text.at)
            piece = text.advance(place)
            self._emit(json_text(piece)[1:-1] if quoted else piece)
            if found:
                text.advance(place + len(found))
                break
            if not (yield from text.more()):
                raise NotReadable(CUT_OFF)
        if quoted:
            self._emit('"')

    def _json_value(self) -> Reading[None]:
        """Read a JSON value up to the end of its tag."""
        text = self._text
        scanner = JsonScanner()
        scanner.feed("[", 0)
        yield from text.skip_space()
        space = ""
        while not scanner.fault:
            piece = space + text.advance(scanner.feed(text.rest, text.at))
            body = piece.rstrip(_JSON_SPACE)
            space = piece[len(body) :]
            self._emit(body)
            if scanner.done:
                raise NotReadable("a bracket follows the value of an argument")
            if not scanner.fault and not (yield from text.more()):
                raise NotReadable(CUT_OFF)
        if not scanner.is_between:
            raise NotReadable(scanner.fault)
        if not (yield from text.take((self._form.value_end,))):
            raise NotReadable(CUT_OFF if text.ended else f"{self._form.value_end} is missing")
