"""Turns outputs into the items of a response, and into the typed events of its stream.

The same builder makes both, so a stream's last event equals the response without streaming. The order of the events is
OpenAI's. First come ``response.created`` and ``.in_progress``. Each item then has ``output_item.added``, its parts and
pieces, and ``output_item.done``. The last event is ``response.completed``, ``.incomplete`` or ``.failed``.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

from chairlift.base.outputs import CompletionOutput, FinishReason
from chairlift.server.http.errors import ApiError
from chairlift.server.http.streaming import Meter, Usage, refuse_aborted
from chairlift.server.openai.chat import ARGUMENTS, chosen_logprob
from chairlift.server.openai.chat_reading import AnswerReading
from chairlift.server.openai.chat_run import ChatRun
from chairlift.server.openai.responses_types import (
    CARRIED_REASONING,
    CustomToolCall,
    FunctionCall,
    IncompleteDetails,
    InputTokensDetails,
    OutputMessage,
    OutputText,
    OutputTokensDetails,
    ReasoningItem,
    ReasoningText,
    Response,
    ResponseError,
    ResponseUsage,
)
from chairlift.text.tool_calls import CallBegun, CallEnded, CallPiece, Event, Piece

__all__ = ["EventFields", "ResponseBuilder"]

EventFields = dict[str, Any]
"""An event of a stream as JSON fields: type, number and contents."""

_encode: Final = msgspec.json.encode


class ResponseBuilder:
    """Builds a response from the content, reasoning and tool calls of an output, and yields the events of a stream."""

    def __init__(
        self,
        response: Response,
        run: ChatRun,
        meter: Meter,
        namespaces: Mapping[str, tuple[str, str]],
        *,
        carries_reasoning: bool,
    ) -> None:
        self.response = response
        self._carries_reasoning = carries_reasoning
        """Whether reasoning items have their text in ``encrypted_content``, too."""
        self._namespaces = namespaces
        """Name of a tool in the chat -> (its namespace, its name there)."""
        self._reading: AnswerReading = run.reading()
        self._counts = run.plan.reasoning is not None
        self._top = run.chat.top_logprobs or 0
        self._texts = run.texts
        self._meter = meter
        self._special = run.texts.tokenizer.special_ids if run.texts.tokenizer else frozenset()
        """Ids of the tokenizer's special tokens, which have no text."""
        self._open: OutputMessage | ReasoningItem | None = None
        """The item that may still grow: further text of the same kind is added to it."""
        self._open_call: FunctionCall | CustomToolCall | None = None
        """The call that may still grow."""
        self._pieces: list[str] = []
        """Parts of the text of the item or the call that may still grow."""
        self._number = 0
        self._pending_logprobs: list[tuple[int, bytes]] = []
        """(token index, JSON of the token's log-probabilities) for tokens that are not in an event yet, because their
        text is incomplete."""
        self._logprobs: list[bytes] = []
        """JSON of the log-probabilities of the message that may still grow, one entry per token."""
        self._num_tokens = 0

    def begin(self) -> Iterator[EventFields]:
        """First events of a stream, before any output."""
        yield self._event("response.created", response=self.response)
        yield self._event("response.in_progress", response=self.response)

    def ping(self) -> EventFields:
        """An event that says nothing new. Clients count events, not comments, to notice that a stream is dead."""
        return self._event("response.in_progress", response=self.response)

    def new_events(self, answer: CompletionOutput) -> Iterator[EventFields]:
        """Events for the new part of an output. At the end of the output, the last item is closed and the response
        gets its status."""
        ended = answer.finish_reason is not None
        for index, entry in enumerate(answer.logprobs or (), start=self._num_tokens):
            if answer.token_ids[index - self._num_tokens] in self._special:
                continue
            self._pending_logprobs.append((index, _encode(chosen_logprob(entry, self._top, self._texts))))
        self._num_tokens += len(answer.token_ids)
        for event in self._reading.read(answer.text, answer.token_ids, ended):
            yield from self._read(event)
        if not ended:
            return
        refuse_aborted(answer)
        cut = answer.finish_reason is FinishReason.LENGTH
        yield from self._close("incomplete" if cut else "completed")
        if self._counts:
            self._meter.reasoning_tokens = self._reading.reasoning_tokens
        if self._reading.broken:
            self.response.tool_call_errors = self._reading.broken
        self.response.status = "incomplete" if cut else "completed"
        if cut:
            self.response.incomplete_details = IncompleteDetails(reason="max_output_tokens")
        else:
            self.response.completed_at = int(time.time())
        self.response.usage = _usage(self._meter.usage())

    def end(self) -> EventFields:
        """Last event of a stream; its type is the response's status."""
        return self._event(f"response.{self.response.status}", response=self.response)

    def failed(self, error: ApiError) -> EventFields:
        """Last event of a stream that ended with ``error``."""
        code = {400: "invalid_prompt", 429: "rate_limit_exceeded"}.get(error.status, "server_error")
        self.response.status = "failed"
        self.response.error = ResponseError(code=code, message=error.message)
        return self.end()

    def _read(self, event: Event) -> Iterator[EventFields]:
        if isinstance(event, CallBegun):
            yield from self._close("completed")
            yield self._begin_call(event)
        elif isinstance(event, CallPiece):
            self._pieces.append(event.text)
            is_custom = isinstance(self._open_call, CustomToolCall)
            field = "custom_tool_call_input" if is_custom else "function_call_arguments"
            for start in range(0, len(event.text), ARGUMENTS):
                piece = event.text[start : start + ARGUMENTS]
                yield self._event(f"response.{field}.delta", **self._location(), delta=piece)
        elif isinstance(event, CallEnded):
            yield from self._end_call("incomplete" if event.is_cut else "completed")
        elif isinstance(event, Piece):
            kind = ReasoningItem if event.kind == "reasoning" else OutputMessage
            if not isinstance(self._open, kind):
                yield from self._close("completed")
                yield from self._add(kind)
            self._pieces.append(event.text)
            fields: EventFields = {"delta": event.text}
            if kind is OutputMessage:
                fields["logprobs"] = self._new_logprobs()
            yield self._event(f"response.{self._part}.delta", **self._location(), content_index=0, **fields)

    def _add(self, kind: type[OutputMessage] | type[ReasoningItem]) -> Iterator[EventFields]:
        """Begin a message or reasoning item with an empty text part. Yields the events that announce it."""
        prefix = "msg" if kind is OutputMessage else "rs"
        self._open = kind(id=_new_id(prefix), status="in_progress", content=[])
        self.response.output.append(self._open)
        self._pieces = []
        self._logprobs = []
        yield self._event("response.output_item.added", output_index=self._index, item=self._open)
        part = OutputText(text="") if kind is OutputMessage else ReasoningText(text="")
        yield self._event("response.content_part.added", **self._location(), content_index=0, part=part)

    def _close(self, status: str) -> Iterator[EventFields]:
        item = self._open
        if item is None:
            return
        text = "".join(self._pieces)
        location = self._location()
        part: OutputText | ReasoningText
        fields: EventFields = {"text": text}
        if isinstance(item, OutputMessage):
            self._new_logprobs()
            part = OutputText(text=text, logprobs=self._written(self._logprobs))
            item.content = [part]
            fields["logprobs"] = part.logprobs
        else:
            part = ReasoningText(text=text)
            item.content = [part]
            if self._carries_reasoning:
                item.encrypted_content = CARRIED_REASONING + text
        item.status = status
        yield self._event(f"response.{self._part}.done", **location, content_index=0, **fields)
        yield self._event("response.content_part.done", **location, content_index=0, part=part)
        yield self._event("response.output_item.done", output_index=self._index, item=item)
        self._open = None

    def _begin_call(self, call: CallBegun) -> EventFields:
        namespace, name = self._namespaces.get(call.name, (msgspec.UNSET, call.name))
        item: FunctionCall | CustomToolCall
        if call.is_custom:
            item = CustomToolCall(id=_new_id("ctc"), call_id=call.id, namespace=namespace, name=name, input="")
        else:
            item = FunctionCall(
                id=_new_id("fc"), call_id=call.id, namespace=namespace, name=name, arguments="", status="in_progress"
            )
        self._open_call = item
        self._pieces = []
        self.response.output.append(item)
        return self._event("response.output_item.added", output_index=self._index, item=item)

    def _end_call(self, status: str) -> Iterator[EventFields]:
        item = self._open_call
        text = "".join(self._pieces)
        location = self._location()
        self._open_call = None
        if isinstance(item, CustomToolCall):
            item.input = text
            yield self._event("response.custom_tool_call_input.done", **location, input=text)
        elif item is not None:
            item.arguments = text
            item.status = status
            done = {"name": item.name, "arguments": text}
            yield self._event("response.function_call_arguments.done", **location, **done)
        yield self._event("response.output_item.done", output_index=self._index, item=item)

    def _new_logprobs(self) -> Any:
        """Log-probabilities of the new tokens that are not reasoning."""
        logprobs = [entry for index, entry in self._pending_logprobs if not self._reading.is_reasoning(index)]
        self._pending_logprobs = []
        self._logprobs += logprobs
        return self._written(logprobs)

    @staticmethod
    def _written(entries: list[bytes]) -> Any:
        return msgspec.Raw(b"[" + b",".join(entries) + b"]")

    @property
    def _part(self) -> str:
        return "output_text" if isinstance(self._open, OutputMessage) else "reasoning_text"

    @property
    def _index(self) -> int:
        return len(self.response.output) - 1

    def _location(self) -> EventFields:
        item = self._open_call or self._open
        return {"item_id": item.id if item else "", "output_index": self._index}

    def _event(self, kind: str, **fields: Any) -> EventFields:
        number = self._number
        self._number += 1
        return {"type": kind, "sequence_number": number, **fields}


def _usage(usage: Usage) -> ResponseUsage:
    details = usage.completion_tokens_details
    kept = usage.prompt_tokens_details.cache_write_tokens
    thought = 0
    if not isinstance(details, msgspec.UnsetType) and not isinstance(details.reasoning_tokens, msgspec.UnsetType):
        thought = details.reasoning_tokens
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokensDetails(
            cached_tokens=usage.prompt_tokens_details.cached_tokens,
            cache_write_tokens=0 if isinstance(kept, msgspec.UnsetType) else kept,
        ),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputTokensDetails(reasoning_tokens=thought),
        total_tokens=usage.total_tokens,
    )


def _new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(16)}"
