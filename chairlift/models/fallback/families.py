"""Which families run right through transformers, and which do not, and why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

__all__ = ["ALLOWED", "REFUSED", "refusal"]

ALLOWED: Final[frozenset[str]] = frozenset({"llama"})
REFUSED: Final[Mapping[str, str]] = {}


def refusal(model_type: Any) -> str:
    return f"model_type {model_type!r} is not supported"
