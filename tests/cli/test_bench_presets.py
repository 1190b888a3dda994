from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from chairlift.base.presets import PRESETS
from tests.cli.conftest import Run

QUICK = ("bench", "presets", "hashlm", "--num-prompts", "12", "--max-num-seqs", "4")


@pytest.mark.full
def test_all_presets_are_in_one_table_and_one_picture(chairlift: Run, tmp_path: Path) -> None:
    out, picture = tmp_path / "out.json", tmp_path / "out.svg"
    code, lines, err = chairlift(*QUICK, "--rounds", "1", "--json", out, "--svg", picture)
    assert (code, err) == (0, [])
    start = next(place for place, line in enumerate(lines) if line.lstrip().startswith("tokens/s"))
    assert [line.split()[0] for line in lines[start + 1 : start + 1 + len(PRESETS)]] == list(PRESETS)
    assert sum(line.startswith(("orca: ", "static: ")) for line in lines) == 2
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")
    record = json.loads(out.read_text())
    assert (record["benchmark"], record["requests"]) == ("presets", {"count": 12, "seed": 0})
    assert list(record["presets"]) == list(PRESETS)
    for name, found in record["presets"].items():
        assert found["settings"]["preset"] == name
        assert PRESETS[name].settings.items() <= found["settings"].items()
        assert [run["failed"] for run in found["runs"]] == [0]


def test_rounds_are_interleaved_and_flags_apply_to_all(
    chairlift: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.json"
    monkeypatch.setenv("CHAIRLIFT_PRESET", "tgi")
    flags = ("--presets", "vllm,vllm", "--rounds", "2", "--prefill-mode", "separate", "--json", out)
    code, lines, err = chairlift(*QUICK, *flags)
    assert code == 0
    assert err == ["chairlift: the preset tgi is not applied: this command runs static, vllm"]
    order = [line.split(",")[0] for line in lines if line.startswith("round ")]
    assert order == ["round 1 of 2: static", "round 1 of 2: vllm", "round 2 of 2: vllm", "round 2 of 2: static"]
    settings = [found["settings"] for found in json.loads(out.read_text())["presets"].values()]
    assert [each["prefill_mode"] for each in settings] == ["separate"] * 2
    assert [each["max_num_seqs"] for each in settings] == [4] * 2


def test_an_unknown_preset_is_refused_before_anything_is_measured(chairlift: Run) -> None:
    code, lines, err = chairlift(*QUICK, "--presets", "orca,fastest")
    assert (code, lines) == (2, [])
    assert "got 'fastest'" in err[-1]
