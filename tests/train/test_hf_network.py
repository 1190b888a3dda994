"""A model of transformers learns from packs what its sequences teach alone, or is refused before the first step."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from chairlift.errors import ConfigError, ModelLoadError
from chairlift_train import hf_network
from chairlift_train.config import TrainConfig
from chairlift_train.hf_network import TransformersNetwork
from chairlift_train.run import prepare, train
from chairlift_train.stream import PackStream
from chairlift_train.trainer import Trainer, TrainingStepResult
from tests.train import families, tiny_run
from tests.train.test_trainer import VOCAB, config, examples, gradients

transformers = pytest.importorskip("transformers")

_BASE = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_WIDE = {**_BASE, "intermediate_size": 48, "max_position_embeddings": 128, "initializer_range": 0.2}
FOREIGN: dict[str, dict[str, Any]] = {
    "olmo": {**_WIDE, "num_key_value_heads": 2},
    "cohere": {**_WIDE, "num_key_value_heads": 2},
    "nemotron": {**_WIDE, "num_key_value_heads": 2},
    "persimmon": _WIDE,
    "biogpt": {**_WIDE, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "activation_dropout": 0.0},
    "gptj": {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "rotary_dim": 8},
    "codegen": {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "rotary_dim": 8},
}
"""Families without a native implementation."""


def tiny_config(family: str) -> dict[str, Any]:
    special = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}
    made = transformers.AutoConfig.for_model(family, **FOREIGN[family], **special)
    plain: dict[str, Any] = json.loads(made.to_json_string(use_diff=False))
    return plain


def tiny_model(family: str) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = transformers.AutoConfig.for_model(family, **FOREIGN[family], pad_token_id=None)
        return transformers.AutoModelForCausalLM.from_config(made, dtype=torch.float32)


def alone(model: Any, data: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    """Gradients of the mean over all targets, each sequence in a pass of its own."""
    model.requires_grad_(True).zero_grad(set_to_none=True)
    total = sum(sum(example["completion_mask"]) for example in data)
    for example in data:
        ids = torch.tensor(example["input_ids"])
        logits = model(input_ids=ids[None], use_cache=False).logits[0]
        nll = functional.cross_entropy(logits[:-1], ids[1:], reduction="none")
        ((nll * torch.tensor(example["completion_mask"][1:])).sum() / total).backward()
    return gradients(model)


def error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Length of the difference relative to the length of what is expected, of all gradients as one vector."""
    assert found.keys() == expected.keys()
    flat = [torch.cat([each[name].flatten().double() for name in sorted(each)]) for each in (found, expected)]
    return float((flat[0] - flat[1]).norm() / flat[1].norm())


def learnt(model: Any, data: list[dict[str, list[int]]], capacity: int, **changes: Any) -> dict[str, Tensor]:
    stream = PackStream(data, capacity, step=f"sequences:{len(data)}")
    trainer = Trainer(TransformersNetwork(model), config(**changes), stream)
    next(trainer.run())
    return gradients(trainer.model)


@pytest.mark.parametrize(
    "family", ["olmo", *(pytest.param(name, marks=pytest.mark.nightly) for name in FOREIGN if name != "olmo")]
)
@pytest.mark.parametrize("recomputes", [False, True])
def test_a_pack_teaches_what_its_sequences_teach_alone(family: str, recomputes: bool) -> None:
    model, data = tiny_model(family), examples(9)
    expected = alone(copy.deepcopy(model).eval(), data)
    model.eval()
    for capacity in (60, 1000):
        found = learnt(copy.deepcopy(model), data, capacity, gradient_checkpointing=recomputes)
        assert error(found, expected) < 3e-6


@pytest.mark.parametrize("family", ["bloom", "mamba", *(pytest.param("mpt", marks=pytest.mark.nightly),)])
def test_a_model_that_leaks_is_refused(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"NOT isolated(?s:.)*patch_hf refuses it(?s:.)*nothing was trained"):
        TransformersNetwork(families.tiny(family))
    if family == "bloom":  # trained all the same, it learns something else
        data = examples(9)
        expected = alone(families.tiny(family), data)
        monkeypatch.setattr(hf_network, "check_isolation", lambda _model, forward: [forward])
        assert error(learnt(families.tiny(family), data, 60), expected) > 1e-3


def test_the_check_sees_what_training_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = TransformersNetwork._forward

    def runs_on(self: TransformersNetwork, batch: Any, rows: Tensor | None = None) -> Tensor:
        positions = torch.arange(batch["input_ids"].shape[1])[None]
        return forward(self, {**batch, "position_ids": positions}, rows)

    monkeypatch.setattr(TransformersNetwork, "_forward", runs_on)
    with pytest.raises(ConfigError, match="NOT isolated"):
        TransformersNetwork(tiny_model("olmo"))


def settings(folder: Path, **training: Any) -> dict[str, Any]:
    raw = tiny_run.settings(folder, **{"dropout": 0.0, "steps": 6, **training})
    raw["model"]["config"] = tiny_config("olmo") | {"attention_dropout": 0.1}
    return raw


def test_a_run_is_the_same_when_it_was_interrupted_and_loads_in_transformers(tmp_path: Path) -> None:
    tiny_run.write_records(tmp_path / "data.jsonl")
    said: list[str] = []

    def run(name: str, stop: int = 0) -> Path:
        def on_step(result: TrainingStepResult, trainer: Trainer) -> None:
            trainer.stop_requested = result.step == stop

        raw = settings(tmp_path) | {"output": str(tmp_path / name)}
        return train(
            TrainConfig.from_mapping(raw), on_step=on_step, on_start=lambda network: said.append(str(network))
        ).directory

    whole = run("whole")
    assert run("stopped", stop=2).name == "step-00000003"  # the step after the signal is the last
    resumed = run("stopped")
    assert whole.name == resumed.name == "step-00000006"
    for name in ("model.safetensors", "training/state.safetensors"):
        mine, theirs = load_file(whole / name), load_file(resumed / name)
        assert mine.keys() == theirs.keys()
        assert [key for key in mine if not torch.equal(mine[key], theirs[key])] == []
    assert len(said) == 3 and all("OlmoForCausalLM of transformers" in line for line in said)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(resumed)
    state = load_file(resumed / "training" / "state.safetensors")
    kept = {name: state[f"state.trainer.model.{name}"] for name, _ in loaded.named_parameters()}
    assert all(torch.equal(kept[name], value) for name, value in loaded.named_parameters())
    assert loaded.config.use_cache


def test_a_native_family_is_native_unless_asked(tmp_path: Path) -> None:
    tiny_run.write_records(tmp_path / "data.jsonl")
    raw = tiny_run.settings(tmp_path, steps=1, warmup_steps=0, dropout=0.0)
    losses, said = {}, {}
    start = train(TrainConfig.from_mapping(raw | {"output": str(tmp_path / "start")})).directory
    for impl in ("auto", "native", "transformers"):
        raw["model"] = {"path": str(start), "dtype": "float32", "impl": impl}
        outcome = train(
            TrainConfig.from_mapping(raw | {"output": str(tmp_path / impl)}),
            on_start=lambda network, impl=impl: said.__setitem__(impl, str(network)),
        )
        assert outcome.last is not None
        losses[impl] = outcome.last.loss
    assert losses["auto"] == losses["native"]
    assert losses["transformers"] == pytest.approx(losses["native"], rel=1e-6)
    assert "native" in said["auto"] and "transformers" in said["transformers"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"training": {"dropout": 0.1}}, "training.dropout is for native models"),
        ({"training": {"balance_loss": 0.1}}, "balance_loss is for native models"),
        ({"model": {"impl": "native"}}, "model_type 'olmo' is not supported"),
        ({"config": {"model_type": "t5"}}, "no causal language model"),
        ({"config": {"quantization_config": {"quant_method": "gptq"}}}, "quantised"),
        ({"config": {"auto_map": {"AutoModelForCausalLM": "mine.Olmo3D"}}}, "code from its own directory"),
    ],
)
def test_impossible_settings_are_refused_by_name(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    tiny_run.write_records(tmp_path / "data.jsonl")
    raw = settings(tmp_path)
    raw["model"]["config"] |= change.pop("config", {})
    for section, values in change.items():
        raw[section] |= values
    with pytest.raises((ConfigError, ModelLoadError), match=message):
        train(TrainConfig.from_mapping(raw))
    assert not (tmp_path / "out").exists()


def test_an_adapter_of_a_transformers_model_is_refused(tmp_path: Path) -> None:
    tiny_run.write_records(tmp_path / "data.jsonl")
    raw = settings(tmp_path)
    tiny_model("olmo").save_pretrained(tmp_path / "model")
    raw["model"] = {"path": str(tmp_path / "model")}
    raw["lora"] = {"r": 4}
    with pytest.raises(ConfigError, match="lora is for native models"):
        prepare(TrainConfig.from_mapping(raw))
