"""The parts of the HTTP interface. A new API is a folder with a module ``dialect``, and a line here."""

from __future__ import annotations

from typing import Final

from chairlift.server.anthropic.dialect import ANTHROPIC
from chairlift.server.http.dialect import Dialect
from chairlift.server.http.errors import ErrorForm, openai_form
from chairlift.server.ollama.dialect import OLLAMA
from chairlift.server.openai.dialect import OPENAI
from chairlift.server.operations.dialect import OPERATIONS
from chairlift.server.pages.dialect import PAGES

__all__ = ["COUNTED", "DIALECTS", "error_form"]

DIALECTS: Final[tuple[Dialect, ...]] = (OPENAI, ANTHROPIC, OLLAMA, OPERATIONS, PAGES)
COUNTED: Final = tuple(f"{prefix}/" for dialect in DIALECTS for prefix in dialect.prefixes)
"""Beginnings of the paths whose requests are counted."""


def error_form(path: str) -> ErrorForm:
    """Form of the errors at a path."""
    for dialect in DIALECTS:
        if dialect.error_form is not None and any(
            path == prefix or path.startswith(f"{prefix}/") for prefix in dialect.prefixes
        ):
            return dialect.error_form
    return openai_form
