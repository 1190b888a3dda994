"""The page of the short net has a line for each folder of tests, and names only what exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests import short_net
from tests.net import CASES

ROOT = Path(__file__).parents[2]
FILES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py"))


@pytest.mark.parametrize("folder", sorted({str(Path(file).parent) for file in FILES}))
def test_each_folder_of_tests_has_a_line_in_the_net(folder: str) -> None:
    """The line of ``tests`` is for the files in it; it decides for no folder."""
    around = {str(each) for each in (Path(folder), *Path(folder).parents)}
    assert around & CASES.keys() - ({"tests"} if folder != "tests" else set()), f"tests/net.py has no line for {folder}"


@pytest.mark.parametrize("folder", CASES)
def test_each_line_of_the_net_is_a_folder_of_tests(folder: str) -> None:
    assert any(file.startswith(f"{folder}/") for file in FILES)


@pytest.mark.parametrize("file", FILES)
def test_each_check_of_a_planted_bug_is_a_test_of_its_file(file: str) -> None:
    source = (ROOT / file).read_text()
    for marks in re.findall(r"^@pytest\.mark\.planted\((.*)\)$", source, re.MULTILINE):
        for check in ast.literal_eval(f"({marks},)"):
            assert f"\ndef {check.partition('[')[0]}(" in source, check


def test_the_nearest_folder_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(short_net, "CASES", {"tests/a": 1, "tests/a/b": 2})
    assert short_net.cases_of("tests/a/b/test_c.py") == 2
    assert short_net.cases_of("tests/a/test_b.py") == 1
    with pytest.raises(KeyError, match=r"tests/net\.py has no line for tests/b/test_a\.py"):
        short_net.cases_of("tests/b/test_a.py")


def test_what_was_left_out_is_said_with_the_command_that_runs_it() -> None:
    left = short_net.LeftOut({"net": 3, "planted": 20, "found": 19, "folders": {"cli": 2, "lora": 1}, "nightly": 7})
    net, default, marked = left.lines("net")
    assert net == "short net: 3 tests, which find 19 of 20 planted bugs"
    assert default.startswith("left out: 3 default tests, run pytest --full (about ")
    assert default.endswith(" or a folder, pytest tests/FOLDER: cli 2, lora 1")
    assert marked == "left out: 7 tests of pytest -m nightly, 0 of pytest -m gpu"
