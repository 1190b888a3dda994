"""Writes the table of sampling parameters into ``docs/server.md``, from their declarations:

::

    python tools/sampling_table.py
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).parents[1]))

from chairlift.base.field_docs import field_docs, first_sentence
from chairlift.base.sampling_params import PARAMETERS, Parameter, SamplingParams
from chairlift.server.openai.protocol import GenerationRequest, SampledRequest
from tools.markdown import replaced, table

PAGE: Final = Path(__file__).parents[1] / "docs" / "server.md"
BEGIN: Final = "<!-- sampling parameters, made by tools/sampling_table.py -->"
_HUGE: Final = 2**31 - 1


def sampling_table() -> str:
    """Table with a row for each declared parameter that chats and text completions have in common."""
    docs, rows = field_docs(SamplingParams), []
    for name, declared in PARAMETERS.items():
        if name not in GenerationRequest.__struct_fields__:
            continue
        where = "all" if name in SampledRequest.__struct_fields__ else "chats, completions"
        rows.append((f"`{name}`", _values(declared), where, first_sentence(docs[name])))
    return table(("Parameter", "Values", "Endpoints", "Meaning"), rows)


def _values(declared: Parameter) -> str:
    if declared.kind is list:
        return "texts"
    if declared.kind is bool:
        return "`true`, `false`"
    low = f"above {declared.low:g}" if declared.above else f"{declared.low:g}"
    if declared.high >= _HUGE:
        return "any whole number" if declared.low <= -_HUGE else f"{low} or more"
    return f"{low} to {declared.high:g}" if not declared.above else f"{low}, up to {declared.high:,.0f}"


if __name__ == "__main__":
    PAGE.write_text(replaced(PAGE.read_text(encoding="utf-8"), BEGIN, sampling_table()), encoding="utf-8")
