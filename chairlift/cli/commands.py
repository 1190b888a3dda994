"""The commands and the modules that run them.

Commands of the laboratory and of the training half are found here by name. The engine's package imports neither of
these two packages.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Final

__all__ = ["COMMANDS", "LIVE_COMPARISON", "TRAINING_SERVER", "command_module"]

COMMANDS: Final = {
    "serve": "chairlift.cli.serve",
    "generate": "chairlift.cli.generate",
    "run": "chairlift.cli.run",
    "chat": "chairlift.cli.chat",
    "embed": "chairlift.cli.embed",
    "pull": "chairlift.cli.pull",
    "list": "chairlift.cli.list_models",
    "show": "chairlift.cli.show",
    "rm": "chairlift.cli.remove",
    "ps": "chairlift.cli.ps",
    "check": "chairlift.cli.check",
    "quantize": "chairlift.cli.quantize",
    "bench": "chairlift_lab.cli.bench",
    "tune": "chairlift_lab.cli.tune",
    "sim": "chairlift_lab.cli.sim",
    "lab": "chairlift_lab.cli.lab",
    "trace": "chairlift_lab.cli.trace",
    "train": "chairlift_train.cli.train",
    "pack": "chairlift_train.cli.pack",
    "top": "chairlift.cli.top",
    "completion": "chairlift.cli.completion",
}
"""Name of a command -> its module, in the order of ``chairlift --help``. A module has ``SUMMARY``, ``DESCRIPTION``,
``add_arguments(parser)`` and ``run(args)``, which returns the exit code."""

LIVE_COMPARISON: Final = "chairlift_lab.replay.side_by_side"
"""Worker program that simulates a recording with other rules, for the live view page."""

TRAINING_SERVER: Final = "chairlift_train.service.serving"
"""Module of the server that also trains."""


def command_module(name: str) -> ModuleType:
    """The module of a command."""
    return importlib.import_module(COMMANDS[name])
