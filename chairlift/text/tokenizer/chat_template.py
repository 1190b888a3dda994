"""Renders chat messages with the model's Jinja template, in a sandbox."""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils

from chairlift.base.json_text import json_text
from chairlift.errors import RequestError, TemplateError, TemplateFailedError
from chairlift.text.tokenizer.described_tools import messages_with_tools
from chairlift.text.tokenizer.messages import normalize_messages, plain_tools
from chairlift.text.tokenizer.shield import ControlTexts, Cover, Given, Shield, Shielded
from chairlift.text.tokenizer.template_forms import TemplateForms

__all__ = ["MAX_TEXT", "ChatTemplate", "check_variables"]

MAX_TEXT: Final = 16 * 1024 * 1024
"""Maximum number of characters that a template may output or build by repetition. For comparison: a million tokens of
English text have about five million characters."""
_INPUTS: Final = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template")
_OPTIONAL_INPUTS: Final = ("tools", "documents", "chat_template")
_PROBE: Final = "probe_function"
_SHOWS_A_PART: Final = (
    "does not print them, and it prints only a part of a conversation, so the model would not see the functions or"
    " their results"
)
_BEGIN_MARK = "chairlift_generation_begins"
_END_MARK = "chairlift_generation_ends"
_HAS_MARKS: Final = re.compile(r"\{%[-+]?\s*generation\b")
_END_OF_FINAL_MESSAGE: Final = "CHAIRLIFT_END_OF_FINAL_MESSAGE"


class ChatTemplate:
    """A model's chat template, compiled once and rendered like transformers' ``apply_chat_template``.

    Templates come from model files, which may be malicious. So they run in Jinja's immutable sandbox, which contains
    only text and numbers. ``named_tokens`` (``bos_token``, ``eos_token``, ...) are variables of the template.
    ``max_chars`` limits the rendered text. This class does not limit memory and time: for messages from untrusted
    clients use :class:`~chairlift.text.tokenizer.template_worker.TemplateWorker`. The template gets messages in a form
    that it can print (:class:`~chairlift.text.tokenizer.template_forms.TemplateForms`).
    """

    def __init__(
        self, template: str | None, named_tokens: Mapping[str, str] | None = None, *, max_chars: int = MAX_TEXT
    ) -> None:
        self._source = template
        self._max_chars = max_chars
        self._named_tokens = dict(named_tokens or {})
        self._prints_tools: bool | None = None
        self._place_of_tools: str | None = None
        self._shielding: Shield | None = None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **scalars: Any,
    ) -> str:
        """The text of a chat, ready for ``Tokenizer.encode(text, add_special_tokens=False)``.

        ``messages`` are dicts with a ``role`` and a ``content``: a string, or text parts (``[{"type": "text", "text":
        ...}]``). A template that prints parts gets them; for others they are joined by newlines. The template also gets
        all other keys (``reasoning_content``, ``tool_calls``, ...). ``add_generation_prompt`` opens the assistant's
        turn. ``continue_final_message`` leaves the last message open, so that the model continues it: the text ends at
        the end of its content, which is found by a mark as in transformers. ``tools`` are functions that the model may
        call, in OpenAI's form (``{"type": "function", "function": {"name": ..., "parameters": ...}}``). If the template
        knows no tools, the messages describe them (:mod:`~chairlift.text.tokenizer.described_tools`). ``scalars`` are
        further variables (``enable_thinking=False``): text, numbers, booleans, None.

        Raises :class:`~chairlift.errors.RequestError` for messages of another form, for a role or tools that the
        template does not print. Raises :class:`~chairlift.errors.TemplateError` when there is no template, when it
        fails, or when the final message cannot be continued.
        """
        given = self._given(messages, tools, scalars)
        return self._lay_out(given, add_generation_prompt, continue_final_message)

    def render_shielded(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        controls: ControlTexts,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **scalars: Any,
    ) -> Shielded:
        """The text of a chat like :meth:`render`, and the same text with symbols in place of the caller's characters
        that could form control tokens. ``controls`` are the same for each call.

        Raises the same errors as :meth:`render`. Raises RequestError if the texts do not come out whole.
        """
        given = self._given(messages, tools, scalars)
        how = add_generation_prompt, continue_final_message
        text = self._lay_out(given, *how)
        cover = Cover(self._shield(controls), given)
        covered = cover.everywhere()
        if covered == given:
            return Shielded(text)
        bare = self._lay_out_covered(covered, *how)
        for each in (bare, cover.unescape(bare)):
            if cover.uncover(each) == text:
                return Shielded(text, each, cover.symbols)
        # The template looks for such characters in the texts. It finds them if only spelled tokens are covered.
        spelled = cover.in_spellings()
        shown = text if spelled == given else cover.unescape(self._lay_out_covered(spelled, *how))
        if cover.uncover(shown) != text:
            raise _not_whole()
        return Shielded(text, shown, cover.symbols, bare)

    def _given(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        scalars: Mapping[str, Any],
    ) -> Given:
        """(messages, variables) in the form that the template prints. Raises the errors of :meth:`render`."""
        check_variables(scalars)
        plain = normalize_messages(messages, images=True)  # who takes images refuses them before
        listed = plain_tools(tools)
        if listed and not self._knows_tools():
            plain = messages_with_tools(plain, listed, in_system=self._describes_in() == "system")
        elif listed:
            scalars = {**scalars, "tools": listed}
        return self._forms.fit(plain), dict(scalars)

    def _lay_out(self, given: Given, add_generation_prompt: bool, continue_final_message: bool) -> str:
        chat, scalars = given
        if not continue_final_message:
            return self._render(chat, add_generation_prompt, scalars)
        marked = [*chat[:-1], _marked(chat[-1])]
        return _up_to_final_message(chat, self._render(chat, False, scalars), self._render(marked, False, scalars))

    def _lay_out_covered(self, given: Given, add_generation_prompt: bool, continue_final_message: bool) -> str:
        try:
            return self._lay_out(given, add_generation_prompt, continue_final_message)
        except TemplateError:
            raise _not_whole() from None

    def _shield(self, controls: ControlTexts) -> Shield:
        if self._shielding is None:
            self._shielding = Shield(controls, self._source or "", self._forms.names)
        return self._shielding

    @property
    def marks_answers(self) -> bool:
        """Whether the template marks the assistant's text with ``{% generation %}``. Training uses these marks."""
        return self._source is not None and _HAS_MARKS.search(self._source) is not None

    def names(self, word: str) -> bool:
        """Whether the template contains ``word`` as an attribute or in quotation marks. If so, it may read the key
        ``word`` of a message."""
        return self._forms.names(word)

    def render_marked(
        self, messages: Sequence[Mapping[str, Any]], /, tools: Sequence[Mapping[str, Any]] | None = None, **scalars: Any
    ) -> tuple[str, list[tuple[int, int]]]:
        """(text, spans): the text of a chat without the beginning of a further answer, and (begin, end) in characters
        of each part inside ``{% generation %}``.

        Raises the same errors as :meth:`render`.
        """
        word = secrets.token_hex(8)  # nobody can write it into a message
        marks = {_BEGIN_MARK: f"\x02{word}", _END_MARK: f"\x03{word}"}
        text = self.render(messages, False, tools=tools, **{**scalars, **marks})
        plain = ""
        spans = []
        begin = 0
        for piece in re.split(f"([\x02\x03]{word})", text):
            if piece == marks[_BEGIN_MARK]:
                begin = len(plain)
            elif piece == marks[_END_MARK]:
                spans.append((begin, len(plain)))
            else:
                plain += piece
        return plain, spans

    def _render(
        self, chat: list[dict[str, Any]], add_generation_prompt: bool, scalars: Mapping[str, Any] | None = None
    ) -> str:
        variables: dict[str, Any] = dict.fromkeys(_INPUTS[:3]) | self._named_tokens | dict(scalars or {})
        return self._generate(variables | {"messages": chat, "add_generation_prompt": add_generation_prompt})

    def _knows_tools(self) -> bool:
        """Whether the template prints tools. The template is tested only once."""
        if self._prints_tools is None:
            function = {"name": _PROBE, "description": "x", "parameters": {"type": "object", "properties": {}}}
            chat = self._forms.fit([{"role": "user", "content": "x"}])
            try:
                text = self._render(chat, True, {"tools": [{"type": "function", "function": function}]})
            except TemplateError:
                text = ""
            self._prints_tools = _PROBE in text
        return self._prints_tools

    def _describes_in(self) -> str:
        """Role of the message that describes tools to a template that does not print them: ``system`` or ``user``.
        Raises RequestError if the template cannot carry a chat with tools. The template is tested only once."""
        if self._place_of_tools is None:
            self._place_of_tools = next((role for role in ("system", "user") if self._carries_chat(role)), "")
        names_tools = "tools" in (self._source or "")
        if not self._place_of_tools or names_tools:
            why = "does not print them" if names_tools else _SHOWS_A_PART
            raise RequestError(
                f"tools has functions, but the model's chat template {why}; use a model whose template takes tools, or"
                " describe the functions in the system message"
            )
        return self._place_of_tools

    def _carries_chat(self, first: str) -> bool:
        """Whether the template prints all messages of a chat with results of tools, in order and unchanged."""
        roles = [*(["system"] if first == "system" else []), "user", "assistant", "user"]
        words = [f"{_PROBE}{index}A" for index in range(len(roles))]
        chat = [{"role": role, "content": word} for role, word in zip(roles, words, strict=True)]
        try:
            text = self._render(self._forms.fit(chat), True)
        except (TemplateError, RequestError):
            return False
        places = [text.find(word) for word in words]
        return -1 not in places and places == sorted(places)

    def parse(self) -> None:
        """Parse the template without running any of it. (:meth:`compile` already runs constant expressions.)

        Raises :class:`~chairlift.errors.TemplateError` for invalid Jinja.
        """
        if self._source is not None:
            _ = self._tree

    def compile(self) -> None:
        """Compile the template now instead of at the first chat. Raises :class:`~chairlift.errors.TemplateError`."""
        _ = self._template

    def check(self) -> None:
        """Compile the template, and test it with a message of the user. If that fails, test it again with a system
        message before the user's.

        Raises :class:`~chairlift.errors.TemplateError` if both tests fail. It is TemplateFailedError if both fail
        because of an error in the template itself.
        """
        user = {"role": "user", "content": "Hi"}
        errors: list[TemplateError] = []
        for chat in ([user], [{"role": "system", "content": "Be brief."}, user]):
            try:
                self.render(chat)
                return
            except TemplateError as error:
                errors.append(error)
            except RequestError as error:
                errors.append(TemplateError(str(error)))
        raise next((error for error in errors if not isinstance(error, TemplateFailedError)), errors[0])

    def _generate(self, variables: dict[str, Any]) -> str:
        template = self._template
        pieces: list[str] = []
        size = 0
        try:
            for piece in template.generate(variables):
                pieces.append(piece)
                size += len(piece)
                _check_size(size, self._max_chars)
        except _RefusalError as error:
            raise TemplateError(f"the chat template refused the messages: {_one_line(error)}") from None
        except _TooLongError as error:
            raise TemplateError(f"the chat template {_one_line(error)}; send fewer or shorter messages") from None
        except MemoryError:
            raise TemplateError(
                "the chat template takes more memory than it may; send fewer or shorter messages"
            ) from None
        except Exception as error:
            raise TemplateFailedError(
                f"the chat template failed with {type(error).__name__}: {_one_line(error)}; correct the template, "
                "or give another one: --chat-template, or chat_template.jinja in the model directory"
            ) from None
        return "".join(pieces)

    @functools.cached_property
    def _forms(self) -> TemplateForms:
        _ = self._template  # raises the template's error
        return TemplateForms(self._tree, self._render)

    @functools.cached_property
    def _tree(self) -> jinja2.nodes.Template:
        if self._source is None:
            raise TemplateError(
                "this model has no chat template; send a plain prompt instead (/v1/completions, or generate --raw), "
                "or give a template: chat_template.jinja in the model directory, or --chat-template of the server"
            )
        with _complaining():
            return _environment().parse(self._source)

    @functools.cached_property
    def _template(self) -> jinja2.Template:
        _ = self._tree
        with _complaining():
            return _environment().from_string(self._source or "")


@contextlib.contextmanager
def _complaining() -> Iterator[None]:
    try:
        yield
    except jinja2.TemplateSyntaxError as error:
        raise TemplateError(f"the chat template is invalid at line {error.lineno}: {_one_line(error)}") from None
    except (jinja2.TemplateError, RecursionError, MemoryError) as error:
        raise TemplateError(f"the chat template cannot be compiled: {_one_line(error)}") from None


def check_variables(scalars: Mapping[str, Any]) -> None:
    """Raise :class:`~chairlift.errors.RequestError` if a variable has a type or size that callers may not pass to a
    template."""
    for name, value in scalars.items():
        given = name in _INPUTS and not (value is None and name in _OPTIONAL_INPUTS)
        if given or not (value is None or type(value) in (str, int, float, bool)):
            raise RequestError(
                f"chat template variable {name!r:.80} must be a string, number, boolean or null and none of "
                f"{', '.join(_INPUTS)}, got {type(value).__name__}"
            )


def _one_line(error: Exception) -> str:
    message = error.message if isinstance(error, jinja2.TemplateError) and error.message else str(error)
    return " ".join(message.split())[:200]


def _marked(message: dict[str, Any]) -> dict[str, Any]:
    """The message with a mark at the end of its content, or at the end of its last part."""
    if "content" not in message:
        raise RequestError(_cannot_continue("the final message has no content"))
    for key in ("tool_calls", "function_call"):
        if message.get(key):
            raise RequestError(_cannot_continue(f"the final message has {key}, which follow its content"))
    content = message["content"]
    mark = f"{_END_OF_FINAL_MESSAGE} "
    if isinstance(content, str):
        return {**message, "content": content + mark}
    return {**message, "content": [*content[:-1], {**content[-1], "text": content[-1]["text"] + mark}]}


def _up_to_final_message(chat: Sequence[Mapping[str, Any]], text: str, marked: str) -> str:
    """Text of a chat up to the end of the last message's content, so that the model continues this content.

    ``marked`` is the same text with a mark after the content. As in transformers, a space after the mark shows whether
    the template strips contents. If the template prints the content twice, the last copy is continued.

    Raises TemplateError if the template changes the content. Raises it also in two cases that transformers accepts: the
    template prints the text before the mark differently, or prints messages after the last message.
    """
    end = marked.rfind(_END_OF_FINAL_MESSAGE)
    if end < 0:
        raise TemplateError(_cannot_continue("the chat template does not print the end of the final message"))
    keeps_space = marked[end:].startswith(f"{_END_OF_FINAL_MESSAGE} ")
    before = marked[:end] if keeps_space else marked[:end].rstrip()
    before = before.replace(f"{_END_OF_FINAL_MESSAGE} ", "").replace(_END_OF_FINAL_MESSAGE, "")
    if not text.startswith(before):
        raise TemplateError(_cannot_continue("the chat template writes another text where the final message goes on"))
    if _texts(chat[-1])[-1].strip() not in before:
        raise TemplateError(_cannot_continue("the chat template does not print the final message as it is"))
    after = text[len(before) :]
    if any(
        words not in before and words in after
        for other in chat[:-1]
        for each in _texts(other)
        if (words := each.strip())
    ):
        raise TemplateError(_cannot_continue("the chat template puts other messages after the final one"))
    return before


def _texts(message: Mapping[str, Any]) -> list[str]:
    content = message.get("content", [])
    return [content] if isinstance(content, str) else [part["text"] for part in content]


def _cannot_continue(reason: str) -> str:
    return f"continue_final_message is not possible: {reason}; leave it out"


def _not_whole() -> RequestError:
    return RequestError(
        "a message or tool spells a control token of the model, and the chat template changes or reads this text, so "
        "it cannot be encoded as plain text (plain_text_messages); leave it out or put a space into it"
    )


def _check_size(size: int, limit: int = MAX_TEXT) -> None:
    if size > limit:
        raise _TooLongError(f"builds more than {limit:,} characters")


class _RefusalError(jinja2.TemplateError):
    """Raised when a template calls ``raise_exception`` to refuse a chat."""


class _TooLongError(jinja2.TemplateError):
    """Raised when a template builds a text that is too long."""


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja's sandbox with a limit on repetition. Without the limit ``"x" * 10**10`` would take all memory."""

    intercepted_binops = frozenset(["*", "**"])

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        sizes = [len(side) for side in (left, right) if isinstance(side, (str, list, tuple))]
        times = [side for side in (left, right) if isinstance(side, int)]
        if operator == "*" and sizes and times:
            _check_size(sizes[0] * times[0])
        if operator == "**" or any(abs(side) > 2**64 for side in times):
            raise jinja2.exceptions.SecurityError("it computes with powers or huge numbers, which templates may not")
        return super().call_binop(context, operator, left, right)


class _GenerationTag(jinja2.ext.Extension):
    """Jinja extension for ``{% generation %}``, which marks the assistant's text for training.

    When serving, the tag prints only its contents. For :meth:`ChatTemplate.render_marked` it also prints marks before
    and after its contents; two variables hold these marks.
    """

    tags = {"generation"}  # noqa: RUF012  (the base class declares it as an instance attribute)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        line = next(parser.stream).lineno
        begin, end = (
            jinja2.nodes.Output([jinja2.nodes.Name(name, "load")], lineno=line) for name in (_BEGIN_MARK, _END_MARK)
        )
        return [begin, *parser.parse_statements(("name:endgeneration",), drop_needle=True), end]


class _Namespace(jinja2.utils.Namespace):
    """Jinja's ``namespace``, but without names that begin with an underscore. The sandbox checks such names in all
    other places."""

    def __init__(*args: Any, **names: Any) -> None:
        self, *rest = args
        start = dict(*rest, **names)
        for name in start:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, start)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"{name!r} starts with an underscore")


def _raise_exception(message: Any) -> None:
    raise _RefusalError(str(message))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML escapes. Jinja's own filter escapes HTML, but models were trained on plain JSON."""
    return json_text(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _from_json(text: Any) -> Any:
    """The value of a JSON text, for templates that expect arguments as text. Values of other types are returned
    unchanged."""
    return json.loads(text) if isinstance(text, str) else text


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _make_dict(*args: Any, **items: Any) -> dict[Any, Any]:
    """``dict`` as a function. The class itself would also give templates access to its methods and its type."""
    return dict(*args, **items)


@functools.cache
def _environment() -> _Sandbox:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.filters["from_json"] = _from_json
    functions: dict[str, Callable[..., Any]] = {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "dict": _make_dict,
        "namespace": _Namespace,
    }
    environment.globals.update(functions)
    del environment.globals["lipsum"]
    return environment
