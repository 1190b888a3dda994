"""Schedules passes of a model for embeddings, scores or classes, in order of arrival.

A pass computes whole texts side by side, as many as the token budget holds. Texts that arrive meanwhile join the next
pass. Texts are not sorted by length, so that no text waits for others of its size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

from chairlift.metrics.stats import EngineStats

__all__ = ["PooledText", "PooledVector", "PoolingCore"]


class _Executor(Protocol):
    def run(
        self, token_ids: Sequence[Sequence[int]], token_types: Sequence[Sequence[int] | None]
    ) -> Sequence[Any | None]:
        """One float32 vector per text; None where a vector has values that are not finite."""


@dataclasses.dataclass(frozen=True, slots=True)
class PooledText:
    """A checked text."""

    request_id: str
    token_ids: list[int]
    token_types: list[int] | None = None
    """Type id of each token; None: all are 0."""


@dataclasses.dataclass(frozen=True, slots=True)
class PooledVector:
    """Result of one text."""

    request_id: str
    values: bytes
    """float32 numbers, little endian; empty after an error."""
    error: str = ""


class PoolingCore:
    """Waiting texts, and the pass that is computed now."""

    def __init__(self, executor: _Executor, *, max_tokens: int, max_seqs: int) -> None:
        self.executor = executor
        self.max_tokens, self.max_seqs = max_tokens, max_seqs
        self._waiting: dict[str, PooledText] = {}
        self._num_steps = self._num_finished = 0
        self._step_tokens = self._num_running = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, text: PooledText) -> None:
        """Queue a text."""
        self._waiting[text.request_id] = text

    def abort(self, request_id: str) -> None:
        """Forget a waiting text. A text that is being computed, or is unknown, is ignored."""
        self._waiting.pop(request_id, None)

    def next_pass(self) -> list[PooledText]:
        """Take the texts of the next pass: the first in the queue, and those behind it that fit in the budget.

        A text that is longer than the budget has a pass of its own.
        """
        taken: list[PooledText] = []
        room = self.max_tokens
        for text in self._waiting.values():
            if taken and (len(text.token_ids) > room or len(taken) == self.max_seqs):
                break
            taken.append(text)
            room -= len(text.token_ids)
        for text in taken:
            del self._waiting[text.request_id]
        self._num_running, self._step_tokens = len(taken), sum(len(text.token_ids) for text in taken)
        return taken

    def run(self, texts: Sequence[PooledText]) -> list[PooledVector]:
        """Compute the texts from :meth:`next_pass`. An error of the pass is reported for each of its texts."""
        try:
            vectors = self.executor.run([text.token_ids for text in texts], [text.token_types for text in texts])
        except (MemoryError, RuntimeError) as error:  # usually out of memory; the next pass may be smaller
            why = f"the pass with this text failed ({type(error).__name__}: {str(error)[:200]})"
            vectors, broken = [None] * len(texts), why
        else:
            broken = "the model computed numbers that are not finite for this text"
        self._num_steps += 1
        self._num_finished += len(texts)
        self._num_running = 0
        return [
            PooledVector(text.request_id, b"", broken)
            if vector is None
            else PooledVector(text.request_id, vector.astype("<f4", copy=False).tobytes())
            for text, vector in zip(texts, vectors, strict=True)
        ]

    def stats(self) -> EngineStats:
        """Statistics after a pass."""
        return EngineStats(
            num_running=self._num_running,
            num_waiting=len(self._waiting),
            num_steps=self._num_steps,
            step_tokens=self._step_tokens,
            num_finished_sequences=self._num_finished,
        )
