"""Trainers, calls and plain losses for the tests of the service's computing half."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from chairlift.lora.trainable import TrainableAdapter
from chairlift_train.service.compute.calls import AdamParameters, AdapterConfig, Datum, PassCall
from chairlift_train.service.compute.trainer import AdapterTrainer, TrainerSettings
from chairlift_train.varlen import VarlenContext
from tests.models.tiny import tiny_hf_model

__all__ = ["ADAM", "KINDS", "call", "datum", "gradient_of", "make", "near", "plain_gradient", "round_of", "trainer"]

VOCAB = 128
ADAM = AdamParameters(learning_rate=0.01, weight_decay=0.1)
KINDS = ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo")


def trainer(
    tmp_path: Path, family: str = "llama", *, model: dict[str, Any] | None = None, **settings: Any
) -> AdapterTrainer:
    """A trainer for a tiny random model of the family, which every call with the same arguments makes alike."""
    folder = tiny_hf_model(tmp_path, family, **(model or {}))
    return AdapterTrainer.load_model(folder, TrainerSettings(**{"max_models": 9, **settings}))


def datum(rng: np.random.Generator, length: int, loss: str = "cross_entropy", width: int = 0) -> Datum:
    """A datum of random tokens with the inputs of the loss; with ``width`` several targets for each position."""
    tokens = rng.integers(3, VOCAB, length + 1)
    shape = (length, width) if width else (length,)
    targets = rng.integers(3, VOCAB, shape) if width else tokens[1:]
    inputs: dict[str, Any] = {"target_tokens": targets.astype(np.int64)}
    if loss == "cross_entropy":
        inputs["weights"] = rng.choice([0.0, 1.0, 0.25, -0.5], shape).astype(np.float32)
    else:
        inputs["logprobs"] = (-5 + 0.3 * rng.standard_normal(length)).astype(np.float32)
        inputs["advantages"] = rng.standard_normal(length).astype(np.float32)
    if loss == "gspo":
        inputs["sequence_ratio_mask"] = np.array([0.0] * (length // 2) + [1.0] * (length - length // 2), np.float32)
    return Datum(tokens[:-1].astype(np.int32), inputs)


def call(model_id: str, data: list[Datum], loss: str = "cross_entropy", **more: Any) -> PassCall:
    return PassCall(model_id, data, loss, **more)


def round_of(model_id: str, seed: int) -> list[PassCall]:
    """Two calls of one client, with losses, numbers of data and lengths that follow from the seed."""
    rng = np.random.default_rng(seed)
    calls = []
    for _ in range(2):
        loss = str(rng.choice(KINDS))
        width = int(rng.integers(0, 3)) if loss == "cross_entropy" else 0
        data = [datum(rng, int(length), loss, width) for length in rng.integers(1, 40, rng.integers(1, 4))]
        calls.append(call(model_id, data, loss))
    return calls


def fill(trainer: AdapterTrainer, model_id: str, seed: int = 0) -> None:
    """Give the matrices B values, so that A has a gradient, too."""
    client = trainer._clients[model_id]
    noise = torch.randn(client.weights.shape, generator=torch.Generator().manual_seed(seed))
    client.weights.copy_(0.05 * noise)
    trainer._withdraw(model_id)


def near(trainer: AdapterTrainer, given: PassCall) -> PassCall:
    """The call with log-probabilities ``q`` that are near the trainer's own, as those of a rollout are."""
    plain = [Datum(one.tokens, {"target_tokens": one.inputs["target_tokens"]}) for one in given.datums]
    (found,) = trainer.forward_backward([PassCall(given.model_id, plain, "cross_entropy", forward_only=True)])
    rng = np.random.default_rng(0)
    data = [
        Datum(one.tokens, {**one.inputs, "logprobs": p + 0.15 * rng.standard_normal(len(p)).astype(np.float32)})
        for one, p in zip(given.datums, found.logprobs, strict=True)
    ]
    return dataclasses.replace(given, datums=data)


def make(trainer: AdapterTrainer, model_id: str, **config: Any) -> None:
    """Create a model whose matrices B are not zero."""
    trainer.create(model_id, AdapterConfig(**{"rank": 4, **config}))
    fill(trainer, model_id, config.get("seed", 0))


def gradient_of(trainer: AdapterTrainer, model_id: str) -> Tensor:
    gradient = trainer._clients[model_id].gradient
    assert gradient is not None
    return gradient.clone()


def plain_loss(p: Tensor, given: dict[str, Tensor], loss: str, low: float = 0.8, high: float = 1.2) -> Tensor:
    """The losses by their definitions, one token after another."""
    if loss == "cross_entropy":
        return -(given["weights"] * p).sum()
    total = p.new_zeros(())
    mean = None
    if loss == "gspo":
        on = given["sequence_ratio_mask"]
        mean = (((p - given["logprobs"]) * on).sum() / on.sum()).detach()
    for now, before, advantage in zip(p, given["logprobs"], given["advantages"], strict=True):
        ratio = (now - before).exp() if mean is None else (mean + now - now.detach()).exp()
        if loss == "importance_sampling":
            total = total - ratio * advantage
        elif loss in ("ppo", "gspo"):
            clipped = ratio if low <= ratio <= high else ratio.detach().clamp(low, high)
            plain, bounded = ratio * advantage, clipped * advantage
            total = total - (plain if float(plain.detach()) <= float(bounded.detach()) else bounded)
        elif loss == "cispo":
            total = total - float(ratio.detach().clamp(low, high)) * now * advantage
        else:
            total = total - (now * advantage - 0.025 * (now - before) ** 2)
    return total


def plain_gradient(trainer: AdapterTrainer, model_id: str, calls: list[PassCall], *, double: bool = False) -> Tensor:
    """Gradient of the sum of the calls' losses by PyTorch's own forward pass over each datum, without the engine."""
    client = trainer._clients[model_id]
    model = trainer._model.double() if double else trainer._model
    adapter: TrainableAdapter = client.adapter
    parameters = list(adapter.parameters.values())
    kept = [each.data for each in parameters]
    for each in parameters:
        each.data = each.data.double() if double else each.data.clone()
    found = [torch.zeros_like(each) for each in parameters]
    for each in calls:
        for one in each.datums:
            ids = torch.from_numpy(one.tokens).long()
            with trainer._adapters.on(client), torch.enable_grad():
                hidden = model(ids, torch.arange(len(ids)), VarlenContext((0, len(ids))))
                logits = model.compute_logits(hidden)
            targets = torch.from_numpy(one.inputs["target_tokens"])
            p = logits.log_softmax(-1).gather(1, targets.reshape(len(ids), -1)).reshape(targets.shape)
            given = {name: torch.from_numpy(value).to(p.dtype) for name, value in one.inputs.items()}
            loss = plain_loss(p, given, each.loss) + 0 * p.sum()  # a graph also if every token is clipped
            grads = torch.autograd.grad(loss, parameters, allow_unused=True)
            for total, grad in zip(found, grads, strict=True):
                if grad is not None:
                    total += grad
    for each, data in zip(parameters, kept, strict=True):
        each.data = data
    model.float()
    return torch.cat([each.reshape(-1) for each in found])
