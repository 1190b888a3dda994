"""Arrival processes: when requests arrive. Equal processes and seeds give equal times on any machine."""

from __future__ import annotations

import dataclasses
import math
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from chairlift.errors import ConfigError

__all__ = [
    "ARRIVAL_FORMS",
    "AllAtOnce",
    "Arrivals",
    "ClosedLoop",
    "Constant",
    "Diurnal",
    "Gamma",
    "OnOff",
    "Ramp",
    "parse_arrivals",
]

_Times = npt.NDArray[np.float64]


class Arrivals(Protocol):
    """Protocol of an arrival process: it determines when requests arrive."""

    def times(self, count: int, seed: int = 0) -> list[float]:
        """Arrival times of ``count`` requests in seconds from the start, ascending."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class AllAtOnce:
    """All requests arrive at the start, as in an offline run."""

    def times(self, count: int, seed: int = 0) -> list[float]:
        return [0.0] * count


@dataclasses.dataclass(frozen=True, slots=True)
class ClosedLoop:
    """``users`` clients, each of which sends its next request when its last request has been answered.

    All times are 0: the client program always has ``users`` requests in flight. A closed loop hides queueing. A slow
    server gets fewer requests, so its queue never grows, and latency looks better than with independent visitors
    (Schroeder et al., Open Versus Closed, NSDI 2006).
    """

    users: int

    def __post_init__(self) -> None:
        if not 1 <= self.users <= 1_000_000:
            raise ConfigError(f"users of arrivals must be 1 to 1,000,000, got {self.users!r}")

    def times(self, count: int, seed: int = 0) -> list[float]:
        return [0.0] * count


@dataclasses.dataclass(frozen=True, slots=True)
class Constant:
    """One request every ``1 / rate`` seconds. The first request arrives at 0."""

    rate: float

    def __post_init__(self) -> None:
        _positive("rate", self.rate)

    def times(self, count: int, seed: int = 0) -> list[float]:
        return [index / self.rate for index in range(count)]


@dataclasses.dataclass(frozen=True, slots=True)
class Gamma:
    """Independent gaps with a gamma distribution of mean ``1 / rate`` seconds.

    ``burstiness`` is the shape of the distribution, as in vLLM's benchmarks. 1 gives a Poisson process, smaller values
    give bursts, and larger values give regular gaps.
    """

    rate: float
    burstiness: float = 1.0

    def __post_init__(self) -> None:
        _positive("rate", self.rate)
        _positive("burstiness", self.burstiness)

    def times(self, count: int, seed: int = 0) -> list[float]:
        gaps = _generator(seed).gamma(self.burstiness, 1 / (self.rate * self.burstiness), count)
        return _listed(np.cumsum(gaps))


@dataclasses.dataclass(frozen=True, slots=True)
class OnOff:
    """Poisson arrivals with ``rate`` for ``on_seconds``, then no arrivals for ``off_seconds``, repeated."""

    rate: float
    on_seconds: float
    off_seconds: float

    def __post_init__(self) -> None:
        for name in ("rate", "on_seconds", "off_seconds"):
            _positive(name, getattr(self, name))

    def times(self, count: int, seed: int = 0) -> list[float]:
        busy = _unit_poisson(count, seed) / self.rate
        return _listed(busy + np.floor(busy / self.on_seconds) * self.off_seconds)


@dataclasses.dataclass(frozen=True, slots=True)
class Ramp:
    """Poisson arrivals whose rate goes from ``start`` to ``end`` within ``seconds``, then stays."""

    start: float
    end: float
    seconds: float

    def __post_init__(self) -> None:
        for name in ("start", "end", "seconds"):
            _positive(name, getattr(self, name))

    def times(self, count: int, seed: int = 0) -> list[float]:
        # Until t, start t + growth t^2 / 2 arrivals are expected. Solve for the t at which this equals each arrival
        # time of a Poisson process with rate 1.
        wanted = _unit_poisson(count, seed)
        growth = (self.end - self.start) / self.seconds
        within = (self.start + self.end) / 2 * self.seconds
        root = np.sqrt(np.maximum(self.start**2 + 2 * growth * np.minimum(wanted, within), 0.0))
        ramp = 2 * np.minimum(wanted, within) / (self.start + root)
        return _listed(ramp + np.maximum(wanted - within, 0.0) / self.end)


@dataclasses.dataclass(frozen=True, slots=True)
class Diurnal:
    """Poisson arrivals whose rate varies as over a day: lowest at the start, highest after half of ``period`` seconds.

    ``rate`` is the mean rate over a period. ``peak_to_trough`` is the highest rate divided by the lowest rate.
    """

    rate: float
    peak_to_trough: float
    period: float

    def __post_init__(self) -> None:
        _positive("rate", self.rate)
        _positive("period", self.period)
        if not 1 <= self.peak_to_trough < math.inf:
            raise ConfigError(f"peak_to_trough of arrivals must be 1 or more, got {self.peak_to_trough!r}")

    def times(self, count: int, seed: int = 0) -> list[float]:
        # Invert the integral of rate * (1 - swing cos(2 pi t / period)) by bisection. This is Kepler's equation. Each
        # root differs by at most ``far`` from the arrival time at a constant rate.
        wanted = _unit_poisson(count, seed) / self.rate
        swing = (self.peak_to_trough - 1) / (self.peak_to_trough + 1)
        far = swing * self.period / (2 * math.pi)
        low, high = np.maximum(wanted - far, 0.0), wanted + far
        for _ in range(64):
            middle = (low + high) / 2
            early = middle - far * np.sin(2 * math.pi * middle / self.period) < wanted
            low, high = np.where(early, middle, low), np.where(early, high, middle)
        return _listed(np.maximum.accumulate(high))


ARRIVAL_FORMS: Final = {
    "all": (AllAtOnce, ()),
    "constant": (Constant, ("RATE",)),
    "poisson": (Gamma, ("RATE",)),
    "gamma": (Gamma, ("RATE", "BURSTINESS")),
    "onoff": (OnOff, ("RATE", "ON_SECONDS", "OFF_SECONDS")),
    "ramp": (Ramp, ("START_RATE", "END_RATE", "SECONDS")),
    "diurnal": (Diurnal, ("RATE", "PEAK_TO_TROUGH", "PERIOD_SECONDS")),
    "closed": (ClosedLoop, ("USERS",)),
}
"""Name of a process in :func:`parse_arrivals` -> (class, names of its parameters in order). Rates are in requests per
second."""


def parse_arrivals(text: str) -> Arrivals:
    """Parse a process such as ``poisson:4`` (see :data:`ARRIVAL_FORMS`). Raises ConfigError that lists the forms."""
    name, *parts = text.split(":")
    forms = ", ".join(":".join((form, *names)) for form, (_, names) in ARRIVAL_FORMS.items())
    if name not in ARRIVAL_FORMS or len(parts) != len(ARRIVAL_FORMS[name][1]):
        raise ConfigError(f"arrivals must be one of {forms}; got {text!r}")
    try:
        numbers = [int(part) if name == "closed" else float(part) for part in parts]
    except ValueError:
        raise ConfigError(f"arrivals must be one of {forms}, with numbers; got {text!r}") from None
    arrivals: Arrivals = ARRIVAL_FORMS[name][0](*numbers)
    return arrivals


def _unit_poisson(count: int, seed: int) -> _Times:
    return np.cumsum(_generator(seed).exponential(1.0, count))


def _generator(seed: int) -> np.random.Generator:
    return np.random.default_rng([seed, 1])  # lengths are drawn from another stream


def _listed(times: _Times) -> list[float]:
    return [float(time) for time in times]


def _positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ConfigError(f"{name} of arrivals must be above 0, got {value!r}")
