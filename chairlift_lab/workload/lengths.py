"""Distributions of prompt and answer lengths, and requests that are drawn from them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Final, Literal, Protocol

import numpy as np

from chairlift.errors import ConfigError
from chairlift_lab.workload.formats import read_trace

__all__ = [
    "LENGTH_FORMS",
    "Empirical",
    "Fixed",
    "Lengths",
    "LogNormal",
    "Uniform",
    "Workload",
    "Zipf",
    "parse_lengths",
]

_MAX_LENGTH: Final = 1 << 24
_FIRST_ID = 10
"""Smallest token id of a drawn prompt. Lower ids are special tokens in most vocabularies."""


class Lengths(Protocol):
    """Protocol of a distribution of whole numbers of at least 1, such as tokens, turns of a chat, or ms."""

    def draw(self, rng: np.random.Generator, count: int) -> list[int]:
        """Draw ``count`` independent numbers."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class LogNormal:
    """Log-normal lengths in tokens, clipped to a range. Most requests are short and a few are very long, as in chat."""

    mu: float
    """Mean of the natural logarithm of a length."""
    sigma: float
    """Standard deviation of the natural logarithm of a length."""
    least: int
    most: int

    def __post_init__(self) -> None:
        _check_range(self.least, self.most)
        if not (-50 <= self.mu <= 50 and 0 <= self.sigma <= 50):
            raise ConfigError(f"lengths need MU from -50 to 50 and SIGMA from 0 to 50, got {self.mu} and {self.sigma}")

    def draw(self, rng: np.random.Generator, count: int) -> list[int]:
        """Draw ``count`` lengths, rounded down to whole numbers."""
        lengths = np.minimum(rng.lognormal(self.mu, self.sigma, count), self.most).astype(int)
        return [int(length) for length in np.clip(lengths, self.least, self.most)]


@dataclasses.dataclass(frozen=True, slots=True)
class Zipf:
    """Lengths from ``least`` to ``most``. A length n is drawn in proportion to ``n ** -alpha``: most are short."""

    alpha: float
    least: int
    most: int

    def __post_init__(self) -> None:
        _check_range(self.least, self.most)
        if not 0 <= self.alpha <= 50:
            raise ConfigError(f"lengths need ALPHA from 0 to 50, got {self.alpha}")

    def draw(self, rng: np.random.Generator, count: int) -> list[int]:
        lengths = np.arange(self.least, self.most + 1, dtype=np.float64)
        until = np.cumsum((lengths / self.least) ** -self.alpha)
        found = np.searchsorted(until, rng.random(count) * until[-1], side="right")
        return [self.least + int(index) for index in np.minimum(found, len(lengths) - 1)]


@dataclasses.dataclass(frozen=True, slots=True)
class Uniform:
    """Lengths from ``least`` to ``most``, all equally likely."""

    least: int
    most: int

    def __post_init__(self) -> None:
        _check_range(self.least, self.most)

    def draw(self, rng: np.random.Generator, count: int) -> list[int]:
        return [int(length) for length in rng.integers(self.least, self.most + 1, count)]


@dataclasses.dataclass(frozen=True, slots=True)
class Fixed:
    """Every length is ``tokens``."""

    tokens: int

    def __post_init__(self) -> None:
        _check_range(self.tokens, self.tokens)

    def draw(self, rng: np.random.Generator, count: int) -> list[int]:
        return [self.tokens] * count


@dataclasses.dataclass(frozen=True, slots=True)
class Empirical:
    """Observed lengths, drawn with replacement.

    Prompt and answer lengths are drawn independently. Use a sample of the trace where the two must stay together.
    """

    seen: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.seen:
            raise ConfigError("there are no lengths to draw from")
        _check_range(min(self.seen), max(self.seen))

    def draw(self, rng: np.random.Generator, count: int) -> list[int]:
        return [int(length) for length in rng.choice(np.array(self.seen), count)]


LENGTH_FORMS: Final[dict[str, tuple[Any, tuple[str, ...]]]] = {
    "lognormal": (LogNormal, ("MU", "SIGMA", "MIN", "MAX")),
    "zipf": (Zipf, ("ALPHA", "MIN", "MAX")),
    "uniform": (Uniform, ("MIN", "MAX")),
    "fixed": (Fixed, ("N",)),
}
"""Name of a distribution in :func:`parse_lengths` -> (class, names of its parameters in order). MU and SIGMA are the
mean and the standard deviation of the natural logarithm."""


def parse_lengths(text: str, of: Literal["prompt", "output"] = "prompt") -> Lengths:
    """Parse a distribution such as ``uniform:16:64`` (see :data:`LENGTH_FORMS`). ``file:TRACE`` draws from a trace.

    ``of`` selects the prompt lengths or the answer lengths of that trace. Raises ConfigError for an unknown form, with
    a list of the forms, and for a trace that cannot be read.
    """
    name, *parts = text.split(":")
    if name == "file" and parts:
        trace = read_trace(Path(text.removeprefix("file:")))
        prompts = of == "prompt"
        return Empirical(tuple(each.prompt_tokens if prompts else each.output_tokens for each in trace))
    forms = ", ".join([":".join((form, *names)) for form, (_, names) in LENGTH_FORMS.items()] + ["file:TRACE"])
    if name not in LENGTH_FORMS or len(parts) != len(LENGTH_FORMS[name][1]):
        raise ConfigError(f"lengths must be one of {forms}; got {text!r}")
    kind, names = LENGTH_FORMS[name]
    try:
        numbers = [
            float(part) if name in ("MU", "SIGMA", "ALPHA") else int(part)
            for name, part in zip(names, parts, strict=True)
        ]
    except ValueError:
        raise ConfigError(f"lengths must be one of {forms}, with numbers; got {text!r}") from None
    lengths: Lengths = kind(*numbers)
    return lengths


def _check_range(least: int, most: int) -> None:
    if not 1 <= least <= most <= _MAX_LENGTH:
        raise ConfigError(f"lengths must go from at least 1 to at most {_MAX_LENGTH:,}, got {least} to {most}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests that all arrive at once. Equal values give equal requests, on any machine."""

    count: int = 64
    seed: int = 0
    vocab_size: int = 8000
    """Token ids of prompts are drawn uniformly from 10 to ``vocab_size`` - 1."""
    prompt: LogNormal = LogNormal(4.6, 0.8, 8, 1024)
    output: LogNormal = LogNormal(4.2, 0.9, 4, 512)

    def requests(self) -> list[tuple[list[int], int]]:
        """Draw ``count`` requests as (prompt token ids, number of output tokens).

        The order of the draws must not change, so that equal workloads stay equal: prompt lengths, output lengths, then
        the ids of each prompt. Raises ConfigError when the vocabulary is too small to have ids for prompts.
        """
        if self.vocab_size <= _FIRST_ID:
            raise ConfigError(f"prompts are drawn from ids {_FIRST_ID} and above, but vocab_size is {self.vocab_size}")
        rng = np.random.default_rng(self.seed)
        prompts = self.prompt.draw(rng, self.count)
        outputs = self.output.draw(rng, self.count)
        return [
            (rng.integers(_FIRST_ID, self.vocab_size, length).tolist(), count)
            for length, count in zip(prompts, outputs, strict=True)
        ]
