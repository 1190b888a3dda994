"""Turns of the image encoder between two steps, and the limit on a step's prompt tokens of images."""

from __future__ import annotations

import math
from typing import Final

from chairlift.core.rows.images import ImageRows
from chairlift.core.scheduler.batch import Batch
from chairlift.core.scheduler.costs import Costs
from chairlift.engine.clock import Clock
from chairlift.engine.images import BUSY_FRACTION, Images
from chairlift.engine.step_times import decode_seconds

__all__ = ["ImageTurns"]

_LEAST_IMAGE_TOKENS: Final = 8
"""Minimum number of prompt tokens of images in a step without a turn of the encoder."""


class ImageTurns:
    """Divides the time that images may add to a step between the encoder and the prompts with images of a ``batch``.
    ``rows`` is the batch's kind of requests with images."""

    def __init__(self, batch: Batch, rows: ImageRows, costs: Costs, clock: Clock) -> None:
        self._batch = batch
        self._rows = rows
        self._costs = costs
        self._clock = clock
        self._encoder_waits = False
        """Whether the encoder had no turn before the newest step, because the step had prompt tokens of images."""

    def begin(self, images: Images) -> None:
        """Let the encoder compute, and limit the next step's prompt tokens of images, so that both together add at most
        a fraction of a decode step's time to the step. If both have work, they take turns."""
        seconds = decode_seconds(self._batch, self._costs)
        batch = self._batch
        for request in images.without_rows():
            if request in batch.waiting and self._rows.obstacle(request):
                batch.hold_back(request)
                images.encode_again(request)
        images.find_room()
        computes = any(r.images and r.num_computed_tokens < r.images[-1].end for r in batch.catching_up)
        self._encoder_waits = images.is_encoding and computes and seconds is not None and not self._encoder_waits
        start = self._clock.now()
        if images.is_encoding and not self._encoder_waits:
            images.work(seconds)
        self._rows.tokens = math.inf
        if seconds is not None and not batch.membership.closed:
            spent = self._clock.now() - start
            decodes = batch.features(batch.decodes.count)
            most = batch.max_tokens
            limit = (1 + BUSY_FRACTION) * self._costs.model.step_seconds(decodes) - spent
            least = 0 if spent else _LEAST_IMAGE_TOKENS
            self._rows.tokens = self._costs.chunk_budget(decodes, limit, most, least)
