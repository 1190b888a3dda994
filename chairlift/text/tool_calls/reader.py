"""Streaming reader of generated text: text goes in; pieces of content, pieces of reasoning and complete tool calls
come out.

One state machine, written as generators, reads all formats. The rows of :mod:`~chairlift.text.tool_calls.formats`
describe how they differ. A call is returned when it is complete and valid: the request offers its function and its
arguments are an object. Text that begins like a call but is not valid is returned as text, together with a reason. The
events, joined, depend only on the whole text, not on how the text was divided into pieces.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from chairlift.base.json_text import json_text
from chairlift.text.tool_calls.formats import Body, ReasoningFormat, ToolFormat
from chairlift.text.tool_calls.scan import CUT_OFF, CodeBlocks, Reading, TextScanner, markers_of
from chairlift.text.tool_calls.values import (
    JsonScanner,
    NotReadable,
    by_schema,
    gemma_call,
    json_value,
    python_calls,
    types_of,
)

__all__ = ["Answer", "AnswerReader", "Broken", "Call", "Event", "Piece", "read_answer"]

_CONTENT: Final = "content"
_REASONING: Final = "reasoning"
_ENDS: Final = ("<|end|>", "<|return|>", "<|call|>", "<|start|>", "<|channel|>")
_HEADERS: Final = ("<|start|>", "<|channel|>")


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """A piece of text of the kind ``content`` or ``reasoning``."""

    kind: str
    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """A tool call. ``arguments`` is a JSON object as text. ``id`` is empty if the model wrote no id."""

    name: str
    arguments: str
    id: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Broken:
    """Reason why text that began like a call was returned as text."""

    reason: str


Event = Piece | Call | Broken


@dataclasses.dataclass(slots=True)
class Answer:
    """The content, the reasoning and the tool calls that were read from one output."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = dataclasses.field(default_factory=list)
    broken: list[str] = dataclasses.field(default_factory=list)
    """One reason for each text that began like a call but was not valid."""

    def add(self, events: Sequence[Event]) -> None:
        """Add the events that a reader returned."""
        for event in events:
            if isinstance(event, Call):
                self.calls.append(event)
            elif isinstance(event, Broken):
                self.broken.append(event.reason)
            elif event.kind == _REASONING:
                self.reasoning += event.text
            else:
                self.content += event.text


class AnswerReader:
    """Reads one output. ``tools`` maps the names of the offered functions to the schemas of their arguments.

    Without ``tool_format`` no calls are recognised; without ``reasoning`` everything is content. ``inside``: the
    output begins inside the reasoning. ``hidden`` are texts of special tokens to remove from content and reasoning. If
    ``parallel`` is false, calls after the first are dropped. ``held``: a grammar holds the calls to their schemas, and
    lets arguments in tags be JSON, except for those that can only be texts.
    """

    def __init__(
        self,
        tool_format: ToolFormat | None = None,
        reasoning: ReasoningFormat | None = None,
        tools: Mapping[str, Mapping[str, Any]] | None = None,
        *,
        inside: bool = False,
        hidden: Sequence[str] = (),
        parallel: bool = True,
        held: bool = False,
    ) -> None:
        self._format = tool_format
        self._reasoning = reasoning
        self._tools = tools or {}
        self._inside = inside or (reasoning is not None and reasoning.opened)
        needed = {*(tool_format.markers if tool_format else ())}
        needed |= {reasoning.begin, reasoning.end} if reasoning else set()
        self._hidden = tuple(text for text in hidden if text not in needed)
        self._parallel = parallel
        self._held_to_json = held
        self._input = self._text = TextScanner()
        """The whole output, and the text that is read now: the output, or the reasoning in it."""
        self._held: list[tuple[str, str, Mapping[str, Any], str]] | None = None
        """(text, function's name, arguments, id) of the calls that were read in the reasoning; None outside of it."""
        self._closed = False
        """Whether the reasoning has its end mark."""
        self._code = {_CONTENT: CodeBlocks(), _REASONING: CodeBlocks()}
        self._space = ""
        """White space that was read last. It is returned only if more text of the same kind follows."""
        self._kind = _CONTENT
        self._at_start = False
        """Whether white space is dropped until other text comes."""
        self._said: set[str] = set()
        """Kinds of text that have been returned: ``content``, ``reasoning``."""
        self.num_calls = 0
        self._num_left_out = 0
        self._spans: list[int] = []
        """Offsets of the beginning and the end of each reasoning part, in bytes of the text. If a part has not ended,
        its end is missing."""
        self._events: list[Event] = []
        self._run = self._harmony() if self._is_harmony() else self._whole()
        next(self._run, None)

    def feed(self, text: str) -> list[Event]:
        """Add text. Returns the events that further text cannot change."""
        if text:
            self._input.add(text)
            next(self._run, None)
        return self._take()

    def finish(self) -> list[Event]:
        """Mark the end of the output. Returns the remaining events."""
        self._input.ended = True
        for _ in self._run:
            pass
        if self._space and self._kind == _CONTENT and not self.num_calls and not self._is_harmony():
            self._events.append(Piece(self._kind, self._space))
            self._space = ""
        if self._num_left_out:
            reason = f"parallel_tool_calls is false, and {self._num_left_out} more calls were left out"
            self._events.append(Broken(reason))
        return self._take()

    def num_reasoning_tokens(self, starts: Sequence[int]) -> int:
        """Number of tokens that are reasoning or its marks. ``starts`` are the byte offsets of all tokens, in order."""
        spans = [*self._spans, *([1 << 62] if len(self._spans) % 2 else [])]
        ends = [bisect.bisect_left(starts, place) for place in spans]
        return sum(ends[1::2]) - sum(ends[::2])

    def is_reasoning(self, place: int) -> bool:
        """Whether the byte at this offset of the text is reasoning or a part of its marks."""
        return bisect.bisect_right(self._spans, place) % 2 == 1

    def _take(self) -> list[Event]:
        """Events since the last call. Adjacent pieces of the same kind are joined."""
        events: list[Event] = []
        for event in self._events:
            last = events[-1] if events else None
            if isinstance(event, Piece) and isinstance(last, Piece) and event.kind == last.kind:
                events[-1] = Piece(event.kind, last.text + event.text)
            else:
                events.append(event)
        self._events = []
        return events

    def _is_harmony(self) -> bool:
        return (self._format is not None and self._format.body is Body.HARMONY) or (
            self._reasoning is not None and self._reasoning.name == "harmony"
        )

    # --- text -------------------------------------------------------------------------------------------------------

    def _emit(self, kind: str, text: str) -> None:
        if kind != self._kind:
            self._kind = kind
            self._space = ""
            self._at_start = True
        self._code[kind].feed(text)
        if self._at_start:
            text = text.lstrip()
        if not text:
            return
        self._at_start = False
        body = text.rstrip()
        if body:
            self._events.append(Piece(kind, self._space + body))
            self._space = ""
            self._said.add(kind)
        self._space += text[len(body) :]

    def _stream(self, kind: str, markers: tuple[str, ...]) -> Reading[str]:
        """Return text as pieces of ``kind`` up to the first marker, and return that marker; empty at the end of the
        output."""
        every = markers_of((*markers, *self._hidden))
        while True:
            text, marker = yield from self._text.flow(every)
            self._emit(kind, text)
            if marker in markers and self._code[kind].inside and marker not in _ENDS:
                self._emit(kind, marker)
            elif marker in markers:
                return marker
            elif not text and not marker:
                return ""

    def _think(self) -> Reading[None]:
        form = self._reasoning
        text = self._text
        if form is None:
            return
        begin = text.num_bytes
        text.record = []
        yield from text.skip_space()
        opened = yield from text.take((form.begin,))
        space = text.take_record()
        if not opened and not self._inside:
            self._emit(_CONTENT, space)
            return
        self._spans.append(begin)
        yield from self._reason(form.end)
        self._spans.append(text.num_bytes)
        self._emit(_CONTENT, "")
        self._space = ""
        self._at_start = True

    def _reason(self, end: str) -> Reading[None]:
        """Read reasoning up to the text ``end``. If ``end`` never comes, the complete calls in the reasoning are
        calls."""
        self._text, marks, found = TextScanner(), markers_of((end,)), ""
        thought = self._thought()
        next(thought, None)
        while not found:
            piece, found = yield from self._input.flow(marks)
            if not piece and not found:
                break
            self._text.add(piece)
            next(thought, None)
        self._closed = bool(found)
        self._text.ended = True
        for _ in thought:
            pass
        self._text = self._input

    def _thought(self) -> Reading[None]:
        """Read the text of the reasoning. A complete call and the text after it wait for the end of the reasoning,
        because only then it is known whether the call is a part of the reasoning."""
        form = self._format
        text = self._text
        broken = list[str]()
        while form is not None and (marker := (yield from self._stream(_REASONING, form.begins))):
            text.record = [marker]
            self._held = []
            reason = ""
            try:
                yield from _BODIES[form.body](self, form, marker)
            except NotReadable as error:
                reason = str(error)
            held, self._held, rest = self._held, None, text.take_record()
            if held:
                yield from text.wait()
            if self._closed or not held:
                self._emit(_REASONING, "".join(written for written, *_ in held) + rest)
            else:
                for _, name, arguments, call_id in held:
                    self._commit(name, arguments, call_id)
                self._emit(_REASONING, rest if reason else "")
            text.record = None
            broken += [reason] if reason else []
        if form is None:
            yield from self._stream(_REASONING, ())
        if not self._closed:
            self._events += map(Broken, broken)

    def _whole(self) -> Reading[None]:
        """Read the whole output: reasoning, then content and calls."""
        yield from self._think()
        form = self._format
        if form is None:
            yield from self._stream(_CONTENT, ())
            return
        if not form.begins:
            yield from self._message(form)
        while marker := (yield from self._stream(_CONTENT, form.begins)):
            self._text.record = [marker]
            yield from self._try(_BODIES[form.body](self, form, marker))

    # --- calls ------------------------------------------------------------------------------------------------------

    def _try(self, body: Reading[None]) -> Reading[None]:
        """Read calls with ``body``. If they are invalid, their text is returned as content."""
        try:
            yield from body
            self._text.record = None
        except NotReadable as error:
            self._emit(_CONTENT, self._text.take_record())
            if str(error):
                self._events.append(Broken(str(error)))

    def _commit(self, name: str, arguments: Mapping[str, Any], call_id: str = "") -> None:
        """Return a complete call as an event. In reasoning, hold it back."""
        if self._held is not None:
            self._held.append((self._text.take_record(), name, arguments, call_id))
            self._text.record = []
            return
        self._text.record = []
        if self._kind == _CONTENT:
            self._space = ""
            self._at_start = True
        if self.num_calls and not self._parallel:
            self._num_left_out += 1
            return
        self.num_calls += 1
        self._events.append(Call(name, json_text(arguments), call_id))

    def _tool(self, written: str) -> str:
        """Name of the offered function that the text ``written`` names. Raises NotReadable if there is none."""
        name = written.strip()
        prefix = self._format.prefix if self._format else ""
        if name not in self._tools and self._format is not None and self._format.numbered:
            name = name.rpartition(":")[0] if name.rpartition(":")[2].isdigit() else name
        if name not in self._tools and prefix:
            name = name.removeprefix(prefix)
        if name not in self._tools:
            known = ", ".join(self._tools)[:120] or "there are none"
            raise NotReadable(f"{written.strip()[:64]!r} is none of the tools ({known})")
        return name

    def _object(self, text: str) -> dict[str, Any]:
        value = json_value(text)
        if not isinstance(value, dict):
            raise NotReadable("the arguments are no object")
        return value

    def _from_json(self, value: Any) -> tuple[str, dict[str, Any]]:
        """(function's name, arguments) of the call that a JSON value describes. Raises NotReadable."""
        if not isinstance(value, dict):
            raise NotReadable("a call is no object")
        value = value["function"] if isinstance(value.get("function"), dict) else value
        name = next((value[key] for key in ("name", "tool_name", "function") if key in value), None)
        arguments = next((value[key] for key in ("arguments", "parameters") if key in value), None)
        if not isinstance(name, str):
            raise NotReadable("a call has no name")
        if isinstance(arguments, str):
            arguments = self._object(arguments or "{}")
        if not isinstance(arguments, (dict, type(None))):
            raise NotReadable("the arguments are no object")
        return self._tool(name), arguments or {}

    def _json_body(self, form: ToolFormat, marker: str) -> Reading[None]:
        text = self._text
        while True:
            if not (yield from text.skip_space()):
                raise NotReadable(CUT_OFF)
            if not (yield from text.peek(("{", "["))):
                raise NotReadable("")  # text that only mentions the marker
            value = json_value((yield from text.json()))
            for name, arguments in [self._from_json(each) for each in (value if isinstance(value, list) else [value])]:
                self._commit(name, arguments)
            if not (yield from text.skip_space()) or not form.section_end:
                return
            if (yield from text.peek((form.section_end, "{"))) != "{":
                yield from text.take((form.section_end,))
                return

    def _begins_call(self, form: ToolFormat, is_first: bool) -> Reading[bool]:
        """Read the text that comes before the function's name in a series of calls. Returns False at the end of the
        series."""
        goes_on = yield from self._text.skip_space()
        if not goes_on and is_first:
            raise NotReadable(CUT_OFF)
        marks = tuple(mark for mark in (form.call, form.section_end) if mark)
        mark = (yield from self._text.take(marks)) if goes_on else ""
        if is_first and mark != form.call:
            raise NotReadable("no call follows the marker")
        return bool(mark) and mark == form.call

    def _series(self, form: ToolFormat, marker: str, one: Callable[[ToolFormat], Reading[None]]) -> Reading[None]:
        """Read all calls of a section, or the single call of a format without sections."""
        if not form.call:
            yield from one(form)
            return
        is_first = True
        while (is_first and marker == form.call) or (yield from self._begins_call(form, is_first)):
            is_first = False
            yield from one(form)

    def _named_body(self, form: ToolFormat, marker: str) -> Reading[None]:
        yield from self._series(form, marker, self._named_call)

    def _named_call(self, form: ToolFormat) -> Reading[None]:
        text = self._text
        call_id = ""
        yield from text.skip_space()
        written, end = yield from text.word(form.name_ends)
        name = self._tool(written)
        if form.id_mark and end == form.id_mark:
            call_id, _ = yield from text.word(tuple(each for each in form.name_ends if each != form.id_mark))
        if form.numbered and written.strip().rpartition(":")[2].isdigit():
            call_id = written.strip()
        yield from text.skip_space()
        arguments = self._object((yield from text.json()))
        if form.call_end and (yield from text.skip_space()) and not (yield from text.take((form.call_end,))):
            raise NotReadable(f"{form.call_end} does not follow the arguments")
        self._commit(name, arguments, call_id.strip())

    def _tagged_body(self, form: ToolFormat, marker: str) -> Reading[None]:
        yield from self._series(form, marker, self._tagged_call)

    def _tagged_call(self, form: ToolFormat) -> Reading[None]:
        text = self._text
        yield from text.skip_space()
        written, _ = yield from text.word(form.name_ends, keep=(form.key, form.call_end))
        name = self._tool(written)
        arguments = dict[str, Any]()
        while True:
            yield from text.skip_space()
            mark = yield from text.take((form.key, form.call_end))
            if not mark:
                raise NotReadable(CUT_OFF if text.ended else "there is text between the arguments")
            if mark == form.call_end:
                break
            key, _ = yield from text.word((form.key_end,))
            how = form.values[0][1]
            if form.values[0][0]:
                yield from text.skip_space()
                begin = yield from text.take([mark for mark, _ in form.values])
                if not begin:
                    raise NotReadable(f"no value follows the argument {key.strip()[:40]!r}")
                how = dict(form.values)[begin]
            key = key if key in self._properties(name) else key.strip()
            if key in arguments:
                raise NotReadable(f"the argument {key[:40]!r} is there twice")
            arguments[key] = yield from self._value(form, name, key, how)
        self._commit(name, arguments)

    def _properties(self, name: str) -> Mapping[str, Any]:
        """Name of an argument of the function -> its schema."""
        properties = self._tools[name].get("properties")
        return properties if isinstance(properties, Mapping) else {}

    def _value(self, form: ToolFormat, name: str, key: str, how: str) -> Reading[Any]:
        """Read the value of an argument, up to the text that ends it."""
        schema = self._properties(name).get(key)
        types = types_of(schema, self._tools[name])
        is_json = how == "json" or (how == "schema" and self._held_to_json and types != {"string"})
        value = yield from self._text.until((form.value_end,))
        if is_json or (how == "schema" and types and "string" not in types):
            scanner = JsonScanner()
            more = "[" + value
            while scanner.feed(more, 0) == len(more) and scanner.in_text:
                more = form.value_end + (yield from self._text.until((form.value_end,)))
                value += more
        if is_json:
            return json_value(value.strip())
        if form.own_line:
            value = value.removeprefix("\n").removesuffix("\n")
        return value if how == "text" else by_schema(value, schema, self._tools[name])

    def _python_body(self, form: ToolFormat, marker: str) -> Reading[None]:
        written = yield from self._text.until((form.section_end,))
        calls = python_calls(written, raw=form.raw_text)
        for name, arguments in [(self._tool(name), arguments) for name, arguments in calls]:
            self._commit(name, arguments)

    def _gemma_body(self, form: ToolFormat, marker: str) -> Reading[None]:
        written = yield from self._text.until((form.section_end,))
        name, arguments = gemma_call(written.strip().removeprefix(form.prefix))
        self._commit(self._tool(name), arguments)

    # --- answers that are a call as a whole -------------------------------------------------------------------------

    def _message(self, form: ToolFormat) -> Reading[None]:
        """Read a message that consists of calls only. Any other message is content, even if it is JSON."""
        text = self._text
        text.record = []
        reason = ""
        sign = "{" if form.body is Body.JSON else "["
        while (yield from text.skip_space()) and self._hidden:
            if not (yield from text.take(self._hidden)):
                break
        if (yield from text.peek((sign,))):
            try:
                calls = yield from (self._json_message() if sign == "{" else self._python_message())
            except NotReadable as error:
                reason = str(error) if "is none of the tools" in str(error) else ""
            else:
                for name, arguments in calls:
                    self._commit(name, arguments)
                text.record = None
                return
        self._emit(_CONTENT, text.take_record())
        if reason:
            self._events.append(Broken(reason))

    def _json_message(self) -> Reading[list[tuple[str, dict[str, Any]]]]:
        text = self._text
        calls = []
        while True:
            value = json_value((yield from text.json()))
            if not isinstance(value, dict) or not set(value) <= {"type", "id", "name", "parameters", "arguments"}:
                raise NotReadable("it describes no call")
            if not isinstance(value.get("parameters", value.get("arguments")), dict):
                raise NotReadable("it describes no call")
            calls.append(self._from_json(value))
            if not (yield from text.skip_space()):
                return calls
            if not (yield from text.take((";",))):
                raise NotReadable("text follows the call")
            yield from text.skip_space()

    def _python_message(self) -> Reading[list[tuple[str, dict[str, Any]]]]:
        text = self._text
        before = len(text.record or ())
        text.advance(text.at + 1)
        yield from text.skip_space()
        name, _ = yield from text.word(("(",), max_chars=80)
        if not name.replace("_", "a").replace(".", "a").replace("-", "a").isalnum():
            raise NotReadable("it describes no call")
        self._tool(name)
        while (yield from text.more()):
            text.advance(len(text.rest))
        text.advance(len(text.rest))
        calls = python_calls("".join((text.record or [])[before:]))
        return [(self._tool(each), arguments) for each, arguments in calls]

    # --- gpt-oss ----------------------------------------------------------------------------------------------------

    def _harmony(self) -> Reading[None]:
        """Read messages one after another, each with a header. Text before the first header is content."""
        text = self._text
        marker = yield from text.take((*_HEADERS, " to=", "to="))
        marker = marker or (yield from self._stream(_CONTENT, _HEADERS))
        while marker:
            text.record = [marker]
            begin = text.num_bytes - len(marker)
            try:
                header, _ = yield from text.word(("<|message|>",), max_chars=400)
            except NotReadable as error:
                self._emit(_CONTENT, text.take_record())
                self._events.append(Broken(f"a message has no text: {error}"))
                marker = yield from self._stream(_CONTENT, _HEADERS)
                continue
            header = "".join(text.record)
            recipient = header.partition("to=")[2].split("<")[0].split(" ")[0]
            if recipient.startswith("functions."):
                marker = yield from self._harmony_call(recipient)
                continue
            text.record = None
            thinks = header.rpartition("<|channel|>")[2].startswith("analysis") and self._reasoning is not None
            if thinks:
                self._spans.append(begin)
            kind = _REASONING if thinks else _CONTENT
            self._emit(kind, "")
            self._space = "\n" if kind in self._said else ""
            self._at_start = True
            marker = yield from self._stream(kind, _ENDS)
            if thinks:
                self._spans.append(text.num_bytes)
            marker = yield from self._next_header(marker)

    def _next_header(self, marker: str) -> Reading[str]:
        """The marker that begins the next header, after the end of a message."""
        if marker in _HEADERS or not marker:
            return marker
        return (yield from self._stream(_CONTENT, _HEADERS))

    def _harmony_call(self, recipient: str) -> Reading[str]:
        text = self._text
        marker = ""

        def body() -> Reading[None]:
            nonlocal marker
            name = self._tool(recipient)
            if not (yield from text.skip_space()):
                raise NotReadable(CUT_OFF)
            arguments = self._object((yield from text.json()))
            goes_on = yield from text.skip_space()
            marker = yield from text.take(_ENDS)
            if goes_on and not marker:
                raise NotReadable("text follows the arguments")
            self._commit(name, arguments)

        yield from self._try(body())
        if marker:
            return (yield from self._next_header(marker))
        return (yield from self._stream(_CONTENT, _HEADERS))


_BODIES: Final[Mapping[Body, Callable[[AnswerReader, ToolFormat, str], Reading[None]]]] = {
    Body.JSON: AnswerReader._json_body,
    Body.NAMED: AnswerReader._named_body,
    Body.TAGGED: AnswerReader._tagged_body,
    Body.PYTHON: AnswerReader._python_body,
    Body.GEMMA: AnswerReader._gemma_body,
}


def read_answer(text: str, reader: AnswerReader) -> Answer:
    """Read a complete output with a new reader."""
    answer = Answer()
    answer.add(reader.feed(text))
    answer.add(reader.finish())
    return answer
