"""From texts and conversations to token ids, for an event loop: with an end to their length, and to their line."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

from chairlift.errors import OverloadedError, PromptTooLongError, RequestError, TemplateError
from chairlift.tokenizer.messages import normalize_messages, text_size
from chairlift.tokenizer.template_worker import TemplateWorker
from chairlift.tokenizer.tokenizer import Tokenizer
from chairlift.tokenizer.turns import Turns

__all__ = ["Encoder"]

_log = logging.getLogger(__name__)

_LONG_TEXT: Final = 16_384  # characters; more are tokenized on threads, two at a time: a million take 1 s and 100 MB
_MAX_CHARS_PER_TOKEN: Final = 64  # a text with more per token of the model's length is refused as it is

_T = TypeVar("_T")


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
        if tokenizer is not None:
            template = chat_template or tokenizer.chat_template
            self._templates = TemplateWorker(template, tokenizer.named_tokens, most_waiting=most_waiting)

    async def start(self) -> None:
        """Have a worker for chat templates ready, and say so if the template cannot work. Raises OverloadedError when
        none can be started."""
        if self._templates is not None:
            await self._templates.start()
            try:
                await self._templates.check()
            except (RequestError, TemplateError) as error:
                _log.warning("completions work, but chats will be refused: %s", error)
            except OverloadedError as error:
                _log.warning("the chat template was not checked: %s", error)

    async def close(self) -> None:
        """End the workers. Chats under way end with an error."""
        if self._templates is not None:
            await self._templates.close()

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Raises RequestError, and PromptTooLongError for one far beyond the model's length."""
        tokenizer = self._tokenizer
        if tokenizer is None:
            raise RequestError("the prompt is text, but the tokenizer was not loaded; send token ids")
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
        self._check_length("the messages have", text_size(plain))
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
