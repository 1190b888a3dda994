"""Lightning's own loop learns from packs what their sequences teach alone, and goes on where it was."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from chairlift.errors import ConfigError
from chairlift_train.lightning_adapter import lightning_module, step_loader
from chairlift_train.stream import PackStream
from chairlift_train.varlen import patch_hf
from tests.train.families import tiny
from tests.train.test_hf_network import alone, error
from tests.train.test_trainer import examples, gradients
from tests.train.training_mutants import MUTANTS


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def fit(model: Any, stream: PackStream, folder: Path, steps: int, checkpoint: Path | None = None) -> Any:
    lightning = pytest.importorskip("lightning")
    trainer = lightning.Trainer(
        max_steps=steps,
        max_epochs=-1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    module = lightning_module(model, sgd, stream, max_grad_norm=None)
    trainer.fit(module, step_loader(stream), ckpt_path=checkpoint)
    return trainer


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_gradients_are_those_of_sequences_alone(tmp_path: Path) -> None:
    model, data = tiny("llama"), examples(9)
    expected = alone(copy.deepcopy(model), data)
    patch_hf(model)
    fit(model, PackStream(data, 60, step="sequences:9"), tmp_path, 1)
    assert error(gradients(model), expected) < 3e-6


@pytest.mark.planted("test_gradients_are_those_of_sequences_alone")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("mutant", ["loss mean per pack", "last pack alone"])
def test_a_mistake_in_the_loop_is_found(mutant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = tiny("llama"), examples(9)
    expected = alone(copy.deepcopy(model), data)
    patch_hf(model)
    MUTANTS[mutant](monkeypatch.setattr)
    fit(model, PackStream(data, 60, step="sequences:9"), tmp_path, 1)
    assert error(gradients(model), expected) > 1e-3


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_run_goes_on_where_its_checkpoint_was_written(tmp_path: Path) -> None:
    def fresh() -> tuple[Any, PackStream]:
        model = tiny("llama")
        patch_hf(model)
        return model, PackStream(examples(40), 64, pool=8, step="sequences:8")

    whole, stream = fresh()
    fit(whole, stream, tmp_path, 4)
    first, stream = fresh()
    fit(first, stream, tmp_path, 2).save_checkpoint(tmp_path / "two.ckpt")
    second, stream = fresh()
    fit(second, stream, tmp_path, 4, tmp_path / "two.ckpt")
    for name, value in whole.named_parameters():
        assert torch.equal(second.get_parameter(name), value), name


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lightning", None)
    with pytest.raises(ConfigError, match="pip install lightning"):
        lightning_module(torch.nn.Linear(1, 1), sgd, PackStream([[1, 2]], 2))
