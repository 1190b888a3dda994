"""Batches: files of requests that are answered when the engine has time, and a store that survives a kill."""

from chairlift.batches.lines import ENDPOINTS, BadLine, BatchLine, answer_line, error_line, read_line
from chairlift.batches.records import ACTIVE, BatchRecord, FileRecord, Pending
from chairlift.batches.store import BatchStore

__all__ = [
    "ACTIVE",
    "ENDPOINTS",
    "BadLine",
    "BatchLine",
    "BatchRecord",
    "BatchStore",
    "FileRecord",
    "Pending",
    "answer_line",
    "error_line",
    "read_line",
]
