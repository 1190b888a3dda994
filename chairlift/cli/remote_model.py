"""A model on an OpenAI-compatible server, for ``chairlift chat --url``. Standard library only."""

from __future__ import annotations

import sys
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from chairlift.cli.conversation import Spoken
from chairlift.cli.remote_server import MAX_BYTES, NotThereError, RemoteServer, message, parse_object, plain
from chairlift.errors import ConfigError, EngineDeadError, RequestError

__all__ = ["RemoteModel"]

_NOT_SENT: Final = {"logprobs", "n"}
"""Sampling parameters that are not sent to the server, because a chat on a terminal cannot show their results."""
_REASONING: Final = ("reasoning_content", "reasoning")
"""Names that servers give to the reasoning in a chunk: SGLang and llama.cpp the first, newer vLLM the second. Some send
both."""


class RemoteModel:
    """One model of a server. Raises ConfigError if the server or the model is missing, or the key is refused.

    ``url`` and ``api_key_file`` are those of :class:`~chairlift.cli.remote_server.RemoteServer`. ``name`` is one of
    the server's model names; None means the first.
    """

    def __init__(self, url: str, *, name: str | None = None, api_key_file: Path | None = None) -> None:
        self._server = RemoteServer(url, api_key_file=api_key_file)
        known = self._models()
        if name is not None and name not in known:
            raise ConfigError(f"{self.url} has no model {name!r}; it has {', '.join(map(plain, known))}")
        self._name = name if name is not None else next(iter(known))
        self._room = known[self._name]
        self._counts = True

    @property
    def url(self) -> str:
        return self._server.url

    @property
    def title(self) -> str:
        return f"{plain(self._name)} at {self.url}"

    @property
    def room(self) -> int:
        return self._room

    def count_tokens(self, messages: Sequence[Mapping[str, str]]) -> int:
        """Number of tokens in the conversation, computed by the server's /tokenize; 0 if the server has no
        /tokenize."""
        if self._counts:
            try:
                answer = self._server.ask("POST", "/tokenize", {"model": self._name, "messages": list(messages)})
            except NotThereError:
                self._counts = False
            except RequestError:  # SGLang and TGI have other fields; real faults show in the answer
                return 0
            else:
                count = answer.get("count")
                room = answer.get("max_model_len")
                if isinstance(room, int):  # a server that was still loading could not list it
                    self._room = room
                return count if isinstance(count, int) else 0
        return 0

    def stream(
        self, messages: Sequence[Mapping[str, str]], sampling: Mapping[str, Any]
    ) -> Generator[Spoken, None, None]:
        """Yield the reasoning and the answer in pieces, without control characters. Closing the iterator closes the
        connection."""
        body = {name: value for name, value in sampling.items() if name not in _NOT_SENT and value is not None}
        body |= {"model": self._name, "messages": list(messages), "stream": True}
        with self._server.request("POST", "/v1/chat/completions", body) as response:
            while line := response.readline(MAX_BYTES):
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                event = parse_object(data)
                if event.get("error"):
                    raise EngineDeadError(f"the answer broke off: {message(event)}")
                yield Spoken(plain(_added(event, *_REASONING)), is_reasoning=True)
                yield Spoken(plain(_added(event, "content")))
        raise EngineDeadError("the answer broke off: the server closed the connection")

    def _models(self) -> dict[str, int]:
        """Model name -> maximum number of tokens of a conversation, in the server's order."""
        try:
            listed = self._server.ask("GET", "/v1/models").get("data")
        except NotThereError:
            listed = None
        models: dict[str, int] = {}
        for model in listed if isinstance(listed, list) else []:
            if isinstance(model, dict) and isinstance(model.get("id"), str):
                room = model.get("max_model_len")
                models[model["id"]] = room if isinstance(room, int) else sys.maxsize
        if not models:
            raise ConfigError(f"{self.url} is not an OpenAI-compatible server: it lists no models at /v1/models")
        return models


def _added(event: Mapping[str, Any], *names: str) -> str:
    """Text that one chunk of a stream adds: in each choice, the first of these fields that has text."""
    try:
        deltas = [choice["delta"] for choice in event["choices"]]
        return "".join(next(filter(None, map(delta.get, names)), "") for delta in deltas)
    except (AttributeError, KeyError, TypeError):
        raise RequestError("the server's answer has chunks of another shape than OpenAI's") from None
