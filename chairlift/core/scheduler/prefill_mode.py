"""What a step computes: decode rows, chunks of prompts, or both. ``mixed`` is built in; other modes are plugins."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Protocol

from chairlift.base.plugin_names import PLUGIN_NAMES, plugin_path
from chairlift.base.plugins import is_plugin, load_plugin
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


MIXED: PrefillMode = _Mixed()


class PrefillModePlugin(Protocol):
    """Interface of a prefill mode outside the core: a named one, or your own (``--prefill-mode module:Class``). It is
    created without arguments."""

    name: str

    def turn(self, view: View) -> Turn:
        """The kind of the next step. Called once per step."""
        ...


class _Plugged:
    """A mode from outside the core."""

    def __init__(self, plugin: PrefillModePlugin) -> None:
        self._plugin = plugin
        self.name = plugin.name

    def turn(self, batch: Batch) -> Turn:
        return Turn(self._plugin.turn(batch.view))


def prefill_mode_from_name(name: str) -> PrefillMode:
    """A new mode: ``mixed``, a named plugin, or the class ``module:Class`` (:class:`PrefillModePlugin`). Raises
    ConfigError for an unknown name."""
    if name == MIXED.name:
        return MIXED
    path = plugin_path("prefill_mode", name)
    if is_plugin(path):
        base = "chairlift.core.scheduler.prefill_mode.PrefillModePlugin"
        return _Plugged(load_plugin("prefill_mode", path, lambda owner: owner(), ("name", "turn"), base))
    named = ", ".join(PLUGIN_NAMES["prefill_mode"])
    raise ConfigError(f"prefill_mode must be {MIXED.name}, {named} or module:Class; got {name!r}")
