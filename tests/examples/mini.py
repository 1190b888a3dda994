"""Imports the modules of ``examples/mini``. A script imports its neighbours by their short names, so a test must, too.

The short names (``request``, ``engine``) are removed again, so that no other test finds these modules by accident.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

__all__ = ["FOLDER", "MODULES"]

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "mini"
NAMES = ("request", "kv_cache", "scheduler", "step_batch", "model", "sampler", "engine", "generate")


def _import_all() -> dict[str, ModuleType]:
    sys.path.insert(0, str(FOLDER))
    try:
        return {name: importlib.import_module(name) for name in NAMES}
    finally:
        sys.path.remove(str(FOLDER))
        for name in NAMES:
            sys.modules.pop(name, None)


MODULES = _import_all()
"""Name -> module, in reading order."""
