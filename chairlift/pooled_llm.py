"""Embeddings, scores and classes of lists of texts, in this process."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from chairlift.engine.interrupt import held_interrupt
from chairlift.engine.pooling_core import PooledText, PoolingCore
from chairlift.engine.pooling_inputs import PoolingInputs, cosine, floats
from chairlift.errors import RequestError
from chairlift.outputs import ClassificationOutput, EmbeddingOutput, PoolingRequestOutput, ScoringOutput

__all__ = ["PooledTexts"]

_Result = TypeVar("_Result")


class PooledTexts:
    """What :class:`~chairlift.llm.LLM` asks for its texts; see there for the arguments."""

    def __init__(self, core: PoolingCore, inputs: PoolingInputs) -> None:
        self._core, self._inputs = core, inputs

    def embed(
        self, prompts: Sequence[Any], truncate: int | None, dimensions: int | None, prompt_name: str | None
    ) -> list[PoolingRequestOutput[EmbeddingOutput]]:
        inputs = self._inputs
        inputs.check_task("embed")
        inputs.check_dimensions(dimensions)
        texts = self._texts(prompts, truncate, inputs.prefix(prompt_name))
        return self._outputs(texts, lambda values: EmbeddingOutput(floats(inputs.cut(values, dimensions))))

    def classify(
        self, prompts: Sequence[Any], truncate: int | None
    ) -> list[PoolingRequestOutput[ClassificationOutput]]:
        self._inputs.check_task("classify")
        return self._outputs(self._texts(prompts, truncate, ""), lambda values: ClassificationOutput(floats(values)))

    def score(
        self, queries: Sequence[Any], documents: Sequence[Any], truncate: int | None
    ) -> list[PoolingRequestOutput[ScoringOutput]]:
        inputs = self._inputs
        inputs.check_task("score")
        if len(queries) not in (1, len(documents)):
            raise RequestError(
                f"{len(queries)} queries but {len(documents)} documents; give one query for all, or one each"
            )
        if inputs.pooling.task == "classify":

            def make(name: str, pair: Any) -> PooledText:
                return inputs.pair(name, pair[0], pair[1], truncate)

            asked = list(queries) if len(queries) > 1 else list(queries) * len(documents)
            pairs = enumerate(zip(asked, documents, strict=True))
            texts = [self._named(place, len(documents), make, pair) for place, pair in pairs]
            return self._outputs(texts, lambda values: ScoringOutput(floats(values)[0]))
        both = [
            *self._texts(queries, None, inputs.prefix(None)),
            *self._texts(documents, truncate, inputs.prefix(None)),
        ]
        vectors = self._run(both)
        first, second = both[: len(queries)], both[len(queries) :]
        found: list[PoolingRequestOutput[ScoringOutput]] = []
        for place, document in enumerate(second):
            query = first[place if len(first) > 1 else 0]
            score = cosine(vectors[query.request_id], vectors[document.request_id])
            ids = [*query.token_ids, *document.token_ids]
            found.append(PoolingRequestOutput(document.request_id, ScoringOutput(score), ids))
        return found

    def _texts(self, prompts: Sequence[Any], truncate: int | None, prefix: str) -> list[PooledText]:
        def make(name: str, prompt: Any) -> PooledText:
            ids, added = self._inputs.encode(prompt, prefix)
            return self._inputs.text(name, ids, truncate, added)

        return [self._named(place, len(prompts), make, prompt) for place, prompt in enumerate(prompts)]

    @staticmethod
    def _named(place: int, count: int, make: Callable[[str, Any], PooledText], given: Any) -> PooledText:
        try:
            return make(uuid.uuid4().hex, given)
        except RequestError as error:
            raise type(error)(f"prompt {place}: {error}") if count > 1 else error from None

    def _outputs(
        self, texts: Sequence[PooledText], make: Callable[[bytes], _Result]
    ) -> list[PoolingRequestOutput[_Result]]:
        vectors = self._run(texts)
        return [PoolingRequestOutput(text.request_id, make(vectors[text.request_id]), text.token_ids) for text in texts]

    def _run(self, texts: Sequence[PooledText]) -> dict[str, bytes]:
        """The vector of each text, by its name. Raises RequestError for one that has none, KeyboardInterrupt between
        two passes."""
        core, found = self._core, dict[str, bytes]()
        places = {text.request_id: place for place, text in enumerate(texts)}
        for text in texts:
            core.add(text)
        try:
            with held_interrupt() as interrupted:
                while len(found) < len(texts):
                    for vector in core.run(core.next_pass()):
                        if vector.error:
                            raise RequestError(f"prompt {places[vector.request_id]}: {vector.error}")
                        found[vector.request_id] = vector.values
                    if interrupted():
                        raise KeyboardInterrupt
        finally:
            for text in texts:
                core.abort(text.request_id)
        return found
