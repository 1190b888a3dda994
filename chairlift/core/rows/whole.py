"""Requests of a model that keeps nothing between two steps: one step must compute the whole prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING

from chairlift.core.request import Request
from chairlift.core.rows.kind import RowKind

if TYPE_CHECKING:
    from chairlift.core.scheduler.batch import Batch

__all__ = ["WholeRows"]


class WholeRows(RowKind):
    """Every request is of this kind, and ends with its first step.

    A request joins only a step that has room for its whole prompt, even beyond the step's budget for prompts. So it
    never keeps a row that no step computes. A prompt that is longer than any step may be has a step of its own.
    """

    name = "tokens"

    def __init__(self) -> None:
        self._num_tokens = 0
        """Number of tokens of the requests that joined the step that is being scheduled."""

    def has(self, request: Request) -> bool:
        return True

    def attach(self, batch: Batch) -> None:
        self._batch = batch

    def twin(self) -> WholeRows:
        return WholeRows()

    def begin(self, num_decodes: int) -> None:
        self._num_tokens = 0

    def obstacle(self, request: Request) -> bool:
        return self._num_tokens > 0 and self._num_tokens + request.num_tokens > self._batch.max_tokens

    def joined(self, request: Request) -> None:
        self._num_tokens += request.num_tokens

    def room(self, request: Request, num_tokens: int) -> int:
        return request.num_tokens
