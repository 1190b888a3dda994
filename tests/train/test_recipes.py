"""The recipes of ``examples/``: what they reach, and that a run killed anywhere ends with the same bits."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from chairlift_train.checkpoint import CheckpointStore
from tests.train import recipe_run


@pytest.mark.nightly
@pytest.mark.parametrize("recipe", ["train", "pretrain"])
def test_a_recipe_killed_at_20_random_points_ends_with_the_same_bits(recipe: str, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    rng = random.Random(recipe)
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    for folder in (killed, whole):
        folder.mkdir()
        recipe_run.write_data(folder)
    deaths: Counter[str] = Counter()
    while deaths.total() < 20:
        point = rng.choice(recipe_run.POINTS)
        count = rng.randint(1, 8) if point in ("forward", "backward") else rng.randint(1, 2)
        done = _go_on(recipe, killed, point, count)
        assert done.returncode == -signal.SIGKILL, f"{point} {count}: {done.stderr}"
        deaths[point] += 1
    assert len(deaths) >= 4
    newest = CheckpointStore(killed / recipe).latest()
    assert newest is None or newest.name < f"step-{recipe_run.STEPS:08d}"
    done = _go_on(recipe, killed, "never", 0)
    assert done.returncode == 0, done.stderr
    done = _go_on(recipe, whole, "never", 0)
    assert done.returncode == 0, done.stderr
    mine, theirs = (folder / recipe / f"step-{recipe_run.STEPS:08d}" for folder in (whole, killed))
    for name in ("model.safetensors", "training/state.safetensors"):
        a, b = load_file(mine / name), load_file(theirs / name)
        assert a.keys() == b.keys()
        assert [key for key in a if not torch.equal(a[key], b[key])] == []
    states = [json.loads((each / "training" / "state.json").read_text()) for each in (mine, theirs)]
    assert states[0]["trainer"] == states[1]["trainer"]
    if recipe == "pretrain":
        evaluations = [(folder / recipe / "evaluations.jsonl").read_text() for folder in (whole, killed)]
        assert evaluations[0] == evaluations[1]


def _go_on(recipe: str, folder: Path, point: str, count: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.train.recipe_run", str(folder), recipe, point, str(count)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


@pytest.mark.nightly
@pytest.mark.parametrize("recipe", ["train", "pretrain"])
def test_a_recipe_learns_its_data(recipe: str, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    from chairlift_train.run import train

    recipe_run.write_data(tmp_path)
    losses: list[float] = []
    train(recipe_run.config_of(recipe, tmp_path), on_step=lambda result, _: losses.append(result.loss))
    assert len(losses) == recipe_run.STEPS
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
