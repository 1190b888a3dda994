"""The size budget. Raise a number only in a commit that says why."""

from __future__ import annotations

import ast

import pytest

from tests.architecture.source import line_count, modules, tree

MOST_LINES_OF_A_FUNCTION = 80
MOST_LINES_OF_A_FILE = 500
MOST_LINES_OF_SCHEDULE = 100
MOST_LINES_OF_A_POLICY_MODULE = 300
MOST_LINES_OF_THE_LOOP = 600
MOST_LINES_OF = {"scheduler": 4_030, "kv_cache": 1_280, "engine": 4_660, "": 48_990}
LOOP = ["chairlift.scheduler.scheduler", "chairlift.scheduler.output"]


@pytest.mark.parametrize("module", sorted(modules()))
def test_files_and_functions_are_short(module: str) -> None:
    assert line_count(module) <= MOST_LINES_OF_A_FILE
    for node in ast.walk(tree(module)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.end_lineno is not None:
            length = node.end_lineno - node.lineno + 1
            most = MOST_LINES_OF_SCHEDULE if (module, node.name) == (LOOP[0], "schedule") else MOST_LINES_OF_A_FUNCTION
            assert length <= most, f"{module}.{node.name} has {length} lines"


def test_the_loop_stays_small() -> None:
    assert sum(map(line_count, LOOP)) <= MOST_LINES_OF_THE_LOOP


@pytest.mark.parametrize("module", [m for m in modules() if m.startswith("chairlift.scheduler.") and m not in LOOP])
def test_policy_modules_are_small(module: str) -> None:
    assert line_count(module) <= MOST_LINES_OF_A_POLICY_MODULE


@pytest.mark.parametrize(("package", "most"), MOST_LINES_OF.items())
def test_packages_stay_within_their_budget(package: str, most: int) -> None:
    prefix = f"chairlift.{package}" if package else "chairlift"
    total = sum(line_count(module) for module in modules() if module == prefix or module.startswith(f"{prefix}."))
    assert 0 < total <= most
