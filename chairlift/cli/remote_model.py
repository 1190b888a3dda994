"""A model behind an OpenAI-compatible server: what ``chairlift chat --url`` talks to. Standard library only."""

from __future__ import annotations

import http.client
import json
import re
import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from chairlift.errors import (
    ConfigError,
    EngineDeadError,
    OverloadedError,
    PromptTooLongError,
    RequestError,
)

__all__ = ["RemoteModel"]

_CONNECT_SECONDS: Final = 10.0
_ANSWER_SECONDS: Final = 600.0
"""Longest wait for the next piece of an answer; it may be in a queue."""
_MOST_BYTES: Final = 1 << 20
"""Of an answer that is no stream, and of a line of one that is."""
_NOT_SENT: Final = {"logprobs", "n"}
"""Sampling parameters that a chat on a terminal shows nothing of."""
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""What could move the cursor, change the terminal or turn text around."""


class RemoteModel:
    """One model of a server. Raises ConfigError when there is no server, no such model, or the key is refused.

    ``url`` is http or https, with or without a path that ends in /v1. ``name`` is one of the server's models; None is
    its first. ``api_key_file`` has the key in its first line that is neither empty nor a # comment.
    """

    def __init__(self, url: str, *, name: str | None = None, api_key_file: Path | None = None) -> None:
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            self._host, self._port = parts.hostname or "", parts.port
        except ValueError:
            raise ConfigError(f"--url must be like http://127.0.0.1:8000, got {url!r}") from None
        if parts.scheme not in ("http", "https") or not self._host or parts.username is not None:
            raise ConfigError(f"--url must be like http://127.0.0.1:8000, got {url!r}")
        self._secure = parts.scheme == "https"
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self.url = f"{parts.scheme}://{parts.netloc}{self._path}"
        self._headers = {"Content-Type": "application/json"}
        self._has_key = api_key_file is not None
        if api_key_file is not None:
            self._headers["Authorization"] = f"Bearer {_read_key(api_key_file)}"
        known = self._models()
        if name is not None and name not in known:
            raise ConfigError(f"{self.url} has no model {name!r}; it has {', '.join(map(_plain, known))}")
        self._name = name if name is not None else next(iter(known))
        self._room = known[self._name]
        self._counts = True

    @property
    def title(self) -> str:
        return f"{_plain(self._name)} at {self.url}"

    @property
    def room(self) -> int:
        return self._room

    def count_tokens(self, messages: Sequence[Mapping[str, str]]) -> int:
        """Tokens of the conversation, as the server's /tokenize counts them; 0 where it has no such thing."""
        if self._counts:
            try:
                answer = self._ask("POST", "/tokenize", {"model": self._name, "messages": list(messages)})
            except _NotThereError:
                self._counts = False
            else:
                count, room = answer.get("count"), answer.get("max_model_len")
                if isinstance(room, int):  # which a server that was still loading could not list
                    self._room = room
                return count if isinstance(count, int) else 0
        return 0

    def stream(self, messages: Sequence[Mapping[str, str]], sampling: Mapping[str, Any]) -> Generator[str, None, None]:
        """The answer in pieces, without control characters. Closing the iterator closes the connection."""
        body = {name: value for name, value in sampling.items() if name not in _NOT_SENT and value is not None}
        body |= {"model": self._name, "messages": list(messages), "stream": True}
        with self._request("POST", "/v1/chat/completions", body) as response:
            while line := response.readline(_MOST_BYTES):
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                event = _parse(data)
                if "error" in event:
                    raise EngineDeadError(f"the answer broke off: {_message(event)}")
                yield _plain(_content(event))
        raise EngineDeadError("the answer broke off: the server closed the connection")

    def _models(self) -> dict[str, int]:
        """Name -> most tokens of a conversation, in the server's order."""
        try:
            listed = self._ask("GET", "/v1/models").get("data")
        except _NotThereError:
            listed = None
        models: dict[str, int] = {}
        for model in listed if isinstance(listed, list) else []:
            if isinstance(model, dict) and isinstance(model.get("id"), str):
                room = model.get("max_model_len")
                models[model["id"]] = room if isinstance(room, int) else sys.maxsize
        if not models:
            raise ConfigError(f"{self.url} is not an OpenAI-compatible server: it lists no models at /v1/models")
        return models

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        with self._request(method, path, body) as response:
            return _parse(response.read(_MOST_BYTES))

    @contextmanager
    def _request(self, method: str, path: str, body: Mapping[str, Any] | None) -> Iterator[http.client.HTTPResponse]:
        """The answer to a request, once it is known to be no refusal; the connection ends with the block."""
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=_CONNECT_SECONDS)
        try:
            content = None if body is None else json.dumps(body).encode()
            try:
                connection.connect()
            except (OSError, UnicodeError) as error:
                reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
                raise ConfigError(
                    f"no server answers at {self.url} ({reason}); start one with: chairlift serve"
                ) from None
            connection.sock.settimeout(_ANSWER_SECONDS)
            try:
                connection.request(method, self._path + path, content, self._headers)
                with connection.getresponse() as response:
                    if response.status != 200:
                        self._refuse(response)
                    yield response
            except TimeoutError:
                raise EngineDeadError(f"{self.url} has not answered for {_ANSWER_SECONDS:.0f} s") from None
            except (OSError, http.client.HTTPException) as error:
                raise EngineDeadError(f"the connection to {self.url} broke: {_plain(str(error))}") from None
        finally:
            connection.close()

    def _refuse(self, response: http.client.HTTPResponse) -> None:
        """Raise what an answer other than 200 means."""
        try:
            answer = _parse(response.read(_MOST_BYTES))
        except RequestError:
            answer = {}
        message = _message(answer) or f"the server answered {response.status} {_plain(response.reason)}"
        wait = response.headers.get("Retry-After", "")
        hint = f"; try again in {wait} s" if re.fullmatch("[0-9]{1,6}", wait) else ""
        if response.status == 401:
            given = "the key that was given is refused" if self._has_key else "give one with --api-key-file FILE"
            raise ConfigError(f"{self.url} wants an API key: {given}")
        if response.status in (404, 405):
            raise _NotThereError(message)
        if response.status in (429, 503):
            raise OverloadedError(f"{message}{hint}", float(wait) if hint else 1.0)
        if response.status >= 500:
            raise EngineDeadError(message)
        error = answer.get("error")
        code = error.get("code") if isinstance(error, dict) else None
        raise PromptTooLongError(message) if code == "context_length_exceeded" else RequestError(message)


class _NotThereError(RequestError):
    """The server knows no such path or model."""


def _read_key(path: Path) -> str:
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"cannot read the API key file {path}: {reason}") from None
    key = next((line for line in lines if line and not line.startswith("#")), "")
    if not re.fullmatch("[!-~]+", key):
        raise ConfigError(f"the API key file {path} must have a key of printable ASCII characters in a line of its own")
    return key


def _parse(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise RequestError("the server's answer is no JSON object; is it an OpenAI-compatible server?")
    return value


def _content(event: Mapping[str, Any]) -> str:
    """What a chunk of a streamed answer adds to it."""
    try:
        return "".join(choice["delta"].get("content") or "" for choice in event["choices"])
    except (AttributeError, KeyError, TypeError):
        raise RequestError("the server's answer has chunks of another shape than OpenAI's") from None


def _message(answer: Mapping[str, Any]) -> str:
    error = answer.get("error")
    message = error.get("message") if isinstance(error, dict) else error
    return _plain(message)[:1000] if isinstance(message, str) else ""


def _plain(text: str) -> str:
    return _CONTROL.sub("�", text)
