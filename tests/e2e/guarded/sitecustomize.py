"""Restricts every Python process that a test starts, and its children, to the network of this machine. Python imports
it when its folder is on PYTHONPATH."""

import importlib.util
import sys
from pathlib import Path

_FILE = Path(__file__).parents[2] / "network_guard.py"
_spec = importlib.util.spec_from_file_location("network_guard", _FILE)
if _spec is None or _spec.loader is None:
    sys.exit(f"{_FILE} is missing")
_guard = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_guard)
_guard.install()
