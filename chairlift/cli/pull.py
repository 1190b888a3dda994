"""``chairlift pull``: downloads a model from the Hugging Face Hub."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

from chairlift.base import mistaken_models
from chairlift.cli.table import size
from chairlift.errors import ConfigError, ModelLoadError

__all__ = ["DESCRIPTION", "SUMMARY", "add_arguments", "run"]

SUMMARY: Final = "download a model from the Hugging Face Hub"
DESCRIPTION: Final = """Download a model from the Hugging Face Hub into its cache (HF_HOME), and say whether it loads.

  chairlift pull Qwen/Qwen2.5-0.5B-Instruct               the safetensors files that are read
  chairlift pull Qwen/Qwen2.5-0.5B-Instruct-GGUF:Q8_0     one GGUF file
  chairlift pull Qwen/Qwen2.5-0.5B-Instruct-GGUF          a usual one: Q4_K_M if there is one

A download that was interrupted goes on where it ended. HF_TOKEN, or hf auth login, gives access to gated models.
run, serve and the other commands download a model themselves if it is missing.

exit codes:
  0  the model is here
  1  the model is here, but cannot be loaded
  2  it could not be downloaded"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``chairlift pull``."""
    parser.add_argument("model", metavar="MODEL", help="Hub id: owner/name, or owner/name:QUANTISATION")
    parser.add_argument("--revision", metavar="NAME", help="branch, tag or commit (default: main)")


def run(args: argparse.Namespace) -> int:
    """Download the model. Returns the exit code."""
    from chairlift.loading.loadable import problem_of
    from chairlift.models.hub import download_model, parse_hub_id

    path = Path(args.model).expanduser()
    if path.exists():
        raise ConfigError(f"{args.model} is on this machine already; chairlift run {args.model} loads it")
    found = parse_hub_id(args.model)
    if found is None:
        raise ModelLoadError(mistaken_models.of_name(args.model))
    path = download_model(found[0], args.revision, found[1])
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    print(f"{args.model}: {size(sum(file.stat().st_size for file in files))} in {path}")
    problem = problem_of(path)
    print("it can be loaded: chairlift run " + args.model if problem is None else f"it cannot be loaded: {problem}")
    return 0 if problem is None else 1
