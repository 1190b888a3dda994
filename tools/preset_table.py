"""Writes the tables of presets into README.md and docs/presets.md, from a recorded run of ``chairlift bench presets``.

::

    python tools/preset_table.py

The figures come from benchmarks/results/presets.json, and the rules from chairlift/base/presets.py. Each table is
between two comments in its page. A test compares them with the pages.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from chairlift.base.presets import BASELINE, PRESETS
from tools.markdown import replaced, table

ROOT: Final = Path(__file__).resolve().parents[1]
RESULT: Final = ROOT / "benchmarks" / "results" / "presets.json"

_JOIN: Final = {"static": "as whole batches", "dynamic": "as whole batches; each leaves", "continuous": "at every step"}
_PROMPTS: Final = {
    "mixed": "beside answers",
    "separate": "in steps of their own",
    "prefill_first": "first, in steps of their own",
    "auto": "beside or apart, by predicted time",
}
_MEMORY: Final = {"none": "reserved for the longest answer", "recompute": "taken as needed; preempts"}
"""Value of a setting -> its meaning for a reader."""


def _median(preset: Mapping[str, Any], name: str) -> float:
    return statistics.median(run[name] for run in preset["runs"])


def _ratio(preset: Mapping[str, Any]) -> str:
    ratio = preset[f"ratio_to_{BASELINE}"]
    return f"{ratio['ratio']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})"


def short_table(record: Mapping[str, Any]) -> str:
    """Table of rules and the two main results, for the README."""
    rows = []
    for name, preset in record["presets"].items():
        settings = PRESETS[name].settings
        memory = _MEMORY[settings["preemption_mode"]] + "; prefixes cached" * settings["enable_prefix_caching"]
        rules = (_JOIN[settings["batching"]], _PROMPTS[settings["prefill_mode"]], memory)
        ratio = "1" if name == BASELINE else _ratio(preset)
        rows.append((f"`{name}`", *rules, ratio, f"{_median(preset, 'latency_p99_ms') / 1000:.2f} s"))
    header = ("`--preset`", "requests join", "prompts run", "KV memory", f"tokens/s ÷ {BASELINE} (95 %)", "p99 latency")
    return table(header, rows)


def long_table(record: Mapping[str, Any]) -> str:
    """Table of all results, for docs/presets.md."""
    second = record["second_run"]["presets"]
    rows = []
    for name, preset in record["presets"].items():
        again = second[name][f"ratio_to_{BASELINE}"]["ratio"]
        compared = ("1", "1") if name == BASELINE else (_ratio(preset), f"{again:.2f}")
        times = [f"{_median(preset, key) / 1000:.2f}" for key in ("latency_p50_ms", "latency_p99_ms", "ttft_p99_ms")]
        shares = [f"{100 * _median(preset, 'preemption_rate'):.1f} %", f"{100 * _median(preset, 'held_share'):.0f} %"]
        batch = [f"{_median(preset, 'rows'):.1f}", f"{_median(preset, 'steps'):,.0f}"]
        speed = f"{preset['output_throughput']['median']:,.0f}"
        rows.append((f"`{name}`", speed, *compared, *times, *shares, *batch))
    header = ("Preset", "tokens/s", f"ratio to {BASELINE} (95 %)", "second run", "latency p50, s", "p99", "TTFT p99, s")
    return table((*header, "preempted", "held rows", "rows", "steps"), rows)


PAGES: Final[Mapping[str, Callable[[Mapping[str, Any]], str]]] = {
    "README.md": short_table,
    "docs/presets.md": long_table,
}
BEGIN: Final = "<!-- results of presets, made by tools/preset_table.py -->"


def pages() -> dict[str, str]:
    """Name of a page -> its text with the current table."""
    record = json.loads(RESULT.read_text(encoding="utf-8"))
    return {
        name: replaced((ROOT / name).read_text(encoding="utf-8"), BEGIN, make(record)) for name, make in PAGES.items()
    }


def main() -> None:
    """Write the tables into their pages."""
    for name, text in pages().items():
        (ROOT / name).write_text(text)


if __name__ == "__main__":
    main()
