"""Files that replace what was there when all is written, and not before."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

__all__ = ["replacing"]


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[str]]:
    """A text file that becomes ``path`` at the end of the block; after an error, what was there is as it was.

    A link, a pipe, or what lies in a directory that takes no other file, is written to as it is. Raises OSError with
    the file's name.
    """
    in_place = path.is_symlink() or (path.exists() and not (path.is_file() and os.access(path.parent, os.W_OK)))
    part = path if in_place else path.with_name(f"{path.name}.part")
    try:
        with part.open("w", encoding="utf-8") as file:
            yield file
        if not in_place:
            os.replace(part, path)
    except BaseException as error:
        if not in_place:
            part.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno:  # a write names no file
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise
