"""Which kind of work a step does: decode rows, chunks of prompts, or both."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Protocol

from chairlift.errors import ConfigError

if TYPE_CHECKING:
    from chairlift.scheduler.population import Population

__all__ = ["MIXED", "PrefillMode", "Turn", "prefill_mode_from_name"]


class Turn(enum.Enum):
    """What one step computes."""

    MIXED = "mixed"
    DECODE = "decode"
    PREFILL = "prefill"
    """Decode rows rest, unless there turns out to be nothing to prefill."""


class PrefillMode(Protocol):
    """Asked once per step."""

    name: str

    def turn(self, population: Population) -> Turn: ...


class _Mixed:
    """Decode rows first, the rest of the budget for chunks (Sarathi-Serve, OSDI 2024)."""

    name = "mixed"

    def turn(self, population: Population) -> Turn:
        return Turn.MIXED


class _PrefillFirst:
    """Whoever can be prefilled is, with the whole budget, before anybody decodes on (vLLM's first scheduler): rows
    fill up soonest, and answers that are under way pause."""

    name = "prefill_first"

    def turn(self, population: Population) -> Turn:
        return Turn.PREFILL if population.has_prefill_work else Turn.MIXED


class _DecodeFirst:
    """Prompts wait until fewer than ``share`` of the rows decode: answers under way are smooth, new ones come later."""

    name = "decode_first"

    def __init__(self, share: float = 0.5, patience: int = 256) -> None:
        self._share = share
        self._patience = patience
        self._skipped = 0

    def turn(self, population: Population) -> Turn:
        enough = population.decodes.count >= max(1.0, self._share * population.max_running)
        self._skipped = self._skipped + 1 if enough and population.has_prefill_work else 0
        if not enough or self._skipped > self._patience:
            self._skipped = 0
            return Turn.MIXED
        return Turn.DECODE


class _Separate:
    """Steps of one kind, in turns where there is work of both (FasterTransformer's and TGI's way)."""

    name = "separate"

    def __init__(self) -> None:
        self._last = Turn.DECODE

    def turn(self, population: Population) -> Turn:
        if not population.has_prefill_work or (population.decodes.count and self._last is Turn.PREFILL):
            self._last = Turn.DECODE
        else:
            self._last = Turn.PREFILL
        return self._last


MIXED: PrefillMode = _Mixed()


def prefill_mode_from_name(name: str) -> PrefillMode:
    """``mixed``, ``prefill_first``, ``decode_first`` or ``separate``; raises ConfigError for anything else."""
    modes: dict[str, type[PrefillMode]] = {mode.name: mode for mode in (_Mixed, _PrefillFirst, _DecodeFirst, _Separate)}
    if name not in modes:
        raise ConfigError(f"prefill_mode must be one of {', '.join(modes)}; got {name!r}")
    return modes[name]()
