"""Converts chats to training texts with the model's chat template, and determines which characters are targets."""

from __future__ import annotations

import contextlib
import dataclasses
import html
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from chairlift.errors import ChairliftError, ConfigError
from chairlift.text.tokenizer.chat_template import ChatTemplate
from chairlift.text.tokenizer.messages import REASONING_KEYS, normalize_messages
from chairlift_train.records import MESSAGE_KEYS, Chat

__all__ = ["Answers", "Written", "text_after", "write_chat", "write_whole"]

Answers = Literal["auto", "together", "apart"]
"""How a chat with several answers is divided into training examples.

- ``together``: one example. ConfigError if the template renders earlier turns differently when more turns follow.
- ``apart``: one example for each answer. The example ends with this answer.
- ``auto``: as few examples as possible. An answer is a target in the example of a later answer if the template renders
  it there as it does when the answer is the last.
"""

_OPEN_TAG: Final = re.compile(r"[<\[][|\uff5c]?\Z")
_SEVERAL: Final = "became several examples, since the chat template rewrites turns once more follow (data.answers)"
_OPENING: Final = "have answers that the chat template opens in another way than the prompt for an answer"
_NO_REASONING: Final = "have reasoning that the chat template does not print"
_NO_ARGUMENTS: Final = "have tool calls with arguments that the chat template does not print"
_NOT_LEARNT: Final = "have an answer that the chat template does not print as it is, so parts of it may not be learnt"
_MARKED_OPENING: Final = "have answers that the chat template marks from before their beginning, which is not learnt"
_INSTRUCTIONS: Final = ("system", "developer")
_PROBE: Final = {"role": "user", "content": "x"}


@dataclasses.dataclass(frozen=True, slots=True)
class Written:
    """A training example that the chat template has written from a chat."""

    text: str
    spans: tuple[tuple[int, int], ...]
    """(start, end) of the parts of the text that are targets, in characters."""
    num_messages: int | None = None
    """Number of messages of the chat in the text; None: all."""


def write_chat(template: ChatTemplate, chat: Chat, answers: Answers, notes: list[str]) -> list[Written]:
    """Convert a chat to training examples. In each example, the text before an answer is what the model would see.

    A template with ``{% generation %}`` marks the targets itself, in one example. Otherwise an answer is the text that
    the template adds after the prompt for this answer. Remarks for the user are added to ``notes``, as predicates of
    records ("have the field ...").

    Raises ConfigError when there is no target or the text of an answer cannot be found, RequestError for invalid
    messages, and TemplateError for an error in the template.
    """
    pages = _pages(template, chat, notes)
    if not any(chat.learnt):
        raise ConfigError("the chat has no message of an assistant, so there is nothing to learn; set train_on: all")
    written = (
        _marked(pages, chat.learnt, notes) if template.marks_answers else _by_prefix(pages, chat.learnt, answers, notes)
    )
    _check_printed(pages.messages, chat.learnt, written, notes)
    return written


def text_after(template: ChatTemplate, chat: Chat, written: Written) -> str:
    """Text that the template writes after an example if a message of the user follows; empty if this is unknown."""
    pages = _pages(template, chat, [])
    count = len(pages.messages) if written.num_messages is None else written.num_messages
    asked = dataclasses.replace(pages, messages=[*pages.messages[:count], _PROBE])
    with contextlib.suppress(ChairliftError):
        text = asked.first(count + 1)
        if text.startswith(written.text):
            return text[len(written.text) :]
    return ""


def write_whole(template: ChatTemplate, chat: Chat, notes: list[str]) -> Written:
    """Convert a chat to one training example whose targets are all characters, except those of answers that a mark such
    as ``weight: 0`` excludes. Raises the errors of :func:`write_chat`."""
    pages = _pages(template, chat, notes)
    text = pages.first(len(pages.messages))
    begin = 0
    spans = []
    for index in (index for index, is_excluded in enumerate(chat.excluded) if is_excluded):
        before = pages.first(index + 1)
        if pages.messages[index]["role"] != "assistant" or not text.startswith(before):
            raise ConfigError(
                f"messages[{index}] is marked as not to be learnt, but its place in the whole text is unknown; set "
                "train_on: answers"
            )
        spans.append((begin, _start(pages, index, before, notes)))
        begin = len(before)
    return Written(text, (*spans, (begin, len(text))))


def _pages(template: ChatTemplate, chat: Chat, notes: list[str]) -> _Pages:
    messages = normalize_messages(_known_messages(template, chat, notes))
    return _Pages(template, messages, chat.tools, chat.variables)


def _known_messages(template: ChatTemplate, chat: Chat, notes: list[str]) -> list[dict[str, Any]]:
    """Messages of a chat, without the keys that the template does not know. A remark about each removed key is added to
    ``notes``."""
    messages = []
    for message in chat.messages:
        unread = [key for key in message if key not in MESSAGE_KEYS and not template.names(str(key))]
        notes += [f"have messages with the key {str(key)[:40]!r}, which is ignored" for key in unread]
        messages.append({key: value for key, value in message.items() if key not in unread})
    return messages


@dataclasses.dataclass(frozen=True, slots=True)
class _Pages:
    """Renders the beginning of a chat (its first n messages) with the chat template."""

    template: ChatTemplate
    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None
    variables: Mapping[str, Any]

    def first(self, count: int, *, opens: bool = False) -> str:
        """Text of the first ``count`` messages. ``opens``: whether to add the prompt for an answer at the end."""
        if not count:
            return ""
        return self.template.render(
            self.messages[:count], add_generation_prompt=opens, tools=self.tools, **self.variables
        )


def _marked(pages: _Pages, learnt: Sequence[bool], notes: list[str]) -> list[Written]:
    text, spans = pages.template.render_marked(pages.messages, tools=pages.tools, **pages.variables)
    spans = _without_openings(pages, text, [(start, end) for start, end in spans if end > start], notes)
    answers = [is_learnt for is_learnt, m in zip(learnt, pages.messages, strict=True) if m["role"] == "assistant"]
    if not all(answers):
        if len(answers) != len(spans):
            raise ConfigError(
                f"{answers.count(False)} of {len(answers)} answers are not learnt, but the chat template marks "
                f"{len(spans)} stretches with {{% generation %}}, so it is not known which; use a template without it"
            )
        spans = [span for span, is_learnt in zip(spans, answers, strict=True) if is_learnt]
    if not spans:
        raise ConfigError("the chat template marks nothing with {% generation %}; correct it, or set train_on: all")
    return [Written(text, tuple(spans))]


def _without_openings(
    pages: _Pages, text: str, spans: Sequence[tuple[int, int]], notes: list[str]
) -> list[tuple[int, int]]:
    """Spans without the prompt for an answer at their beginning, which the model does not have to generate."""
    found = list(spans)
    for index, message in enumerate(pages.messages):
        if message["role"] != "assistant":
            continue
        with contextlib.suppress(ChairliftError):  # the template refuses a chat that ends here: its marks decide
            border = _border(pages, index, text)[0] if index else _start_after_question(pages, 0, pages.first(1), [])
            found = [(border if start < border < end else start, end) for start, end in found]
    if found != list(spans):
        notes.append(_MARKED_OPENING)
    return found


def _by_prefix(pages: _Pages, learnt: Sequence[bool], answers: Answers, notes: list[str]) -> list[Written]:
    """Create training examples, each of which ends with an answer. Earlier answers in an example are targets, too, if
    the template renders them unchanged."""
    targets = [index for index, is_learnt in enumerate(learnt) if is_learnt]
    texts = {index: pages.first(index + 1) for index in targets}
    starts = {index: _start(pages, index, texts[index], notes) for index in targets}
    written: list[Written] = []
    remaining = targets
    while remaining:
        text = texts[remaining[-1]]
        here = [i for i in remaining if i == remaining[-1] or (answers != "apart" and text.startswith(texts[i]))]
        written.append(Written(text, tuple((starts[i], len(texts[i])) for i in here), remaining[-1] + 1))
        remaining = [index for index in remaining if index not in here]
        if remaining and answers == "together":
            raise ConfigError(
                f"the chat template writes the turns up to messages[{remaining[-1]}] in another way once more follow,"
                " so one text cannot contain all answers; set answers: auto, give each answer a record in which it"
                " comes last, or set train_on: all"
            )
    if len(written) > 1:
        notes.append(_SEVERAL)
    return written[::-1]


def _start(pages: _Pages, index: int, text: str, notes: list[str]) -> int:
    """Index of the first character of an answer in ``text``, which ends with this answer."""
    has_question = any(message["role"] not in _INSTRUCTIONS for message in pages.messages[:index])
    # Without a question, some templates write no prompt for the answer, so its header would count as its beginning.
    if not has_question and pages.first(index, opens=bool(index)) == pages.first(index):
        return _start_after_question(pages, index, text, notes)
    border, is_exact = _border(pages, index, text)
    if not is_exact:
        notes.append(_OPENING)
    return border


def _border(pages: _Pages, index: int, text: str) -> tuple[int, bool]:
    """(index of the first character of an answer in ``text``, whether the prompt for the answer ends there)."""
    opened = pages.first(index, opens=True)
    if text.startswith(opened):
        return len(opened), True
    before = pages.first(index)
    common = _common(opened, text)
    common = common[: len(common) - len(match.group())] if (match := _OPEN_TAG.search(common)) else common
    if not text.startswith(before) or len(common) < len(before):
        raise ConfigError(
            f"the chat template writes the turns before messages[{index}] in another way once the answer follows, so"
            " the beginning of the answer is unknown; give chat_template a template for training, or set train_on: all"
        )
    return len(common), False


def _start_after_question(pages: _Pages, index: int, text: str, notes: list[str]) -> int:
    """Index of the first character of an answer without a question, in ``text``, which ends with this answer. The
    answer is found as it is written after a question."""
    asked = dataclasses.replace(pages, messages=[_PROBE, pages.messages[index]])
    after = asked.first(2)
    answer = after[_start(asked, 1, after, notes) :]
    if not text.endswith(answer):
        raise ConfigError(
            "the chat begins with an answer, and the chat template writes it in another way than after a question, so"
            " its beginning is unknown; begin the chat with a message of the user, or set train_on: all"
        )
    return len(text) - len(answer)


def _common(first: str, second: str) -> str:
    """The longest common prefix of two texts."""
    pairs = enumerate(zip(first, second, strict=False))
    return first[: next((index for index, (a, b) in pairs if a != b), min(len(first), len(second)))]


def _check_printed(
    messages: Sequence[Mapping[str, Any]], learnt: Sequence[bool], written: Sequence[Written], notes: list[str]
) -> None:
    """Raise ConfigError if a tool call is missing in the examples. Add a remark if its arguments or reasoning are
    missing, or if the targets do not contain an answer."""
    text = "".join(example.text for example in written)
    targets = _squeezed("".join(each.text[start:end] for each in written for start, end in each.spans))
    answers = [message.get("content") or "" for message, is_learnt in zip(messages, learnt, strict=True) if is_learnt]
    parts = [[answer] if isinstance(answer, str) else [part["text"] for part in answer] for answer in answers]
    if any(_squeezed(part) not in targets for answer in parts for part in answer):
        notes.append(_NOT_LEARNT)
    for index, (message, is_learnt) in enumerate(zip(messages, learnt, strict=True)):
        for call in message.get("tool_calls", ()) if is_learnt else ():
            name = (call.get("function") or call).get("name")
            if isinstance(name, str) and name not in text:
                raise ConfigError(
                    f"messages[{index}] calls {name[:60]!r}, but the chat template does not print tool calls; give "
                    "chat_template a template that does"
                )
            if not _prints_arguments(call, targets):
                notes.append(_NO_ARGUMENTS)
        reasoning = next((message[key] for key in REASONING_KEYS if message.get(key)), None)
        if is_learnt and isinstance(reasoning, str) and reasoning.strip() not in text and _NO_REASONING not in notes:
            notes.append(_NO_REASONING)


def _prints_arguments(call: Mapping[str, Any], squeezed: str) -> bool:
    """Whether a text without white space has the arguments of a tool call, as they were given or in another form."""
    given = (call.get("function") or call).get("arguments")
    if isinstance(given, str):
        if _squeezed(given) in squeezed:
            return True
        with contextlib.suppress(ValueError, RecursionError):
            given = json.loads(given)
    return _prints(given, squeezed)


def _prints(value: Any, squeezed: str) -> bool:
    """Whether a text without white space has all names, texts and numbers of an argument, also in escaped form."""
    if isinstance(value, Mapping):
        given = {name: part for name, part in value.items() if part is not None}  # some templates leave null out
        return all(_prints(part, squeezed) for pair in given.items() for part in pair)
    if isinstance(value, list):
        return all(_prints(part, squeezed) for part in value)
    if value is None or isinstance(value, bool):  # templates write them in many ways
        return True
    forms = {str(value)}
    for _ in range(2):  # templates may write JSON as a string in JSON
        forms |= {json.dumps(form, ensure_ascii=ascii)[1:-1] for form in tuple(forms) for ascii in (False, True)}
    forms |= {repr(str(value))[1:-1], json.dumps(value)}
    forms |= {html.escape(form) for form in tuple(forms)}
    return any(_squeezed(form) in squeezed for form in forms)


def _squeezed(text: str) -> str:
    """A text without white space, which templates change."""
    return "".join(text.split())
