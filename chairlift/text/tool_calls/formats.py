"""Formats of tool calls and reasoning: one row of data per format, and functions that find the format of a chat
template.

The rows follow the models' published chat templates. llama.cpp instead derives most markers: it renders a template
twice with different inputs and compares the texts. A table is shorter, readable, and a user can select a row by name.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import Final

from chairlift.base.plugins import is_plugin, load_value

__all__ = [
    "GENERIC",
    "NONE",
    "REASONING_FORMATS",
    "TOOL_FORMATS",
    "Body",
    "ReasoningFormat",
    "ToolFormat",
    "named_reasoning_format",
    "named_tool_format",
    "reasoning_format_of",
    "tool_format_of",
]

NONE: Final = "none"
"""Value of ``--tool-call-parser`` and ``--reasoning-parser`` that turns the parser off."""


class Body(enum.Enum):
    """How a model writes the name and the arguments of a call, between the markers of the call."""

    JSON = "json"
    """A JSON object with the function's name and arguments, or a list of such objects."""
    NAMED = "named"
    """The function's name as text, then the arguments as a JSON object."""
    TAGGED = "tagged"
    """The function's name as text, then one tag per argument. The values in the tags are text."""
    ELEMENTS = "elements"
    """The function's name as text, then one element per argument, with elements in it for lists and objects."""
    PYTHON = "python"
    """A list of Python calls with keyword arguments."""
    GEMMA = "gemma"
    """``call:NAME{key:value,...}``, where strings are between marks."""
    HARMONY = "harmony"
    """Messages of gpt-oss: a header with channel and recipient, then the text."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """A format of tool calls. Markers are literal text. White space is allowed between all parts."""

    name: str
    """Name of the format: a value of ``--tool-call-parser``."""
    body: Body
    signs: tuple[tuple[str, ...], ...]
    """Groups of texts. A chat template has this format if it contains all texts of one group."""
    section: tuple[str, ...] = ()
    """Texts that begin a call or a series of calls. Empty: the whole message is the call."""
    section_end: str = ""
    call: str = ""
    """Text that begins each call in a series."""
    bare_call: bool = False
    """Whether ``call`` may also occur without a ``section`` text before it."""
    name_ends: tuple[str, ...] = ()
    """Texts that end the function's name."""
    head_end: str = ""
    """Text that ends the head of a call. Between the function's name and this text is the number of the call."""
    id_mark: str = ""
    """Text between the function's name and the id that the model gives to the call."""
    call_end: str = ""
    key: str = ""
    key_end: str = ""
    tag_mark: str = ""
    """Text before each tag of an argument that is an element."""
    values: tuple[tuple[str, str], ...] = (("", "schema"),)
    """(text before a value, form of the value). The form is ``schema`` (the tool's schema decides), ``text`` or
    ``json``."""
    value_end: str = ""
    typed: bool = False
    """Whether the text before a value begins with the JSON type of the value."""
    prefix: str = ""
    """Text that the model writes before the function's name."""
    numbered: bool = False
    """Whether the model writes ``NAME:NUMBER`` instead of the name. This text is also the id of the call."""
    wrapped: tuple[str, str, str] | None = None
    """For a forced call: (text before the call, JSON key of the arguments, text after the call). If the text before the
    call ends with ``[``, it begins a list of calls. The key is empty if the arguments follow without a key."""
    opening: str = '{"name": '
    """Text before the function's name in a forced call with a JSON body."""
    own_line: bool = False
    """Whether the model writes the value of each argument on a line of its own. In other formats a line break at the
    edge of a value belongs to the value."""
    edges: tuple[str, ...] = ()
    """Texts around calls or content that are no part of the answer."""
    keyed: bool = False
    """Whether the JSON object of a call has the function's name as its only key, and the arguments as its value."""
    listed: bool = True
    """Whether Python calls are the items of a list. Otherwise each is on a line of its own."""
    quote: str = '<|"|>'
    """Text before and after each string of a call in Gemma's form."""
    raw_text: bool = False
    """Whether a text that is an argument of a Python call has no escapes between its quotation marks."""

    def plain_key(self, written: str) -> str:
        """Name of an argument, from the text in its tag."""
        return written.replace("&quot;", '"').replace("&amp;", "&") if self.head_end else written

    def written_key(self, key: str) -> str:
        """Text in the tag of an argument, from its name."""
        return key.replace("&", "&amp;").replace('"', "&quot;") if self.head_end else key

    @property
    def begins(self) -> tuple[str, ...]:
        """Texts that can begin a call in the output."""
        return (*self.section, self.call) if self.bare_call else self.section

    @property
    def markers(self) -> tuple[str, ...]:
        """All texts that the reader searches for. The engine must not remove them from the text, even if they are
        special tokens."""
        parts = (*self.begins, self.section_end, self.call, *self.name_ends, self.head_end, self.id_mark, self.call_end)
        values = tuple(mark for mark, _ in self.values)
        tags = (
            *self.edges,
            self.tag_mark,
            self.key,
            self.key_end,
            self.value_end,
            *values,
            *_BODY_MARKERS.get(self.body, ()),
        )
        tags += (self.quote,) if self.body is Body.GEMMA else ()
        return tuple(dict.fromkeys(each for each in (*parts, *tags) if each))


_HARMONY_MARKERS: Final = (
    "<|start|>",
    "<|channel|>",
    "<|message|>",
    "<|end|>",
    "<|call|>",
    "<|return|>",
    "<|constrain|>",
)
_BODY_MARKERS: Final = {Body.HARMONY: _HARMONY_MARKERS}
_BAR: Final = "｜"
_MINIMAX: Final = "]<]minimax[>["
_DSML: Final = f"{_BAR}DSML{_BAR}"


def _deepseek(name: str, call: str, name_end: str, call_end: str, signs: tuple[tuple[str, ...], ...]) -> ToolFormat:
    return ToolFormat(
        name=name,
        body=Body.NAMED,
        signs=signs,
        section=("<｜tool▁calls▁begin｜>",),
        section_end="<｜tool▁calls▁end｜>",
        call=call,
        name_ends=(name_end,),
        call_end=call_end,
    )


def _dsml(name: str, section: str) -> ToolFormat:
    return ToolFormat(
        name=name,
        body=Body.TAGGED,
        signs=((_DSML, section),),
        section=(f"<{_DSML}{section}>",),
        section_end=f"</{_DSML}{section}>",
        call=f'<{_DSML}invoke name="',
        name_ends=('">',),
        key=f'<{_DSML}parameter name="',
        key_end='" string="',
        values=(('true">', "text"), ('false">', "json")),
        value_end=f"</{_DSML}parameter>",
        call_end=f"</{_DSML}invoke>",
    )


def _functions(name: str, section: str, bare: bool, signs: tuple[tuple[str, ...], ...]) -> ToolFormat:
    return ToolFormat(
        name=name,
        body=Body.TAGGED,
        signs=signs,
        section=(f"<{section}>",),
        section_end=f"</{section}>",
        call="<function=",
        bare_call=bare,
        name_ends=(">",),
        key="<parameter=",
        key_end=">",
        value_end="</parameter>",
        call_end="</function>",
        own_line=bare,
    )


_ROWS: Final = (
    ToolFormat(
        name="harmony",
        body=Body.HARMONY,
        signs=(("<|channel|>", "<|message|>", "<|call|>"), ("<|channel|>", "to=functions.")),
        prefix="functions.",
        wrapped=("<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>", "", ""),
    ),
    _dsml("deepseek_v32", "function_calls"),
    _dsml("deepseek_v4", "tool_calls"),
    ToolFormat(
        name="kimi_k3",
        body=Body.TAGGED,
        signs=(("<|open|>", "<|sep|>", "tools"),),
        section=("<|open|>tools<|sep|>",),
        section_end="<|close|>tools<|sep|>",
        call='<|open|>call tool="',
        name_ends=('" index="',),
        head_end='"<|sep|>',
        key='<|open|>argument key="',
        key_end='" type="',
        values=(
            ('string"<|sep|>', "text"),
            *((f'{kind}"<|sep|>', "json") for kind in ("number", "integer", "boolean", "null", "object", "array")),
        ),
        value_end="<|close|>argument<|sep|>",
        typed=True,
        call_end="<|close|>call<|sep|>",
        edges=("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
    ),
    ToolFormat(
        name="kimi_k2",
        body=Body.NAMED,
        signs=(("<|tool_call_argument_begin|>",),),
        section=("<|tool_calls_section_begin|>",),
        section_end="<|tool_calls_section_end|>",
        call="<|tool_call_begin|>",
        name_ends=("<|tool_call_argument_begin|>",),
        call_end="<|tool_call_end|>",
        prefix="functions.",
        numbered=True,
    ),
    _deepseek(
        "deepseek_v3",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        "\n```json\n",
        "```<｜tool▁call▁end｜>",
        (("<｜tool▁sep｜>", "```json"),),
    ),
    _deepseek("deepseek_v31", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", (("<｜tool▁sep｜>",),)),
    ToolFormat(
        name="minimax_m2",
        body=Body.TAGGED,
        signs=(("<minimax:tool_call>",), ("minimax:tool_call", "<invoke name=")),
        section=("<minimax:tool_call>",),
        section_end="</minimax:tool_call>",
        call='<invoke name="',
        name_ends=('">',),
        key='<parameter name="',
        key_end='">',
        value_end="</parameter>",
        call_end="</invoke>",
    ),
    ToolFormat(
        name="minimax_m3",
        body=Body.ELEMENTS,
        signs=((_MINIMAX,),),
        section=(_MINIMAX + "<tool_call>",),
        section_end=_MINIMAX + "</tool_call>",
        call=_MINIMAX + '<invoke name="',
        name_ends=('">',),
        tag_mark=_MINIMAX,
        call_end=_MINIMAX + "</invoke>",
    ),
    ToolFormat(
        name="gemma4",
        body=Body.GEMMA,
        signs=(("<|tool_call>", "<tool_call|>"),),
        section=("<|tool_call>",),
        section_end="<tool_call|>",
        prefix="call:",
    ),
    ToolFormat(
        name="functiongemma",
        body=Body.GEMMA,
        signs=(("<start_function_call>",),),
        section=("<start_function_call>",),
        section_end="<end_function_call>",
        prefix="call:",
        quote="<escape>",
    ),
    ToolFormat(
        name="hy_v3",
        body=Body.TAGGED,
        signs=(("<tool_sep>", "<arg_key>"),),
        section=("<tool_calls>",),
        section_end="</tool_calls>",
        call="<tool_call>",
        name_ends=("<tool_sep>",),
        key="<arg_key>",
        key_end="</arg_key>",
        values=(("<arg_value>", "schema"),),
        value_end="</arg_value>",
        call_end="</tool_call>",
    ),
    ToolFormat(
        name="step3",
        body=Body.TAGGED,
        signs=(("steptml:invoke",),),
        section=("<｜tool_calls_begin｜>",),
        section_end="<｜tool_calls_end｜>",
        call='<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="',
        name_ends=('">',),
        key='<steptml:parameter name="',
        key_end='">',
        value_end="</steptml:parameter>",
        call_end="</steptml:invoke><｜tool_call_end｜>",
    ),
    ToolFormat(
        name="apertus",
        body=Body.JSON,
        signs=(("<|tools_prefix|>",),),
        section=("<|tools_prefix|>",),
        section_end="<|tools_suffix|>",
        wrapped=("<|tools_prefix|>[", "", "]<|tools_suffix|>"),
        opening="{",
        keyed=True,
    ),
    ToolFormat(
        name="internlm",
        body=Body.JSON,
        signs=(("<|action_start|>", "<|plugin|>"),),
        section=("<|plugin|>",),
        section_end="<|action_end|>",
        wrapped=("<|action_start|><|plugin|>\n", "parameters", "\n<|action_end|>"),
        edges=("<|action_start|>",),
    ),
    ToolFormat(
        name="longcat",
        body=Body.JSON,
        signs=(("<longcat_tool_call>",),),
        section=("<longcat_tool_call>",),
        section_end="</longcat_tool_call>",
        wrapped=("<longcat_tool_call>\n", "arguments", "\n</longcat_tool_call>"),
    ),
    ToolFormat(
        name="olmo3",
        body=Body.PYTHON,
        signs=(("<function_calls>", "<functions>"), ("<function_calls>", "</function_calls>")),
        section=("<function_calls>",),
        section_end="</function_calls>",
        listed=False,
    ),
    ToolFormat(
        name="glm",
        body=Body.TAGGED,
        signs=(("<arg_key>", "<arg_value>"),),
        section=("<tool_call>",),
        name_ends=("\n", "<arg_key>", "</tool_call>"),
        key="<arg_key>",
        key_end="</arg_key>",
        values=(("<arg_value>", "schema"),),
        value_end="</arg_value>",
        call_end="</tool_call>",
    ),
    _functions("seed_oss", "seed:tool_call", False, (("<seed:tool_call>",), ("seed:tool_call", "<function="))),
    _functions("qwen3_coder", "tool_call", True, (("<function=", "<parameter="),)),
    ToolFormat(
        name="mistral",
        body=Body.NAMED,
        signs=(("[TOOL_CALLS]", "[ARGS]"),),
        section=("[TOOL_CALLS]",),
        name_ends=("[ARGS]", "[CALL_ID]"),
        id_mark="[CALL_ID]",
    ),
    ToolFormat(
        name="mistral_nemo",
        body=Body.JSON,
        signs=(("[TOOL_CALLS]",),),
        section=("[TOOL_CALLS]",),
        wrapped=("[TOOL_CALLS][", "arguments", "]"),
    ),
    ToolFormat(
        name="lfm2",
        body=Body.PYTHON,
        signs=(("<|tool_call_start|>",),),
        section=("<|tool_call_start|>",),
        section_end="<|tool_call_end|>",
        raw_text=True,
    ),
    ToolFormat(
        name="granite",
        body=Body.JSON,
        signs=(("<|tool_call|>", "<|start_of_role|>"),),
        section=("<|tool_call|>",),
        wrapped=("<|tool_call|>[", "arguments", "]"),
    ),
    ToolFormat(
        name="phi4",
        body=Body.JSON,
        signs=(("<|tool_call|>",), ("<|tool|>", "<|/tool|>")),
        section=("<|tool_call|>", "functools"),
        section_end="<|/tool_call|>",
        wrapped=("<|tool_call|>[", "arguments", "]<|/tool_call|>"),
    ),
    ToolFormat(
        name="command_r7b",
        body=Body.JSON,
        signs=(("<|START_ACTION|>",),),
        section=("<|START_ACTION|>",),
        section_end="<|END_ACTION|>",
        wrapped=("<|START_ACTION|>[", "parameters", "]<|END_ACTION|>"),
        opening='{"tool_call_id": "{number}", "tool_name": ',
    ),
    ToolFormat(
        name="functools",
        body=Body.JSON,
        signs=(("functools[",), (" functools",)),
        section=("functools",),
        wrapped=("functools[", "arguments", "]"),
    ),
    ToolFormat(
        name="functionary_v31",
        body=Body.NAMED,
        signs=(("<function=", "</function>"),),
        section=("<function=",),
        name_ends=(">",),
        call_end="</function>",
    ),
    ToolFormat(
        name="tool_calls_list",
        body=Body.JSON,
        signs=(("<tool_calls>", "</tool_calls>", "arguments"),),
        section=("<tool_calls>",),
        section_end="</tool_calls>",
        wrapped=("<tool_calls>[", "arguments", "]</tool_calls>"),
    ),
    ToolFormat(
        name="ernie45",
        body=Body.JSON,
        signs=(("<tool_call>", "<response>"),),
        section=("<tool_call>",),
        section_end="</tool_call>",
        wrapped=("<tool_call>\n", "arguments", "\n</tool_call>"),
        edges=("<response>", "</response>"),
    ),
    ToolFormat(
        name="granite_20b_fc",
        body=Body.JSON,
        signs=(("<function_call>",),),
        section=("<function_call>",),
        wrapped=("<function_call> ", "arguments", ""),
    ),
    ToolFormat(
        name="hermes",
        body=Body.JSON,
        signs=(("<tool_call>", '"arguments"'), ("<tool_call>", '\\"arguments\\"')),
        section=("<tool_call>",),
        section_end="</tool_call>",
        wrapped=("<tool_call>\n", "arguments", "\n</tool_call>"),
    ),
    ToolFormat(
        name="nemotron_v2",
        body=Body.JSON,
        signs=(("<TOOLCALL>",),),
        section=("<TOOLCALL>",),
        section_end="</TOOLCALL>",
        wrapped=("<TOOLCALL>[", "arguments", "]</TOOLCALL>"),
    ),
    ToolFormat(
        name="llama3_json",
        body=Body.JSON,
        signs=(("<|start_header_id|>", '"parameters"'), ("<|start_header_id|>", "ipython", "parameters")),
        wrapped=("", "parameters", ""),
        edges=("<|python_tag|>",),
    ),
    ToolFormat(
        name="pythonic",
        body=Body.PYTHON,
        signs=(("<|header_start|>", "tools"), ("func_name1(params_name1=",)),
        edges=("<|python_start|>", "<|python_end|>"),
    ),
)

GENERIC: Final = ToolFormat(
    name="generic",
    body=Body.JSON,
    signs=(),
    section=("<tool_call>",),
    section_end="</tool_call>",
    wrapped=("<tool_call>\n", "arguments", "\n</tool_call>"),
)
"""Format for chat templates that know no tools. The messages describe it to the model."""
TOOL_FORMATS: Final = {row.name: row for row in (*_ROWS, GENERIC)}
"""Name -> format. A chat template has the first format whose ``signs`` it contains."""


@dataclasses.dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Texts that mark a model's reasoning before its answer."""

    name: str
    """Name of the format: a value of ``--reasoning-parser``."""
    begin: str
    end: str
    signs: tuple[tuple[str, ...], ...]
    """Groups of texts. A chat template has this format if it contains all texts of one group."""
    opened: bool = False
    """Whether every output begins inside the reasoning, even if the template does not write ``begin``."""
    goes_on: str = ""
    """Text between the reasoning and the rest of the output. Empty if only white space is between them."""
    content: str = ""
    """Text that the model writes before the content of its answer; empty if there is none."""

    def is_open_after(self, prompt_end: str) -> bool:
        """Whether a prompt with this ending has begun the reasoning and not ended it."""
        return prompt_end.rstrip().endswith(self.begin)


_REASONING_ROWS: Final = (
    ReasoningFormat(
        name="harmony",
        begin="<|channel|>analysis<|message|>",
        end="<|end|>",
        signs=TOOL_FORMATS["harmony"].signs,
        goes_on="<|start|>assistant",
        content="<|channel|>final<|message|>",
    ),
    ReasoningFormat("gemma4", "<|channel>thought", "<channel|>", (("<|channel>", "<channel|>"),)),
    ReasoningFormat("command_r7b", "<|START_THINKING|>", "<|END_THINKING|>", (("<|START_THINKING|>",),)),
    ReasoningFormat("kimi_k3", "<|open|>think<|sep|>", "<|close|>think<|sep|>", (("<|open|>think<|sep|>",),)),
    ReasoningFormat("minimax_m3", "<mm:think>", "</mm:think>", (("<mm:think>",),)),
    ReasoningFormat("mistral", "[THINK]", "[/THINK]", (("[THINK]",),)),
    ReasoningFormat("seed_oss", "<seed:think>", "</seed:think>", (("<seed:think>",), ("seed:think",))),
    ReasoningFormat("think", "<think>", "</think>", (("<think>",), ("</think>",))),
    ReasoningFormat("deepseek_r1", "<think>", "</think>", (), True),
)

REASONING_FORMATS: Final = {row.name: row for row in _REASONING_ROWS}
"""Name -> format. A chat template has the first format whose ``signs`` it contains."""


def named_tool_format(name: str) -> ToolFormat | None:
    """The format that ``--tool-call-parser`` names: a row of :data:`TOOL_FORMATS`, or the value ``module:FORMAT``. None
    for ``auto`` and ``none``. Raises ConfigError for a value that cannot be used."""
    if is_plugin(name):
        return load_value("tool_call_parser", name, ToolFormat, "a row of chairlift.text.tool_calls.TOOL_FORMATS")
    return TOOL_FORMATS.get(name)


def named_reasoning_format(name: str) -> ReasoningFormat | None:
    """The format that ``--reasoning-parser`` names, like :func:`named_tool_format`. Raises ConfigError."""
    if is_plugin(name):
        rows = "a row of chairlift.text.tool_calls.REASONING_FORMATS"
        return load_value("reasoning_parser", name, ReasoningFormat, rows)
    return REASONING_FORMATS.get(name)


def tool_format_of(template: str | None) -> ToolFormat | None:
    """Format in which a chat template prints tool calls, or ``generic`` if it knows no tools; None if no known format
    fits.

    Some templates print calls and no tools (DeepSeek R1 and V3.1). They get ``generic``, too, because that is the form
    in which the messages describe the tools to the model.
    """
    if template is not None and "tools" not in template:
        return GENERIC
    return next((row for row in _ROWS if _has(template, row.signs)), None)


def reasoning_format_of(template: str | None) -> ReasoningFormat | None:
    """Format in which a chat template prints reasoning; None if it prints none, or no known format fits."""
    return next((row for row in _REASONING_ROWS if _has(template, row.signs)), None)


def _has(template: str | None, groups: Sequence[Sequence[str]]) -> bool:
    return template is not None and any(all(sign in template for sign in signs) for signs in groups)
