from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.promql import Exposed, labels_of, parse, selectors

DEPLOY = Path(__file__).parents[2] / "deploy"
OPERATIONS = Path(__file__).parents[2] / "docs" / "operations.md"
RULES: list[dict[str, Any]] = [
    rule
    for group in yaml.safe_load((DEPLOY / "prometheus-alerts.yml").read_text(encoding="utf-8"))["groups"]
    for rule in group["rules"]
]
CASES: list[dict[str, Any]] = yaml.safe_load((DEPLOY / "prometheus-alerts.test.yml").read_text(encoding="utf-8"))[
    "tests"
]
NAMES = [rule["alert"] for rule in RULES]
each_rule = pytest.mark.parametrize("rule", RULES, ids=NAMES)
needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not on the PATH")


@each_rule
def test_each_rule_reads_what_is_there(rule: Mapping[str, Any], exposed: Mapping[str, Exposed]) -> None:
    labels = labels_of(parse(rule["expr"]), exposed)
    assert labels is not None
    texts = " ".join([*rule["annotations"].values()])
    assert set(re.findall(r"\$labels\.(\w+)", texts)) <= labels


@each_rule
def test_each_rule_tells_what_to_do(rule: Mapping[str, Any]) -> None:
    assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert re.fullmatch(r"[1-9]\d*m", rule.get("for", "1m"))
    annotations = rule["annotations"]
    assert set(annotations) == {"summary", "description", "runbook_url"}
    address, _, section = annotations["runbook_url"].partition("#")
    assert address.endswith("/docs/operations.md")
    assert section == rule["alert"].lower()
    assert f"\n### {rule['alert']}\n" in OPERATIONS.read_text(encoding="utf-8")


def test_no_alert_is_there_twice_or_undescribed() -> None:
    assert len(set(NAMES)) == len(NAMES)
    described = re.findall(r"^### (Chairlift\w+)$", OPERATIONS.read_text(encoding="utf-8"), re.MULTILINE)
    assert described == NAMES


def test_alerts_watch_progress_queue_kv_and_preemption() -> None:
    read = {rule["alert"]: {each.metric for each in selectors(parse(rule["expr"]))} for rule in RULES}
    assert "chairlift:num_requests_waiting" in read["ChairliftNoProgress"]
    assert "chairlift:iteration_tokens_total_count" in read["ChairliftNoProgress"]
    assert read["ChairliftLongQueue"] == {"chairlift:oldest_waiting_request_seconds"}
    assert {"chairlift:kv_cache_usage_perc", "chairlift:num_requests_running"} <= read["ChairliftKvLeak"]
    thresholds = {
        rule["alert"]: (re.search(r"> ([\d.]+)", rule["expr"]) or [""])[0]
        for rule in RULES
        if "Preemption" in rule["alert"]
    }
    assert thresholds == {"ChairliftPreemptionWatch": "> 0.02", "ChairliftPreemptionHigh": "> 0.05"}


def test_each_alert_has_a_case_in_which_it_fires_and_one_in_which_it_does_not() -> None:
    checks = [check for case in CASES for check in case["alert_rule_test"]]
    assert {check["alertname"] for check in checks if check.get("exp_alerts")} == set(NAMES)
    assert {check["alertname"] for check in checks if not check.get("exp_alerts")} == set(NAMES)


def test_cases_use_series_that_exist(exposed: Mapping[str, Exposed]) -> None:
    for case in CASES:
        for series in case["input_series"]:
            (selector,) = selectors(parse(series["series"]))
            metric = exposed[selector.metric]
            given = {label: value for label, _, value in selector.matchers}
            assert set(given) == {"job", "instance", *metric.labels}, selector.metric
            for label in set(given) & {"reason", "finished_reason", "le"}:
                assert given[label] in metric.labels[label]


@needs_promtool
@pytest.mark.parametrize(
    "command",
    [
        ("check", "rules", "prometheus-alerts.yml"),
        ("test", "rules", "prometheus-alerts.test.yml"),
        ("check", "config", "--syntax-only", "prometheus.yml"),
    ],
)
def test_promtool_agrees(command: tuple[str, ...]) -> None:
    done = subprocess.run(["promtool", *command], cwd=DEPLOY, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SUCCESS" in done.stdout
