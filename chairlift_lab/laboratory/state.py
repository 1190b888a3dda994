"""State of a run of the laboratory, in one file that is written after every few cells. The same command continues."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, Final

from chairlift.base.writing import replacing
from chairlift.errors import ConfigError
from chairlift_lab.laboratory.figures import CellFigures, MeasuredWindow
from chairlift_lab.laboratory.targets import LabTargets

__all__ = ["CellResult", "LabState"]

_FORMAT: Final = 1
_EVERY: Final = 2.0
"""Seconds between two writes, at least."""
_PART: Final = 0.02
"""Largest part of the time that is spent on writing: a large file is written less often."""


class CellResult:
    """Result of one cell: figures and window, or the reason why there are none."""

    __slots__ = ("error", "figures", "window")

    def __init__(
        self, figures: CellFigures | None = None, window: MeasuredWindow | None = None, error: str = ""
    ) -> None:
        self.figures = figures
        self.window = window
        self.error = error

    @property
    def goodput(self) -> float | None:
        """Requests per second that met the strict targets; None without figures. No request at all counts as half a
        request, so that a ratio to it exists."""
        if self.figures is None or self.window is None:
            return None
        seconds = max(self.window.end - self.window.start, 1e-9)
        return self.figures.goodput_strict or 0.5 / seconds

    def to_dict(self) -> dict[str, Any]:
        """The result as data for JSON."""
        if self.figures is None or self.window is None:
            return {"error": self.error}
        return {"figures": self.figures.to_dict(), "window": [self.window.start, self.window.end]}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> CellResult:
        """Result from the data of :meth:`to_dict`."""
        if "error" in fields:
            return cls(error=str(fields["error"]))
        return cls(CellFigures.from_dict(fields["figures"]), MeasuredWindow(*fields["window"]))


class LabState:
    """All results of a run. Keys name what a result depends on, so another plan may use the same file."""

    def __init__(self, path: Path) -> None:
        """Read the file if it exists. Raises ConfigError if it is not a file of ``chairlift lab``."""
        self.path = path
        self.machines: dict[str, dict[str, Any]] = {}
        """Name of a machine that was fitted here -> its deployment as data."""
        self.rates: dict[str, tuple[float, LabTargets]] = {}
        """Trace on a machine -> (capacity in requests per second, targets)."""
        self.cells: dict[str, CellResult] = {}
        self.measured: dict[str, CellResult] = {}
        """Results of the real engine, under the keys of the simulated cells of the same seeds."""
        self.resumed = path.exists()
        self._next_save = 0.0
        if self.resumed:
            self._read()

    def add(self, key: str, result: CellResult, *, measured: bool = False) -> None:
        """Keep a result. The file is written every two seconds at most, and a large file less often; :meth:`save`
        writes it at once."""
        (self.measured if measured else self.cells)[key] = result
        if time.monotonic() >= self._next_save:
            self.save()

    def save(self) -> None:
        """Write the file atomically. Raises ConfigError if that fails."""
        begun = time.monotonic()
        record = {
            "format": _FORMAT,
            "machines": self.machines,
            "rates": {key: [rate, targets.to_dict()] for key, (rate, targets) in self.rates.items()},
            "cells": {key: result.to_dict() for key, result in self.cells.items()},
            "measured": {key: result.to_dict() for key, result in self.measured.items()},
        }
        try:
            with replacing(self.path) as file:
                file.write(json.dumps(record) + "\n")
        except OSError as error:
            raise ConfigError(f"cannot write {self.path}: {error.strerror}; give another --output") from None
        now = time.monotonic()
        self._next_save = now + max(_EVERY, (now - begun) / _PART)

    def _read(self) -> None:
        way_out = f"give another --output, or remove {self.path}"
        try:
            record = json.loads(self.path.read_text(encoding="utf-8"))
            known = record["format"]
        except OSError as error:
            raise ConfigError(f"cannot read {self.path}: {error.strerror}; {way_out}") from None
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ConfigError(f"{self.path} is not what chairlift lab wrote; {way_out}") from None
        if known != _FORMAT:
            raise ConfigError(f"{self.path} was written by another version of chairlift; {way_out}")
        try:
            self.machines = dict(record["machines"])
            self.rates = {key: (float(rate), LabTargets(**own)) for key, (rate, own) in record["rates"].items()}
            self.cells = {key: CellResult.from_dict(own) for key, own in record["cells"].items()}
            self.measured = {key: CellResult.from_dict(own) for key, own in record["measured"].items()}
        except (KeyError, TypeError, ValueError, AttributeError):
            raise ConfigError(f"{self.path} is damaged; {way_out}") from None
