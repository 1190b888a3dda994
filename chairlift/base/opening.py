"""Opens trace files as text. Gzip files are decompressed, and rows of Parquet files become JSON lines."""

from __future__ import annotations

import contextlib
import gzip
import importlib
import io
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Final, TextIO

from chairlift.errors import ConfigError

__all__ = ["opened_bytes", "opened_text"]

_GZIP = b"\x1f\x8b"
_PARQUET = b"PAR1"
_ROWS: Final = 256
"""Number of Parquet rows that are converted at a time. The whole row group is in memory in addition."""


@contextlib.contextmanager
def opened_text(path: Path) -> Iterator[TextIO]:
    """Open a file as text. The first bytes of the file determine its format; the name does not matter.

    Raises OSError when the file cannot be opened. Raises ConfigError when the file is damaged, or when it is a Parquet
    file and pyarrow is missing.
    """
    head = _head(path)
    try:
        if head.startswith(_PARQUET):
            with path.open("rb") as file:
                yield io.TextIOWrapper(io.BufferedReader(_Rows(path, file)), encoding="utf-8", newline="")
        elif head.startswith(_GZIP):
            with gzip.open(path, "rt", encoding="utf-8-sig", newline="") as text:
                yield text
        else:
            with path.open(encoding="utf-8-sig", newline="") as text:
                yield text
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ConfigError(f"{path} is damaged: it cannot be decompressed ({error}); copy it again") from None


@contextlib.contextmanager
def opened_bytes(path: Path) -> Iterator[Any]:
    """Open a file as a binary file object. A gzip file is decompressed."""
    with gzip.open(path, "rb") if _head(path).startswith(_GZIP) else path.open("rb") as file:
        yield file


def _head(path: Path) -> bytes:
    if not path.is_file():  # a pipe can be read only once
        return b""
    with path.open("rb") as file:
        return file.read(4)


class _Rows(io.RawIOBase):
    """Binary stream of JSON lines, one for each row of a Parquet file."""

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self._lines = _json_lines(path, file)
        self._rest = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while not self._rest:
            line = next(self._lines, None)
            if line is None:
                return 0
            self._rest = line
        count = min(len(buffer), len(self._rest))
        buffer[:count], self._rest = self._rest[:count], self._rest[count:]
        return count


def _json_lines(path: Path, file: IO[bytes]) -> Iterator[bytes]:
    try:
        pyarrow = importlib.import_module("pyarrow")
        parquet = importlib.import_module("pyarrow.parquet")
    except ModuleNotFoundError:
        raise ConfigError(f"{path} is Parquet, which needs pyarrow; install it with pip install pyarrow") from None
    try:
        for batch in parquet.ParquetFile(file).iter_batches(batch_size=_ROWS):
            for row in batch.to_pylist():
                yield json.dumps(row, default=_plain).encode() + b"\n"
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"{path} is damaged: {str(error).splitlines()[0]:.200}") from None


def _plain(value: object) -> str:
    """Convert a value that JSON cannot express: a time to ISO 8601, and bytes, such as an image, to ``"bytes"``."""
    return "bytes" if isinstance(value, bytes) else str(value)
