"""Seeded predictions of answer lengths, as good as a stated rank correlation."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Sequence
from statistics import NormalDist

from chairlift.errors import ConfigError
from chairlift_lab.replay.traced_request import TracedRequest

__all__ = ["with_predictions"]


def with_predictions(trace: Sequence[TracedRequest], tau: float, seed: int) -> list[TracedRequest]:
    """The trace with a predicted length for each answer.

    The predictions are the answers' lengths in another order. Kendall's rank correlation between lengths and
    predictions is about ``tau``: 1 for an oracle, 0 for predictions that know nothing. Both have normal scores with the
    correlation sin(pi tau / 2), for which this relation is exact (a Gaussian copula; Kruskal, 1958). Equal traces,
    ``tau`` and seeds give equal predictions. Raises ConfigError if ``tau`` is not from 0 to 1.
    """
    if not 0 <= tau <= 1:
        raise ConfigError(f"tau must be from 0 (no knowledge) to 1 (the true order), got {tau}")
    rng = random.Random(seed)
    count = len(trace)
    lengths = [request.output_tokens for request in trace]
    order = sorted(range(count), key=lambda index: (lengths[index], rng.random()))
    correlation = math.sin(math.pi * tau / 2)
    noise = math.sqrt(max(0.0, 1 - correlation**2))
    normal = NormalDist()
    scores = [0.0] * count
    for rank, index in enumerate(order):
        scores[index] = correlation * normal.inv_cdf((rank + 0.5) / count) + noise * rng.gauss(0.0, 1.0)
    predicted = [0] * count
    for rank, index in enumerate(sorted(range(count), key=scores.__getitem__)):
        predicted[index] = lengths[order[rank]]
    return [
        dataclasses.replace(request, predicted_tokens=tokens) for request, tokens in zip(trace, predicted, strict=True)
    ]
