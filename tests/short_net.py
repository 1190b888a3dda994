"""Runs the short net of ``tests/net.py`` and no more, and says what was left out.

``pytest`` alone runs the net. With a path, ``-k``, ``-m``, ``--lf`` or ``--full``, it runs all default tests of that
choice. ``--left-out`` runs the default tests that are not in the net.
"""

from __future__ import annotations

import collections
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

import pytest

from tests.net import CASES, FULL_MINUTES, LEAST_FOUND, ONE_OF

__all__ = ["LeftOut", "cases_of", "counts", "in_net", "planted", "scope_of", "select", "take_counts"]

_COUNTS = pytest.StashKey["LeftOut"]()


class LeftOut:
    """Counts of a run, for its last lines. A worker of xdist sends them to the process that prints."""

    def __init__(self, sent: Mapping[str, Any] | None = None) -> None:
        counts = sent or {}
        self.net: int = counts.get("net", 0)
        """Number of tests in the net."""
        self.planted: int = counts.get("planted", 0)
        """Number of planted bugs of all tests, also the nightly ones."""
        self.found: int = counts.get("found", 0)
        """Number of them that the net finds."""
        self.folders: dict[str, int] = counts.get("folders", {})
        """Folder of ``tests/`` -> number of default tests that were left out."""
        self.nightly: int = counts.get("nightly", 0)
        self.gpu: int = counts.get("gpu", 0)

    def lines(self, scope: str) -> Iterator[str]:
        """What the net finds, what was left out, and the commands that run it."""
        if scope == "net":
            yield f"short net: {self.net} tests, which find {self.found} of {self.planted} planted bugs"
        if self.folders:
            total = sum(self.folders.values())
            command = f"pytest --full (about {FULL_MINUTES} minutes)" if scope == "net" else "pytest"
            folders = ", ".join(f"{name} {count}" for name, count in sorted(self.folders.items()))
            yield f"left out: {total} default tests, run {command} or a folder, pytest tests/FOLDER: {folders}"
        if self.nightly or self.gpu:
            yield f"left out: {self.nightly} tests of pytest -m nightly, {self.gpu} of pytest -m gpu"


def scope_of(config: pytest.Config) -> str:
    """The tests that the command line asks for: ``net``, ``left out`` (of the net), ``default``, or ``marked``, which
    the caller chose by marks."""
    sent: str | None = getattr(config, "workerinput", {}).get("scope")
    if sent is not None:
        return sent
    option = config.option
    if option.markexpr not in config.getini("addopts"):
        return "marked"
    if option.left_out:
        return "left out"
    by_path = config.args_source is not pytest.Config.ArgsSource.TESTPATHS
    last_failed = getattr(option, "lf", False)  # there is no such option without pytest's cache
    return "default" if option.full or option.keyword or last_failed or by_path else "net"


def select(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of the run's scope in ``items``, and count the others.

    Raises UsageError if the net finds too few of the planted bugs.
    """
    scope = scope_of(config)
    if scope == "marked":
        return
    left = config.stash[_COUNTS] = LeftOut()
    left.gpu = sum(_is(item, "gpu") for item in items)
    left.nightly = sum(_is(item, "nightly") and not _is(item, "gpu") for item in items)
    if scope == "default":
        return
    default = [item for item in items if not _is(item, "nightly") and not _is(item, "gpu")]
    net = in_net(default)
    left.net = len(net)
    left.found, left.planted = planted(items, net)
    kept = [item for item in default if (item.nodeid in net) == (scope == "net")]
    chosen = {item.nodeid for item in kept}
    left.folders = dict(collections.Counter(_folder(item) for item in default if item.nodeid not in chosen))
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in chosen])
    items[:] = kept
    if scope == "net" and left.found < LEAST_FOUND * left.planted:
        raise pytest.UsageError(f"the short net finds {left.found} of {left.planted} planted bugs; see tests/net.py")


def counts(config: pytest.Config) -> LeftOut | None:
    """What this process counted; None before the tests are collected, and for tests that marks chose."""
    return config.stash.get(_COUNTS, None)


def take_counts(config: pytest.Config, sent: Mapping[str, Any]) -> None:
    """Keep the counts of a worker of xdist. All workers collect the same tests."""
    config.stash[_COUNTS] = LeftOut(sent)


def cases_of(folder: str) -> int:
    """Number of cases that the net has of each test function in ``folder``: its own line of CASES says it, or that of
    the nearest folder around it. Raises KeyError if there is none."""
    for path in (PurePosixPath(folder), *PurePosixPath(folder).parents):
        if str(path) in CASES:
            return CASES[str(path)]
    raise KeyError(f"tests/net.py has no line for {folder}: how many cases of each test belong to the short net?")


def in_net(items: Sequence[pytest.Item]) -> set[str]:
    """Node ids of ``items``, all of them default tests, that belong to the net.

    They are evenly spaced among the cases of a test function. All default cases that plant bugs are in the net.
    """
    functions: dict[str, list[pytest.Item]] = {}
    for item in items:
        if _is_chosen(item):
            functions.setdefault(_function(item), []).append(item)
    net: set[str] = set()
    for function, cases in functions.items():
        file = function.partition("::")[0]
        count = len(cases) if _is(cases[0], "planted") else min(cases_of(file), len(cases))
        net.update(cases[index * len(cases) // count].nodeid for index in range(count))
    return net


def planted(items: Sequence[pytest.Item], net: Collection[str]) -> tuple[int, int]:
    """(number of planted bugs that the net finds, number of all planted bugs).

    Each case of a test that is marked ``planted`` plants one bug. The net finds it if the case itself is in the net, or
    if the mark names a test of the same file that is in the net and makes the same check without the bug. The mark
    writes the case of that test as ``name[{parameter}]``, where it depends on a parameter of the planted test.
    """
    functions = {nodeid.partition("[")[0] for nodeid in net}
    bugs = [item for item in items if _is(item, "planted")]
    found = sum(item.nodeid in net or any(c in net or c in functions for c in _checks(item)) for item in bugs)
    return found, len(bugs)


def _checks(item: pytest.Item) -> list[str]:
    """Node ids of the tests that make the same check as the planted test ``item``."""
    mark = item.get_closest_marker("planted")
    file, parameters = item.nodeid.partition("::")[0], _parameters(item)
    return [f"{file}::{check.format(**parameters)}" for check in mark.args] if mark else []


def _is(item: pytest.Item, mark: str) -> bool:
    return item.get_closest_marker(mark) is not None


def _is_chosen(item: pytest.Item) -> bool:
    """Whether no mark leaves the test out of the net, and its parameters are among those that ONE_OF allows."""
    parameters = _parameters(item)
    return not _is(item, "full") and all(parameters.get(name, value) == value for name, value in ONE_OF.items())


def _parameters(item: pytest.Item) -> dict[str, Any]:
    """Values of the test's parameters, by name."""
    spec = getattr(item, "callspec", None)
    return spec.params if spec is not None else {}


def _function(item: pytest.Item) -> str:
    return f"{item.nodeid.partition('::')[0]}::{getattr(item, 'originalname', item.name)}"


def _folder(item: pytest.Item) -> str:
    """Folder of ``tests/`` that has the test, or its file if that is directly in ``tests/``."""
    return item.nodeid.partition("::")[0].split("/")[1]
