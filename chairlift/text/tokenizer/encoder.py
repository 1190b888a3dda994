"""Converts texts and conversations to token ids without blocking the event loop, with limits on their length and on
the queue."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

from chairlift.base.workers.turns import Turns
from chairlift.errors import OverloadedError, PromptTooLongError, RequestError, TemplateError, TemplateFailedError
from chairlift.text.tokenizer.bad_words import spellings, word_ids
from chairlift.text.tokenizer.messages import normalize_messages, text_size
from chairlift.text.tokenizer.plain_text import PlainTextEncoder
from chairlift.text.tokenizer.template_worker import TemplateWorker
from chairlift.text.tokenizer.text_worker import TextWorker
from chairlift.text.tokenizer.tokenizer import Tokenizer

__all__ = ["PromptEncoder"]

_log = logging.getLogger(__name__)

_AT_ONCE: Final = 512
"""Maximum number of characters that are tokenized on the event loop; this takes less than a millisecond."""
_LONG_TEXT: Final = 16_384
"""Number of characters above which a call waits in the queue for long texts, so that short texts need not wait for it.
In that queue, texts of a call are processed in groups of this size. A million characters take 1 to 5 s and 100 MB."""
_MAX_CHARS_PER_TOKEN: Final = 64
"""Maximum length of a text in characters, per token of the model's context length. A longer text is refused before it
is tokenized."""
_ALWAYS_ALLOWED: Final = 262_144
"""Number of characters per call that is always allowed, even if the model's context length is small. It is enough for
64 prompts of 1,024 tokens."""

_T = TypeVar("_T")


def _worker_for(
    tokenizer: Tokenizer | None, max_model_len: int, max_waiting: int, plain: PlainTextEncoder | None
) -> TextWorker | None:
    """A worker process for the tokenizer. None if encoding has a known time limit, so that it can run in this
    process."""
    if not isinstance(tokenizer, Tokenizer) or not tokenizer.doubt or tokenizer.folder is None:
        return None
    _log.warning("texts are encoded in processes of their own, which is slower: %s", tokenizer.doubt)
    max_chars = max(_LONG_TEXT, max_model_len * _MAX_CHARS_PER_TOKEN)
    return TextWorker(str(tokenizer.folder), max_chars, max_waiting, plain=plain)


class PromptEncoder:
    """Tokenizes texts and conversations for one event loop. ``tokenizer`` is None if only token ids are accepted.

    There are three queues: for conversations, texts and long texts. Each holds up to ``max_waiting`` calls; further
    calls raise QueueFullError. If ``chats`` is false, conversations are refused. If ``plain_text_messages`` is true,
    control tokens in their texts are encoded as plain text. All methods run on one event loop.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        max_model_len: int,
        max_waiting: int,
        chat_template: str | None = None,
        *,
        chats: bool = True,
        plain_text_messages: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._threads = Turns(2, max_waiting, "long texts")
        self._short_texts = Turns(2, max_waiting, "texts")
        self._templates: TemplateWorker | None = None
        self._chosen = chat_template is not None
        """Whether the user chose the chat template. If not, it is the model's own."""
        self._plain: PlainTextEncoder | None = None
        if tokenizer is not None and chats:
            template = tokenizer.chat_template if chat_template is None else chat_template
            if plain_text_messages:
                self._plain = PlainTextEncoder(tokenizer, template)
            controls = None if self._plain is None else self._plain.controls
            self._templates = TemplateWorker(
                template, tokenizer.named_tokens, controls=controls, max_waiting=max_waiting
            )
        self._texts = _worker_for(tokenizer, max_model_len, max_waiting, self._plain)

    async def start(self) -> None:
        """Start the workers, and log a warning if the model's chat template does not work.

        Raises TemplateFailedError if a template that the user gave has an error, and OverloadedError if no worker can
        be started.
        """
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
        """Stop the workers. Calls in progress fail."""
        if self._texts is not None:
            await self._texts.close()
        if self._templates is not None:
            await self._templates.close()

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Raises RequestError. Raises PromptTooLongError if the text is far longer than the model
        allows."""
        (ids,) = await self.encode_all([text], add_special_tokens)
        return ids

    async def encode_all(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of each text of one call, in order. If the texts have more than a few hundred characters together,
        a thread tokenizes them.

        Raises RequestError. Raises PromptTooLongError, before anything is tokenized, if one text or all texts together
        are far longer than the model allows. Raises QueueFullError if too many calls wait for a thread.
        """
        tokenizer = self._tokenizer
        if tokenizer is None:
            raise RequestError("the prompt is text, but the tokenizer was not loaded; send token ids")
        # A value that is not a string counts as 0 here. The tokenizer raises the error for it.
        lengths = [len(text) if isinstance(text, str) else 0 for text in texts]
        total = sum(lengths)
        for length in lengths:
            self._check_length("the text has", length, "a shorter text")
        if total > max(_ALWAYS_ALLOWED, self._max_chars):
            raise PromptTooLongError(
                f"the texts have {total:,} characters together, but one call may have"
                f" {max(_ALWAYS_ALLOWED, self._max_chars):,}; send fewer or shorter texts at a time"
            )
        if self._texts is not None:
            return [await self._texts.encode(text, add_special_tokens) for text in texts]
        if total <= _AT_ONCE:
            return _encode(tokenizer, texts, add_special_tokens)
        line = self._threads if total > _LONG_TEXT else self._short_texts
        found = list[list[int]]()
        for group in _groups(texts, lengths):
            found += await _on_thread(line, functools.partial(_encode, tokenizer, group, add_special_tokens))
        return found

    async def encode_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Token ids for ``bad_words``: one entry per word and spelling (:func:`spellings`). Raises the errors of
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
        """Token ids of a conversation, converted to text by the chat template. With ``images``, messages may contain
        image placeholders.

        Raises RequestError and TemplateError. Raises PromptTooLongError before the template is rendered.
        """
        if self._templates is None:
            raise TemplateError("chat needs the tokenizer, which was not loaded (skip_tokenizer_init); send token ids")
        plain = normalize_messages(messages, images=images)
        size = text_size(plain) + text_size(list(tools or ()))
        self._check_length("the messages have", size, "fewer or shorter messages or tools")
        chat = await self._templates.render_shielded(
            plain, add_generation_prompt, variables, continue_final_message=continue_final_message, tools=tools
        )
        size = len(chat.text)
        self._check_length("the messages, as the chat template writes them, have", size, "fewer or shorter ones")
        if self._plain is None or chat.covered is None:
            return await self.encode(chat.text, add_special_tokens=False)
        if self._texts is not None:
            return await self._texts.encode_chat(chat)
        line = self._threads if size > _LONG_TEXT else self._short_texts
        return await _on_thread(line, functools.partial(self._plain.encode, chat))

    async def beside(self, work: Callable[[], _T]) -> _T:
        """Run ``work`` on a thread and return its result. At most two such calls run at a time; calls that tokenize
        long texts are counted, too."""
        return await _on_thread(self._threads, work)

    @property
    def _max_chars(self) -> int:
        return max(_LONG_TEXT, self._max_model_len * _MAX_CHARS_PER_TOKEN)

    def _check_length(self, what: str, num_chars: int, instead: str) -> None:
        if num_chars > self._max_chars:
            raise PromptTooLongError(
                f"{what} {num_chars:,} characters, but at most {self._max_chars:,} are taken for a model of"
                f" {self._max_model_len:,} tokens; send {instead}"
            )


async def _on_thread(line: Turns, work: Callable[[], _T]) -> _T:
    return await line.take(lambda: asyncio.ensure_future(asyncio.to_thread(work)))


def _encode(tokenizer: Tokenizer, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
    return [tokenizer.encode(text, add_special_tokens) for text in texts]


def _groups(texts: Sequence[str], lengths: Sequence[int]) -> list[list[str]]:
    """Groups of adjacent texts; each group is one job for a thread. A long text is a group of its own."""
    groups: list[list[str]] = []
    room = 0
    for text, length in zip(texts, lengths, strict=True):
        if not groups or length > room:
            groups.append([])
            room = _LONG_TEXT
        groups[-1].append(text)
        room -= length
    return groups
