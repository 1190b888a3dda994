"""Steps in the loops of accelerate and DeepSpeed equal steps of a plain loop, also with uneven numbers of packs."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from chairlift.errors import ConfigError
from chairlift_train.layout import Pack
from chairlift_train.loop_adapters import accelerate_step, deepspeed_step
from chairlift_train.loss import StepLoss
from chairlift_train.stream import PackStream
from chairlift_train.varlen import patch_hf
from tests.train.families import tiny
from tests.train.sharded_run import steps
from tests.train.test_hf_network import alone, error
from tests.train.test_sharding import two
from tests.train.test_trainer import examples


def example_of(pack: Pack) -> list[dict[str, list[int]]]:
    """The sequences of a pack as examples."""
    found, start = [], 0
    for length in pack.lengths:
        stop = start + length
        mask = pack.weights[start:stop].astype(int).tolist()
        found.append({"input_ids": pack.tokens[start:stop].tolist(), "completion_mask": mask})
        start = stop
    return found


CASES = ("accelerate-ddp", *(f"{library}-{stage}" for library in ("accelerate", "deepspeed") for stage in (1, 2, 3)))


def found_by_two(case: str, share: int, folder: Path, monkeypatch: pytest.MonkeyPatch, *mutants: str) -> float:
    """Run a case as two ranks. Returns the error of the gradient, as a share of its norm."""
    if case[-1].isdigit():
        pytest.importorskip("deepspeed")
        monkeypatch.setenv("DS_ACCELERATOR", "cpu")
        if case.startswith("accelerate"):
            monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("LOCAL_SIZE", "2")
    two("tests.train.loop_run", str(folder), case, str(share), *mutants, timeout=120.0)
    found = load_file(folder / "found.safetensors")
    found.pop("losses")
    expected = alone(tiny("llama"), [example for pack in steps()[1] for example in example_of(pack)])
    return error(found, expected)


@pytest.mark.nightly
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("share", [2, 3])
def test_two_ranks_have_the_gradients_of_sequences_alone(
    share: int, case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 has ``share`` of three packs. With 3, the other rank has none."""
    assert found_by_two(case, share, tmp_path, monkeypatch) < 3e-6


@pytest.mark.planted
@pytest.mark.nightly
@pytest.mark.parametrize(
    ("case", "mutant"),
    [
        *(("accelerate-ddp", name) for name in ("loss mean per rank", "loss mean per pack", "gradient averaged again")),
        *(("accelerate-ddp", name) for name in ("never exchanged", "last pack alone")),
        *(("deepspeed-1", name) for name in ("loss mean per pack", "gradient averaged again")),
        *(("deepspeed-1", name) for name in ("never exchanged", "exchanged after each pack")),
        ("deepspeed-3", "loss mean per rank"),
    ],
)
def test_a_mistake_in_a_loop_is_found(case: str, mutant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert found_by_two(case, 2, tmp_path, monkeypatch, mutant) > 1e-3


def fresh(accelerator: Any) -> tuple[Any, Any, Any, PackStream]:
    model = tiny("llama")
    patch_hf(model)
    prepared, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    return model, prepared, optimizer, PackStream(examples(40), 64, pool=8, step="sequences:8")


@pytest.fixture
def accelerator() -> Any:
    return pytest.importorskip("accelerate").Accelerator(cpu=True)


def test_gradients_are_those_of_sequences_alone(accelerator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = tiny("llama"), examples(9)
    expected = alone(copy.deepcopy(model), data)
    patch_hf(model)
    prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1000.0))
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    (packs,) = PackStream(data, 60, step="sequences:9").steps()
    assert len(packs) > 1
    accelerate_step(accelerator, prepared, optimizer, StepLoss(), packs)
    found = {name: (before[name] - value.detach()) / 1000 for name, value in model.named_parameters()}
    assert error(found, expected) < 3e-6
    assert all(value.grad is None for value in model.parameters())


@pytest.mark.full
def test_a_loop_of_accelerate_is_resumed_bit_for_bit(accelerator: Any, tmp_path: Path) -> None:
    def run(steps: int, stream: PackStream, prepared: Any, optimizer: Any) -> None:
        for _, packs in zip(range(steps), stream.steps(), strict=False):
            accelerate_step(accelerator, prepared, optimizer, StepLoss(), packs, max_grad_norm=1.0)

    whole, prepared, optimizer, stream = fresh(accelerator)
    run(4, stream, prepared, optimizer)
    accelerator.free_memory()
    _, prepared, optimizer, stream = fresh(accelerator)
    accelerator.register_for_checkpointing(stream)
    run(2, stream, prepared, optimizer)
    accelerator.save_state(str(tmp_path / "state"))
    accelerator.free_memory()
    accelerator._custom_objects.clear()
    second, prepared, optimizer, stream = fresh(accelerator)
    accelerator.register_for_checkpointing(stream)
    accelerator.load_state(str(tmp_path / "state"))
    run(2, stream, prepared, optimizer)
    for name, value in whole.named_parameters():
        assert torch.equal(second.get_parameter(name), value), name


def test_settings_that_change_the_loss_are_refused() -> None:
    model, packs = torch.nn.Linear(1, 1), steps()[0]
    sgd = torch.optim.SGD(model.parameters())
    accumulating = SimpleNamespace(gradient_accumulation_steps=4, distributed_type="NO")
    with pytest.raises(ConfigError, match="Accelerator has gradient_accumulation_steps=4"):
        accelerate_step(accumulating, model, sgd, StepLoss(), packs)
    with pytest.raises(ConfigError, match="the engine has gradient_accumulation_steps=2"):
        deepspeed_step(SimpleNamespace(gradient_accumulation_steps=lambda: 2), StepLoss(), packs)
    plain = SimpleNamespace(gradient_accumulation_steps=1, distributed_type="DEEPSPEED")
    with pytest.raises(ConfigError, match="gradients='sum'"):
        accelerate_step(plain, model, sgd, StepLoss(gradients="sum"), packs)
    with pytest.raises(ConfigError, match="gradient_clipping of the DeepSpeedPlugin"):
        accelerate_step(plain, model, sgd, StepLoss(), packs, max_grad_norm=1.0)
