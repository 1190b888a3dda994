"""The public API is the committed list, and the changelog is in order."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from chairlift.version import __version__
from tools.public_api import FILE, public_api

ROOT = Path(__file__).resolve().parents[2]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()


def test_public_names_commands_and_routes_are_those_of_the_committed_list() -> None:
    assert public_api() == FILE.read_text(), (
        "the public API differs from docs/public-api.txt; read docs/stability.md, and if the change is meant, "
        "run: python tools/public_api.py --write"
    )


def test_changelog_has_unreleased_changes_first_and_then_this_version() -> None:
    headings = re.findall(r"^## (.+)$", CHANGELOG, re.MULTILINE)
    assert headings[0] == "Unreleased"
    assert headings[1].split()[0] == __version__


def test_changelog_says_nothing_twice() -> None:
    entries = [" ".join(entry.split()) for entry in re.split(r"\n(?=- |#)|\n\n", CHANGELOG) if entry.startswith("- ")]
    twice = [entry for entry, count in Counter(entry[:60] for entry in entries).items() if count > 1]
    assert not twice, "an entry stands in two places; a merge may have restored lines that a release has moved"
