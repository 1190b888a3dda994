"""Distributions of prompt and answer lengths, and the requests drawn from them. A workload is a value."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Final, Literal, Protocol

import numpy as np

from chairlift.errors import ConfigError
from chairlift.workbench.workload.formats import read_trace

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

_MOST: Final = 1 << 24
_FIRST_ID = 10
"""Smallest token id of a drawn prompt, because lower ones are special tokens in most vocabularies."""


class Lengths(Protocol):
    """A distribution of whole numbers from 1 up: tokens, turns of a chat, ms."""

    def draw(self, rng: np.random.Generator, count: int) -> list[int]:
        """``count`` independent draws."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class LogNormal:
    """Lengths in tokens with a normal logarithm, clipped: most requests are short, a few very long, as in chat."""

    mu: float
    """Mean of the natural logarithm."""
    sigma: float
    """Its standard deviation."""
    least: int
    most: int

    def __post_init__(self) -> None:
        _check_range(self.least, self.most)
        if not (-50 <= self.mu <= 50 and 0 <= self.sigma <= 50):
            raise ConfigError(f"lengths need MU from -50 to 50 and SIGMA from 0 to 50, got {self.mu} and {self.sigma}")

    def draw(self, rng: np.random.Generator, count: int) -> list[int]:
        """``count`` lengths, fractions cut off."""
        lengths = np.minimum(rng.lognormal(self.mu, self.sigma, count), self.most).astype(int)
        return [int(length) for length in np.clip(lengths, self.least, self.most)]


@dataclasses.dataclass(frozen=True, slots=True)
class Zipf:
    """Lengths from ``least`` to ``most``, each as likely as its own power ``-alpha``: many short, a long tail."""

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
        return [self.least + int(place) for place in np.minimum(found, len(lengths) - 1)]


@dataclasses.dataclass(frozen=True, slots=True)
class Uniform:
    """All lengths from ``least`` to ``most`` are equally likely."""

    least: int
    most: int

    def __post_init__(self) -> None:
        _check_range(self.least, self.most)

    def draw(self, rng: np.random.Generator, count: int) -> list[int]:
        return [int(length) for length in rng.integers(self.least, self.most + 1, count)]


@dataclasses.dataclass(frozen=True, slots=True)
class Fixed:
    """Always ``tokens``."""

    tokens: int

    def __post_init__(self) -> None:
        _check_range(self.tokens, self.tokens)

    def draw(self, rng: np.random.Generator, count: int) -> list[int]:
        return [self.tokens] * count


@dataclasses.dataclass(frozen=True, slots=True)
class Empirical:
    """Observed lengths, drawn with replacement.

    Prompts and answers are drawn independently; a sample of the trace itself keeps them together.
    """

    seen: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.seen:
            raise ConfigError("there are no lengths to draw from")
        _check_range(min(self.seen), max(self.seen))

    def draw(self, rng: np.random.Generator, count: int) -> list[int]:
        return [int(length) for length in rng.choice(np.array(self.seen), count)]


LENGTH_FORMS: Final[dict[str, tuple[Any, tuple[str, ...]]]] = {
    "lognormal": (LogNormal, ("MU", "SIGMA", "LEAST", "MOST")),
    "zipf": (Zipf, ("ALPHA", "LEAST", "MOST")),
    "uniform": (Uniform, ("LEAST", "MOST")),
    "fixed": (Fixed, ("N",)),
}
"""Spelling of each distribution for :func:`parse_lengths`, besides ``file:TRACE``. MU and SIGMA are those of the
logarithm."""


def parse_lengths(text: str, of: Literal["prompt", "output"] = "prompt") -> Lengths:
    """Parse ``uniform:16:64`` and so on (:data:`LENGTH_FORMS`); ``file:TRACE`` draws from the lengths in a trace.

    ``of`` selects the lengths of prompts or of answers. Raises ConfigError with the list of forms, or with the fault of
    the trace.
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
            float(part) if wanted in ("MU", "SIGMA", "ALPHA") else int(part)
            for wanted, part in zip(names, parts, strict=True)
        ]
    except ValueError:
        raise ConfigError(f"lengths must be one of {forms}, with numbers; got {text!r}") from None
    lengths: Lengths = kind(*numbers)
    return lengths


def _check_range(least: int, most: int) -> None:
    if not 1 <= least <= most <= _MOST:
        raise ConfigError(f"lengths must go from at least 1 to at most {_MOST:,}, got {least} to {most}")


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
