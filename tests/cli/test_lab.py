from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Run

SMALL = ("lab", "run", "--machines", "l4:llama-3-8b", "--traces", "sharegpt", "--policies", "random")
FEW = ("--loads", "1", "--policy-share", "0.75", "--seeds", "2", "--requests", "40", "--workers", "2")


@pytest.mark.full
def test_a_run_prints_a_table_writes_a_page_and_goes_on(chairlift: Run, tmp_path: Path) -> None:
    out_dir = tmp_path / "lab"
    code, out, err = chairlift(*SMALL, *FEW, "--output", out_dir)
    assert code == 0
    assert any(line.startswith("random ") for line in out)
    assert out[-1].startswith("results and page: ")
    assert {path.name for path in out_dir.iterdir()} == {"state.json", "results.json", "report.html"}
    record = json.loads((out_dir / "results.json").read_text())
    assert [row["row"] for row in record["groups"][0]["rows"]] == ["fcfs", "random"]
    state = (out_dir / "state.json").read_text()
    code, again, err = chairlift(*SMALL, *FEW, "--output", out_dir)
    assert (code, again) == (0, out)
    assert "not run again" in err[0]
    assert (out_dir / "state.json").read_text() == state
    code, shown, _ = chairlift("lab", "show", out_dir, "--all")
    assert code == 0
    assert any("--requests 40" in line for line in shown)


def test_the_traces_are_listed_with_target_and_drawn(chairlift: Run) -> None:
    code, out, _ = chairlift("lab", "traces", "sharegpt", "burstgpt")
    assert code == 0
    assert out[0].startswith("sharegpt: ")
    assert out[2].split() == ["target", "drawn"]
    assert any(line.startswith("burstgpt: ") for line in out)


def test_the_policies_are_listed(chairlift: Run) -> None:
    code, out, _ = chairlift("lab", "policies")
    assert code == 0
    names = [line.partition(":")[0] for line in out if not line.startswith(" ")]
    assert names[:3] == ["fcfs", "priority", "fcfs-targets"]
    assert {"random", "oracle-srpt", "t-lru", "kairos"} <= set(names)
    assert out[1] == "    scheduling_policy=fcfs"


def test_knots_of_a_file_are_a_trace(chairlift: Run, tmp_path: Path) -> None:
    trace, knots = tmp_path / "t.csv", tmp_path / "k.json"
    lines = [f"2023-11-16 18:17:{second:02}.5,{100 + second},9" for second in range(40)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]) + "\n")
    code, out, _ = chairlift("lab", "knots", trace, "-o", knots, "--name", "mine")
    assert (code, out) == (0, [f"40 requests -> {knots}"])
    code, out, _ = chairlift("lab", "traces", knots)
    assert out[0] == "mine: mine"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--traces", "nowhere"), "traces must be all, a file, or some of"),
        (("--policies", "nobody"), "policies must be all, module:Class or some of"),
        (("--loads", "0"), "must be numbers above 0"),
        (("--machines", "toaster"), "machine must be one of"),
        (("--set", "colour=red"), "set must be SETTING=VALUE"),
    ],
)
def test_a_wrong_name_is_answered_with_the_right_ones(
    chairlift: Run, tmp_path: Path, flags: tuple[str, str], message: str
) -> None:
    code, out, err = chairlift(*SMALL, *flags, "--output", tmp_path / "x")
    assert (code, out) == (2, [])
    assert message in err[-1]


def test_a_flag_before_the_subcommand_holds(chairlift: Run, tmp_path: Path) -> None:
    code, _, err = chairlift("lab", "--traces", "nowhere", "run", "--output", tmp_path / "x")
    assert code == 2
    assert "nowhere" in err[-1]
    code, _, err = chairlift("lab", "show", tmp_path)
    assert code == 2
    assert "cannot read" in err[-1]
