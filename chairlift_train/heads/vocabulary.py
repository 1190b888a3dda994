"""The reduced vocabulary of a drafting layer: the tokens that occur most often as targets in the training data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from chairlift_train.sequences import read_sample

__all__ = ["frequent_tokens"]


def frequent_tokens(examples: Iterable[Mapping[str, Any]], vocab_size: int, count: int) -> npt.NDArray[np.int32]:
    """Ids of the ``count`` most frequent targets, ascending. Of equally frequent tokens, those with lower ids come
    first, so the result has ``count`` ids even if fewer tokens occur.

    Args:
        examples: Training examples, as :class:`~chairlift_train.stream.PackStream` takes them.
        vocab_size: Number of token ids of the model.
        count: Number of ids to return, at most ``vocab_size``.
    """
    occurrences = np.zeros(vocab_size, dtype=np.int64)
    for position, example in enumerate(examples):
        sample = read_sample(example, position)
        targets = sample.tokens[1:] if sample.weights is None else sample.tokens[1:][sample.weights[1:] != 0]
        occurrences += np.bincount(targets, minlength=vocab_size)
    chosen = np.argsort(-occurrences, kind="stable")[:count]
    found: npt.NDArray[np.int32] = np.sort(chosen).astype(np.int32)
    return found
