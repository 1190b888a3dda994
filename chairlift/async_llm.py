"""AsyncLLM: the engine for programs with an event loop. The model runs in its own process."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from chairlift.base.lora_request import LoRARequest
from chairlift.base.outputs import (
    ClassificationOutput,
    EmbeddingOutput,
    OutputKind,
    PoolingRequestOutput,
    RequestOutput,
    ScoringOutput,
)
from chairlift.base.sampling_params import SamplingParams
from chairlift.config import EngineConfig
from chairlift.engine.async_engine import AsyncEngine
from chairlift.engine.generation import PauseMode
from chairlift.engine.info import EngineInfo
from chairlift.engine.input_processor import Prompt
from chairlift.engine.pooled.pooled_calls import PooledCall, PooledCalls, listed, one_or_more
from chairlift.errors import EngineDeadError, RequestError
from chairlift.loading.model import Progress, read_images, read_tokenizer

__all__ = ["AsyncLLM"]

_Result = TypeVar("_Result")


class AsyncLLM:
    """An engine in its own process, shared by any number of tasks of one event loop.

    ::

        async with AsyncLLM("path-or-hub-id", max_num_seqs=64) as llm:
            async for output in llm.generate("Hi", SamplingParams(max_tokens=32)):
                print(output.outputs[0].text)

    ``model`` and the settings are those of :class:`~chairlift.llm.LLM`. When the engine's process dies, its requests
    raise EngineDeadError, and a new process starts.
    """

    def __init__(self, model: str | Path | None = None, *, progress: Progress | None = None, **settings: Any) -> None:
        if model is not None:
            settings["model"] = str(model)
        self.config = EngineConfig.from_flat(settings)
        self._progress = progress
        self._engine: AsyncEngine | None = None

    async def start(self) -> None:
        """Load the model. Raises ConfigError for a bad setting, ModelLoadError for a bad model."""
        if self._engine is None:
            self._loop = asyncio.get_running_loop()
            self._engine = AsyncEngine.start(
                self.config,
                read_tokenizer=read_tokenizer,
                read_images=functools.partial(read_images, self.config),
                on_progress=self._progress,
            )
            try:
                await self._engine.wait_ready()
            except BaseException:
                await self.shutdown()
                raise

    async def shutdown(self) -> None:
        """End the engine's process. Unfinished requests raise EngineDeadError."""
        engine = self._engine
        self._engine = None
        if engine is not None:
            await engine.shutdown()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.shutdown()

    @property
    def info(self) -> EngineInfo:
        """Facts about the model, its limits and its memory."""
        info = self._started().info
        if info is None:
            raise EngineDeadError("the engine has not loaded its model yet; await start() first")
        return info

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        kind: OutputKind = OutputKind.CUMULATIVE,
        cache_salt: str = "",
        priority: int | None = None,
        tenant: str = "",
        lora_request: LoRARequest | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Generate text for one prompt (text or token ids), as an async iterator. ``kind`` selects whether an output
        has all text so far, only the new text, or comes once at the end.

        ``priority`` overrides the priority in ``sampling_params``. ``tenant`` is the tenant that the policy charges for
        the tokens. ``lora_request`` is the adapter; its files are read at its first use. Leaving the ``async for``
        loop, or cancelling its task, ends the request. Raises RequestError for a request that cannot be served,
        QueueFullError when the queue is full, EngineDeadError when the engine dies, ModelLoadError for an adapter that
        cannot be read.

        ::

            async for output in llm.generate("Hi", SamplingParams(max_tokens=32)):
                print(output.outputs[0].text)
        """
        params = SamplingParams(**self.info.sampling_defaults) if sampling_params is None else sampling_params
        if priority is not None and isinstance(params, SamplingParams):
            params = dataclasses.replace(params, priority=priority)
        engine = self._started()
        kind = OutputKind(kind)
        self._check_loop()
        adapter = await engine.adapters.name_of(lora_request)
        stream = await engine.submit(prompt, params, kind=kind, cache_salt=cache_salt, tenant=tenant, adapter=adapter)
        try:
            async for output in stream:
                yield output
        finally:
            stream.abort()

    async def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        truncate_prompt_tokens: int | None = None,
        dimensions: int | None = None,
        prompt_name: str | None = None,
    ) -> list[PoolingRequestOutput[EmbeddingOutput]]:
        """Embeddings of the texts, in their order; see :meth:`chairlift.llm.LLM.embed`.

        Each text is a separate request in the queue. One forward pass computes texts of several concurrent calls.
        Cancelling the task ends the call. Raises RequestError, QueueFullError when the queue is full, EngineDeadError
        when the engine dies.

        ::

            outputs = await llm.embed(["a text", "another"])
            vector = outputs[0].outputs.embedding
        """
        return await self._pool(
            lambda calls: calls.embed(one_or_more(prompts), truncate_prompt_tokens, dimensions, prompt_name)
        )

    async def classify(
        self, prompts: Prompt | Sequence[Prompt], *, truncate_prompt_tokens: int | None = None
    ) -> list[PoolingRequestOutput[ClassificationOutput]]:
        """One number per class for each text; see :meth:`chairlift.llm.LLM.classify` and :meth:`embed`."""
        return await self._pool(lambda calls: calls.classify(one_or_more(prompts), truncate_prompt_tokens))

    async def score(
        self, query: str | Sequence[str], documents: str | Sequence[str], *, truncate_prompt_tokens: int | None = None
    ) -> list[PoolingRequestOutput[ScoringOutput]]:
        """Relevance of each document to a query; see :meth:`chairlift.llm.LLM.score` and :meth:`embed`."""
        return await self._pool(lambda calls: calls.score(listed(query), listed(documents), truncate_prompt_tokens))

    async def _pool(self, ask: Callable[[PooledCalls], PooledCall[_Result]]) -> list[PoolingRequestOutput[_Result]]:
        engine = self._started()
        self._check_loop()
        await engine.wait_ready()
        if engine.pooling_inputs is None:
            raise RequestError(
                f"{self.config.model.model!r:.100} generates texts; for embeddings, scores or classes load another"
                " model, or set runner to 'pooling' to embed with this one"
            )
        # Tokenize in another thread, so that the event loop stays free.
        call = await asyncio.to_thread(ask, PooledCalls(engine.pooling_inputs))
        vectors = await engine.pool(call.texts)
        names = [text.request_id for text in call.texts]
        return call.finish(dict(zip(names, vectors, strict=True)))

    def _check_loop(self) -> None:
        if asyncio.get_running_loop() is not self._loop:
            raise EngineDeadError("the engine belongs to the event loop that started it; make an AsyncLLM in this one")

    async def update_weights(self, source: str | Path, version: int, *, in_flight: str = "continue") -> EngineInfo:
        """Load other weights for the same network from a directory, and use them from the next step on.

        See :meth:`chairlift.llm.LLM.update_weights` for the arguments and errors; this method takes no tensors. Running
        requests continue; their outputs give the weight version of each token. Returns the new :attr:`info`, which has
        a new fingerprint. If the engine's process dies, the new process loads the newest weights.
        """
        return await self._started().update_weights(source, version, in_flight=in_flight)

    async def pause_generation(self, mode: PauseMode = "keep") -> None:
        """Compute no further step until :meth:`resume_generation`; returns when no step is running.

        With ``keep``, running requests stay and later go on with the same tokens. With ``abort`` they end with the
        tokens that they have. New requests wait. :meth:`update_weights` works meanwhile. A pause survives the death of
        the engine's process; its requests do not. Raises ConfigError for another mode, and EngineDeadError.
        """
        await self._started().generation.pause(mode)

    async def resume_generation(self) -> None:
        """Go on after :meth:`pause_generation`; does nothing without a pause. Raises EngineDeadError."""
        await self._started().generation.resume()

    async def is_paused(self) -> bool:
        """Whether the engine is paused."""
        return self._started().generation.is_paused

    async def abort_all(self) -> int:
        """End all requests with the finish reason ABORT and the tokens that they have. Returns their number."""
        return self._started().generation.abort()

    async def reset_prefix_cache(self, *, recompute: bool = False) -> None:
        """Let no later request share KV that was computed until now. Running requests keep theirs; with ``recompute``
        they compute it again. :meth:`update_weights` needs no reset. Raises ConfigError for ``recompute`` in a static
        batch, and EngineDeadError."""
        await self._started().generation.reset_prefix_cache(recompute=recompute)

    def remove_lora(self, lora_int_id: int) -> bool:
        """Remove an adapter by its number; its running requests continue. Returns False for an unknown number."""
        return self._started().adapters.unload_number(lora_int_id)

    async def encode_chat(self, messages: Sequence[Mapping[str, Any]], **template_variables: Any) -> list[int]:
        """Token ids of a conversation, for :meth:`generate`. Raises RequestError and TemplateError."""
        return await self._started().prompts.encode_chat(messages, **template_variables)

    def _started(self) -> AsyncEngine:
        if self._engine is None:
            raise EngineDeadError("the engine is not running; use 'async with', or await start() first")
        return self._engine
