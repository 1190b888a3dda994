"""A packed step learns exactly what its sequences would teach one by one, and no sequence sees another."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from chairlift.errors import ConfigError
from chairlift.models.context import PackedContext
from chairlift.models.hf_config import parse_config
from chairlift.models.llama import LlamaForCausalLM
from chairlift.train.trainer import Example, Trainer, TrainerConfig, collate, token_losses
from chairlift.train.varlen import VarlenContext

VOCAB = 61


def tiny_model(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    raw = {
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
    }
    model = LlamaForCausalLM(parse_config(raw))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.25)
    return model


def examples(count: int, seed: int = 0) -> list[Example]:
    rng = random.Random(seed)
    made: list[Example] = []
    for _ in range(count):
        length = rng.randint(2, 40)
        tokens = tuple(rng.randrange(VOCAB) for _ in range(length))
        made.append(Example(tokens, first_target=rng.randrange(1, length)))
    return made


def gradients(model: LlamaForCausalLM) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def relative_error(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).norm() / b[name].norm().clamp_min(1e-12)) for name in a)


def one_by_one(model: LlamaForCausalLM, data: list[Example]) -> tuple[float, dict[str, Tensor]]:
    """The plainest way to the same loss: each sequence alone, with nothing of the trainer's but the definition."""
    model.zero_grad(set_to_none=True)
    total = sum(example.num_targets for example in data)
    loss = 0.0
    for example in data:
        ids = torch.tensor(example.token_ids)
        hidden = model(ids, torch.arange(len(ids)), PackedContext([0, len(ids)]))
        logits = model.compute_logits(hidden[:-1]).float()
        nll = functional.cross_entropy(logits, ids[1:], reduction="none")[example.first_target - 1 :]
        part = nll.sum() / total
        part.backward()  # type: ignore[no-untyped-call]
        loss += float(part.detach())
    return loss, gradients(model)


def test_gradients_of_a_pack_equal_those_of_its_sequences_alone() -> None:
    model, data = tiny_model(), examples(17)
    expected_loss, expected = one_by_one(model, data)
    model.zero_grad(set_to_none=True)
    loss = token_losses(model, collate(data)).sum() / sum(example.num_targets for example in data)
    loss.backward()  # type: ignore[no-untyped-call]
    assert float(loss.detach()) == pytest.approx(expected_loss, rel=1e-6)
    assert relative_error(gradients(model), expected) < 5e-6


@pytest.mark.parametrize("capacity", [40, 64, 1000])
def test_a_step_does_not_depend_on_how_sequences_are_divided_among_packs(capacity: int) -> None:
    data = examples(23, seed=1)
    reference, model = tiny_model(), tiny_model()
    expected = Trainer(reference, TrainerConfig(steps=3, warmup_steps=0, capacity=2000)).step(data)
    result = Trainer(model, TrainerConfig(steps=3, warmup_steps=0, capacity=capacity)).step(data)
    assert expected.num_packs == 1
    assert result.loss == pytest.approx(expected.loss, rel=1e-6)
    assert result.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
    assert (result.num_tokens, result.num_targets) == (expected.num_tokens, expected.num_targets)


def test_leak_changing_one_sequence_leaves_the_others_bit_for_bit_unchanged() -> None:
    model, data = tiny_model(), examples(9, seed=2)
    batch = collate(data)
    with torch.no_grad():
        before = model(batch.token_ids, batch.positions, VarlenContext(batch.cu_seqlens))
        for victim in range(len(data)):
            start, end = batch.cu_seqlens[victim], batch.cu_seqlens[victim + 1]
            ids = batch.token_ids.clone()
            ids[start:end] = (ids[start:end] + 1) % VOCAB
            after = model(ids, batch.positions, VarlenContext(batch.cu_seqlens))
            others = torch.ones(len(ids), dtype=torch.bool)
            others[start:end] = False
            assert torch.equal(before[others], after[others])
            assert not torch.equal(before[~others], after[~others])


def test_the_leak_test_can_fail() -> None:
    model, data = tiny_model(), examples(9, seed=2)
    batch = collate(data)
    merged = [0, *batch.cu_seqlens[2:]]  # the boundary between the first two sequences is forgotten
    ids = batch.token_ids.clone()
    ids[: batch.cu_seqlens[1]] = (ids[: batch.cu_seqlens[1]] + 1) % VOCAB
    second = slice(batch.cu_seqlens[1], batch.cu_seqlens[2])
    with torch.no_grad():
        before = model(batch.token_ids, batch.positions, VarlenContext(merged))
        after = model(ids, batch.positions, VarlenContext(merged))
    assert not torch.equal(before[second], after[second])


def test_varlen_attention_equals_packed_attention_with_gradients() -> None:
    torch.manual_seed(0)
    cu_seqlens = [0, 1, 17, 17, 20, 52, 69, 101]  # lengths 1, 16, 0, 3, 32, 17, 32
    q, k, v = (torch.randn(101, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    weight = torch.randn(101, 4, 8)
    outputs: list[Tensor] = []
    grads: list[tuple[Tensor, ...]] = []
    for ctx in (VarlenContext(cu_seqlens), PackedContext(cu_seqlens)):
        out = ctx.attend(0, q, k, v, scale=0.3, window=None)
        outputs.append(out)
        grads.append(torch.autograd.grad((out * weight).sum(), (q, k, v)))
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_varlen_attention_refuses_a_window() -> None:
    q = torch.zeros(3, 2, 4)
    with pytest.raises(ConfigError, match="window"):
        VarlenContext([0, 3]).attend(0, q, q, q, scale=1.0, window=2)


def test_collate_restarts_positions_and_never_crosses_a_boundary() -> None:
    batch = collate([Example((5, 6, 7, 8), first_target=2), Example((9,)), Example((10, 11))])
    assert batch.cu_seqlens == [0, 4, 5, 7]
    assert batch.positions.tolist() == [0, 1, 2, 3, 0, 0, 1]
    assert batch.rows.tolist() == [1, 2, 5]
    assert batch.targets.tolist() == [7, 8, 11]


def test_training_lowers_the_loss_until_the_data_is_known() -> None:
    model = tiny_model()
    data = [Example((1, i, 20 + i, 40 + i), first_target=2) for i in range(2, 12)]
    trainer = Trainer(model, TrainerConfig(steps=80, warmup_steps=5, learning_rate=5e-3, weight_decay=0.0, capacity=32))
    first = trainer.step(data).loss
    for _ in range(79):
        last = trainer.step(data).loss
    assert first > 2.0
    assert last < 0.05


def test_dropout_is_active_in_a_step_and_leaves_no_trace() -> None:
    data = examples(8, seed=3)
    plain, dropped = tiny_model(), tiny_model()
    a = Trainer(plain, TrainerConfig(steps=1, warmup_steps=0)).step(data)
    b = Trainer(dropped, TrainerConfig(steps=1, warmup_steps=0, dropout=0.5)).step(data)
    assert a.loss != b.loss
    assert not any(module._forward_hooks for module in dropped.modules())


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_schedule_rises_then_falls_to_its_end(schedule: str) -> None:
    config = TrainerConfig(steps=100, warmup_steps=10, learning_rate=1.0, schedule=schedule, final_fraction=0.1)  # type: ignore[arg-type]
    rates = [config.rate(step) for step in range(101)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[10] == pytest.approx(1.0)
    assert all(later <= earlier for earlier, later in itertools.pairwise(rates[10:]))
    assert rates[100] == pytest.approx(0.1)
    assert all(math.isfinite(rate) for rate in rates)


def test_steps_without_a_target_are_refused() -> None:
    trainer = Trainer(tiny_model(), TrainerConfig(steps=1, warmup_steps=0))
    with pytest.raises(ConfigError, match="no example has a target"):
        trainer.step([Example((1,)), Example((1, 2), first_target=2)])
    with pytest.raises(ConfigError):
        collate([])


@pytest.mark.parametrize(
    "change", [{"steps": 0}, {"capacity": 1}, {"learning_rate": 0.0}, {"dropout": 1.0}, {"warmup_steps": 9}]
)
def test_impossible_settings_are_refused(change: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        TrainerConfig(**{"steps": 5, "warmup_steps": 1, **change})  # type: ignore[arg-type]
