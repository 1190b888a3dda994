"""``bench presets``: the same requests under each preset, in one table that begins with static batches."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from chairlift.base.presets import BASELINE
from chairlift.engine.step_log import StepRecord
from chairlift_lab.bench.report import Table
from chairlift_lab.bench.serve_result import Figures
from chairlift_lab.bench.verdict import Ratio, RatioEstimate, RunSample, disturbance
from chairlift_lab.replay.traced_request import TracedRequest
from chairlift_lab.workload.lengths import LogNormal

__all__ = [
    "ANSWERS",
    "PROMPTS",
    "Measured",
    "PresetRun",
    "preset_record",
    "preset_table",
    "preset_words",
    "requests_of",
]

PROMPTS: Final = LogNormal(3.5, 0.8, 4, 160)
ANSWERS: Final = LogNormal(3.8, 0.9, 4, 320)
"""Lengths in tokens. Most answers are short and a few are long, as in chats; the longest request has 480 tokens."""
_MAIN: Final = "orca"
"""Preset that is compared with the baseline in words: it differs from static batches in the batching alone."""


@dataclasses.dataclass(frozen=True, slots=True)
class PresetRun:
    """Results of one run."""

    output_throughput: float
    """Output tokens per second."""
    seconds: float
    busy: float
    """Share of this machine that other programs used."""
    latency_p50_ms: float
    latency_p99_ms: float
    ttft_p99_ms: float
    preemption_rate: float
    """Fraction of the requests that were preempted at least once."""
    held_share: float
    """Fraction of the computed decode rows that had ended but stayed in their static batch."""
    rows: float
    """Mean number of rows in a step, held rows included."""
    steps: int
    failed: int

    @classmethod
    def of(cls, figures: Figures, steps: Sequence[StepRecord]) -> PresetRun:
        """Results of a run with the measured ``figures`` and the records of its steps."""
        decodes = sum(len(record.decodes) for record in steps)
        ttft = figures.times["ttft"]
        whole = figures.times["e2el"]
        return cls(
            output_throughput=figures.output_throughput,
            seconds=figures.seconds,
            busy=figures.busy,
            latency_p50_ms=whole.p50 if whole else 0.0,
            latency_p99_ms=whole.p99 if whole else 0.0,
            ttft_p99_ms=ttft.p99 if ttft else 0.0,
            preemption_rate=figures.preemption_rate or 0.0,
            held_share=sum(record.num_held for record in steps) / decodes if decodes else 0.0,
            rows=sum(len(record.decodes) + len(record.chunks) for record in steps) / max(1, len(steps)),
            steps=len(steps),
            failed=figures.failed,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """A preset and its runs, one per round."""

    name: str
    settings: Mapping[str, Any]
    """Settings of the engine by name, as far as they differ from the defaults or come from the preset."""
    runs: Sequence[PresetRun]

    def median(self, value: Callable[[PresetRun], float]) -> float:
        """Median of a value over the rounds."""
        return statistics.median(map(value, self.runs))

    def samples(self, value: Callable[[PresetRun], float]) -> list[RunSample]:
        """Values of all runs, with the circumstances of the runs."""
        return [RunSample(value(run), run.seconds, run.busy) for run in self.runs]


def requests_of(count: int, seed: int) -> list[TracedRequest]:
    """Requests that all arrive at once, with log-normal lengths. Equal arguments give equal requests."""
    rng = np.random.default_rng(seed)
    lengths = zip(PROMPTS.draw(rng, count), ANSWERS.draw(rng, count), strict=True)
    return [TracedRequest(arrival=0.0, prompt_tokens=prompt, output_tokens=output) for prompt, output in lengths]


def _throughput(run: PresetRun) -> float:
    return run.output_throughput


def _ratio(ours: Measured, baseline: Measured, value: Callable[[PresetRun], float] = _throughput) -> Ratio:
    return Ratio.of(ours.samples(value), baseline.samples(value))


def preset_table(presets: Sequence[Measured], conditions: str) -> Table:
    """Table with one row per preset; the first preset is the baseline. ``conditions`` says what all runs share."""
    baseline = presets[0]
    rows = []
    for each in presets:
        ratio = _ratio(each, baseline)
        compared = ["1", ""] if each is baseline else [f"{ratio.ratio:.2f}", f"{ratio.low:.2f} to {ratio.high:.2f}"]
        times = [each.median(lambda run: run.latency_p50_ms), each.median(lambda run: run.latency_p99_ms)]
        times.append(each.median(lambda run: run.ttft_p99_ms))
        shares = [each.median(lambda run: run.preemption_rate), each.median(lambda run: run.held_share)]
        row = [each.name, f"{each.median(_throughput):,.0f}", *compared, *(f"{time:,.0f}" for time in times)]
        batch = [f"{each.median(lambda run: run.rows):.1f}", f"{each.median(lambda run: run.steps):,.0f}"]
        rows.append([*row, *(f"{share:.1%}" for share in shares), *batch])
    rounds = max(len(each.runs) for each in presets)
    header = ["", "tokens/s", f"/ {baseline.name}", "interval", "latency p50", "p99", "TTFT p99", "preempted"]
    caption = f"{conditions}; times in ms; medians of {rounds} round{'s' * (rounds != 1)}"
    return Table([*header, "held rows", "rows", "steps"], rows, caption)


def preset_words(presets: Sequence[Measured]) -> list[str]:
    """Sentences that compare the most important preset with the baseline, count the presets that are faster, and say
    how busy the machine was."""
    baseline, *others = presets
    words = []
    if others:
        main = next((each for each in others if each.name == _MAIN), others[0])
        for what, value in (("throughput", _throughput), ("p99 latency", lambda run: run.latency_p99_ms)):
            words.append(_ratio(main, baseline, value).sentence(main.name, what, baseline.name))
        ratios = [_ratio(each, baseline) for each in others]
        faster = sum(ratio.larger for ratio in ratios)
        if not any(ratio.doubt for ratio in ratios):
            words.append(f"{faster} of {len(others)} presets are faster than {baseline.name}, beyond the noise.")
    words.append(disturbance([run.busy for each in presets for run in each.runs]))
    return words


def preset_record(presets: Sequence[Measured]) -> dict[str, Any]:
    """Results as plain data: preset -> settings, estimates and runs."""
    baseline = presets[0]
    return {
        each.name: {
            "settings": dict(each.settings),
            "output_throughput": dataclasses.asdict(RatioEstimate.of(each.samples(_throughput))),
            f"ratio_to_{BASELINE}": dataclasses.asdict(_ratio(each, baseline)),
            "runs": [dataclasses.asdict(run) for run in each.runs],
        }
        for each in presets
    }
