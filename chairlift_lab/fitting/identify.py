"""Says which terms of a cost model the steps of a log can determine.

A term is not identified if the log does not have its feature, if the feature hardly varies, or if it follows from the
other features. For example, if all requests have equal lengths, then the positions that are read are a multiple of the
rows, and no regression can tell their prices apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from chairlift_lab.fitting.run import TimedStep

__all__ = ["FEATURES", "unidentified"]

FEATURES: Final = {"row": 0, "prompt": 2, "context": 1, "pair": 3}
"""Name of a price -> index of its feature in StepFeatures. A price is judged against those before it."""
_LEAST_OWN: Final = 0.1
"""Smallest part of a feature, relative to its standard deviation, that the other features must not explain."""
_FEWEST: Final = 8
_WORDS: Final = {
    "row": "the number of rows",
    "prompt": "the number of prompt tokens",
    "context": "the number of positions read",
    "pair": "the attention of prompts",
}
_REMEDIES: Final = {
    "row": "record runs with 1 to 64 requests at a time",
    "prompt": "record requests with prompts of 128 to 8,000 tokens",
    "context": "record a run with other lengths at the same number of requests",
    "pair": "record prompts of 128 to 8,000 tokens",
}


def unidentified(steps: Sequence[TimedStep], unknown: Mapping[str, str]) -> dict[str, str]:
    """Price of :data:`FEATURES` -> why the steps do not determine it, for each price that they do not.

    ``unknown``: the same for prices that the files exclude.
    """
    reasons = {}
    weights = np.asarray([1 / seconds for _, seconds in steps])  # errors are relative to the duration
    features = np.asarray([step[:4] for step, _ in steps], float)
    others = [weights]
    for name, index in FEATURES.items():
        column = features[:, index]
        present = int(np.count_nonzero(column))
        if name in unknown:
            reasons[name] = unknown[name]
            continue
        if present < _FEWEST:
            reasons[name] = f"{present} steps have any, and a fit needs {_FEWEST}; {_REMEDIES[name]}"
            continue
        own = _own_part(column * weights, others)
        if own < _LEAST_OWN:
            reasons[name] = f"{_WORDS[name]} follows from the rest of the step to {1 - own:.0%}; {_REMEDIES[name]}"
            continue
        others.append(column * weights)
    return reasons


def _own_part(column: NDArray[np.float64], others: Sequence[NDArray[np.float64]]) -> float:
    """Length of the part of ``column`` that is orthogonal to ``others``, divided by the length of ``column`` without
    its multiple of the first of them."""
    spread = _rest(column, others[:1])
    length = float(np.linalg.norm(spread))
    if length <= 1e-9 * float(np.linalg.norm(column)):
        return 0.0
    return float(np.linalg.norm(_rest(column, others))) / length


def _rest(column: NDArray[np.float64], others: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
    matrix = np.stack([each / max(float(np.linalg.norm(each)), 1e-300) for each in others], axis=1)
    solution = np.linalg.lstsq(matrix, column, rcond=None)[0]
    rest: NDArray[np.float64] = column - matrix @ solution
    return rest
