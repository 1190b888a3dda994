"""JSON as text that UTF-8 can hold. Its values may have half of a surrogate pair, as models sometimes write."""

from __future__ import annotations

import json
import re
from typing import Any, Final

__all__ = ["json_text"]

_HALF: Final = re.compile("[\ud800-\udfff]")


def json_text(value: Any, **options: Any) -> str:
    r"""``json.dumps`` that escapes half of a surrogate pair (``\ud83d``), but no other letter. ``options`` are further
    arguments of ``json.dumps``."""
    return _HALF.sub(lambda half: f"\\u{ord(half[0]):04x}", json.dumps(value, **{"ensure_ascii": False, **options}))
