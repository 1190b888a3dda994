"""Worker processes that can be killed, for work on callers' data that may take too much time or memory."""

from chairlift.base.workers.pool import WorkerPool

__all__ = ["WorkerPool"]
