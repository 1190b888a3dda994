"""Requests with images: which positions read encoded rows, which of them one step must compute, and how many prompt
tokens of images a step may have."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from chairlift.base.image_spans import cut_by, marks
from chairlift.core.request import Request
from chairlift.core.rows.kind import RowKind

if TYPE_CHECKING:
    from chairlift.core.scheduler.batch import Batch

__all__ = ["ImageRows"]


class ImageRows(RowKind):
    """Limits the prompt tokens of images beside decode rows, and keeps requests out of steps that would read encoded
    rows that are not in memory (:attr:`Request.rows_lost_until`)."""

    name = "image"

    def __init__(self) -> None:
        self.tokens: float = math.inf
        """Maximum number of prompt tokens, up to the end of a prompt's last image, in a step that also decodes. The
        owner of the images may change it between steps."""
        self._left: float = math.inf
        """Number of such tokens that the step that is being scheduled may still compute."""

    def has(self, request: Request) -> bool:
        return bool(request.images)

    def attach(self, batch: Batch) -> None:
        self._batch = batch

    def obstacle(self, request: Request) -> bool:
        """Whether a waiting request, if it joined now, would read encoded images that are not in memory."""
        return request.rows_lost_until > 0 and self._batch.num_known(request) < request.rows_lost_until

    def begin(self, num_decodes: int) -> None:
        self._left = self.tokens if num_decodes else math.inf

    def room(self, request: Request, num_tokens: int) -> int:
        return int(max(0, min(num_tokens, self._left))) if self._reads(request) else num_tokens

    def spent(self, request: Request, num_tokens: int) -> None:
        if self._reads(request):
            self._left -= num_tokens

    @staticmethod
    def _reads(request: Request) -> bool:
        """Whether the request's next chunk begins before the end of its last image."""
        return request.num_computed_tokens < request.images[-1].end

    def whole(self, request: Request, index: int) -> tuple[int, int] | None:
        span = cut_by(request.images, index)
        return None if span is None else (span.position, span.end)

    def marks(self, request: Request, start: int, end: int) -> bytes:
        return marks(request.images, start, end)

    def may_resume(self, request: Request, position: int) -> bool:
        return position >= request.rows_lost_until
