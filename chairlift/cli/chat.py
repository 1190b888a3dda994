"""``chairlift chat``: talk to a model in the terminal."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from chairlift.cli.flags import add_engine_flags, add_sampling_flags, load_llm, read_settings
from chairlift.engine.interrupt import held_interrupt
from chairlift.errors import ChairliftError, RequestError, TemplateError
from chairlift.sampling_params import SamplingParams

if TYPE_CHECKING:
    from chairlift.llm import LLM

__all__ = ["DESCRIPTION", "SUMMARY", "add_arguments", "run"]

SUMMARY: Final = "talk to a model in the terminal"
DESCRIPTION: Final = """Talk to a model in the terminal. Answers appear as they are generated.

  Ctrl-C         stops the answer
  /reset         forgets the conversation
  /exit, Ctrl-D  leaves

When the conversation outgrows the model's context, its oldest turns are left out. Lines that are
piped in are answered one after the other. Answers are greedy (temperature 0) unless flags say otherwise."""

_MAX_TOKENS: Final = 512


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``chairlift chat``."""
    parser.add_argument("model", metavar="MODEL", nargs="?", help="directory or Hub id (default: the bundled model)")
    parser.add_argument("--system", metavar="TEXT", help="a system message to begin with")
    add_sampling_flags(parser, _MAX_TOKENS)
    add_engine_flags(parser, leave_out={"model", "seed", "skip_tokenizer_init"})


def run(args: argparse.Namespace) -> int:
    """Talk until the end of input; 0, or 1 when a message could not be answered."""
    engine, sampling = read_settings(args, sampling=True)
    if args.model is not None:
        engine["model"] = args.model
    if sampling.get("n", 1) != 1:
        raise RequestError(f"n is {sampling['n']}, but a chat has one answer to each message; leave n out")
    SamplingParams.from_dict(sampling)
    llm = load_llm(engine, quiet=False)
    if llm.tokenizer is None or llm.tokenizer.chat_template is None:
        raise TemplateError(f"{llm.config.model.model} has no chat template; try chairlift generate --raw instead")
    return _Chat(llm, sampling, args.system).talk()


class _Chat:
    """A conversation, and the model it is held with."""

    def __init__(self, llm: LLM, sampling: Mapping[str, Any], system: str | None) -> None:
        self._llm = llm
        self._sampling = dict(sampling)
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self._turns: list[dict[str, str]] = []
        self._interactive = sys.stdin.isatty()

    def talk(self) -> int:
        """Read, answer, repeat."""
        if self._interactive:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  (gives input() a history and line editing)
            print(f"{self._llm.config.model.model}. /reset forgets, /exit or Ctrl-D leaves, Ctrl-C stops an answer.")
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
                    self._turns = before  # also what was left out for a message that does not fit anyway
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
        token_ids, fields = self._fit()
        engine = self._llm.engine
        request_id = engine.add_request(token_ids, SamplingParams.from_dict(fields))
        text = ""
        try:
            with held_interrupt() as interrupted:
                while engine.has_unfinished and not interrupted():
                    for output in engine.step():
                        fresh = output.outputs[0].text[len(text) :]
                        text += fresh
                        print(fresh, end="", flush=True)
                        if output.error is not None:
                            raise RequestError(output.error)
                if interrupted() and not self._interactive:
                    raise KeyboardInterrupt
        finally:
            engine.abort(request_id)
            print(flush=True)
        self._turns.append({"role": "assistant", "content": text})

    def _fit(self) -> tuple[list[int], dict[str, Any]]:
        """The conversation's token ids and the sampling parameters, the oldest turns left out where they must be."""
        room = min(self._llm.max_model_len, self._llm.engine.kv.capacity_tokens + 1)
        wanted = self._sampling.get("max_tokens") or min(_MAX_TOKENS, room // 4)
        token_ids = self._llm.encode_chat(self._system + self._turns)
        left_out = 0
        while len(token_ids) + wanted > room and len(self._turns) > 2:
            del self._turns[:2]
            left_out += 1
            token_ids = self._llm.encode_chat(self._system + self._turns)
        if left_out:
            print(f"(left out the oldest {left_out} of the turns: the context is full)", file=sys.stderr)
        fields = dict(self._sampling)
        if "max_tokens" not in fields:
            fields["max_tokens"] = max(1, min(_MAX_TOKENS, room - len(token_ids)), fields.get("min_tokens") or 0)
        return token_ids, fields
