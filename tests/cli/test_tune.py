from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from chairlift_lab.cli import tune
from tests.cli.conftest import Run

FEW = ("--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--prefill-mode", "mixed", "--kernels", "torch")


@pytest.mark.nightly
def test_a_small_model_is_tuned_and_the_result_can_be_used(chairlift: Run, tmp_path: Path, model_dir: Path) -> None:
    out_dir = tmp_path / "tuned"
    argv = ("tune", model_dir, "--workload", "chat", "--num-prompts", "12", "--output", out_dir, "--time-limit", "60s")
    code, out, err = chairlift(*argv, *FEW)
    assert code == 0, err
    assert err[0].startswith("workload chat, 12 requests")
    assert any(line.startswith("all at once: output tokens/s") for line in out)
    assert "chairlift serve" in out[-2]
    assert sorted(path.name for path in out_dir.iterdir()) == ["chairlift.yaml", "report.html", "tune.json"]
    settings = yaml.safe_load((out_dir / "chairlift.yaml").read_text())
    assert (settings["max_num_seqs"], settings["kernels"]) == (4, "torch")
    config = ("--config", out_dir / "chairlift.yaml")
    assert chairlift("generate", *config, "hello", "--max-tokens", "2")[0] == 0
    assert json.loads((out_dir / "tune.json").read_text())["report"]["verdict"] == out[-2]
    printed = [out]
    while len(printed) < 2 or printed[-1] != printed[-2]:  # a busy machine leaves something to do, but not for ever
        assert len(printed) < 6, "nothing is left to do"
        code, out, err = chairlift(*argv, *FEW)
        assert code == 0, err
        printed.append(out)
    other = chairlift(*argv, *FEW, "--slo", "ttft:500")
    assert other[0] == 2
    assert "holds results for another question: slo was {} and is" in other[2][-1]


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (("--workload", "chat"), "the following arguments are required: --output"),
        (("--output", "d"), "one of the arguments --workload --trace is required"),
        (("--output", "d", "--workload", "chats"), "workload must be one of"),
        (("--output", "d", "--workload", "chat", "--slo", "ttfb:5"), "must be names and milliseconds"),
        (("--output", "d", "--workload", "chat", "--slo", "ttft:-5"), "must be names and milliseconds"),
        (("--output", "d", "--workload", "chat", "--time-limit", "5 minutes"), "must be a time from 5s"),
        (("--output", "d", "--workload", "chat", "--rate-scale", "0"), "must be a number above 0"),
        (("--output", "d", "--workload", "chat", "--batching", "static"), "unknown flag '--batching'"),
        (("--output", "d", "--workload", "chat", "--max-num-seqs", "0"), "--max-num-seqs must be"),
        (("--output", "d", "--trace", "/nowhere.jsonl"), "cannot read the trace"),
        (("--output", "/proc/no", "--workload", "chat"), "cannot make the directory /proc/no"),
    ],
)
def test_wrong_usage_is_one_line(
    chairlift: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argv: tuple[str, ...], complaint: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = chairlift("tune", *argv)
    assert (code, out) == (2, [])
    assert len(err) == 1
    assert complaint in err[0]
    assert not list(tmp_path.iterdir())


def test_the_traffic_is_announced_as_it_is_sent(chairlift: Run, tmp_path: Path) -> None:
    traffic = ("--workload", "chat", "--arrivals", "constant:2", "--rate-scale", "3")
    _, _, err = chairlift("tune", tmp_path / "no_model", *traffic, "--output", tmp_path)
    assert err[0].startswith("workload chat, 1,000 requests, arrivals constant:2, seed 0, 3 times as fast: ")
    assert err[0].endswith(", 6.00 requests/s")


def test_promises_and_durations_are_read_with_their_units() -> None:
    assert tune._slo("ttft:500, tpot:80,e2el:9e3") == {"ttft_ms": 500.0, "tpot_ms": 80.0, "deadline_ms": 9000.0}
    assert [tune.duration(text) for text in ("90", "90s", "1.5m", "2h")] == [90, 90, 90, 7200]


def test_tune_fleet_says_how_many_replicas_are_needed(chairlift: Run, tmp_path: Path) -> None:
    command = ("tune", "llama-3-8b", "--fleet", "--machine", "h100-sxm", "--workload", "chat", "--num-prompts", "40")
    more = ("--arrivals", "poisson:20", "--price-per-hour", "2.5", "--output", tmp_path / "fleet")
    code, out, err = chairlift(*command, *more, "--slo", "ttft:500,tpot:30")
    assert (code, err) == (0, [])
    lines = {line[:16].strip(): line[16:] for line in out if line[:14].strip().isalpha() or line.startswith("with")}
    assert lines["replicas"].startswith("1: 100.0% of the requests meet their targets (required 99.0%)")
    assert lines["with a spare"].startswith("2: ") and lines["cost"].startswith("2.50 an hour, 60.00 a day; ")
    written = json.loads((tmp_path / "fleet" / "fleet.json").read_text())
    assert written["replicas"] == 1 and written["tried"][0]["served"]["requests"] == 40
    for wrong, why in (
        (("--slo", "ttft:500", "--target", "1.5"), "--target is a share above 0"),
        (("--slo", "ttft:500", "--cost-model", "x.json"), "leave one out"),
        ((), "has no latency targets"),
    ):
        code, _, err = chairlift(*command, *wrong)
        assert code == 2 and why in err[0]
    code, _, err = chairlift("tune", "--workload", "chat", "--output", tmp_path, "--target", "0.9")
    assert code == 2 and "--target is about a fleet; add --fleet" in err[0]


@pytest.mark.nightly
def test_no_rate_of_ten_tunings_is_refuted_by_another(chairlift: Run, tmp_path: Path) -> None:
    """The same command on the same machine: a claimed rate lies below the interval of the throughput that every other
    tuning measured, and no tuning calls a side faster that another one calls slower."""
    claims, ratios = [], []
    for number in range(10):
        out_dir = tmp_path / f"tuned{number}"
        traffic = ("--workload", "chat", "--num-prompts", "30", "--arrivals", "poisson:10", "--slo", "ttft:500")
        pinned = ("--max-num-seqs", "32", "--max-num-batched-tokens", "1024", "--prefill-mode", "mixed")
        code, out, err = chairlift("tune", *traffic, *pinned, "--output", out_dir, "--time-limit", "60s")
        assert code == 0, err
        report = json.loads((out_dir / "tune.json").read_text())["report"]
        assert "of this machine during the runs" in report["verdict"] or "No other program" in report["verdict"]
        (completed,) = [line.split()[-1] for line in out if line.startswith("all at once: requests/s")]
        headline = re.search(r"up to ([0-9.e+]+) requests/s, in each", report["verdict"])
        if report["confirmed"] is not None:
            claims.append(report["confirmed"])
            assert headline is not None
            assert float(headline[1]) <= 1.005 * float(completed.replace(",", "")), "three digits are shown"
        ratios.append(report["ratios"].get("static_best"))
    assert all(one["rate"] <= other["high"] for one in claims for other in claims)
    told = [each for each in ratios if each is not None and not each["doubt"]]
    assert not (any(each["low"] > 1 for each in told) and any(each["high"] < 1 for each in told))
