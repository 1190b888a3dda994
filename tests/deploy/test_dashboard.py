from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.promql import Exposed, labels_of, parse, selectors

FILE = Path(__file__).parents[2] / "deploy" / "grafana-dashboard.json"
DASHBOARD: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
PANELS: list[dict[str, Any]] = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
ROWS = [panel["title"] for panel in DASHBOARD["panels"] if panel["type"] == "row"]
VARIABLES: dict[str, dict[str, Any]] = {each["name"]: each for each in DASHBOARD["templating"]["list"]}
KINDS = {"stat": 4, "timeseries": 8, "table": 8}
"""Kinds of panels, and how high they are."""
UNITS = {"none", "short", "s", "bytes", "Bps", "percentunit", "reqps"}
each_panel = pytest.mark.parametrize("panel", PANELS, ids=[panel["title"] for panel in PANELS])


def expanded(text: str) -> str:
    """An expression as Grafana sends it."""
    for name, value in (("__rate_interval", "5m"), ("job", ".+"), ("instance", ".+")):
        text = text.replace(f"${name}", value)
    return text


def expressions() -> Iterator[str]:
    for panel in PANELS:
        for target in panel["targets"]:
            yield expanded(target["expr"])


@each_panel
def test_each_panel_reads_what_is_there(panel: Mapping[str, Any], exposed: Mapping[str, Exposed]) -> None:
    for target in panel["targets"]:
        tree = parse(expanded(target["expr"]))
        labels = labels_of(tree, exposed)
        assert labels is not None
        assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= labels
        for selector in selectors(tree):
            assert {label for label, _, _ in selector.matchers} >= {"job", "instance"}, "not only of the chosen"


@each_panel
def test_each_panel_is_complete(panel: Mapping[str, Any]) -> None:
    assert panel["type"] in KINDS
    assert panel["title"]
    assert len(panel["description"]) > 20 and panel["description"].endswith(".")
    assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    unit = panel["fieldConfig"]["defaults"]["unit"]
    assert unit in UNITS or unit.startswith("suffix: ")
    references = [target["refId"] for target in panel["targets"]]
    assert references and len(set(references)) == len(references)
    assert panel["gridPos"]["h"] == KINDS[panel["type"]]


def test_seconds_bytes_and_shares_have_their_units() -> None:
    for panel in PANELS:
        unit = panel["fieldConfig"]["defaults"]["unit"]
        for target in panel["targets"]:
            tree = parse(expanded(target["expr"]))
            names = {selector.metric for selector in selectors(tree)}
            is_share = any(name.endswith(("_perc", "_rate", "_share", "_ratio", "_watermark")) for name in names)
            is_time = target["expr"].startswith("histogram_quantile") and any("_seconds_bucket" in n for n in names)
            assert not is_share or unit == "percentunit", panel["title"]
            assert not is_time or unit == "s", panel["title"]
            assert not any(name.endswith("_memory_bytes") for name in names) or unit == "bytes", panel["title"]


def test_panels_lie_side_by_side() -> None:
    cells = [panel["gridPos"] for panel in DASHBOARD["panels"]]
    assert all(cell["x"] >= 0 and cell["x"] + cell["w"] <= 24 for cell in cells)
    for one, other in combinations(cells, 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        above = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or above
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_the_dashboard_has_its_rows_in_order() -> None:
    first = ["Now", "Traffic", "Latency", "Batch", "KV cache and prefix cache", "Preemption", "Errors and deadlines"]
    assert [*first, "Process"] == ROWS


def test_each_latency_is_there_as_quantiles() -> None:
    trees = [parse(text) for text in expressions() if "histogram_quantile" in text]
    shown = {selector.metric for tree in trees for selector in selectors(tree)}
    for name in ("time_to_first_token", "inter_token_latency", "e2e_request_latency", "request_queue_time"):
        assert f"chairlift:{name}_seconds_bucket" in shown


def test_the_preempted_share_has_its_thresholds() -> None:
    shown = [panel for panel in PANELS if panel["title"] in ("Preempted", "Preempted requests")]
    assert len(shown) == 2
    for panel in shown:
        steps = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
        assert [step["value"] for step in steps] == [None, 0.02, 0.05]


def test_variables_select_job_and_instance_from_existing_series(exposed: Mapping[str, Exposed]) -> None:
    assert list(VARIABLES) == ["datasource", "job", "instance"]
    assert VARIABLES["datasource"] | {"type": "datasource", "query": "prometheus"} == VARIABLES["datasource"]
    for name in ("job", "instance"):
        match = re.fullmatch(r"label_values\((.+), (\w+)\)", VARIABLES[name]["query"]["query"])
        assert match is not None and match[2] == name
        labels = labels_of(parse(expanded(match[1])), exposed)
        assert labels is not None and name in labels
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARD)))
    assert used - {"__rate_interval", "__all"} == set(VARIABLES)


def test_the_dashboard_names_no_data_source_of_its_own() -> None:
    uids = set(re.findall(r'"uid": "([^"]+)"', FILE.read_text(encoding="utf-8")))
    assert uids == {"${datasource}", "-- Grafana --", DASHBOARD["uid"]}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not on the PATH")
def test_promtool_reads_every_expression(tmp_path: Path) -> None:
    rules = [{"record": f"panel:{number}", "expr": text} for number, text in enumerate(expressions())]
    (tmp_path / "panels.yml").write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    command = ["promtool", "check", "rules", "--lint=none", "panels.yml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(rules)} rules found" in done.stdout
