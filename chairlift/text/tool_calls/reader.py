"""Streaming reader of generated text: text goes in; pieces of content, pieces of reasoning and complete tool calls
come out.

One state machine, written as generators, reads all formats. The rows of :mod:`~chairlift.text.tool_calls.formats`
describe how they differ. A call is returned when it is complete and valid: the request offers its function and its
arguments are an object. Text that begins like a call but is not valid is returned as text, together with a reason. A
call that a grammar guarantees is returned while it grows (:mod:`~chairlift.text.tool_calls.growing`). The events,
joined, depend only on the whole text, not on how the text was divided into pieces.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

from chairlift.base.json_text import json_text
from chairlift.text.tool_calls.elements import element_arguments
from chairlift.text.tool_calls.events import (
    CONTENT,
    REASONING,
    Answer,
    Broken,
    CallBegun,
    CallEnded,
    CallPiece,
    Event,
    Piece,
    joined,
)
from chairlift.text.tool_calls.formats import Body, ReasoningFormat, ToolFormat
from chairlift.text.tool_calls.growing import GrowingCalls
from chairlift.text.tool_calls.scan import CUT_OFF, CodeBlocks, Reading, TextScanner, markers_of
from chairlift.text.tool_calls.values import (
    HALF,
    JsonScanner,
    NotReadable,
    by_schema,
    described_call,
    gemma_call,
    holds_json,
    json_object,
    json_value,
    python_calls,
    types_of,
)

__all__ = ["AnswerReader", "read_answer"]

_ENDS: Final = ("<|end|>", "<|return|>", "<|call|>", "<|start|>", "<|channel|>")
_HEADERS: Final = ("<|start|>", "<|channel|>")


class AnswerReader:
    """Reads one output. ``tools`` maps the names of the offered functions to the schemas of their arguments.

    Without ``tool_format`` no calls are recognised; without ``reasoning`` everything is content. ``inside``: the
    output begins inside the reasoning. ``hidden`` are texts of special tokens to remove from content and reasoning. If
    ``parallel`` is false, calls after the first are dropped. ``held``: a grammar holds the calls to their schemas, and
    lets arguments in tags be JSON, except for those that can only be texts. ``guaranteed``: the grammar allows the
    first mark of a call only before a call, so calls are returned while they grow. ``custom``: tools whose input is a
    text.
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
        guaranteed: bool = False,
        custom: Collection[str] = (),
    ) -> None:
        self._custom = custom
        self._format = tool_format
        self._reasoning = reasoning
        self._tools = tools or {}
        self._inside = inside or (reasoning is not None and reasoning.opened)
        needed = set(tool_format.markers).difference(tool_format.edges) if tool_format else set[str]()
        needed |= {reasoning.begin, reasoning.end} if reasoning else set()
        edges = tool_format.edges if tool_format else ()
        marks = (*needed, *edges)
        self._hidden = (*edges, *(text for text in hidden if not any(mark.startswith(text) for mark in marks)))
        self._parallel = parallel
        self._held_to_json = held
        self._input = self._text = TextScanner()
        """The whole output, and the text that is read now: the output, or the reasoning in it."""
        self._held: list[tuple[str, str, Mapping[str, Any], str]] | None = None
        """(text, function's name, arguments, id) of the calls that were read in the reasoning; None outside of it."""
        self._closed = False
        """Whether the reasoning has its end mark."""
        self._code = {CONTENT: CodeBlocks(), REASONING: CodeBlocks()}
        self._space = ""
        """White space that was read last. It is returned only if more text of the same kind follows."""
        self._kind = CONTENT
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
        self._growing: GrowingCalls | None = None
        """Reads calls while they grow; None if no grammar guarantees them."""
        if guaranteed and tool_format is not None:
            self._growing = GrowingCalls(tool_format, self._tools, custom, self._input, self._add)
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
        if self._space and self._kind == CONTENT and not self.num_calls and not self._is_harmony():
            self._events.append(Piece(self._kind, self._space))
            self._space = ""
        if num_unclosed := self._code[CONTENT].num_unclosed:
            self._events += [
                Broken("the call is in code that has no end (a fence or a backtick before it)")
            ] * num_unclosed
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
        """Events since the last call."""
        events = joined(self._events)
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
                self._code[kind].note_call()
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
            self._emit(CONTENT, space)
            return
        self._spans.append(begin)
        yield from self._reason(form.end)
        self._spans.append(text.num_bytes)
        self._emit(CONTENT, "")
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
        while form is not None and (marker := (yield from self._stream(REASONING, form.begins))):
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
                self._emit(REASONING, "".join(written for written, *_ in held) + rest)
            else:
                for _, name, arguments, call_id in held:
                    self._commit(name, arguments, call_id)
                self._emit(REASONING, rest if reason else "")
            text.record = None
            broken += [reason] if reason else []
        if form is None:
            yield from self._stream(REASONING, ())
        if not self._closed:
            self._events += map(Broken, broken)

    def _whole(self) -> Reading[None]:
        """Read the whole output: reasoning, then content and calls."""
        yield from self._think()
        form = self._format
        if form is None:
            yield from self._stream(CONTENT, ())
            return
        if not form.begins:
            yield from self._message(form)
        while marker := (yield from self._stream(CONTENT, form.begins)):
            self._text.record = [marker]
            if not (yield from self._grows(marker)):
                yield from self._try(_BODIES[form.body](self, form, marker))

    # --- calls ------------------------------------------------------------------------------------------------------

    def _try(self, body: Reading[None]) -> Reading[None]:
        """Read calls with ``body``. If they are invalid, their text is returned as content."""
        try:
            yield from body
            self._text.record = None
        except NotReadable as error:
            self._emit(CONTENT, self._text.take_record())
            if str(error):
                self._events.append(Broken(str(error)))

    def _may_grow(self) -> bool:
        """Whether the next call outside of the reasoning is returned while it grows."""
        return self._growing is not None and (self._parallel or not self.num_calls)

    def _grows(self, marker: str) -> Reading[bool]:
        """Read the calls after ``marker`` while they grow. Returns False, and reads nothing, if no grammar guarantees
        them."""
        if self._growing is None or not self._may_grow():
            return False
        return (yield from self._growing.series(marker))

    def _add(self, event: Event) -> None:
        """Take an event of a call that grows."""
        if isinstance(event, CallBegun):
            self._begin_call()
        self._events.append(event)

    def _begin_call(self) -> None:
        if self._kind == CONTENT:
            self._space = ""
            self._at_start = True
        self.num_calls += 1

    def _commit(self, name: str, arguments: Mapping[str, Any], call_id: str = "") -> None:
        """Return a complete call as an event. In reasoning, hold it back."""
        if self._held is not None:
            self._held.append((self._text.take_record(), name, arguments, call_id))
            self._text.record = []
            return
        self._text.record = []
        if self.num_calls and not self._parallel:
            if self._kind == CONTENT:
                self._space = ""
                self._at_start = True
            self._num_left_out += 1
            return
        self._begin_call()
        is_custom = name in self._custom
        written = HALF.sub("\ufffd", next(iter(arguments.values()))) if is_custom else json_text(arguments)
        self._events += [CallBegun(name, call_id, is_custom), CallPiece(written), CallEnded()]

    def _fit(self, name: str, arguments: Mapping[str, Any]) -> str:
        """The tool's name. Raises NotReadable for a custom tool whose arguments are not one text."""
        if name in self._custom and [type(value) for value in arguments.values()] != [str]:
            raise NotReadable(f"the input of {name[:64]} is no single text")
        return name

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

    def _from_json(self, value: Any) -> tuple[str, dict[str, Any]]:
        """(function's name, arguments) of the call that a JSON value describes. Raises NotReadable."""
        name, arguments = described_call(value, keyed=self._format is not None and self._format.keyed)
        return self._fit(self._tool(name), arguments), arguments

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
            if "{" in call_id or any(mark in call_id for mark in form.begins):
                raise NotReadable(f"{form.name_ends[0]} does not follow the id of the call")
        if form.numbered and written.strip().rpartition(":")[2].isdigit():
            call_id = written.strip()
        yield from text.skip_space()
        arguments = json_object((yield from text.json()))
        if form.call_end and (yield from text.skip_space()) and not (yield from text.take((form.call_end,))):
            raise NotReadable(f"{form.call_end} does not follow the arguments")
        self._commit(self._fit(name, arguments), arguments, call_id.strip())

    def _tagged_body(self, form: ToolFormat, marker: str) -> Reading[None]:
        yield from self._series(form, marker, self._tagged_call)

    def _tagged_call(self, form: ToolFormat) -> Reading[None]:
        text = self._text
        yield from text.skip_space()
        written, _ = yield from text.word(form.name_ends, keep=(form.key, form.call_end))
        name = self._tool(written)
        if form.head_end and not (yield from text.word((form.head_end,)))[0].isdigit():
            raise NotReadable("the call has no number")
        arguments = dict[str, Any]()
        while True:
            yield from text.skip_space()
            mark = yield from text.take((form.key, form.call_end))
            if not mark and form.section_end and (yield from text.peek((form.section_end,))):
                break  # the end of the section also ends the call: all arguments before it are complete
            if not mark:
                raise NotReadable(CUT_OFF if text.ended else "there is text between the arguments")
            if mark == form.call_end:
                break
            key, _ = yield from text.word((form.key_end,))
            if form.key in key or form.value_end in key:
                raise NotReadable(f"{form.key_end} does not follow the name of an argument")
            key = form.plain_key(key)
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
        self._commit(self._fit(name, arguments), arguments)

    def _elements_body(self, form: ToolFormat, marker: str) -> Reading[None]:
        yield from self._series(form, marker, self._elements_call)

    def _elements_call(self, form: ToolFormat) -> Reading[None]:
        written, _ = yield from self._text.word(form.name_ends)
        name = self._tool(written)
        arguments = element_arguments((yield from self._text.until((form.call_end,))), form.tag_mark, self._tools[name])
        self._commit(self._fit(name, arguments), arguments)

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
        if form.key in value and not self._held_to_json and not holds_json(value):
            raise NotReadable(f"{form.value_end} is missing before the next {form.key}")
        if is_json:
            return json_value(value.strip())
        if form.own_line:
            value = value.removeprefix("\n").removesuffix("\n")
        return value if how == "text" else by_schema(value, schema, self._tools[name])

    def _python_body(self, form: ToolFormat, marker: str) -> Reading[None]:
        written = yield from self._text.until((form.section_end,))
        calls = python_calls(written, raw=form.raw_text, listed=form.listed)
        for name, arguments in [(self._fit(self._tool(each), given), given) for each, given in calls]:
            self._commit(name, arguments)

    def _gemma_body(self, form: ToolFormat, marker: str) -> Reading[None]:
        written = yield from self._text.until((form.section_end,))
        name, arguments = gemma_call(written.strip().removeprefix(form.prefix), form.quote)
        self._commit(self._fit(self._tool(name), arguments), arguments)

    # --- answers that are a call as a whole -------------------------------------------------------------------------

    def _message(self, form: ToolFormat) -> Reading[None]:
        """Read a message that consists of calls only. Any other message is content, even if it is JSON."""
        text = self._text
        text.record = []
        reason = ""
        while (yield from text.skip_space()) and self._hidden:
            if not (yield from text.take(self._hidden)):
                break
        if (yield from self._grows("")):
            return
        try:
            calls = yield from self._calls_of_message(self._hidden)
        except NotReadable as error:
            reason = str(error)
        else:
            for name, arguments in calls:
                self._commit(name, arguments)
            text.record = None
            return
        written = text.take_record()
        self._emit(CONTENT, written)
        if reason and (self._names_call(written) or "is none of the tools" in reason):
            self._events.append(Broken(reason))
        if not written.strip():
            yield from self._prose()

    def _prose(self) -> Reading[None]:
        """Read a message that does not begin with a call. A call in it is text, with a reason."""
        text = self._text
        while marker := (yield from self._stream(CONTENT, ("{", "["))):
            text.record = []
            text.rest = marker + text.rest[text.at :]
            text.at = 0
            text.num_bytes -= 1
            reason = "text comes before the call"
            try:
                yield from self._calls_of_message(())
            except NotReadable as error:
                reason = str(error)
            written = text.take_record()
            self._emit(CONTENT, written)
            if reason and self._names_call(written):
                self._events.append(Broken(reason))

    def _names_call(self, written: str) -> bool:
        """Whether a text looks like a call of one of the tools."""
        begin = written.strip()[:400]
        return any(f'"{name}"' in begin or f"{name}(" in begin for name in self._tools)

    def _calls_of_message(self, edges: tuple[str, ...]) -> Reading[list[tuple[str, dict[str, Any]]]]:
        """Read all calls of a message: JSON objects, a JSON list of them, or a list of Python calls. ``edges`` may
        follow them. Raises NotReadable, without a reason if the message cannot be a call."""
        text = self._text
        sign = yield from text.peek(("{", "["))
        if not sign:
            raise NotReadable("")
        if sign == "{":
            return (yield from self._json_calls(edges, (";", ",", *edges)))
        before = len(text.record or ())
        text.advance(text.at + 1)
        yield from text.skip_space()
        if (yield from text.peek(("{",))):
            return (yield from self._json_calls(edges, (",",), "]"))
        name, _ = yield from text.word(("(",), max_chars=192)
        if not name.replace("_", "a").replace(".", "a").replace("-", "a").isalnum():
            raise NotReadable("")
        self._tool(name)
        while (yield from text.more()):
            text.advance(len(text.rest))
        text.advance(len(text.rest))
        written = "".join((text.record or [])[before:]).strip()
        for edge in edges:
            written = written.removesuffix(edge).strip()
        return [(self._fit(self._tool(each), given), given) for each, given in python_calls(written)]

    def _call_value(self, value: Any) -> tuple[str, dict[str, Any]]:
        if not isinstance(value, dict) or not set(value) <= {"type", "id", "name", "parameters", "arguments"}:
            raise NotReadable("it describes no call")
        if not isinstance(value.get("parameters", value.get("arguments")), dict):
            raise NotReadable("it describes no call")
        return self._from_json(value)

    def _json_calls(
        self, edges: tuple[str, ...], between: tuple[str, ...], end: str = ""
    ) -> Reading[list[tuple[str, dict[str, Any]]]]:
        """Read JSON objects that are calls, with the texts ``between`` two of them, up to the text ``end`` and the end
        of the output."""
        text = self._text
        calls = []
        while True:
            calls.append(self._call_value(json_value((yield from text.json()))))
            while (yield from text.skip_space()) and (yield from text.take(between)):
                pass
            if end and (yield from text.take((end,))):
                while (yield from text.skip_space()) and edges and (yield from text.take(edges)):
                    pass
                between = ()
                end = ""
            if not (yield from text.skip_space()):
                if end:
                    raise NotReadable(CUT_OFF)
                return calls
            if not between or not (yield from text.peek(("{",))):
                raise NotReadable("text follows the call")

    # --- gpt-oss ----------------------------------------------------------------------------------------------------

    def _harmony(self) -> Reading[None]:
        """Read messages one after another, each with a header. Text before the first header is content."""
        text = self._text
        marker = yield from text.take((*_HEADERS, " to=", "to="))
        marker = marker or (yield from self._stream(CONTENT, _HEADERS))
        while marker:
            text.record = [marker]
            begin = text.num_bytes - len(marker)
            try:
                header, _ = yield from text.word(("<|message|>",), max_chars=400)
            except NotReadable as error:
                self._emit(CONTENT, text.take_record())
                self._events.append(Broken(f"a message has no text: {error}"))
                marker = yield from self._stream(CONTENT, _HEADERS)
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
            kind = REASONING if thinks else CONTENT
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
        return (yield from self._stream(CONTENT, _HEADERS))

    def _harmony_call(self, recipient: str) -> Reading[str]:
        text = self._text
        marker = ""
        growing = self._growing
        name = recipient.removeprefix("functions.")
        if growing is not None and self._may_grow() and name in self._tools:
            if (yield from growing.call(name)):
                yield from text.skip_space()
                marker = yield from text.take(_ENDS)
            if marker:
                return (yield from self._next_header(marker))
            return (yield from self._stream(CONTENT, _HEADERS))

        def body() -> Reading[None]:
            nonlocal marker
            name = self._tool(recipient)
            if not (yield from text.skip_space()):
                raise NotReadable(CUT_OFF)
            arguments = json_object((yield from text.json()))
            goes_on = yield from text.skip_space()
            marker = yield from text.take(_ENDS)
            if goes_on and not marker:
                raise NotReadable("text follows the arguments")
            self._commit(self._fit(name, arguments), arguments)

        yield from self._try(body())
        if marker:
            return (yield from self._next_header(marker))
        return (yield from self._stream(CONTENT, _HEADERS))


_BODIES: Final[Mapping[Body, Callable[[AnswerReader, ToolFormat, str], Reading[None]]]] = {
    Body.JSON: AnswerReader._json_body,
    Body.NAMED: AnswerReader._named_body,
    Body.TAGGED: AnswerReader._tagged_body,
    Body.ELEMENTS: AnswerReader._elements_body,
    Body.PYTHON: AnswerReader._python_body,
    Body.GEMMA: AnswerReader._gemma_body,
}


def read_answer(text: str, reader: AnswerReader) -> Answer:
    """Read a complete output with a new reader."""
    answer = Answer()
    answer.add(reader.feed(text))
    answer.add(reader.finish())
    return answer
