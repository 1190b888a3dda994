"""The field ``keep_alive`` of Ollama's API: how long a model stays loaded without requests."""

from __future__ import annotations

import math
import re
from typing import Any, Final

from chairlift.server.http.errors import ApiError

__all__ = ["keep_seconds"]

_UNITS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART: Final = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)(ms|s|m|h)")
_NUMBER: Final = re.compile(r"-?[0-9]{1,9}(?:\.[0-9]{1,9})?")


def keep_seconds(value: Any) -> float:
    """Seconds of a value such as ``300``, ``"5m"``, ``"1h30m"``, ``0`` or ``-1``; infinity for a negative one. Raises
    ApiError 400 for another value."""
    text = str(value).strip()
    if not isinstance(value, bool) and _NUMBER.fullmatch(text):
        return math.inf if float(text) < 0 else float(text)
    sign, text = text[:1] == "-", text.lstrip("-")
    parts = _PART.findall(text)
    if not isinstance(value, str) or not parts or "".join(number + unit for number, unit in parts) != text:
        message = f"keep_alive must be seconds, or a text such as 5m, 1h30m or -1; got {value!r:.60}"
        raise ApiError(400, message, code="invalid_value", param="keep_alive")
    return math.inf if sign else sum(float(number) * _UNITS[unit] for number, unit in parts)
