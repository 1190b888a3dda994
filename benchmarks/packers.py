"""Inputs for the packing benchmarks, and packers of other projects to compare with."""

from __future__ import annotations

import functools
import importlib
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from acceptance import peer

__all__ = ["MIXES", "C", "Rows", "grain_dataset", "mix", "next_fit", "peers", "river_detector", "waste"]

C = 4096


class Rows:
    """A source of ``count`` sequences with ``length(i)`` tokens each. The sequences are slices of one array, so that a
    large source needs little memory."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = lengths
        self.tokens = np.arange(2 * max(lengths), dtype=np.int32)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Any:
        start = index * 31 % len(self.tokens) // 2
        return self.tokens[start : start + self.lengths[index]]


def mix(name: str, count: int, seed: int, capacity: int = C) -> list[int]:
    """Sequence lengths of one of the four mixes that the tests also use."""
    mixes = importlib.import_module("tests.train.mixes").MIXES
    rng = random.Random(seed)
    return [mixes[name](rng, capacity) for _ in range(count)]


MIXES = ("chat", "docs", "rl", "hard")


def waste(lengths: Sequence[int], packs: int, capacity: int = C) -> float:
    """Padding in percent of the capacity of all packs."""
    return 100 * (1 - sum(lengths) / (packs * capacity))


def next_fit(lengths: Sequence[int]) -> int:
    packs, used = 1, 0
    for length in lengths:
        if used + length > C:
            packs, used = packs + 1, 0
        used += length
    return packs


def peers(window: int) -> dict[str, tuple[str, Callable[[list[int]], int]]]:
    """Name of a packer of another project -> (package, function from sequence lengths to the number of packs)."""

    def trl_packs(lengths: list[int], batch: int) -> int:
        dataset = peer("datasets").Dataset.from_dict({"input_ids": [np.zeros(n, np.uint8) for n in lengths]})
        return len(peer("trl").pack_dataset(dataset, C, "bfd", {"batch_size": batch}))

    def heaps(lengths: list[int]) -> int:
        parts = [lengths[at : at + window] for at in range(0, len(lengths), window)]
        return sum(len(peer("binpacking").to_constant_volume(part, C)) for part in parts)

    def grain_packs(lengths: list[int]) -> int:
        return sum(1 for _ in grain_dataset(Rows(lengths), "BestFit", 256))

    return {
        f"TRL bfd, window {window}": ("trl", functools.partial(trl_packs, batch=window)),
        "TRL bfd, window 100k": ("trl", functools.partial(trl_packs, batch=100_000)),
        f"binpacking, window {window}": ("binpacking", heaps),
        "Grain best-fit, 256 bins": ("grain", grain_packs),
    }


def grain_dataset(rows: Any, kind: str, bins: int) -> Any:
    grain = importlib.import_module("grain.python")
    source = grain.MapDataset.range(len(rows)).map(lambda index: {"tokens": rows[index]}).to_iter_dataset()
    packer = getattr(grain.experimental, f"{kind}PackIterDataset")
    return packer(source, length_struct={"tokens": C}, num_packing_bins=bins)


def river_detector(make: Callable[[], Any]) -> Callable[[float], bool]:
    detector = make()

    def update(value: float) -> bool:
        detector.update(value)
        return bool(detector.drift_detected)

    return update
