"""The table of engines: the same requests for all, nothing measured twice, and nothing left out in silence."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

PEERS = Path(__file__).parents[3] / "benchmarks" / "peers"
ENGINE = """
import sys
sys.path.insert(0, {peers!r})
from protocol import serve
serve(lambda: (lambda requests: [count for _, count in requests], {{"version": "1"}}))
"""


@pytest.fixture(scope="module")
def table() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(PEERS))
        import table

        yield table
        for name in [name for name, module in sys.modules.items() if getattr(module, "__file__", None)]:
            if Path(str(sys.modules[name].__file__)).parent == PEERS:
                del sys.modules[name]


def test_cells_are_few_and_long_ones_are_last(table: Any) -> None:
    cells = table.every_cell()
    assert len({cell.name for cell in cells}) == len(cells) <= 90
    assert {(cell.requests, cell.prompt) for cell in cells[-6:]} == {(64, 2048)}


def test_requests_are_quantiles_around_the_median(table: Any) -> None:
    assert [len(prompt) for prompt, _ in table.Cell("q05", 16, 1, 512).draw()] == [512]
    requests = table.Cell("q05", 16, 64, 512).draw()
    lengths = [len(prompt) for prompt, _ in requests]
    assert lengths == sorted(lengths) and lengths[0] < 256 and lengths[-1] > 1024
    counts = [count for _, count in requests]
    assert sorted(counts)[31] <= 64 <= sorted(counts)[32] and counts != sorted(counts)


def test_a_lost_cell_stays_and_is_bold(table: Any) -> None:
    cell = table.Cell("s135", 4, 4, 512)
    turns = {
        "chairlift": [{"seconds": 2.0}, {"seconds": 2.2}, {"seconds": 2.0}],
        "vllm": [{"seconds": 4.0}, {"seconds": 4.0}, {"seconds": 4.0}],
        "llama_cpp": [{"seconds": 1.0}, {"seconds": 1.0}, {"seconds": 1.1}],
    }
    assert table.summary(cell, turns)[-2] == "**0.50x** (0.45 to 0.55), llama.cpp"
    won = {"chairlift": turns["llama_cpp"], "vllm": turns["vllm"]}
    assert table.summary(cell, won)[-2] == "4.00x (3.64 to 4.00), vLLM"


def test_share_of_the_floor_counts_operations_at_the_precision(table: Any) -> None:
    """With endless bandwidth, a prompt of 512 and 64 tokens takes 2 operations for each weight and token."""
    for bits in (16, 8, 4):
        cell = table.Cell("q05", bits, 1, 512)
        share = table.share_of_floor(cell, {"seconds": 1.0, "bandwidth": 1e30, "peak": 1e12})
        assert share == pytest.approx(
            2 * (357.9e6 * (512 + 63) + 136.1e6 * 64) / 1e12, rel=0.05
        )  # the last layer of tokens that do not sample is left out


def test_cells_are_saved_once_and_missing_engines_are_named(
    table: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Fake:
        started = 0

        @classmethod
        def command(cls, place: Any, bits: int) -> list[str]:
            cls.started += 1
            return [sys.executable, "-c", ENGINE.format(peers=str(PEERS))]

    class Broken:
        @staticmethod
        def command(place: Any, bits: int) -> list[str]:
            raise sys.modules["protocol"].Unsupported("it has no format of 4 bits")

    roof = type("Roof", (), {"bandwidth": 1e10, "peak": 1e12})()
    monkeypatch.setattr(table, "ENGINES", {"chairlift": Fake, "vllm": Broken, "openvino": Fake})
    monkeypatch.setattr(table, "limits_now", lambda bits: lambda: roof)
    monkeypatch.setattr(table, "RESULTS", tmp_path / "results")
    (tmp_path / "cache" / "vllm" / "bin").mkdir(parents=True)
    (tmp_path / "cache" / "vllm" / "bin" / "python").touch()
    words = ["table.py", "--cache", str(tmp_path / "cache"), "--processor", "test", "--cells", "s135-4-1-512"]
    monkeypatch.setattr(sys, "argv", [*words, "--engines", *table.ENGINES])
    monkeypatch.setattr(table.signal, "signal", lambda *_: None)
    table.main()
    record = json.loads((tmp_path / "results" / "test.json").read_text())
    assert list(record["cells"]) == ["s135-4-1-512"]
    turns = record["cells"]["s135-4-1-512"]["turns"]
    assert list(turns) == ["chairlift"] and len(turns["chairlift"]) >= 3
    assert turns["chairlift"][0]["output_tokens"] == 64
    assert record["left_out"] == {
        "openvino 4 bits": "it is not installed",
        "vllm 4 bits": "it has no format of 4 bits",
    }
    assert Fake.started == 1
    table.main()
    assert Fake.started == 1, "a finished cell is not measured again"


def test_an_engine_that_ends_in_a_turn_is_left_out_and_the_others_go_on(table: Any, tmp_path: Path) -> None:
    ends = "print('READY {}', flush=True); input()"
    (tmp_path / "work").mkdir()
    children = [
        table.Child(name, [sys.executable, "-c", program], tmp_path / name)
        for name, program in (("chairlift", ENGINE.format(peers=str(PEERS))), ("vllm", ends))
    ]
    reasons: dict[str, str] = {}
    roof = type("Roof", (), {"bandwidth": 1e10, "peak": 1e12})()
    try:
        turns = table.measure(table.Cell("s135", 4, 1, 512), children, lambda: roof, tmp_path, reasons)
    finally:
        for child in children:
            child.kill()
    assert list(turns) == ["chairlift"] and len(turns["chairlift"]) >= 3
    assert list(reasons) == ["vllm 4 bits"] and "in cell s135-4-1-512" in reasons["vllm 4 bits"]


def test_the_readme_has_the_committed_results(table: Any) -> None:
    page = table.README.read_text()
    assert table.replaced(page, table.BEGIN, table.rendered()) == page
