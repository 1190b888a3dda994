"""Every native family learns from packs what its sequences would teach alone, and is written so that others load it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from chairlift.models.causal_lm import CausalLM
from chairlift.models.hf_config import NetworkConfig, parse_config
from chairlift.models.random_weights import random_model
from chairlift.models.registry import FAMILIES
from chairlift_train import networks
from chairlift_train import trainer as trainer_module
from chairlift_train.collate import PackCollator
from chairlift_train.config import TrainConfig
from chairlift_train.layout import Layout
from chairlift_train.run import train
from chairlift_train.trainer import Trainer
from chairlift_train.varlen import VarlenContext
from tests.models import tiny
from tests.train import tiny_run
from tests.train.test_trainer import examples, gradients, one_by_one, one_step, relative_error

transformers = pytest.importorskip("transformers")

# Very different families: learned positions, LayerNorm; caps and windows; sinks, clamps, biases of experts; Llama.
FIRST = ("llama", "gpt2", "gemma2", "gpt_oss")
# Whole checkpoints have the text models of their families; config_of would leave theirs at the published size.
LEFT_OUT = (*FIRST, *tiny.WHOLE_FAMILIES)
CELLS = ("gru", "lstm")
"""Families that transformers has no classes of."""
NAMES = [*FIRST, *(name for name, each in FAMILIES.items() if name not in LEFT_OUT and not each.sees_images)]


def config_of(family: str) -> dict[str, Any]:
    """``config.json`` of a tiny model of the family, as transformers writes it."""
    if family in CELLS:
        keys = ("vocab_size", "hidden_size", "num_hidden_layers", "eos_token_id")
        return {"model_type": family, **{key: tiny._DEFAULTS[key] for key in keys}}
    own = {**tiny._FAMILY_DEFAULTS, **tiny.MORE_FAMILIES, **tiny.EXPERT_FAMILIES, **tiny.RECURRENT_FAMILIES}.get(
        family, {}
    )
    fields = {**tiny._DEFAULTS, "pad_token_id": None, **own, "architectures": None}
    if family in ("hunyuan_v1_dense", "ministral3"):  # their positions are stretched from a longer context
        fields.pop("max_position_embeddings")
    made: dict[str, Any] = json.loads(
        transformers.AutoConfig.for_model(family, **fields).to_json_string(use_diff=False)
    )
    return {name: value for name, value in made.items() if value is not None or name == "pad_token_id"}


def model_of(config: NetworkConfig) -> CausalLM:
    return random_model(config, "float32", seed=0, std=0.25)


def whole_error(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Length of the difference of two gradients, as one vector, relative to the second."""
    difference = math.sqrt(sum(float((a[name] - b[name]).norm()) ** 2 for name in b))
    return difference / math.sqrt(sum(float(b[name].norm()) ** 2 for name in b))


@pytest.mark.parametrize("family", [*FIRST, *(pytest.param(n, marks=pytest.mark.nightly) for n in NAMES[len(FIRST) :])])
def test_a_pack_teaches_what_its_sequences_teach_alone(family: str) -> None:
    """Float64 shows faults of packing; in float32 a pack may differ by what rounding alone changes for a sequence."""
    config, data = parse_config(config_of(family)), examples(9)
    expected_loss, expected = one_by_one(model_of(config), data, "token")
    exact_loss, exact = one_by_one(model_of(config).double(), data, "token")
    rounding = whole_error(expected, exact)
    for capacity, settings in ((1000, {}), (60, {"gradient_checkpointing": True})):
        trainer, result = one_step(model_of(config), data, capacity, **settings)
        assert result.loss == pytest.approx(expected_loss, rel=1e-6)
        assert whole_error(gradients(trainer.model), expected) < max(3e-6, rounding)
        trainer, result = one_step(model_of(config), data, capacity, double=True, **settings)
        assert result.loss == pytest.approx(exact_loss, rel=1e-6)
        assert whole_error(gradients(trainer.model), exact) < 3e-6
        assert relative_error(gradients(trainer.model), exact) < 1e-5


MUTATIONS = ("one layout", "positions run on", "shifted mask", "loss per pack")


@pytest.mark.planted("test_a_pack_teaches_what_its_sequences_teach_alone")
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_fault_in_packing_would_be_seen(mutation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPT-2 has learned positions: with rotary ones, a position that runs on changes nothing within a sequence."""
    config, data = parse_config(config_of("gpt2")), examples(9)
    _, expected = one_by_one(model_of(config), data, "token")
    if mutation == "one layout":
        monkeypatch.setattr(networks, "VarlenContext", lambda offsets: VarlenContext((0, offsets[-1])))
    elif mutation == "positions run on":
        monkeypatch.setattr(Layout, "positions", property(lambda layout: torch.arange(layout.num_tokens).numpy()))
    elif mutation == "shifted mask":
        collate = PackCollator(keys=trainer_module._collate.keys)

        def shifted(pack: Any) -> Any:
            batch = collate(pack)
            batch["labels"] = torch.where(batch["labels"].roll(1) >= 0, batch["input_ids"], -100)
            return batch

        monkeypatch.setattr(trainer_module, "_collate", shifted)
    else:
        learn = Trainer._learn

        def alone(self: Trainer, pack: Any) -> Tensor:
            with self._loss.step(float(pack.weights.sum())):
                return learn(self, pack)

        monkeypatch.setattr(Trainer, "_learn", alone)
    trainer, _ = one_step(model_of(config), data, 60)
    assert whole_error(gradients(trainer.model), expected) > 1e-3


@pytest.mark.nightly
@pytest.mark.parametrize("family", [name for name in NAMES if name not in CELLS])
def test_a_trained_model_loads_in_transformers_with_equal_logits(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    tiny_run.write_records(tmp_path / "data.jsonl")
    raw = tiny_run.settings(tmp_path, steps=2)
    raw["model"]["config"] = config_of(family)
    outcome = train(TrainConfig.from_mapping(raw))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(outcome.directory, attn_implementation="eager").eval()
    from chairlift.kernels.weights import PLAIN
    from chairlift.models.loader import load_model
    from chairlift.models.model_files import read_config

    ours = load_model(outcome.directory, read_config(outcome.directory), torch.float32, weight_format=PLAIN)
    ids = torch.randint(tiny_run.VOCAB, (40,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = ours.compute_logits(ours(ids, torch.arange(40), VarlenContext([0, 40])))
        torch.testing.assert_close(logits, theirs(ids[None]).logits[0], rtol=1e-4, atol=1e-5)
