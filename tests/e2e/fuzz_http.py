"""Makes malformed HTTP connections, in which headers, lengths, chunks, pieces and the end contradict each other."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable
from typing import Final

__all__ = ["Ending", "RawInput", "make_raw"]

_BODY: Final = json.dumps({"model": "hashlm", "prompt": "Hello", "max_tokens": 3, "seed": 1}).encode()
_STREAM: Final = json.dumps({"model": "hashlm", "prompt": "Hello", "max_tokens": 60, "stream": True}).encode()
_JSON: Final = b"Content-Type: application/json\r\n"
_HOST: Final = b"Host: localhost\r\n"
_POST: Final = b"POST /v1/completions HTTP/1.1\r\n" + _HOST + _JSON
_PATHS: Final = (
    *(b"/", b"/health", b"/v1/models", b"/v1/models/hashlm", b"/v1/completions", b"/v1/chat/completions", b"/metrics"),
    *(b"/tokenize", b"/openapi.json", b"/docs", b"/load", b"/static/chat.js", b"/nowhere"),
    *(b"/v1/queue", b"/v1/queue?request_id=x"),
)
_METHODS: Final = (
    *(b"GET", b"HEAD", b"POST", b"PUT", b"DELETE", b"PATCH", b"OPTIONS", b"TRACE", b"CONNECT", b"PROPFIND", b"BREW"),
    *(b"get", b"", b"G T", b"GET\x00", b"X" * 100, b"PRI", b"SOURCE", b"M-SEARCH", b"\xff"),
)


class Ending:
    """The client's action after it has sent everything."""

    READ = "read"  # reads until the answer or the end of the connection
    HALF = "half"  # closes its side, then reads
    CLOSE = "close"
    RESET = "reset"


@dataclasses.dataclass
class RawInput:
    """Bytes of a connection, divided into the pieces in which they are sent."""

    how: str
    parts: list[bytes]
    ending: str = Ending.HALF


def make_raw(rng: random.Random) -> RawInput:
    """Create a random malformed connection."""
    found = rng.choice(_KINDS)(rng)
    if rng.random() < 0.15:
        found.ending = rng.choice((Ending.CLOSE, Ending.RESET, Ending.HALF))
    if len(found.parts) == 1 and rng.random() < 0.15:
        data = found.parts[0][:4000]
        cuts = sorted(rng.randrange(len(data) + 1) for _ in range(rng.randint(1, 5)))
        found.parts = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
        found.ending = found.ending if found.ending != Ending.READ else Ending.HALF
    return found


def _lengths(rng: random.Random) -> RawInput:
    """A request with a wrong Content-Length."""
    real = len(_BODY)
    values = [real - 1, real - rng.randint(1, real), real + 1, real + rng.randint(1, 10_000), 4 << 20, (4 << 20) + 1]
    values += [2**31, 2**32, 2**63, 2**64 - 1, 2**64, 10**30, -1, 0]
    texts = [str(v).encode() for v in values]
    texts += [b"", b"0x10", b"1e2", b"+5", b" 5", b"5 5", b"5,5", b"05", b"five", b"\xb2", b"5\x00", b"_5"]
    text = rng.choice(texts)
    return RawInput(f"Content-Length {text[:40]!r}", [_POST + b"Content-Length: " + text + b"\r\n\r\n" + _BODY])


def _two_lengths(rng: random.Random) -> RawInput:
    """A request with contradictory information about where its body ends (request smuggling)."""
    length = b"Content-Length: %d\r\n" % rng.choice((0, 3, len(_BODY)))
    others = [length, b"Content-Length: %d\r\n" % len(_BODY), b"Transfer-Encoding: chunked\r\n"]
    others += [b"Transfer-Encoding: %b\r\n" % v for v in (b"gzip, chunked", b"chunked, gzip", b"identity", b"xchunked")]
    others += [
        b"Transfer-Encoding:\tchunked\r\n",
        b"Transfer-Encoding : chunked\r\n",
        b"transfer-encoding: Chunked\r\n",
    ]
    others += [b"X: y\r\n Transfer-Encoding: chunked\r\n", b"Transfer-Encoding: chunked\n", b"TE: trailers\r\n"]
    lines = rng.sample(others, 2)
    smuggled = b"GET /metrics HTTP/1.1\r\n" + _HOST + b"\r\n"
    body = rng.choice((_BODY, b"%x\r\n%b\r\n0\r\n\r\n" % (len(_BODY), _BODY), b"0\r\n\r\n" + smuggled, smuggled))
    return RawInput("two lengths", [_POST + b"".join(lines) + b"\r\n" + body])


def _chunks(rng: random.Random) -> RawInput:
    head = _POST + b"Transfer-Encoding: chunked\r\n\r\n"
    good = b"%x\r\n%b\r\n" % (len(_BODY), _BODY)
    sizes = (b"-1", b"0x5", b"g", b"", b"ffffffffffffffff", b"fffffffffffffffff", b"5;ext=1", b"5 ", b" 5", b"00005")
    bad = rng.choice(
        (
            *(size + b"\r\nhello\r\n0\r\n\r\n" for size in sizes),
            good + b"0\r\nX-Trailer: 1\r\n\r\n",
            good + b"0\r\n" + b"A: b\r\n" * rng.choice((10, 100, 1000)) + b"\r\n",
            good + b"0\r\nContent-Length: 9\r\n\r\n",
            b"5\nhello\n0\n\n",
            b"5\r\nhelloo\r\n0\r\n\r\n",
            rng.randbytes(rng.randint(1, 200)),
            b"".join(b"1\r\n%c\r\n" % byte for byte in _BODY) + b"0\r\n\r\n",
            b"1;" + b"x" * rng.choice((100, 50_000)) + b"\r\n",
        )
    )
    return RawInput("chunks", [head + bad])


def _byte_by_byte(rng: random.Random) -> RawInput:
    data = _POST + b"Content-Length: %d\r\n\r\n" % len(_BODY) + _BODY
    first = rng.randrange(len(data) - 40)
    parts = [data[:first], *(data[i : i + 1] for i in range(first, first + 40)), data[first + 40 :]]
    return RawInput("byte by byte", parts, Ending.READ)


def _paths(rng: random.Random) -> RawInput:
    path = rng.choice(_PATHS)
    tricks = (
        *(b"/" + path, path + b"/", b"/." + path, b"/%2e%2e" + path, b"/..%2f.." + path, b"/health/.." + path),
        *(path + b"%00", path + b"%", path + b"%zz", path + b"%ff%fe", path.replace(b"/", b"/%2f"), path + b"?" * 50),
        *(path + b"#x", path + b";x=y", b"\\" + path[1:], b"http://localhost" + path, b"//evil.example" + path, b"*"),
        *(b"http://evil.example" + path, b"localhost:1", path + b"\t", path + b"\x7f", path + b"\xc3\xa9", b""),
        *(
            path + b"?" + b"q" * rng.choice((100, 8000, 9000, 100_000)),
            b"/v1/models/" + rng.randbytes(6).hex().encode(),
        ),
        *(
            b"/v1/models/%2e%2e%2fetc%2fpasswd",
            b"/v1/models/..%5c..",
            b"/v1/models/%F0%9F%98%80",
            b"/v1/models/a%0d%0ab",
        ),
    )
    target = rng.choice(tricks)
    method = rng.choice((b"GET", b"GET", b"POST"))
    return RawInput(f"path {target[:60]!r}", [method + b" " + target + b" HTTP/1.1\r\n" + _HOST + b"\r\n"])


def _methods(rng: random.Random) -> RawInput:
    method, path = rng.choice(_METHODS), rng.choice(_PATHS)
    version = rng.choice((b"HTTP/1.1",) * 5 + (b"HTTP/1.0", b"HTTP/0.9", b"HTTP/2.0", b"HTTP/1.2", b"http/1.1", b""))
    line = method + b" " + path + b" " + version
    return RawInput(repr(line[:60]), [line + b"\r\n" + _HOST + b"\r\n"])


def _headers(rng: random.Random) -> RawInput:
    names = (b"Host", b"Content-Type", b"Content-Length", b"Authorization", b"Cookie", b"Expect", b"Connection")
    names += (b"X-Request-Id", b"Content-Encoding", b"Upgrade", b"X-Forwarded-For", b"Range", b"Accept", b"Origin")
    values: tuple[bytes, ...] = (b"", b"x", b"\x00", b"\xff\xfe", b"a" * 5000, b"a" * 20_000, b"\r\n x", b"localhost")
    values += (b"100-continue", b"gzip", b"h2c", b"close", b"keep-alive, Upgrade", b"websocket", b"*/*", b"bytes=0-")
    values += (b"\x1b[2J", b"a\rb", b"a\nb: c", b"Bearer " + b"x" * 600, b"application/json; charset=utf-7", b'"')
    count = rng.choice((1, 2, 5, 63, 64, 65, 300))
    lines = b"".join(rng.choice(names) + b": " + rng.choice(values) + b"\r\n" for _ in range(count))
    host = rng.choice((_HOST, _HOST, b"", b"Host: evil.example\r\n", b"Host: \r\n", b"Host: localhost\r\nHost: x\r\n"))
    post = rng.random() < 0.5
    line = b"POST /v1/completions HTTP/1.1\r\n" if post else b"GET %b HTTP/1.1\r\n" % rng.choice(_PATHS)
    return RawInput(f"{count} headers", [line + host + lines + b"\r\n" + (_BODY if post else b"")])


def _garbage(rng: random.Random) -> RawInput:
    kinds = (
        rng.randbytes(rng.randint(1, 3000)),
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(500),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x12\x04\x00",
        b"\x00" * rng.randint(1, 5000),
        b"\r\n" * rng.randint(1, 3000),
        b"GET /\r\n",
        b"GET\r\n\r\n",
        b"SSH-2.0-x\r\n",
        b"*1\r\n$4\r\nPING\r\n",
        b"PROXY TCP4 1.2.3.4 1.2.3.4 1 1\r\nGET / HTTP/1.1\r\n\r\n",
        b"",
    )
    return RawInput("garbage", [rng.choice(kinds)])


def _pipelined(rng: random.Random) -> RawInput:
    """Several requests on one connection without waiting, valid and invalid."""
    ok = b"GET %b HTTP/1.1\r\n" % rng.choice(_PATHS) + _HOST + b"\r\n"
    post = _POST + b"Content-Length: %d\r\n\r\n" % len(_BODY) + _BODY
    parts = [rng.choice((ok, post, b"\r\n", b"junk\r\n\r\n")) for _ in range(rng.randint(2, 30))]
    return RawInput("pipelined", [b"".join(parts)] if rng.random() < 0.7 else parts)


def _leaves(rng: random.Random) -> RawInput:
    """The client disconnects in the middle of the headers, the body or the response."""
    body = rng.choice((_BODY, _STREAM))
    data = _POST + b"Content-Length: %d\r\n\r\n" % len(body) + body
    cut = rng.choice((len(data), rng.randrange(1, len(data))))
    return RawInput(f"leaves after {cut}", [data[:cut]], rng.choice((Ending.RESET, Ending.CLOSE, Ending.HALF)))


def _flipped(rng: random.Random) -> RawInput:
    data = bytearray(_POST + b"Content-Length: %d\r\n\r\n" % len(_BODY) + _BODY)
    for _ in range(rng.randint(1, 4)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    return RawInput("flipped bytes", [bytes(data)])


def _types(rng: random.Random) -> RawInput:
    """Bodies with a content type other than JSON."""
    kinds = (b"text/plain", b"multipart/form-data; boundary=x", b"application/x-www-form-urlencoded", b"*/*", b"")
    kinds += (
        b"application/octet-stream",
        b"application/json; charset=utf-16",
        b"application/jsonp",
        b"application/json,",
    )
    bodies = (
        _BODY,
        b"prompt=x",
        b'--x\r\nContent-Disposition: form-data; name="f"; filename="a"\r\n\r\nx\r\n--x--\r\n',
    )
    bodies += (b"\x80\x04\x95", b"\x1f\x8b\x08\x00" + rng.randbytes(40), rng.randbytes(100))
    body, kind = rng.choice(bodies), rng.choice(kinds)
    extra = rng.choice((b"", b"Content-Encoding: gzip\r\n", b"Content-Encoding: br\r\n", b"Expect: 100-continue\r\n"))
    line = b"POST %b HTTP/1.1\r\n" % rng.choice(_PATHS)
    head = line + _HOST + b"Content-Type: " + kind + b"\r\n" + extra + b"Content-Length: %d\r\n\r\n" % len(body)
    return RawInput(f"type {kind!r}", [head + body], Ending.READ)


_KINDS: Final[tuple[Callable[[random.Random], RawInput], ...]] = (
    *(_lengths, _two_lengths, _chunks, _byte_by_byte, _paths, _paths, _methods, _headers, _headers, _garbage),
    *(_pipelined, _leaves, _leaves, _flipped, _types),
)
