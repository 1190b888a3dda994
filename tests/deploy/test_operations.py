from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.deploy.promql import Exposed

ROOT = Path(__file__).parents[2]
DOCUMENTS = ("docs/operations.md", "deploy/README.md")
OPERATIONS = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
EVERYWHERE = {"model_name", "engine", "le"}
"""Labels that the document names once, for all metrics."""


def described() -> dict[str, set[str]]:
    """Metrics in the document's tables: name -> labels."""
    section = OPERATIONS[OPERATIONS.index("\n## Metrics\n") : OPERATIONS.index("\n## Alerts\n")]
    rows = re.findall(r"^\| `(\w+)(?:\{([\w,]+)\})?` \| (.+?) \| (.+?) \|", section, re.MULTILINE)
    assert len({name for name, *_ in rows}) == len(rows)
    assert all(unit.strip() and says.strip() for _, _, unit, says in rows)
    return {name: set(filter(None, labels.split(","))) for name, labels, *_ in rows}


def test_every_metric_is_described_with_its_labels(exposed: Mapping[str, Exposed]) -> None:
    there: dict[str, set[str]] = {}
    for name, metric in exposed.items():
        if metric.kind == "histogram":
            name = re.sub(r"_(bucket|sum|count)$", "", name)
        there.setdefault(name.removeprefix("chairlift:"), set()).update(set(metric.labels) - EVERYWHERE)
    del there["up"]
    assert described() == there


def test_every_described_histogram_is_one(exposed: Mapping[str, Exposed]) -> None:
    called = set(re.findall(r"^\| `(\w+)` \| [^|]*histogram \|", OPERATIONS, re.MULTILINE))
    histograms = {name for name, metric in exposed.items() if metric.kind == "histogram" and name.endswith("_bucket")}
    assert called == {name.removeprefix("chairlift:").removesuffix("_bucket") for name in histograms}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_somewhere(name: str) -> None:
    path = ROOT / name
    for target in re.findall(r"\]\(([^)]+)\)", path.read_text(encoding="utf-8")):
        if target.startswith("https://"):  # a page of another project, which no test can reach
            continue
        assert "://" not in target
        file, _, section = target.partition("#")
        page = (path.parent / file).resolve() if file else path
        assert page.exists(), target
        if section:
            headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
            anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert section in anchors, target


def test_the_sums_of_the_example_are_right() -> None:
    per_token = 2 * 32 * 8 * 128 * 2
    assert f"{per_token:,} bytes per token" in OPERATIONS
    assert f"{2e9 // per_token:,.0f} tokens, a row" in OPERATIONS
    prose = " ".join(OPERATIONS.split())
    assert f"= {0.75 * 2e9 / per_token / 460:.0f} rows fit" in prose
    needed = round(0.7 * (0.1 + 567 * 0.070))
    assert f"= {needed} rows." in prose
    tokens = needed * 460 / 0.75
    assert f"= {tokens:,.0f} tokens, {tokens * per_token / 1e9:.2f} GB" in prose
