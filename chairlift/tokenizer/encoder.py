"""From texts and conversations to token ids, for an event loop: with an end to their length, and to their line."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

from chairlift.errors import PromptTooLongError, RequestError, TemplateError
from chairlift.tokenizer.chat_template import normalize_messages
from chairlift.tokenizer.template_worker import TemplateWorker
from chairlift.tokenizer.text_worker import TextWorker
from chairlift.tokenizer.tokenizer import Tokenizer
from chairlift.tokenizer.turns import Turns

__all__ = ["Encoder"]

_log = logging.getLogger(__name__)

_LONG_TEXT: Final = 16_384  # characters; more are tokenized on threads, two at a time: a million take 1 s and 100 MB
_MAX_CHARS_PER_TOKEN: Final = 64  # a text with more per token of the model's length is refused as it is

_T = TypeVar("_T")


def _worker_for(tokenizer: Tokenizer | None, max_model_len: int, most_waiting: int) -> TextWorker | None:
    """None where the tokenizer is bounded, and may work in this process."""
    if not isinstance(tokenizer, Tokenizer) or not tokenizer.doubt or tokenizer.folder is None:
        return None
    _log.warning("texts are encoded in processes of their own, which is slower: %s", tokenizer.doubt)
    return TextWorker(str(tokenizer.folder), max(_LONG_TEXT, max_model_len * _MAX_CHARS_PER_TOKEN), most_waiting)


class Encoder:
    """``tokenizer`` is None where only token ids are taken. At most ``most_waiting`` conversations, and as many long
    texts, wait for their turn; those beyond raise QueueFullError. One event loop owns the object."""

    def __init__(
        self, tokenizer: Tokenizer | None, max_model_len: int, most_waiting: int, chat_template: str | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._threads = Turns(2, most_waiting, "long texts")
        self._templates: TemplateWorker | None = None
        self._texts = _worker_for(tokenizer, max_model_len, most_waiting)
        if tokenizer is not None:
            template = chat_template or tokenizer.chat_template
            self._templates = TemplateWorker(template, tokenizer.named_tokens, most_waiting=most_waiting)

    async def start(self) -> None:
        """Have the workers ready. Raises OverloadedError when none can be started."""
        if self._texts is not None:
            await self._texts.start()
        if self._templates is not None:
            await self._templates.start()

    async def close(self) -> None:
        """End the workers. What is under way ends with an error."""
        if self._texts is not None:
            await self._texts.close()
        if self._templates is not None:
            await self._templates.close()

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Raises RequestError, and PromptTooLongError for one far beyond the model's length."""
        tokenizer = self._tokenizer
        if tokenizer is None:
            raise RequestError("the prompt is text, but the tokenizer was not loaded; send token ids")
        if self._texts is not None:
            if isinstance(text, str):
                self._check_length("the text has", len(text))
            return await self._texts.encode(text, add_special_tokens)
        if not isinstance(text, str) or len(text) <= _LONG_TEXT:
            return tokenizer.encode(text, add_special_tokens)
        self._check_length("the text has", len(text))
        return await self.beside(lambda: tokenizer.encode(text, add_special_tokens))

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        continue_final_message: bool,
        variables: Mapping[str, Any],
    ) -> list[int]:
        """Token ids of a conversation, laid out by the chat template. Raises RequestError and TemplateError, and
        PromptTooLongError before anything is laid out."""
        if self._templates is None:
            raise TemplateError("chat needs the tokenizer, which was not loaded (skip_tokenizer_init); send token ids")
        plain = normalize_messages(messages)
        self._check_length("the messages have", sum(len(message["content"]) for message in plain))
        text = await self._templates.render(
            plain, add_generation_prompt, variables, continue_final_message=continue_final_message
        )
        return await self.encode(text, add_special_tokens=False)

    async def beside(self, work: Callable[[], _T]) -> _T:
        """What ``work`` brings, on a thread: two at a time, long texts included."""
        return await self._threads.take(lambda: asyncio.ensure_future(asyncio.to_thread(work)))

    def _check_length(self, what: str, num_chars: int) -> None:
        if num_chars > max(_LONG_TEXT, self._max_model_len * _MAX_CHARS_PER_TOKEN):
            raise PromptTooLongError(
                f"{what} {num_chars:,} characters, but the model takes {self._max_model_len:,} tokens"
            )
