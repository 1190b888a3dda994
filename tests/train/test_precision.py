"""Formats of products and moments, devices, and the curves of a run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from chairlift.errors import ConfigError
from chairlift_train.config import TrainConfig, TrainerConfig
from chairlift_train.run import train
from chairlift_train.stream import PackStream
from chairlift_train.trainer import Trainer, TrainingStepResult
from tests.train import tiny_run
from tests.train.test_trainer import examples, gradients, one_step, relative_error, tiny_model


def test_products_in_bf16_keep_weights_moments_and_losses_in_float32() -> None:
    data = examples(17)
    plain, expected = one_step(tiny_model(), data)
    seen: list[torch.dtype] = []
    model = tiny_model()
    model.model.layers[0].mlp.register_forward_hook(lambda _module, _args, out: seen.append(out.dtype))
    trainer, result = one_step(model, data, dtype="bfloat16")
    assert seen == [torch.bfloat16]
    kept = [*model.parameters(), *gradients(model).values()]
    kept += [value for moments in trainer.optimizer.state.values() for value in moments.values()]
    assert {value.dtype for value in kept} == {torch.float32}
    assert trainer._loss.losses.dtype == torch.float32
    assert result.loss == pytest.approx(expected.loss, rel=2e-2) and result.loss != expected.loss
    assert 1e-4 < relative_error(gradients(model), gradients(plain.model)) < 0.2


def test_layers_computed_again_in_bf16_give_the_same_bits() -> None:
    data = examples(17)
    plain, expected = one_step(tiny_model(), data, dtype="bfloat16")
    saving, found = one_step(tiny_model(), data, dtype="bfloat16", gradient_checkpointing=True)
    assert found == expected
    mine, theirs = gradients(saving.model), gradients(plain.model)
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def run(folder: Path, name: str, *, stop: int = 0, **changes: Any) -> Path:
    raw = tiny_run.settings(folder, steps=6, **changes.pop("training", {})) | changes
    raw["output"] = str(folder / name)
    if not (folder / "data.jsonl").exists():
        tiny_run.write_records(folder / "data.jsonl")

    def on_step(result: TrainingStepResult, trainer: Trainer) -> None:
        trainer.stop_requested = result.step == stop

    return train(TrainConfig.from_mapping(raw), on_step=on_step).directory


def test_moments_in_8_bits_train_as_those_in_32_and_go_on_bit_for_bit(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    raw = tiny_run.MODEL | {"vocab_size": 256}  # an embedding of more than 4,096 numbers
    losses: dict[str, list[float]] = {}
    for optimizer in ("adamw", "adamw8bit"):
        data = [{"input_ids": [1, i, 20 + i, 40 + i], "completion_mask": [0, 0, 1, 1]} for i in range(2, 12)] * 30
        settings: Any = {"steps": 30, "warmup_steps": 5, "learning_rate": 5e-3, "optimizer": optimizer}
        stream = PackStream(data, 40, pool=10, step="sequences:10")
        losses[optimizer] = [result.loss for result in Trainer(tiny_model(), TrainerConfig(**settings), stream).run()]
    assert losses["adamw8bit"][-1] < 0.5 * losses["adamw8bit"][0]
    assert losses["adamw8bit"] == pytest.approx(losses["adamw"], rel=0.1, abs=0.05)
    changes: dict[str, Any] = {"training": {"optimizer": "adamw8bit"}, "model": {"config": raw, "dtype": "float32"}}
    whole = run(tmp_path, "whole", **changes)
    assert run(tmp_path, "stopped", stop=2, **changes).name == "step-00000003"
    resumed = run(tmp_path, "stopped", **changes)
    mine, theirs = (load_file(each / "training" / "state.safetensors") for each in (whole, resumed))
    assert mine.keys() == theirs.keys()
    assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []
    coded = [name for name, value in mine.items() if value.dtype == torch.uint8 and "optimizer" in name]
    assert any("embed_tokens" in name for name in coded)
    with pytest.raises(ConfigError, match=r"moments are those of adamw8bit, and training\.optimizer is adamw"):
        run(tmp_path, "whole", model=changes["model"])


def test_curves_say_what_each_step_returned_also_after_going_on(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    expected: dict[int, float] = {}

    def on_step(result: TrainingStepResult, trainer: Trainer) -> None:
        expected[result.step] = result.loss
        trainer.stop_requested = len(expected) == 2

    tiny_run.write_records(tmp_path / "data.jsonl")
    raw = tiny_run.settings(tmp_path, steps=6) | {"tensorboard": True}
    raw["data"]["eval_files"] = {"held": [str(tmp_path / "data.jsonl")]}
    for _ in range(2):
        outcome = train(TrainConfig.from_mapping(raw), on_step=on_step)
    assert outcome.finished and sorted(expected) == [1, 2, 3, 4, 5, 6]
    events = EventAccumulator(str(tmp_path / "out" / "tensorboard"))
    events.Reload()
    points = {point.step: point.value for point in events.Scalars("train/loss")}
    assert points == pytest.approx(expected)
    assert {"train/tokens_per_second", "packing/waste", "packing/mean_length", "eval_loss/held"} <= set(
        events.Tags()["scalars"]
    )


@pytest.mark.parametrize(
    ("module", "changes", "message"),
    [
        ("bitsandbytes", {"training": {"optimizer": "adamw8bit"}}, r"pip install 'chairlift\[adamw8bit\]'"),
        ("torch.utils.tensorboard.writer", {"tensorboard": True}, r"pip install 'chairlift\[tensorboard\]'"),
    ],
)
def test_a_missing_library_is_named(
    module: str, changes: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=message):
        run(tmp_path, "out", **changes)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_a_device_that_is_not_here_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="device is cuda, and PyTorch finds no such device"):
        run(tmp_path, "out", device="cuda")


@pytest.mark.gpu
def test_a_gpu_learns_what_the_processor_learns(tmp_path: Path) -> None:
    found: dict[str, dict[str, Tensor]] = {}
    for device in ("cpu", "cuda"):
        found[device] = load_file(run(tmp_path, device, device=device, training={"dropout": 0.0}) / "model.safetensors")
    for name, value in found["cpu"].items():
        torch.testing.assert_close(found["cuda"][name], value, rtol=1e-3, atol=1e-4)
