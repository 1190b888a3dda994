"""The training log on a thread of its own, so that the event loop never waits for a disk."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from chairlift.errors import StorageError
from chairlift_train.service.log.store import TrainingLog

__all__ = ["LogThread"]

_T = TypeVar("_T")


class LogThread:
    """Calls a :class:`TrainingLog` on one thread, in the order of the calls."""

    def __init__(self, log: TrainingLog) -> None:
        self.log = log
        self._thread = ThreadPoolExecutor(1, "training log")

    async def __call__(self, work: Callable[[TrainingLog], _T]) -> _T:
        """Run ``work`` with the log. Raises StorageError if the directory is full or its disk fails."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work, self.log)
        except (OSError, sqlite3.Error) as error:
            raise StorageError(
                f"the directory of training runs cannot be used now ({error}); try again later"
            ) from error

    def close(self) -> None:
        """Close the log after its current call."""
        self._thread.shutdown(wait=True)
        self.log.close()
