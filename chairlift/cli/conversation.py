"""A conversation in the terminal, for ``chairlift chat`` and ``chairlift run``, and the models that it can be with."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

from chairlift.base.quantities import reader_of
from chairlift.base.sampling_params import PARAMETERS, SamplingParams
from chairlift.engine.interrupt import held_interrupt
from chairlift.errors import ChairliftError, RequestError

if TYPE_CHECKING:
    from chairlift.llm import LLM
    from chairlift.text.tool_calls import AnswerReader

__all__ = ["Conversation", "LocalModel", "Spoken", "TextModel"]

_HELP: Final = """/set system TEXT           sets the system message (/set nosystem: none), and forgets the conversation
/set parameter NAME VALUE  sets a sampling parameter, such as temperature 0.7 or max_tokens 200
/show                      shows the model, the system message and the parameters
/reset, /clear             forgets the conversation
/bye, /exit, /quit         leaves (Ctrl-D, too)
Ctrl-C stops an answer. A message of several lines begins and ends with three double quotes."""
_LEAVE: Final = ("/exit", "/quit", "/bye")
_FORGET: Final = ("/reset", "/clear")
_QUOTES: Final = '"' * 3
_GREY: Final = "\x1b[90m"
_NORMAL: Final = "\x1b[0m"
_OLLAMA_NAMES: Final = {"num_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}
"""Parameter of Ollama's ``/set parameter`` -> its name here."""


@dataclasses.dataclass(frozen=True, slots=True)
class Spoken:
    """A piece of text, which may be empty: of the answer, or of the model's reasoning before it."""

    text: str
    is_reasoning: bool = False


class TextModel(Protocol):
    """A model to chat with: in this process, or on a server."""

    @property
    def title(self) -> str:
        """Name of the model to print."""

    @property
    def room(self) -> int:
        """Maximum number of tokens of a conversation, including its next answer."""

    def count_tokens(self, messages: Sequence[Mapping[str, str]]) -> int:
        """Number of tokens of the prompt that asks for the next answer."""

    def stream(
        self, messages: Sequence[Mapping[str, str]], sampling: Mapping[str, Any]
    ) -> Generator[Spoken, None, None]:
        """Yield the reasoning and the answer in pieces.

        Ctrl-C during the answer raises KeyboardInterrupt if the conversation can continue, otherwise SystemExit.
        Closing the iterator stops the answer. Raises ChairliftError.
        """


class LocalModel:
    """A model in this process.

    ``defaults`` are sampling parameters of requests that do not give them. ``raw``: there is no chat template, and the
    text of the messages is continued as it is.
    """

    def __init__(self, llm: LLM, *, defaults: Mapping[str, Any] | None = None, raw: bool = False) -> None:
        self._llm = llm
        self._defaults = dict(defaults or {})
        self._raw = raw

    @property
    def title(self) -> str:
        return self._llm.config.model.model

    @property
    def room(self) -> int:
        return min(self._llm.max_model_len, self._llm.engine.kv.capacity_tokens + 1)

    def count_tokens(self, messages: Sequence[Mapping[str, str]]) -> int:
        return len(self._encode(messages))

    def stream(
        self, messages: Sequence[Mapping[str, str]], sampling: Mapping[str, Any]
    ) -> Generator[Spoken, None, None]:
        engine = self._llm.engine
        prompt = self._encode(messages)
        reader = self._reader(prompt)
        settings = {**self._defaults, **sampling}
        if reader is not None:
            settings["skip_special_tokens"] = False  # some marks of reasoning are special tokens
        request_id = engine.add_request(prompt, SamplingParams.from_dict(settings))
        length = 0
        try:
            with held_interrupt() as interrupted:
                while engine.has_unfinished:
                    if interrupted():
                        raise KeyboardInterrupt
                    for output in self._step():
                        text = output.outputs[0].text
                        yield from _read(reader, text[length:], ended=output.finished)
                        length = len(text)
                        if output.error is not None:
                            raise RequestError(output.error)
        finally:
            engine.abort(request_id)

    def _encode(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        tokenizer = self._llm.tokenizer
        if self._raw and tokenizer is not None:
            return tokenizer.encode("\n\n".join(message["content"] for message in messages))
        return self._llm.encode_chat(messages)

    def _reader(self, prompt: Sequence[int]) -> AnswerReader | None:
        """Reader that tells the reasoning from the answer; None for a model that does not reason."""
        from chairlift.text.tool_calls import AnswerReader, reasoning_format_of

        tokenizer = self._llm.tokenizer
        form = None if self._raw or tokenizer is None else reasoning_format_of(tokenizer.chat_template)
        if form is None or tokenizer is None:
            return None
        inside = form.is_open_after(tokenizer.decode(prompt[-64:], False, final=False))
        return AnswerReader(None, form, inside=inside, hidden=tuple(filter(None, tokenizer.special_texts.values())))

    def _step(self) -> Any:
        try:
            return self._llm.engine.step()
        except KeyboardInterrupt:  # the second press: the step is torn
            raise SystemExit(130) from None


def _read(reader: AnswerReader | None, text: str, *, ended: bool) -> Iterator[Spoken]:
    """Pieces that the next part of an output completes."""
    from chairlift.text.tool_calls import Piece
    from chairlift.text.tool_calls.events import REASONING

    if reader is None:
        yield Spoken(text)
        return
    events = [*reader.feed(text), *(reader.finish() if ended else ())]
    for event in events:
        if isinstance(event, Piece):
            yield Spoken(event.text, event.kind == REASONING)


class Conversation:
    """A conversation with one model.

    The answer goes to standard output. The model's reasoning goes to standard error, in grey, if that is a terminal; it
    is not a part of the conversation.

    ``max_tokens`` is the maximum length of an answer if ``sampling`` has none and the context has room. With ``once``
    there is one message, and Ctrl-C ends the command; in a terminal it otherwise stops only the answer.
    """

    def __init__(
        self,
        model: TextModel,
        sampling: Mapping[str, Any],
        system: str | None,
        max_tokens: int,
        *,
        once: bool = False,
    ) -> None:
        self._model = model
        self._max_tokens = max_tokens
        self._sampling = dict(sampling)
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self._turns: list[dict[str, str]] = []
        self._interactive = sys.stdin.isatty() and not once

    def talk(self) -> int:
        """Read messages and print answers until the end of input. Returns the exit code."""
        if self._interactive:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  (gives input() a history and line editing)
            print(f"{self._model.title}. /help lists the commands, /bye or Ctrl-D leaves, Ctrl-C stops an answer.")
        code = 0
        while (line := self._read()) is not None:
            command = line.strip()
            if command in _LEAVE:
                break
            if command in _FORGET:
                self._turns.clear()
            elif command.startswith("/") and self._interactive:
                self._obey(command)
            elif command:
                before = list(self._turns)
                try:
                    self.answer(command)
                except ChairliftError as error:
                    self._turns = before  # restores turns that were dropped for a message that did not fit
                    code = 1
                    print(f"chairlift: error: {' '.join(str(error).split())}", file=sys.stderr)
        return code

    def _obey(self, line: str) -> None:
        """Run a command of the terminal."""
        command, _, rest = line.partition(" ")
        what, _, value = rest.strip().partition(" ")
        if command in ("/help", "/?"):
            print(_HELP)
        elif command == "/show":
            self._show()
        elif command == "/set" and what in ("system", "nosystem"):
            text = value.strip().removeprefix(_QUOTES).removesuffix(_QUOTES)
            self._system = [{"role": "system", "content": text}] if what == "system" and text else []
            self._turns.clear()
        elif command == "/set" and what == "parameter":
            name, _, text = value.strip().partition(" ")
            try:
                self._set(_OLLAMA_NAMES.get(name, name), text.strip())
            except ChairliftError as error:
                print(f"chairlift: error: {error}", file=sys.stderr)
        else:
            print(f"commands: {', '.join(_FORGET[:1] + _LEAVE[:1])}, /set, /show; /help explains them")

    def _set(self, name: str, text: str) -> None:
        """Set a sampling parameter. Raises RequestError and ConfigError."""
        declared = PARAMETERS.get(name)
        if declared is None or not declared.flag or name == "n":
            known = ", ".join(each for each, one in PARAMETERS.items() if one.flag and each != "n")
            raise RequestError(f"there is no parameter {name!r}; known are {known}")
        read = reader_of(name, declared.kind)
        try:
            if declared.kind is list:
                value: Any = [text]
            elif declared.kind is bool:
                value = {"true": True, "false": False}[text.lower()]
            else:
                value = (read or declared.kind)(text)
        except (KeyError, ValueError):
            raise RequestError(f"{name} cannot be {text!r}; it is a {declared.kind.__name__}") from None
        changed = {**self._sampling, name: value}
        SamplingParams.from_dict(changed)
        self._sampling = changed

    def _show(self) -> None:
        parameters = ", ".join(f"{name} {value}" for name, value in self._sampling.items()) or "the model's defaults"
        print(f"model       {self._model.title}")
        print(f"system      {self._system[0]['content'] if self._system else 'none'}")
        print(f"parameters  {parameters}")
        print(f"turns       {len(self._turns) // 2}")

    def _read(self) -> str | None:
        if not self._interactive:
            return sys.stdin.readline() or None
        while True:
            try:
                line = input("> ")
                if not line.lstrip().startswith(_QUOTES):
                    return line
                return self._read_lines(line.lstrip().removeprefix(_QUOTES))
            except KeyboardInterrupt:
                print("\n(Ctrl-D or /exit leaves)")
            except EOFError:
                print()
                return None

    def _read_lines(self, line: str) -> str:
        """Read a message of several lines, up to one that ends with three quotes."""
        lines = [line]
        while not lines[-1].rstrip().endswith(_QUOTES):
            lines.append(input("... "))
        return "\n".join(lines).strip().removesuffix(_QUOTES)

    def answer(self, message: str) -> None:
        """Print the answer to a message while it is generated. Raises ChairliftError."""
        self._turns.append({"role": "user", "content": message})
        text = ""
        thoughts = _Thoughts()
        refused = False
        try:
            sampling = self._fit()
            with contextlib.closing(self._model.stream(self._system + self._turns, sampling)) as pieces:
                for piece in pieces:
                    if piece.is_reasoning:
                        thoughts.show(piece.text)
                    elif piece.text:
                        thoughts.end()
                        text += piece.text
                        print(piece.text, end="", flush=True)
        except KeyboardInterrupt:
            if not self._interactive:
                raise
        except ChairliftError:
            refused = not text
            raise
        finally:
            thoughts.end()
            if not refused:
                print(flush=True)
        self._turns.append({"role": "assistant", "content": text})

    def _fit(self) -> dict[str, Any]:
        """Sampling parameters for the next answer. If the conversation is too long, its oldest turns are dropped
        first."""
        count = self._model.count_tokens(self._system + self._turns)
        room = self._model.room
        max_tokens = self._sampling.get("max_tokens") or min(self._max_tokens, room // 4)
        left_out = 0
        while count + max_tokens > room and len(self._turns) > 2:
            del self._turns[:2]
            left_out += 1
            count = self._model.count_tokens(self._system + self._turns)
        if left_out:
            print(f"(left out the oldest {left_out} of the turns: the context is full)", file=sys.stderr)
        fields = dict(self._sampling)
        if "max_tokens" not in fields:
            fields["max_tokens"] = max(1, min(self._max_tokens, room - count), fields.get("min_tokens") or 0)
        return fields


class _Thoughts:
    """Shows one answer's reasoning in grey on standard error, if that is a terminal."""

    def __init__(self) -> None:
        self._shows = sys.stderr.isatty()
        self._open = False

    def show(self, text: str) -> None:
        if self._shows and text:
            print(text if self._open else f"{_GREY}{text}", end="", file=sys.stderr, flush=True)
            self._open = True

    def end(self) -> None:
        """End the grey text with an empty line, if there was any since the last call."""
        if self._open:
            print(f"{_NORMAL}\n", file=sys.stderr, flush=True)
            self._open = False
