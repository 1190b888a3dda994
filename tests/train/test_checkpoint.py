"""A checkpoint is there whole or not at all, and what goes on from it is the same run."""

from __future__ import annotations

import json
import random
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from chairlift.errors import ConfigError
from chairlift.models.causal_lm import CausalLM
from chairlift.models.hf_config import parse_config
from chairlift.models.random_weights import random_model
from chairlift_train.checkpoint import CheckpointStore, ModelFiles, load_state, random_state, set_random_state
from chairlift_train.config import TrainConfig
from chairlift_train.run import train
from chairlift_train.trainer import Trainer, TrainingStepResult
from tests.train import tiny_run


@pytest.fixture(scope="module")
def model() -> CausalLM:
    return random_model(parse_config(tiny_run.MODEL), "float32")


FILES = ModelFiles(config=tiny_run.MODEL, dtype=torch.float32)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
    ),
    max_leaves=8,
)


def roundtrip(model: CausalLM, folder: Path, state: dict[str, Any]) -> dict[str, Any]:
    return load_state(CheckpointStore(folder).save(1, state, model, FILES))


@settings(max_examples=20, deadline=None)
@given(state=st.dictionaries(st.text(max_size=4), PLAIN, max_size=4))
def test_plain_state_comes_back_as_it_was(
    model: CausalLM, tmp_path_factory: pytest.TempPathFactory, state: dict[str, Any]
) -> None:
    assert roundtrip(model, tmp_path_factory.mktemp("state"), {"kept": state}) == {"kept": state}


def test_arrays_tensors_and_marked_keys_come_back(model: CausalLM, tmp_path: Path) -> None:
    state = {
        "ids": [np.arange(3), np.zeros(0, np.float32), np.array([True, False]), np.int64(7)],
        "moments": {"a.b": torch.full((2, 2), 0.1), "step": torch.tensor(3.0)},
        "odd": {"__kind__": "tensor", "name": "no such"},
    }
    back = roundtrip(model, tmp_path, state)
    for mine, theirs in zip(state["ids"], back["ids"], strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert [array.dtype for array in back["ids"][:3]] == [np.int64, np.float32, np.bool_]
    assert torch.equal(back["moments"]["a.b"], state["moments"]["a.b"])  # type: ignore[call-overload]
    assert back["moments"]["step"] == 3.0
    assert back["odd"] == state["odd"]
    with pytest.raises(ConfigError, match=r"state\.source\.x .* is a set"):
        roundtrip(model, tmp_path, {"source": {"x": {1, 2}}})


def test_a_model_that_began_quantised_is_saved_as_floats(model: CausalLM, tmp_path: Path) -> None:
    files = ModelFiles(config={**tiny_run.MODEL, "quantization_config": {"quant_method": "gptq"}}, dtype=torch.float32)
    saved = CheckpointStore(tmp_path).save(1, {}, model, files)
    assert "quantization_config" not in (saved / "config.json").read_text()


def test_random_generators_go_on(model: CausalLM, tmp_path: Path) -> None:
    kept = roundtrip(model, tmp_path, random_state())
    first = random.random(), np.random.rand(), torch.rand(()).item()
    assert (random.random(), np.random.rand(), torch.rand(()).item()) != first
    set_random_state(kept)
    assert (random.random(), np.random.rand(), torch.rand(()).item()) == first


def test_the_newest_checkpoints_are_kept_and_half_written_ones_ignored(model: CausalLM, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for step in (1, 2, 3):
        store.save(step, {"step": step}, model, FILES)
    assert [path.name for path in store.all()] == ["step-00000002", "step-00000003"]
    for point in ("written", "flushed"):

        def fail(name: str, at: str = point) -> None:
            if name == at:
                raise OSError("the disk is full")

        with pytest.raises(OSError, match="disk"):
            CheckpointStore(tmp_path, keep=2, at=fail).save(4, {"step": 4}, model, FILES)
        assert store.latest() == tmp_path / "step-00000003"
    assert load_state(store.save(4, {"step": 4}, model, FILES)) == {"step": 4}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000004"]


def test_a_full_disk_is_reported_as_a_full_disk(model: CausalLM, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save(1, {}, model, FILES)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))  # a file that grows beyond it is refused
    try:
        with pytest.raises(OSError, match=r"step-00000002\.partial cannot be written .*; make room there"):
            store.save(2, {}, model, FILES)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert store.latest() == tmp_path / "step-00000001"


@pytest.mark.parametrize("name", [".step-00000007.partial", ".step-00000003.removed", ".step-00000001.removed"])
def test_leftovers_of_a_killed_process_are_removed(model: CausalLM, tmp_path: Path, name: str) -> None:
    (tmp_path / name / "training").mkdir(parents=True)
    (tmp_path / name / "training" / "state.safetensors").write_bytes(b"half")
    store = CheckpointStore(tmp_path, keep=1)
    store.save(1, {}, model, FILES)
    store.save(2, {}, model, FILES)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


def test_saving_a_step_again_replaces_it(model: CausalLM, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save(1, {"which": "first"}, model, FILES)
    assert load_state(store.save(1, {"which": "second"}, model, FILES)) == {"which": "second"}
    assert len(list(tmp_path.iterdir())) == 1


def test_damage_is_told_in_a_sentence(model: CausalLM, tmp_path: Path) -> None:
    saved = CheckpointStore(tmp_path).save(1, {"a": torch.ones(100)}, model, FILES)
    file = saved / "training" / "state.safetensors"
    file.write_bytes(file.read_bytes()[:-50])
    with pytest.raises(ConfigError, match=r"is damaged .* earlier one"):
        load_state(saved)
    with pytest.raises(ConfigError, match="no checkpoint"):
        load_state(tmp_path)


@pytest.mark.parametrize("name", ["state.safetensors", "state.json"])
def test_a_flipped_bit_is_noticed(model: CausalLM, tmp_path: Path, name: str) -> None:
    saved = CheckpointStore(tmp_path).save(1, {"a": torch.ones(100), "steps": 4}, model, FILES)
    whole = (saved / "training" / name).read_bytes()
    flipped = bytearray(whole)
    flipped[-3] ^= 1  # of the last number
    (saved / "training" / name).write_bytes(flipped)
    with pytest.raises(ConfigError, match=r"is damaged \(its training/ is not what was written.* earlier one"):
        load_state(saved)
    (saved / "training" / name).write_bytes(whole)
    assert load_state(saved)["steps"] == 4


def test_json_that_is_no_state_is_told_in_a_sentence(model: CausalLM, tmp_path: Path) -> None:
    saved = CheckpointStore(tmp_path).save(1, {}, model, FILES)
    (saved / "training" / "SHA256SUMS").unlink()  # as before there was one
    for text in ('{"a": {"__kind__": 3}}', "[" * 100_000, "null"):
        (saved / "training" / "state.json").write_text(text)
        with pytest.raises(ConfigError, match=r"is damaged.* earlier one"):
            load_state(saved)


class Dice:
    """Without a state of its own: it draws from the generators that everybody shares."""

    def __iter__(self) -> Dice:
        return self

    def __next__(self) -> list[int]:
        return [random.randrange(tiny_run.VOCAB), np.random.randint(tiny_run.VOCAB), int(torch.randint(9, ()))]

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


def test_a_source_may_draw_from_the_shared_generators(tmp_path: Path) -> None:
    def losses(name: str, stop: int = 0) -> list[float]:
        raw = tiny_run.settings(tmp_path, steps=6) | {"data": {"source": f"{__name__}:Dice"}}
        seen: list[float] = []

        def on_step(result: TrainingStepResult, trainer: Trainer) -> None:
            seen.append(result.loss)
            trainer.stop_requested = len(seen) == stop

        outcome = train(TrainConfig.from_mapping(raw | {"output": str(tmp_path / name)}), on_step=on_step)
        assert outcome.finished is not bool(stop)
        return seen

    whole = losses("whole")
    assert len(whole) == 6
    assert losses("stopped", stop=2) + losses("stopped") == whole


@pytest.mark.full
def test_a_run_that_is_killed_three_times_ends_as_if_it_never_was(tmp_path: Path) -> None:
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    for folder in (killed, whole):
        folder.mkdir()
        tiny_run.write_records(folder / "data.jsonl")
    deaths = [("written", "2"), ("step", "5"), ("flushed", "3")]  # in a save, between two, before the rename
    reached = []
    for death in [*deaths, ("never", "0")]:
        command = [sys.executable, "-m", "tests.train.tiny_run", str(killed), *death]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == (0 if death[0] == "never" else -signal.SIGKILL), done.stderr
        newest = CheckpointStore(killed / "out").latest()
        reached.append("" if newest is None else newest.name[-2:])
    assert reached == ["02", "04", "08", "12"]
    outcome = train(TrainConfig.from_mapping(tiny_run.settings(whole)))
    assert outcome.finished
    mine, theirs = (folder / "out" / "step-00000012" for folder in (whole, killed))
    for name in ("model.safetensors", "training/state.safetensors"):
        a, b = load_file(mine / name), load_file(theirs / name)
        assert a.keys() == b.keys()
        assert [key for key in a if not torch.equal(a[key], b[key])] == []
    a, b = (json.loads((folder / "training" / "state.json").read_text()) for folder in (mine, theirs))
    assert a["trainer"] == b["trainer"]
