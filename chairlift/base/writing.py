"""Writes a file so that it replaces the old file only when it is complete."""

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
    """Raise ConfigError for a path that cannot be written, or that is also one of ``others``.

    Call this function before long work. It does not change the contents of any file.
    """
    if path is None:
        return
    same = [other for other in others if other is not None and os.path.realpath(other) == os.path.realpath(path)]
    if same and (path.is_file() or not path.exists()):
        raise ConfigError(f"--{flag} {path} is read or written for something else, too; give another --{flag}")
    try:
        existed = path.exists()
        if not path.is_fifo():  # a reader of the FIFO would take open and close for the end of the data
            path.open("a").close()
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; give another --{flag}") from None
    if not existed:
        path.resolve().unlink()


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[TextIO]:
    """A text file that replaces ``path`` at the end of the block. After an error the old file is unchanged.

    The new file has the mode of the old file; a link is followed to its target. Special files, links in /dev or /proc,
    and files in a directory where no new file can be made are written in place. Raises OSError with the file's name. To
    write bytes, use the file's ``buffer``.
    """
    target = Path(os.path.realpath(path))
    old = path.exists()
    in_place = path.is_symlink() and path.parts[1:2] in (("dev",), ("proc",))  # a link to an open file
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
        if isinstance(error, OSError) and error.errno:  # an OSError of write() has no file name
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise
