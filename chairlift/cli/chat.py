"""``chairlift chat``: talk to a model in the terminal. The model is loaded in this process, or runs on a server."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Final

from chairlift.base.sampling_params import SamplingParams
from chairlift.cli.conversation import Conversation, LocalModel, TextModel
from chairlift.cli.flags import add_engine_flags, add_sampling_flags, load_llm, read_settings
from chairlift.cli.remote_model import RemoteModel
from chairlift.cli.remote_server import DEFAULT_URL, add_url_flag
from chairlift.errors import ConfigError, RequestError, TemplateError

__all__ = ["DESCRIPTION", "SUMMARY", "add_arguments", "run"]

SUMMARY: Final = "talk to a model in the terminal"
DESCRIPTION: Final = """Talk to a model in the terminal. Answers appear as they are generated.

  Ctrl-C        stops the answer
  /reset        forgets the conversation
  /help         lists the other commands
  /bye, Ctrl-D  leaves

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
    return Conversation(_choose_model(args, engine), sampling, args.system, _MAX_TOKENS).talk()


def _choose_model(args: argparse.Namespace, engine: dict[str, Any]) -> TextModel:
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
        return LocalModel(llm)
    if args.model is not None:
        raise ConfigError(f"with --url nothing is loaded here; name a model of the server as --model {args.model}")
    if engine:
        names = ", ".join(engine)
        raise ConfigError(f"settings of the engine ({names}) belong to chairlift serve; with --url leave them out")
    return RemoteModel(args.url, name=args.model_name, api_key_file=args.api_key_file)
