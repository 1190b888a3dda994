"""The load of experts: even and uneven ones differ, old tokens are forgotten, and a model with experts reports it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from chairlift import LLM, SamplingParams
from chairlift.engine.expert_load import ExpertLoad
from chairlift.engine.step_recorder import StepRecorder
from tests.models.tiny import tiny_hf_model
from tests.native import needs_kernels


def test_the_load_of_each_layers_experts_is_measured() -> None:
    counts = np.zeros((3, 4), dtype=np.int64)
    load = ExpertLoad(counts)
    load.read(0.0)
    assert (load.imbalance, load.number) == ([], 0), "nothing was computed"
    counts += np.array([[5, 5, 5, 5], [0, 20, 0, 0], [8, 4, 4, 4]])
    load.read(1.0)
    assert (load.imbalance, load.number) == ([1.0, 4.0, 1.6], 1)
    assert load.loads() == [[1.0] * 4, [0.0, 4.0, 0.0, 0.0], [1.6, 0.8, 0.8, 0.8]]


def test_tokens_before_the_interval_do_not_count() -> None:
    """Counts of the first run, at load, are left out."""
    counts = np.array([[90, 0]])
    load = ExpertLoad(counts)
    counts += np.array([[1, 3]])
    load.read(0.0)
    assert load.loads() == [[0.5, 1.5]]


def test_counts_are_read_once_per_second_and_old_ones_are_forgotten() -> None:
    counts = np.zeros((1, 2), dtype=np.int64)
    load = ExpertLoad(counts)
    counts += np.array([[10, 0]])
    load.read(5.0)
    counts += np.array([[0, 10]])
    load.read(5.9)
    assert (load.imbalance, load.number) == ([2.0], 1), "less than a second later"
    load.read(15.0)
    kept = 10 * np.exp(-1.0)
    assert load.imbalance == [pytest.approx(2 * 10 / (10 + kept), abs=0.001)]
    load.read(99.0)
    assert load.number == 2, "nothing new: what was known stays"


@needs_kernels
def test_a_model_with_experts_reports_their_load(tmp_path: Path) -> None:
    """Each layer with its own counts, in the statistics and in the lines of the live view."""
    llm = LLM(str(tiny_hf_model(tmp_path, "qwen3_moe")), dtype="float32", skip_tokenizer_init=True)
    core = llm.engine.core
    recorder = StepRecorder(core)
    llm.generate([[1, 2, 3, 4, 5]] * 2, SamplingParams(max_tokens=4, ignore_eos=True, temperature=0.0))
    imbalance = core.stats().expert_imbalance
    lines = [json.loads(line) for line in recorder.take().splitlines()]
    assert core.expert_load is not None
    loads = core.expert_load.loads()
    assert len(imbalance) == len(loads) == len(core.executor.expert_counts) > 1
    for layer, (most, row) in enumerate(zip(imbalance, loads, strict=True)):
        assert len(row) == 6
        assert 1.0 <= most <= 6.0 / 3, f"layer {layer}: at most all tokens, of three experts each, pass one"
        assert sum(row) == pytest.approx(6.0, abs=0.05)
    assert [line["experts"] for line in lines if "experts" in line] == []
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=1))
    lines = [json.loads(line) for line in recorder.take().splitlines()]
    assert [line["experts"] for line in lines if "experts" in line] == [loads]
