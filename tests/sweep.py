"""Runs random cases by seed: a given number of them, or one failing seed again."""

from __future__ import annotations

import shlex
from collections.abc import Callable

import pytest

__all__ = ["sweep"]


def sweep(request: pytest.FixtureRequest, default: int, check: Callable[[int], object]) -> None:
    """Call ``check(seed)`` for ``default`` seeds starting at 0, or for the seeds that ``--first-seed`` and ``--seeds``
    select."""
    first, count = request.config.getoption("--first-seed"), request.config.getoption("--seeds") or default
    for seed in range(first, first + count):
        try:
            check(seed)
        except Exception as error:
            name = shlex.quote(request.node.nodeid)
            replay = f"pytest {name} -m '' --first-seed {seed} --seeds 1"
            raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}\nreplay: {replay}") from error
