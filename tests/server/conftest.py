"""Tests of the server run on their own event loops; each leaves no warning about what it forgot."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def loggers_as_they_were() -> Iterator[None]:
    """Starting a server sends the package's log to its own handler; afterwards it goes where it went before."""
    loggers = [logging.getLogger(name) for name in ("chairlift", "uvicorn")]
    before = [(logger, logger.handlers[:], logger.propagate, logger.level) for logger in loggers]
    yield
    for logger, handlers, propagate, level in before:
        logger.handlers[:] = handlers
        logger.propagate = propagate
        logger.setLevel(level)
