"""Which cases run by day, and which only at night."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

__all__ = ["one_in"]


def one_in(every: int, values: Iterable[Any]) -> list[Any]:
    """The first of ``values`` and each ``every``-th after it as they are; the others run at night only."""
    night = pytest.mark.nightly
    return [value if i % every == 0 else pytest.param(value, marks=night) for i, value in enumerate(values)]
