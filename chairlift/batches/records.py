"""What the store of batches gives out: files, batches and requests as values. Times are Unix seconds."""

from __future__ import annotations

import dataclasses
from typing import Final

__all__ = ["ACTIVE", "BATCH_FIELDS", "FILE_FIELDS", "BatchRecord", "FileRecord", "Pending"]

ACTIVE: Final = ("validating", "in_progress", "finalizing", "cancelling")
"""Statuses of batches that have not come to their end; the others are completed, failed, expired and cancelled."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """One file. Its content lies in the store's directory under its id."""

    id: str
    owner: str
    """The tenant of the API key that uploaded it; empty where there were no keys."""
    filename: str
    bytes: int
    purpose: str
    """``batch`` for input, ``batch_output`` for output and error files."""
    created_at: int
    expires_at: int | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BatchRecord:
    """One batch."""

    id: str
    owner: str
    endpoint: str
    input_file_id: str
    completion_window: str
    status: str
    metadata: str
    """JSON of an object, or ``null``."""
    errors: str
    """JSON of a list of objects: why the whole batch failed."""
    output_seconds: int | None
    """How long its output and error files are kept; None: until somebody deletes them."""
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
    """Lines of the input file."""
    completed: int
    """Requests answered with status 2xx."""
    failed: int
    """Lines that are no request, and requests answered with another status."""


@dataclasses.dataclass(frozen=True, slots=True)
class Pending:
    """A request of a batch that has no answer yet."""

    line: int
    """Its number in the input file, from 1."""
    offset: int
    length: int
    """Where the line lies in the file, in bytes."""


FILE_FIELDS: Final = tuple(field.name for field in dataclasses.fields(FileRecord))
BATCH_FIELDS: Final = tuple(field.name for field in dataclasses.fields(BatchRecord))
