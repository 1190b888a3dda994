"""A packed step learns exactly what its sequences would teach one by one, on any number of packs."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import math
import random
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from chairlift.errors import ConfigError, DivergedError
from chairlift.models.causal_lm import CausalLM
from chairlift.models.context import PackedContext
from chairlift.models.hf_config import parse_config
from chairlift.models.random_weights import random_model
from chairlift_train import drift
from chairlift_train.config import TrainConfig, TrainerConfig
from chairlift_train.loss import Reduce
from chairlift_train.run import train
from chairlift_train.stream import PackStream
from chairlift_train.trainer import Trainer
from tests.train import tiny_run

VOCAB = tiny_run.VOCAB
Example = dict[str, list[int]]


def tiny_model(seed: int = 0) -> CausalLM:
    return random_model(parse_config(tiny_run.MODEL), "float32", seed=seed, std=0.25)


def examples(count: int, seed: int = 0) -> list[Example]:
    rng = random.Random(seed)
    made = []
    for _ in range(count):
        length = rng.randint(2, 40)
        tokens = [rng.randrange(VOCAB) for _ in range(length)]
        first_target = rng.randrange(1, length)
        made.append({"input_ids": tokens, "completion_mask": [int(i >= first_target) for i in range(length)]})
    return made


def config(**changes: Any) -> TrainerConfig:
    return TrainerConfig(**{"steps": 3, "warmup_steps": 0, "max_grad_norm": 1e9, **changes})


def one_step(
    model: CausalLM, data: list[Example], capacity: int = 1000, *, double: bool = False, **changes: Any
) -> tuple[Trainer, Any]:
    trainer = Trainer(model, config(**changes), PackStream(data, capacity, step=f"sequences:{len(data)}"))
    if double:  # the trainer takes float32 weights only; their values stay
        model.double()
    return trainer, next(trainer.run())


def gradients(model: CausalLM) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def relative_error(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).norm() / b[name].norm().clamp_min(1e-12)) for name in a)


def one_by_one(model: CausalLM, data: list[Example], reduce: str) -> tuple[float, dict[str, Tensor]]:
    """The plainest way to the same loss: each sequence alone, with nothing of the trainer's but the definition."""
    model.requires_grad_(True).zero_grad(set_to_none=True)
    counts = [sum(example["completion_mask"]) for example in data]
    factor = {"token": lambda n: 1.0, "weights": lambda n: 1.0, "sequence": lambda n: 1 / n, "sqrt": lambda n: n**-0.5}
    total = sum(count * factor[reduce](count) for count in counts)
    loss = 0.0
    for example, count in zip(data, counts, strict=True):
        ids = torch.tensor(example["input_ids"])
        hidden = model(ids, torch.arange(len(ids)), PackedContext([0, len(ids)]))
        nll = functional.cross_entropy(model.compute_logits(hidden[:-1]), ids[1:], reduction="none")
        part = (nll * torch.tensor(example["completion_mask"][1:])).sum() * factor[reduce](count) / total
        part.backward()  # type: ignore[no-untyped-call]
        loss += float(part.detach())
    return loss, gradients(model)


@pytest.mark.parametrize("reduce", get_args(Reduce))
@pytest.mark.parametrize("capacity", [40, 1000])
def test_a_step_equals_its_sequences_one_by_one(reduce: Reduce, capacity: int) -> None:
    data = examples(17)
    expected_loss, expected = one_by_one(tiny_model(), data, reduce)
    trainer, result = one_step(tiny_model(), data, capacity, reduce=reduce)
    assert result.num_packs == (1 if capacity == 1000 else pytest.approx(9, abs=3))
    assert result.loss == pytest.approx(expected_loss, rel=1e-6)
    assert relative_error(gradients(trainer.model), expected) < 5e-6
    assert result.num_targets == sum(sum(example["completion_mask"]) for example in data)
    assert result.num_tokens == sum(len(example["input_ids"]) for example in data)


def test_training_lowers_the_loss_until_the_data_is_known() -> None:
    data = [{"input_ids": [1, i, 20 + i, 40 + i], "completion_mask": [0, 0, 1, 1]} for i in range(2, 12)] * 80
    settings = TrainerConfig(steps=80, warmup_steps=5, learning_rate=5e-3, weight_decay=0.0)
    results = list(Trainer(tiny_model(), settings, PackStream(data, 40, pool=10, step="sequences:10")).run())
    assert len(results) == 80
    assert results[0].loss > 2.0
    assert results[-1].loss < 0.05


def test_dropout_depends_on_the_seed_and_the_pack_alone_and_leaves_no_trace() -> None:
    data = examples(8, seed=3)
    plain = one_step(tiny_model(), data)[1].loss
    torch.manual_seed(1)
    before = torch.get_rng_state()
    trainer, first = one_step(tiny_model(), data, dropout=0.5)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    again = one_step(tiny_model(), data, dropout=0.5)[1]
    other = next(Trainer(tiny_model(), config(dropout=0.5), PackStream(data, 1000), seed=1).run())
    assert first.loss == again.loss
    assert len({plain, first.loss, other.loss}) == 3
    assert not any(module._forward_hooks for module in trainer.model.modules())


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant", "wsd", "inverse_sqrt"])
def test_schedule_rises_then_falls_to_its_end(schedule: Any) -> None:
    settings = TrainerConfig(steps=100, warmup_steps=10, learning_rate=1.0, schedule=schedule, final_fraction=0.1)
    rates = [settings.rate(step) for step in range(101)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[10] == pytest.approx(1.0)
    assert all(later <= earlier for earlier, later in itertools.pairwise(rates[10:]))
    assert rates[100] == pytest.approx({"constant": 1.0, "inverse_sqrt": 0.1**0.5}.get(schedule, 0.1))
    assert all(math.isfinite(rate) for rate in rates)


@pytest.mark.parametrize(
    "change",
    [{"steps": 0}, {"learning_rate": 0.0}, {"dropout": 1.0}, {"warmup_steps": 9}, {"betas": (0.9, 1.0)}],
)
def test_impossible_settings_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        TrainerConfig(**{"steps": 5, "warmup_steps": 1, **change})


def test_a_loss_that_is_no_number_stops_before_the_weights_change() -> None:
    model = random_model(parse_config(tiny_run.MODEL | {"tie_word_embeddings": False}), "float32")
    with torch.no_grad():
        model.model.embed_tokens.weight[7] = math.inf
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    data = [{"input_ids": [i, i + 1]} for i in (1, 2, 7, 9)]
    trainer = Trainer(model, config(), PackStream(data, 2, step="sequences:4"))
    with pytest.raises(DivergedError, match=r"step 1: the loss is nan.*sequences 2;") as caught:
        next(trainer.run())
    assert "sequences 1;" not in str(caught.value)
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
    assert trainer.num_steps == 0


def test_data_that_cannot_be_learnt_is_refused() -> None:
    with pytest.raises(ConfigError, match=f"token id {VOCAB}, but the model knows {VOCAB}"):
        one_step(tiny_model(), [{"input_ids": [1, VOCAB]}])
    with pytest.raises(ConfigError, match="target"):
        one_step(tiny_model(), [{"input_ids": [1]}])
    with pytest.raises(ConfigError, match="float32"):
        Trainer(tiny_model().bfloat16(), config())


def test_a_stream_does_not_begin_anew_where_a_checkpoint_has_none() -> None:
    trainer = Trainer(tiny_model(), config(), PackStream([{"input_ids": [1, 2]}], 2, step="sequences:1"))
    with pytest.raises(ConfigError, match="without a stream"):
        trainer.load_state_dict({**trainer.state_dict(), "stream": None})


def test_steps_without_a_target_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    nothing = [{**example, "completion_mask": [0] * len(example["input_ids"])} for example in examples(4, seed=1)]
    data = examples(8)

    def losses(source: list[Example]) -> list[float]:
        trainer = Trainer(tiny_model(), config(), PackStream(source, 1000, pool=4))
        return [result.loss for result in trainer.run()]

    expected = losses(data)
    assert len(expected) == 2
    assert losses([*data[:4], *nothing, *data[4:]]) == expected
    assert caplog.messages == ["a step of 1 packs has no target and is left out"]
    assert losses([*data, *nothing]) == expected
    endless = Trainer(tiny_model(), config(), PackStream(nothing * 200, 64, step="packs:1"))
    with pytest.raises(ConfigError, match="the last 100 steps have no target; give sequences"):
        list(endless.run())


def test_a_step_may_be_longer_than_what_the_sampler_remembers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drift, "_REMEMBERED", 16)
    sampler = drift.DriftSampler({"a": examples(40)}, replay=0.0, signal="loss", detector="page_hinkley")
    trainer = Trainer(tiny_model(), config(steps=1), PackStream(sampler, 1000, step="sequences:40"), drift=sampler)
    (result,) = trainer.run()
    assert result.num_targets == sum(sum(example["completion_mask"]) for example in examples(40))
    assert sampler.stats()["sources"]["a"]["loss"] > 0


def test_going_on_from_a_state_after_any_step_is_the_same_run() -> None:
    data = examples(60)

    def fresh() -> Trainer:
        settings = TrainerConfig(steps=6, warmup_steps=2, dropout=0.1)
        return Trainer(tiny_model(), settings, PackStream(data, 64, pool=8, step="sequences:9"))

    whole = fresh()
    states, losses = [], []
    for result in whole.run():
        state = whole.state_dict()
        copies = {name: tensor.clone() for name, tensor in state["model"].items()}
        moments = {name: {k: v.clone() for k, v in each.items()} for name, each in state["optimizer"].items()}
        states.append(state | {"model": copies, "optimizer": moments})
        losses.append(result.loss)
    assert len(losses) == 6
    for done, state in enumerate(states, 1):
        resumed = fresh()
        resumed.load_state_dict(state)
        assert [result.loss for result in resumed.run()] == losses[done:]
        assert all(torch.equal(p, q) for p, q in zip(whole.model.parameters(), resumed.model.parameters(), strict=True))


def test_going_back_to_the_state_before_the_first_step_is_the_same_run() -> None:
    trainer = Trainer(tiny_model(), config(), PackStream(examples(30), 64, step="sequences:9"))
    beginning = copy.deepcopy(trainer.state_dict())
    losses = [result.loss for result in trainer.run()]
    trainer.load_state_dict(beginning)
    assert [result.loss for result in trainer.run()] == losses


def test_the_state_of_another_model_is_refused() -> None:
    other = random_model(parse_config(tiny_run.MODEL | {"intermediate_size": 64}), "float32")
    with pytest.raises(ConfigError, match=r"another model: model\.layers\.0\.mlp"):
        Trainer(other, config()).load_state_dict(Trainer(tiny_model(), config()).state_dict())


FAMILIES = {
    "llama": {"tie_word_embeddings": False},
    "mistral": {"sliding_window": 16},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 40, "n_positions": 128},
}


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_layers_computed_again_give_the_same_bits(dropout: float) -> None:
    data = examples(17)
    plain, expected = one_step(tiny_model(), data, dropout=dropout)
    saving, found = one_step(tiny_model(), data, dropout=dropout, gradient_checkpointing=True)
    assert found == expected
    mine, theirs = gradients(saving.model), gradients(plain.model)
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert not any("forward" in vars(module) for module in saving.model.modules())


def test_gradients_are_scaled_down_to_the_largest_norm_or_never() -> None:
    data = examples(8)
    lengths = {}
    for most in (None, 1e9, 0.5):
        trainer, result = one_step(tiny_model(), data, max_grad_norm=most)
        assert result.grad_norm > 1
        lengths[most] = math.sqrt(sum(float(g.norm()) ** 2 for g in gradients(trainer.model).values()))
    assert lengths[None] == lengths[1e9] == pytest.approx(result.grad_norm, rel=1e-5)
    assert lengths[0.5] == pytest.approx(0.5, rel=1e-4)


def test_wsd_stays_at_its_peak_and_falls_at_the_end() -> None:
    settings = {"steps": 100, "warmup_steps": 10, "learning_rate": 1.0, "final_fraction": 0.1}
    rates = [TrainerConfig(**settings, schedule="wsd", decay_steps=30).rate(step) for step in range(101)]
    assert rates[10:71] == [1.0] * 61
    assert rates[85] == pytest.approx(0.55) and rates[100] == pytest.approx(0.1)
    assert (
        TrainerConfig(**settings, schedule="wsd").rate(80) == 1.0 > TrainerConfig(**settings, schedule="wsd").rate(81)
    )
    with pytest.raises(ConfigError, match="between 0 and the 90 steps after warmup_steps, got 91"):
        TrainerConfig(**settings, schedule="wsd", decay_steps=91)
    with pytest.raises(ConfigError, match="decay_steps is for schedule wsd, and this one is cosine"):
        TrainerConfig(**settings, decay_steps=5)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_trained_model_loads_in_transformers_with_equal_logits(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers = pytest.importorskip("transformers")
    tiny_run.write_records(tmp_path / "data.jsonl")
    raw = tiny_run.settings(tmp_path, steps=2)
    raw["model"]["config"] = tiny_run.MODEL | FAMILIES[family] | {"model_type": family}
    outcome = train(TrainConfig.from_mapping(raw))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(outcome.directory, attn_implementation="eager").eval()
    ids = torch.randint(VOCAB, (40,), generator=torch.Generator().manual_seed(0))
    again = TrainConfig.from_mapping(
        raw | {"model": {"path": str(outcome.directory), "dtype": "float32"}, "output": str(tmp_path / "more")}
    )
    model = train(dataclasses.replace(again, training=config(steps=1, learning_rate=1e-30, weight_decay=0.0)))
    from chairlift.kernels.weights import PLAIN
    from chairlift.models.loader import load_model
    from chairlift.models.model_files import read_config

    ours = load_model(model.directory, read_config(model.directory), "float32", weight_format=PLAIN)
    with torch.no_grad():
        logits = ours.compute_logits(ours(ids, torch.arange(40), PackedContext([0, 40])))
        expected = theirs(ids[None]).logits[0]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    assert json.loads((outcome.directory / "config.json").read_text())["dtype"] == "float32"
