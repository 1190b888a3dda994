"""Find tool calls and reasoning in the outputs of a chat request."""

from __future__ import annotations

import dataclasses
import functools
import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from chairlift.base.sampling_params import SamplingParams
from chairlift.base.thinking import ThinkingBudget
from chairlift.errors import RequestError
from chairlift.server.http.errors import ApiError
from chairlift.server.http.state import ServerState
from chairlift.server.openai.protocol import ChatRequest, TokenizeRequest, template_variables
from chairlift.server.openai.structured import naming
from chairlift.text.tokenizer.tokenizer import Tokenizer
from chairlift.text.tool_calls import (
    GENERIC,
    NONE,
    AnswerReader,
    Broken,
    CallBegun,
    CallEnded,
    Event,
    Piece,
    ReasoningFormat,
    Thinking,
    ToolFormat,
    Tools,
    check_tools,
    guarantees_calls,
    holds_calls,
    named_reasoning_format,
    named_tool_format,
    output_constraint,
    reasoning_format_of,
    strict_calls_format,
    thinking_of,
    tool_format_of,
)

__all__ = [
    *("EFFORTS", "AnswerReading", "ChatPlan", "chat_plan", "constrained", "limited_params", "opened_by", "plan_prompt"),
]

EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_HELD: Final = {False: "function.strict", True: "custom.format"}
"""Whether a tool is a custom tool -> field that holds its calls to a form."""
_ALPHABET: Final = string.ascii_letters + string.digits
_TAIL: Final = 64
"""Number of tokens at the end of the prompt in which the server searches for the start of reasoning."""


@dataclasses.dataclass(frozen=True, slots=True)
class ChatPlan:
    """Describes how to read the outputs of one chat request."""

    tools: Tools
    variables: Mapping[str, Any]
    """Variables for the chat template."""
    tool_format: ToolFormat | None = None
    """Format in which the model writes tool calls; None: the server does not search the text for tool calls."""
    reasoning: ReasoningFormat | None = None
    """Format in which the model writes reasoning; None: reasoning stays part of the text."""
    include_reasoning: bool = True
    hidden: tuple[str, ...] = ()
    """Special tokens that the engine keeps in the output text, because the reader finds reasoning and tool calls by
    them. The reader removes them from the text. Usually there are none."""
    held: bool = False
    """Whether a grammar describes the tool calls."""
    guaranteed: bool = False
    """Whether a call that has begun is certain, so that its arguments are sent while they grow."""
    thinking: Thinking = Thinking.NONE
    """Whether the output may contain reasoning, and whether it begins inside reasoning that the prompt opened."""

    @property
    def reads(self) -> bool:
        """Whether the output may contain tool calls or reasoning, so that the server must search for them."""
        return self.tool_format is not None or self.reasoning is not None


def plan_prompt(state: ServerState, payload: ChatRequest | TokenizeRequest, ignored: list[str]) -> ChatPlan:
    """Plan for the tools and variables of a prompt. Names of ignored fields are added to ``ignored``. Raises
    ApiError."""
    template = state.engine.prompts.chat_template
    choice = None
    parallel = None
    variables = template_variables(payload.chat_template_kwargs)
    if isinstance(payload, ChatRequest):
        choice = payload.tool_choice
        parallel = payload.parallel_tool_calls
        variables = _with_effort(payload.reasoning_effort, variables, template or "", ignored)
        if (max_reasoning := _budget(payload)) is not None and "thinking_budget" in (template or ""):
            variables = {"thinking_budget": max_reasoning, **variables}
    try:
        tools = check_tools(payload.tools, choice, parallel)
    except RequestError as error:
        param = str(error).partition(" ")[0]
        raise ApiError(400, str(error), code="invalid_value", param=param) from None
    return ChatPlan(tools, variables)


def _with_effort(effort: str | None, variables: dict[str, Any], template: str, ignored: list[str]) -> dict[str, Any]:
    """Add ``reasoning_effort`` to the variables, in the form that the chat template uses: under its own name, or, for
    ``none``, as ``enable_thinking=false``."""
    if effort is None:
        return variables
    if effort not in EFFORTS:
        message = f"reasoning_effort must be one of {', '.join(EFFORTS)}; got {effort!r}"
        raise ApiError(400, message, code="invalid_value", param="reasoning_effort")
    if "reasoning_effort" in template:
        return {"reasoning_effort": effort, **variables}
    if effort == "none" and "enable_thinking" in template:
        return {"enable_thinking": False, **variables}
    ignored.append("reasoning_effort")
    return variables


def chat_plan(state: ServerState, chat: ChatRequest, ignored: list[str]) -> ChatPlan:
    """Make the plan for reading the outputs of a chat request. Names of ignored fields are added to ``ignored``.
    Raises ApiError."""
    plan = plan_prompt(state, chat, ignored)
    template = state.engine.prompts.chat_template
    config = state.config
    reasoning = None
    if chat.separate_reasoning is not False and config.reasoning_parser != NONE:
        reasoning = named_reasoning_format(config.reasoning_parser) or reasoning_format_of(template)
    tool_format = None
    if plan.tools.offered:
        printed = tool_format_of(template)
        tool_format = named_tool_format(config.tool_call_parser) or printed
        if config.tool_call_parser == NONE or tool_format is None:
            why = "the server was started with --tool-call-parser none"
            if config.tool_call_parser != NONE:
                why = "no format of tool calls is known for the model's chat template; --tool-call-parser names one"
            raise ApiError(400, f"tools cannot be used: {why}", code="unsupported_parameter", param="tools")
        if printed is GENERIC and tool_format is not GENERIC and config.tool_call_parser != NONE:
            why = (
                f"the model's chat template knows no tools, so the model is told the format {GENERIC.name}, and the"
                f" server was started with --tool-call-parser {tool_format.name}; start it with auto"
            )
            raise ApiError(400, f"tools cannot be used: {why}", code="unsupported_parameter", param="tools")
        if plan.tools.strict and strict_calls_format(tool_format, plan.tools) is None:
            ignored += [
                f"tools[{index}].{_HELD[tool['function']['name'] in plan.tools.custom]}"
                for index, tool in enumerate(plan.tools.definitions)
                if tool["function"]["name"] in plan.tools.strict
            ]
    plan = dataclasses.replace(
        plan, tool_format=tool_format, reasoning=reasoning, include_reasoning=chat.include_reasoning is not False
    )
    return _with_special_tokens(plan, state.engine.prompts.tokenizer, chat.skip_special_tokens is not False)


def _with_special_tokens(plan: ChatPlan, tokenizer: Tokenizer | None, hide: bool) -> ChatPlan:
    """Make the engine keep special tokens in the text if they mark tool calls or reasoning. The reader then removes
    the other special tokens."""
    if tokenizer is None or not hide:
        return plan
    marks = (*(plan.tool_format.markers if plan.tool_format else ()),)
    marks += (plan.reasoning.begin, plan.reasoning.end) if plan.reasoning else ()
    special = tuple(dict.fromkeys(text for text in tokenizer.special_texts.values() if text))
    needed = any(text in mark for mark in marks for text in special)
    return dataclasses.replace(plan, hidden=special) if needed else plan


def opened_by(plan: ChatPlan, chat: ChatRequest, tokenizer: Tokenizer | None, prompt: Sequence[int]) -> ChatPlan:
    """The plan, with ``thinking`` set from the end of the prompt: whether the output begins inside reasoning, may
    begin reasoning, or has none."""
    marks = plan.reasoning
    if marks is None or tokenizer is None:
        return plan
    if chat.continue_final_message:
        content = chat.messages[-1].get("content")
        text = content if isinstance(content, str) else ""
        is_open = text.rfind(marks.begin) > text.rfind(marks.end)
        return dataclasses.replace(plan, thinking=Thinking.INSIDE if is_open else Thinking.NONE)
    tail = tokenizer.decode(prompt[-_TAIL:], False, final=False)
    return dataclasses.replace(plan, thinking=thinking_of(marks, tail))


def constrained(plan: ChatPlan, chat: ChatRequest, params: SamplingParams) -> tuple[ChatPlan, SamplingParams]:
    """The plan, and ``params`` with a grammar for the whole output: reasoning, then tool calls or content. Raises
    ApiError."""
    requested = params.structured_outputs
    how = requested, plan.tools, plan.tool_format
    plan = dataclasses.replace(plan, held=holds_calls(*how), guaranteed=guarantees_calls(*how))
    with naming(chat):
        whole = output_constraint(requested, plan.tools, plan.tool_format, plan.reasoning, plan.thinking)
        return plan, params if whole is requested else dataclasses.replace(params, structured_outputs=whole)


def limited_params(
    plan: ChatPlan, chat: ChatRequest, tokenizer: Tokenizer | None, params: SamplingParams
) -> SamplingParams:
    """``params`` with the request's limit on reasoning tokens. Raises ApiError if the model or template does not allow
    such a limit."""
    max_reasoning = _budget(chat)
    if max_reasoning is None:
        return params
    shape = plan.reasoning
    if shape is None or tokenizer is None:
        why = "no reasoning is read out of this model's answers"
        if chat.separate_reasoning is False:
            why = "separate_reasoning is false"
        raise _no_budget(f"{why}, so its end is not known; leave the budget out")
    if plan.thinking is Thinking.NONE:
        return params
    end = tokenizer.token_to_id(shape.end)
    begin = () if plan.thinking is Thinking.INSIDE else tokenizer.encode(shape.begin, False)
    added = tokenizer.backend.get_added_tokens_decoder()
    for text, token_id in ((shape.end, end), (shape.begin, begin[0] if begin else end)):
        if token_id is None or token_id not in added:  # a mark with several tokenisations would be missed
            raise _no_budget(f"{text} is no token of its own in the model's vocabulary; use max_tokens")
    after = shape.goes_on + ("" if plan.tools.offered else shape.content)
    budget = ThinkingBudget(
        max_tokens=max_reasoning,
        end=int(end or 0),
        begin=tuple(begin),
        after=tuple(tokenizer.encode(after, False) if after else ()),
    )
    return dataclasses.replace(params, thinking=budget)


def _budget(chat: ChatRequest) -> int | None:
    """Maximum number of reasoning tokens that the request allows; None for no limit."""
    budget = chat.thinking_budget if chat.thinking_token_budget is None else chat.thinking_token_budget
    return None if budget == -1 else budget


def _no_budget(why: str) -> ApiError:
    message = f"thinking_token_budget cannot be kept: {why}"
    return ApiError(400, message, code="unsupported_parameter", param="thinking_token_budget")


class AnswerReading:
    """Reads one output as it grows. ``ids`` are the ids of its tool calls, in order. ``called`` is called once with
    the names of the called tools, when the output has ended with complete calls."""

    def __init__(
        self,
        plan: ChatPlan,
        tokenizer: Tokenizer | None,
        skips: bool,
        called: Callable[[Sequence[str]], None] | None = None,
    ) -> None:
        self._called = called
        self._names: list[str] = []
        self._reader = AnswerReader(
            plan.tool_format,
            plan.reasoning,
            plan.tools.schemas,
            inside=plan.thinking is Thinking.INSIDE,
            hidden=plan.hidden,
            parallel=plan.tools.parallel,
            held=plan.held,
            guaranteed=plan.guaranteed,
            custom=plan.tools.custom,
        )
        self._include_reasoning = plan.include_reasoning
        self.named = plan.tools.choice == "named"
        """Whether ``tool_choice`` in the request names the function to call."""
        self._size = functools.partial(_num_bytes, tokenizer, skips)
        self._starts: list[int] = []
        """Byte offset in the output's text at which each token begins."""
        self._bytes = 0
        self.ids: list[str] = []
        self.is_cut = False
        """Whether the output ends inside a call that was returned."""
        self.broken: list[str] = []

    def read(self, text: str, token_ids: Sequence[int], ended: bool) -> list[Event]:
        """Read new text and tokens, and return the new events. Every call gets an id. Parts that the client does not
        want are dropped."""
        for token_id in token_ids:
            self._starts.append(self._bytes)
            self._bytes += self._size(token_id)
        events = self._reader.feed(text) + (self._reader.finish() if ended else [])
        result: list[Event] = []
        for event in events:
            if isinstance(event, Broken):
                self.broken.append(event.reason)
            elif isinstance(event, CallBegun):
                self._names.append(event.name)
                result.append(dataclasses.replace(event, id=self._new_id(event)))
            elif isinstance(event, Piece) and event.kind != "content" and not self._include_reasoning:
                continue
            else:
                self.is_cut = self.is_cut or (isinstance(event, CallEnded) and event.is_cut)
                result.append(event)
        if ended and self._names and not self.is_cut and self._called is not None:
            self._called(self._names)
        return result

    @property
    def reasoning_tokens(self) -> int:
        """Number of reasoning tokens so far, including the begin and end marks."""
        return self._reader.num_reasoning_tokens(self._starts)

    def is_reasoning(self, index: int) -> bool:
        """Whether the output token at this index is reasoning or one of its marks."""
        return self._reader.is_reasoning(self._starts[index])

    def _new_id(self, call: CallBegun) -> str:
        """Id of a tool call: the model's own id, or a new one of nine letters and digits, a form that all templates
        accept."""
        found = call.id
        while not found or found in self.ids:
            found = "call" + "".join(secrets.choice(_ALPHABET) for _ in range(5))
        self.ids.append(found)
        return found


def _num_bytes(tokenizer: Tokenizer | None, skips: bool, token_id: int) -> int:
    if tokenizer is None:
        return 0
    if tokenizer.byte_decoding is not None:
        return len(tokenizer.token_bytes(token_id, skips))
    return 0 if skips and token_id in tokenizer.special_ids else len(tokenizer.token_text(token_id).encode())
