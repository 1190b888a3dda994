"""Tool calls and reasoning in generated text: formats as data, a streaming reader, and checks of requests."""

from chairlift.text.tool_calls.formats import (
    NONE,
    REASONING_FORMATS,
    TOOL_FORMATS,
    ReasoningFormat,
    ToolFormat,
    named_reasoning_format,
    named_tool_format,
    reasoning_format_of,
    tool_format_of,
)
from chairlift.text.tool_calls.held import Thinking, holds_calls, output_constraint, thinking_of
from chairlift.text.tool_calls.reader import Answer, AnswerReader, Broken, Call, Event, Piece, read_answer
from chairlift.text.tool_calls.request import Tools, check_history, check_tools

__all__ = [
    "NONE",
    "REASONING_FORMATS",
    "TOOL_FORMATS",
    "Answer",
    "AnswerReader",
    "Broken",
    "Call",
    "Event",
    "Piece",
    "ReasoningFormat",
    "Thinking",
    "ToolFormat",
    "Tools",
    "check_history",
    "check_tools",
    "holds_calls",
    "named_reasoning_format",
    "named_tool_format",
    "output_constraint",
    "read_answer",
    "reasoning_format_of",
    "thinking_of",
    "tool_format_of",
]
