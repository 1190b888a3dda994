"""How long prompts and answers are, and the requests drawn from that: a workload is a value."""

from __future__ import annotations

import dataclasses

import numpy as np

from chairlift.errors import ConfigError

__all__ = ["LogNormal", "Workload"]

_FIRST_ID = 10
"""Smallest token id of a drawn prompt: those below are special tokens in most vocabularies."""


@dataclasses.dataclass(frozen=True, slots=True)
class LogNormal:
    """Lengths in tokens with a normal logarithm, clipped: most requests are short, a few very long, as in chat."""

    mu: float
    """Mean of the natural logarithm."""
    sigma: float
    """Its standard deviation."""
    least: int
    most: int

    def draw(self, rng: np.random.Generator, count: int) -> list[int]:
        """``count`` lengths, fractions cut off."""
        lengths = rng.lognormal(self.mu, self.sigma, count).astype(int)
        return [int(length) for length in np.clip(lengths, self.least, self.most)]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests that all arrive at once. Equal values give equal requests, on any machine."""

    count: int = 64
    seed: int = 0
    vocab_size: int = 8000
    """Prompt ids are uniform from 10 up to here, exclusive."""
    prompt: LogNormal = LogNormal(4.6, 0.8, 8, 1024)
    output: LogNormal = LogNormal(4.2, 0.9, 4, 512)

    def requests(self) -> list[tuple[list[int], int]]:
        """``count`` pairs of prompt token ids and number of output tokens.

        The order of the draws is part of the definition: prompt lengths, output lengths, then the ids of each prompt.
        Raises ConfigError when the vocabulary has no id for prompts.
        """
        if self.vocab_size <= _FIRST_ID:
            raise ConfigError(f"prompts are drawn from ids {_FIRST_ID} and above, but vocab_size is {self.vocab_size}")
        rng = np.random.default_rng(self.seed)
        prompts, outputs = self.prompt.draw(rng, self.count), self.output.draw(rng, self.count)
        return [
            (rng.integers(_FIRST_ID, self.vocab_size, length).tolist(), count)
            for length, count in zip(prompts, outputs, strict=True)
        ]
