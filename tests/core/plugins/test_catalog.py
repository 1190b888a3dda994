"""The catalog: each idea loads, is short, says where it comes from, and keeps the scheduler's invariants."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest

from chairlift.base.plugins import is_plugin, load_named
from chairlift.config import EngineConfig
from chairlift.core.plugins.catalog import IDEAS
from chairlift.core.scheduler.membership import membership_from_name
from chairlift.core.scheduler.policies import policy_from_config
from chairlift.core.scheduler.prefill_mode import prefill_mode_from_name
from chairlift_lab.sim.gate import check_class
from tests.core.plugins.toys import SHARES
from tests.simulation.policies import NeverOpens, ReturnsNoTurn

PLUGINS = [name for name, idea in IDEAS.items() if is_plugin(idea.path)]
PAGE = Path(__file__).parents[3] / "docs" / "laboratory.md"
MOST_LINES = 60


@pytest.mark.parametrize("name", IDEAS)
def test_each_idea_loads_and_says_where_it_comes_from(name: str) -> None:
    idea = IDEAS[name]
    config = EngineConfig.from_flat(idea.settings).scheduler
    assert policy_from_config(config).name
    assert prefill_mode_from_name(config.prefill_mode).name
    assert membership_from_name(config.batching, config.batch_wait_ms, config.batch_sizes).name
    assert idea.source and idea.claim and "\n" not in idea.source + idea.claim


@pytest.mark.parametrize("name", PLUGINS)
def test_each_plugin_is_short(name: str) -> None:
    """Lines of its class and of the classes of its module that it is derived from, without docstrings."""
    owner = load_named("idea", IDEAS[name].path)
    own = [base for base in owner.__mro__ if base.__module__ == owner.__module__]
    assert sum(map(_num_lines, own)) <= MOST_LINES


def _num_lines(owner: type) -> int:
    source = inspect.getsource(owner)
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines[node.lineno - 1 : node.end_lineno] = [""] * ((node.end_lineno or 0) - node.lineno + 1)
    return sum(bool(line.strip()) for line in lines)


@pytest.mark.parametrize("name", PLUGINS)
def test_each_module_names_source_and_claim(name: str) -> None:
    module = importlib.import_module(IDEAS[name].path.partition(":")[0])
    text = module.__doc__ or ""
    assert name == "longest_prefix" or (re.search("Sources?:", text) and re.search("[Cc]laim", text))


def test_the_page_has_a_row_for_each_idea() -> None:
    table = PAGE.read_text(encoding="utf-8").partition("## The ideas")[2]
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| (.*?) \| `(.*?)`", table, re.MULTILINE)
    here = "chairlift.core.plugins."
    assert rows == [(name, idea.source, idea.claim, idea.path.removeprefix(here)) for name, idea in IDEAS.items()]


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("name", PLUGINS)
def test_each_plugin_keeps_the_invariants(name: str, share: float) -> None:
    report = check_class(IDEAS[name].path, range(4), {"policy_share": share})
    assert report.passed, str(report)


@pytest.mark.nightly
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("name", PLUGINS)
def test_each_plugin_keeps_the_invariants_in_many_worlds(name: str, share: float, pytestconfig: pytest.Config) -> None:
    first, count = pytestconfig.getoption("--first-seed"), pytestconfig.getoption("--seeds") or 400
    report = check_class(IDEAS[name].path, range(first, first + count), {"policy_share": share})
    assert report.passed, str(report)


@pytest.mark.parametrize(
    ("broken", "message"),
    [(NeverOpens, "do not come to an end"), (ReturnsNoTurn, "'never' is not a valid Turn")],
)
def test_a_broken_mode_or_membership_is_refused_with_what_it_broke(broken: type, message: str) -> None:
    report = check_class(f"tests.simulation.policies:{broken.__name__}", range(5))
    assert report.broken is not None and report.broken.promise == "engine"
    assert message in report.broken.message
