"""From texts and conversations to token ids for an event loop, with limits on their length and on the queue."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

from chairlift.errors import OverloadedError, PromptTooLongError, RequestError, TemplateError, TemplateFailedError
from chairlift.tokenizer.bad_words import spellings, word_ids
from chairlift.tokenizer.messages import normalize_messages, text_size
from chairlift.tokenizer.template_worker import TemplateWorker
from chairlift.tokenizer.text_worker import TextWorker
from chairlift.tokenizer.tokenizer import Tokenizer
from chairlift.tokenizer.turns import Turns

__all__ = ["Encoder"]

_log = logging.getLogger(__name__)

_AT_ONCE: Final = 512
"""Most characters that are tokenized on the event loop; they take less than a millisecond."""
_LONG_TEXT: Final = 16_384
"""Characters. A call with more waits in the queue of long texts, so that short ones need not wait for it. This many
characters of several texts are also one turn in that queue. A million take 1 to 5 s and 100 MB."""
_MAX_CHARS_PER_TOKEN: Final = 64
"""Texts with more characters per token of the model's length are refused before they are tokenized."""
_ALWAYS_ALLOWED: Final = 262_144
"""Total characters per call that are always allowed, however short the model: 64 prompts of 1,024 tokens."""

_T = TypeVar("_T")


def _worker_for(tokenizer: Tokenizer | None, max_model_len: int, most_waiting: int) -> TextWorker | None:
    """A worker process for the tokenizer; None if its time is limited, and it may run in this process."""
    if not isinstance(tokenizer, Tokenizer) or not tokenizer.doubt or tokenizer.folder is None:
        return None
    _log.warning("texts are encoded in processes of their own, which is slower: %s", tokenizer.doubt)
    return TextWorker(str(tokenizer.folder), max(_LONG_TEXT, max_model_len * _MAX_CHARS_PER_TOKEN), most_waiting)


class Encoder:
    """Tokenizes on an event loop. ``tokenizer`` is None if only token ids are accepted. There are
    three queues, for conversations, texts and long texts. Each holds at most ``most_waiting``; further ones raise
    QueueFullError. Without
    ``chats`` no conversations are accepted. One event loop owns the object."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        max_model_len: int,
        most_waiting: int,
        chat_template: str | None = None,
        *,
        chats: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._threads = Turns(2, most_waiting, "long texts")
        self._short_texts = Turns(2, most_waiting, "texts")
        self._templates: TemplateWorker | None = None
        self._chosen = chat_template is not None
        """Whether the template is not the model's own."""
        self._texts = _worker_for(tokenizer, max_model_len, most_waiting)
        if tokenizer is not None and chats:
            template = tokenizer.chat_template if chat_template is None else chat_template
            self._templates = TemplateWorker(template, tokenizer.named_tokens, most_waiting=most_waiting)

    async def start(self) -> None:
        """Start the workers, and warn if the model's chat template cannot work. Raises TemplateFailedError if a
        template given by the user has an error in itself, and OverloadedError when no worker can be started."""
        if self._texts is not None:
            await self._texts.start()
        if self._templates is not None:
            await self._templates.start()
            try:
                await self._templates.check()
            except (RequestError, TemplateError) as error:
                if self._chosen and isinstance(error, TemplateFailedError):
                    raise
                _log.warning("completions work, but chats will be refused: %s", error)
            except OverloadedError as error:
                _log.warning("the chat template was not checked: %s", error)

    async def close(self) -> None:
        """End the workers. Work in progress fails."""
        if self._texts is not None:
            await self._texts.close()
        if self._templates is not None:
            await self._templates.close()

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Raises RequestError, and PromptTooLongError for one far beyond the model's length."""
        (ids,) = await self.encode_all([text], add_special_tokens)
        return ids

    async def encode_all(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of each text of one call, in order. More than a few hundred characters in total are tokenized on a
        thread.

        Raises RequestError; PromptTooLongError for a text, or a sum of texts, far beyond the model's length, before
        anything is tokenized; QueueFullError when too many wait for a thread.
        """
        tokenizer = self._tokenizer
        if tokenizer is None:
            raise RequestError("the prompt is text, but the tokenizer was not loaded; send token ids")
        # for other types the tokenizer raises the error
        lengths = [len(text) if isinstance(text, str) else 0 for text in texts]
        total = sum(lengths)
        for length in lengths:
            self._check_length("the text has", length, "a shorter text")
        if total > max(_ALWAYS_ALLOWED, self._most_chars):
            raise PromptTooLongError(
                f"the texts have {total:,} characters together, but one call may have"
                f" {max(_ALWAYS_ALLOWED, self._most_chars):,}; send fewer or shorter texts at a time"
            )
        if self._texts is not None:
            return [await self._texts.encode(text, add_special_tokens) for text in texts]
        if total <= _AT_ONCE:
            return _encode(tokenizer, texts, add_special_tokens)
        line, found = self._threads if total > _LONG_TEXT else self._short_texts, list[list[int]]()
        for group in _groups(texts, lengths):
            found += await _on_thread(line, functools.partial(_encode, tokenizer, group, add_special_tokens))
        return found

    async def encode_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Token ids of each of ``bad_words``, in all spellings (:func:`spellings`). Raises the errors of
        :meth:`encode_all`."""
        if not words or self._tokenizer is None:
            return ()
        return word_ids(words, await self.encode_all(spellings(words), add_special_tokens=False))

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        continue_final_message: bool,
        variables: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] | None = None,
        images: bool = False,
    ) -> list[int]:
        """Token ids of a conversation, laid out by the chat template. With ``images`` it may have places of images.

        Raises RequestError and TemplateError, and PromptTooLongError before anything is laid out.
        """
        if self._templates is None:
            raise TemplateError("chat needs the tokenizer, which was not loaded (skip_tokenizer_init); send token ids")
        plain = normalize_messages(messages, images=images)
        size = text_size(plain) + text_size(list(tools or ()))
        self._check_length("the messages have", size, "fewer or shorter messages or tools")
        text = await self._templates.render(
            plain, add_generation_prompt, variables, continue_final_message=continue_final_message, tools=tools
        )
        self._check_length("the messages, as the chat template writes them, have", len(text), "fewer or shorter ones")
        return await self.encode(text, add_special_tokens=False)

    async def beside(self, work: Callable[[], _T]) -> _T:
        """Result of ``work``, run on a thread; two run at a time, including long texts."""
        return await _on_thread(self._threads, work)

    @property
    def _most_chars(self) -> int:
        return max(_LONG_TEXT, self._max_model_len * _MAX_CHARS_PER_TOKEN)

    def _check_length(self, what: str, num_chars: int, instead: str) -> None:
        if num_chars > self._most_chars:
            raise PromptTooLongError(
                f"{what} {num_chars:,} characters, but at most {self._most_chars:,} are taken for a model of"
                f" {self._max_model_len:,} tokens; send {instead}"
            )


async def _on_thread(line: Turns, work: Callable[[], _T]) -> _T:
    return await line.take(lambda: asyncio.ensure_future(asyncio.to_thread(work)))


def _encode(tokenizer: Tokenizer, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
    return [tokenizer.encode(text, add_special_tokens) for text in texts]


def _groups(texts: Sequence[str], lengths: Sequence[int]) -> list[list[str]]:
    """Neighbouring texts, grouped into turns on a thread; a longer text is a group of its own."""
    groups: list[list[str]] = []
    room = 0
    for text, length in zip(texts, lengths, strict=True):
        if not groups or length > room:
            groups.append([])
            room = _LONG_TEXT
        groups[-1].append(text)
        room -= length
    return groups
