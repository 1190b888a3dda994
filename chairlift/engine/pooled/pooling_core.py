"""Schedules passes of a model for embeddings, scores or classes, in order of arrival.

A forward pass computes several whole texts, as many as fit into the token budget. Texts that arrive during a pass are
computed in a later pass. Texts are not sorted by length, so that no text has to wait for texts of a similar length.
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
        """One float32 vector per text; None for a text whose vector has values that are not finite."""


@dataclasses.dataclass(frozen=True, slots=True)
class PooledText:
    """A validated text."""

    request_id: str
    token_ids: list[int]
    token_types: list[int] | None = None
    """Token type of each token; None: type 0 for all tokens."""


@dataclasses.dataclass(frozen=True, slots=True)
class PooledVector:
    """Result for one text."""

    request_id: str
    values: bytes
    """Values of the vector as float32, little endian; empty after an error."""
    error: str = ""


class PoolingCore:
    """The queue of texts that wait, and the forward passes that compute them."""

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
        """Remove a waiting text. A text that is being computed, or an unknown id, is ignored."""
        self._waiting.pop(request_id, None)

    def next_pass(self) -> list[PooledText]:
        """Remove the texts of the next pass from the queue: the first text, and the texts after it as long as they fit
        into the budget.

        A text that is longer than the budget is computed alone.
        """
        texts: list[PooledText] = []
        room = self.max_tokens
        for text in self._waiting.values():
            if texts and (len(text.token_ids) > room or len(texts) == self.max_seqs):
                break
            texts.append(text)
            room -= len(text.token_ids)
        for text in texts:
            del self._waiting[text.request_id]
        self._num_running, self._step_tokens = len(texts), sum(len(text.token_ids) for text in texts)
        return texts

    def run(self, texts: Sequence[PooledText]) -> list[PooledVector]:
        """Compute the texts from :meth:`next_pass`. If the pass fails, each of its texts gets the error."""
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
