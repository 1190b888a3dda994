"""``benchmarks/gpu.py``: a GPU may be at hand for minutes only, so an engine that fails must not end the others."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
ANSWERS = """
import sys
print("READY {\\"version\\": \\"1\\"}", flush=True)
for _ in sys.stdin:
    print('DONE {"seconds": 1.0, "output_tokens": 4, "cpu_seconds": 1.0}', flush=True)
"""
FAILS = "raise SystemExit('out of memory')"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    spec = importlib.util.spec_from_file_location("gpu_script", BENCHMARKS / "gpu.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def engines(**programs: str) -> dict[str, list[str]]:
    return {name: [sys.executable, "-c", program] for name, program in programs.items()}


def test_an_engine_that_fails_is_left_out_and_the_others_go_on(
    script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    three = engines(chairlift=ANSWERS, transformers=FAILS, turns=ANSWERS)
    measured = [(name, result["seconds"]) for name, _, result in script.measure(three, tmp_path / "w", 2, tmp_path)]
    assert measured == [("chairlift", 1.0), ("turns", 1.0)] * 2
    assert capsys.readouterr().out.count("transformers said") == 1


def test_without_chairlift_there_is_nothing_to_compare(script: Any, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="chairlift said"):
        list(script.measure(engines(chairlift=FAILS, turns=ANSWERS), tmp_path / "w", 1, tmp_path))


def test_shares_are_of_the_floor_that_was_measured(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(script, "commands", lambda args: engines(chairlift=ANSWERS))
    monkeypatch.setattr(script, "floor_of", lambda model, requests: (0.25, {}))
    report = tmp_path / "report.json"
    flags = ["--model", str(tmp_path), "--rounds", "1", "--work", str(tmp_path), "--json", str(report)]
    monkeypatch.setattr(sys, "argv", ["gpu.py", *flags])
    monkeypatch.setattr(script.signal, "signal", lambda *_: None)
    script.main()
    assert json.loads(report.read_text())["summary"]["chairlift"]["percent_of_floor"] == 25.0
    assert "25.0" in capsys.readouterr().out
