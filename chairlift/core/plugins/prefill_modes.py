"""Modes that compute prompts and decodes in different steps. ``--prefill-mode`` takes their names.

The default, ``mixed``, is the only mode of the core. In the laboratory none of these beats it (docs/laboratory.md).
"""

from __future__ import annotations

from typing import Final

from chairlift.core.scheduler.prefill_mode import Turn
from chairlift.core.scheduler.view import View

__all__ = ["ByStepTime", "DecodeFirst", "PrefillFirst", "Separate"]

_NEWEST: Final = 0.05
_HYSTERESIS: Final = 0.03
_PROMPTS_DOMINATE: Final = 32.0


class PrefillFirst:
    """While there are prompts, steps compute only prompts; then they decode (vLLM's first scheduler).

    New requests start as early as possible, but running requests pause while prompts are computed.
    """

    name = "prefill_first"

    def turn(self, view: View) -> Turn:
        return Turn.PREFILL if view.has_prompts else Turn.MIXED


class DecodeFirst:
    """Prompts are computed only while fewer than a fraction ``share`` of the rows decode, or after ``patience`` steps.
    Running requests are not disturbed, but new ones start later."""

    name = "decode_first"
    share = 0.5
    patience = 256

    def __init__(self) -> None:
        self._skipped = 0

    def turn(self, view: View) -> Turn:
        enough = view.num_decodes >= max(1.0, self.share * view.num_rows)
        self._skipped = self._skipped + 1 if enough and view.has_prompts else 0
        if not enough or self._skipped > self.patience:
            self._skipped = 0
            return Turn.MIXED
        return Turn.DECODE


class Separate:
    """Each step computes only prompts or only decodes. The two kinds of steps alternate if there is work of both kinds
    (as in FasterTransformer and TGI)."""

    name = "separate"

    def __init__(self) -> None:
        self._last = Turn.DECODE

    def turn(self, view: View) -> Turn:
        if not view.has_prompts or (view.num_decodes and self._last is Turn.PREFILL):
            self._last = Turn.DECODE
        else:
            self._last = Turn.PREFILL
        return self._last


class ByStepTime:
    """Chooses a mode by the predicted times of steps.

    The mode is ``mixed`` while one mixed step is predicted to take no longer than two separate steps. Otherwise it is
    ``prefill_first`` if there are many prompt tokens per decode row, and ``separate`` if there are few. A hysteresis
    prevents frequent changes of the mode.
    """

    name = "auto"

    def __init__(self) -> None:
        self._ratio = 1.0
        """Running mean of the number of prompt tokens per decode row."""
        self._cost = 1.0
        """Running mean of (seconds of a mixed step / seconds of two separate steps)."""
        self._mode: PrefillFirst | Separate | None = None
        """The mode in use now; None for ``mixed``."""
        self._modes = (PrefillFirst(), Separate())

    @property
    def current(self) -> str:
        """Name of the mode in use now."""
        return "mixed" if self._mode is None else self._mode.name

    def turn(self, view: View) -> Turn:
        rows, tokens = view.num_decodes, view.prompt_tokens(view.token_budget)
        if rows and tokens:
            apart = view.step_seconds() + view.prompt_seconds(tokens)
            self._ratio += _NEWEST * (tokens / rows - self._ratio)
            self._cost += _NEWEST * (view.step_seconds(tokens=tokens) / apart - self._cost)
            if self._cost < 1.0 - _HYSTERESIS:
                self._mode = None
            elif self._cost > 1.0 + _HYSTERESIS:
                self._mode = self._modes[self._ratio <= _PROMPTS_DOMINATE]
        return Turn.MIXED if self._mode is None else self._mode.turn(view)
