"""Fixtures for server tests, which run their own event loops. A resource that a test does not release causes a
warning."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def loggers_as_they_were() -> Iterator[None]:
    """Restore the package's loggers after a test, because a started server redirects them to its own handler."""
    loggers = [logging.getLogger(name) for name in ("chairlift", "uvicorn")]
    before = [(logger, logger.handlers[:], logger.propagate, logger.level) for logger in loggers]
    yield
    for logger, handlers, propagate, level in before:
        logger.handlers[:] = handlers
        logger.propagate = propagate
        logger.setLevel(level)
