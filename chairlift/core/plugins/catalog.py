"""Catalog of the published batching ideas that can be tried by name: their class, source and claim.

A program that compares ideas reads :data:`IDEAS`. The engine does not: a setting names a class by its
``module:Class`` path.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final, Literal

__all__ = ["IDEAS", "Idea", "Kind"]

Kind = Literal["policy", "prefill mode", "membership"]
"""Which rule of the scheduler an idea replaces: its policy, its prefill mode, or its batch membership."""
_SETTINGS: Final[Mapping[str, str]] = {
    "policy": "scheduling_policy",
    "prefill mode": "prefill_mode",
    "membership": "batching",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Idea:
    """A published idea."""

    path: str
    """Value of the setting: ``module:Class``, or the name of a rule of the core."""
    kind: Kind
    source: str
    """Paper or system with its number, so that a reader finds it."""
    claim: str
    """Result that the source claims, in one line."""
    others: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Further settings that the idea needs."""
    simulated_only: bool = False
    """Whether only a simulated machine can run it."""

    @property
    def settings(self) -> dict[str, Any]:
        """All settings of the idea: name -> value."""
        return {_SETTINGS[self.kind]: self.path, **self.others}


_HERE: Final = "chairlift.core.plugins"

IDEAS: Final[Mapping[str, Idea]] = {
    "longest_prefix": Idea(
        f"{_HERE}.longest_prefix:LongestPrefixFirst",
        "policy",
        "SGLang (Zheng et al., NeurIPS 2024), with a bound by age",
        "more hits in the prefix cache, so fewer prompt tokens are computed",
    ),
}
"""Name -> idea, in the order of the table in ``docs/laboratory.md``."""
