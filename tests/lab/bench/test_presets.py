"""``bench presets``: its requests, its claims, and the picture of a batch."""

from __future__ import annotations

import dataclasses
import itertools
import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest

from chairlift.config import EngineConfig
from chairlift_lab.bench.batch_picture import Panel, PictureRecorder, RowSpan, spans_of, svg_lines, text_lines
from chairlift_lab.bench.presets import (
    Measured,
    PresetRun,
    preset_record,
    preset_table,
    preset_words,
    requests_of,
)
from chairlift_lab.bench.report import text
from chairlift_lab.replay.machines import Deployment, deploy, shape_from_name
from chairlift_lab.replay.replay import serve_trace, simulated_core

FAST = PresetRun(
    output_throughput=300.0,
    seconds=2.0,
    busy=0.0,
    latency_p50_ms=40.0,
    latency_p99_ms=90.0,
    ttft_p99_ms=70.0,
    preemption_rate=0.125,
    held_share=0.0,
    rows=11.5,
    steps=100,
    failed=0,
)
SLOW = dataclasses.replace(FAST, output_throughput=100.0, latency_p99_ms=180.0, preemption_rate=0.0, held_share=0.6)


@pytest.fixture(scope="module")
def machine() -> Deployment:
    return deploy("turin-9755", shape_from_name("qwen2.5-0.5b"))


def simulated(machine: Deployment, **settings: Any) -> tuple[PictureRecorder, float]:
    """Records of all steps of a simulated run, and its duration. It begins at 0."""
    core, limits = simulated_core(machine, EngineConfig.from_flat({"max_num_seqs": 4, **settings}))
    recorder = PictureRecorder()
    core.events.subscribe("test", recorder)
    served = serve_trace(core, requests_of(24, 1), limits)
    return recorder, served.seconds


def test_equal_seeds_give_equal_requests_and_most_answers_are_short() -> None:
    requests = requests_of(500, 3)
    assert requests == requests_of(500, 3) != requests_of(500, 4)
    outputs = sorted(request.output_tokens for request in requests)
    assert outputs[0] >= 4 and outputs[-1] <= 320
    assert outputs[250] < 0.75 * sum(outputs) / 500
    assert max(request.prompt_tokens + request.output_tokens for request in requests) <= 480


@pytest.mark.parametrize("preset", ["static", "triton-dynamic", "orca", "vllm", "sglang"])
def test_the_picture_shows_every_token_and_every_held_row_once(machine: Deployment, preset: str) -> None:
    recorder, seconds = simulated(machine, preset=preset, num_kv_blocks=40)
    wanted = {str(index): request.output_tokens for index, request in enumerate(requests_of(24, 1))}
    one_by_one = [span for record in recorder.steps for span in spans_of([record], wanted, 0.0)]
    spans = spans_of(recorder.steps, wanted, 0.0)
    assert {span.request_id for span in spans} == set(wanted)
    assert {span.slot for span in spans} <= set(range(4))
    assert len(spans) < len(one_by_one)
    assert all(0 <= span.begin < span.end <= seconds + 1e-9 for span in spans)
    for slot in range(4):
        own = [span for span in spans if span.slot == slot]
        assert all(one.end <= other.begin + 1e-9 for one, other in itertools.pairwise(own))
    held = sum(record.num_held for record in recorder.steps)
    assert bool(held) == (preset == "static") == any(span.kind == "held" for span in spans)


def test_held_rows_are_those_that_the_engine_counts(machine: Deployment) -> None:
    recorder, _ = simulated(machine, preset="static")
    wanted = {str(index): request.output_tokens for index, request in enumerate(requests_of(24, 1))}
    done = 0
    for place, record in enumerate(recorder.steps):
        spans = spans_of(recorder.steps[: place + 1], wanted, 0.0)
        held = sum(span.kind == "held" and span.end == record.end for span in spans)
        assert held == record.num_held
        done += held
        if place == 300:
            break
    assert done > 100


def test_the_picture_as_text_shows_each_row_over_time() -> None:
    spans = [
        RowSpan(0, "a", "prompt", 0.0, 1.0),
        RowSpan(0, "a", "decode", 1.0, 2.0),
        RowSpan(1, "b", "decode", 0.0, 1.0),
    ]
    slow = [*spans, RowSpan(1, "b", "held", 1.0, 4.0)]
    panels = [Panel("fast", spans, 3, 2.0), Panel("slow", slow, 3, 4.0)]
    assert list(text_lines(panels, 8, most_rows=2)) == [
        *("fast (the first 2 of 3 rows)", "████", "██", ""),
        *("slow (the first 2 of 3 rows)", "████", "██░░░░░░", ""),
        "each line is a row of the batch over 4.00 s; █ computes, ░ has ended",
    ]
    ascii_lines = list(text_lines(panels, 8, fine=False))
    assert ascii_lines[6:8] == ["####", "##------"] and ascii_lines[8] == ""
    assert all(line.isascii() for line in ascii_lines)


def test_the_picture_as_svg_shows_each_row_over_time(machine: Deployment) -> None:
    recorder, seconds = simulated(machine, preset="static")
    wanted = {str(index): request.output_tokens for index, request in enumerate(requests_of(24, 1))}
    panel = Panel("static & <more>", spans_of(recorder.steps, wanted, 0.0), 4, seconds)
    root = ElementTree.fromstring("\n".join(svg_lines([panel, panel])))
    space = "{http://www.w3.org/2000/svg}"
    assert [each.get("class") for each in root.iter(f"{space}path")].count("held") == 2
    assert [each.text for each in root.iter(f"{space}text")].count("static & <more>") == 2
    boxes = [float(each.get("x") or 0) + float(each.get("width") or 0) for each in root.iter(f"{space}rect")]
    assert max(boxes) <= 960


def test_a_picture_explains_only_what_it_shows() -> None:
    answered = Panel("a", [RowSpan(0, "r", "prompt", 0.0, 1.0), RowSpan(0, "r", "decode", 1.0, 2.0)], 1, 2.0)
    held = Panel("b", [RowSpan(0, "r", "held", 0.0, 1.0)], 1, 2.0)
    for panels, shown in (([answered], False), ([answered, held], True)):
        assert ("ended, but computed" in "".join(svg_lines(panels))) == shown
        assert ("has ended" in list(text_lines(panels, 8))[-1]) == shown
    assert ">answer<" not in "".join(svg_lines([held]))


def test_the_table_begins_with_the_baseline_and_claims_need_rounds() -> None:
    presets = [Measured("static", {}, [SLOW] * 6), Measured("orca", {}, [FAST] * 6)]
    caption, header, *rows = text(preset_table(presets, "12 requests"))
    assert caption == "12 requests; times in ms; medians of 6 rounds"
    assert header.split()[:3] == ["tokens/s", "/", "static"]
    assert rows[0].split() == ["static", "100", "1", "40", "180", "70", "0.0%", "60.0%", "11.5", "100"]
    assert rows[1].split()[:6] == ["orca", "300", "3.00", "3.00", "to", "3.00"]
    assert rows[1].split()[6:] == ["40", "90", "70", "12.5%", "0.0%", "11.5", "100"]
    assert preset_words(presets) == [
        "Orca has a higher throughput than static: 3.0 times (3.00 to 3.00 in 6 rounds).",
        "Orca has a lower p99 latency than static: 0.50 times (0.50 to 0.50 in 6 rounds).",
        "1 of 1 presets are faster than static, beyond the noise.",
        "No other program used this machine during the runs.",
    ]
    record = preset_record(presets)
    assert record["orca"]["ratio_to_static"]["ratio"] == pytest.approx(3)
    assert record["static"]["output_throughput"]["median"] == 100
    few = preset_words([Measured("static", {}, [SLOW]), Measured("orca", {}, [FAST])])
    assert "no claim: 6 rounds are needed" in few[0] and not any("faster" in line for line in few)
