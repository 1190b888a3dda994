"""Amounts as people write them: ``4GB`` of memory, ``32k`` tokens, ``1e6`` requests. Standard library only."""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal
from typing import Final

from chairlift.errors import ConfigError

__all__ = ["read_bytes", "read_count", "reader_of"]

_SHAPE: Final = re.compile(
    r"((?:[0-9]{1,3}(?:[_,][0-9]{3}){1,5}|[0-9]{1,18})(?:\.[0-9]{1,9})?(?:[eE]\+?[0-9]{1,2})?)\s*([A-Za-z]*)"
)
_LETTERS: Final = "kmgt"


def reader_of(name: str, kind: type) -> Callable[[str], int] | None:
    """A function that converts a text such as ``4GB`` to the number for the setting ``name`` of type ``kind``. None if
    the setting takes no such text.

    The function raises ConfigError for a text that it cannot read.
    """
    if name.endswith(("_bytes", "_write_rate")):
        return lambda text: read_bytes(name, text)
    if kind is int:
        return lambda text: read_count(name, text)
    return None


def read_bytes(name: str, text: str) -> int:
    """The bytes of ``4GB`` (powers of 1000), ``4GiB`` or ``4G`` (powers of 1024), or of a plain number.

    Case does not matter. ``name`` is the setting's name, for the error message. Raises ConfigError for any other text,
    and for a fraction of a byte.
    """
    units = {"": 1, "b": 1}
    for power, letter in enumerate(_LETTERS, 1):
        units |= {f"{letter}b": 1000**power, f"{letter}ib": 1024**power, letter: 1024**power}
    return _read(name, text, lambda unit: units.get(unit.lower()), "a number of bytes, or a size such as 512MB or 4GiB")


def read_count(name: str, text: str) -> int:
    """The number of ``32k`` (units of 1000), ``32K`` (units of 1024, as in vLLM), ``1e6``, or a plain number, which may
    be negative. Raises ConfigError."""
    if re.fullmatch(r"-[0-9]{1,18}", text.strip()):
        return int(text)
    units = {"": 1} | {letter: 1000**power for power, letter in enumerate(_LETTERS, 1)}
    units |= {letter.upper(): 1024**power for power, letter in enumerate(_LETTERS, 1)}
    return _read(name, text, units.get, "a whole number, or one such as 32k (thousands) or 32K (of 1024)")


def _read(name: str, text: str, unit_of: Callable[[str], int | None], allowed: str) -> int:
    match = _SHAPE.fullmatch(text.strip())
    unit = unit_of(match[2]) if match is not None else None
    if match is None or unit is None or (amount := Decimal(re.sub("[_,]", "", match[1])) * unit) != int(amount):
        raise ConfigError(f"{name} must be {allowed}; got {text!r:.40}")
    return int(amount)
