"""Turns answers into the items of a response, and into the typed events of its stream.

One builder makes both, so a stream's last event equals the whole reply. The order of the events is OpenAI's:
``response.created`` and ``.in_progress``; for each item ``output_item.added``, its parts and pieces, and
``output_item.done``; then ``response.completed``, ``.incomplete`` or ``.failed``.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from chairlift.outputs import CompletionOutput, FinishReason
from chairlift.server.chat import ARGUMENTS, chosen_logprob
from chairlift.server.chat_reading import AnswerReading
from chairlift.server.chat_run import ChatRun
from chairlift.server.errors import ApiError
from chairlift.server.responses_types import (
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
from chairlift.server.streaming import Meter, Usage
from chairlift.tool_calls import Call, Event, Piece

__all__ = ["ResponseBuilder", "Told"]

Told = dict[str, Any]
"""One event: its type, its number and its fields."""

_encode: Final = msgspec.json.encode


class ResponseBuilder:
    """Builds a response from the content, reasoning and calls of its answer, and yields the events of a stream."""

    def __init__(self, response: Response, run: ChatRun, meter: Meter) -> None:
        self.response = response
        self._reading: AnswerReading = run.reading()
        self._counts = run.plan.reasoning is not None
        self._top, self._texts, self._meter = run.chat.top_logprobs or 0, run.texts, meter
        self._special = run.texts.tokenizer.special_ids if run.texts.tokenizer else frozenset()
        """Tokens without text."""
        self._open: OutputMessage | ReasoningItem | None = None
        """The open item, to which the next piece of its kind is added."""
        self._pieces: list[str] = []
        """Text of the open item so far."""
        self._number = 0
        self._unsaid: list[tuple[int, bytes]] = []
        """(token, JSON of its log-probabilities) of tokens whose text is not complete yet."""
        self._logprobs: list[bytes] = []
        """JSON of the log-probabilities in the open message."""
        self._num_tokens = 0

    def begin(self) -> Iterator[Told]:
        """First events, before there is any output."""
        yield self._event("response.created", response=self.response)
        yield self._event("response.in_progress", response=self.response)

    def news(self, answer: CompletionOutput) -> Iterator[Told]:
        """Events of the new part of an answer. At its end the last item is closed, and the response gets its status."""
        ended = answer.finish_reason is not None
        for place, entry in enumerate(answer.logprobs or (), start=self._num_tokens):
            if answer.token_ids[place - self._num_tokens] in self._special:
                continue
            self._unsaid.append((place, _encode(chosen_logprob(entry, self._top, self._texts))))
        self._num_tokens += len(answer.token_ids)
        for event in self._reading.read(answer.text, answer.token_ids, ended):
            yield from self._read(event)
        if not ended:
            return
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

    def end(self) -> Told:
        """Last event of a response with a status."""
        return self._event(f"response.{self.response.status}", response=self.response)

    def failed(self, error: ApiError) -> Told:
        """Last event of a response that failed."""
        code = {400: "invalid_prompt", 429: "rate_limit_exceeded"}.get(error.status, "server_error")
        self.response.status = "failed"
        self.response.error = ResponseError(code=code, message=error.message)
        return self.end()

    def _read(self, event: Event) -> Iterator[Told]:
        if isinstance(event, Call):
            yield from self._close("completed")
            yield from self._call(event)
        elif isinstance(event, Piece):
            kind = ReasoningItem if event.kind == "reasoning" else OutputMessage
            if not isinstance(self._open, kind):
                yield from self._close("completed")
                yield from self._add(kind)
            self._pieces.append(event.text)
            told: Told = {"delta": event.text}
            if kind is OutputMessage:
                told["logprobs"] = self._said()
            yield self._event(f"response.{self._part}.delta", **self._place(), content_index=0, **told)

    def _add(self, kind: type[OutputMessage] | type[ReasoningItem]) -> Iterator[Told]:
        """Open an item with an empty part."""
        prefix = "msg" if kind is OutputMessage else "rs"
        self._open = kind(id=_new_id(prefix), status="in_progress", content=[])
        self.response.output.append(self._open)
        self._pieces, self._logprobs = [], []
        yield self._event("response.output_item.added", output_index=self._index, item=self._open)
        part = OutputText(text="") if kind is OutputMessage else ReasoningText(text="")
        yield self._event("response.content_part.added", **self._place(), content_index=0, part=part)

    def _close(self, status: str) -> Iterator[Told]:
        item = self._open
        if item is None:
            return
        text, place = "".join(self._pieces), self._place()
        part: OutputText | ReasoningText
        said: Told = {"text": text}
        if isinstance(item, OutputMessage):
            self._said()
            part = OutputText(text=text, logprobs=self._written(self._logprobs))
            item.content = [part]
            said["logprobs"] = part.logprobs
        else:
            part = ReasoningText(text=text)
            item.content = [part]
        item.status = status
        yield self._event(f"response.{self._part}.done", **place, content_index=0, **said)
        yield self._event("response.content_part.done", **place, content_index=0, part=part)
        yield self._event("response.output_item.done", output_index=self._index, item=item)
        self._open = None

    def _call(self, call: Call) -> Iterator[Told]:
        item = FunctionCall(id=_new_id("fc"), call_id=call.id, name=call.name, arguments="", status="in_progress")
        self.response.output.append(item)
        place = {"item_id": item.id, "output_index": self._index}
        yield self._event("response.output_item.added", output_index=self._index, item=item)
        for start in range(0, len(call.arguments), ARGUMENTS):
            piece = call.arguments[start : start + ARGUMENTS]
            yield self._event("response.function_call_arguments.delta", **place, delta=piece)
        item.arguments, item.status = call.arguments, "completed"
        done = {"name": call.name, "arguments": call.arguments}
        yield self._event("response.function_call_arguments.done", **place, **done)
        yield self._event("response.output_item.done", output_index=self._index, item=item)

    def _said(self) -> Any:
        """Log-probabilities of new tokens that are no reasoning."""
        told = [entry for place, entry in self._unsaid if not self._reading.is_reasoning(place)]
        self._unsaid = []
        self._logprobs += told
        return self._written(told)

    @staticmethod
    def _written(entries: list[bytes]) -> Any:
        return msgspec.Raw(b"[" + b",".join(entries) + b"]")

    @property
    def _part(self) -> str:
        return "output_text" if isinstance(self._open, OutputMessage) else "reasoning_text"

    @property
    def _index(self) -> int:
        return len(self.response.output) - 1

    def _place(self) -> Told:
        return {"item_id": self._open.id if self._open else "", "output_index": self._index}

    def _event(self, kind: str, **told: Any) -> Told:
        number = self._number
        self._number += 1
        return {"type": kind, "sequence_number": number, **told}


def _usage(usage: Usage) -> ResponseUsage:
    details = usage.completion_tokens_details
    thought = 0
    if not isinstance(details, msgspec.UnsetType) and not isinstance(details.reasoning_tokens, msgspec.UnsetType):
        thought = details.reasoning_tokens
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokensDetails(cached_tokens=usage.prompt_tokens_details.cached_tokens),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputTokensDetails(reasoning_tokens=thought),
        total_tokens=usage.total_tokens,
    )


def _new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(16)}"
