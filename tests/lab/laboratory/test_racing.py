"""Which rows of a race get no more seeds, and that the record says how often they were looked at."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from chairlift_lab.bench.report import Table
from chairlift_lab.laboratory.figures import CellFigures, MeasuredWindow
from chairlift_lab.laboratory.measure import best_rows
from chairlift_lab.laboratory.plan import LabPlan
from chairlift_lab.laboratory.policies import chosen_policies
from chairlift_lab.laboratory.racing import is_decided, seeds_of_rows
from chairlift_lab.laboratory.report import lab_report, printed_summary
from chairlift_lab.laboratory.results import lab_record
from chairlift_lab.laboratory.run import run_plan
from chairlift_lab.laboratory.state import CellResult, LabState
from chairlift_lab.laboratory.table import verdict_of
from chairlift_lab.laboratory.targets import LabTargets
from tests.lab.laboratory.test_run import Here, small_plan


def result(goodput: float, error: str = "") -> CellResult:
    if error:
        return CellResult(error=error)
    zeros: dict[str, Any] = dict.fromkeys(CellFigures.__dataclass_fields__, 0.0)
    return CellResult(CellFigures(**(zeros | {"goodput_strict": goodput})), MeasuredWindow(0.0, 10.0))


def results(*goodputs: float) -> list[CellResult]:
    return [result(each) for each in goodputs]


EVEN = results(1.0, 1.0, 1.0)
_RATES = (1.0, LabTargets(1.0, 1.0))


def test_a_row_that_wins_beyond_doubt_is_decided() -> None:
    assert is_decided(results(2.0, 2.001, 2.002), EVEN, tests=100)
    assert not is_decided(results(2.0, 2.3, 1.8), EVEN, tests=100), "a difference of three noisy seeds"
    assert not is_decided(results(2.0, 2.01, 2.02), EVEN, tests=100_000), "the correction counts all comparisons"


def test_a_row_that_will_hardly_win_is_decided_and_one_that_might_is_not() -> None:
    assert is_decided(results(0.7, 0.75, 0.72), EVEN, tests=100)
    assert is_decided(EVEN, EVEN, tests=100), "equal rows cannot win"
    assert not is_decided(results(0.9, 1.1, 1.2), EVEN, tests=100)


def test_a_row_that_lacks_a_seed_is_not_decided_and_one_that_failed_is() -> None:
    assert not is_decided([*results(0.7, 0.7), None], EVEN, tests=100)
    assert not is_decided(results(0.7, 0.7, 0.7), [*results(1.0, 1.0), None], tests=100)
    assert is_decided([None, result(0, "cannot serve"), None], EVEN, tests=100)


def test_no_good_request_counts_as_half_a_request() -> None:
    nothing = result(0.0)
    assert nothing.goodput == 0.05
    assert result(0.0, "cannot serve").goodput is None
    assert is_decided([nothing] * 3, EVEN, tests=100)


def filled(path: Path, goodput: dict[str, list[float]], seeds: int) -> tuple[LabPlan, LabState]:
    """A state that has ``goodput`` by row, seed by seed; the last value repeats."""
    plan = small_plan("fcfs,fcfs-targets,kairos,separate", seeds=20, stops_decided=True)
    state = LabState(path)
    for cell in plan.cells():
        if cell.seed < seeds:
            values = goodput.get(cell.row, [1.0])
            state.add(plan.key(cell), result(values[min(cell.seed, len(values) - 1)]))
    return plan, state


def rows(plan: LabPlan, state: LabState) -> dict[str, int]:
    return {row: seeds for (_, row), seeds in seeds_of_rows(plan, state).items()}


def test_a_policy_must_beat_the_control_and_a_setting_the_baseline(tmp_path: Path) -> None:
    told = [2.0, 2.1, 1.9]
    plan, state = filled(tmp_path / "s.json", {"fcfs-targets": told, "kairos": told, "separate": [1.2, 1.5, 1.1]}, 3)
    assert rows(plan, state) == {"fcfs": 20, "fcfs-targets": 20, "kairos": 3, "separate": 20}


def test_rows_end_at_the_first_look_that_decides(tmp_path: Path) -> None:
    late = [1.2, 1.1, 0.9, 1.1, 1.0, *[0.5] * 15]
    plan, state = filled(tmp_path / "s.json", {"separate": late}, 20)
    assert rows(plan, state)["separate"] == 8
    assert rows(dataclasses.replace(plan, stops_decided=False), state)["separate"] == 20
    plan, state = filled(tmp_path / "t.json", {"separate": late}, 7)
    assert rows(plan, state)["separate"] == 20, "the look after eight seeds has not come"


def test_a_race_runs_only_what_is_open_and_says_how_often_it_looked(tmp_path: Path) -> None:
    plan = small_plan("fcfs-targets,chairlift.core.scheduler.policy:FirstComeFirstServed", seeds=4, requests=40)
    plan = dataclasses.replace(plan, policies=[*plan.policies, *chosen_policies("t-lru")[1:]], stops_decided=True)
    state, hands = LabState(tmp_path / "s.json"), Here()
    said: list[str] = []
    progress = run_plan(plan, state, hands, say=said.append)
    # One capacity; two references with four seeds; a copy of the control and a cache without sessions with three.
    assert len(hands.done) == 1 + 2 * 4 + 2 * 3
    assert said[-1] == "14 of 14 cells" and (progress.done, progress.total) == (14, 14)
    record = lab_record(plan, state, command="chairlift lab")
    assert record["looks"] == [3, 4]
    found = {row["policy"]: row for row in record["groups"][0]["rows"]}
    assert {name: row["seeds"] for name, row in found.items()} == {
        "fcfs": 4,
        "fcfs-targets": 4,
        "chairlift.core.scheduler.policy:FirstComeFirstServed": 3,
        "t-lru": 3,
    }
    copy = found["chairlift.core.scheduler.policy:FirstComeFirstServed"]
    assert copy["merit"]["ratio"] == 1 and copy["reference"] == "fcfs-targets"
    assert "--seeds 3" in copy["command"]
    assert found["t-lru"]["reference"] == found["fcfs-targets"]["reference"] == "fcfs"
    assert "merit" not in found["fcfs"]


def test_p_values_count_the_looks(tmp_path: Path) -> None:
    values = {"fcfs-targets": [2.0, 2.6, 1.2, 3.0], "kairos": [1.9, 2.4, 1.0, 2.6]}
    plan, state = filled(tmp_path / "s.json", values, 20)
    state.rates = {plan.rate_key(group): _RATES for group in plan.groups()}
    raced = _holm(plan, state)
    whole = _holm(dataclasses.replace(plan, stops_decided=False), state)
    assert raced == pytest.approx(min(1.0, 6 * whole), rel=1e-3) and whole > 0


def _holm(plan: LabPlan, state: LabState) -> float:
    record = lab_record(plan, state, command="chairlift lab")
    [row] = [row for row in record["groups"][0]["rows"] if row["row"] == "fcfs-targets"]
    return float(row["merit"]["holm"])


def test_a_row_that_won_early_is_among_the_best(tmp_path: Path) -> None:
    plan, state = filled(tmp_path / "s.json", {"kairos": [2.0]}, 3)
    [group] = plan.groups()
    assert [cells[0].row for cells in best_rows(plan, state, group)] == ["fcfs", "fcfs-targets", "kairos", "separate"]


def test_the_page_shows_the_merit_of_a_row(tmp_path: Path) -> None:
    plan, state = filled(tmp_path / "s.json", {"fcfs-targets": [2.0], "kairos": [3.0]}, 20)
    state.rates = {plan.rate_key(group): _RATES for group in plan.groups()}
    record = lab_record(plan, state, command="chairlift lab")
    tables = [each for each in printed_summary(record) if isinstance(each, Table)]
    [merits] = [table for table in tables if table.header[0] == "goodput 5x / reference"]
    assert dict(merits.rows) == {"fcfs-targets": "2.00*", "kairos": "1.50*", "separate": "1.00"}
    assert verdict_of(record, "kairos").startswith("wins 1, loses 0 of 1; best 1.50")
    assert "wins 1 and loses 0 of 1" in str(lab_report(record).lead)
