"""Finds out in which form a chat template expects messages: once per template, from its syntax tree and by test chats.

Some templates concatenate a message's content, some loop over its parts, and many do both. System messages are often
treated differently from the user's. Nothing in a model's files says which form is right. With the wrong form, a
template raises an error, or worse: it leaves out the text, or prints a list in Python's syntax.

transformers passes messages to the template unchanged. vLLM (``--chat-template-content-format auto``) looks in the
syntax tree for a loop over the content, and then converts every content to parts. llama.cpp renders small chats and
looks for their words in the result; this module does the same.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from jinja2 import nodes

from chairlift.base.json_text import json_text
from chairlift.errors import RequestError, TemplateError
from chairlift.text.tokenizer.late_messages import INSTRUCTIONS, LateMessages
from chairlift.text.tokenizer.messages import REASONING_KEYS

__all__ = ["ContentForm", "TemplateForms", "loops_over_content"]

_ROLES: Final = ("system", "developer", "user", "assistant", "tool", "function")
_FIRST: Final = "alphachair"
"""Text of a test message: a word that occurs in no template. The next three constants are such words, too."""
_SECOND: Final = "omegalift"
_DUMP: Final = "dumpedpart"
_KEY: Final = "argumentkey"
_SHORT_ID: Final = re.compile(r"[A-Za-z0-9]{9}")

Render = Callable[[list[dict[str, Any]], bool], str]
"""Function (messages, whether to begin the assistant's answer) -> text. Raises TemplateError."""


@dataclasses.dataclass(frozen=True, slots=True)
class ContentForm:
    """The forms in which a template prints the content of one role."""

    text: bool = True
    """Whether the template prints a content that is a string."""
    parts: bool = False
    """Whether the template prints the texts of all parts in a list, and not the list itself in Python's syntax."""
    one_part: bool = False
    """Whether the template prints the text of a content that is a list with exactly one text part."""

    def fit(self, content: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
        """The content, converted to a supported form. If parts must become one text, they are joined by newlines, as
        in vLLM."""
        if isinstance(content, str):
            wrapped = not self.text and (self.parts or self.one_part)
            return [{"type": "text", "text": content}] if wrapped else content
        if self.parts or (self.one_part and len(content) == 1):
            return content
        if any(part["type"] == "image" for part in content):
            raise RequestError("the model's chat template prints no images in such a message; send texts only")
        joined = "\n".join(part["text"] for part in content)
        return self.fit(joined)


class TemplateForms:
    """The forms of messages that one template supports. ``render`` renders the template. A role is tested when it
    first occurs in a chat."""

    def __init__(self, tree: nodes.Template, render: Render) -> None:
        self._render = render
        self._words = frozenset(c.value for c in tree.find_all(nodes.Const) if isinstance(c.value, str))
        self._names = self._words | {attribute.attr for attribute in tree.find_all(nodes.Getattr)}
        self._loops = loops_over_content(tree)
        self._content: dict[tuple[str, bool], ContentForm | None] = {}
        self._developers: dict[bool, bool] = {}
        self._alone: dict[str, bool] = {}
        self._late = LateMessages(self._prints_between, self._renders_roles)
        self._arguments: str | None = None
        self._no_content: bool | None = None
        self._short: bool | None = None

    def names(self, word: str) -> bool:
        """Whether the template contains ``word`` as an attribute or in quotation marks."""
        return word in self._names

    def fit(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The messages, converted to forms that the template can print.

        - Late instructions and turns that do not alternate are moved and joined if the template refuses them otherwise
          (:class:`~chairlift.text.tokenizer.late_messages.LateMessages`).
        - A content becomes a string or a list of parts, depending on which of them the template prints.
        - The role ``developer`` becomes ``system`` if the template does not name or not print ``developer``.
        - An assistant's reasoning is passed as ``reasoning_content`` and ``thinking``, as in transformers, and also as
          ``reasoning`` if the template uses this name.
        - A message without a content gets an empty content if the template needs one.
        - The ``arguments`` of tool calls are objects, or JSON text if the template needs text.
        - The ids of tool calls become nine letters or digits if the template accepts nothing else, as Mistral's does. A
          longer id is replaced by a hash.

        Raises RequestError for a role that the template does not know or does not print.
        """
        placed = self._late.arranged(messages)
        fitted = [self._fit(f"messages[{at}]", index, message) for index, (at, message) in enumerate(placed)]
        if len(fitted) == 1 and fitted[0]["role"] in INSTRUCTIONS and not self._prints_alone(fitted[0]["role"]):
            raise _not_printed("messages[0]", messages[0]["role"])
        return fitted

    def _prints_between(self, role: str, before: str, after: str) -> bool:
        """Whether the template prints an instruction between messages of the roles ``before`` and ``after``."""
        role = self._role("", role, first=before == "first")
        user = {"role": "user", "content": self._fitted("user", "x")}
        assistant = {"role": "assistant", "content": self._fitted("assistant", "x")}
        begins = {
            "first": [],
            "start": [{"role": role, "content": self._fitted(role, "x")}],
            "user": [user],
            "tool": [user, *self._called()],
        }
        ends = {"user": [user], "end": [], "tool": [user]}
        earlier = begins.get(before, [user, assistant])
        later = ends.get(after, [assistant, user])
        part = {"type": "text", "text": _FIRST}
        return any(
            self._prints(lambda given: [*earlier, {"role": role, "content": given}, *later], content)
            for content in (_FIRST, [part])
        )

    def _renders_roles(self, roles: tuple[str, ...]) -> bool:
        """Whether the template renders messages of these roles, where ``calling`` is an assistant that calls a tool."""
        called = dict(zip(("calling", "tool"), self._called(), strict=True))
        chat = [called.get(role) or {"role": role, "content": self._fitted(role, "x")} for role in roles]
        return self._renders(chat, roles[-1] != "assistant")

    def _called(self) -> list[dict[str, Any]]:
        """A message of the assistant with a call, and the result of this call."""
        calling = _calling({"place": "x"} if self._takes_arguments() == "object" else '{"place": "x"}')
        return [calling, {"role": "tool", "tool_call_id": "call12345", "name": "look", "content": "x"}]

    def _fit(self, where: str, index: int, message: Mapping[str, Any]) -> dict[str, Any]:
        fitted = {**message, "role": self._role(where, message["role"], first=index == 0)}
        if "content" in fitted:
            form = self.content(fitted["role"], first=index == 0)
            if form is None:
                raise _not_printed(where, message["role"])
            fitted["content"] = form.fit(fitted["content"])
        elif not self._takes_no_content():
            fitted["content"] = self._fitted("assistant", "")
        reasoning = next((fitted[key] for key in REASONING_KEYS if key in fitted), None)
        if reasoning is not None:
            fitted = {"thinking": reasoning, **fitted, "reasoning_content": reasoning}
            if "reasoning" in self._names:
                fitted["reasoning"] = reasoning
        if "tool_calls" in fitted:
            calls = enumerate(fitted["tool_calls"])
            fitted["tool_calls"] = [self._call(f"{where}.tool_calls[{i}]", call) for i, call in calls]
        if "tool_call_id" in fitted:
            fitted["tool_call_id"] = self._id(fitted["tool_call_id"])
        return fitted

    def _role(self, where: str, role: str, first: bool) -> str:
        if role == "developer":
            return role if self._knows_developers(first) else "system"
        if role not in _ROLES and role not in self._words:
            raise RequestError(
                f"{where}.role must be one of {', '.join(_ROLES)}, or one that the model's chat template names; got "
                f"{role[:60]!r}"
            )
        return role

    def _knows_developers(self, first: bool) -> bool:
        """Whether the template names the role ``developer`` and prints such a message. A template that prints neither
        ``developer`` nor ``system`` knows what it names."""
        if "developer" not in self._words:
            return False
        if first not in self._developers:
            prints = [
                any(self._prints(chat, _FIRST) for wrapped in (False, True) for chat in _chats(role, first, wrapped))
                for role in ("developer", "system")
            ]
            self._developers[first] = prints != [False, True]
        return self._developers[first]

    def _prints_alone(self, role: str) -> bool:
        """Whether the template prints instructions without a message of the user. Mistral Nemo's prints them only
        before the last message of the user."""
        if role not in self._alone:
            form = self.content(role)
            given = _FIRST if form is None else form.fit(_FIRST)
            printed = self._prints(lambda content: [{"role": role, "content": content}], given)
            self._alone[role] = printed is not False or not self._prints_users()
        return self._alone[role]

    def content(self, role: str, *, first: bool = True) -> ContentForm | None:
        """Supported forms of a role's contents; None if the template prints none of them.

        ``first`` says whether the message is the first of the chat, where some templates expect instructions.
        """
        key = (role, first or role not in INSTRUCTIONS)
        if key not in self._content:
            self._content[key] = self._try_content(*key)
        return self._content[key]

    def _try_content(self, role: str, first: bool) -> ContentForm | None:
        part = {"type": "text", "text": _FIRST, "unknown": _DUMP}
        contents = (_FIRST, [part, {**part, "text": _SECOND}], [part])
        # One row per test chat, one entry per form: True if printed, False if not, None if the template raised an
        # error, which proves nothing.
        seen: list[tuple[bool | None, ...]] = []
        for wrapped in (False, True):
            for chat in _chats(role, first, wrapped):
                found = tuple(self._prints(chat, content) for content in contents)
                if any(found) or found[0] is False:
                    seen.append(found)
            if any(any(found) for found in seen):
                break
        shown = [found for found in seen if any(found)]
        if not shown:
            if seen and role != "user" and self._prints_users():
                return None
            return ContentForm(parts=self._loops, one_part=self._loops)  # always an error, or the word is never printed
        forms = zip(*shown, strict=True)
        return ContentForm(*[any(prints) and False not in prints for prints in forms])

    def _prints_users(self) -> bool:
        """Whether the template prints the text of the user's message. A template that only counts messages does not."""
        form = self.content("user")
        return form is not None and any(
            self._prints(chat, form.fit(_FIRST)) for wrapped in (False, True) for chat in _chats("user", True, wrapped)
        )

    def _prints(self, chat: Callable[[Any], list[dict[str, Any]]], content: Any) -> bool | None:
        messages = chat(content)
        try:
            text = self._render(messages, messages[-1]["role"] != "assistant")
        except TemplateError:
            return None
        first = text.rfind(_FIRST)
        several = isinstance(content, list) and len(content) > 1
        return first >= 0 and _DUMP not in text and (not several or text.find(_SECOND, first) >= 0)

    def _takes_no_content(self) -> bool:
        """Whether the template renders a message that has tool calls and no content. Some templates fail, because they
        concatenate the content."""
        if self._no_content is None:
            calling, result = self._called()
            del calling["content"]
            user = {"role": "user", "content": self._fitted("user", "x")}
            self._no_content = self._renders([user, calling], False) and (
                self._renders([user, calling, result], True)
                or not self._renders([user, {**calling, "content": ""}, result], True)
            )
        return self._no_content

    def _id(self, given: Any) -> Any:
        """The id of a tool call, converted to a form that the template accepts."""
        if not isinstance(given, str) or _SHORT_ID.fullmatch(given) or not self._takes_short_ids():
            return given
        return hashlib.sha256(given.encode("utf-8", "replace")).hexdigest()[:9]

    def _takes_short_ids(self) -> bool:
        """Whether the template accepts only ids of nine letters or digits."""
        if self._short is None:
            calling, _ = self._called()
            user = {"role": "user", "content": self._fitted("user", "x")}
            renders = list[bool]()
            for call_id in ("call12345", "call_0123456789abcdefghij"):
                calls = [{**calling["tool_calls"][0], "id": call_id}]
                result = {"role": "tool", "tool_call_id": call_id, "name": "look", "content": "x"}
                renders.append(self._renders([user, {**calling, "tool_calls": calls}, result], True))
            self._short = renders == [True, False]
        return self._short

    def _renders(self, chat: list[dict[str, Any]], opens: bool) -> bool:
        try:
            self._render(chat, opens)
        except TemplateError:
            return False
        return True

    def _call(self, where: str, call: Mapping[str, Any]) -> dict[str, Any]:
        inner = call.get("function")
        call = {**call, "id": self._id(call["id"])} if "id" in call else call
        if isinstance(inner, dict):
            return {**call, "function": self._with_arguments(f"{where}.function", inner)}
        return self._with_arguments(where, call)

    def _with_arguments(self, where: str, function: Mapping[str, Any]) -> dict[str, Any]:
        arguments = function.get("arguments")
        if arguments is None:
            return dict(function)
        as_text = self._takes_arguments() == "text"
        if as_text and not isinstance(arguments, str):
            arguments = json_text(arguments)
        elif not as_text and isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}", object_pairs_hook=_unique, parse_constant=_refuse_constant)
            except (ValueError, RecursionError):
                arguments = None
        if not as_text and not isinstance(arguments, dict):
            raise RequestError(
                f"{where}.arguments must be a JSON object with each name once, as it is or as text; got "
                f"{str(function['arguments'])[:60]!r}"
            )
        return {**function, "arguments": arguments}

    def _takes_arguments(self) -> str:
        if self._arguments is None:
            given = {_KEY: _FIRST}
            forms = {"object": self._prints_arguments(given), "text": self._prints_arguments(json.dumps(given))}
            self._arguments = "text" if forms["text"] and not forms["object"] else "object"
        return self._arguments

    def _prints_arguments(self, arguments: Any) -> bool:
        """Whether the template prints these arguments as JSON, neither in Python's syntax nor as a quoted string."""
        user = {"role": "user", "content": self._fitted("user", "x")}
        try:
            text = self._render([user, _calling(arguments), {**user}], True)
        except TemplateError:
            try:
                text = self._render([user, _calling(arguments)], False)
            except TemplateError:
                return False
        return all(word in text for word in (_KEY, _FIRST)) and not any(
            spoilt in text for spoilt in (f"'{_KEY}'", f'\\"{_KEY}')
        )

    def _fitted(self, role: str, text: str) -> Any:
        form = self.content(role)
        return text if form is None else form.fit(text)


def _not_printed(where: str, role: str) -> RequestError:
    return RequestError(
        f"{where}.role is {role!r}, but the model's chat template prints nothing of such a message there; put its text "
        "into a message of the user"
    )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("an object has the same name twice")
    return found


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON value")


def _calling(arguments: Any) -> dict[str, Any]:
    function = {"name": "look", "arguments": arguments}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call12345", "type": "function", "function": function}],
    }


def _chats(role: str, first: bool, wrapped: bool) -> Iterator[Callable[[Any], list[dict[str, Any]]]]:
    """Functions that make a small test chat with a given content for the role. With ``wrapped``, the contents of the
    other messages are lists of parts."""

    def other(name: str) -> dict[str, Any]:
        return {"role": name, "content": [{"type": "text", "text": "x"}] if wrapped else "x"}

    user = other("user")
    assistant = other("assistant")
    calling = _calling({"place": "x"})
    around: list[tuple[list[dict[str, Any]], list[dict[str, Any]]]]
    if role in INSTRUCTIONS:
        around = [([], [user])] if first else [([user, assistant], [user]), ([user], [user]), ([other(role)], [user])]
    elif role == "user":
        around = [([], []), ([user, assistant], []), ([], [assistant, user])]
    elif role == "assistant":
        around = [([user], []), ([user], [user])]
    elif role in ("tool", "function"):
        around = [([user, calling], []), ([user, assistant], [])]
    else:
        around = [([user], []), ([], [user]), ([user, assistant], []), ([], [])]
    for before, after in around:

        def chat(content: Any, before: Any = before, after: Any = after) -> list[dict[str, Any]]:
            message = {"role": role, "content": content}
            if role in ("tool", "function"):
                message |= {"tool_call_id": "call12345", "name": "look"}
            return [*before, message, *after]

        yield chat


def loops_over_content(tree: nodes.Template) -> bool:
    """Whether a template loops over a message's ``content``, also through variables and macros (vLLM's criterion).

    The result is used when tests prove nothing, because the template raises an error for every test chat.
    """
    names = {"content"}
    macros = {macro.name: macro for macro in tree.find_all(nodes.Macro)}

    def is_content(node: nodes.Node) -> bool:
        inner = [node, *node.find_all((nodes.Getattr, nodes.Getitem, nodes.Name))]
        return any(
            (isinstance(each, nodes.Getattr) and each.attr == "content")
            or (isinstance(each, nodes.Getitem) and isinstance(each.arg, nodes.Const) and each.arg.value == "content")
            or (isinstance(each, nodes.Name) and each.name in names)
            for each in inner
        )

    size = 0
    while size != len(names):
        size = len(names)
        for assign in tree.find_all(nodes.Assign):
            if isinstance(assign.target, nodes.Name) and is_content(assign.node):
                names.add(assign.target.name)
        for call in tree.find_all(nodes.Call):
            macro = macros.get(call.node.name) if isinstance(call.node, nodes.Name) else None
            for argument, given in zip(macro.args if macro else (), call.args, strict=False):
                if is_content(given):
                    names.add(argument.name)
    return any(is_content(loop.iter) for loop in tree.find_all(nodes.For))
