"""The text of a call that must come: what a grammar holds an answer to where ``tool_choice`` is required or named."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from chairlift.errors import RequestError
from chairlift.tool_calls.formats import Body, ToolFormat
from chairlift.tool_calls.request import Tools

__all__ = ["ForcedCall", "forced_calls"]


@dataclasses.dataclass(frozen=True, slots=True)
class ForcedCall:
    """One way to fill the answer: ``begin``, then JSON that follows ``schema``, then ``end``."""

    begin: str
    schema: Mapping[str, Any]
    end: str


def forced_calls(form: ToolFormat, tools: Tools) -> list[ForcedCall]:
    """The calls that an answer may consist of: one per function, or that of the function which is named.

    A grammar takes them as alternatives, and :class:`~chairlift.tool_calls.reader.AnswerReader` reads each as a call.
    Raises RequestError for a format whose arguments are not JSON.
    """
    schemas = tools.schemas
    names = [tools.named] if tools.named else list(schemas)
    return [_forced(form, name, schemas[name]) for name in names]


def _forced(form: ToolFormat, name: str, schema: Mapping[str, Any]) -> ForcedCall:
    arguments = {"type": "object", **schema}
    if form.body is Body.HARMONY and form.wrapped is not None:
        return ForcedCall(form.wrapped[0].replace("{name}", name), arguments, form.wrapped[2])
    if form.body is Body.JSON and form.wrapped is not None:
        before, key, after = form.wrapped
        opened = before if before.endswith('"name": ') else before + '{"name": '
        return ForcedCall(f"{opened}{json.dumps(name)}, {json.dumps(key)}: ", arguments, "}" + after)
    if form.body is Body.NAMED:
        section = form.section[0] if form.section else ""
        written = form.prefix + name + (":0" if form.numbered else "")
        end = form.call_end.replace("```<", "\n```<") + form.section_end
        return ForcedCall(section + form.call + written + form.name_ends[0], arguments, end)
    raise RequestError(
        f"tool_choice cannot force a call in the format {form.name}, whose arguments are not JSON; use 'auto'"
    )
