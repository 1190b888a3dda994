"""Client of ``bench serve``: sends requests to an OpenAI-compatible server, and measures when the answers arrive.

The time of a chunk is the time when it was read from the socket, before it is parsed.
"""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import json
import os
import re
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Annotated, Any, Final

import aiohttp
import msgspec

from chairlift.errors import ConfigError
from chairlift_lab.bench.serve_run import LoadOutcome, PromptDialect, Target
from chairlift_lab.replay.traced_request import TracedRequest
from chairlift_lab.workload.texts import Said

__all__ = ["EventReader", "NotReadyError", "Server", "clock", "connect"]

clock: Final = time.perf_counter

_MAX_BYTES: Final = 1 << 20
"""Maximum number of bytes of one event of a stream, and of a response that is not a stream."""
_QUEUE: Final = ("front_door", "waiting_")
"""Prefixes of the causes that a Chairlift server reports for time spent waiting in a queue; see docs/why-slow.md."""
_VOCABULARIES: Final = (8000, 250)
"""Vocabulary sizes from which the token ids of prompts are drawn. The second is for models whose tokens are bytes."""
_RULER: Final = (8, 136)
"""Numbers of words in the two prompts that the client sends to measure how many tokens a word has."""
_MAX_MESSAGE: Final = 300
_SHARES: Final = re.compile(r"^chairlift:collective_share\{(.*)\} (\d\S*)", re.MULTILINE)
"""Samples of the metric: (labels, value)."""
_REFUSALS: Final = (400, 404, 405, 415, 422, 500, 501)
"""HTTP statuses with which servers reject requests with unknown fields."""


class NotReadyError(ConfigError):
    """Raised when a server does not answer yet, or is still loading its model."""


class Server(Target):
    """Connection to an OpenAI-compatible server, from :func:`connect`.

    Call :meth:`learn` first; it raises ConfigError when the server cannot be measured.
    """

    def __init__(self, session: aiohttp.ClientSession, url: str, timeout: float) -> None:
        super().__init__(url=url)
        self.is_ours = False
        self._session = session
        self._timeout = timeout
        path = url.rstrip("/")
        self._root = path if re.search(r"/v\d+\Z", path) else f"{path}/v1"

    def body(
        self,
        request: TracedRequest,
        index: int,
        temperature: float,
        promises: bool = False,
        said: Said | None = None,
    ) -> bytes:
        """Body of an HTTP request for :meth:`send`.

        ``said`` is the content of the request; None: a generated prompt of the request's length. ``promises``: whether
        to send the service class, the tenant and the latency targets.
        """
        dialect = self.dialect
        prompt = dialect.prompt(request, index) if said is None else said.text
        fields: dict[str, Any] = {
            "model": self.model,
            "max_tokens": request.output_tokens,
            "temperature": temperature,
            "stream": True,
        }
        if dialect.chat and said is not None and said.messages:
            fields["messages"] = said.messages
        elif dialect.chat:
            fields["messages"] = [{"role": "user", "content": prompt}]
        else:
            fields["prompt"] = prompt
        if dialect.ignore_eos:
            fields["ignore_eos"] = True
        if dialect.usage:
            fields["stream_options"] = {"include_usage": True}
            if dialect.continuous_usage:
                fields["stream_options"]["continuous_usage_stats"] = True
        if dialect.timing:
            fields["return_timing"] = True
        if promises:
            targets = {name: getattr(request, name) for name in _PROMISES} | {"user": request.tenant}
            fields |= {name: value for name, value in targets.items() if value}
        return msgspec.json.encode(fields)

    async def send(self, body: bytes, outcome: LoadOutcome, cancel_ms: float | None = None) -> None:
        """Send a request, and read the answer to its end or until ``cancel_ms`` ms have passed.

        The result, or the error, is stored in ``outcome``. Raises nothing.
        """
        leaves = cancel_ms is not None and cancel_ms / 1000 < self._timeout
        seconds = cancel_ms / 1000 if cancel_ms is not None and leaves else self._timeout
        path = "/chat/completions" if self.dialect.chat else "/completions"
        outcome.start = clock()
        try:
            request = self._session.post(self._root + path, data=body, trace_request_ctx=outcome)
            async with asyncio.timeout(seconds), request as reply:
                outcome.headers = clock()
                if reply.status != 200:
                    text = await reply.content.read(1 << 16)
                    outcome.fail(f"HTTP {reply.status}", _message_in(text) or str(reply.reason))
                    return
                reader = EventReader(outcome)
                async for data in reply.content.iter_any():
                    reader.feed(data, clock())
                    if reader.done:
                        break
                reader.close()
        except TimeoutError:
            if leaves:
                outcome.status = "cancelled"
            else:
                outcome.fail("timeout", f"no end within {self._timeout:g} s; {sum(outcome.counts)} tokens came")
        except (aiohttp.ClientError, OSError, ValueError) as error:
            outcome.fail(*_explain(error, begun=bool(outcome.headers)))
        finally:
            if outcome.status != "completed":
                outcome.end = clock()

    async def collective_share(self) -> float | None:
        """Share of the last steps' time in which processes of the model waited for each other, as ``/metrics`` says;
        the largest of the replicas. None if it says nothing."""
        if not self.is_ours:
            return None
        try:
            url = f"{self._root.rpartition('/')[0]}/metrics"
            async with asyncio.timeout(self._timeout), self._session.get(url) as reply:
                text = (await reply.content.read(_MAX_BYTES)).decode("utf-8", "replace")
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError):
            return None
        named = f'model_name="{self.model}"'
        return max((float(value) for labels, value in _SHARES.findall(text) if named in labels), default=None)

    # -- properties of the server ----------------------------------------------------------------------------------

    async def learn(self, model: str | None, *, chat: bool, ignore_eos: bool) -> None:
        """Determine the server's model and the request fields that it supports. A message about each field that it does
        not support is added to ``notes``.

        Raises ConfigError when the server cannot be measured.
        """
        await self._models(model)
        full = PromptDialect(
            chat=chat, vocab_size=0 if chat else _VOCABULARIES[0], ignore_eos=ignore_eos, timing=self.is_ours
        )
        self.dialect = await self._accepted(full)
        self.backend = "openai-chat" if chat else "openai"
        notes = self.notes = []
        if not self.dialect.vocab_size:
            notes += await self._measure_words()
            if not chat:
                notes.append("it takes no token ids: prompts are text, and their lengths what the server counts")
        if ignore_eos and not self.dialect.ignore_eos:
            notes.append("it refuses ignore_eos: answers may end before the requested length")
        if not self.dialect.usage:
            notes.append("it refuses stream_options: tokens are counted by chunks")

    async def _models(self, model: str | None) -> None:
        try:
            async with asyncio.timeout(self._timeout), self._session.get(f"{self._root}/models") as reply:
                status = reply.status
                text = await reply.content.read(_MAX_BYTES)
        except TimeoutError:
            raise ConfigError(f"{self.url} has not answered for {self._timeout:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            _, reason = _explain(error, begun=False)
            raise NotReadyError(
                f"no server answers at {self.url} ({reason}); start one with: chairlift serve"
            ) from None
        if status not in (404, 405) or model is None:  # some servers have no list of models
            _check_status(self.url, status, _message_in(text))
        listed = _parsed(text).get("data")
        cards = [card for card in listed if isinstance(card, dict)] if isinstance(listed, list) else []
        cards = [card for card in cards if isinstance(card.get("id"), str)]
        if model is None and not cards:
            raise ConfigError(f"{self.url} lists no models at {self._root}/models; name one with --model")
        named = [card for card in cards if card["id"] == model]
        if model is not None and cards and not named:
            raise ConfigError(f"{self.url} has no model {model!r}; it has {', '.join(card['id'] for card in cards)}")
        card: dict[str, Any]
        if named:
            card = named[0]
        elif cards:
            card = cards[0]
        else:
            card = {"id": model}
        self.model, self.owner = str(card["id"]), str(card.get("owned_by") or "")
        self.is_ours = self.owner == "chairlift"
        room = card.get("max_model_len")
        self.max_model_len = room if isinstance(room, int) and room > 1 else None

    async def _accepted(self, full: PromptDialect) -> PromptDialect:
        """Find the form of requests with as many of the fields of ``full`` as the server accepts.

        The client tries all fields, then all but one, then fewer and fewer fields.
        """
        changes: list[dict[str, Any]] = []
        if full.vocab_size:
            changes += [{"vocab_size": size} for size in (*_VOCABULARIES[1:], 0)]
        changes.append({"continuous_usage": False})
        changes += [{"ignore_eos": False}] if full.ignore_eos else []
        changes.append({"usage": False, "continuous_usage": False})
        together = [dict(pair for each in changes[:end] for pair in each.items()) for end in range(2, len(changes) + 1)]
        for change in [{}, *changes, *together]:
            tried = dataclasses.replace(full, **change)
            last = await self._try(tried)
            if not last.kind:
                return tried
        raise ConfigError(f"{self.url} refuses even the simplest request: {last.kind}: {last.message}")

    async def _try(self, dialect: PromptDialect) -> LoadOutcome:
        """Send a short request in the form ``dialect``. If the server rejects the form, the outcome's ``kind`` is not
        empty.

        Raises ConfigError for errors that no other form would avoid.
        """
        self.dialect = dialect
        outcome = await self._ask(12, 2)
        status = int(outcome.kind.removeprefix("HTTP ")) if outcome.kind.startswith("HTTP ") else 0
        if status and status not in _REFUSALS:
            _check_status(self.url, status, outcome.message)
        elif outcome.kind and outcome.kind != "error in the stream" and not status:
            unreachable = outcome.kind in ("connection refused", "connection closed")
            raise (NotReadyError if unreachable else ConfigError)(
                f"{self.url} does not answer: {outcome.kind}: {outcome.message}"
            )
        return outcome

    async def _measure_words(self) -> list[str]:
        """Measure with two prompts how many tokens a word has. Returns notes for the user."""
        self.dialect = dataclasses.replace(self.dialect, words=(0.0, 1.0))
        short, long = [await self._ask(words, 1) for words in _RULER]
        if short.completion_tokens is None or long.prompt_tokens <= short.prompt_tokens:
            return ["it does not count prompt tokens: a prompt has one word for each token that was wanted"]
        per_word = (long.prompt_tokens - short.prompt_tokens) / (_RULER[1] - _RULER[0])
        words = (short.prompt_tokens - per_word * _RULER[0], per_word)
        self.dialect = dataclasses.replace(self.dialect, words=words)
        return []

    async def _ask(self, prompt_tokens: int, output_tokens: int) -> LoadOutcome:
        request = TracedRequest(arrival=0.0, prompt_tokens=prompt_tokens, output_tokens=output_tokens)
        outcome = LoadOutcome(index=0, scheduled=clock(), wanted_tokens=output_tokens, prompt_tokens=prompt_tokens)
        await self.send(self.body(request, 0, 0.0), outcome)
        return outcome


_PROMISES: Final = ("priority", "service_tier", "ttft_ms", "tpot_ms", "deadline_ms")


@asynccontextmanager
async def connect(urls: Sequence[str], api_key: str | None, timeout: float) -> AsyncIterator[list[Server]]:
    """Context with a :class:`Server` for each URL. ``timeout``: maximum time of a request in seconds.

    Every request opens a new connection.
    """
    headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
    if api_key is not None:
        headers["Authorization"] = f"Bearer {api_key}"
    trace = aiohttp.TraceConfig()
    trace.on_connection_create_start.append(_note_start)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    unlimited = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(
        connector=connector, timeout=unlimited, headers=headers, trace_configs=[trace]
    ) as session:
        yield [Server(session, url, timeout) for url in urls]


async def _note_start(session: aiohttp.ClientSession, context: SimpleNamespace, params: Any) -> None:
    """Record the start time of a request: the moment before its connection is opened, so that the client's own work is
    not counted."""
    if isinstance(context.trace_request_ctx, LoadOutcome):
        context.trace_request_ctx.start = clock()


def _check_status(url: str, status: int, message: str) -> None:
    """Raise ConfigError for an HTTP status with which no measurement is possible."""
    if status == 200:
        return
    if status in (401, 403):
        raise ConfigError(
            f"{url} needs an API key, or does not accept this one; give it with --api-key-file FILE ({message})"
        )
    if status in (429, 503):
        raise (NotReadyError if status == 503 else ConfigError)(
            f"{url} takes no requests now ({status}: {message}); try again later"
        )
    raise ConfigError(f"{url} answered {status}: {message or 'without a reason'}; is it an OpenAI-compatible server?")


def _explain(error: Exception, *, begun: bool) -> tuple[str, str]:
    """(kind, message) of a connection error. ``begun``: whether the response had begun."""
    number = getattr(error, "errno", None)
    if number == errno.ECONNREFUSED:
        return "connection refused", os.strerror(errno.ECONNREFUSED)
    if number in (errno.EMFILE, errno.ENFILE):
        return "too many connections", "this machine lets the client open no more; lower the rate, or raise ulimit -n"
    if begun:
        return "cut stream", str(error) or type(error).__name__
    if isinstance(error, aiohttp.ServerDisconnectedError) or number in (errno.ECONNRESET, errno.EPIPE):
        return "connection closed", "the server closed the connection without an answer"
    if isinstance(error, aiohttp.ClientResponseError):
        return "not HTTP", str(error.message)
    return "connection failed", os.strerror(number) if isinstance(number, int) else str(error) or type(error).__name__


def _parsed(text: bytes) -> Mapping[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _message_in(text: bytes) -> str:
    """Error message in a response body, or the beginning of the body if it is not JSON."""
    return _message_of(_parsed(text)) or text[:_MAX_MESSAGE].decode("utf-8", "replace").strip()


# --- what the server sends -------------------------------------------------------------------------------------------


_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 24)]  # a limit, because the record has an entry for each token


class _Details(msgspec.Struct):
    cached_tokens: _Count | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: _Count | None = None
    completion_tokens: _Count | None = None
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
    queue_ms: float | None = None
    causes_ms: dict[str, float] = msgspec.field(default_factory=dict)
    preempted_by: list[str] | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None
    timing: _Timing | None = None


_decode: Final = msgspec.json.Decoder(_Event).decode


class EventReader:
    """Parses the server-sent events of one answer, and records them in an :class:`LoadOutcome`.

    If the server sends the usage in every chunk (vLLM's ``continuous_usage_stats``), the tokens are counted by the
    usage. Otherwise each chunk counts as one token.
    """

    def __init__(self, outcome: LoadOutcome) -> None:
        self.done = False
        """Whether the end mark or an error has arrived, so that no further event is expected."""
        self._outcome = outcome
        self._rest = b""
        self._usage_per_chunk = False

    def feed(self, data: bytes, now: float) -> None:
        """Parse bytes that were read from the connection at the time ``now``."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and not self.done:
                self._event(line[5:].strip(), now)
        if len(self._rest) > _MAX_BYTES and not self.done:
            self._garbage("an event without an end")

    def close(self) -> None:
        """Set the final status of the outcome, after the connection has ended."""
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
            self._outcome.fail("error in the stream", _message_of({"error": event.error}) or "without a message")
            self.done = True
            return
        outcome = self._outcome
        choices = event.choices or []
        self._count(event.usage, choices, now)
        if choices:
            outcome.end = now
            outcome.finish_reason = choices[0].finish_reason or outcome.finish_reason
        if (timing := event.timing) is not None:
            outcome.server_queue_ms = timing.queue_ms
            if timing.queue_ms is None:  # servers of older versions send causes_ms only
                waits = sum(ms for cause, ms in timing.causes_ms.items() if cause.startswith(_QUEUE))
                outcome.server_queue_ms = min(waits, 1000 * ([*outcome.times, now][0] - outcome.start))
            if timing.preempted_by is not None:
                outcome.preempted = bool(timing.preempted_by)

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
                # This becomes True only if usage arrives before any chunk was counted as one token. It stays False for
                # a server that sends usage only in its last chunk.
                self._usage_per_chunk |= bool(choices and usage.completion_tokens and not outcome.counts)
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


def _message_of(body: Mapping[str, Any]) -> str:
    """Message of an error response in OpenAI's or a similar format. Empty if there is none."""
    error = body.get("error", body.get("detail"))
    if isinstance(error, dict):
        message = error.get("message")
    elif error is not None:
        message = error
    else:
        message = body.get("message")
    if message is None:
        return ""
    if isinstance(message, str):
        return message
    return json.dumps(message)
