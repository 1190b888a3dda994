"""Saved adapters: training goes on bit for bit, PEFT reads them, and a save is whole or missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from chairlift_train.service.compute import files
from chairlift_train.service.compute.calls import AdapterConfig, TrainingError
from chairlift_train.service.compute.client import Client
from tests.lora.adapters import peft_logits, random_adapter
from tests.models.tiny import tiny_hf_model
from tests.native import needs_kernels
from tests.train.service.compute import calls
from tests.train.service.compute.calls import ADAM, gradient_of, make, round_of

pytestmark = needs_kernels
pytest.importorskip("transformers")


def steps(trainer: Any, model_id: str, first: int, count: int) -> list[Any]:
    found: list[Any] = []
    for seed in range(first, first + count):
        results = trainer.forward_backward(round_of(model_id, seed))
        assert not [each.error for each in results if each.error]
        found += [(each.metrics, [one.tolist() for one in each.logprobs]) for each in results]
        found.append(dict(trainer.optim_step(model_id, ADAM)))
    found.append(trainer._clients[model_id].weights.tolist())
    return found


@pytest.mark.parametrize("family", ["gemma2", "glm"])  # the second has its own order of rows
def test_a_resumed_run_has_the_bits_of_one_that_went_on(family: str, tmp_path: Path) -> None:
    first = calls.trainer(tmp_path / "model", family)
    make(first, "a", seed=3)
    steps(first, "a", 0, 2)
    first.forward_backward(round_of("a", 8)[:1])  # a gradient that no step has used
    first.save("a", tmp_path / "saved", optimizer=True)
    expected = steps(first, "a", 10, 2)
    second = calls.trainer(tmp_path / "model", family)
    make(second, "other")
    second.load("b", tmp_path / "saved", optimizer=True)
    second.load("c", tmp_path / "saved", optimizer=True)  # an independent copy
    steps(second, "other", 0, 1)
    assert steps(second, "b", 10, 2) == expected
    assert steps(second, "c", 10, 2) == expected


@pytest.mark.planted("test_a_resumed_run_has_the_bits_of_one_that_went_on")
@pytest.mark.parametrize("lost", ["gradient", "moments", "steps", "order"])
def test_what_a_save_forgets_would_be_seen(lost: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    restore = files.restore

    def forget(client: Client, saved: Any, *, optimizer: bool) -> None:
        restore(client, saved, optimizer=optimizer)
        if lost == "gradient":
            client.gradient = None
        elif lost == "moments":
            client.moments = None
        elif lost == "steps" and client.moments is not None:
            client.moments.steps = 1
        elif lost == "order":
            b = list(client.adapter.parameters.values())[3]
            b.data.copy_(b.data.flip(0))

    monkeypatch.setattr(files, "restore", forget)
    with pytest.raises(AssertionError):
        test_a_resumed_run_has_the_bits_of_one_that_went_on("gemma2", tmp_path)


def test_a_load_without_the_optimizer_begins_anew(tmp_path: Path) -> None:
    trainer = calls.trainer(tmp_path / "model")
    make(trainer, "a")
    steps(trainer, "a", 0, 2)
    for name, optimizer in (("with", True), ("without", False)):
        trainer.save("a", tmp_path / name, optimizer=optimizer)
    trainer.load("b", tmp_path / "with", optimizer=False)
    trainer.load("c", tmp_path / "without", optimizer=False)
    found = [steps(trainer, name, 5, 1) for name in "bc"]
    assert found[0] == found[1] != steps(trainer, "a", 5, 1)
    with pytest.raises(TrainingError, match="no optimiser state"):
        trainer.load("d", tmp_path / "without", optimizer=True)
    assert "d" not in trainer.models


def test_a_loaded_adapter_replaces_another(tmp_path: Path) -> None:
    trainer = calls.trainer(tmp_path / "model")
    make(trainer, "a")
    trainer.save("a", tmp_path / "saved", optimizer=True)
    before = trainer.forward_backward(round_of("a", 0))
    trainer.optim_step("a", ADAM)
    trainer.load("a", tmp_path / "saved", optimizer=True)
    assert trainer._clients["a"].gradient is None
    again = trainer.forward_backward(round_of("a", 0))
    assert [each.metrics for each in again] == [each.metrics for each in before]
    trainer.create("b", AdapterConfig(7))
    with pytest.raises(TrainingError, match="another rank or other layers"):
        trainer.load("b", tmp_path / "saved", optimizer=True)


@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("qwen3", True)])
def test_peft_computes_what_was_trained(family: str, tied: bool, tmp_path: Path) -> None:
    model = {"tie_word_embeddings": tied}
    trainer = calls.trainer(tmp_path / "model", family, model=model, base="a/model")
    make(trainer, "a")
    steps(trainer, "a", 0, 2)
    trainer.save("a", tmp_path / "saved", optimizer=True)
    config = json.loads((tmp_path / "saved" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "a/model" and config["lora_alpha"] == 32
    assert "lm_head" in config["target_modules"]
    given = round_of("a", 4)
    folder = tiny_hf_model(tmp_path / "model", family, **model)
    for each, found in zip(given, trainer.forward_backward(given), strict=True):
        sequences = [one.tokens.tolist() for one in each.datums]
        for logits, one, mine in zip(
            peft_logits(folder, tmp_path / "saved", sequences), each.datums, found.logprobs, strict=True
        ):
            targets = torch.from_numpy(one.inputs["target_tokens"]).reshape(len(logits), -1)
            expected = logits.log_softmax(-1).gather(1, targets).reshape(mine.shape)
            assert float((expected - torch.from_numpy(mine)).abs().max()) < 1e-4


def test_adapters_of_peft_are_trained_further(tmp_path: Path) -> None:
    trainer = calls.trainer(tmp_path / "model")
    folder = tiny_hf_model(tmp_path / "model", "llama")
    random_adapter(folder, tmp_path / "peft", r=3, lora_alpha=5, target_modules=["q_proj", "lm_head"])
    with pytest.raises(TrainingError, match=r"has the tensor '.*lm_head.base_layer.weight', which"):
        trainer.load("a", tmp_path / "peft", optimizer=False)
    weights = tmp_path / "peft" / "adapter_model.safetensors"
    save_file({name: each for name, each in load_file(weights).items() if "base_layer" not in name}, weights)
    trainer.load("a", tmp_path / "peft", optimizer=False)
    (found,) = trainer.forward_backward(round_of("a", 0)[:1])
    steps(trainer, "a", 0, 1)
    one = round_of("a", 0)[0].datums[0]
    (logits,) = peft_logits(folder, tmp_path / "peft", [one.tokens.tolist()])
    targets = torch.from_numpy(one.inputs["target_tokens"]).reshape(len(logits), -1)
    expected = logits.log_softmax(-1).gather(1, targets).reshape(found.logprobs[0].shape)
    assert float((expected - torch.from_numpy(found.logprobs[0])).abs().max()) < 1e-4
    random_adapter(folder, tmp_path / "dora", use_dora=True)
    with pytest.raises(TrainingError, match="is an adapter that is not trained here"):
        trainer.load("b", tmp_path / "dora", optimizer=False)


def test_a_save_is_whole_or_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = calls.trainer(tmp_path / "model")
    make(trainer, "a")

    def full(_directory: Path) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(files, "flush", full)
        with pytest.raises(OSError, match="No space left"):
            trainer.save("a", tmp_path / "store" / "saved", optimizer=True)
    assert list((tmp_path / "store").iterdir()) == []
    (tmp_path / "store" / ".saved.partial").mkdir()  # of a process that was killed
    (tmp_path / "store" / ".saved.partial" / "adapter_config.json").write_text("{")
    trainer.save("a", tmp_path / "store" / "saved", optimizer=True)
    assert [each.name for each in (tmp_path / "store").iterdir()] == ["saved"]
    with pytest.raises(TrainingError, match="there is a checkpoint 'saved' already"):
        trainer.save("a", tmp_path / "store" / "saved", optimizer=True)
    trainer.load("b", tmp_path / "store" / "saved", optimizer=True)


@pytest.mark.parametrize("damage", ["weights", "state", "config", "missing", "other", "nan"])
def test_damaged_checkpoints_are_refused(damage: str, tmp_path: Path) -> None:
    trainer = calls.trainer(tmp_path / "model")
    make(trainer, "a")
    trainer.forward_backward(round_of("a", 0))
    if damage == "nan":
        trainer._clients["a"].weights[0] = float("nan")
    if damage == "other":
        trainer = calls.trainer(tmp_path / "other", model={"intermediate_size": 160})
        make(trainer, "a")
    saved = tmp_path / "saved"
    trainer.save("a", saved, optimizer=True)
    names = {"weights": "adapter_model.safetensors", "state": "training/state.safetensors"}
    if damage in names:
        file = saved / names[damage]
        file.write_bytes(file.read_bytes()[:-40])
    elif damage == "config":
        (saved / "adapter_config.json").write_text("{")
    elif damage == "missing":
        (saved / "adapter_model.safetensors").unlink()
    again = calls.trainer(tmp_path / "model")
    make(again, "a")
    before = again._clients["a"].weights.clone()
    for name in ("a", "b"):
        with pytest.raises(TrainingError):
            again.load(name, saved, optimizer=True)
    assert again.models == ["a"] and torch.equal(again._clients["a"].weights, before)
    again.forward_backward(round_of("a", 0))
    assert gradient_of(again, "a").isfinite().all()
