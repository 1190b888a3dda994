"""The ``chairlift`` command: selects a subcommand, and converts errors to exit codes."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import io
import logging
import os
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from chairlift import __version__
from chairlift.base.foreign_names import FOREIGN, answer_to
from chairlift.cli.commands import COMMANDS, command_module
from chairlift.cli.remote_server import plain
from chairlift.cli.setting_names import with_names
from chairlift.errors import ChairliftError

__all__ = ["main", "make_parser"]

_DESCRIPTION = "Continuous batching for language models. The default model is the small demo model in the package."
_EXIT_CODES = """exit codes:
  0  success
  1  some prompts were answered, and others could not be answered
  2  the settings, the model or the whole input cannot be used
  130  stopped with Ctrl-C (143: with SIGTERM)"""
_CUT_PIPE = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand and return its exit code (see ``chairlift --help``). ``argv`` does not contain the program's
    name."""
    _accept_any_text()
    flags: list[str] = []
    try:
        args = _parse(list(sys.argv[1:] if argv is None else argv))
        flags = args.parser._flags()
        _set_up_logging(args.verbose)
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except SystemExit as done:  # argparse, after --help or a wrong flag
        return done.code if isinstance(done.code, int) else 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The program that reads our output has ended. Standard output now goes to /dev/null, because otherwise Python
        # would report an error when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _CUT_PIPE
    except ChairliftError as error:
        return _fail(_with_flags(str(error), flags))
    except MemoryError as error:
        return _fail(str(error) or "the memory does not suffice for this; ask for less, or free some")
    except OSError as error:
        name = f"{error.filename}: " if error.filename else ""
        return _fail(f"{name}{error.strerror or error}")


def _fail(message: str) -> int:
    with contextlib.suppress(OSError):  # a full disk there changes nothing about the exit code
        print(f"chairlift: error: {plain(' '.join(message.split()))}", file=sys.stderr, flush=True)
    return 2


def _with_flags(message: str, flags: Sequence[str]) -> str:
    """The message with the names of settings spelled as flags of the command, such as ``--max-num-seqs``."""
    return with_names(message, {flag.removeprefix("--").replace("-", "_"): flag for flag in flags if flag[:2] == "--"})


def _accept_any_text() -> None:
    """Make the standard streams tolerate invalid bytes, characters that the terminal cannot show, and closed streams,
    so that the user gets no traceback."""
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115  (open for as long as the process)
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    sys.stdin = sys.stdin or open(os.devnull)  # noqa: SIM115
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "backslashreplace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)


class _Parser(argparse.ArgumentParser):
    """Parser of a command or subcommand. For a usage error it prints one line and exits with 2, as for every other
    error."""

    def __init__(self, **how: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **how)
        self._given: list[str] = []

    def parse_known_args(  # type: ignore[override]
        self, args: Any = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        self._given = list(args)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        flags = [word for word in self._given if word.startswith("--") and word.partition("=")[0] not in self._flags()]
        foreign = [word for word in self._given if word.partition("=")[0] in FOREIGN]
        if foreign and foreign[0].partition("=")[0] not in self._flags():
            message = self.unknown(foreign[0])
        elif "invalid choice" in message and flags:  # the value of a mistyped flag looks like a command
            message = self.unknown(flags[0])
        elif re.fullmatch(r"(?s)argument \[?(COMMAND|NAME)\]?: invalid choice: .*|.*required: (COMMAND|NAME)", message):
            message = self._no_command()
        more = " See" if message.endswith("?") else "; see"
        self.exit(_fail(f"{message}{more} {self.prog} --help"))

    def _no_command(self) -> str:
        """Error message for a missing or unknown subcommand."""
        action = next(each for each in self._actions if isinstance(each, argparse._SubParsersAction))
        known = list(action.choices)
        given = next((word for word in self._given if not word.startswith("-")), None)
        if given is None:
            example = f'{self.prog} generate "Hi"' if "generate" in known else f"{self.prog} {known[0]}"
            return f"no command is given (for example: {example}); there are {', '.join(known)}"
        near = difflib.get_close_matches(given, known, n=1)
        hint = f"did you mean {self.prog} {near[0]}?" if near else f"there are {', '.join(known)}"
        return f"unknown command {given!r}; {hint}"

    def _flags(self) -> list[str]:
        return [flag for action in self._actions for flag in action.option_strings]

    def unknown(self, word: str) -> str:
        """Error message for a word on the command line that the command does not know."""
        near = difflib.get_close_matches(word.partition("=")[0], self._flags(), n=1)
        if word.partition("=")[0] not in self._flags() and (answer := answer_to(word.partition("=")[0])) is not None:
            return answer
        if "://" in word and "--url" in self._flags():
            return f"unexpected argument {word!r}; write --url {word}"
        if near == [word.partition("=")[0]]:
            return f"flag {word!r} must come after {self.prog!r}"
        kind = "unknown flag" if word.startswith("-") else "unexpected argument"
        return f"{kind} {word!r}" + (f"; did you mean {near[0]}?" if near else "")


def make_parser() -> argparse.ArgumentParser:
    """Parser of the whole command line: every command, and the commands of these."""
    parser = _Parser(prog="chairlift", description=_DESCRIPTION, epilog=_EXIT_CODES)
    parser.add_argument("--version", action="version", version=f"chairlift {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", required=True)
    for name in COMMANDS:
        module = command_module(name)
        command = commands.add_parser(name, help=module.SUMMARY, description=module.DESCRIPTION)
        command.add_argument("--verbose", action="store_true", help="log more, and print tracebacks")
        module.add_arguments(command)
        command.set_defaults(run=module.run, parser=command)
    return parser


def _parse(argv: list[str]) -> argparse.Namespace:
    args, unknown = make_parser().parse_known_args(argv)
    if unknown:
        args.parser.error(args.parser.unknown(unknown[0]))  # of the command, or of a command's command
    return args


class _OneLine(logging.Formatter):
    """Formats log records without traceback, which does not help users of a command."""

    def format(self, record: logging.LogRecord) -> str:
        return f"chairlift: {record.levelname.lower()}: {' '.join(record.getMessage().split())}"


def _set_up_logging(verbose: bool) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s: %(message)s") if verbose else _OneLine())
    for name in {module.partition(".")[0] for module in COMMANDS.values()}:
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.propagate = False
        logger.setLevel(logging.DEBUG if verbose else logging.WARNING)
