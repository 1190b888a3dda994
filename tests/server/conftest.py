"""Fixtures for server tests, which run on their own event loops. A forgotten resource of a test is a warning."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def loggers_as_they_were() -> Iterator[None]:
    """Restore the package's loggers, which a started server redirects to its own handler."""
    loggers = [logging.getLogger(name) for name in ("chairlift", "uvicorn")]
    before = [(logger, logger.handlers[:], logger.propagate, logger.level) for logger in loggers]
    yield
    for logger, handlers, propagate, level in before:
        logger.handlers[:] = handlers
        logger.propagate = propagate
        logger.setLevel(level)
