"""``chairlift rm``: deletes models from the cache of the Hugging Face Hub."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

from chairlift.base.running_servers import running_servers
from chairlift.cli.table import size
from chairlift.errors import ConfigError

__all__ = ["DESCRIPTION", "SUMMARY", "add_arguments", "run"]

SUMMARY: Final = "delete downloaded models"
DESCRIPTION: Final = """Delete models from the cache of the Hugging Face Hub.

  chairlift rm Qwen/Qwen2.5-0.5B-Instruct              all its files
  chairlift rm Qwen/Qwen2.5-0.5B-Instruct-GGUF:Q8_0    one GGUF file

Other programs that use this cache lose the model, too. A model that a running server of yours has loaded
is deleted only with --force: the server goes on, but could not start its engine again."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``chairlift rm``."""
    parser.add_argument("models", metavar="MODEL", nargs="+", help="name as in chairlift list")
    parser.add_argument("--force", action="store_true", help="also delete models that a running server has loaded")


def run(args: argparse.Namespace) -> int:
    """Delete the models. Nothing is deleted if one of them cannot be. Returns 0."""
    from chairlift.models.hub_cache import find_cached, not_cached, remove_cached

    found = []
    for name in args.models:
        if Path(name).expanduser().exists():
            raise ConfigError(f"{name} is a file or directory of yours; delete it with rm -r {name}")
        model = find_cached(name)
        if model is None:
            raise not_cached(name)
        for server in () if args.force else running_servers():
            if {name, model.name, str(model.path.resolve())} & set(server.loaded):
                raise ConfigError(f"the server at {server.url} has loaded {name}; stop it first, or add --force")
        found.append(model)
    for model in {each.name: each for each in found}.values():
        print(f"deleted {model.name}, {size(remove_cached(model))}")
    return 0
