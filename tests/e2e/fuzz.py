"""Sends valid and invalid input to a server and checks its responses: ``python -m tests.e2e.fuzz --seed 1 --count
200000``.

Input ``index`` of a seed is always the same, so ``--seed 1 --only 4711`` repeats one input and shows the response.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import random
import re
import socket
import struct
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final

import jsonschema_rs

from chairlift.base.outputs import FinishReason
from chairlift.base.sampling_params import SamplingParams
from tests.e2e.fuzz_http import Ending, RawInput, make_raw
from tests.e2e.fuzz_json import ENDPOINTS, Body, make_body
from tests.e2e.oracle import chat_ids, expected_hashlm
from tests.e2e.server_process import ServerProcess

__all__ = [
    "SERVER",
    "Finding",
    "Fuzzer",
    "Report",
    "check_still_whole",
    "fuzz",
    "get",
    "make_input",
    "may_give_up",
    "samples",
]

SERVER: Final = (
    *("--max-model-len", "128", "--num-kv-blocks", "2048", "--log-requests"),
    *("--max-num-queued-reqs", "4096", "--max-num-queued-tokens", "1000000"),
    *("--scheduling-policy", "priority", "--late-requests", "drop"),
)
"""Flags of the server. Outputs are short, so that many inputs can be tested. The queue has room for everything that is
sent at once, so the statuses 429 and 503 are findings."""

PATIENCE: Final = 120.0
"""Seconds without a response after which a finding is reported."""
_PAUSE: Final = 0.05
"""Seconds to wait for a response before the client closes its side."""
_CHECK_EVERY: Final = 250
_LEAKS: Final = re.compile(rb'0x[0-9a-f]{6,}|Traceback|File \\"/|/site-packages/|\.py\\?"')
_CONTROLS: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\ufeff]")
_IN_USE: Final = re.compile("chairlift:(num_requests_running|num_requests_waiting|kv_cache_usage_perc)[{]")
_FINE: Final = frozenset({200, 400, 404, 413})


class Finding(AssertionError):
    """Raised when the server behaves wrongly."""


@dataclasses.dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes


@dataclasses.dataclass
class Report:
    """Results of a fuzzing run."""

    statuses: Counter[str] = dataclasses.field(default_factory=Counter)
    findings: list[str] = dataclasses.field(default_factory=list)
    rss: list[int] = dataclasses.field(default_factory=list)
    num_inputs: int = 0
    num_exact: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        counts = ", ".join(f"{name}: {count:,}" for name, count in sorted(self.statuses.items()))
        memory = " ".join(f"{value / 2**20:.0f}" for value in self.rss[:: max(1, len(self.rss) // 20)])
        return (
            f"{self.num_inputs:,} inputs in {self.seconds:.1f} s, {self.num_exact} exact answers between them\n"
            f"  {counts}\n  MiB of the API process: {memory}\n  {len(self.findings)} findings"
        )


def make_input(seed: int, index: int) -> Body | RawInput:
    """Create the input with this index. One in five is a raw connection, the others are request bodies."""
    rng = random.Random(f"{seed}:{index}")
    return make_raw(rng) if index % 5 == 4 else make_body(rng, index - index // 5)


# --- what an answer must be -----------------------------------------------------------------------------------------


def check_answer(body: Body, answer: Answer) -> None:
    """Raise Finding unless the response is correct for the request. The body may be valid or invalid."""
    if answer.status not in _FINE and not (answer.status in (429, 503) and may_give_up(body.asked(), answer.body)):
        raise Finding(f"status {answer.status}")
    if body.wrong and answer.status != 400:
        raise Finding(f"status {answer.status}, must be 400")
    if answer.status != 200:
        check_error(answer)
    elif answer.headers.get("content-type", "").startswith("text/event-stream"):
        _check_stream(answer.body, body.asked())
    else:
        for choice in json.loads(answer.body).get("choices", ()):
            if choice["finish_reason"] not in ("stop", "length"):
                raise Finding(f"finish_reason {choice['finish_reason']}")
    if answer.status == 200 and not _validator(body.path).is_valid(json.loads(body.data)):
        raise Finding("answered, though the document says that the body is not valid")


def check_error(answer: Answer) -> None:
    """Raise Finding unless the response is an OpenAI error object that reveals no internals of the server."""
    error = json.loads(answer.body)["error"]
    if set(error) != {"message", "type", "param", "code"} or not error["message"] or not error["code"]:
        raise Finding(f"not an error object: {error}")
    if len(answer.body) > 4096:
        raise Finding(f"an error of {len(answer.body)} bytes")
    if leak := _LEAKS.search(answer.body):
        raise Finding(f"the error shows {leak[0]!r}")
    if answer.headers["content-type"] != "application/json" or "x-request-id" not in answer.headers:
        raise Finding(f"headers {answer.headers}")


def _check_stream(data: bytes, asked: Mapping[str, Any]) -> None:
    *events, last, rest = data.split(b"\n\n")
    gave_up = may_give_up(asked, last.removeprefix(b"data: "))
    if rest or (last != b"data: [DONE]" and not gave_up):
        raise Finding(f"the stream ends with {data[-200:]!r}")
    for event in events:
        chunk = json.loads(event.removeprefix(b"data: "))
        if "error" in chunk:
            raise Finding(f"an error in the stream: {chunk}")


_GIVES_UP: Final = {
    "queue_timeout": {"queue_timeout": PATIENCE},
    "queue_too_long": {"queue_timeout": PATIENCE},
    "deadline_exceeded": {"deadline_ms": 1000 * PATIENCE, "ttft_ms": 1000 * PATIENCE},
}
"""Error code -> time limits of a request that can cause the error: name of the field -> smallest value that would have
been long enough."""


_IN_WORDS: Final = {
    "the request was not started within its queue_timeout": "queue_timeout",
    "the request could not be answered by its deadline": "deadline_exceeded",
}
"""Error message -> error code, for errors in Anthropic's format, which has no code."""


def may_give_up(asked: Mapping[str, Any], data: bytes) -> bool:
    """Whether ``data`` is an error that is correct on a busy machine, because the request's ``queue_timeout`` or
    deadline has passed."""
    try:
        error = json.loads(data)["error"]
        fields = _GIVES_UP[error["code"] if "code" in error else _IN_WORDS[error["message"]]]
    except (ValueError, KeyError, TypeError):
        return False
    given = {name: asked.get(name) for name in fields}
    return any(isinstance(value, (int, float)) and 0 < value < fields[name] for name, value in given.items())


_validators: dict[str, Any] = {}


def _validator(path: str) -> Any:
    """Validator for the body of a path, made from its schema in /openapi.json."""
    if path not in _validators:
        import msgspec

        kind = ENDPOINTS[path][0]
        _, schemas = msgspec.json.schema_components([kind], ref_template="#/$defs/{name}")
        _validators[path] = jsonschema_rs.validator_for({"$ref": f"#/$defs/{kind.__name__}", "$defs": schemas})
    return _validators[path]


# --- a client -------------------------------------------------------------------------------------------------------


class Connection:
    """A connection to the server that is used for several requests, until the server closes it."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def post(self, path: str, data: bytes) -> Answer:
        """Send a body and return the response. A new connection is opened if the old one was closed."""
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        message = head.encode() + b"Content-Length: %d\r\n\r\n" % len(data) + data
        reused = self._streams is not None
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 22)
        reader, writer = self._streams
        try:
            writer.write(message)
            answer = await read_answer(reader)
        except (ConnectionError, asyncio.IncompleteReadError) as error:
            self.close()
            if not reused or (isinstance(error, asyncio.IncompleteReadError) and error.partial):
                raise
            return await self.post(path, data)
        if answer.headers.get("connection") == "close":
            self.close()
        return answer

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


async def read_answer(reader: asyncio.StreamReader) -> Answer:
    """Read one response, skipping interim (1xx) responses."""
    status = 100
    while status < 200:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = head.split("\r\n")
        status = int(first.split(" ")[1])
        headers = dict(line.lower().split(": ", 1) for line in lines if line)
    if "content-length" in headers:
        return Answer(status, headers, await reader.readexactly(int(headers["content-length"])))
    body = bytearray()
    while size := int(await reader.readline(), 16):
        body += (await reader.readexactly(size + 2))[:-2]
    await reader.readexactly(2)
    return Answer(status, headers, bytes(body))


async def send_raw(port: int, given: RawInput) -> tuple[list[int], bytes]:
    """Send raw input. Returns (statuses, all bytes of the reply)."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    received = bytearray()
    try:
        with contextlib.suppress(ConnectionError):
            for part in given.parts:
                writer.write(part)
                await writer.drain()
            if given.ending == Ending.RESET:
                linger = struct.pack("ii", 1, 0)
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                writer.transport.abort()
            elif given.ending == Ending.HALF:
                with contextlib.suppress(TimeoutError):
                    received += await asyncio.wait_for(reader.read(1 << 16), _PAUSE)
                # If the server closed first, the error is ENOTCONN, which is an OSError but not a ConnectionError.
                with contextlib.suppress(OSError):
                    writer.write_eof()
                while data := await reader.read(1 << 16):
                    received += data
            elif given.ending == Ending.READ:
                with contextlib.suppress(asyncio.IncompleteReadError):
                    answer = await read_answer(reader)
                    received += b"HTTP/1.1 %d " % answer.status + answer.body
    finally:
        writer.close()
    return [int(code) for code in re.findall(rb"HTTP/1\.1 (\d{3}) ", received)], bytes(received)


# --- the run --------------------------------------------------------------------------------------------------------


class Fuzzer:
    """Sends the inputs of a seed to a server over several connections, and valid requests between them."""

    def __init__(self, server: ServerProcess, seed: int) -> None:
        self._server = server
        self._seed = seed
        self.report = Report()

    async def run(self, indices: range, num_workers: int = 12) -> Report:
        start = time.monotonic()
        todo = iter(indices)
        async with asyncio.TaskGroup() as group:
            for _ in range(num_workers):
                group.create_task(self._work(todo))
        self.report.seconds += time.monotonic() - start
        return self.report

    async def one(self, index: int, connection: Connection) -> str:
        """Send one input. Returns the type of the result as one word. Raises Finding."""
        given = make_input(self._seed, index)
        try:
            async with asyncio.timeout(PATIENCE):
                if isinstance(given, Body):
                    answer = await connection.post(given.path, given.data)
                    check_answer(given, answer)
                    return f"body {answer.status}"
                statuses, received = await send_raw(self._server.port, given)
        except TimeoutError:
            raise Finding(f"no answer in {PATIENCE:g} s") from None
        except (ConnectionError, asyncio.IncompleteReadError, ValueError, KeyError, IndexError) as error:
            raise Finding(f"the answer ends or is malformed: {error!r}") from None
        if any(status >= 500 and status not in (501, 505) for status in statuses):  # 501 and 505 describe the request
            raise Finding(f"statuses {statuses}")
        if leak := _LEAKS.search(received) if statuses and statuses[0] != 200 else None:
            raise Finding(f"the answer shows {leak[0]!r}")
        return f"connection {statuses[0] if statuses else 'closed'}"

    async def _work(self, todo: Any) -> None:
        connection = Connection(self._server.port)
        for index in todo:
            if len(self.report.findings) >= 20:
                break
            self.report.num_inputs += 1
            check_now = self.report.num_inputs % _CHECK_EVERY == 0
            try:
                self.report.statuses[await self.one(index, connection)] += 1
            except Finding as finding:
                connection.close()
                self._note(index, str(finding))
            if check_now:
                await self.check(index)
        connection.close()

    async def check(self, index: int) -> None:
        """Check that valid requests are answered correctly while other inputs are being sent."""
        connection = Connection(self._server.port)
        try:
            async with asyncio.timeout(PATIENCE):
                await check_exact(connection, index)
            self.report.num_exact += 1
        except (TimeoutError, Finding, ConnectionError, asyncio.IncompleteReadError, ValueError, KeyError) as error:
            self._note(index, f"a right request after it: {error!r}")
        connection.close()
        self.report.rss.append(self._server.memory())

    def _note(self, index: int, text: str) -> None:
        given = make_input(self._seed, index)
        command = f"python -m tests.e2e.fuzz --seed {self._seed} --only {index}"
        self.report.findings.append(f"{text}\n  input {index}: {given.how}\n  again: {command}")


async def check_exact(connection: Connection, seed: int) -> None:
    """Check that a completion and a chat (streamed or not, with several outputs) equal the model's own results."""
    params = SamplingParams(max_tokens=5 + seed % 20, seed=seed, n=1 + seed % 3, temperature=seed % 2)
    asked = {"max_tokens": params.max_tokens, "seed": seed, "n": params.n, "temperature": params.temperature}
    text = f"right {seed}"
    for path, prompt, more in (
        ("/v1/completions", list(text.encode()), {"prompt": text}),
        ("/v1/chat/completions", chat_ids(("user", text)), {"messages": [{"role": "user", "content": text}]}),
    ):
        wanted = [expected_hashlm(prompt, params, index) for index in range(params.n)]
        stream = bool(seed // 3 % 2)
        answer = await connection.post(path, json.dumps(asked | more | {"stream": stream}).encode())
        if answer.status != 200:
            raise Finding(f"status {answer.status}: {answer.body[:300]!r}")
        chunks = [json.loads(event[6:]) for event in answer.body.split(b"\n\n")[:-2]] if stream else []
        texts = dict.fromkeys(range(params.n), "")
        ends: dict[int, str] = {}
        for choice in (c for part in (chunks or [json.loads(answer.body)]) for c in part["choices"]):
            said = choice.get("delta") or choice.get("message") or {"content": choice.get("text", "")}
            texts[choice["index"]] += said.get("content") or ""
            ends[choice["index"]] = choice["finish_reason"]
        for index, one in enumerate(wanted):
            if (texts[index], FinishReason(ends[index])) != (one.text, one.finish_reason):
                raise Finding(f"{path} {asked}: {texts[index]!r} {ends[index]}, wanted {one}")


def get(server: ServerProcess, path: str) -> tuple[int, bytes]:
    """Send a GET request. Returns (status, body)."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}{path}", timeout=PATIENCE) as reply:
            return int(reply.status), reply.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def samples(server: ServerProcess) -> dict[str, float]:
    """Name and labels -> value, for every sample of ``/metrics``."""
    lines = (line for line in get(server, "/metrics")[1].decode().splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def check_still_whole(server: ServerProcess, before: dict[str, float], engine: int) -> list[str]:
    """Problems of a server that should be idle: unfinished work, held blocks, dead processes, unexpected labels, errors
    in its log."""
    end = time.monotonic() + PATIENCE
    while busy := {name: value for name, value in samples(server).items() if _IN_USE.match(name) and value}:
        if time.monotonic() > end:
            return [f"not idle: {busy}"]
        time.sleep(0.05)
    wrong, after, log = [], samples(server), server.log()
    if set(after) != set(before):
        wrong.append(f"metrics have other names or labels: {sorted(set(after) ^ set(before))[:5]}")
    if server.engine_pid() != engine or any(v for n, v in after.items() if n.startswith("chairlift:engine_restarts")):
        wrong.append("the engine died")
    if json.loads(get(server, "/load")[1]) != {"server_load": 0, "running": 0, "waiting": 0}:
        wrong.append("requests are still counted as in progress")
    wrong += [f"{path} is not 200" for path in ("/health", "/ready") if get(server, path)[0] != 200]
    bad = [line for line in log.split("\n") if re.search(r"Z (WARNING|ERROR|CRITICAL) |Traceback", line)]
    wrong += [f"in the log: {line[:300]}" for line in bad[:5]]
    if control := _CONTROLS.search(log):
        wrong.append(f"the log has {control[0]!r}")
    return wrong


def fuzz(server: ServerProcess, seed: int, indices: range) -> Report:
    """Run all inputs. The report contains all findings."""
    fuzzer = Fuzzer(server, seed)
    asyncio.run(fuzzer.check(0))
    before, engine = samples(server), server.engine()
    report = asyncio.run(fuzzer.run(indices))
    asyncio.run(fuzzer.check(indices.stop))
    report.findings += check_still_whole(server, before, engine)
    if len(report.rss) > 8 and max(report.rss[len(report.rss) // 4 :]) > max(report.rss[: len(report.rss) // 4]) + (
        96 << 20
    ):
        report.findings.append("the memory of the API process grows")
    return report


@contextlib.asynccontextmanager
async def _connected(port: int) -> AsyncIterator[Connection]:
    connection = Connection(port)
    yield connection
    connection.close()


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.fuzz", description="Fuzz a server with HashLM.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="index of the first input")
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--only", type=int, help="send one input, and show it and what comes back")
    options = parser.parse_args(arguments)
    with ServerProcess("hashlm", *SERVER) as server:
        if options.only is not None:
            return asyncio.run(_show(server, options.seed, options.only))
        report = fuzz(server, options.seed, range(options.first, options.first + options.count))
    print(report)
    print("\n".join(report.findings))
    return int(bool(report.findings))


async def _show(server: ServerProcess, seed: int, index: int) -> int:
    given = make_input(seed, index)
    print(given.how)
    if isinstance(given, Body):
        print(f"sent:     {given.path} {given.data[:2000]!r}")
        async with _connected(server.port) as connection:
            print("received:", await connection.post(given.path, given.data))
    else:
        print(f"sent:     {[part[:2000] for part in given.parts]}, then: {given.ending}")
        print(f"received: {await send_raw(server.port, given)}")
    async with _connected(server.port) as connection:
        try:
            print("verdict: ", await Fuzzer(server, seed).one(index, connection))
        except Finding as finding:
            print(f"verdict:  {finding}\n{server.log()[-3000:]}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
