"""The parts of the HTTP interface. A new API is a folder with a module ``dialect``, and a line here."""

from __future__ import annotations

from typing import Final

from chairlift.server.anthropic.dialect import ANTHROPIC
from chairlift.server.http.dialect import Dialect
from chairlift.server.openai.dialect import OPENAI
from chairlift.server.operations.dialect import OPERATIONS
from chairlift.server.pages.dialect import PAGES

__all__ = ["DIALECTS"]

DIALECTS: Final[tuple[Dialect, ...]] = (OPENAI, ANTHROPIC, OPERATIONS, PAGES)
