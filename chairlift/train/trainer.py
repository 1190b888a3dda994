"""Optimiser steps over packed batches, with one loss constant per step.

The loss of a step is ``sum of token losses / Z``, where Z is the number of target tokens in *all* packs of the step,
known before the first backward pass. So the gradient does not depend on how sequences were divided among packs, which
a mean per micro-batch would get wrong.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from chairlift.errors import ConfigError
from chairlift.models.causal_lm import CausalLM
from chairlift.models.layers.attention import Attention
from chairlift.models.layers.mlp import GatedMLP
from chairlift.train.pack import pack_sequences
from chairlift.train.varlen import VarlenContext

__all__ = ["Example", "FlatBatch", "StepResult", "Trainer", "TrainerConfig", "collate", "token_losses"]


@dataclasses.dataclass(frozen=True, slots=True)
class Example:
    """One sequence to learn from."""

    token_ids: tuple[int, ...]
    first_target: int = 1
    """Tokens before this index are given, not predicted: the prompt. At least 1, as nothing precedes the first."""

    @property
    def num_targets(self) -> int:
        return max(0, len(self.token_ids) - max(1, self.first_target))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainerConfig:
    """How to take steps. Every number is per optimiser step."""

    steps: int
    """Steps in the whole schedule."""
    learning_rate: float = 1e-3
    """Peak of the schedule."""
    schedule: Literal["cosine", "linear"] = "cosine"
    """How the rate falls from its peak to ``final_fraction`` of it."""
    warmup_steps: int = 100
    """Steps over which the rate rises from 0."""
    final_fraction: float = 0.02
    """Rate of the last step as a share of the peak."""
    weight_decay: float = 0.1
    """Decoupled decay of matrices; norms are not decayed (AdamW: Loshchilov and Hutter, 2019)."""
    betas: tuple[float, float] = (0.9, 0.98)
    """Decay of the running mean and of the running square of the gradient."""
    max_grad_norm: float = 1.0
    """Gradients longer than this are scaled down to it."""
    label_smoothing: float = 0.0
    """Share of the target's probability that is spread over the whole vocabulary (Szegedy et al., 2016)."""
    dropout: float = 0.0
    """Share of each layer's attention and MLP outputs that is zeroed (Srivastava et al., 2014)."""
    capacity: int = 4096
    """Tokens per pack: bounds the memory of one forward and backward pass, and changes nothing else."""
    autocast: bool = False
    """Compute products in bf16 while weights and their sums stay fp32."""

    def __post_init__(self) -> None:
        if self.steps < 1 or self.capacity < 2 or not 0 <= self.warmup_steps <= self.steps:
            raise ConfigError("a trainer needs steps >= 1, capacity >= 2 and warmup_steps between 0 and steps")
        if not (self.learning_rate > 0 and 0 <= self.dropout < 1 and 0 <= self.label_smoothing < 1):
            raise ConfigError("learning_rate must be above 0, dropout and label_smoothing at least 0 and below 1")

    def rate(self, step: int) -> float:
        """The learning rate of step ``step`` (0-based)."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        done = min(1.0, (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps))
        fall = 0.5 * (1 + math.cos(math.pi * done)) if self.schedule == "cosine" else 1 - done
        return self.learning_rate * (self.final_fraction + (1 - self.final_fraction) * fall)


@dataclasses.dataclass(frozen=True, slots=True)
class FlatBatch:
    """One pack as tensors, ready for a model."""

    token_ids: Tensor
    """int64 [T]."""
    positions: Tensor
    """int64 [T]; they restart at 0 in every sequence."""
    cu_seqlens: list[int]
    """[N + 1]."""
    rows: Tensor
    """int64 [R]: where a prediction counts. Never the last token of a sequence."""
    targets: Tensor
    """int64 [R]: the token that follows each of ``rows`` in its own sequence."""


@dataclasses.dataclass(frozen=True, slots=True)
class StepResult:
    """What one optimiser step did."""

    loss: float
    """Mean loss per target token, label smoothing included."""
    num_tokens: int
    num_targets: int
    num_packs: int
    grad_norm: float
    """Before clipping."""


def collate(examples: Sequence[Example]) -> FlatBatch:
    """Lay sequences one after another. Raises :class:`~chairlift.errors.ConfigError` for none, or an empty one."""
    if not examples or not all(example.token_ids for example in examples):
        raise ConfigError("a flat batch needs at least one sequence, and every sequence at least one token")
    token_ids: list[int] = []
    positions: list[int] = []
    rows: list[int] = []
    cu_seqlens = [0]
    for example in examples:
        start = len(token_ids)
        token_ids += example.token_ids
        positions += range(len(example.token_ids))
        rows += range(start + max(1, example.first_target) - 1, len(token_ids) - 1)
        cu_seqlens.append(len(token_ids))
    ids = torch.tensor(token_ids)
    chosen = torch.tensor(rows, dtype=torch.int64)
    return FlatBatch(ids, torch.tensor(positions), cu_seqlens, chosen, ids[chosen + 1])


def token_losses(model: CausalLM, batch: FlatBatch, label_smoothing: float = 0.0) -> Tensor:
    """Cross-entropy of every target, float32 [R]."""
    hidden = model(batch.token_ids, batch.positions, VarlenContext(batch.cu_seqlens))
    logits = model.compute_logits(hidden[batch.rows]).float()
    return functional.cross_entropy(logits, batch.targets, reduction="none", label_smoothing=label_smoothing)


class Trainer:
    """Takes optimiser steps on a model: AdamW, a warm-up, a cosine or linear fall, clipped gradients."""

    def __init__(self, model: CausalLM, config: TrainerConfig) -> None:
        self.model = model
        self.config = config
        self.num_steps = 0
        matrices = [p for p in model.parameters() if p.requires_grad and p.ndim >= 2]
        others = [p for p in model.parameters() if p.requires_grad and p.ndim < 2]
        groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, fused=True)

    def step(self, examples: Sequence[Example]) -> StepResult:
        """Learn from ``examples`` once. Raises :class:`~chairlift.errors.ConfigError` when none has a target."""
        config = self.config
        total = sum(example.num_targets for example in examples)
        if total == 0:
            raise ConfigError("no example has a target token; lower first_target or give longer sequences")
        for group in self.optimizer.param_groups:
            group["lr"] = config.rate(self.num_steps)
        self.optimizer.zero_grad(set_to_none=True)
        packs = pack_sequences([len(example.token_ids) for example in examples], config.capacity)
        loss = 0.0
        with _dropout(self.model, config.dropout):
            for pack in packs:
                batch = collate([examples[index] for index in pack.indices])
                with torch.autocast(batch.token_ids.device.type, torch.bfloat16, enabled=config.autocast):
                    pack_loss = token_losses(self.model, batch, config.label_smoothing).sum() / total
                pack_loss.backward()  # type: ignore[no-untyped-call]
                loss += float(pack_loss.detach())
        norm = float(nn.utils.clip_grad_norm_(self.model.parameters(), config.max_grad_norm))
        self.optimizer.step()
        self.num_steps += 1
        return StepResult(loss, sum(len(example.token_ids) for example in examples), total, len(packs), norm)


@contextlib.contextmanager
def _dropout(model: CausalLM, rate: float) -> Iterator[None]:
    """Drop parts of what each layer adds to the residual stream, without a word about it in the model's own code."""
    with contextlib.ExitStack() as stack:
        for module in model.modules() if rate else ():
            if isinstance(module, (Attention, GatedMLP)):
                hook = module.register_forward_hook(lambda _module, _args, out: functional.dropout(out, rate))
                stack.callback(hook.remove)
        yield
