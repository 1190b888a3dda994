"""The trainer of many clients: gradients are PyTorch's, log-probabilities the engine's, and nobody sees the others."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from chairlift import LLM, LoRARequest, SamplingParams
from chairlift_train.service import groups
from chairlift_train.service.compute import client, losses, packs
from chairlift_train.service.compute.calls import (
    AdamParameters,
    AdapterConfig,
    Datum,
    PassCall,
    PassOutcome,
    TrainingError,
)
from chairlift_train.service.compute.client import Client
from chairlift_train.service.compute.packs import PackPass
from chairlift_train.service.compute.trainer import AdapterTrainer
from chairlift_train.varlen import VarlenContext
from tests.models.tiny import tiny_hf_model
from tests.native import needs_kernels
from tests.train.service.compute import calls
from tests.train.service.compute.calls import (
    ADAM,
    KINDS,
    call,
    datum,
    gradient_of,
    make,
    near,
    plain_gradient,
    round_of,
)
from tools.train_bundled_model import ASSETS_DIR

pytestmark = needs_kernels
pytest.importorskip("transformers")

LARGEST = 3e-6
"""Largest difference of a gradient from PyTorch's, as a share of its norm."""


def apart(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def outcomes(trainer: AdapterTrainer, *given: Any) -> list[PassOutcome]:
    found = trainer.forward_backward(list(given))
    assert not [each.error for each in found if each.error]
    return found


# -- gradients ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", KINDS)
def test_gradients_of_each_loss_are_pytorchs(loss: str) -> None:
    trainer = AdapterTrainer.load_model(ASSETS_DIR)
    make(trainer, "a")
    rng = np.random.default_rng(1)
    given = call("a", [datum(rng, length, loss) for length in (9, 1, 30)], loss)
    given = given if loss == "cross_entropy" else near(trainer, given)
    (found,) = outcomes(trainer, given)
    assert apart(gradient_of(trainer, "a"), plain_gradient(trainer, "a", [given])) < LARGEST
    assert set(found.metrics) == {"loss:sum"}


def check_gradient(trainer: AdapterTrainer, given: list[PassCall]) -> None:
    """Compare with PyTorch's, which has rounding of its own: the weights of the tiny models are large."""
    outcomes(trainer, *given)
    expected = plain_gradient(trainer, "a", given)
    rounding = apart(expected, plain_gradient(trainer, "a", given, double=True))
    assert apart(gradient_of(trainer, "a"), expected) < max(LARGEST, 3 * rounding)
    assert rounding < 5e-5, "the comparison says nothing"


FAMILIES = ("gemma2", "gpt2", "qwen3_moe", "qwen3_next")
"""One of each kind: tied and capped, with biases and learned positions, of experts, with recurrent states."""


@pytest.mark.parametrize(
    "family", [*FAMILIES[:1], *(pytest.param(name, marks=pytest.mark.nightly) for name in FAMILIES[1:])]
)
def test_gradients_of_other_families_are_pytorchs(family: str, tmp_path: Path) -> None:
    trainer = calls.trainer(tmp_path, family)
    make(trainer, "a")
    check_gradient(trainer, round_of("a", 3))


def test_a_position_may_have_several_targets(tmp_path: Path) -> None:
    trainer = calls.trainer(tmp_path)
    make(trainer, "a")
    rng = np.random.default_rng(2)
    given = call("a", [datum(rng, 12, width=3), datum(rng, 5), datum(rng, 7, width=1)])
    (found,) = outcomes(trainer, dataclasses.replace(given, forward_only=True))
    assert [each.shape for each in found.logprobs] == [(12, 3), (5,), (7, 1)]
    check_gradient(trainer, [given])


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        ({"train_mlp": False, "train_unembed": False}, {"self_attn"}),
        ({"train_attn": False}, {"mlp", "lm_head"}),
        ({"train_mlp": False, "train_attn": False}, {"lm_head"}),
    ],
)
def test_only_the_chosen_layers_learn(config: dict[str, Any], layers: set[str], tmp_path: Path) -> None:
    trainer = calls.trainer(tmp_path)
    make(trainer, "a", **config)
    client = trainer._clients["a"]
    assert {name for name in ("self_attn", "mlp", "lm_head") if any(name in each for each in client.products)} == layers
    check_gradient(trainer, round_of("a", 5))


def test_logits_that_are_computed_again_give_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for kept in (packs._KEPT_BYTES, 0):
        monkeypatch.setattr(packs, "_KEPT_BYTES", kept)
        monkeypatch.setattr(packs, "_LOGIT_BYTES", 4 * calls.VOCAB * 7)  # chunks of seven rows
        trainer = calls.trainer(tmp_path, "gemma2")
        make(trainer, "a")
        outcomes(trainer, *round_of("a", 3))
        found.append(gradient_of(trainer, "a"))
    assert torch.equal(*found)


def test_gradients_are_added_in_the_order_of_calls_and_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "GROUP_TOKENS", 35)
    rng = np.random.default_rng(4)
    data = [datum(rng, length) for length in (11, 30, 4, 19, 8, 33)]
    alone = []
    for each in (data[:1], data[1:3], data[3:5], data[5:]):
        trainer = calls.trainer(tmp_path)
        make(trainer, "a")
        outcomes(trainer, call("a", each))
        alone.append(gradient_of(trainer, "a"))
    trainer = calls.trainer(tmp_path)
    make(trainer, "a")
    outcomes(trainer, call("a", data[:5]), call("a", data[5:]))
    assert torch.equal(gradient_of(trainer, "a"), ((alone[0] + alone[1]) + alone[2]) + alone[3])


def test_the_data_of_a_group_do_not_see_each_other(tmp_path: Path) -> None:
    """The gradient of a group is that of its data, one after another, up to rounding."""
    rng = np.random.default_rng(6)
    data = [datum(rng, length) for length in (1, 9, 17, 17, 3, 40, 2)]
    packed, single = calls.trainer(tmp_path), calls.trainer(tmp_path)
    for trainer in (packed, single):
        make(trainer, "a")
    outcomes(packed, call("a", data))
    outcomes(single, *(call("a", [each]) for each in data))
    assert apart(gradient_of(packed, "a"), gradient_of(single, "a")) < LARGEST


@pytest.mark.planted("test_the_data_of_a_group_do_not_see_each_other")
def test_data_that_see_each_other_would_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packs, "VarlenContext", lambda starts: VarlenContext((starts[0], starts[-1])))
    with pytest.raises(AssertionError):
        test_the_data_of_a_group_do_not_see_each_other(tmp_path)


# -- company -----------------------------------------------------------------------------------------------------------


def train(trainer: AdapterTrainer, models: dict[str, int], rounds: int) -> dict[str, list[Any]]:
    """Train models (id -> seed) together. Returns everything that each client got, and its state at the end."""
    results: dict[str, list[Any]] = {name: [] for name in models}
    for name, seed in models.items():
        make(trainer, name, seed=seed, rank=(2, 5)[seed % 2], train_unembed=seed % 3 != 0)
    for number in range(rounds):
        given = [each for name, seed in models.items() for each in round_of(name, 100 * seed + number)]
        for each, found in zip(given, outcomes(trainer, *given), strict=True):
            results[each.model_id].append((found.metrics, [one.tolist() for one in found.logprobs]))
        for name, seed in models.items():
            adam = dataclasses.replace(ADAM, grad_clip_norm=float(seed % 2), beta1=0.8 + 0.01 * seed)
            results[name].append(dict(trainer.optim_step(name, adam)))
    for name in models:
        state = trainer._clients[name]
        assert state.moments is not None
        results[name] += [each.tolist() for each in (state.weights, state.moments.first, state.moments.second)]
    return results


def check_company(tmp_path: Path, count: int, rounds: int, dtype: str = "float32") -> None:
    models = {f"m{seed}": seed for seed in range(1, count + 1)}
    together = train(calls.trainer(tmp_path, dtype=dtype, pack_tokens=250, step_tokens=25), models, rounds)
    for name, seed in models.items():
        alone = train(calls.trainer(tmp_path, dtype=dtype), {name: seed}, rounds)
        assert together[name] == alone[name], f"{name} sees its company"


@pytest.fixture
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups so small that calls are divided among packs."""
    monkeypatch.setattr(groups, "GROUP_TOKENS", 50)


@pytest.mark.usefixtures("small_groups")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_client_has_the_bits_that_it_has_alone(dtype: str, tmp_path: Path) -> None:
    check_company(tmp_path, 3, 2, dtype)


@pytest.mark.nightly
@pytest.mark.parametrize("tokens", [groups.GROUP_TOKENS, 50])
@pytest.mark.parametrize("threads", [1, 2])
def test_eight_clients_have_the_bits_that_they_have_alone(
    threads: int, tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "GROUP_TOKENS", tokens)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        check_company(tmp_path, 8, 6)
    finally:
        torch.set_num_threads(before)


def leaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient goes to the first call of the pack."""
    add = PackPass._add

    def wrong(self: PackPass, group: Any, *given: Any) -> Any:
        first = self._groups[0]
        if first.running.client.weights.shape == group.running.client.weights.shape:
            group = packs.Group([dataclasses.replace(group.segments[0], running=first.running)])
        return add(self, group, *given)

    monkeypatch.setattr(PackPass, "_add", wrong)


def adapter_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows are computed with the adapter of the first row."""
    score = PackPass._score

    def wrong(self: PackPass) -> Any:
        self._numbers[:] = self._numbers[0]
        return score(self)

    monkeypatch.setattr(PackPass, "_score", wrong)


def shared_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients of equal size share the second moment."""
    adamw, kept = client._adamw, {}

    def wrong(weights: Tensor, before: Any, *given: Any) -> Any:
        if before is not None and weights.shape in kept:
            before = dataclasses.replace(before, second=kept[weights.shape])
        moved, moments = adamw(weights, before, *given)
        kept[weights.shape] = moments.second
        return moved, moments

    monkeypatch.setattr(client, "_adamw", wrong)


def old_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine keeps the matrices from before a step while others train."""
    withdraw = AdapterTrainer._withdraw
    monkeypatch.setattr(
        AdapterTrainer, "_withdraw", lambda self, name: None if len(self.models) > 1 else withdraw(self, name)
    )


MISTAKES = {each.__name__: each for each in (leaks, adapter_of_another, shared_moments, old_weights)}


@pytest.mark.planted("test_a_client_has_the_bits_that_it_has_alone")
@pytest.mark.usefixtures("small_groups")
@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_crosses_clients_would_be_seen(mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    MISTAKES[mistake](monkeypatch)
    with pytest.raises(AssertionError):
        check_company(tmp_path, 5, 2)  # the first and the last have adapters of equal size


@pytest.mark.planted("test_gradients_are_added_in_the_order_of_calls_and_groups")
def test_another_order_of_the_sums_would_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backward = PackPass.slices

    def reversed_groups(self: PackPass) -> Any:
        score = self._score

        def scored() -> Any:
            found = yield from score()
            self._groups.reverse()
            return found

        monkeypatch.setattr(self, "_score", scored, raising=False)
        yield from backward(self)

    monkeypatch.setattr(PackPass, "slices", reversed_groups)
    with pytest.raises(AssertionError):
        test_gradients_are_added_in_the_order_of_calls_and_groups(tmp_path, monkeypatch)


@pytest.mark.planted("test_gradients_of_each_loss_are_pytorchs")
@pytest.mark.parametrize("loss", KINDS)
def test_a_mean_would_be_seen(loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = losses.LOSSES[loss]
    wrong = dataclasses.replace(right, compute=lambda p, *given: right.compute(p, *given) / len(p))
    monkeypatch.setitem(losses.LOSSES, loss, wrong)  # type: ignore[misc]
    with pytest.raises(AssertionError):
        test_gradients_of_each_loss_are_pytorchs(loss)


# -- the engine's bits -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "dtype"), [("llama", "float32"), ("gemma2", "bfloat16")])
def test_log_probabilities_are_the_samplers(family: str, dtype: str, tmp_path: Path) -> None:
    """The trainer computes the log-probabilities that the engine reports when it draws the answer token by token, with
    the adapter that the trainer has saved."""
    trainer = calls.trainer(tmp_path, family, dtype=dtype)
    folder = tiny_hf_model(tmp_path, family)
    llm = LLM(folder, dtype=dtype, num_kv_blocks=64, skip_tokenizer_init=True, enable_lora=True)
    make(trainer, "a", rank=5)
    make(trainer, "b", rank=3, seed=1)
    for version in (1, 2):
        trainer.save("a", tmp_path / f"a{version}", optimizer=False)
        params = SamplingParams(temperature=1.0, max_tokens=25, ignore_eos=True, logprobs=0, seed=version)
        asked = LoRARequest(f"a{version}", version, tmp_path / f"a{version}")
        (output,) = llm.generate([[5, 9, 2]], params, lora_request=asked)
        answer = output.outputs[0]
        assert answer.logprobs is not None
        expected = [row[token].logprob for token, row in zip(answer.token_ids, answer.logprobs, strict=True)]
        whole = np.array([5, 9, 2, *answer.token_ids], dtype=np.int64)
        given = {
            "target_tokens": whole[1:],
            "logprobs": np.array([0.0, 0.0, *expected], np.float32),
            "advantages": np.array([0.0] * 2 + [1.0] * len(expected), np.float32),
        }
        rollout = Datum(whole[:-1].astype(np.int32), given)
        other = round_of("b", version)
        found = outcomes(trainer, *other[:1], call("a", [rollout], "importance_sampling"), *other[1:])[1]
        assert found.logprobs[0][2:].tolist() == expected
        assert found.metrics["loss:sum"] == -len(expected)  # every ratio is exactly 1
        trainer.optim_step("a", ADAM)


def test_a_forward_pass_alone_leaves_no_gradient(tmp_path: Path) -> None:
    trainer = calls.trainer(tmp_path)
    make(trainer, "a")
    given = round_of("a", 1)
    first = outcomes(trainer, *(dataclasses.replace(each, forward_only=True) for each in given))
    assert trainer._clients["a"].gradient is None
    for one, other in zip(first, outcomes(trainer, *given), strict=True):
        assert one.metrics == other.metrics
        assert [each.tolist() for each in one.logprobs] == [each.tolist() for each in other.logprobs]


def test_a_custom_loss_is_cross_entropy_with_its_derivatives_as_weights(tmp_path: Path) -> None:
    """The client's own loss is C = -0.1 sum (p - q)^2, whose derivatives have both signs."""
    rng = np.random.default_rng(8)
    one = datum(rng, 20, "dro")
    one.inputs["advantages"][:] = 0  # type: ignore[index]
    direct = calls.trainer(tmp_path)
    make(direct, "a")
    outcomes(direct, call("a", [one], "dro", loss_config={"beta": 0.2}))
    custom = calls.trainer(tmp_path)
    make(custom, "a")
    plain = Datum(one.tokens, {"target_tokens": one.inputs["target_tokens"]})
    (found,) = outcomes(custom, call("a", [plain], forward_only=True))
    weights = -0.2 * (found.logprobs[0] - one.inputs["logprobs"])
    assert weights.min() < 0 < weights.max()
    outcomes(custom, call("a", [Datum(one.tokens, {**plain.inputs, "weights": weights})]))
    assert apart(gradient_of(custom, "a"), gradient_of(direct, "a")) < LARGEST


def test_weights_of_zero_are_a_gradient_of_zero(tmp_path: Path) -> None:
    trainer = calls.trainer(tmp_path)
    make(trainer, "a")
    one = datum(np.random.default_rng(0), 6)
    one.inputs["weights"][:] = 0  # type: ignore[index]
    outcomes(trainer, call("a", [one]))
    assert not bool(gradient_of(trainer, "a").any())
    assert trainer.optim_step("a", ADAM)["grad_norm"] == 0


# -- a step ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adam", [AdamParameters(), ADAM, AdamParameters(0.3, 0.5, 0.7, 1e-4, 0.2)])
def test_steps_are_those_of_adamw(adam: AdamParameters, tmp_path: Path) -> None:
    trainer = calls.trainer(tmp_path)
    make(trainer, "a")
    parameter = torch.nn.Parameter(trainer._clients["a"].weights.clone())
    betas = adam.beta1, adam.beta2
    optimizer = torch.optim.AdamW(
        [parameter], adam.learning_rate, betas, adam.eps, adam.weight_decay, foreach=False, fused=False
    )
    for seed in range(4):
        outcomes(trainer, *round_of("a", seed))
        parameter.grad = gradient_of(trainer, "a")
        optimizer.step()
        assert trainer.optim_step("a", adam)["step"] == seed + 1
        assert torch.equal(trainer._clients["a"].weights, parameter.detach())


def test_a_gradient_above_the_limit_is_scaled(tmp_path: Path) -> None:
    trainer = calls.trainer(tmp_path)
    make(trainer, "a")
    outcomes(trainer, *round_of("a", 0))
    gradient = gradient_of(trainer, "a")
    found = trainer.optim_step("a", dataclasses.replace(ADAM, grad_clip_norm=0.5))
    assert found["grad_norm"] == pytest.approx(float(gradient.norm()), rel=1e-6) and found["grad_norm"] > 0.5
    moments = trainer._clients["a"].moments
    assert moments is not None
    assert float(moments.first.norm()) == pytest.approx(0.5 * (1 - ADAM.beta1), rel=1e-4)


def test_a_step_without_a_gradient_is_refused(tmp_path: Path) -> None:
    trainer = calls.trainer(tmp_path)
    make(trainer, "a")
    for _ in range(2):
        with pytest.raises(TrainingError, match="no gradient"):
            trainer.optim_step("a", ADAM)
        outcomes(trainer, *round_of("a", 0))
        trainer.optim_step("a", ADAM)


def test_a_step_to_infinity_changes_nothing(tmp_path: Path) -> None:
    trainer = calls.trainer(tmp_path)
    make(trainer, "a")
    before = trainer._clients["a"].weights.clone()
    one = datum(np.random.default_rng(0), 9)
    outcomes(trainer, call("a", [altered(one, weights=np.full(9, 1e33, np.float32))]))  # its square is infinite
    with pytest.raises(TrainingError, match="not finite"):
        trainer.optim_step("a", ADAM)
    assert torch.equal(trainer._clients["a"].weights, before)
    with pytest.raises(TrainingError, match="no gradient"):
        trainer.optim_step("a", ADAM)
    outcomes(trainer, *round_of("a", 0))
    trainer.optim_step("a", ADAM)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"learning_rate": float("nan")}, "learning_rate must be a finite number"),
        ({"beta1": 1.0}, "beta1 must be below 1"),
        ({"eps": 0.0}, "eps must be above 0"),
        ({"learning_rate": 1e20, "weight_decay": 1e20}, "learning_rate and learning_rate . weight_decay must be at"),
        ({"grad_clip_norm": -1.0}, "grad_clip_norm must be a finite number of at least 0"),
    ],
)
def test_wrong_parameters_of_adamw_are_refused(wrong: dict[str, float], message: str, tmp_path: Path) -> None:
    trainer = calls.trainer(tmp_path)
    make(trainer, "a")
    outcomes(trainer, *round_of("a", 0))
    with pytest.raises(TrainingError, match=message):
        trainer.optim_step("a", AdamParameters(**wrong))
    trainer.optim_step("a", ADAM)  # the gradient is still there


# -- errors ------------------------------------------------------------------------------------------------------------


def altered(one: Datum, **inputs: Any) -> Datum:
    return dataclasses.replace(one, inputs={**one.inputs, **inputs})


GOOD = datum(np.random.default_rng(0), 6, "ppo")
WRONG: dict[str, tuple[Datum, str]] = {
    "nan": (altered(GOOD, advantages=np.array([0.0, np.nan, 0, 0, 0, 0], np.float32)), "datum 1: advantages has NaN"),
    "length": (altered(GOOD, logprobs=np.zeros(5, np.float32)), r"datum 1: logprobs has the shape \[5\]"),
    "targets": (altered(GOOD, target_tokens=np.zeros(7, np.int64)), r"datum 1: target_tokens has the shape \[7\]"),
    "unknown": (altered(GOOD, target_tokens=np.full(6, 128)), "datum 1: target_tokens has the token id 128"),
    "negative": (dataclasses.replace(GOOD, tokens=np.full(6, -1, np.int32)), "datum 1: tokens has the token id -1"),
    "long": (datum(np.random.default_rng(0), 65, "ppo"), "datum 1: 65 tokens, and this model takes 1 to 64"),
    "empty": (Datum(np.zeros(0, np.int32), GOOD.inputs), "datum 1: 0 tokens"),
    "unread": (altered(GOOD, mask=np.ones(6, np.float32)), "datum 1: the loss ppo reads .*, and not 'mask'"),
    "missing": (
        Datum(GOOD.tokens, {"target_tokens": GOOD.inputs["target_tokens"]}),
        "datum 1: the loss ppo needs logprobs",
    ),
    "several": (altered(GOOD, target_tokens=np.zeros((6, 2), np.int64)), "the loss ppo takes"),
    "overflow": (altered(GOOD, logprobs=np.full(6, -1e4, np.float32)), "datum 1: a log-probability or the loss is not"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_datum_fails_its_call_only(kind: str, tmp_path: Path) -> None:
    wrong, message = WRONG[kind]
    if kind == "overflow":
        wrong = altered(wrong, advantages=np.full(6, -1.0, np.float32))  # no clip bounds these
    given = [*round_of("a", 1), call("b", [GOOD, wrong, GOOD], "ppo"), *round_of("c", 2)]
    trainer = calls.trainer(tmp_path, max_tokens=64)
    for name in "abc":
        make(trainer, name, seed=ord(name))
    found = trainer.forward_backward(given)
    assert [bool(each.error) for each in found] == [False, False, True, False, False]
    assert re.search(message, found[2].error), found[2].error
    assert found[2].logprobs == () and trainer._clients["b"].gradient is None
    for name, own in (("a", given[:2]), ("c", given[3:])):
        alone = calls.trainer(tmp_path, max_tokens=64)
        make(alone, name, seed=ord(name))
        outcomes(alone, *own)
        assert torch.equal(gradient_of(trainer, name), gradient_of(alone, name))
    outcomes(trainer, call("b", [GOOD], "ppo"))
    trainer.optim_step("b", ADAM)


def test_a_failed_call_leaves_the_gradient_of_earlier_calls(tmp_path: Path) -> None:
    trainer = calls.trainer(tmp_path)
    make(trainer, "a")
    outcomes(trainer, call("a", [GOOD], "ppo"))
    before = gradient_of(trainer, "a")
    wrong = altered(WRONG["overflow"][0], advantages=np.full(6, -1.0, np.float32))
    (found,) = trainer.forward_backward([call("a", [GOOD, wrong], "ppo")])
    assert found.error
    assert torch.equal(gradient_of(trainer, "a"), before)


@pytest.mark.planted("test_a_failed_call_leaves_the_gradient_of_earlier_calls")
def test_a_partial_gradient_would_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def keep(self: packs.RunningCall, datum: int, problem: str) -> None:
        self.error = problem
        if self.gradient is not None:
            self.client.add(self.gradient + 1)

    monkeypatch.setattr(packs.RunningCall, "fail", keep)
    with pytest.raises(AssertionError):
        test_a_failed_call_leaves_the_gradient_of_earlier_calls(tmp_path)


@pytest.mark.parametrize(
    ("loss", "config", "message"),
    [
        ("dimuon", {}, "there is no loss 'dimuon'; take one of cross_entropy"),
        ("ppo", {"epsilon": 0.2}, "the loss ppo takes clip_low_threshold, clip_high_threshold, got 'epsilon'"),
        ("ppo", {"clip_low_threshold": "low"}, "must be a finite number, got 'low'"),
        ("ppo", {"clip_high_threshold": 0.2}, "both are ratios"),
        ("dro", {"beta": -1.0}, "beta of the loss dro must not be negative"),
        ("cross_entropy", {"beta": 1.0}, "takes no options"),
    ],
)
def test_unknown_losses_and_options_are_refused(loss: str, config: Any, message: str, tmp_path: Path) -> None:
    trainer = calls.trainer(tmp_path)
    make(trainer, "a")
    (found,) = trainer.forward_backward([call("a", [GOOD], loss, loss_config=config)])
    assert message in found.error


def test_models_are_refused_with_the_reason(tmp_path: Path) -> None:
    trainer = calls.trainer(tmp_path, max_models=2, max_rank=8)
    trainer.create("a", AdapterConfig(8))
    for config, message in (
        (AdapterConfig(0), "rank must be from 1 to 8, got 0"),
        (AdapterConfig(9), "rank must be from 1 to 8, got 9"),
        (AdapterConfig(4, train_mlp=False, train_attn=False, train_unembed=False), "nothing would learn"),
        (AdapterConfig(4, seed=2**64), "seed must fit into 64 bits"),
    ):
        with pytest.raises(TrainingError, match=message):
            trainer.create("b", config)
    with pytest.raises(TrainingError, match="exists already"):
        trainer.create("a", AdapterConfig(8))
    trainer.create("b", AdapterConfig(8))
    with pytest.raises(TrainingError, match="no room for another"):
        trainer.create("c", AdapterConfig(8))
    outcomes(trainer, *round_of("a", 0), *round_of("b", 0))
    trainer.drop("a")
    trainer.drop("unknown")
    trainer.create("c", AdapterConfig(3))
    outcomes(trainer, *round_of("b", 1), *round_of("c", 1))
    (gone,) = trainer.forward_backward(round_of("a", 0)[:1])
    assert "there is no model 'a'" in gone.error
    assert (found := trainer.forward_backward([call("b", [])])[0].error) and "has no data" in found


def test_equal_seeds_are_equal_matrices(tmp_path: Path) -> None:
    trainer = calls.trainer(tmp_path)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        trainer.create(name, AdapterConfig(4, seed=seed))
    a, b, c = (trainer._clients[name].weights for name in "abc")
    assert torch.equal(a, b) and not torch.equal(a, c)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_price_is_the_memory_of_a_client(tmp_path: Path) -> None:
    trainer = calls.trainer(tmp_path)
    config = AdapterConfig(32)
    trainer.create("a", config)
    outcomes(trainer, *round_of("a", 0))
    trainer.optim_step("a", ADAM)
    outcomes(trainer, *round_of("a", 1))
    client: Client = trainer._clients["a"]
    assert client.moments is not None and client.gradient is not None
    vectors = [client.weights, client.gradient, client.gradient, client.moments.first, client.moments.second]
    held = trainer._table.hold(client.served()).nbytes  # of fused layers, it has zeros between the parts
    assert trainer.price(config) == pytest.approx(sum(each.nbytes for each in vectors) + held, rel=0.1)
