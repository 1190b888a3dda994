"""``examples/step_through.py``: it prints each step, and stops in each of the four calls."""

from __future__ import annotations

import importlib.util
import io
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "step_through.py"


def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("step_through", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_example_prints_the_step_from_the_scheduler_to_the_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    example().main([])
    text = capsys.readouterr().out
    assert "joined: NewRow(slot=0, request_id='A'" in text
    assert "chunks = [Chunk(slot=0, start=0, num_tokens=8, samples=1, why='prefill'" in text
    assert "cu_seqlens [3] = [ 0 8 12]" in text
    assert "finished: ['A']" in text
    assert "joined: NewRow(slot=0, request_id='C'" in text


def test_debugger_stops_in_each_of_the_four_calls(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("c\n" * 4))
    example().main(["--debug", "--steps", "1"])
    stops = [line for line in capsys.readouterr().out.splitlines() if line.removeprefix("(Pdb) ").startswith("> ")]
    names = [line.rpartition(")")[0].rpartition(")")[2] for line in stops]
    assert names == ["schedule(", "execute(", "sample(", "update("]
