"""The load-balancing loss belongs to the step: neither packs nor ranks change it, and no token is dropped."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, distributed, multiprocessing
from torch.nn import functional

from chairlift.errors import ConfigError
from chairlift.models.causal_lm import CausalLM
from chairlift.models.context import PackedContext
from chairlift.models.hf_config import parse_config
from chairlift.models.layers.experts import MixtureOfExperts
from chairlift_train.expert_balance import ExpertBalance
from chairlift_train.stream import PackStream
from chairlift_train.trainer import Trainer
from tests.models import tiny
from tests.train.test_native_families import config_of, model_of, whole_error
from tests.train.test_trainer import Example, config, examples, gradients, one_step, tiny_model
from tests.train.training_mutants import plant

FACTOR = 0.5
"""Far above what anybody uses, so that faults of the balance loss show in the gradient."""
FIRST = ("mixtral", "glm4_moe")  # a softmax over all experts; sigmoids, groups and a correction
FAMILIES = [*FIRST, *(name for name in tiny.EXPERT_FAMILIES if name not in FIRST)]


def expert_model(family: str) -> CausalLM:
    return model_of(parse_config(config_of(family)))


def choices(layer: MixtureOfExperts, logits: Tensor) -> Tensor:
    """The experts of each token by the definitions of Mixtral and DeepSeek-V3, without the code under test."""
    routing = layer.routing
    scores = logits.sigmoid() if routing.scoring == "sigmoid" else logits.clone()
    if layer.gate.e_score_correction_bias is not None:
        scores += layer.gate.e_score_correction_bias
    if routing.groups > 1:
        groups = scores.view(len(scores), routing.groups, -1)
        best = groups.topk(2 if routing.group_score == "best_two" else 1, -1).values.sum(-1)
        kept = best.topk(routing.kept_groups, -1).indices
        allowed = torch.zeros_like(best, dtype=torch.bool).scatter(1, kept, True)
        scores = groups.masked_fill(~allowed[..., None], -torch.inf).flatten(1)
    return scores.topk(routing.top_k, -1).indices


def plainly(model: CausalLM, data: list[Example]) -> tuple[float, float, dict[str, Tensor]]:
    """Loss, balance loss and gradient of all sequences in one graph, each computed alone."""
    model.requires_grad_(True).zero_grad(set_to_none=True)
    layers = [module for module in model.modules() if isinstance(module, MixtureOfExperts)]
    seen: list[list[Tensor]] = [[] for _ in layers]
    hooks = [
        layer.register_forward_pre_hook(lambda _module, args, inputs=inputs: inputs.append(args[0]))
        for layer, inputs in zip(layers, seen, strict=True)
    ]
    total = sum(sum(example["completion_mask"]) for example in data)
    loss = torch.zeros(())
    for example in data:
        ids = torch.tensor(example["input_ids"])
        hidden = model(ids, torch.arange(len(ids)), PackedContext([0, len(ids)]))
        nll = functional.cross_entropy(model.compute_logits(hidden[:-1]), ids[1:], reduction="none")
        loss = loss + (nll * torch.tensor(example["completion_mask"][1:])).sum() / total
    for hook in hooks:
        hook.remove()
    balance = torch.zeros(())
    for layer, inputs in zip(layers, seen, strict=True):
        logits = functional.linear(torch.cat(inputs), layer.gate.weight, layer.gate.bias)
        scores = logits.sigmoid() if layer.routing.scoring == "sigmoid" else logits.softmax(-1)
        means = (scores / scores.sum(-1, keepdim=True)).mean(0)
        counts = choices(layer, logits.detach()).flatten().bincount(minlength=len(means))
        assert counts.sum() == len(logits) * layer.routing.top_k, "a token was dropped"
        balance = balance + len(means) * (means * counts / counts.sum()).sum() / len(layers)
    (loss + FACTOR * balance).backward()  # type: ignore[no-untyped-call]
    return float(loss.detach()), float(balance.detach()), gradients(model)


@pytest.mark.parametrize("family", [*FIRST, *(pytest.param(n, marks=pytest.mark.nightly) for n in FAMILIES[2:])])
def test_packs_balance_experts_as_their_whole_step_does(family: str) -> None:
    data = examples(9)
    loss, balance, expected = plainly(expert_model(family), data)
    *_, exact = plainly(expert_model(family).double(), data)
    rounding = whole_error(expected, exact)
    for capacity, settings in ((1000, {}), (60, {}), (60, {"gradient_checkpointing": True})):
        trainer, result = one_step(expert_model(family), data, capacity, balance_loss=FACTOR, **settings)
        assert result.num_packs == 1 or (capacity == 60 and result.num_packs > 2)
        assert result.loss == pytest.approx(loss, rel=1e-6)
        assert result.balance_loss == pytest.approx(balance, rel=1e-6)
        assert whole_error(gradients(trainer.model), expected) < max(3e-6, rounding)
        trainer, _ = one_step(expert_model(family), data, capacity, double=True, balance_loss=FACTOR, **settings)
        assert whole_error(gradients(trainer.model), exact) < 3e-6


@pytest.mark.planted("test_packs_balance_experts_as_their_whole_step_does")
@pytest.mark.parametrize("mutation", ["balance loss per pack", "tokens of a pack only", "none"])
def test_a_fault_in_the_balance_loss_would_be_seen(mutation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = examples(9)
    *_, expected = plainly(expert_model("mixtral"), data)
    part = ExpertBalance.part
    if mutation == "balance loss per pack":  # a mean of means: counts and probabilities of the pack alone

        def per_pack(self: ExpertBalance, logits: list[Tensor]) -> Tensor:
            whole = self._counts, self._num_tokens
            self._counts, self._num_tokens = self._count(logits), float(len(logits[0]))
            made = part(self, logits) * len(logits[0]) / whole[1]
            self._counts, self._num_tokens = whole
            return made

        monkeypatch.setattr(ExpertBalance, "part", per_pack)
    elif mutation == "tokens of a pack only":

        @contextlib.contextmanager
        def first(self: ExpertBalance, packs: Any, forward: Any) -> Any:
            with step(self, packs[:1], forward):
                self._num_tokens = float(sum(pack.num_tokens for pack in packs))
                yield

        step = ExpertBalance.step
        monkeypatch.setattr(ExpertBalance, "step", first)
    trainer, _ = one_step(expert_model("mixtral"), data, 60, balance_loss=FACTOR)
    error = whole_error(gradients(trainer.model), expected)
    assert error < 3e-6 if mutation == "none" else error > 1e-3


def test_the_balance_loss_is_that_of_transformers() -> None:
    modeling = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    logits = [torch.randn(31, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    balance = ExpertBalance(expert_model("mixtral"))
    assert len(balance._layers) == len(logits)
    pack = next(iter(PackStream([[1] * 31], 40)))
    with balance.step([pack], lambda _pack: logits):
        found = float(balance.part(logits))
    each = [float(modeling.load_balancing_loss_func((layer,), 4, 2)) for layer in logits]
    assert found == pytest.approx(sum(each) / len(each) / 2, rel=1e-6)  # an even load has 2 there: experts per token


def test_dropout_routes_alike_when_tokens_are_counted() -> None:
    trainer, _ = one_step(expert_model("mixtral"), examples(9), 60, balance_loss=FACTOR, dropout=0.4)
    counted = trainer._balance._counts.clone()
    learnt = torch.zeros_like(counted)
    again = Trainer(
        expert_model("mixtral"),
        config(balance_loss=FACTOR, dropout=0.4),
        PackStream(examples(9), 60, step="sequences:9"),
    )
    part = again._balance.part
    again._balance.part = lambda logits: (learnt.add_(again._balance._count(logits)), part(logits))[1]
    next(again.run())
    assert torch.equal(learnt, counted)


def _rank(rank: int, folder: str, mutants: tuple[str, ...] = ()) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    plant(mutants)
    data = examples(9)
    stream = PackStream(data, 60, step="sequences:9", ranks=2, rank=rank)
    trainer = Trainer(expert_model("mixtral"), config(balance_loss=FACTOR), stream)
    result = next(trainer.run())
    found = {name: value.numpy() for name, value in gradients(trainer.model).items()}
    np.savez(f"{folder}/{rank}.npz", balance=result.balance_loss, **found)
    from chairlift_train.parallel import settle

    settle()
    distributed.destroy_process_group()


def two_ranks(folder: Path, *mutants: str) -> list[tuple[float, dict[str, Tensor]]]:
    """Balance loss and gradient of a step, as each of two ranks has found them."""
    spawning = multiprocessing.get_context("spawn")
    ranks = [spawning.Process(target=_rank, args=(rank, str(folder), mutants)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    results = []
    for rank in range(2):
        with np.load(folder / f"{rank}.npz") as arrays:
            found = {name: torch.from_numpy(arrays[name]) for name in arrays}
            results.append((float(found.pop("balance")), found))
    return results


@pytest.mark.nightly
def test_two_ranks_balance_experts_as_one_does(tmp_path: Path) -> None:
    _, expected_balance, expected = plainly(expert_model("mixtral"), examples(9))
    for balance, found in two_ranks(tmp_path):
        assert balance == pytest.approx(expected_balance, rel=1e-6)
        assert whole_error(found, expected) < 3e-6


@pytest.mark.planted
@pytest.mark.nightly
def test_a_balance_loss_of_each_rank_would_be_seen(tmp_path: Path) -> None:
    *_, expected = plainly(expert_model("mixtral"), examples(9))
    assert all(whole_error(found, expected) > 1e-3 for _, found in two_ranks(tmp_path, "balance loss per rank"))


@pytest.mark.full
def test_a_balance_loss_evens_out_the_load() -> None:
    loads = {}
    for factor in (0.0, 1.0):
        model = expert_model("mixtral")
        stream = PackStream(examples(9) * 40, 60, step="sequences:9")
        list(Trainer(model, config(steps=30, learning_rate=3e-3, balance_loss=factor), stream).run())
        _, loads[factor], _ = plainly(model, examples(9))
    assert loads[1.0] < loads[0.0]


def test_a_balance_loss_without_experts_is_refused() -> None:
    with pytest.raises(ConfigError, match="this model has none; leave it out"):
        Trainer(tiny_model(), config(balance_loss=0.01))
    with pytest.raises(ConfigError, match="balance_loss must be at least 0"):
        config(balance_loss=-1.0)
