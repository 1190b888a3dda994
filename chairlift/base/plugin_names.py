"""Names of the plugins that come with the package: a setting takes such a name like one of its own values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

__all__ = ["PLUGIN_NAMES", "plugin_path"]

_HERE: Final = "chairlift.core.plugins"
PLUGIN_NAMES: Final[Mapping[str, Mapping[str, str]]] = {
    "cache_eviction": {"tlru": f"{_HERE}.tlru:TLRU"},
    "batching": {
        "static": f"{_HERE}.closed_batches:Static",
        "dynamic": f"{_HERE}.closed_batches:Dynamic",
    },
    "prefill_mode": {
        "prefill_first": f"{_HERE}.prefill_modes:PrefillFirst",
        "decode_first": f"{_HERE}.prefill_modes:DecodeFirst",
        "separate": f"{_HERE}.prefill_modes:Separate",
        "auto": f"{_HERE}.prefill_modes:ByStepTime",
    },
}
"""Setting -> name -> ``module:Class``. Rules that won nowhere in the laboratory (docs/laboratory.md) leave the core and
keep their names here."""


def plugin_path(setting: str, name: str) -> str:
    """``module:Class`` of a named plugin; any other value of the setting as it is."""
    return PLUGIN_NAMES.get(setting, {}).get(name, name)
