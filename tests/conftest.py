"""Settings for all tests: which tests run, how many seeds each test tries, one thread, no time limit for generated
examples, and none for nightly tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests import network_guard, short_net

network_guard.install()

# On a CI machine pytest computes the whole difference of two values that must differ. For the gradients of a planted
# bug that takes hours. So tests run everywhere as they run at home.
for name in ("CI", "BUILD_NUMBER"):
    os.environ.pop(name, None)

# Other processes may use the machine, so the duration of an example says nothing.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seeds", type=int, default=None, help="simulation seeds to run (500; nightly: 100,000)")
    parser.addoption("--first-seed", type=int, default=0, help="the first of them")
    parser.addoption("--full", action="store_true", help="run all default tests instead of the short net")
    parser.addoption("--left-out", action="store_true", help="run the default tests that are not in the short net")


@pytest.hookimpl(tryfirst=True)  # before marks deselect the nightly tests, which are counted
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    short_net.select(config, items)
    for item in items:
        if item.get_closest_marker("nightly") is not None and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(0))  # the counts of a release may take hours


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["scope"] = short_net.scope_of(node.config)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    if sent := getattr(node, "workeroutput", {}).get("left out"):
        short_net.take_counts(node.config, sent)


def pytest_sessionfinish(session: pytest.Session) -> None:
    output: dict[str, Any] | None = getattr(session.config, "workeroutput", None)
    counts = short_net.counts(session.config)
    if output is not None and counts is not None:
        output["left out"] = vars(counts)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    counts = short_net.counts(config)
    for line in counts.lines(short_net.scope_of(config)) if counts else ():
        terminalreporter.write_line(line)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread in this process and in child processes, because for tiny matrices several threads lose more time
    by waiting for each other than they save."""
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield
