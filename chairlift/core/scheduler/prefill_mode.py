"""Modes that decide what a step computes: decode rows, chunks of prompts, or both."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Protocol

from chairlift.base.plugins import is_plugin, load_plugin
from chairlift.core.scheduler.costs import Costs
from chairlift.errors import ConfigError

if TYPE_CHECKING:
    from chairlift.core.scheduler.batch import Batch
    from chairlift.core.scheduler.view import View

__all__ = ["MIXED", "PrefillMode", "PrefillModePlugin", "Turn", "prefill_mode_from_name"]


class Turn(enum.Enum):
    """Kind of work that one step computes."""

    MIXED = "mixed"
    DECODE = "decode"
    PREFILL = "prefill"
    """Only chunks of prompts. Decode rows pause, unless there is no prompt to compute."""


class PrefillMode(Protocol):
    """Decides the kind of each step. ``turn`` is called once per step."""

    name: str

    def turn(self, batch: Batch) -> Turn: ...


class _Mixed:
    """Decode rows first, then chunks with the rest of the budget (Sarathi-Serve, OSDI 2024)."""

    name = "mixed"

    def turn(self, batch: Batch) -> Turn:
        return Turn.MIXED


class _PrefillFirst:
    """While there are prompts, steps compute only prompts; then they decode (vLLM's first scheduler).

    New requests start as early as possible, but running requests pause while prompts are computed.
    """

    name = "prefill_first"

    def turn(self, batch: Batch) -> Turn:
        return Turn.PREFILL if batch.has_prefill_work else Turn.MIXED


class _DecodeFirst:
    """Prompts are computed only while fewer than a fraction ``share`` of the rows decode. Running requests are not
    disturbed, but new ones start later."""

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
    """Each step computes only prompts or only decodes. The two kinds of steps alternate if there is work of both kinds
    (as in FasterTransformer and TGI)."""

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
    """Chooses a mode by the cost model.

    The mode is ``mixed`` while one mixed step is predicted to take no longer than two separate steps. Otherwise it is
    ``prefill_first`` if there are many prompt tokens per decode row, and ``separate`` if there are few. A hysteresis
    prevents frequent changes of the mode.
    """

    name = "auto"

    def __init__(self, costs: Costs, max_tokens: int) -> None:
        self._costs = costs
        self._max_tokens = max_tokens
        self._ratio = 1.0
        """Running mean of the number of prompt tokens per decode row."""
        self._cost = 1.0
        """Running mean of (seconds of a mixed step / seconds of two separate steps)."""
        self._mode: PrefillMode = MIXED
        self._modes = {mode.name: mode for mode in (MIXED, _PrefillFirst(), _Separate())}

    @property
    def current(self) -> str:
        """Name of the mode in use now."""
        return self._mode.name

    def turn(self, batch: Batch) -> Turn:
        rows = batch.decodes.count
        tokens = batch.num_prefill_tokens(self._max_tokens)
        if rows and tokens:
            self._ratio += _NEWEST * (tokens / rows - self._ratio)
            self._cost += _NEWEST * (self._costs.mixed_cost(batch.features(rows), tokens) - self._cost)
            if self._cost < 1.0 - _HYSTERESIS:
                self._mode = MIXED
            elif self._cost > 1.0 + _HYSTERESIS:
                self._mode = self._modes["prefill_first" if self._ratio > _PROMPTS_DOMINATE else "separate"]
        return self._mode.turn(batch)


MIXED: PrefillMode = _Mixed()
_NEWEST = 0.05
_HYSTERESIS = 0.03
_PROMPTS_DOMINATE = 32.0


class PrefillModePlugin(Protocol):
    """Interface of a prefill mode of your own (``--prefill-mode module:Class``), which is created without arguments."""

    name: str

    def turn(self, view: View) -> Turn:
        """The kind of the next step. Called once per step."""
        ...


class _Plugged:
    """A mode from outside the package."""

    def __init__(self, plugin: PrefillModePlugin) -> None:
        self._plugin = plugin
        self.name = plugin.name

    def turn(self, batch: Batch) -> Turn:
        return Turn(self._plugin.turn(batch.view))


def prefill_mode_from_name(name: str, costs: Costs, max_tokens: int) -> PrefillMode:
    """A new mode, also from the class ``module:Class`` (:class:`PrefillModePlugin`). ``max_tokens`` is the token budget
    of a step. Raises ConfigError for an unknown name."""
    if is_plugin(name):
        base = "chairlift.core.scheduler.prefill_mode.PrefillModePlugin"
        return _Plugged(load_plugin("prefill_mode", name, lambda owner: owner(), ("name", "turn"), base))
    if name == "auto":
        return _Auto(costs, max_tokens)
    modes: dict[str, type[PrefillMode]] = {mode.name: mode for mode in (_Mixed, _PrefillFirst, _DecodeFirst, _Separate)}
    if name not in modes:
        raise ConfigError(f"prefill_mode must be {', '.join(modes)}, auto or module:Class; got {name!r}")
    return modes[name]()
