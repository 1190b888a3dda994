"""Mistakes of training over several ranks and in loops of other libraries, planted in the code for a test.

Each value of ``MUTANTS`` plants its mistake with a function like ``setattr``: ``monkeypatch.setattr`` in a test, or
``setattr`` itself in a process that ends afterwards (:func:`plant`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from chairlift_train import expert_balance, loop_adapters, loss, sharding, trainer
from chairlift_train.layout import Pack
from chairlift_train.loss import StepLoss

__all__ = ["MUTANTS", "plant"]

Set = Callable[[Any, str, Any], None]


def mean_per_rank(put: Set) -> None:
    """The constant that losses are divided by is this rank's own."""
    put(StepLoss, "_agree", lambda self, packs: max(1.0, loss.own_normaliser(packs, self.reduce)))


def mean_per_pack(put: Set) -> None:
    """Each pack's loss is divided by its own number of targets, and by the number of this rank's packs."""
    call, agree = StepLoss.__call__, StepLoss._agree

    def remember(self: StepLoss, packs: Any) -> float:
        self.num_packs = max(1, len(packs))  # type: ignore[attr-defined]
        return agree(self, packs)

    def one_pack(self: StepLoss, logits: Tensor, batch: Any) -> Tensor:
        self._normaliser = max(1.0, loss.own_normaliser([batch], self.reduce))
        return call(self, logits, batch) / self.num_packs  # type: ignore[attr-defined]

    put(StepLoss, "_agree", remember)
    put(StepLoss, "__call__", one_pack)


def leaves_early(put: Set) -> None:
    """A rank with fewer packs runs no fillers."""
    for module in (trainer, loop_adapters):
        put(module, "evened", list)


def sharded_gradient_averaged(put: Set) -> None:
    """FSDP2 averages gradients of losses that are already divided by the constant of the step."""
    from torch.distributed.fsdp import FSDPModule

    put(FSDPModule, "set_gradient_divide_factor", lambda self, factor: None)
    put(FSDPModule, "set_force_sum_reduction_for_comms", lambda self, forced: None)


def gradient_averaged_again(put: Set) -> None:
    """The loss is not multiplied by the number of ranks, and the loop averages gradients."""
    put(loss, "num_ranks", lambda group=None: 1)


def gradients_of_one_rank(put: Set) -> None:
    """The ranks do not exchange gradients."""
    put(trainer, "sum_gradients", lambda parameters: None)


def norm_per_rank(put: Set) -> None:
    """Each rank clips its shards by their own norm."""

    def clip(parameters: Any, limit: float) -> Tensor:
        parts = [parameter.grad.to_local() for parameter in parameters]
        norm = torch.stack([part.norm() for part in parts]).norm()
        for part in parts:
            part.mul_(min(1.0, limit / float(norm)))
        return norm

    put(nn.utils, "clip_grad_norm_", clip)


def one_shard_saved(put: Set) -> None:
    """The state of a run has only the shards of its rank."""
    put(trainer, "whole", lambda value: value.to_local() if hasattr(value, "to_local") else value)


def sharded_model_saved(put: Set) -> None:
    """The model's weights are not gathered before they are written."""
    put(sharding, "together", lambda module: contextlib.nullcontext())


def balance_per_rank(put: Set) -> None:
    """The tokens of each expert are counted over the packs of this rank alone."""
    put(expert_balance, "sum_over_group", lambda counts: counts * 2)


def never_exchanged(put: Set) -> None:
    """No pack is the last of a step, so the loop never exchanges gradients."""
    passes = loop_adapters._passes

    def run(model: Any, loss: StepLoss, packs: Sequence[Pack], device: Any, backward: Any) -> float:
        if isinstance(model, DistributedDataParallel):
            with model.no_sync():
                return passes(model.module, loss, packs, device, lambda part, is_last: backward(part, False))
        return passes(model, loss, packs, device, lambda part, is_last: backward(part, False))

    put(loop_adapters, "_passes", run)


def exchanged_after_each_pack(put: Set) -> None:
    """Each pack is the last of a step for DeepSpeed, which then ends the accumulation."""
    passes = loop_adapters._passes

    def run(model: Any, loss: StepLoss, packs: Sequence[Pack], device: Any, backward: Any) -> float:
        return passes(model, loss, packs, device, lambda part, is_last: backward(part, True))

    put(loop_adapters, "_passes", run)


def last_pack_alone(put: Set) -> None:
    """Gradients are cleared before each pack, so that a step has those of its last pack."""
    call = StepLoss.__call__

    def clearing(self: StepLoss, logits: Tensor, batch: Any) -> Tensor:
        part = call(self, logits, batch)
        part.register_hook(lambda gradient: _clear(part, gradient))
        return part

    put(StepLoss, "__call__", clearing)


def _clear(part: Tensor, gradient: Tensor) -> Tensor:
    """Drop the accumulated gradients of all leaves of the graph of ``part``."""
    waiting, seen = [part.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            node.variable.grad = None
        waiting += [following for following, _ in node.next_functions]
    return gradient


MUTANTS: dict[str, Callable[[Set], None]] = {
    "loss mean per rank": mean_per_rank,
    "loss mean per pack": mean_per_pack,
    "a rank leaves early": leaves_early,
    "sharded gradient averaged": sharded_gradient_averaged,
    "gradient averaged again": gradient_averaged_again,
    "gradients of one rank": gradients_of_one_rank,
    "clipping norm per rank": norm_per_rank,
    "one shard saved": one_shard_saved,
    "sharded model saved": sharded_model_saved,
    "balance loss per rank": balance_per_rank,
    "never exchanged": never_exchanged,
    "exchanged after each pack": exchanged_after_each_pack,
    "last pack alone": last_pack_alone,
}


def plant(names: Sequence[str]) -> None:
    """Plant the mistakes in this process."""
    for name in names:
        MUTANTS[name](setattr)
