"""Predicted seconds of training work, corrected by measured seconds.

The prediction has one free factor, the ratio of measured to predicted seconds. It is the exponential mean of the
ratios so far, so one slow pack changes it little.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Final

__all__ = ["WorkPrices"]

_MEMORY: Final = 0.9
"""Weight of the ratio so far; a new measurement has the rest."""
_MOST: Final = 4.0
"""A measured ratio counts as at most this many times the ratio so far, because a machine may sleep."""


@dataclasses.dataclass(slots=True)
class WorkPrices:
    """Seconds of packs and steps on this machine. The defaults fit a model of 135 million weights on two cores."""

    token: float = 1.2e-3
    """Seconds per token of a forward and a backward pass."""
    token_pair: float = 1e-8
    """Seconds per pair of tokens of one sequence that attend to each other."""
    forward_share: float = 0.4
    """Part of the seconds that a call without a backward pass takes."""
    pack: float = 0.02
    """Seconds of a pack that do not depend on its tokens: the weights are read once."""
    steps: Mapping[str, float] = dataclasses.field(
        default_factory=lambda: {"optim_step": 0.05, "create": 0.05, "save": 0.5, "load": 0.5}
    )
    """Kind of a step -> seconds."""
    ratio: float = 1.0
    """Measured divided by predicted seconds."""

    def sequence(self, num_tokens: int, forward_only: bool) -> float:
        """Predicted seconds of one sequence in a pack."""
        share = self.forward_share if forward_only else 1.0
        return self.ratio * share * (self.token * num_tokens + self.token_pair * num_tokens * num_tokens / 2)

    def step(self, kind: str) -> float:
        """Predicted seconds of a step of this kind."""
        return self.ratio * self.steps[kind]

    def start(self) -> float:
        """Predicted seconds of a pack without its sequences."""
        return self.ratio * self.pack

    def measured(self, predicted: float, seconds: float) -> None:
        """Note that a pack of ``predicted`` seconds took ``seconds``."""
        if predicted <= 0 or seconds <= 0:
            return
        found = min(self.ratio * seconds / predicted, _MOST * self.ratio)
        self.ratio = _MEMORY * self.ratio + (1 - _MEMORY) * found
