"""Loads what a setting names as ``module:NAME``: classes and values from outside the package."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from chairlift.errors import ConfigError

__all__ = ["is_plugin", "load_named", "load_plugin", "load_value"]

Kind = TypeVar("Kind")


def is_plugin(value: Any) -> bool:
    """Whether the value of a setting has the form ``module:NAME``."""
    return isinstance(value, str) and re.fullmatch(r"[\w.]+:\w+", value) is not None


def load_plugin(setting: str, path: str, make: Callable[[Any], Any], members: Sequence[str], example: str) -> Any:
    """Import the class ``module:Class`` and return ``make(class)``.

    Raises ConfigError if this fails, or if the result lacks one of ``members``.
    """
    plugin = _made(setting, path, make)
    missing = [name for name in members if not hasattr(plugin, name)]
    if missing:
        raise ConfigError(f"{setting} {path!r} has no {', '.join(missing)}; start from {example}")
    return plugin


def load_named(setting: str, path: str) -> Any:
    """Import what ``module:NAME`` names, whatever it is. Raises ConfigError if this fails."""
    return _made(setting, path, lambda found: found)


def load_value(setting: str, path: str, kind: type[Kind], example: str) -> Kind:
    """Import the value ``module:NAME``. Raises ConfigError if this fails, or if the value is not of the type
    ``kind``."""
    value = _made(setting, path, lambda found: found)
    if not isinstance(value, kind):
        given = f"the class {value.__name__}" if isinstance(value, type) else f"of type {type(value).__name__}"
        raise ConfigError(f"{setting} {path!r} is {given}, and must be a {kind.__name__}; start from {example}")
    return value


def _made(setting: str, path: str, make: Callable[[Any], Any]) -> Any:
    module_name, _, name = path.partition(":")
    if "" not in sys.path:
        sys.path.append("")  # search the current directory too; the installed command does not by itself
    try:
        found = getattr(importlib.import_module(module_name), name)
    except Exception as error:
        raise ConfigError(f"{setting} {path!r} cannot be imported: {type(error).__name__}: {error}") from error
    try:
        return make(found)
    except Exception as error:
        raise ConfigError(f"{setting} {path!r} cannot be made: {type(error).__name__}: {error}") from error
