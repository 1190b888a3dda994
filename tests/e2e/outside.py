"""A family and a format of tool calls that Chairlift does not have, as a user's module gives them."""

from __future__ import annotations

import dataclasses
from typing import Final

from chairlift.models.families.llama import LLAMA
from chairlift.text.tool_calls import ReasoningFormat, ToolFormat
from chairlift.text.tool_calls.formats import Body

__all__ = ["ARROWS", "MADE_UP", "MUSING", "SECOND_LLAMA"]

MADE_UP: Final = dataclasses.replace(
    LLAMA, model_type="made_up", architecture="MadeUpForCausalLM", keys={"num_hidden_layers": "depth"}
)
"""Llama's network, with another name for the number of layers."""
SECOND_LLAMA: Final = dataclasses.replace(LLAMA, models="somebody's")
"""A family with the ``model_type`` of one that Chairlift has."""
ARROWS: Final = ToolFormat(
    name="arrows",
    body=Body.JSON,
    signs=(),
    section=("=>",),
    section_end="<=",
    wrapped=("=>", "arguments", "<="),
)
MUSING: Final = ReasoningFormat("musing", "(hm", "hm)", ())
