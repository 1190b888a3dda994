"""Validation of requests to models for embeddings, scores and classes."""

from __future__ import annotations

import dataclasses
import math
import struct
from array import array
from collections.abc import Sequence
from typing import Any, Final

from chairlift.base.pooled_row import PooledRow
from chairlift.engine.info import EngineInfo, PairTexts, PoolingInfo
from chairlift.engine.input_processor import PooledText, unnamed
from chairlift.errors import InvariantError, PromptTooLongError, RequestError
from chairlift.text.tokenizer.tokenizer import Tokenizer

__all__ = ["EMBED_DTYPES", "PoolingInputs", "cosine", "floats", "rounded", "unit_length"]

EMBED_DTYPES: Final = ("float32", "float16", "bfloat16")
"""Types in which embeddings can be returned. They are computed in float32."""


@dataclasses.dataclass(frozen=True, slots=True)
class PoolingInputs:
    """Converts texts and token ids to :class:`PooledText`, or raises RequestError with the reason."""

    info: EngineInfo
    tokenizer: Tokenizer | None

    @property
    def pooling(self) -> PoolingInfo:
        """Facts about the model for embeddings, scores or classes."""
        if self.info.pooling is None:
            raise InvariantError("a model that generates has no pooling")
        return self.info.pooling

    def check_task(self, task: str) -> None:
        """Raise RequestError unless the model supports this task: ``embed``, ``classify`` or ``score``."""
        pooling = self.pooling
        if task == "score":
            if not pooling.scores:
                raise RequestError(
                    f"the model is a classifier of {len(pooling.labels)} classes, which gives no scores of pairs;"
                    " classify texts with it, or use an embedding model or a cross encoder with one class"
                )
        elif task != pooling.task:
            does = "embeds texts" if pooling.task == "embed" else "is a classifier"
            raise RequestError(f"the model {does}; it cannot {task} them, ask for {pooling.task} or use another model")

    def prefix(self, prompt_name: str | None) -> str:
        """The prompt that is put before a text: the prompt called ``prompt_name``, or the model's default prompt.
        Raises RequestError for an unknown name."""
        prompts = self.pooling.prompts
        name = self.pooling.default_prompt if prompt_name is None else prompt_name
        if name is None:
            return ""
        if name not in prompts:
            known = ", ".join(map(repr, prompts)) or "none"
            raise RequestError(f"prompt_name must be one of the model's prompts ({known}), got {name!r:.80}")
        return prompts[name]

    def encode(self, prompt: Any, prefix: str = "") -> tuple[list[int], tuple[int, int]]:
        """(token ids of the prompt, (number of special tokens that the tokenizer added before the text, number added
        after it))."""
        prompt, _ = unnamed(prompt)
        if isinstance(prompt, (list, tuple)):
            return list(prompt), (0, 0)
        if not isinstance(prompt, str):
            raise RequestError(f"an input must be text or a list of token ids, got {type(prompt).__name__}")
        if self.tokenizer is None:
            raise RequestError("the input is text, but the tokenizer was not loaded; send token ids")
        return self.tokenizer.encode(prefix + prompt), self.tokenizer.num_added

    def text(
        self, request_id: str, ids: Sequence[int], truncate: int | None = None, added: tuple[int, int] = (0, 0)
    ) -> PooledText:
        """Check the token ids of a text, and truncate them if ``truncate`` allows it. Truncation keeps the beginning of
        the text and the ``added`` special tokens."""
        limit = self._limit(truncate)
        if limit is not None and len(ids) > limit:
            num_after = min(added[1], limit)
            ids = [*ids[: limit - num_after], *ids[len(ids) - num_after :]]
        return PooledText(request_id, self._checked(list(ids)))

    def pair(self, request_id: str, first: Any, second: Any, truncate: int | None = None) -> PooledText:
        """Two texts as one input of a cross encoder or reranker. Truncation shortens the second text."""
        tokenizer = self.tokenizer
        if tokenizer is None:
            raise RequestError("pairs of texts need the tokenizer, which was not loaded (skip_tokenizer_init)")
        if self.pooling.pair is None:
            ids, types, second_at = tokenizer.encode_pair(first, second)
        else:
            ids, second_at = _pair_ids(tokenizer, self.pooling.pair, first, second)
            types = [0] * len(ids)
        limit = self._limit(truncate)
        if limit is not None and len(ids) > limit:
            surplus = len(ids) - limit
            if surplus > len(second_at):
                raise PromptTooLongError(
                    f"the query has {len(ids) - len(second_at)} tokens with the special ones, but"
                    f" truncate_prompt_tokens keeps {limit}; shorten the query, because only documents are cut"
                )
            dropped = set(second_at[len(second_at) - surplus :])
            ids, types = ([each for at, each in enumerate(all_) if at not in dropped] for all_ in (ids, types))
        has_types = self.pooling.token_types and any(types)
        return PooledText(request_id, self._checked(ids), PooledRow(types if has_types else None))

    def _limit(self, truncate: int | None) -> int | None:
        max_model_len = self.info.max_model_len
        if truncate is None:
            return None
        if (
            isinstance(truncate, bool)
            or not isinstance(truncate, int)
            or not (truncate == -1 or 1 <= truncate <= max_model_len)
        ):
            raise RequestError(
                f"truncate_prompt_tokens must be -1 (what the model takes) or from 1 to {max_model_len},"
                f" got {truncate!r:.40}"
            )
        return max_model_len if truncate == -1 else truncate

    def _checked(self, ids: list[int]) -> list[int]:
        if not ids:
            raise RequestError("the text is empty; send at least one character or one token id")
        highest = self.info.vocab_size - 1
        for token_id in ids if set(map(type, ids)) != {int} or min(ids) < 0 or max(ids) > highest else ():
            if type(token_id) is not int:
                raise RequestError(f"the text must hold whole numbers as token ids, got {token_id!r:.40}")
            if not 0 <= token_id <= highest:
                raise RequestError(f"the text has token id {token_id}, but the model knows ids from 0 to {highest}")
        if len(ids) > self.info.max_model_len:
            raise PromptTooLongError(
                f"the text has {len(ids)} tokens, but the model takes {self.info.max_model_len}; shorten it, or set"
                " truncate_prompt_tokens to keep its beginning"
            )
        return ids

    def check_dimensions(self, dimensions: int | None) -> None:
        """Raise RequestError if embeddings cannot be shortened to this size."""
        pooling = self.pooling
        if dimensions is None or dimensions == pooling.width:
            return
        if pooling.dimensions is None:
            raise RequestError(
                f"dimensions is {dimensions!r:.40}, but the model's embeddings have {pooling.width} numbers, and its"
                " files do not say that they may be cut; leave it out, or set is_matryoshka"
            )
        known = type(dimensions) is int and 1 <= dimensions <= pooling.width
        if not known or (pooling.dimensions and dimensions not in pooling.dimensions):
            allowed = ", ".join(map(str, pooling.dimensions)) or f"from 1 to {pooling.width}"
            raise RequestError(f"dimensions must be {allowed}, got {dimensions!r:.40}")

    def cut(self, values: bytes, dimensions: int | None) -> bytes:
        """The first ``dimensions`` values of an embedding, normalised to length 1 again if the whole embedding is
        normalised."""
        if dimensions is None or dimensions * 4 == len(values):
            return values
        cut = values[: 4 * dimensions]
        return unit_length(cut) if self.pooling.normalize else cut


def _pair_ids(tokenizer: Tokenizer, texts: PairTexts, query: Any, document: Any) -> tuple[list[int], list[int]]:
    """(token ids of the whole prompt for a query and a document, indices of the tokens that belong only to the
    document)."""
    for text in (query, document):
        if not isinstance(text, str):
            raise RequestError(f"text to encode must be a string, got {type(text).__name__}")
    head = f"{texts.query}{query}{texts.document}"
    before, pair, behind, known = (
        tokenizer.encode(text, add_special_tokens=False) for text in (texts.before, head + document, texts.behind, head)
    )
    shared = next((at for at, ids in enumerate(zip(pair, known, strict=False)) if ids[0] != ids[1]), len(known))
    # A token that begins before the document and ends inside it is not a token of the document.
    first = len(before) + min(shared + (shared < len(known)), len(pair))
    return [*before, *pair, *behind], [*range(first, len(before) + len(pair))]


def unit_length(values: bytes) -> bytes:
    """The float32 ``values``, divided by their length."""
    numbers = floats(values)
    length = max(math.sqrt(sum(x * x for x in numbers)), 1e-12)
    return struct.pack(f"<{len(numbers)}f", *[x / length for x in numbers])


def rounded(values: bytes, dtype: str) -> tuple[bytes, list[float]]:
    """The float32 ``values`` in one of :data:`EMBED_DTYPES`: (bytes, little endian; the same numbers).

    Numbers that are too large for float16 become infinite, which JSON cannot say; embeddings have none.
    """
    if dtype == "float32":
        return values, floats(values)
    numbers = floats(values)
    if dtype == "float16":
        written = struct.pack(f"<{len(numbers)}e", *numbers)
        return written, list(struct.unpack(f"<{len(numbers)}e", written))
    bits = struct.unpack(f"<{len(numbers)}I", values)
    # The upper half of a float32, rounded to the nearest number, and to the even one of two that are equally near.
    halves = [(each + 0x7FFF + (each >> 16 & 1)) >> 16 for each in bits]
    back = struct.pack(f"<{len(halves)}I", *[each << 16 for each in halves])
    return struct.pack(f"<{len(halves)}H", *halves), floats(back)


def floats(values: bytes) -> list[float]:
    """Values of a vector from its bytes (float32, little endian)."""
    if struct.pack("=h", 1) == struct.pack("<h", 1):
        return array("f", values).tolist()
    return list(struct.unpack(f"<{len(values) // 4}f", values))


def cosine(first: bytes, second: bytes) -> float:
    """Cosine of the angle between two vectors, given as float32 bytes."""
    a = floats(first)
    b = floats(second)
    lengths = math.sqrt(sum(x * x for x in a) * sum(x * x for x in b))
    return sum(x * y for x, y in zip(a, b, strict=True)) / max(lengths, 1e-12)
