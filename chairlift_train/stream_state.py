"""Settings of a pack stream, and conversion of its pending sequences to plain arrays, for its saved state."""

from __future__ import annotations

import dataclasses
import functools
import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from chairlift.errors import ConfigError
from chairlift_train.sequences import Sample

__all__ = ["StreamSettings", "pack_samples", "unpack_samples"]

_CHOICES = {
    "overflow": ("error", "split", "truncate", "drop", "own_pack"),
    "order": ("oldest_first", "shuffled"),
}
_NUMBERS = ("capacity", "pool", "align", "max_sequences", "ranks", "window", "seed", "pad_id")
_OPTIONAL = ("max_sequences",)
_GOAL = re.compile(r"(tokens|sequences|packs):([1-9][0-9]*)([KMG]?)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamSettings:
    """Settings of a :class:`~chairlift_train.stream.PackStream`. Only ``ranks`` may differ when a stream is resumed."""

    capacity: int
    pool: int
    align: int
    max_sequences: int | None
    overflow: str
    order: str
    ranks: int
    balance: tuple[float, float] | None
    window: int
    step: str | None
    seed: int
    pad_id: int

    def __post_init__(self) -> None:
        for name in _NUMBERS:
            value = getattr(self, name)
            if isinstance(value, bool) or not (hasattr(value, "__index__") or (value is None and name in _OPTIONAL)):
                raise ConfigError(f"{name} must be a whole number, got {value!r:.80}")
            if value is not None:
                object.__setattr__(self, name, operator.index(value))  # the bitsets need Python's unlimited integers
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        if self.ranks < 1 or self.window < 1:
            raise ConfigError(f"ranks and window must be at least 1, got {self.ranks} and {self.window}")
        if self.window % self.ranks and self.uses_window:
            raise ConfigError(f"window must be a multiple of ranks, got {self.window} for {self.ranks} ranks")
        unit, target = self.goal
        if unit == "packs" and target % self.ranks:
            raise ConfigError(f"step counts packs over all ranks: a multiple of {self.ranks}, got {self.step}")

    @property
    def uses_window(self) -> bool:
        return self.balance is not None or self.order == "shuffled"

    @property
    def gathered(self) -> int:
        """Number of packs that are collected before they are divided among the ranks."""
        return self.window if self.uses_window else self.ranks

    @functools.cached_property
    def goal(self) -> tuple[str, int]:
        """(unit, count): an optimiser step ends after this many tokens, sequences or packs."""
        if self.step is None:
            return "packs", self.ranks
        match = _GOAL.fullmatch(self.step) if isinstance(self.step, str) else None
        if match is None:
            raise ConfigError(f"step must be like tokens:1M, sequences:256 or packs:8, got {self.step!r}")
        return match[1], int(match[2]) * {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}[match[3]]

    def state_dict(self) -> dict[str, Any]:
        state = dataclasses.asdict(self)
        return {**state, "balance": None if self.balance is None else list(self.balance)}

    def check_same(self, saved: Mapping[str, Any]) -> None:
        """Raise ConfigError if a setting other than ``ranks`` differs from the saved setting. The message names it."""
        mine = self.state_dict()
        changed = [
            f"{name} was {saved.get(name)!r} and is {mine.get(name)!r}"
            for name in sorted({*mine, *saved} - {"ranks"})
            if mine.get(name) != saved.get(name)
        ]
        if changed:
            raise ConfigError(
                f"the state is of a stream with other settings: {'; '.join(changed)}; give it the same, or start a "
                "new stream"
            )


def pack_samples(samples: Sequence[Sample]) -> dict[str, Any]:
    """Store sequences as columns: arrays for numbers, lists for other values."""
    weighted = [sample.weights for sample in samples if sample.weights is not None]
    return {
        "ids": np.array([sample.id for sample in samples], np.int64),
        "lengths": np.array([len(sample.tokens) for sample in samples], np.int64),
        "born": np.array([sample.born for sample in samples], np.int64),
        "filled": np.array([sample.filled for sample in samples], np.int64),
        "weighted": np.array([sample.weights is not None for sample in samples], bool),
        "tokens": np.concatenate([np.empty(0, np.int32), *(sample.tokens for sample in samples)]),
        "weights": np.concatenate([np.empty(0, np.float32), *weighted]),
        "keys": [sample.key for sample in samples],
        "meta": [None if sample.meta is None else dict(sample.meta) for sample in samples],
    }


def unpack_samples(columns: Mapping[str, Any]) -> Iterator[Sample]:
    """Restore the sequences from the columns of :func:`pack_samples`."""
    start = weight_start = 0
    tokens = np.asarray(columns["tokens"], np.int32)
    weights = np.asarray(columns["weights"], np.float32)
    columns = {
        "filled": np.zeros(len(columns["ids"]), np.int64),
        **columns,
    }  # earlier releases have no "filled"
    names = ("ids", "lengths", "born", "filled", "weighted", "keys", "meta")
    rows = zip(*(columns[name] for name in names), strict=True)
    for position, length, born, filled, weighted, key, meta in rows:
        end = start + int(length)
        weight_end = weight_start + (int(length) if weighted else 0)
        own = weights[weight_start:weight_end].copy() if weighted else None
        yield Sample(int(position), tokens[start:end].copy(), own, meta, key, int(born), int(filled))
        start = end
        weight_start = weight_end
