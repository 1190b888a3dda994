"""Writes ``deploy/constraints.txt``: the versions of Chairlift's dependencies that are installed here, with which the
tests have passed.

    python tools/constraints.py > deploy/constraints.txt

Only the dependencies of the plain installation are listed, not those of extras. PyTorch's own packages for GPUs are
left out, because PyTorch's version determines them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
_OF_TORCH = re.compile(r"nvidia-.*|cuda-.*|triton")
_HEAD = """# Versions with which the tests passed; the image is built with them. From tools/constraints.py.
"""


def requirements() -> list[Requirement]:
    """Requirements in ``pyproject.toml``, without the requirements of extras."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [Requirement(line) for line in project["dependencies"]]


def closure(required: list[Requirement]) -> Iterator[tuple[str, str]]:
    """(name, version) of every package that ``required`` needs on this platform, directly or indirectly."""
    seen: set[str] = set()
    todo = list(required)
    while todo:
        each = todo.pop()
        name = canonicalize_name(each.name)
        if name in seen or _OF_TORCH.fullmatch(name) or (each.marker and not each.marker.evaluate({"extra": ""})):
            continue
        seen.add(name)
        try:
            found = distribution(name)
        except PackageNotFoundError:
            sys.exit(f"{name} is not installed; install Chairlift here first")
        yield name, found.version.partition("+")[0]  # without the build of a local index, such as +cpu
        todo += [Requirement(line) for line in found.requires or []]


def main() -> None:
    """Print the file."""
    print(_HEAD + "\n".join(f"{name}=={version}" for name, version in sorted(closure(requirements()))))


if __name__ == "__main__":
    main()
