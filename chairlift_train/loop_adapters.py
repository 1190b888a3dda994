"""Optimiser steps on packs in the loops of accelerate (DDP, ZeRO) and of DeepSpeed.

The stream decides the number of packs in a step, and their losses are divided by one constant Z
(:class:`~chairlift_train.loss.StepLoss`). So both functions accumulate gradients themselves, and the libraries must not
accumulate gradients. Neither library is imported.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from chairlift.errors import ConfigError
from chairlift_train.collate import PackCollator
from chairlift_train.layout import Pack
from chairlift_train.loss import StepLoss
from chairlift_train.parallel import sum_over_ranks
from chairlift_train.sharding import evened

__all__ = ["accelerate_step", "deepspeed_step"]

_collate = PackCollator(keys=("input_ids", "position_ids", "labels", "loss_weight", "segment_ids"))


def accelerate_step(
    accelerator: Any,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: StepLoss,
    packs: Sequence[Pack],
    *,
    max_grad_norm: float | None = None,
) -> float:
    """Run one optimiser step on this rank's ``packs``. Returns the loss of the step over all ranks.

    ``model`` and ``optimizer`` come from ``accelerator.prepare``. The model is a causal language model of transformers
    (see :func:`~chairlift_train.patch_hf`). Every rank must call this function for every step; a rank with fewer packs
    runs fillers. Raises ConfigError if the accelerator accumulates gradients, if ``loss`` has ``gradients="sum"``, and
    if ``max_grad_norm`` is given with DeepSpeed, which clips by its own setting.
    """
    _check(loss, accelerator.gradient_accumulation_steps, "Accelerator")
    by_deepspeed = accelerator.distributed_type == "DEEPSPEED"
    if by_deepspeed and max_grad_norm is not None:
        raise ConfigError(
            f"max_grad_norm={max_grad_norm} has no effect with DeepSpeed; set gradient_clipping of the DeepSpeedPlugin"
        )

    def backward(part: Tensor, is_last: bool) -> None:
        accelerator.sync_gradients = is_last
        accelerator.backward(part)

    total = _passes(model, loss, packs, accelerator.device, backward)
    if max_grad_norm is not None:
        accelerator.clip_grad_norm_(model.parameters(), max_grad_norm)
    optimizer.step()
    optimizer.zero_grad()
    return total


def deepspeed_step(engine: Any, loss: StepLoss, packs: Sequence[Pack]) -> float:
    """Run one optimiser step of a ``DeepSpeedEngine`` on this rank's ``packs``. Returns the loss over all ranks.

    The engine's module is a causal language model of transformers (see :func:`~chairlift_train.patch_hf`). Every rank
    must call this function for every step; a rank with fewer packs runs fillers. Raises ConfigError unless the engine's
    ``gradient_accumulation_steps`` is 1, and if ``loss`` has ``gradients="sum"``.
    """
    _check(loss, engine.gradient_accumulation_steps(), "the engine")

    def backward(part: Tensor, is_last: bool) -> None:
        engine.set_gradient_accumulation_boundary(is_last)
        engine.backward(part)

    total = _passes(engine, loss, packs, engine.device, backward)
    engine.step()
    return total


def _check(loss: StepLoss, accumulation: int, name: str) -> None:
    if accumulation != 1:
        raise ConfigError(
            f"{name} has gradient_accumulation_steps={accumulation}, which divides the loss again; set it to 1, and let"
            " the stream decide the packs of a step"
        )
    if loss.gradients != "mean":
        raise ConfigError(f"gradients={loss.gradients!r}, but these loops average gradients; leave it at 'mean'")


def _passes(
    model: nn.Module,
    loss: StepLoss,
    packs: Sequence[Pack],
    device: torch.device,
    backward: Callable[[Tensor, bool], None],
) -> float:
    """Run the forward and backward passes of ``packs``. ``backward`` is called with the loss of a pack, and whether
    this is the last pack."""
    run = evened(packs)
    with loss.step(packs):
        for number, pack in enumerate(run, 1):
            is_last = number == len(run)
            waits = isinstance(model, DistributedDataParallel) and not is_last
            with model.no_sync() if waits else contextlib.nullcontext():  # type: ignore[operator]
                batch = {name: value.to(device) for name, value in _collate(pack).items()}
                out = model(batch["input_ids"], position_ids=batch["position_ids"], use_cache=False)
                backward(loss(out.logits, batch), is_last)
    return sum_over_ranks([loss.total])[0]
