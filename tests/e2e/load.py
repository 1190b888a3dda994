"""Load for a served HashLM, with a history of how every request ended.

The load uses plain sockets and the standard library, because a client library would repair or hide errors. Each request
must end in one of these ways: a response equal to the oracle's, an explicit error, cancellation by the client, or, if
the server was killed, a connection that visibly broke. Everything else is a violation: a wrong text, a response that
stops without an end, silence.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import enum
import json
import random
import socket
import struct
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from chairlift.base.sampling_params import SamplingParams
from tests.e2e.oracle import Expected, chat_ids, expected_hashlm
from tests.e2e.server_process import PATIENCE, Held, ServerProcess, metrics_of

__all__ = [
    "Ask",
    "Client",
    "Connection",
    "Cut",
    "End",
    "History",
    "Submit",
    "Violation",
    "exact",
    "held",
    "idle",
    "percentile",
    "ready",
    "rest",
    "running",
    "settled",
    "status",
    "until",
]


class Violation(AssertionError):
    """Raised when the server breaks a rule of the test."""


class End(enum.StrEnum):
    """How a request ended."""

    ANSWERED = "answered"
    """A complete response that equals the oracle's."""
    REFUSED = "refused"
    """An error object instead of a response."""
    FAILED = "failed"
    """An error event after a part of the response."""
    CANCELLED = "cancelled"
    """The client cancelled the request."""
    LOST = "lost"
    """The connection broke, or was not accepted."""
    VIOLATION = "violation"


class Cut(enum.StrEnum):
    """Ways in which a client disconnects."""

    CLOSE = "close"
    RESET = "reset"
    HALF = "half-close"
    """The client closes its sending side, and disconnects when the server has closed its side."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request, with everything that determines its output."""

    prompt: str
    max_tokens: int
    seed: int
    stream: bool = True
    chat: bool = False
    n: int = 1
    stop: tuple[str, ...] = ()
    temperature: float = 1.0
    ignore_eos: bool = True
    logprobs: int | None = None

    @staticmethod
    def draw(rng: random.Random, *, most: int = 40) -> Ask:
        """Create a random request. Prompts share common beginnings, so that some are found in the prefix cache."""
        begin = rng.choice(("", "In the beginning ", "A long way from here, in a town that nobody knows, "))
        return Ask(
            prompt=begin + "".join(rng.choices("abcdefghij klmnop", k=rng.randint(1, 40))),
            max_tokens=rng.randint(1, most),
            seed=rng.randrange(1 << 30),
            stream=rng.random() < 0.75,
            chat=rng.random() < 0.3,
            n=rng.choice((1, 1, 1, 1, 2, 3)),
            stop=tuple(rng.sample("ABCDEFGHIJ", 2)) if rng.random() < 0.2 else (),
            temperature=rng.choice((0.0, 0.5, 1.0)),
            ignore_eos=rng.random() < 0.8,
        )

    def request(self, model: str) -> bytes:
        """The request as HTTP bytes."""
        body: dict[str, Any] = {
            "model": model,
            "max_tokens": self.max_tokens,
            "seed": self.seed,
            "temperature": self.temperature,
            "ignore_eos": self.ignore_eos,
            "n": self.n,
            "stream": self.stream,
            "return_token_ids": True,
        }
        if self.stop:
            body["stop"] = self.stop
        if self.logprobs is not None:
            body |= {"logprobs": True, "top_logprobs": self.logprobs} if self.chat else {"logprobs": self.logprobs}
        if self.stream:
            body["stream_options"] = {"include_usage": True}
        if self.chat:
            body["messages"] = [{"role": "user", "content": self.prompt}]
        else:
            body["prompt"] = list(self.prompt.encode())
        data = json.dumps(body).encode()
        path = "/v1/chat/completions" if self.chat else "/v1/completions"
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
        return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data

    def expected(self) -> list[Expected]:
        """The ``n`` expected outputs of this request, when it is served alone."""
        prompt = chat_ids(("user", self.prompt)) if self.chat else list(self.prompt.encode())
        params = SamplingParams(
            max_tokens=self.max_tokens,
            seed=self.seed,
            temperature=self.temperature,
            ignore_eos=self.ignore_eos,
            n=self.n,
            stop=list(self.stop),
        )
        return [expected_hashlm(prompt, params, index) for index in range(self.n)]


@dataclasses.dataclass(slots=True)
class Submit:
    """Record of one request and its result. Times are in seconds on the monotonic clock."""

    ask: Ask
    began: float
    end: End | None = None
    ended: float = 0.0
    status: int = 0
    code: str = ""
    """Error code; empty if there was no error."""
    reason: str = ""
    """Description of what went wrong."""
    times: list[float] = dataclasses.field(default_factory=list)
    """Arrival times of the events that contain tokens."""
    num_tokens: int = 0

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    @property
    def gaps(self) -> list[float]:
        """Seconds between consecutive events that contain tokens."""
        return [late - early for early, late in zip(self.times, self.times[1:], strict=False)]


class History:
    """Records of all requests of a run."""

    def __init__(self) -> None:
        self.submits: list[Submit] = []

    def counts(self) -> Counter[End]:
        return Counter(submit.end for submit in self.submits if submit.end is not None)

    def figures(self) -> dict[str, float]:
        """Measured values of the run, by name."""
        return {f"requests {end}": count for end, count in sorted(self.counts().items())}

    def of(self, end: End) -> list[Submit]:
        return [submit for submit in self.submits if submit.end is end]

    def check(self, *allowed: End, refusals: Sequence[str] = ()) -> None:
        """Raise Violation unless every request was answered, cancelled, or ended in one of the ``allowed`` ways.

        ``refusals`` are the allowed error codes.
        """
        may = {End.ANSWERED, End.CANCELLED, *allowed}
        wrong = [submit for submit in self.submits if submit.end not in may]
        wrong += [submit for submit in self.submits if submit.code and submit.code not in refusals]
        if wrong:
            shown = [
                f"{submit.end} {submit.status} {submit.code} {submit.reason}: {submit.ask}" for submit in wrong[:5]
            ]
            raise Violation("\n".join([f"{len(wrong)} of {len(self.submits)} requests ended as they must not", *shown]))


class Connection:
    """The client's end of a connection, with a parser for HTTP responses."""

    def __init__(self, sock: socket.socket, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.sock, self.reader, self.writer = sock, reader, writer

    @classmethod
    async def open(cls, port: int, *, tiny: bool = False) -> Connection:
        """Open a connection. With ``tiny``, the kernel's buffers are almost empty, so that a client that does not read
        blocks the server soon."""
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            if tiny:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
                # Small segments keep the sender's buffer small. Otherwise the buffer would hold megabytes.
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)
            sock.setblocking(False)
            await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
            reader, writer = await asyncio.open_connection(sock=sock, limit=1 << 20)
        except BaseException:
            sock.close()
            raise
        return cls(sock, reader, writer)

    async def head(self) -> tuple[int, dict[str, str]]:
        """Read the head of a response. Returns (status, headers)."""
        status, *lines = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        pairs = [line.split(": ", 1) for line in lines if line]
        return int(status.split(" ")[1]), {name.lower(): value for name, value in pairs}

    async def pieces(self, headers: dict[str, str]) -> AsyncIterator[bytes]:
        """Yield the pieces of the body. Raises IncompleteReadError when the connection ends before the body does."""
        if "content-length" in headers:
            yield await self.reader.readexactly(int(headers["content-length"]))
            return
        while size := int(await self._line(), 16):
            yield (await self.reader.readexactly(size + 2))[:-2]
        await self._line()

    async def _line(self) -> bytes:
        line = await self.reader.readline()
        if not line.endswith(b"\r\n"):
            raise asyncio.IncompleteReadError(line, None)
        return line

    def reset(self) -> None:
        """Reset the connection."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    def close(self) -> None:
        self.writer.close()


class Client:
    """Sends requests to one server, and records the results."""

    def __init__(self, port: int, model: str = "hashlm", history: History | None = None) -> None:
        self.port = port
        self.model = model
        self.history = history or History()

    async def get(self, path: str) -> tuple[int, bytes]:
        """Send a GET request. Returns (status, body). Raises OSError when the server does not respond."""
        async with asyncio.timeout(PATIENCE):
            connection = await Connection.open(self.port)
            try:
                request = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
                connection.writer.write(request.encode())
                status, headers = await connection.head()
                return status, b"".join([piece async for piece in connection.pieces(headers)])
            except asyncio.IncompleteReadError as error:
                raise ConnectionError("the answer broke off") from error
            finally:
                connection.close()

    async def metrics(self) -> dict[str, float]:
        """Name -> value of ``/metrics``, without the prefix and labels."""
        _, body = await self.get("/metrics")
        return {name.removeprefix("chairlift:"): value for name, value in metrics_of(body.decode()).items()}

    async def ask(
        self,
        ask: Ask,
        *,
        cut: Cut | None = None,
        after: int = 0,
        due: float | None = None,
        patience: float = PATIENCE,
    ) -> Submit:
        """Send a request and record how it ended. With ``cut``, the client disconnects after ``after`` pieces of the
        response; -1 means in the middle of sending the request. ``due`` is the planned time of the request."""
        submit = Submit(ask, time.monotonic() if due is None else due)
        self.history.submits.append(submit)
        connection: Connection | None = None
        try:
            async with asyncio.timeout(patience):
                connection = await Connection.open(self.port)
                await self._exchange(connection, submit, cut, after)
        except TimeoutError:
            submit.end, submit.reason = End.VIOLATION, f"silence for {patience:g} s"
        except Violation as violation:
            submit.end, submit.reason = End.VIOLATION, str(violation)
        except (OSError, asyncio.IncompleteReadError) as error:
            submit.end, submit.reason = End.LOST, f"{type(error).__name__}: {error}"
        except asyncio.CancelledError:
            submit.end = End.CANCELLED
            raise
        finally:
            submit.ended = time.monotonic()
            if connection is not None:
                connection.close()
        return submit

    async def _exchange(self, connection: Connection, submit: Submit, cut: Cut | None, after: int) -> None:
        request = submit.ask.request(self.model)
        if cut is not None and after < 0:
            connection.writer.write(request[: len(request) // 2])
            return await self._leave(connection, submit, cut)
        connection.writer.write(request)
        if cut is not None and after == 0:
            return await self._leave(connection, submit, cut)
        submit.status, headers = await connection.head()
        answer = _Answer(submit)
        count = 0
        async for piece in connection.pieces(headers):
            count += 1
            answer.take(piece)
            if cut is not None and count == after:
                return await self._leave(connection, submit, cut)
        if answer.error is not None:
            submit.code = str(answer.error["code"])
            submit.end = End.REFUSED if submit.status != 200 else End.FAILED
        answer.check_end()
        submit.end = submit.end or End.ANSWERED
        return None

    async def _leave(self, connection: Connection, submit: Submit, cut: Cut) -> None:
        submit.end = End.CANCELLED
        if cut is Cut.RESET:
            connection.reset()
        elif cut is Cut.HALF:
            connection.writer.write_eof()
            with contextlib.suppress(ConnectionError):
                await connection.reader.read()
        else:
            connection.close()


class _Answer:
    """A response while it arrives. It is compared with the oracle's."""

    def __init__(self, submit: Submit) -> None:
        self.error: dict[str, Any] | None = None
        self._submit = submit
        self._rest = b""
        self._done = False
        self._usage: dict[str, Any] | None = None
        self._texts = [""] * submit.ask.n
        self._ids: list[list[int]] = [[] for _ in range(submit.ask.n)]
        self._ends: list[str | None] = [None] * submit.ask.n

    def take(self, piece: bytes) -> None:
        """Process a piece of the response's body."""
        if self._submit.status != 200 or not self._submit.ask.stream:
            content = json.loads(piece)
            self._submit.times.append(time.monotonic())
            if self._submit.status != 200:
                self._take_error(content)
            else:
                self._take(content)
                self._done = True
            return
        *events, self._rest = (self._rest + piece).split(b"\n\n")
        for event in events:
            if self._done or self.error is not None:
                raise Violation(f"something follows the end of the stream: {event!r:.200}")
            if not event.startswith(b"data: "):
                raise Violation(f"this is no event: {event!r:.200}")
            if event == b"data: [DONE]":
                self._done = True
            elif b'"error"' in event[:20]:
                self._take_error(json.loads(event[6:]))
            else:
                self._take(json.loads(event[6:]))

    def check_end(self) -> None:
        """Check that the response is complete and correct, at the end of the body."""
        if self.error is not None:
            return
        if not self._done or self._rest:
            raise Violation(f"the answer ends without saying so: {self._texts}")
        expected = self._submit.ask.expected()
        for index, each in enumerate(expected):
            got = (self._ids[index], self._texts[index], self._ends[index])
            if got != (each.token_ids, each.text, each.finish_reason.value):
                raise Violation(f"answer {index} is {got}, and not {each}")
        total = sum(len(each.token_ids) for each in expected)
        if self._usage is None or self._usage["completion_tokens"] != total:
            raise Violation(f"the usage is {self._usage}, and the answer has {total} tokens")
        self._submit.num_tokens = total

    def _take(self, content: dict[str, Any]) -> None:
        self._usage = content.get("usage") or self._usage
        for choice in content["choices"]:
            index = choice["index"]
            part = choice.get("delta", choice.get("message", choice))
            self._texts[index] += part.get("text") or part.get("content") or ""
            ids = choice.get("token_ids") or []
            if ids and self._submit.ask.stream:
                self._submit.times.append(time.monotonic())
            self._ids[index] += ids
            self._ends[index] = choice.get("finish_reason") or self._ends[index]

    def _take_error(self, content: dict[str, Any]) -> None:
        if set(content) != {"error"} or set(content["error"]) != {"message", "type", "param", "code"}:
            raise Violation(f"this is no error object: {content}")
        self.error = content["error"]


async def until(
    condition: Callable[[], Awaitable[bool]], seconds: float = PATIENCE, *, look: float = 0.01, what: str = "it"
) -> float:
    """Wait until the condition holds. Returns the seconds that it took. Raises Violation after ``seconds``."""
    start = time.monotonic()
    while not await condition():
        if time.monotonic() - start > seconds:
            raise Violation(f"{what} has not happened within {seconds:g} s")
        await asyncio.sleep(look)
    return time.monotonic() - start


async def status(client: Client, path: str) -> int:
    """HTTP status of a GET request; 0 if there is no response."""
    try:
        return (await client.get(path))[0]
    except OSError:
        return 0


async def idle(client: Client) -> bool:
    """Whether no request runs or waits, and only the prefix cache holds blocks."""
    metrics = await client.metrics()
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    return metrics["engine_up"] == 1 and not any(metrics[name] for name in names)


async def exact(client: Client, rng: random.Random, count: int = 5) -> None:
    """Check that new requests get correct outputs."""
    submits = await asyncio.gather(*(client.ask(Ask.draw(rng)) for _ in range(count)))
    wrong = [submit for submit in submits if submit.end is not End.ANSWERED]
    if wrong:
        raise Violation(f"{len(wrong)} of {count} requests were not answered afterwards: {wrong[0]}")


async def ready(client: Client) -> bool:
    """Whether the server accepts requests."""
    return await status(client, "/ready") == 200


async def rest(client: Client) -> None:
    """Wait until the server is idle."""
    await until(lambda: idle(client), what="rest")


async def running(client: Client, count: int) -> bool:
    """Whether the batch has at least ``count`` sequences."""
    return (await client.metrics())["num_requests_running"] >= count


async def held(server: ServerProcess, client: Client) -> Held:
    """Resources that the server's processes hold now."""
    return server.held(int((await client.metrics())["event_loop_tasks"]))


async def settled(server: ServerProcess, client: Client, rng: random.Random) -> Held:
    """Resources of the idle server after some work, when workers and pools have reached their final size."""
    await asyncio.gather(*(client.ask(Ask.draw(rng)) for _ in range(100)))
    seen: list[Held] = []

    async def steady() -> bool:
        seen.append(await held(server, client))
        return await idle(client) and len(seen) >= 5 and len(set(seen[-5:])) == 1

    await until(steady, look=0.05, what="rest")
    return seen[-1]


def percentile(values: Sequence[float], share: float) -> float:
    """Quantile of ``values``: the smallest value that is at least as large as the fraction ``share`` of the values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -(-int(share * 1e6) * len(ordered) // 1_000_000) - 1))]
