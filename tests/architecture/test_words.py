"""Words that the package's text must not contain."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from tests.architecture.source import PACKAGES, ROOT, modules

LEFTOVERS = ("TODO", "FIXME", "XXX", "/tmp/", "/home/")
_EXTRA = re.compile(r"chairlift\[(\w+)\]")
FILES = sorted(path for package in PACKAGES for path in package.rglob("*") if path.suffix in {".py", ".html", ".md"})


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_contain_no_leftover_words(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert not [word for word in LEFTOVERS if word in text]


def test_extras_that_somebody_is_told_to_install_are_there() -> None:
    told = {name for path in [*FILES, *ROOT.glob("docs/*.md")] for name in _EXTRA.findall(path.read_text("utf-8"))}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert {"otel", "train"} <= told <= set(project["optional-dependencies"])


def test_no_module_is_a_drawer_for_odds_and_ends() -> None:
    assert not {name.rpartition(".")[2] for name in modules()} & {"utils", "util", "helpers", "misc", "common"}


def test_every_module_says_what_it_exports() -> None:
    unsaid = [
        name
        for name, path in modules().items()
        if path.name not in {"__init__.py", "__main__.py"} and "__all__" not in path.read_text(encoding="utf-8")
    ]
    assert not unsaid
