"""Files that replace what was there when all is written, and not before."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from chairlift.errors import ConfigError

__all__ = ["check_writable", "replacing"]


def check_writable(path: Path | None, flag: str, *others: Path | str | None) -> None:
    """Raise ConfigError for a path that cannot be written, or is one of ``others``, which are read or written, too:
    before anything is measured. What a file holds stays."""
    if path is None:
        return
    same = [other for other in others if other is not None and os.path.realpath(other) == os.path.realpath(path)]
    if same and (path.is_file() or not path.exists()):
        raise ConfigError(f"--{flag} {path} is read or written for something else, too; give another --{flag}")
    try:
        existed = path.exists()
        if not path.is_fifo():  # its reader would take this for the end
            path.open("a").close()
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; give another --{flag}") from None
    if not existed:
        path.resolve().unlink()


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[TextIO]:
    """A text file that becomes ``path`` at the end of the block; after an error, what was there is as it was.

    It keeps the mode of what was there, and a link its place. What is no file, a link in /dev or /proc, or may be
    written while its directory takes no other file, is written to as it is. Raises OSError with the file's name.
    Bytes go to its ``buffer``.
    """
    target = Path(os.path.realpath(path))
    old = path.exists()
    in_place = path.is_symlink() and path.parts[1:2] in (("dev",), ("proc",))  # it leads to a file that is open
    in_place |= old and not (target.is_file() and os.access(target, os.W_OK) and os.access(target.parent, os.W_OK))
    part = path if in_place else target.with_name(f"{target.name}.part")
    try:
        with part.open("w", encoding="utf-8") as file:
            if old and not in_place:
                shutil.copymode(target, part)
            yield file
        if not in_place:
            os.replace(part, target)
    except BaseException as error:
        if not in_place:
            part.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno:  # a write names no file
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise
