"""``chairlift chat``: talk to a model in the terminal. The model is loaded in this process, or runs on a server."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from chairlift.base.sampling_params import SamplingParams
from chairlift.cli.flags import add_engine_flags, add_sampling_flags, load_llm, read_settings
from chairlift.cli.remote_model import RemoteModel
from chairlift.cli.remote_server import DEFAULT_URL, add_url_flag
from chairlift.engine.interrupt import held_interrupt
from chairlift.errors import ChairliftError, ConfigError, RequestError, TemplateError

if TYPE_CHECKING:
    from chairlift.llm import LLM

__all__ = ["DESCRIPTION", "SUMMARY", "add_arguments", "run"]

SUMMARY: Final = "talk to a model in the terminal"
DESCRIPTION: Final = """Talk to a model in the terminal. Answers appear as they are generated.

  Ctrl-C         stops the answer
  /reset         forgets the conversation
  /exit, Ctrl-D  leaves

When the conversation becomes longer than the model's context, its oldest turns are left out. Lines from
a pipe are answered one after another. Answers are greedy (temperature 0) unless a flag changes this.
With --url a running server generates the answers, and no model is loaded here."""

_MAX_TOKENS: Final = 512


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``chairlift chat``."""
    parser.add_argument("model", metavar="MODEL", nargs="?", help="directory or Hub id (default: the bundled model)")
    parser.add_argument("--system", metavar="TEXT", help="system message at the beginning of the conversation")
    server = parser.add_argument_group("server")
    add_url_flag(server, None, f"a running server to use, such as {DEFAULT_URL}")
    server.add_argument(
        "--model",
        metavar="NAME",
        dest="model_name",
        help="model name on that server (default: the first that it lists)",
    )
    server.add_argument("--api-key-file", metavar="FILE", type=Path, help="file whose first line is the API key")
    add_sampling_flags(parser, _MAX_TOKENS)
    add_engine_flags(parser, leave_out={"model", "seed", "skip_tokenizer_init"})


def run(args: argparse.Namespace) -> int:
    """Chat until the end of input. Returns 0, or 1 if a message could not be answered."""
    engine, sampling = read_settings(args, sampling=True)
    if sampling.get("n", 1) != 1:
        raise RequestError(f"n is {sampling['n']}, but a chat has one answer to each message; leave n out")
    SamplingParams.from_dict(sampling)
    return _Chat(_choose_model(args, engine), sampling, args.system).talk()


def _choose_model(args: argparse.Namespace, engine: dict[str, Any]) -> _Model:
    if args.url is None:
        for flag, value in (("--model", args.model_name), ("--api-key-file", args.api_key_file)):
            if value is not None:
                hint = f"; to load a model here: chairlift chat {value}" if flag == "--model" else ""
                raise ConfigError(f"{flag} is about a server's models and needs --url{hint}")
        if args.model is not None:
            engine["model"] = args.model
        llm = load_llm(engine, quiet=False)
        if llm.tokenizer is None or llm.tokenizer.chat_template is None:
            raise TemplateError(
                f"{llm.config.model.model} has no chat template; try chairlift generate --raw instead, or put a"
                " chat_template.jinja into its directory"
            )
        return _LocalModel(llm)
    if args.model is not None:
        raise ConfigError(f"with --url nothing is loaded here; name a model of the server as --model {args.model}")
    if engine:
        names = ", ".join(engine)
        raise ConfigError(f"settings of the engine ({names}) belong to chairlift serve; with --url leave them out")
    return RemoteModel(args.url, name=args.model_name, api_key_file=args.api_key_file)


class _Model(Protocol):
    """A model to chat with: in this process, or on a server."""

    @property
    def title(self) -> str:
        """Name of the model to print."""

    @property
    def room(self) -> int:
        """Maximum number of tokens of a conversation, including its next answer."""

    def count_tokens(self, messages: Sequence[Mapping[str, str]]) -> int:
        """Number of tokens of the prompt that asks for the next answer."""

    def stream(self, messages: Sequence[Mapping[str, str]], sampling: Mapping[str, Any]) -> Generator[str, None, None]:
        """Yield the answer in pieces of text, which may be empty.

        Ctrl-C during the answer raises KeyboardInterrupt if the conversation can continue, otherwise SystemExit.
        Closing the iterator stops the answer. Raises ChairliftError.
        """


class _LocalModel:
    """A model in this process."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    @property
    def title(self) -> str:
        return self._llm.config.model.model

    @property
    def room(self) -> int:
        return min(self._llm.max_model_len, self._llm.engine.kv.capacity_tokens + 1)

    def count_tokens(self, messages: Sequence[Mapping[str, str]]) -> int:
        return len(self._llm.encode_chat(messages))

    def stream(self, messages: Sequence[Mapping[str, str]], sampling: Mapping[str, Any]) -> Generator[str, None, None]:
        engine = self._llm.engine
        request_id = engine.add_request(self._llm.encode_chat(messages), SamplingParams.from_dict(sampling))
        length = 0
        try:
            with held_interrupt() as interrupted:
                while engine.has_unfinished:
                    if interrupted():
                        raise KeyboardInterrupt
                    for output in self._step():
                        text = output.outputs[0].text
                        yield text[length:]
                        length = len(text)
                        if output.error is not None:
                            raise RequestError(output.error)
        finally:
            engine.abort(request_id)

    def _step(self) -> Any:
        try:
            return self._llm.engine.step()
        except KeyboardInterrupt:  # the second press: the step is torn
            raise SystemExit(130) from None


class _Chat:
    """A conversation with one model."""

    def __init__(self, model: _Model, sampling: Mapping[str, Any], system: str | None) -> None:
        self._model = model
        self._sampling = dict(sampling)
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self._turns: list[dict[str, str]] = []
        self._interactive = sys.stdin.isatty()

    def talk(self) -> int:
        """Read messages and print answers until the end of input. Returns the exit code."""
        if self._interactive:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  (gives input() a history and line editing)
            print(f"{self._model.title}. /reset forgets, /exit or Ctrl-D leaves, Ctrl-C stops an answer.")
        code = 0
        while (line := self._read()) is not None:
            command = line.strip()
            if command in ("/exit", "/quit"):
                break
            if command == "/reset":
                self._turns.clear()
            elif command.startswith("/") and self._interactive:
                print("commands: /reset, /exit")
            elif command:
                before = list(self._turns)
                try:
                    self._answer(command)
                except ChairliftError as error:
                    self._turns = before  # restores turns that were dropped for a message that did not fit
                    code = 1
                    print(f"chairlift: error: {' '.join(str(error).split())}", file=sys.stderr)
        return code

    def _read(self) -> str | None:
        if not self._interactive:
            return sys.stdin.readline() or None
        while True:
            try:
                return input("> ")
            except KeyboardInterrupt:
                print("\n(Ctrl-D or /exit leaves)")
            except EOFError:
                print()
                return None

    def _answer(self, message: str) -> None:
        self._turns.append({"role": "user", "content": message})
        text = ""
        refused = False
        try:
            sampling = self._fit()
            with contextlib.closing(self._model.stream(self._system + self._turns, sampling)) as pieces:
                for piece in pieces:
                    text += piece
                    print(piece, end="", flush=True)
        except KeyboardInterrupt:
            if not self._interactive:
                raise
        except ChairliftError:
            refused = not text
            raise
        finally:
            if not refused:
                print(flush=True)
        self._turns.append({"role": "assistant", "content": text})

    def _fit(self) -> dict[str, Any]:
        """Sampling parameters for the next answer. If the conversation is too long, its oldest turns are dropped
        first."""
        count = self._model.count_tokens(self._system + self._turns)
        room = self._model.room
        max_tokens = self._sampling.get("max_tokens") or min(_MAX_TOKENS, room // 4)
        left_out = 0
        while count + max_tokens > room and len(self._turns) > 2:
            del self._turns[:2]
            left_out += 1
            count = self._model.count_tokens(self._system + self._turns)
        if left_out:
            print(f"(left out the oldest {left_out} of the turns: the context is full)", file=sys.stderr)
        fields = dict(self._sampling)
        if "max_tokens" not in fields:
            fields["max_tokens"] = max(1, min(_MAX_TOKENS, room - count), fields.get("min_tokens") or 0)
        return fields
