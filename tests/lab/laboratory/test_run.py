from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from chairlift.config import EngineConfig
from chairlift.errors import ConfigError
from chairlift_lab.laboratory.cell import LabMachine, LabTrace, find_capacity
from chairlift_lab.laboratory.knots import bundled_knots
from chairlift_lab.laboratory.measure import best_rows, measure
from chairlift_lab.laboratory.plan import LabPlan
from chairlift_lab.laboratory.policies import LabPolicy, chosen_policies, known_policies
from chairlift_lab.laboratory.report import lab_report, printed_summary
from chairlift_lab.laboratory.results import lab_record
from chairlift_lab.laboratory.run import processes, run_plan
from chairlift_lab.laboratory.state import LabState
from chairlift_lab.replay.machines import deploy, shape_from_name
from chairlift_lab.replay.replay import simulated_core

MACHINE = LabMachine(name="l4:llama-3-8b", deployment=deploy("l4", shape_from_name("llama-3-8b")))


def small_plan(policies: str = "fcfs,oracle-srpt", **changes: Any) -> LabPlan:
    known = bundled_knots()
    fields: dict[str, Any] = {
        "policies": chosen_policies(policies),
        "traces": [LabTrace(name="sharegpt", knots=known["sharegpt"])],
        "machines": [MACHINE],
        "loads": [1.1],
        "shares": [0.75],
        "seeds": 2,
        "requests": 60,
    }
    return LabPlan(**(fields | changes))


class Here:
    """Runs tasks one after another in this process. It is interrupted after ``most`` tasks."""

    def __init__(self, most: int = 10_000) -> None:
        self.most = most
        self.done: list[str] = []

    def take(self, function: Callable[[Any], Any], tasks: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        for key, task in tasks:
            if len(self.done) >= self.most:
                raise KeyboardInterrupt
            self.done.append(key)
            yield key, function(task)


def run_here(plan: LabPlan, path: Path, most: int = 10_000) -> tuple[LabState, Here]:
    state, hands = LabState(path), Here(most)
    run_plan(plan, state, hands, say=lambda text: None)
    return state, hands


def test_an_interrupted_run_goes_on_with_equal_results(tmp_path: Path) -> None:
    plan = small_plan()
    whole, _ = run_here(plan, tmp_path / "whole.json")
    assert len(whole.cells) == 4
    with pytest.raises(KeyboardInterrupt):
        run_here(plan, tmp_path / "cut.json", most=3)  # the capacity and two baselines
    cut = LabState(tmp_path / "cut.json")
    assert cut.resumed and len(cut.cells) == 2
    said: list[str] = []
    hands = Here()
    progress = run_plan(plan, cut, hands, say=said.append)
    assert len(hands.done) == 2
    assert (progress.done, progress.total) == (4, 4)
    assert said[-1] == "4 of 4 cells"
    kept = [json.loads(path.read_text()) for path in (tmp_path / "whole.json", tmp_path / "cut.json")]
    assert kept[0] == kept[1]


def test_another_plan_uses_what_it_shares(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    run_here(small_plan("fcfs"), path)
    _, hands = run_here(small_plan("fcfs,random"), path)
    assert [key.split("|")[5] for key in hands.done] == ["random", "random"]
    _, hands = run_here(small_plan("fcfs", requests=50), path)
    assert len(hands.done) == 3, "other requests: nothing may be taken from the earlier run"


def test_processes_do_what_one_process_does(tmp_path: Path) -> None:
    plan = small_plan("fcfs", seeds=1)
    alone, _ = run_here(plan, tmp_path / "alone.json")
    several = LabState(tmp_path / "several.json")
    with processes(2) as hands:
        run_plan(plan, several, hands, say=lambda text: None)
    assert {key: each.to_dict() for key, each in several.cells.items()} == {
        key: each.to_dict() for key, each in alone.cells.items()
    }
    with processes(1, deadline=0.0) as hands:
        assert list(hands.take(str, [("a", 1)])) == [], "no time is left"


@pytest.mark.parametrize("text", ["{}", "[", '{"format": 99}', '{"format": 1, "machines": {}, "rates": {"a": 1}}'])
def test_a_foreign_state_file_is_refused_and_kept(tmp_path: Path, text: str) -> None:
    path = tmp_path / "s.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="give another --output"):
        LabState(path)
    assert path.read_text() == text


def test_a_policy_that_fails_is_a_result(tmp_path: Path) -> None:
    broken = LabPolicy(name="broken", settings={"scheduling_policy": "tests.lab.laboratory.test_run:Broken"})
    plan = small_plan(seeds=1)
    plan = dataclasses.replace(plan, policies=[*plan.policies, broken])
    state, _ = run_here(plan, tmp_path / "s.json")
    record = lab_record(plan, state, command="chairlift lab")
    rows = {row["row"]: row for row in record["groups"][0]["rows"]}
    assert rows["broken"]["error"]
    assert rows["fcfs"]["seeds"] == 1


class Broken:
    """No policy: it lacks everything."""


def test_shortest_first_with_an_oracle_beats_the_default_near_capacity(tmp_path: Path) -> None:
    code = LabTrace(name="azure-2024-code", knots=bundled_knots()["azure-2024-code"])
    plan = small_plan(seeds=2, requests=80, traces=[code], loads=[0.95])
    state, _ = run_here(plan, tmp_path / "s.json")
    record = lab_record(plan, state, command="chairlift lab")
    [group] = record["groups"]
    rows = {row["row"]: row for row in group["rows"]}
    assert rows["fcfs"]["ratios"]["goodput_loose"]["ratio"] == 1
    assert rows["oracle-srpt"]["ratios"]["goodput_loose"]["ratio"] > 1
    assert 0 < rows["oracle-srpt"]["ratios"]["goodput_loose"]["holm"] <= 1
    assert group["rate"] == pytest.approx(group["capacity"] * 0.95, rel=1e-3)
    assert "--policies oracle-srpt" in rows["oracle-srpt"]["command"]
    assert "--loads 0.95" in rows["oracle-srpt"]["command"]


def test_the_capacity_is_a_rate_that_the_default_sustains() -> None:
    plan = small_plan()
    [group] = plan.groups()
    rate, targets = find_capacity(plan.rate_task(group))
    assert 0.2 < rate < 50
    assert targets.idle_ttft > 0.01 < targets.idle_tpot


def test_the_best_and_the_default_are_measured_in_turns(tmp_path: Path) -> None:
    plan = small_plan("fcfs,priority,random,oracle-srpt", machines=[dataclasses.replace(MACHINE, name="here")])
    state, _ = run_here(plan, tmp_path / "s.json")
    [group] = plan.groups()
    rows = [cells[0].row for cells in best_rows(plan, state, group)]
    assert rows == ["fcfs", "priority"], "controls are never measured"
    said: list[str] = []

    def make_core(settings: Any) -> Any:
        return simulated_core(MACHINE.deployment, EngineConfig.from_flat(dict(settings)))

    measure(plan, state, group, make_core, say=said.append)
    assert [text.rpartition(", ")[2] for text in said] == ["fcfs", "priority", "priority", "fcfs"]
    record = lab_record(plan, state, command="chairlift lab")
    for row in record["groups"][0]["rows"]:
        if row["policy"] in rows:
            assert row["measured"]["seeds"] == 2
            # The "engine" of this test is the simulator. It measures what was simulated, but for what the policy has
            # learnt from earlier rounds.
            assert row["measured"]["figures"]["ttft_p50"] == pytest.approx(row["figures"]["ttft_p50"], rel=0.2)
    before = len(said)
    measure(plan, state, group, make_core, say=said.append)
    assert len(said) == before


def test_the_page_and_the_text_show_every_policy_its_claim_and_its_command(tmp_path: Path) -> None:
    from chairlift_lab.bench.report import text

    idea = dataclasses.replace(known_policies()["oracle-srpt"], name="idea <b>", source="a paper", claim="2x & more")
    plan = small_plan(seeds=2)
    plan = dataclasses.replace(plan, policies=[*plan.policies, idea])
    state, _ = run_here(plan, tmp_path / "s.json")
    record = json.loads(json.dumps(lab_record(plan, state, command="chairlift lab --quick")))
    page = lab_report(record).html()
    for words in ("idea &lt;b&gt;", "2x &amp; more", "a paper", "chairlift lab --quick", "Jain", "wasted tokens"):
        assert words in page
    assert "<b>" not in page and "<script" not in page
    assert page.count("chairlift lab run --policies") >= 3
    lines = list(text(*printed_summary(record)))
    at = next(number for number, line in enumerate(lines) if line.startswith("idea <b>") and "a paper" in line)
    assert lines[at + 1].strip() == "claim: 2x & more"
    assert lines[at + 2].strip().startswith("found: wins ")
    assert any("--traces sharegpt" in line for line in text(*printed_summary(record, everything=True)))


def test_names_of_policies() -> None:
    assert [each.name for each in chosen_policies("random")] == ["fcfs", "random"]
    own = chosen_policies("tests.lab.laboratory.test_run:Broken")[1]
    assert own.settings == {"scheduling_policy": "tests.lab.laboratory.test_run:Broken"}
    assert len(chosen_policies("all")) == len(known_policies())
    with pytest.raises(ConfigError, match="policies must be all"):
        chosen_policies("sjf")


def test_the_digest_of_a_policy_follows_its_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    module = tmp_path / f"own_policy_{time.time_ns()}.py"
    module.write_text("class Own: ...\n")
    [_, own] = chosen_policies(f"{module.stem}:Own")
    before = own.digest
    module.write_text("class Own: pass\n")
    assert own.digest != before
