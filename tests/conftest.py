"""What all tests share: how many seeds to run, and when."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seeds", type=int, default=None, help="simulation seeds to run (500; nightly: 100,000)")
    parser.addoption("--first-seed", type=int, default=0, help="the first of them")
