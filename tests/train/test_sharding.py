"""Training with sharded weights equals training in one process, also if ranks have different numbers of packs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from chairlift.errors import ConfigError
from chairlift_train.config import TrainConfig
from chairlift_train.run import prepare
from tests.free_port import free_port
from tests.train import tiny_run
from tests.train.sharded_run import steps, trainer_of
from tests.train.test_hf_network import error
from tests.train.test_trainer import gradients


def two(module: str, *arguments: str, timeout: float = 600.0) -> None:
    """Run ``python -m MODULE`` as two ranks, for at most ``timeout`` seconds."""
    where = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    where["MASTER_PORT"] = str(free_port())
    command = [sys.executable, "-m", module, *arguments]
    both = [
        subprocess.Popen(
            command, env=where | {"RANK": rank, "LOCAL_RANK": rank}, stderr=subprocess.PIPE, stdout=subprocess.PIPE
        )
        for rank in "01"
    ]
    try:
        errors = [process.communicate(timeout=timeout)[1].decode() for process in both]
    finally:
        for process in both:
            process.kill()
            process.communicate()
    assert [process.returncode for process in both] == [0, 0], "".join(errors)[-3000:]


NIGHTLY = ("native-recomputed", "native-whole", "foreign", "foreign-recomputed")


@pytest.mark.parametrize("case", ["native", *(pytest.param(case, marks=pytest.mark.nightly) for case in NIGHTLY)])
def test_two_ranks_with_unequal_packs_learn_what_one_learns(case: str, tmp_path: Path) -> None:
    two("tests.train.sharded_run", str(tmp_path), case)
    compare(load_file(tmp_path / "found.safetensors"), case)


@pytest.mark.planted("test_two_ranks_with_unequal_packs_learn_what_one_learns")
@pytest.mark.nightly
@pytest.mark.parametrize(
    ("case", "mutant"),
    [
        *(("native", name) for name in ("loss mean per rank", "loss mean per pack", "sharded gradient averaged")),
        *(("native", name) for name in ("clipping norm per rank", "one shard saved")),
        *(("native-whole", name) for name in ("loss mean per rank", "gradients of one rank")),
    ],
)
def test_a_mistake_in_training_on_two_ranks_is_found(case: str, mutant: str, tmp_path: Path) -> None:
    two("tests.train.sharded_run", str(tmp_path), case, mutant)
    with pytest.raises(AssertionError):
        compare(load_file(tmp_path / "found.safetensors"), case)


@pytest.mark.planted("test_two_ranks_with_unequal_packs_learn_what_one_learns")
@pytest.mark.nightly
@pytest.mark.parametrize("mutant", ["a rank leaves early", "sharded model saved"])
def test_a_mistake_that_ends_a_run_on_two_ranks_is_found(mutant: str, tmp_path: Path) -> None:
    with pytest.raises((AssertionError, subprocess.TimeoutExpired)):
        two("tests.train.sharded_run", str(tmp_path), "native", mutant, timeout=60.0)


def compare(found: dict[str, torch.Tensor], case: str) -> None:
    """Demand that two ranks have found what one rank finds."""
    trainer = trainer_of(case)
    expected = []
    for packs in steps():
        result = trainer.step(packs)
        expected.append([result.loss, result.grad_norm, float(result.num_packs)])
        if result.step == 1:  # the weights of the second step differ by rounding
            first = {name: found[f"step 1.{name}"] for name in trainer._parameters}
            assert error(first, gradients(trainer.model)) < 3e-6
    assert [row[2] for row in expected] == [3.0, 3.0]
    torch.testing.assert_close(found["results"], torch.tensor(expected), rtol=1e-5, atol=0.0)
    for name, parameter in trainer._parameters.items():
        assert parameter.grad is not None
        distance = (found[f"step 2.{name}"] - parameter.grad).norm()
        assert distance < 1e-5 * parameter.grad.norm() + 1e-9, name
        torch.testing.assert_close(found[f"weights.{name}"], parameter.detach(), rtol=1e-4, atol=1e-6)
        assert torch.equal(found[f"state.{name}"], found[f"weights.{name}"]), name
        moment = trainer.optimizer.state[parameter]["exp_avg"]
        assert found[f"moment.{name}"].shape == moment.shape
        assert (found[f"moment.{name}"] - moment).norm() < 1e-5 * moment.norm() + 1e-9, name
    for name, parameter in trainer.model.named_parameters():
        assert found[f"model.{name}"].shape == parameter.shape, name
        torch.testing.assert_close(found[f"model.{name}"], parameter.detach(), rtol=1e-4, atol=1e-6)


@pytest.mark.nightly
def test_a_divided_run_goes_on_bit_for_bit_and_serves(tmp_path: Path) -> None:
    import yaml

    tiny_run.write_records(tmp_path / "data.jsonl")
    raw = tiny_run.settings(tmp_path, steps=6, sharding="fsdp") | {"threads": 1}
    raw["packing"]["step"] = "packs:4"  # steps of a number of sequences end at a whole row of packs, one per rank
    raw["data"]["eval_files"] = {"held": [str(tmp_path / "data.jsonl")]}

    def run(name: str, steps: int, processes: int = 2) -> Path:
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(raw | {"output": str(tmp_path / name)}))
        arguments = ["train", str(path), "--quiet", "--set", "training.schedule=constant", "--set"]
        command = [sys.executable, "-m", "chairlift", *arguments, f"training.steps={steps}"]
        done = subprocess.run([*command, "--processes", str(processes)], capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        return tmp_path / name / f"step-{steps:08d}"

    whole = run("whole", 6)
    run("parts", 3)
    resumed = run("parts", 6)
    for name in ("model.safetensors", "training/state.safetensors"):
        mine, theirs = load_file(whole / name), load_file(resumed / name)
        assert mine.keys() == theirs.keys()
        assert [key for key in mine if not torch.equal(mine[key], theirs[key])] == []
    run("one", 3, processes=1)
    one = load_file(run("one", 6) / "model.safetensors")
    for name, value in load_file(whole / "model.safetensors").items():
        torch.testing.assert_close(one[name], value, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"training": {"balance_loss": 0.1}}, "training.balance_loss"),
        ({"training": {"optimizer": "adamw8bit"}}, "training.optimizer adamw8bit"),
        ({"lora": {"r": 2}}, "lora"),
    ],
)
def test_settings_that_contradict_divided_weights_are_refused(
    changes: dict[str, Any], named: str, tmp_path: Path
) -> None:
    tiny_run.write_records(tmp_path / "data.jsonl")
    raw = tiny_run.settings(tmp_path, sharding="fsdp", **changes.pop("training", {})) | changes
    if "lora" in raw:
        raw["model"] = {"path": "chairlift/assets"}
    with pytest.raises(ConfigError, match=f"sharding fsdp does not go with {named}"):
        prepare(TrainConfig.from_mapping(raw))
