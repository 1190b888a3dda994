"""Checked access to ``quantization_config``. An unsupported setting raises an error that names key, value and allowed
values."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NoReturn

from chairlift.errors import ModelLoadError

__all__ = ["QuantizationSettings"]


class QuantizationSettings:
    """A JSON object with settings. ``where`` names the object in messages. Every failure raises ModelLoadError."""

    def __init__(self, raw: Mapping[str, Any], where: str, format_name: str = "") -> None:
        """``format_name`` is the name of the format in messages; empty if it is not known yet."""
        self.where = where
        self._raw = raw
        self._format_name = format_name

    def named(self, format_name: str) -> QuantizationSettings:
        """The same settings, with messages that begin with the name of the format."""
        return QuantizationSettings(self._raw, self.where, format_name)

    def changed(self, values: Mapping[str, Any]) -> QuantizationSettings:
        """These settings with other ``values``. A value of None leaves a setting out."""
        return QuantizationSettings({**self._raw, **values}, self.where, self._format_name)

    def get(self, key: str, default: Any = None) -> Any:
        """The unchecked value of ``key``; ``default`` if it is missing or null."""
        value = self._raw.get(key)
        return default if value is None else value

    def refuse(self, key: str, supported: str) -> NoReturn:
        """Raise an error that ``key`` has an unsupported value."""
        first = f"{self._format_name}: " if self._format_name else ""
        raise ModelLoadError(
            f"{first}{self.where}: {key} = {self.get(key)!r:.80} is not supported; supported: {supported}; use a"
            " version of the model with that, or the original weights"
        )

    def one_of(self, key: str, allowed: tuple[Any, ...], default: Any = None) -> Any:
        """Value of ``key``, which must be one of ``allowed``."""
        value = self.get(key, default)
        if not any(type(value) is type(each) and value == each for each in allowed):
            self.refuse(key, ", ".join(map(str, allowed)))
        return value

    def flag(self, key: str, default: bool) -> bool:
        """Value of ``key``, which must be true or false; ``default`` if the key is missing."""
        return bool(self.one_of(key, (True, False), default))

    def absent(self, *keys: str) -> None:
        """Raise an error if one of ``keys`` is set, that is, if its value is not null, false, 0, or an empty text, list
        or object."""
        for key in keys:
            if self.get(key):
                self.refuse(key, "none")

    def group_size(self) -> int:
        """Number of columns that share a scale: a multiple of 32, or -1 if all columns share one."""
        value = self.get("group_size", -1)
        if type(value) is not int or not (value == -1 or (0 < value <= 2**20 and value % 32 == 0)):
            self.refuse("group_size", "-1 (a whole row) and multiples of 32")
        return value

    def block(self, key: str) -> tuple[int, int] | None:
        """(rows, columns) of a block that shares a scale, from a list or from ``"128x128"``; None if ``key`` is
        missing."""
        value = self.get(key)
        if value is None:
            return None
        sides = value.split("x") if isinstance(value, str) else value
        if isinstance(sides, list) and len(sides) == 2 and all(re.fullmatch("[1-9][0-9]{0,7}", str(s)) for s in sides):
            return int(sides[0]), int(sides[1])
        self.refuse(key, "two numbers above 0, such as [128, 128]")

    def part(self, key: str) -> QuantizationSettings | None:
        """The settings in the nested object ``key``; None if it is missing."""
        value = self.get(key)
        if value is not None and not isinstance(value, Mapping):
            self.refuse(key, "an object, or null")
        return None if value is None else QuantizationSettings(value, f"{self.where}.{key}", self._format_name)

    def whole(self) -> Mapping[str, Any]:
        """All settings, unchecked."""
        return self._raw

    def keys(self) -> tuple[str, ...]:
        """Names of all settings."""
        return tuple(self._raw)

    def __contains__(self, key: str) -> bool:
        return self.get(key) is not None
