"""Where the service keeps weights, and the paths by which clients name them."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Final

from chairlift_train.service.compute.calls import TrainingError

__all__ = ["Places", "check_name", "num_bytes", "split_path"]

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_RUN: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9:-]{0,127}")
_KINDS: Final = ("weights", "sampler_weights")


def check_name(name: str) -> str:
    """The name of a checkpoint. Raises TrainingError for a name that could leave its directory, or is too long."""
    if not _NAME.fullmatch(name):
        raise TrainingError(
            "a checkpoint's name has 1 to 128 letters, digits and ._-, and begins with a letter or digit;"
            f" got {name!a:.160}"
        )
    return name


def split_path(path: str) -> tuple[str, str, str]:
    """(model id, kind, name) of a path ``tinker://RUN/KIND/NAME``. Raises TrainingError."""
    parts = path.removeprefix("tinker://").split("/")
    if not path.startswith("tinker://") or len(parts) != 3 or not _RUN.fullmatch(parts[0]) or parts[1] not in _KINDS:
        raise TrainingError(
            f"a checkpoint's path is tinker://RUN/weights/NAME or tinker://RUN/sampler_weights/NAME, got {path!a:.300}"
        )
    return parts[0], parts[1], check_name(parts[2])


_KEPT: Final = ("states", "snapshots")
"""Directories with weights that clients did not name."""


class Places:
    """Directories of the service below ``root``. Ids of models have a pattern that is safe in a path."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self._sizes = {each: num_bytes(each) for part in _KEPT for each in (self.root / part).glob("*/*")}
        """Directory of a state or snapshot -> bytes."""
        self._num_bytes = sum(self._sizes.values())

    def num_bytes(self) -> int:
        """Size of all states and snapshots. Any thread may ask."""
        return self._num_bytes

    def num_bytes_beside(self, directory: Path) -> int:
        """Size of the states or snapshots of the model with the state or snapshot ``directory``."""
        return sum(size for each, size in self._sizes.items() if each.parent == directory.parent)

    def note(self, directory: Path, size: int) -> None:
        """Count a state or snapshot that was written."""
        self._sizes[directory] = size
        self._num_bytes += size

    def _model(self, part: str, model_id: str) -> Path:
        if not _RUN.fullmatch(model_id):
            raise TrainingError(f"there is no training run {model_id!a:.160}")
        return self.root / part / model_id.replace(":", "_")

    def checkpoint(self, model_id: str, kind: str, name: str) -> Path:
        """Directory of a checkpoint that a client named."""
        return self._model("checkpoints", model_id) / kind / check_name(name)

    def state(self, model_id: str, seq_id: int) -> Path:
        """Directory of the state of a model after a call."""
        return self._model("states", model_id) / str(seq_id)

    def snapshot(self, model_id: str, seq_id: int) -> Path:
        """Directory of weights for one sampling session."""
        return self._model("snapshots", model_id) / str(seq_id)

    def remove(self, directory: Path) -> None:
        """Delete a directory that the service made, if it is there."""
        shutil.rmtree(directory, ignore_errors=True)
        self._num_bytes -= self._sizes.pop(directory, 0)

    def keep_newest(self, directory: Path, count: int) -> None:
        """Delete all but the ``count`` newest of the numbered directories beside ``directory``, and it."""
        if directory.parent.is_dir():
            numbered = sorted((each for each in directory.parent.iterdir() if each.name.isdecimal()), key=_number)
            for old in numbered[: max(0, len(numbered) - count)]:
                self.remove(old)

    def forget_model(self, model_id: str) -> None:
        """Delete the states and snapshots of a model that has ended. Its checkpoints stay."""
        for part in _KEPT:
            folder = self._model(part, model_id)
            for directory in [each for each in self._sizes if each.parent == folder]:
                self.remove(directory)
            self.remove(folder)


def _number(path: Path) -> int:
    return int(path.name)


def num_bytes(directory: Path) -> int:
    """Size of all files in a directory."""
    return sum(each.stat().st_size for each in directory.rglob("*") if each.is_file())
