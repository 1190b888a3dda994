"""Which kind of work a step does: decode rows, chunks of prompts, or both."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Protocol

from chairlift.errors import ConfigError
from chairlift.scheduler.costs import Costs

if TYPE_CHECKING:
    from chairlift.scheduler.batch import Batch

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

    def turn(self, batch: Batch) -> Turn: ...


class _Mixed:
    """Decode rows first, the rest of the budget for chunks (Sarathi-Serve, OSDI 2024)."""

    name = "mixed"

    def turn(self, batch: Batch) -> Turn:
        return Turn.MIXED


class _PrefillFirst:
    """Whoever can be prefilled is, with the whole budget, before anybody decodes on (vLLM's first scheduler): rows
    fill up soonest, and answers that are under way pause."""

    name = "prefill_first"

    def turn(self, batch: Batch) -> Turn:
        return Turn.PREFILL if batch.has_prefill_work else Turn.MIXED


class _DecodeFirst:
    """Prompts wait until fewer than ``share`` of the rows decode: answers under way are smooth, new ones come later."""

    name = "decode_first"

    def __init__(self, share: float = 0.5, patience: int = 256) -> None:
        self._share = share
        self._patience = patience
        self._skipped = 0

    def turn(self, batch: Batch) -> Turn:
        enough = batch.decodes.count >= max(1.0, self._share * batch.running_limit)
        self._skipped = self._skipped + 1 if enough and batch.has_prefill_work else 0
        if not enough or self._skipped > self._patience:
            self._skipped = 0
            return Turn.MIXED
        return Turn.DECODE


class _Separate:
    """Steps of one kind, in turns where there is work of both (FasterTransformer's and TGI's way)."""

    name = "separate"

    def __init__(self) -> None:
        self._last = Turn.DECODE

    def turn(self, batch: Batch) -> Turn:
        if not batch.has_prefill_work or (batch.decodes.count and self._last is Turn.PREFILL):
            self._last = Turn.DECODE
        else:
            self._last = Turn.PREFILL
        return self._last


class _Auto:
    """Mixed while a step of both kinds is predicted to take no longer than two of one kind; else apart, and where
    prompts dominate, prompts first. Decided by the measured ratio of prompt to decode tokens that want to be computed,
    and by the load, through the cost model; with hysteresis, so that it does not flutter."""

    name = "auto"

    def __init__(self, costs: Costs, max_tokens: int) -> None:
        self._costs = costs
        self._max_tokens = max_tokens
        self._ratio = 1.0
        """Prompt tokens per decode row, as a running mean."""
        self._cost = 1.0
        """Seconds of a mixed step / of two apart, as a running mean."""
        self._mode: PrefillMode = MIXED
        self._modes = {mode.name: mode for mode in (MIXED, _PrefillFirst(), _Separate())}

    @property
    def current(self) -> str:
        """The mode it is in."""
        return self._mode.name

    def turn(self, batch: Batch) -> Turn:
        rows, tokens = batch.decodes.count, batch.num_prefill_tokens(self._max_tokens)
        if rows and tokens:
            self._ratio += _NEWEST * (tokens / rows - self._ratio)
            self._cost += _NEWEST * (self._costs.mixed_cost(rows, batch.num_computed_tokens, tokens) - self._cost)
            if self._cost < 1.0 - _HYSTERESIS:
                self._mode = MIXED
            elif self._cost > 1.0 + _HYSTERESIS:
                self._mode = self._modes["prefill_first" if self._ratio > _PROMPTS_DOMINATE else "separate"]
        return self._mode.turn(batch)


MIXED: PrefillMode = _Mixed()
_NEWEST = 0.05
_HYSTERESIS = 0.03
_PROMPTS_DOMINATE = 32.0


def prefill_mode_from_name(name: str, costs: Costs, max_tokens: int) -> PrefillMode:
    """A fresh mode; ``max_tokens`` is a step's budget. Raises ConfigError for an unknown name."""
    if name == "auto":
        return _Auto(costs, max_tokens)
    modes: dict[str, type[PrefillMode]] = {mode.name: mode for mode in (_Mixed, _PrefillFirst, _DecodeFirst, _Separate)}
    if name not in modes:
        raise ConfigError(f"prefill_mode must be one of {', '.join(modes)}, auto; got {name!r}")
    return modes[name]()
