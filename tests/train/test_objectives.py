"""Objectives of reinforcement learning, preferences and distillation: values of TRL, definitions, and known faults."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from chairlift.errors import ConfigError
from chairlift.lora.trainable import TrainableAdapter
from chairlift.models.causal_lm import CausalLM
from chairlift.models.hf_config import parse_config
from chairlift_train import preferences
from chairlift_train.config import TrainerConfig
from chairlift_train.forward import native_network
from chairlift_train.networks import NativeNetwork
from chairlift_train.objectives import (
    clipped_gain,
    distillation_losses,
    group_advantages,
    kl_penalty,
    preference_losses,
    sequence_sums,
)
from chairlift_train.preferences import learn_preferences, pair_items
from chairlift_train.stream import PackStream
from chairlift_train.varlen import VarlenContext
from tests.native import needs_kernels
from tests.train.test_native_families import config_of, model_of, whole_error

# Two answers of 3 and 4 tokens; what follows was computed by GRPOTrainer._compute_loss of TRL 1.16 from the same
# numbers, with loss_type "dapo", epsilon 0.2 and epsilon_high 0.28.
NOW = [-1.0, -2.0, -0.5, -0.7, -3.0, -1.2, -0.1]
BEFORE = [-1.3, -1.5, -0.55, -1.2, -2.0, -1.2, -2.1]
ADVANTAGES = [0.8] * 3 + [-1.1] * 4
OF_TRL = {
    None: (1.3673304319, [0.0, -0.0693177953, -0.1201452762, 0.2590847909, 0.0, 0.1571428627, 1.1611373425]),
    4.0: (0.8347645998, [0.0, -0.0693177953, -0.1201452762, 0.2590847909, 0.0, 0.1571428627, 0.0]),
}


@pytest.mark.parametrize("most", OF_TRL)
def test_the_clipped_objective_has_trls_value_and_gradient(most: float | None) -> None:
    now = torch.tensor(NOW, requires_grad=True)
    gain = clipped_gain(now, torch.tensor(BEFORE), torch.tensor(ADVANTAGES), low=0.2, high=0.28, most=most)
    loss = gain.losses.sum() / len(NOW)
    loss.backward()  # type: ignore[no-untyped-call]
    assert now.grad is not None
    value, gradient = OF_TRL[most]
    assert float(loss.detach()) == pytest.approx(value, rel=1e-6)
    assert now.grad.tolist() == pytest.approx(gradient, rel=1e-6)
    assert [bool(clipped) for clipped in gain.clipped] == [slope == 0 for slope in gradient]


def test_equal_weights_have_ratio_1_and_no_drift() -> None:
    gain = clipped_gain(torch.tensor(NOW), torch.tensor(NOW), torch.tensor(ADVANTAGES))
    assert gain.ratios.tolist() == [1.0] * 7
    assert gain.drift.tolist() == [0.0] * 7
    assert not gain.clipped.any()


def test_advantages_are_trls_within_each_group() -> None:
    """The first group is TRL's: (reward - mean) / (std + 0.0001)."""
    rewards, groups = [1.0, 5.0, 0.0, 0.5, 5.0, 2.0, 7.0], ["a", "b", "a", "a", "b", "a", "alone"]
    found = group_advantages(rewards, groups)
    assert [found[i] for i in (0, 2, 3, 5)] == pytest.approx([0.1463678628, -1.024574995, -0.4391035736, 1.3173108101])
    assert [found[i] for i in (1, 4, 6)] == [0.0] * 3  # equal rewards, and a group of one
    assert group_advantages([1.0, 3.0], "xx", scale="none") == [-1.0, 1.0]


def test_the_penalty_has_no_gradient_and_the_sign_of_a_reward() -> None:
    before = torch.tensor([-1.0, -2.0], requires_grad=True)
    found = kl_penalty(before, torch.tensor([-1.5, -1.0]), 0.1)
    assert found.tolist() == pytest.approx([-0.05, 0.1])
    assert not found.requires_grad


def test_preference_losses_follow_the_definition() -> None:
    chosen, rejected = torch.tensor([-5.0, -9.0]), torch.tensor([-7.0, -6.0])
    reference = torch.tensor([-6.0, -8.0]), torch.tensor([-6.5, -6.5])
    margins = [0.2 * ((-5 + 6) - (-7 + 6.5)), 0.2 * ((-9 + 8) - (-6 + 6.5))]
    found = preference_losses(chosen, rejected, *reference, beta=0.2)
    assert found.tolist() == pytest.approx([math.log1p(math.exp(-margin)) for margin in margins])
    smooth = preference_losses(chosen, rejected, *reference, beta=0.2, label_smoothing=0.1)
    assert smooth.tolist() == pytest.approx(
        [0.9 * math.log1p(math.exp(-margin)) + 0.1 * math.log1p(math.exp(margin)) for margin in margins]
    )
    assert preference_losses(chosen, rejected, chosen, rejected).tolist() == pytest.approx([math.log(2)] * 2)


def test_distillation_learns_the_teachers_renormalised_tokens() -> None:
    """Against the cross-entropy with whole rows of probabilities; a row of the teacher has one token less."""
    torch.manual_seed(0)
    logits = torch.randn(3, 7, requires_grad=True)
    teacher = torch.randn(3, 7).log_softmax(-1)
    values, ids = teacher.topk(4)
    ids[1, 3] = -1
    dense = torch.zeros(3, 7)
    for row in range(3):
        kept = ids[row][ids[row] >= 0]
        dense[row, kept] = values[row, : len(kept)].softmax(-1)
    found = distillation_losses(logits, ids, values)
    expected = functional.cross_entropy(logits, dense, reduction="none")
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    "call",
    [
        lambda: group_advantages([1.0, math.nan], [0, 0]),
        lambda: group_advantages([1.0], [0, 0]),
        lambda: clipped_gain(torch.zeros(2), torch.zeros(3), torch.zeros(2)),
        lambda: clipped_gain(torch.zeros(2), torch.zeros(2), torch.zeros(2), most=0.5),
        lambda: preference_losses(*[torch.zeros(1)] * 4, beta=0.0),
        lambda: distillation_losses(torch.zeros(2, 5), torch.tensor([[1], [-1]]), torch.zeros(2, 1)),
        lambda: pair_items(0, [1], [2], []),
    ],
)
def test_numbers_that_do_not_fit_together_are_refused(call: Any) -> None:
    with pytest.raises(ConfigError):
        call()


# -- pairs in packs ----------------------------------------------------------------------------------------------------

PAIRS = [
    ([3, 4, 5], [6, 7], [8, 9, 10, 11]),
    ([12], [13, 14, 15, 16, 17], [18]),
    ([20, 21], [22, 23, 24], [25, 26, 27]),
]


def adapted() -> tuple[CausalLM, TrainableAdapter]:
    model = model_of(parse_config(config_of("llama"))).requires_grad_(False)
    torch.manual_seed(1)
    adapter = TrainableAdapter(model, r=3, alpha=6)
    with torch.no_grad():
        for name, matrix in adapter.parameters.items():
            if "lora_B" in name:
                matrix.normal_(0, 0.1)
    return model, adapter


def packs_of(capacity: int) -> Any:
    items = [item for number, pair in enumerate(PAIRS) for item in pair_items(number, *pair)]
    (packs,) = PackStream(items, capacity, step=f"sequences:{len(items)}").steps()
    return packs


def one_by_one() -> tuple[float, dict[str, Tensor]]:
    """The definition: each answer alone, all graphs at once, and a model without an adapter as the reference."""
    model, adapter = adapted()
    plain = model_of(parse_config(config_of("llama")))

    def total(network: CausalLM, prompt: list[int], answer: list[int]) -> Tensor:
        ids = torch.tensor([*prompt, *answer])
        hidden = network(ids, torch.arange(len(ids)), VarlenContext((0, len(ids))))
        rows = network.compute_logits(hidden[len(prompt) - 1 : -1]).log_softmax(-1)
        return rows.gather(1, torch.tensor(answer)[:, None]).sum()

    losses = []
    for prompt, chosen, rejected in PAIRS:
        new = total(model, prompt, chosen) - total(model, prompt, rejected)
        with torch.no_grad():
            old = total(plain, prompt, chosen) - total(plain, prompt, rejected)
        losses.append(-functional.logsigmoid(0.5 * (new - old)))
    loss = torch.stack(losses).mean()
    loss.backward()  # type: ignore[no-untyped-call]
    return float(loss.detach()), grads(adapter)


def grads(adapter: TrainableAdapter) -> dict[str, Tensor]:
    return {name: matrix.grad.clone() for name, matrix in adapter.parameters.items() if matrix.grad is not None}


def learnt(capacity: int, forward: Any = "torch") -> tuple[Any, dict[str, Tensor]]:
    model, adapter = adapted()
    network = native_network(model, adapter, TrainerConfig(steps=1, warmup_steps=0, forward=forward))
    stats = learn_preferences(network, packs_of(capacity), beta=0.5)
    return stats, grads(adapter)


@pytest.mark.parametrize("forward", ["torch", pytest.param("exact", marks=needs_kernels)])
@pytest.mark.parametrize("capacity", [8, 12, 100])
def test_pairs_teach_the_same_wherever_they_are_packed(capacity: int, forward: str) -> None:
    expected_loss, expected = one_by_one()
    stats, found = learnt(capacity, forward)
    assert stats.loss == pytest.approx(expected_loss, rel=1e-5)
    assert whole_error(found, expected) < 1e-5
    assert 0 <= stats.accuracy <= 1


@pytest.mark.planted("test_pairs_teach_the_same_wherever_they_are_packed")
@pytest.mark.parametrize("fault", ["own reference", "another beta in the slopes", "sums of other sequences"])
def test_a_fault_in_pairs_would_be_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault == "own reference":
        monkeypatch.setattr(NativeNetwork, "reference", lambda _self: torch.no_grad())
    elif fault == "another beta in the slopes":
        monkeypatch.setattr(
            preferences, "preference_losses", lambda *sums, beta, **more: preference_losses(*sums, beta=0.4, **more)
        )
    else:
        monkeypatch.setattr(
            preferences, "sequence_sums", lambda values, segments, count: sequence_sums(values, segments, count).roll(1)
        )
    _, expected = one_by_one()
    _, found = learnt(100)
    assert whole_error(found, expected) > 1e-3


def test_half_a_pair_and_a_network_without_a_reference_are_refused() -> None:
    model, adapter = adapted()
    items = pair_items(4, [1, 2], [3], [4])[:1]
    (packs,) = PackStream(items, 10, step="sequences:1").steps()
    with pytest.raises(ConfigError, match="only one answer of pair 4"):
        learn_preferences(NativeNetwork(model, adapter), packs)
    with pytest.raises(ConfigError, match="no reference"):
        learn_preferences(NativeNetwork(model_of(parse_config(config_of("llama")))), packs_of(100))
