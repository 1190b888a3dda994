"""``chairlift run``: a chat with any model, or one answer in a pipe. Users of Ollama know the command."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, Final

from chairlift.base.sampling_params import SamplingParams
from chairlift.cli.conversation import Conversation, LocalModel, TextModel
from chairlift.cli.flags import add_engine_flags, add_sampling_flags, load_llm, read_settings, shorten_help
from chairlift.cli.remote_model import RemoteModel
from chairlift.cli.remote_server import DEFAULT_URL, add_url_flag
from chairlift.errors import ConfigError, RequestError, TemplateError

__all__ = ["DESCRIPTION", "SUMMARY", "add_arguments", "run"]

SUMMARY: Final = "chat with a model, or answer one prompt"
DESCRIPTION: Final = """Chat with a model in the terminal, or answer one prompt.

  chairlift run Qwen/Qwen2.5-0.5B-Instruct                   a chat; downloads the model first if needed
  chairlift run Qwen/Qwen2.5-0.5B-Instruct-GGUF:Q8_0 "Hi"    one answer, from one GGUF file of a Hub model
  chairlift run ./models/model.gguf < question.txt           one answer to a file
  git diff | chairlift run DIRECTORY "Review this:" > out    one answer; the prompt follows the input
  chairlift run NAME --url http://127.0.0.1:8000             a model that a running server has

MODEL is a directory, a GGUF file, a directory with GGUF files (DIRECTORY:Q8_0), a Hub id, or bundled. In the chat,
/help lists the commands and /bye leaves. Sampling follows the model's own defaults, as in chairlift serve."""

_MAX_TOKENS: Final = 4096
_EVERYDAY: Final = (
    *("--system", "--url", "--api-key-file", "--max-tokens", "--temperature", "--top-p", "--top-k", "--seed", "--stop"),
    *("--config", "--dtype", "--quantization", "--device", "--threads", "--max-model-len"),
)
"""Flags that ``--help`` lists. ``--help-all`` lists every flag."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``chairlift run``."""
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", help="the model (default: the bundled one, or the server's first)"
    )
    parser.add_argument("prompt", metavar="PROMPT", nargs="*", help="a prompt: print one answer, and end")
    parser.add_argument("--system", metavar="TEXT", help="system message at the beginning of the conversation")
    server = parser.add_argument_group("server")
    add_url_flag(server, None, f"a running server to use, such as {DEFAULT_URL}")
    server.add_argument("--api-key-file", metavar="FILE", type=Path, help="file whose first line is the API key")
    add_sampling_flags(parser, _MAX_TOKENS)
    add_engine_flags(parser, leave_out={"model", "seed", "skip_tokenizer_init"})
    shorten_help(parser, _EVERYDAY, usage="MODEL [PROMPT] [FLAG ...]", variables=False)


def run(args: argparse.Namespace) -> int:
    """Chat until the end of input, or print one answer. Returns 0, or 1 if a message of a chat had no answer."""
    engine, sampling = read_settings(args, sampling=True, greedy=False)
    if sampling.get("n", 1) != 1:
        raise RequestError(f"n is {sampling['n']}, but there is one answer to each message; leave n out")
    SamplingParams.from_dict(sampling)
    prompt = _read_prompt(args)
    model = _open(args, engine, chats=prompt is None)
    conversation = Conversation(model, sampling, args.system, _MAX_TOKENS, once=prompt is not None)
    if prompt is None:
        return conversation.talk()
    conversation.answer(prompt)
    return 0


def _read_prompt(args: argparse.Namespace) -> str | None:
    """The text of a pipe or file on standard input, and the prompt after it. None for a chat: the terminal is input and
    output, and no prompt is given. Raises ConfigError for an empty prompt."""
    words = " ".join(args.prompt)
    if sys.stdin.isatty() and (args.prompt or sys.stdout.isatty()):
        return words if args.prompt else None
    piped = "" if sys.stdin.isatty() and args.prompt else sys.stdin.read().strip()
    prompt = "\n\n".join(filter(None, (piped, words)))
    if not prompt.strip():
        raise ConfigError('no prompt; give one (chairlift run MODEL "Hi"), or text on standard input')
    return prompt


def _open(args: argparse.Namespace, engine: dict[str, Any], *, chats: bool) -> TextModel:
    """Connect to the server's model, or load one. Raises ChairliftError. A chat needs a chat template."""
    if args.url is not None:
        if engine:
            names = ", ".join(engine)
            raise ConfigError(f"settings of the engine ({names}) belong to chairlift serve; with --url leave them out")
        return RemoteModel(args.url, name=args.model, api_key_file=args.api_key_file)
    if args.api_key_file is not None:
        raise ConfigError("--api-key-file is for a server, and needs --url")
    if args.model is not None:
        engine["model"] = args.model
    llm = load_llm(engine, quiet=False)
    raw = llm.tokenizer is None or llm.tokenizer.chat_template is None
    if raw and chats:
        raise TemplateError(
            f"{llm.config.model.model} has no chat template, so there is no chat with it; give a prompt, which is then"
            " continued as it is, or put a chat_template.jinja into its directory"
        )
    if raw:
        print("chairlift: the model has no chat template; the text is continued as it is", file=sys.stderr)
    return LocalModel(llm, defaults=llm.info.sampling_defaults, raw=raw)
