"""One grammar for a whole answer: the reasoning first, then calls, or a content with a given form.

With one grammar for everything, no code has to detect the token where the content begins.
"""

from __future__ import annotations

import enum
import json
from typing import Any, Final

from chairlift.errors import RequestError
from chairlift.structured_outputs import StructuredOutputsParams
from chairlift.tool_calls.forced import calls_format, literal, optional, sequence, tag
from chairlift.tool_calls.formats import ReasoningFormat, ToolFormat
from chairlift.tool_calls.request import Tools

__all__ = ["Thinking", "held_to", "thinking_of"]

_SPACE: Final = {"type": "regex", "pattern": "[ \\n]{0,4}"}


class Thinking(enum.Enum):
    """State of the reasoning at the begin of an answer."""

    NONE = "none"
    """There is no reasoning, or it is over."""
    MAY = "may"
    """The model may begin it."""
    INSIDE = "inside"
    """The prompt has begun it."""


def thinking_of(form: ReasoningFormat | None, prompt_end: str) -> Thinking:
    """State after a prompt that ends with this text."""
    if form is None:
        return Thinking.NONE
    if form.opened or form.is_open_after(prompt_end):
        return Thinking.INSIDE
    return Thinking.NONE if prompt_end.rstrip().endswith(form.end) else Thinking.MAY


def held_to(
    asked: StructuredOutputsParams | None,
    tools: Tools,
    tool_format: ToolFormat | None,
    reasoning: ReasoningFormat | None,
    thinking: Thinking,
) -> StructuredOutputsParams | None:
    """Form of the whole answer if its content must have the form ``asked``; None: no restriction.

    Forced calls replace the content. Optional calls are alternatives to the content, except with a grammar or
    structural tags, which already describe the whole answer. Raises RequestError for combinations that cannot be
    expressed.
    """
    forced = tools.choice in ("required", "named")
    if tool_format is None or not (forced or (asked is not None and _is_content(asked) and tools.schemas)):
        calls = None
    else:
        calls = calls_format(tool_format, tools)
    if asked is None and calls is None:
        return None
    if calls is None and thinking is Thinking.NONE:
        return asked
    if not forced and asked is not None and asked.grammar is not None:
        if thinking is not Thinking.INSIDE:
            return asked
        raise RequestError(
            "structured_outputs.grammar cannot begin after the reasoning, which the prompt has opened; turn thinking"
            " off (chat_template_kwargs, reasoning_effort), use a structural_tag, or write the reasoning into the"
            " grammar and send separate_reasoning false"
        )
    lead = reasoning.content if reasoning is not None and thinking is not Thinking.NONE else ""
    ways = [] if calls is None else [calls]
    if asked is not None and not forced:
        ways.append(sequence(*literal(lead), _form(asked)))
    rest = ways[0] if len(ways) == 1 else {"type": "or", "elements": ways}
    whole = sequence(*_reasoning(reasoning, thinking), rest)
    compact = asked is not None and asked.disable_any_whitespace
    return StructuredOutputsParams(structural_tag={"format": whole}, disable_any_whitespace=compact)


def _reasoning(form: ReasoningFormat | None, thinking: Thinking) -> list[dict[str, Any]]:
    if form is None or thinking is Thinking.NONE:
        return []
    begin = form.begin if thinking is Thinking.MAY else ""
    thought = tag(begin, {"type": "any_text"}, form.end)
    after = next(literal(form.goes_on), _SPACE)
    if thinking is Thinking.INSIDE:
        return [thought, after]
    return [optional(tag("", sequence(thought, after), ""))]


def _is_content(asked: StructuredOutputsParams) -> bool:
    return asked.grammar is None and asked.structural_tag is None


def _form(asked: StructuredOutputsParams) -> dict[str, Any]:
    """Form of a content as a format of structural tags."""
    if asked.json is not None or asked.json_object:
        schema = {"type": "object"} if asked.json is None else json.loads(str(asked.json))
        return {"type": "json_schema", "json_schema": schema}
    if asked.regex is not None:
        return {"type": "regex", "pattern": asked.regex}
    if asked.choice is not None:
        return {"type": "or", "elements": [each for word in asked.choice for each in literal(word)]}
    spec: dict[str, Any] = json.loads(str(asked.structural_tag))
    whole = spec.get("format")
    if isinstance(whole, dict):
        return whole
    tags = [
        tag(each.get("begin"), {"type": "json_schema", "json_schema": each.get("schema", {})}, each.get("end"))
        for each in spec.get("structures") or ()
    ]
    return {"type": "triggered_tags", "triggers": spec.get("triggers"), "tags": tags}
