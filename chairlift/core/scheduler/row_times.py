"""Corrects predicted times of decode steps by the newest steps of the same number of rows.

The cost model is smooth between its knots, and real kernels are not: a step of 17 rows may take a tenth longer than one
of 16. The error of the model at one size hardly matters for most decisions. But the gain of a few drafts is the
difference of two step times at nearby sizes, and there the error is as large as the gain.
"""

from __future__ import annotations

import math
from typing import Final

from chairlift.core.scheduler.cost_model import CostModel, StepFeatures

__all__ = ["RowTimes"]

_MOST_ROWS: Final = 512
"""Steps with more rows are not corrected. Drafts never pay there."""
_MEMORY: Final = 0.1
"""Minimum weight of the newest step in the error of a size."""
_PRIOR_STEPS: Final = 1.0
"""Weight of the assumption that the model is right, as a number of steps."""
_NEAR: Final = (1.0, 0.7, 0.5)
"""Entry i: weight of the steps with i rows more or fewer in the error of a size."""
_MAX_STEPS: Final = 1 / _MEMORY
_OUTLIER: Final = 0.3
"""Limit of one observed error, as a logarithm. Larger ones are interruptions by other programs."""


class RowTimes:
    """Step times predicted by ``model``, corrected by the mean error of the newest steps with about as many rows."""

    def __init__(self, model: CostModel) -> None:
        self._model = model
        self._errors = [0.0] * (_MOST_ROWS + 1)
        """Entry m: mean logarithm of (observed time / predicted time) of the newest steps with m rows."""
        self._counts = [0.0] * (_MOST_ROWS + 1)
        """Entry m: number of these steps, at most ``_MAX_STEPS``."""
        self._factors = [1.0] * (_MOST_ROWS + 1)
        """Entry m: factor by which a prediction for m rows is multiplied."""

    def seconds(self, step: StepFeatures) -> float:
        """Predicted seconds of a step. Steps with prompt tokens are predicted by the model alone."""
        found = self._model.step_seconds(step)
        if step.prefill_tokens or not 0 <= step.num_decodes <= _MOST_ROWS:
            return found
        return found * self._factors[step.num_decodes]

    def observe(self, step: StepFeatures, seconds: float) -> None:
        """Learn from a step that took ``seconds``. Steps with prompt tokens are ignored."""
        rows = step.num_decodes
        if step.prefill_tokens or not 0 < rows <= _MOST_ROWS or not 0 < seconds < math.inf:
            return
        error = math.log(seconds / self._model.step_seconds(step))
        error = max(-_OUTLIER, min(_OUTLIER, error))
        count = self._counts[rows] = min(self._counts[rows] + 1, _MAX_STEPS)
        self._errors[rows] += (error - self._errors[rows]) / count
        reach = len(_NEAR) - 1
        for size in range(max(1, rows - reach), min(_MOST_ROWS, rows + reach) + 1):
            self._factors[size] = math.exp(self._error_at(size))

    def _error_at(self, rows: int) -> float:
        total = 0.0
        weight = _PRIOR_STEPS
        for other in range(max(1, rows - len(_NEAR) + 1), min(_MOST_ROWS, rows + len(_NEAR) - 1) + 1):
            share = _NEAR[abs(other - rows)] * self._counts[other]
            total += share * self._errors[other]
            weight += share
        return total / weight
