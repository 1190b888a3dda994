"""Divides cases between the default tests and the nightly tests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

__all__ = ["one_in"]


def one_in(every: int, values: Iterable[Any]) -> list[Any]:
    """``values`` as test parameters: the first and every ``every``-th after it run by default, the others only in
    nightly runs."""
    night = pytest.mark.nightly
    return [value if i % every == 0 else pytest.param(value, marks=night) for i, value in enumerate(values)]
