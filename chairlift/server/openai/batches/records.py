"""Records of the batch store: files, batches and requests as values. Times are Unix seconds."""

from __future__ import annotations

import dataclasses
from typing import Final

__all__ = ["ACTIVE", "BATCH_FIELDS", "FILE_FIELDS", "BatchRecord", "FileRecord", "Pending"]

ACTIVE: Final = ("validating", "in_progress", "finalizing", "cancelling")
"""Statuses of unfinished batches. The other statuses are completed, failed, expired and cancelled."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """One file of the store. Its content is a file in the store's directory, named by its id."""

    id: str
    owner: str
    """Tenant of the API key that uploaded the file; empty if the server had no keys."""
    filename: str
    bytes: int
    purpose: str
    """Use of the file: ``batch`` for input files, ``batch_output`` for output and error files."""
    created_at: int
    expires_at: int | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BatchRecord:
    """One batch: an input file of requests, and the progress of answering them."""

    id: str
    owner: str
    endpoint: str
    input_file_id: str
    completion_window: str
    status: str
    metadata: str
    """Metadata of the batch: a JSON object, or ``null``."""
    errors: str
    """Reasons why the whole batch failed: a JSON list of objects."""
    output_seconds: int | None
    """Lifetime in seconds of the batch's output and error files. None: they are kept until a client deletes them."""
    created_at: int
    expires_at: int
    in_progress_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    output_file_id: str | None
    error_file_id: str | None
    total: int
    """Number of requests in the input file."""
    completed: int
    """Number of requests whose response has a status 2xx."""
    failed: int
    """Number of invalid lines, plus number of requests whose response has another status than 2xx."""


@dataclasses.dataclass(frozen=True, slots=True)
class Pending:
    """A request of a batch that has no response yet."""

    line: int
    """Line number in the input file, from 1."""
    offset: int
    length: int
    """Length of the line in bytes. ``offset`` is the position of its first byte in the file."""


FILE_FIELDS: Final = tuple(field.name for field in dataclasses.fields(FileRecord))
BATCH_FIELDS: Final = tuple(field.name for field in dataclasses.fields(BatchRecord))
