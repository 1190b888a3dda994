"""Tokenizes texts in processes that can be killed, for tokenizers whose time has no known limit.

As for chat templates, the kernel limits processor time and memory. If :mod:`~chairlift.text.tokenizer.growth` finds a
limit, the tokenizer runs in the server's own process instead, which is faster.
"""

from __future__ import annotations

import dataclasses
import math
import string
import sys
from collections.abc import Callable
from typing import Any, Final

from chairlift.base.workers.child import Answer, limit_resources, serve
from chairlift.base.workers.pool import WorkerPool
from chairlift.errors import ModelLoadError, RequestError
from chairlift.text.tokenizer.growth import MAX_ADDED, MAX_GROWTH
from chairlift.text.tokenizer.plain_text import PlainTextEncoder
from chairlift.text.tokenizer.shield import Shielded, shielded_from
from chairlift.text.tokenizer.tokenizer import Tokenizer
from chairlift.text.tokenizer.trial import TRIAL_BYTES, TRIAL_BYTES_PER_BYTE, TRIAL_SECONDS

__all__ = ["TextWorker"]

_MAX_TOKENS: Final = 1 << 22
_BYTES_PER_TOKEN: Final = 12
"""Number of bytes of a token id as JSON, with its separator."""
_BYTES_PER_CHAR: Final = 256
"""Memory limit for encoding, in bytes per character. Real tokenizers take 100 MB for a million characters."""
_SECONDS: Final = 1.0
_SECONDS_PER_CHAR: Final = 10e-6
"""Limit of processor time for encoding, in seconds per character. Real tokenizers take a tenth of it."""


def _try(folder: str, file_bytes: int) -> int:
    """Try the tokenizer in a limited process. Returns 0 if it works, 1 if it printed an error, another code if the
    process was killed."""
    limit_resources(TRIAL_BYTES + TRIAL_BYTES_PER_BYTE * file_bytes, TRIAL_SECONDS)
    try:
        tokenizer = Tokenizer.from_dir(folder, probe=False)
    except ModelLoadError as error:
        print(error)
        return 1
    for text in (*(4 * char for char in string.printable), string.printable, "Grüße, 你好 😀"):
        ids = tokenizer.encode(text)
        if len(ids) > MAX_ADDED + MAX_GROWTH * len(text.encode()):
            return 3
    return 0


class TextWorker(WorkerPool):
    """Encodes texts with the tokenizer in ``folder``, in worker processes. ``max_chars`` is the maximum length of a
    text. Only with ``plain`` are chats encoded; each worker makes its own copy of it."""

    def __init__(
        self,
        folder: str,
        max_chars: int,
        max_waiting: int = 256,
        memory_bytes: int = 128 << 20,
        plain: PlainTextEncoder | None = None,
    ) -> None:
        memory = memory_bytes + _BYTES_PER_CHAR * max_chars
        setup: dict[str, Any] = {"folder": folder, "memory_bytes": memory, "plain": None}
        if plain is not None:
            setup["plain"] = {"template": plain.template}
        reply = _BYTES_PER_TOKEN * _MAX_TOKENS + 4096
        super().__init__(__name__, setup, "texts", reply, num_workers=2, max_waiting=max_waiting)
        self.seconds = _SECONDS
        """Limit of processor time for a short text, in seconds."""

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Raises RequestError if it takes too much time or memory.

        Other errors, those of :meth:`WorkerPool.ask`, do not mean that the text is at fault.
        """
        if not isinstance(text, str):
            raise RequestError(f"text to encode must be a string, got {type(text).__name__}")
        return await self._ids({"text": text, "special": bool(add_special_tokens)}, len(text))

    async def encode_chat(self, chat: Shielded) -> list[int]:
        """Token ids of a rendered chat; see :meth:`PlainTextEncoder.encode
        <chairlift.text.tokenizer.plain_text.PlainTextEncoder.encode>`. Raises the errors of :meth:`encode`."""
        texts = (chat.text, chat.covered, chat.bare, chat.covered, chat.covered)  # the last two by the copy
        return await self._ids({"chat": dataclasses.asdict(chat)}, sum(len(text) for text in texts if text))

    async def _ids(self, fields: dict[str, Any], num_chars: int) -> list[int]:
        seconds = self.seconds + _SECONDS_PER_CHAR * num_chars
        try:
            reply = await self.ask({**fields, "cpu_seconds": 2 + math.ceil(seconds)}, seconds)
        except TimeoutError:
            raise RequestError(
                f"the model's tokenizer was not done with the text after {seconds:.3g} s of processor time; send a "
                "shorter text, or token ids"
            ) from None
        except (EOFError, ValueError):
            raise RequestError(
                "the model's tokenizer needs more memory or time for the text than it may take; send a shorter text, "
                "or token ids"
            ) from None
        ids = reply.get("ids")
        if isinstance(ids, list):
            return ids
        raise RequestError(str(reply.get("error", "the model's tokenizer cannot encode the text; change it"))[:1000])


def _prepare(setup: dict[str, Any]) -> tuple[Answer, Callable[[], object]]:
    tokenizer = Tokenizer.from_dir(setup["folder"], probe=False)
    plain = None if setup["plain"] is None else PlainTextEncoder(tokenizer, setup["plain"]["template"])

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        try:
            if plain is not None and "chat" in request:
                ids = plain.encode(shielded_from(request["chat"]))
            else:
                ids = tokenizer.encode(request["text"], request["special"])
        except RequestError as error:
            return {"error": str(error)}
        if len(ids) > _MAX_TOKENS:
            return {"error": f"the text has {len(ids):,} tokens, and at most {_MAX_TOKENS:,} are allowed; shorten it"}
        return {"ids": ids}

    return answer, lambda: None


if __name__ == "__main__":
    if sys.argv[1] == "try":
        sys.exit(_try(sys.argv[2], int(sys.argv[3])))
    serve(_prepare, "the model's tokenizer takes more memory for the text than it may; send a shorter text")
