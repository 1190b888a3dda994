"""Finds the GGUF file of a model path. The module does not import numpy, because processes that compute nothing import
it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from chairlift.errors import ModelLoadError

__all__ = ["encoders_beside", "find_gguf", "is_gguf", "parts_of"]

_SPLIT_NAME: Final = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


def parts_of(path: Path) -> list[Path]:
    """All files of the GGUF model to which ``path`` belongs. Raises ModelLoadError if one is missing."""
    match = _SPLIT_NAME.fullmatch(path.name)
    if match is None:
        return [path]
    stem = match[1]
    count = int(match[3])
    parts = [path.with_name(f"{stem}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
    missing = [part.name for part in parts if not part.is_file()]
    if missing or not parts:
        raise ModelLoadError(
            f"{path} is one of {count} parts, and {missing[:1]} is not beside it; download all of them"
        )
    return parts


def is_gguf(path: Path) -> bool:
    """Whether a model's path is a GGUF file and not a directory."""
    return path.suffix == ".gguf" and not path.is_dir()


def encoders_beside(path: Path) -> list[Path]:
    """Files in the directory of the GGUF model ``path`` whose names say that they are image encoders, the largest
    first: the same encoder may be there with several precisions."""
    files = [file for file in path.parent.glob("*.gguf") if "mmproj" in file.name.lower() and file.is_file()]
    return sorted(files, key=lambda file: (-file.stat().st_size, file.name))


def find_gguf(path: Path) -> Path | None:
    """GGUF file of the model ``path``: the file itself, or the only GGUF model in a directory; None if there is none.

    Raises :class:`~chairlift.errors.ModelLoadError` for a directory with several GGUF models; the path must then name
    one of them.
    """
    if path.is_file():
        return path if is_gguf(path) else None
    if not path.is_dir() or (path / "config.json").is_file():
        return None
    found = sorted(file for file in path.glob("*.gguf") if file.is_file() and "mmproj" not in file.name.lower())
    whole = [file for file in found if not (match := _SPLIT_NAME.fullmatch(file.name)) or int(match[2]) == 1]
    if len(whole) > 1:
        names = ", ".join(file.name for file in whole[:8])
        raise ModelLoadError(f"{path} has {len(whole)} GGUF models ({names}); give the path of one of these files")
    return next(iter(whole or found), None)
