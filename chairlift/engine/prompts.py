"""What callers send -> token ids: texts, conversations, images, bad words and predictions, and the check of grammars.

Other threads and worker processes do the work, so that the event loop stays free.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from chairlift.base.sampling_params import SamplingParams
from chairlift.config import EngineConfig
from chairlift.engine.info import EngineInfo
from chairlift.engine.intake import counting_refusals
from chairlift.errors import EngineDeadError, RequestError
from chairlift.metrics.stats import RequestStats
from chairlift.models.vision.addresses import MediaSource
from chairlift.models.vision.chats import GivenImage, take_images
from chairlift.models.vision.image_reader import ImageReader
from chairlift.models.vision.processor import ImageProcessor, PlacedImages
from chairlift.text.grammar.checker import GrammarChecker
from chairlift.text.tokenizer.encoder import PromptEncoder
from chairlift.text.tokenizer.tokenizer import Tokenizer

__all__ = ["Prompts", "ReadImages", "ReadTokenizer"]

_T = TypeVar("_T")
ReadTokenizer = Callable[[EngineConfig, str], Tokenizer]
"""Function from the settings and the directory of a model to its tokenizer."""
ReadImages = Callable[[str, Tokenizer], ImageProcessor | None]
"""Function from the directory of a model and its tokenizer to its image reader; None for a model of texts."""


class Prompts:
    """Prepares the prompts of one model. ``check_ready`` raises EngineDeadError while the engine does not run;
    ``stats`` counts the refused requests. The model's own chat template is used if ``chat_template`` is None.

    Until :meth:`start`, all methods raise EngineDeadError.
    """

    def __init__(
        self,
        config: EngineConfig,
        stats: RequestStats,
        check_ready: Callable[[], object],
        *,
        read_tokenizer: ReadTokenizer,
        read_images: ReadImages | None = None,
        chat_template: str | None = None,
    ) -> None:
        self.tokenizer: Tokenizer | None = None
        """The model's tokenizer; None before :meth:`start`, and with skip_tokenizer_init."""
        self._config = config
        self._stats = stats
        self._check_ready = check_ready
        self._read_tokenizer = read_tokenizer
        self._read_images = read_images
        self._chat_template = chat_template
        self._images: ImageReader | None = None
        self._encoder: PromptEncoder | None = None
        self._grammars: GrammarChecker | None = None

    async def start(self, info: EngineInfo, max_texts: int) -> None:
        """Read the model's tokenizer, and start the threads and processes. At most ``max_texts`` texts wait. Raises
        ModelLoadError."""
        if not self._config.model.skip_tokenizer_init:
            self.tokenizer = self._read_tokenizer(self._config, info.model_dir)
        if self.tokenizer is not None and self._read_images is not None and info.takes_images:
            reads = self._read_images(info.model_dir, self.tokenizer)
            self._images = None if reads is None else ImageReader(reads, info.max_model_len, max_texts)
        if self._images is not None:
            await self._images.start()
        self._encoder = PromptEncoder(
            self.tokenizer,
            info.max_model_len,
            max_texts,
            self._chat_template,
            chats=info.pooling is None,
            plain_text_messages=self._config.model.plain_text_messages,
        )
        await self._encoder.start()
        if self.tokenizer is not None:
            self._grammars = GrammarChecker(self.tokenizer, info.vocab_size, max_texts)

    async def close(self) -> None:
        """End the threads and processes."""
        for each in (self._encoder, self._images, self._grammars):
            if each is not None:
                await each.close()

    @property
    def image_processor(self) -> ImageProcessor | None:
        """The model's image reader; None for a model of texts."""
        return None if self._images is None else self._images.processor

    @property
    def chat_template(self) -> str | None:
        """Template that formats conversations: the one from the settings, otherwise the model's own."""
        own = None if self.tokenizer is None else self.tokenizer.chat_template
        return own if self._chat_template is None else self._chat_template

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Raises RequestError, and PromptTooLongError for a text that is much longer than the
        model allows."""
        with self._front() as encoder:
            return await encoder.encode(text, add_special_tokens)

    async def encode_all(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of each text of one call.

        Raises RequestError, QueueFullError if too many texts wait for the tokenizer, and PromptTooLongError if one
        text, or all texts together, are much longer than the model allows.
        """
        with self._front() as encoder:
            return await encoder.encode_all(texts, add_special_tokens)

    async def encode_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Token ids of each of the ``bad_words``, as an argument for ``AsyncEngine.submit``. Raises the errors of
        :meth:`encode_all`."""
        with self._front() as encoder:
            return await encoder.encode_words(params.bad_words or ())

    async def encode_prediction(self, params: SamplingParams) -> SamplingParams:
        """``params`` with its ``prediction`` converted to token ids. Raises the errors of :meth:`encode`."""
        if not isinstance(params.prediction, str):
            return params
        return dataclasses.replace(params, prediction=await self.encode(params.prediction, add_special_tokens=False))

    async def check_grammar(self, params: SamplingParams, cache_salt: str = "") -> None:
        """Check that the grammar in ``params``, if it has one, compiles. Only callers with the same ``cache_salt``
        share what was found.

        Raises RequestError for a bad grammar, QueueFullError if too many grammars wait for this check, and
        OverloadedError if the check fails for lack of resources.
        """
        self._check_ready()
        if params.structured_outputs is None:
            return
        if self._grammars is None:
            raise RequestError("structured_outputs needs the tokenizer, which was not loaded; leave it out")
        with counting_refusals(self._stats):
            await self._grammars.check(params.structured_outputs.value, cache_salt)

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> list[int]:
        """Token ids of a conversation, formatted by the chat template. Raises RequestError and TemplateError."""
        how: dict[str, Any] = {"add_generation_prompt": add_generation_prompt, "tools": tools, **variables}
        laid_out, _ = await self.lay_out_chat(messages, continue_final_message=continue_final_message, **how)
        return laid_out

    async def lay_out_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> tuple[list[int], PlacedImages | None]:
        """(token ids of a conversation, its images or None), as arguments for ``AsyncEngine.submit``. Raises
        RequestError and TemplateError."""
        given_images: list[GivenImage] = []
        if self._images is not None:
            messages, given_images = take_images(messages)
        how = add_generation_prompt, continue_final_message, variables, tools, bool(given_images)
        with self._front() as encoder:
            token_ids = await encoder.encode_chat(messages, *how)
            if not given_images or self._images is None:
                return token_ids, None
            return await self._images.place(token_ids, given_images, encoder.beside)

    async def fetch_images(self, messages: list[dict[str, Any]], source: MediaSource) -> list[dict[str, Any]]:
        """``messages`` in which the images at addresses that ``source`` reads are prepared. Raises RequestError."""
        with self._front():
            return messages if self._images is None else await self._images.fetch(messages, source)

    async def beside(self, work: Callable[[], _T]) -> _T:
        """Run ``work`` in another thread and return its result. Long texts are processed one after another. Raises
        QueueFullError."""
        with self._front() as encoder:
            return await encoder.beside(work)

    @contextlib.contextmanager
    def _front(self) -> Iterator[PromptEncoder]:
        self._check_ready()
        if self._encoder is None:
            raise EngineDeadError("the engine is not there")
        with counting_refusals(self._stats):
            yield self._encoder
