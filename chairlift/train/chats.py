"""Chats as texts to train on, through the model's chat template, and which characters of them are learnt."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from chairlift.errors import ConfigError
from chairlift.tokenizer.chat_template import ChatTemplate
from chairlift.tokenizer.messages import REASONING_KEYS, normalize_messages
from chairlift.train.records import MESSAGE_KEYS, Chat

__all__ = ["Answers", "Written", "known_messages", "write_chat"]

Answers = Literal["auto", "together", "apart"]
"""Examples that a chat with several answers becomes.

- ``together``: one. ConfigError where the template writes earlier turns in another way once more follow.
- ``apart``: one for each answer, in which it comes last.
- ``auto``: as few as possible: an answer joins a later one's example where it stands there as the model would write it.
"""

_OPEN_TAG: Final = re.compile(r"[<\[][|\uff5c]?\Z")
_SEVERAL: Final = "became several examples, since the chat template rewrites turns once more follow (data.answers)"
_OPENING: Final = "have answers that the chat template opens in another way than the prompt for an answer"
_NO_REASONING: Final = "have reasoning that the chat template does not print"


@dataclasses.dataclass(frozen=True, slots=True)
class Written:
    """One example of a chat."""

    text: str
    spans: tuple[tuple[int, int], ...]
    """Begins and ends of what is learnt, in characters."""


def write_chat(template: ChatTemplate, chat: Chat, answers: Answers, notes: list[str]) -> list[Written]:
    """Write a chat's answers, so that each follows what the model would see before it.

    A template with ``{% generation %}`` says itself what is learnt, in one example. Otherwise an answer is what the
    template adds to the prompt for it. What the caller should know is added to ``notes``: predicates of records.

    Raises ConfigError when nothing is to learn or an answer has no place of its own, RequestError for messages of
    another form, and TemplateError.
    """
    messages = normalize_messages(known_messages(template, chat, notes))
    if not any(chat.learnt):
        raise ConfigError("the chat has no message of an assistant, so nothing to learn; set train_on: all")
    pages = _Pages(template, messages, chat.tools, chat.variables)
    written = _marked(pages, chat.learnt) if template.marks_answers else _by_prefix(pages, chat.learnt, answers, notes)
    _check_printed(messages, chat.learnt, "".join(example.text for example in written), notes)
    return written


def known_messages(template: ChatTemplate, chat: Chat, notes: list[str]) -> list[dict[str, Any]]:
    """The chat's messages without unknown keys. Each removed key is noted."""
    kept = []
    for message in chat.messages:
        unread = [key for key in message if key not in MESSAGE_KEYS and not template.names(str(key))]
        notes += [f"have messages with the key {str(key)[:40]!r}, which is ignored" for key in unread]
        kept.append({key: value for key, value in message.items() if key not in unread})
    return kept


@dataclasses.dataclass(frozen=True, slots=True)
class _Pages:
    """Texts of a chat's beginnings."""

    template: ChatTemplate
    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None
    variables: Mapping[str, Any]

    def first(self, count: int, *, opens: bool = False) -> str:
        """Text of the first messages; ``opens``: with the beginning of an answer."""
        if not count:
            return ""
        return self.template.render(
            self.messages[:count], add_generation_prompt=opens, tools=self.tools, **self.variables
        )


def _marked(pages: _Pages, learnt: Sequence[bool]) -> list[Written]:
    text, spans = pages.template.render_marked(pages.messages, tools=pages.tools, **pages.variables)
    spans = [(start, end) for start, end in spans if end > start]
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


def _by_prefix(pages: _Pages, learnt: Sequence[bool], answers: Answers, notes: list[str]) -> list[Written]:
    """Examples that end with an answer each, and in which earlier answers are learnt where they stand the same."""
    places = [index for index, is_learnt in enumerate(learnt) if is_learnt]
    texts = {index: pages.first(index + 1) for index in places}
    starts = {index: _start(pages, index, texts[index], notes) for index in places}
    written: list[Written] = []
    left = places
    while left:
        text = texts[left[-1]]
        here = [i for i in left if i == left[-1] or (answers != "apart" and text.startswith(texts[i]))]
        written.append(Written(text, tuple((starts[i], len(texts[i])) for i in here)))
        left = [index for index in left if index not in here]
        if left and answers == "together":
            raise ConfigError(
                f"the chat template writes the turns up to messages[{left[-1]}] in another way once more follow, so "
                "this answer has no place of its own; set answers: auto, give each answer a record in which it comes "
                "last, or set train_on: all"
            )
    if len(written) > 1:
        notes.append(_SEVERAL)
    return written[::-1]


def _start(pages: _Pages, index: int, text: str, notes: list[str]) -> int:
    """First character of an answer in the text that ends with it."""
    opened = pages.first(index, opens=True)
    if text.startswith(opened):
        return len(opened)
    before, common = pages.first(index), _common(opened, text)
    common = common[: len(common) - len(match.group())] if (match := _OPEN_TAG.search(common)) else common
    if not text.startswith(before) or len(common) < len(before):
        raise ConfigError(
            f"the chat template writes the turns before messages[{index}] in another way once the answer follows, so it"
            " has no place of its own; give chat_template a template for training, or set train_on: all"
        )
    notes.append(_OPENING)
    return len(common)


def _common(first: str, second: str) -> str:
    """The longest beginning that both have."""
    pairs = enumerate(zip(first, second, strict=False))
    return first[: next((place for place, (a, b) in pairs if a != b), min(len(first), len(second)))]


def _check_printed(messages: Sequence[Mapping[str, Any]], learnt: Sequence[bool], text: str, notes: list[str]) -> None:
    """Raise ConfigError for a call of a tool that is not in the text, and note reasoning that is not."""
    for index, (message, is_learnt) in enumerate(zip(messages, learnt, strict=True)):
        for call in message.get("tool_calls", ()) if is_learnt else ():
            name = (call.get("function") or call).get("name")
            if isinstance(name, str) and name not in text:
                raise ConfigError(
                    f"messages[{index}] calls {name[:60]!r}, but the chat template does not print calls of tools; give "
                    "chat_template one that does"
                )
        reasoning = next((message[key] for key in REASONING_KEYS if message.get(key)), None)
        if is_learnt and isinstance(reasoning, str) and reasoning.strip() not in text and _NO_REASONING not in notes:
            notes.append(_NO_REASONING)
