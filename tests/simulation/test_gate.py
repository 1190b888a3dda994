"""Good policies pass the gate, broken ones fail it, each for its own reason."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from chairlift.base.service_class import ServiceClass, parse_service_classes
from chairlift.cli.main import main
from chairlift.core.scheduler.deadlines import Estimate
from chairlift.core.scheduler.policy import FirstComeFirstServed, Policy
from chairlift.core.scheduler.precedence import Precedence
from chairlift_lab.sim.gate import check_policy
from chairlift_lab.sim.policy_watch import PROMISES
from tests.simulation.policies import (
    BROKEN,
    EarliestDeadlineFirst,
    FairShares,
    SeededRandom,
    ShortBeginnings,
    ShortestPromptFirst,
)
from tests.tiers import one_in

RESERVING = {"priority": ServiceClass(priority=-5, min_seqs=1), "chat": ServiceClass(min_blocks=3, min_step_tokens=1)}

GOOD: dict[str, Callable[[], Policy]] = {
    "fcfs": FirstComeFirstServed,
    "edf": EarliestDeadlineFirst,
    "srpt": ShortestPromptFirst,
    "vtc": FairShares,
    "random": SeededRandom,
    "longest prefix": ShortBeginnings,
    "precedence": lambda: Precedence(parse_service_classes(""), max_running=16),
    "precedence, ageing fast": lambda: Precedence({}, max_running=16, ageing_seconds=0.02, tenant_weights={"a": 5.0}),
    "precedence, reserving": lambda: Precedence(RESERVING, max_running=16),
    "precedence, slow service": lambda: Precedence(
        {},
        max_running=16,
        estimate=lambda request: Estimate(
            request.num_prompt_tokens / 50, request.num_prompt_tokens / 60, 9, 1 / 20, 1 / 50
        ),
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("name", one_in(3, GOOD))
def test_good_policy_passes(name: str, pytestconfig: pytest.Config) -> None:
    first, count = pytestconfig.getoption("--first-seed"), pytestconfig.getoption("--seeds") or 25
    report = check_policy(GOOD[name], range(first, first + count))
    assert report.passed, str(report)
    assert report.num_seeds == count
    assert all(report.checked[promise] > 0 for promise in set(PROMISES) - {"late", "yields", "budget", "admits"}), (
        report.checked
    )


@pytest.mark.nightly
@pytest.mark.parametrize("name", GOOD)
def test_good_policy_passes_in_many_worlds(name: str, pytestconfig: pytest.Config) -> None:
    first, count = pytestconfig.getoption("--first-seed"), pytestconfig.getoption("--seeds") or 5_000
    report = check_policy(GOOD[name], range(first, first + count))
    assert report.passed, str(report)


def test_a_request_preempted_before_its_last_token_may_return_in_the_same_step() -> None:
    """It was still listed as one whose last step is in flight, so the next step stopped it, and it never ended."""
    report = check_policy(SeededRandom, [1374])
    assert report.passed, str(report)


@pytest.mark.parametrize(("policy", "promise"), BROKEN.items(), ids=[policy.__name__ for policy in BROKEN])
def test_broken_policy_fails_for_its_own_reason(policy: type[FirstComeFirstServed], promise: str) -> None:
    report = check_policy(policy, range(200))
    assert report.broken is not None
    assert report.broken.promise == promise, str(report)
    assert report.broken.replay.startswith(f"chairlift sim gate tests.simulation.policies:{policy.__name__} --seed ")
    assert "BROKEN" in str(report)


def test_every_promise_of_a_policy_is_broken_by_somebody() -> None:
    assert set(PROMISES) - set(BROKEN.values()) == {"hooks", "front"}  # those are the loop's own


def test_failure_is_cut_down_and_replayed(capsys: pytest.CaptureFixture[str]) -> None:
    path = "tests.simulation.policies:SharesTwice"
    assert main(["sim", "gate", path, "--seeds", "50"]) == 1
    shown = capsys.readouterr().out
    seed = shown.rpartition("--seed ")[2].strip()
    assert f"replay: chairlift sim gate {path} --seed {seed}" in shown
    assert main(["sim", "gate", path, "--seed", seed]) == 1
    again = capsys.readouterr().out
    assert again.partition("SharesTwice")[2].count("Event(") == shown.count("Event(") <= 2


def test_command_line_reports_and_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", "gate", "chairlift.core.scheduler.policy:FirstComeFirstServed", "--seeds", "3"]) == 0
    assert "passes (3 worlds" in capsys.readouterr().out
    for wrong in ("chairlift.core.scheduler.policy:Nothing", "collections:Counter", "fcfs"):
        assert main(["sim", "gate", wrong]) == 2
        assert "scheduling_policy" in capsys.readouterr().err


def test_a_policy_may_lie_where_the_command_runs(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("from chairlift.core.scheduler.policy import FirstComeFirstServed as Mine\n")
    root = str(Path(__file__).parents[2])
    code = f"import sys; sys.path.append({root!r}); from chairlift.cli.main import main; sys.exit(main())"
    # -I: as for the installed command, and for the engine's process, the working directory is not looked at by itself.
    command = [sys.executable, "-I", "-c", code, "sim", "gate", "mine:Mine", "--seeds", "1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "passes (1 worlds" in done.stdout, done.stderr
