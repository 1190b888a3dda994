"""``chairlift embed``: computes embeddings of texts, and prints them as JSON lines."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Final

from chairlift.cli.flags import add_engine_flags, load_llm, read_settings, whole
from chairlift.errors import RequestError

__all__ = ["DESCRIPTION", "SUMMARY", "add_arguments", "run"]

SUMMARY: Final = "print embeddings of texts, as JSON lines"
DESCRIPTION: Final = """Print the embedding of each text as a JSON line: index, num_tokens and embedding.

Texts are arguments, or lines of standard input (no TEXT, or -). The model must be an embedding model, or a generative
model with --runner pooling."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``chairlift embed``."""
    parser.add_argument("texts", metavar="TEXT", nargs="*", help="a text; - reads one per line from standard input")
    parser.add_argument(
        "--dimensions", metavar="N", type=whole, help="return only the first N numbers (for Matryoshka models)"
    )
    parser.add_argument("--prompt-name", metavar="NAME", help="name of the model's prompt to put before each text")
    parser.add_argument(
        "--truncate-prompt-tokens",
        metavar="N",
        type=whole,
        help="cut each text to N tokens; -1: to the model's maximum",
    )
    add_engine_flags(parser, leave_out={"seed"})


def run(args: argparse.Namespace) -> int:
    """Compute and print all results. Raises ChairliftError if it cannot run."""
    settings, _ = read_settings(args, sampling=False)
    texts = [text for text in args.texts if text != "-"]
    if not args.texts or "-" in args.texts:
        texts += [line.rstrip("\n") for line in sys.stdin]
    if not texts:
        raise RequestError("there is no text; give one as an argument, or one per line of standard input")
    llm = load_llm(settings, quiet=True)
    outputs = llm.embed(
        texts,
        truncate_prompt_tokens=args.truncate_prompt_tokens,
        dimensions=args.dimensions,
        prompt_name=args.prompt_name,
    )
    for index, output in enumerate(outputs):
        line = {"index": index, "num_tokens": len(output.prompt_token_ids), "embedding": output.outputs.embedding}
        print(json.dumps(line))
    return 0
