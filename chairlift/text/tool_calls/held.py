"""Makes one grammar for a whole output: first the reasoning, then tool calls or a constrained content.

Because one grammar covers everything, no code has to detect the token at which the content begins.
"""

from __future__ import annotations

import enum
import json
from typing import Any, Final

from chairlift.base.structured_outputs import StructuredOutputsParams
from chairlift.errors import RequestError
from chairlift.text.tool_calls.forced import (
    calls_format,
    literal,
    optional,
    sequence,
    strict_calls_format,
    tag,
)
from chairlift.text.tool_calls.formats import ReasoningFormat, ToolFormat
from chairlift.text.tool_calls.request import Tools

__all__ = ["Thinking", "guarantees_calls", "holds_calls", "output_constraint", "thinking_of"]

_SPACE: Final = {"type": "regex", "pattern": "[ \\n]{0,4}"}


class Thinking(enum.Enum):
    """State of the reasoning at the beginning of an output."""

    NONE = "none"
    """The output has no reasoning, or the prompt already contains the end of it."""
    MAY = "may"
    """The model may begin reasoning."""
    INSIDE = "inside"
    """The prompt has begun the reasoning, so the output continues it."""


def thinking_of(form: ReasoningFormat | None, prompt_end: str) -> Thinking:
    """State of the reasoning after a prompt with the ending ``prompt_end``."""
    if form is None:
        return Thinking.NONE
    if form.opened or form.is_open_after(prompt_end):
        return Thinking.INSIDE
    return Thinking.NONE if prompt_end.rstrip().endswith(form.end) else Thinking.MAY


def output_constraint(
    constraint: StructuredOutputsParams | None,
    tools: Tools,
    tool_format: ToolFormat | None,
    reasoning: ReasoningFormat | None,
    thinking: Thinking,
) -> StructuredOutputsParams | None:
    """Constraint on the whole output, given the constraint on its content (``constraint``). None: no constraint.

    A forced call replaces the content. An optional call is an alternative to the content. Calls of strict functions
    satisfy their schemas between free text. With a grammar or structural
    tags calls are not added, because a grammar already describes the whole output. Raises RequestError for combinations
    that cannot be expressed.
    """
    forced = tools.choice in ("required", "named")
    calls = None
    if tool_format is not None and holds_calls(constraint, tools):
        calls = calls_format(tool_format, tools)
    free = None
    if tool_format is not None and constraint is None and calls is None:
        free = strict_calls_format(tool_format, tools)
    if constraint is None and calls is None and free is None:
        return None
    if free is not None:
        whole = sequence(*_reasoning(reasoning, thinking), free)
        return StructuredOutputsParams(structural_tag={"format": whole})
    if calls is None and thinking is Thinking.NONE:
        return constraint
    if not forced and constraint is not None and constraint.grammar is not None:
        if thinking is not Thinking.INSIDE:
            return constraint
        raise RequestError(
            "structured_outputs.grammar cannot begin after the reasoning, which the prompt has opened; turn thinking"
            " off (chat_template_kwargs, reasoning_effort), use a structural_tag, or write the reasoning into the"
            " grammar and send separate_reasoning false"
        )
    lead = reasoning.content if reasoning is not None and thinking is not Thinking.NONE else ""
    ways = [] if calls is None else [calls]
    if constraint is not None and not forced:
        ways.append(sequence(*literal(lead), _form(constraint)))
    rest = ways[0] if len(ways) == 1 else {"type": "or", "elements": ways}
    whole = sequence(*_reasoning(reasoning, thinking), rest)
    compact = constraint is not None and constraint.disable_any_whitespace
    return StructuredOutputsParams(structural_tag={"format": whole}, disable_any_whitespace=compact)


def holds_calls(
    constraint: StructuredOutputsParams | None, tools: Tools, tool_format: ToolFormat | None = None
) -> bool:
    """Whether a request's grammar describes its calls: they are forced, an alternative to a constrained content, or
    calls of strict functions."""
    if tools.choice in ("required", "named"):
        return True
    if constraint is None and tool_format is not None:
        return strict_calls_format(tool_format, tools) is not None
    return constraint is not None and _is_content(constraint) and bool(tools.schemas)


def guarantees_calls(
    constraint: StructuredOutputsParams | None, tools: Tools, tool_format: ToolFormat | None = None
) -> bool:
    """Whether a call must follow wherever the mark of a call is outside of the reasoning. So a call that has begun is
    certain. Beside a constrained content, the content may have the same beginning as a call."""
    return holds_calls(constraint, tools, tool_format) and (tools.choice in ("required", "named") or constraint is None)


def _reasoning(form: ReasoningFormat | None, thinking: Thinking) -> list[dict[str, Any]]:
    if form is None or thinking is Thinking.NONE:
        return []
    begin = form.begin if thinking is Thinking.MAY else ""
    thought = tag(begin, {"type": "any_text"}, form.end)
    after = next(literal(form.goes_on), _SPACE)
    if thinking is Thinking.INSIDE:
        return [thought, after]
    return [optional(tag("", sequence(thought, after), ""))]


def _is_content(constraint: StructuredOutputsParams) -> bool:
    return constraint.grammar is None and constraint.structural_tag is None


def _form(constraint: StructuredOutputsParams) -> dict[str, Any]:
    """Convert a constraint on the content to a format of structural tags."""
    if constraint.json is not None or constraint.json_object:
        schema = {"type": "object"} if constraint.json is None else json.loads(str(constraint.json))
        return {"type": "json_schema", "json_schema": schema}
    if constraint.regex is not None:
        return {"type": "regex", "pattern": constraint.regex}
    if constraint.choice is not None:
        return {"type": "or", "elements": [each for word in constraint.choice for each in literal(word)]}
    spec: dict[str, Any] = json.loads(str(constraint.structural_tag))
    whole = spec.get("format")
    if isinstance(whole, dict):
        return whole
    tags = [
        tag(each.get("begin"), {"type": "json_schema", "json_schema": each.get("schema", {})}, each.get("end"))
        for each in spec.get("structures") or ()
    ]
    return {"type": "triggered_tags", "triggers": spec.get("triggers"), "tags": tags}
