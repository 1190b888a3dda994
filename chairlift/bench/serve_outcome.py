"""One request of ``bench serve`` as the client sees it: when what came, and how it ended.

Tokens are counted as the server counts them where it says so with every chunk (``continuous_usage_stats``, which vLLM
introduced), else by chunks.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

__all__ = ["MOST_BYTES", "EventReader", "Outcome", "Status", "message_of"]

Status = str
"""``completed``, ``failed``, ``cancelled`` (the client left, as the trace says) or ``unfinished`` (Ctrl-C)."""

MOST_BYTES: Final = 1 << 20
"""Of an event of a stream, and of a reply that is none."""
_QUEUE: Final = ("front_door", "waiting_")
"""Where a Chairlift server says that the time before the first step went; docs/why-slow.md explains the causes."""
_MOST_MESSAGE: Final = 300
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e]+")


@dataclasses.dataclass(slots=True, kw_only=True)
class Outcome:
    """What became of one request. Times are seconds of the client's monotonic clock; 0: it did not come to that."""

    index: int
    """Place in the workload."""
    scheduled: float
    """When it was due; for one that had to wait for a free place or for the turn before it, the end of that wait."""
    wanted_tokens: int
    """Output tokens that were asked for."""
    prompt_tokens: int
    """As the server counts them, or as many as were asked for where it does not say."""
    held: bool = False
    """Whether it was held back, by the limit of concurrency or by an earlier turn."""
    start: float = 0.0
    headers: float = 0.0
    end: float = 0.0
    """Of the last chunk with a choice in it."""
    times: list[float] = dataclasses.field(default_factory=list)
    """When chunks with new tokens came."""
    counts: list[int] = dataclasses.field(default_factory=list)
    """New tokens of each."""
    completion_tokens: int | None = None
    """As the server counts them."""
    cached_tokens: int | None = None
    """Prompt tokens that the server did not have to compute, where it says so."""
    server_queue_ms: float | None = None
    """Milliseconds in the server before it began with the prompt, where it says so."""
    finish_reason: str | None = None
    status: Status = "unfinished"
    kind: str = ""
    """Of error; empty unless it failed. The same for the next."""
    message: str = ""

    @property
    def output_tokens(self) -> int:
        return sum(self.counts) if self.completion_tokens is None else self.completion_tokens

    @property
    def counted(self) -> bool:
        """Whether it is known which chunk had how many tokens. An end-of-sequence token has no chunk of its own."""
        return self.completion_tokens is not None and 0 <= self.completion_tokens - sum(self.counts) <= 1

    @property
    def ttft(self) -> float:
        """Seconds from sending to the first token."""
        return self.times[0] - self.start

    @property
    def e2el(self) -> float:
        """Seconds from sending to the end of the answer."""
        return self.end - self.start

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None for an answer of one token."""
        return (self.end - self.times[0]) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    @property
    def itls(self) -> list[float]:
        """Seconds between tokens: of n that came in one chunk, n - 1 came 0 s after the one before.

        Between chunks, where it is not known how many tokens they had (``counted``).
        """
        gaps: list[float] = [0.0] * (self.counts[0] - 1) if self.counts and self.counted else []
        for before, now, count in zip(self.times, self.times[1:], self.counts[1:], strict=False):
            gaps.append(now - before)
            gaps += [0.0] * (count - 1 if self.counted else 0)
        return gaps

    def fail(self, kind: str, message: str) -> None:
        """It is not answered."""
        self.status, self.kind, self.message = "failed", kind, _CONTROL.sub(" ", message)[:_MOST_MESSAGE].strip()


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    def has_text(self) -> bool:
        delta = self.delta
        return bool(self.text or (delta and (delta.content or delta.reasoning_content or delta.reasoning)))


class _Timing(msgspec.Struct):
    causes_ms: dict[str, float] = msgspec.field(default_factory=dict)


class _Event(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None
    timing: _Timing | None = None


_decode: Final = msgspec.json.Decoder(_Event).decode


class EventReader:
    """Reads the server-sent events of one answer into its :class:`Outcome`."""

    def __init__(self, outcome: Outcome) -> None:
        self.done = False
        """Nothing more is expected: the stream's own end mark, or an error."""
        self._outcome = outcome
        self._rest = b""
        self._usage_per_chunk = False

    def feed(self, data: bytes, now: float) -> None:
        """Take what was read from the connection at time ``now``."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and not self.done:
                self._event(line[5:].strip(), now)
        if len(self._rest) > MOST_BYTES and not self.done:
            self._garbage("an event without an end")

    def close(self) -> None:
        """The connection has ended."""
        outcome = self._outcome
        if outcome.status != "unfinished":
            return
        if not outcome.counts and outcome.completion_tokens != 0 and outcome.finish_reason is None:
            kind = "no answer" if self.done else "cut stream"
            outcome.fail(kind, "the stream ended without a token")
        elif not self.done and outcome.finish_reason is None:
            outcome.fail("cut stream", f"the stream ended after {sum(outcome.counts)} tokens, without an end mark")
        elif not outcome.counts:
            outcome.fail("no answer", "the answer has no token")
        else:
            outcome.status = "completed"

    def _event(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self.done = True
            return
        try:
            event = _decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            self._garbage(data[:80].decode("utf-8", "replace"))
            return
        if event.error is not None:
            self._outcome.fail("error in the stream", message_of({"error": event.error}) or "without a message")
            self.done = True
            return
        outcome, choices = self._outcome, event.choices or []
        self._count(event.usage, choices, now)
        if choices:
            outcome.end = now
            outcome.finish_reason = choices[0].finish_reason or outcome.finish_reason
        if event.timing is not None:
            waits = [ms for cause, ms in event.timing.causes_ms.items() if cause.startswith(_QUEUE)]
            outcome.server_queue_ms = sum(waits)

    def _count(self, usage: _Usage | None, choices: Sequence[_Choice], now: float) -> None:
        outcome = self._outcome
        new = 0
        if usage is not None:
            details = usage.prompt_tokens_details
            outcome.prompt_tokens = usage.prompt_tokens or outcome.prompt_tokens
            if details is not None and details.cached_tokens is not None:
                outcome.cached_tokens = details.cached_tokens
            if usage.completion_tokens is not None:
                outcome.completion_tokens = usage.completion_tokens
                self._usage_per_chunk |= bool(choices)
        if self._usage_per_chunk:
            new = (outcome.completion_tokens or 0) - sum(outcome.counts) if choices else 0
        elif any(choice.has_text() for choice in choices):
            new = 1
        if new > 0:
            outcome.times.append(now)
            outcome.counts.append(new)

    def _garbage(self, seen: str) -> None:
        self._outcome.fail("not OpenAI's format", f"an event is no such chunk: {seen}")
        self.done = True


def message_of(body: Mapping[str, Any]) -> str:
    """The text of an error object, OpenAI's or one of its kind; empty where there is none."""
    error = body.get("error", body.get("detail"))
    message = error.get("message") if isinstance(error, dict) else error if error is not None else body.get("message")
    return "" if message is None else message if isinstance(message, str) else json.dumps(message)
