"""The page of an offline run shows what its record says."""

from __future__ import annotations

import copy
from typing import Any

from chairlift_lab.bench.offline_report import offline_report, run_facts

RUN = {
    "requests": 64,
    "prompt_tokens": 8700,
    "output_tokens": 6415,
    "seconds": 20.0,
    "output_tokens_per_second": 320.75,
    "steps": 404,
    "time_to_first_token": {"p50": 0.25, "p99": 3.5},
    "latency": {"p50": 7.0, "p99": 19.0},
    "preemptions": 3,
    "held_row_tokens": 0,
    "padding_avoided": 484,
}
STATIC = RUN | {"seconds": 50.0, "output_tokens_per_second": 128.3, "held_row_tokens": 11_323}
RECORD: dict[str, Any] = {
    "chairlift": "0.7.0",
    "benchmark": "offline",
    "machine": {
        "cpu": "a <cpu>",
        "flags": ["avx2"],
        "processors": 2,
        "l3_bytes": 32 << 20,
        "system": "Linux",
        "busy": 0.04,
    },
    "model": "org/model",
    "kernels": "avx512_bf16",
    "settings": {"scheduler": {"batching": "continuous", "max_num_seqs": 128}, "cache": {"block_size": 16}},
    "workload": {"seed": 7},
    "shortened": 0,
    "result": RUN,
    "baseline": STATIC,
    "limits": {
        "read_bytes": [{"threads": 2, "best": 45e9, "median": 44e9}],
        "product_operations": [{"isa": "amx", "product": "bf16", "threads": 2, "best": 1.05e12, "median": 1e12}],
    },
    "floor": {"seconds": 16.0, "steps": 300, "token_budget": 256, "share": 0.8},
}


def test_the_time_in_which_processes_waited_is_shown() -> None:
    assert "processes" not in run_facts(RUN)
    assert run_facts(RUN | {"collective_seconds": 1.5})["processes"] == "waited for each other for 7.5% of the time"


def test_the_page_shows_engine_static_batches_floor_and_machine() -> None:
    page = offline_report(RECORD).html()
    ratio = "2.50 times the rate of static batches in one run each"
    lead = f"320.8 output tokens per second, {ratio}, 80% of the maximum of this machine"
    assert f'<p class="lead">{lead}.</p>' in page
    for shown in ("20.00 s", "250 ms", "11,323", "16.00 s", "400.9", "45.0", "a &lt;cpu&gt;, 2 in use", "128", "0.7.0"):
        assert f">{shown}<" in page, shown
    assert page.count("<svg") == 2 and "not idle" not in page
    assert "not idle" in offline_report(RECORD | {"machine": RECORD["machine"] | {"busy": 0.5}}).html()


def test_the_page_of_a_run_without_baseline_and_floor_leaves_them_out() -> None:
    record = copy.deepcopy(RECORD) | {
        "baseline": None,
        "limits": None,
        "floor": {"not_measured": "kernels is 'torch'"},
        "shortened": 5,
    }
    del record["chairlift"]
    page = offline_report(record).html()
    assert "320.8 output tokens per second.</p>" in page
    assert "The floor was not measured: kernels is &#x27;torch&#x27;." in page
    assert "<dt>shortened to fit</dt><dd>5</dd>" in page and "static batches</th>" not in page
