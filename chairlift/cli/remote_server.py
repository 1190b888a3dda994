"""A client for a running server: its address, its API key, and the meaning of its error responses. Standard library
only."""

from __future__ import annotations

import argparse
import http.client
import json
import re
import socket
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from chairlift.base.timed_socket import TimedSocket
from chairlift.errors import ConfigError, EngineDeadError, OverloadedError, PromptTooLongError, RequestError

__all__ = [
    *("DEFAULT_URL", "MAX_BYTES", "NotThereError", "RemoteServer", "add_url_flag", "message", "parse_object", "plain"),
    "read_key",
]

DEFAULT_URL: Final = "http://127.0.0.1:8000"
"""URL at which ``chairlift serve`` listens by default."""

MAX_BYTES: Final = 1 << 20
"""Maximum number of bytes that are read of a response, or of one line of a streamed response."""
_CONNECT_SECONDS: Final = 10.0
_ANSWER_SECONDS: Final = 600.0
"""Maximum wait in seconds for the next bytes of a response. The request may be in a queue."""
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Characters that could move the cursor, change the terminal's state or reverse the direction of text."""


def add_url_flag(parser: argparse._ActionsContainer, default: str | None = DEFAULT_URL, help: str = "") -> None:
    """Add ``--url``, the URL of a running server. ``--base-url`` is its older name, which help does not list.

    ``help`` is the text of the flag (default: its default value).
    """
    parser.add_argument("--url", metavar="URL", default=default, help=help or f"(default: {default})")
    parser.add_argument("--base-url", dest="url", default=argparse.SUPPRESS, help=argparse.SUPPRESS)


class NotThereError(RequestError):
    """The server does not have the path or the model."""


class RemoteServer:
    """Address and key of a server. Nothing is sent until :meth:`request` or :meth:`ask` is called.

    ``url`` is http or https, with or without a path that ends in /v1. ``name`` is the flag or argument with the URL,
    for error messages. :func:`read_key` reads ``api_key_file``. Raises ConfigError.
    """

    def __init__(self, url: str, *, api_key_file: Path | None = None, name: str = "--url") -> None:
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            self._host = parts.hostname or ""
            self._port = parts.port
        except ValueError:
            raise ConfigError(f"{name} must be like http://127.0.0.1:8000, got {url!r}") from None
        if parts.scheme not in ("http", "https") or not self._host or parts.username is not None:
            raise ConfigError(f"{name} must be like http://127.0.0.1:8000, got {url!r}")
        self._secure = parts.scheme == "https"
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self.url = f"{parts.scheme}://{parts.netloc}{self._path}"
        self._headers = {"Content-Type": "application/json"}
        self._has_key = api_key_file is not None
        if api_key_file is not None:
            self._headers["Authorization"] = f"Bearer {read_key(api_key_file)}"
        self._socket: socket.socket | None = None

    def ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Send a request and return the JSON object of its response. Raises the errors of :meth:`request`."""
        with self.request(method, path, body, whole=True) as response:
            return parse_object(response.read(MAX_BYTES))

    @contextmanager
    def request(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        seconds: float = _ANSWER_SECONDS,
        whole: bool = False,
        statuses: Collection[int] = (200,),
    ) -> Iterator[http.client.HTTPResponse]:
        """Context manager: send a request and return its response, if the status is one of ``statuses``. The
        connection is closed at the end of the block.

        ``seconds`` is the maximum wait for the next bytes, or, with ``whole``, for the whole response. Raises
        ConfigError if the server does not respond or refuses the key, NotThereError for an unknown path,
        OverloadedError, PromptTooLongError or RequestError if it refuses the request, and EngineDeadError if the server
        fails or closes the connection.
        """
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=min(seconds, _CONNECT_SECONDS))
        end = time.monotonic() + seconds
        try:
            content = None if body is None else json.dumps(body).encode()
            try:
                connection.connect()
            except (OSError, UnicodeError) as error:
                reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
                raise ConfigError(
                    f"no server answers at {self.url} ({reason}); start one with: chairlift serve"
                ) from None
            self._socket = connection.sock
            connection.sock.settimeout(seconds)
            if whole:
                connection.sock = TimedSocket(connection.sock, end)
            try:
                connection.request(method, self._path + path, content, {**self._headers, **(headers or {})})
                with connection.getresponse() as response:
                    if response.status not in statuses:
                        self._refuse(response)
                    yield response
            except TimeoutError:
                raise EngineDeadError(f"{self.url} has not answered for {seconds:.0f} s") from None
            except (OSError, http.client.HTTPException) as error:
                raise EngineDeadError(f"the connection to {self.url} broke: {plain(str(error))}") from None
        finally:
            sock = self._socket
            self._socket = None
            connection.close()
            if sock is not None:
                sock.close()

    def break_off(self) -> None:
        """Abort a request that another thread has sent, by closing its connection."""
        sock = self._socket
        if sock is not None:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _refuse(self, response: http.client.HTTPResponse) -> None:
        """Raise the error that the status of a response means."""
        try:
            answer = parse_object(response.read(MAX_BYTES))
        except RequestError:
            answer = {}
        text = message(answer) or f"the server answered {response.status} {plain(response.reason)}"
        wait = response.headers.get("Retry-After", "")
        hint = f"; try again in {wait} s" if re.fullmatch("[0-9]{1,6}", wait) else ""
        if response.status == 401:
            given = "the key that was given is refused" if self._has_key else "give one with --api-key-file FILE"
            raise ConfigError(f"{self.url} wants an API key: {given}")
        if response.status in (404, 405):
            raise NotThereError(text)
        if response.status in (429, 503):
            raise OverloadedError(f"{text}{hint}", float(wait) if hint else 1.0)
        if response.status >= 500:
            raise EngineDeadError(text)
        error = answer.get("error")
        code = error.get("code") if isinstance(error, dict) else None
        raise PromptTooLongError(text) if code == "context_length_exceeded" else RequestError(text)


def message(answer: Mapping[str, Any]) -> str:
    """Message of an OpenAI error object; empty if there is none."""
    error = answer.get("error")
    text = error.get("message") if isinstance(error, dict) else error
    return plain(text)[:1000] if isinstance(text, str) else ""


def parse_object(data: bytes) -> dict[str, Any]:
    """Parse a JSON object. Raises RequestError for anything else."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise RequestError("the server's answer is no JSON object; is it an OpenAI-compatible server?")
    return value


def plain(text: str) -> str:
    """The text without characters that could control a terminal."""
    return _CONTROL.sub("�", text)


def read_key(path: Path) -> str:
    """The API key in a file: in the first line that is neither empty nor a # comment. As in the server's key file, a
    name and a space may come before the key. Raises ConfigError."""
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"cannot read the API key file {path}: {reason}") from None
    line = next((line for line in lines if line and not line.startswith("#")), "")
    found = re.fullmatch(r"(?:[A-Za-z][A-Za-z0-9_.-]{0,63}\s+)?([!-~]+)", line)
    if found is None:
        raise ConfigError(
            f"the API key file {path} must have a key of printable ASCII characters in a line of its own; a name and "
            "a space may stand before it"
        )
    return found[1]
