"""Calls for embeddings, scores and classes of lists of texts, for LLM and AsyncLLM."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, Generic, TypeVar

from chairlift.base.outputs import ClassificationOutput, EmbeddingOutput, PoolingRequestOutput, ScoringOutput
from chairlift.engine.input_processor import PooledText
from chairlift.engine.pooled.pooling_inputs import PoolingInputs, cosine, floats
from chairlift.errors import RequestError

__all__ = ["PooledCall", "PooledCalls", "listed", "one_or_more"]

_Result = TypeVar("_Result")


@dataclasses.dataclass(frozen=True, slots=True)
class PooledCall(Generic[_Result]):
    """One call of ``embed``, ``classify`` or ``score``, whose arguments have been checked."""

    texts: list[PooledText]
    """Texts that the model processes for this call."""
    finish: Callable[[Mapping[str, bytes]], list[PoolingRequestOutput[_Result]]]
    """Function from (text id -> its vector) to the caller's results."""


@dataclasses.dataclass(frozen=True, slots=True)
class PooledCalls:
    """Checks the arguments of ``embed``, ``classify`` and ``score``, and makes a :class:`PooledCall`.
    :class:`~chairlift.llm.LLM` documents the arguments. Every method raises RequestError."""

    inputs: PoolingInputs

    def embed(
        self, prompts: Sequence[Any], truncate: int | None, dimensions: int | None, prompt_name: str | None
    ) -> PooledCall[EmbeddingOutput]:
        """The call that computes the embedding of each prompt."""
        inputs = self.inputs
        inputs.check_task("embed")
        inputs.check_dimensions(dimensions)
        texts = self._texts(prompts, truncate, inputs.prefix(prompt_name))
        return _each(texts, lambda values: EmbeddingOutput(floats(inputs.cut(values, dimensions))))

    def classify(self, prompts: Sequence[Any], truncate: int | None) -> PooledCall[ClassificationOutput]:
        """The call that computes the class scores of each prompt."""
        self.inputs.check_task("classify")
        return _each(self._texts(prompts, truncate, ""), lambda values: ClassificationOutput(floats(values)))

    def score(
        self, queries: Sequence[Any], documents: Sequence[Any], truncate: int | None
    ) -> PooledCall[ScoringOutput]:
        """The call that computes one score per document."""
        inputs = self.inputs
        inputs.check_task("score")
        if len(queries) not in (1, len(documents)):
            raise RequestError(
                f"{len(queries)} queries but {len(documents)} documents; give one query for all, or one each"
            )
        if inputs.pooling.task == "embed":
            first = self._texts(queries, None, inputs.prefix(None))
            return _cosines(first, self._texts(documents, truncate, inputs.prefix(None)))

        def make(name: str, pair: Any) -> PooledText:
            return inputs.pair(name, pair[0], pair[1], truncate)

        query_per_document = list(queries) if len(queries) > 1 else list(queries) * len(documents)
        pairs = enumerate(zip(query_per_document, documents, strict=True))
        texts = [_named(index, len(documents), make, pair) for index, pair in pairs]
        return _each(texts, lambda values: ScoringOutput(floats(values)[-1]))

    def _texts(self, prompts: Sequence[Any], truncate: int | None, prefix: str) -> list[PooledText]:
        def make(name: str, prompt: Any) -> PooledText:
            ids, added = self.inputs.encode(prompt, prefix)
            return self.inputs.text(name, ids, truncate, added)

        return [_named(index, len(prompts), make, prompt) for index, prompt in enumerate(prompts)]


def _named(index: int, count: int, make: Callable[[str, Any], PooledText], value: Any) -> PooledText:
    try:
        return make(uuid.uuid4().hex, value)
    except RequestError as error:
        raise type(error)(f"prompt {index}: {error}") if count > 1 else error from None


def _each(texts: list[PooledText], make: Callable[[bytes], _Result]) -> PooledCall[_Result]:
    def finish(vectors: Mapping[str, bytes]) -> list[PoolingRequestOutput[_Result]]:
        return [PoolingRequestOutput(text.request_id, make(vectors[text.request_id]), text.token_ids) for text in texts]

    return PooledCall(texts, finish)


def _cosines(first: list[PooledText], second: list[PooledText]) -> PooledCall[ScoringOutput]:
    """The call that computes the cosine of each pair of texts. ``first`` has one text for all of ``second``, or one
    text per text of ``second``."""

    def finish(vectors: Mapping[str, bytes]) -> list[PoolingRequestOutput[ScoringOutput]]:
        found = []
        for index, document in enumerate(second):
            query = first[index if len(first) > 1 else 0]
            score = cosine(vectors[query.request_id], vectors[document.request_id])
            ids = [*query.token_ids, *document.token_ids]
            found.append(PoolingRequestOutput(document.request_id, ScoringOutput(score), ids))
        return found

    return PooledCall([*first, *second], finish)


def one_or_more(prompts: Any) -> list[Any]:
    """A list of prompts. ``prompts`` is one prompt or several; anything else raises RequestError."""
    if not isinstance(prompts, Iterable) or isinstance(prompts, (bytes, Set)):
        raise RequestError(f"prompts must be text, token ids or a list of those, got {type(prompts).__name__}")
    is_one = isinstance(prompts, (str, Mapping)) or _is_token_ids(prompts)
    return [prompts] if is_one else list(prompts)


def _is_token_ids(prompts: Any) -> bool:
    return isinstance(prompts, (list, tuple)) and bool(prompts) and all(type(item) is int for item in prompts)


def listed(texts: Any) -> list[Any]:
    """A list of texts. ``texts`` is one text or several."""
    return [texts] if isinstance(texts, str) else list(texts)
