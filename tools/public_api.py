"""Prints what users of Chairlift may rely on: ``python tools/public_api.py [--write]``.

The list has the exported Python names with their parameters, the interfaces of plugins, the commands with their flags,
and the HTTP routes. ``--write`` puts it into docs/public-api.txt, which a test compares with the code. So a change of
the list is visible in the commit that makes it. docs/stability.md says what each part promises.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import sys
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import chairlift
import chairlift_train
from chairlift.cli.main import make_parser
from chairlift.server.routes import all_routes

FILE = Path(__file__).resolve().parents[1] / "docs" / "public-api.txt"
PLUGINS = (
    "chairlift.core.scheduler.policy:Policy",
    "chairlift.core.scheduler.policy:FirstComeFirstServed",
    "chairlift.core.scheduler.governor:Governor",
)


def public_api() -> str:
    """The list, one name per line, sorted within each of its five parts."""
    parts = {
        "chairlift": sorted(_exports(chairlift)),
        "chairlift_train": sorted(_exports(chairlift_train)),
        "plugins": sorted(line for path in PLUGINS for line in _members(path, _load(path))),
        "commands": sorted(_commands(make_parser())),
        "routes": sorted({f"{method} {route.path}" for route in all_routes() for method in route.methods - {"HEAD"}}),
    }
    return "\n".join(f"[{name}]\n" + "".join(f"{line}\n" for line in lines) for name, lines in parts.items())


def _load(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def _exports(module: Any) -> Iterator[str]:
    for name in module.__all__:
        value = getattr(module, name)
        if inspect.isclass(value):
            yield from _members(name, value)
        else:
            yield f"{name}({_parameters(value)})" if callable(value) else name


def _members(name: str, owner: type) -> Iterator[str]:
    """The class with the parameters of its constructor, its public methods with theirs, and its other attributes."""
    made_by_users = not (issubclass(owner, Enum | BaseException) or getattr(owner, "_is_protocol", False))
    yield f"{name}({_parameters(owner)})" if made_by_users else name
    for attribute in sorted({*dir(owner), *getattr(owner, "__annotations__", {})}):
        if attribute.startswith("_") or hasattr(BaseException, attribute) or hasattr(str, attribute):
            continue
        value = getattr(owner, attribute, None)
        method = inspect.isroutine(value) and callable(value)
        yield f"{name}.{attribute}({_parameters(value)})" if method else f"{name}.{attribute}"


def _parameters(value: Any) -> str:
    """Names of the parameters. ``=`` marks those with a default; the defaults themselves are settings of a version."""
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):  # a class of C code, a classmethod object
        return ""
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    return ", ".join(
        stars.get(each.kind, "") + each.name + ("" if each.default is inspect.Parameter.empty else "=")
        for each in parameters
        if each.name != "self"
    )


def _commands(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Each command with its positional arguments, and each of its flags in all spellings."""
    words: list[str] = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _commands(command)
        elif action.option_strings:
            yield f"{parser.prog} {'|'.join(action.option_strings)}"
        else:
            words.append(action.dest)
    yield " ".join([parser.prog, *words])


def main() -> int:
    """Print the list, or write it with ``--write``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"write docs/{FILE.name} instead of printing")
    if parser.parse_args().write:
        FILE.write_text(public_api())
    else:
        sys.stdout.write(public_api())
    return 0


if __name__ == "__main__":
    sys.exit(main())
