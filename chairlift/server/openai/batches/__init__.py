"""Batches: files of requests that are processed when the engine has time. The store keeps its data even if the process
is killed."""

from chairlift.server.openai.batches.lines import ENDPOINTS, BadLine, BatchLine, answer_line, error_line, read_line
from chairlift.server.openai.batches.records import ACTIVE, BatchRecord, FileRecord, Pending
from chairlift.server.openai.batches.store import BatchStore, storage_error

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
    "storage_error",
]
