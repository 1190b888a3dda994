"""Tool calls and reasoning in generated text: formats as data, a streaming reader, and checks of requests."""

from chairlift.text.tool_calls.events import Answer, Broken, Call, CallBegun, CallEnded, CallPiece, Event, Piece
from chairlift.text.tool_calls.forced import strict_calls_format
from chairlift.text.tool_calls.formats import (
    GENERIC,
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
from chairlift.text.tool_calls.held import Thinking, guarantees_calls, holds_calls, output_constraint, thinking_of
from chairlift.text.tool_calls.reader import AnswerReader, read_answer
from chairlift.text.tool_calls.request import Tools, check_history, check_tools
from chairlift.text.tool_calls.values import complete_part

__all__ = [
    "GENERIC",
    "NONE",
    "REASONING_FORMATS",
    "TOOL_FORMATS",
    "Answer",
    "AnswerReader",
    "Broken",
    "Call",
    "CallBegun",
    "CallEnded",
    "CallPiece",
    "Event",
    "Piece",
    "ReasoningFormat",
    "Thinking",
    "ToolFormat",
    "Tools",
    "check_history",
    "check_tools",
    "complete_part",
    "guarantees_calls",
    "holds_calls",
    "named_reasoning_format",
    "named_tool_format",
    "output_constraint",
    "read_answer",
    "reasoning_format_of",
    "strict_calls_format",
    "thinking_of",
    "tool_format_of",
]
