"""Sharded training (FSDP2): each rank keeps a part of every weight, gradient and moment.

A layer's weights are gathered while the layer is computed.

As in :mod:`chairlift_train.parallel`, gradients are added over the ranks, not averaged, because each loss is divided by
a constant of the whole step. Every rank must run the same number of passes, so a rank with fewer packs in a step runs
filler packs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from chairlift_train.layout import Pack
from chairlift_train.parallel import num_ranks, sum_over_ranks

__all__ = ["divide", "evened", "like", "together", "whole"]

_FILLER = Pack(np.zeros(1, np.int32), (1,), (-1,), np.zeros(1, np.float32), filler=True)


def divide(module: nn.Module, layers: Iterable[nn.Module]) -> None:
    """Shard the parameters over all ranks: each of ``layers`` separately, and the other parameters with ``module``.

    Afterwards the parameters are new objects (DTensor). With one rank nothing changes.
    """
    if num_ranks() == 1:
        return
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    mesh = init_device_mesh(next(module.parameters()).device.type, (num_ranks(),))
    for each in (*layers, module):
        fully_shard(each, mesh=mesh)
    for each in module.modules():
        if isinstance(each, FSDPModule):
            each.set_gradient_divide_factor(1.0)
            each.set_force_sum_reduction_for_comms(True)


@contextlib.contextmanager
def together(module: nn.Module) -> Iterator[None]:
    """Context in which every rank holds all weights. Every rank must enter it."""
    from torch.distributed.fsdp import FSDPModule

    divided = [each for each in module.modules() if isinstance(each, FSDPModule)]
    for each in divided:
        each.unshard()
    try:
        yield
    finally:
        for each in divided:
            each.reshard()


def whole(value: Any) -> Any:
    """Gather a sharded tensor ``value`` to a whole tensor. Any other value is returned unchanged. Every rank must call
    this function."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def like(parameter: Tensor, value: Any) -> Any:
    """A copy of ``value`` on the device of ``parameter``. A tensor of the parameter's shape is sharded like it."""
    if not isinstance(value, Tensor):
        return value
    copied = value.to(parameter.device, copy=True)
    if not hasattr(parameter, "full_tensor") or copied.shape != parameter.shape:
        return copied
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(copied, parameter.device_mesh, parameter.placements, src_data_rank=None)  # type: ignore[attr-defined]


def evened(packs: Sequence[Pack]) -> list[Pack]:
    """Add filler packs to this rank's ``packs``, so that all ranks have equally many packs. Every rank must call this
    function."""
    if num_ranks() == 1:
        return list(packs)
    rank = torch.distributed.get_rank()
    counts = sum_over_ranks([float(len(packs)) if each == rank else 0.0 for each in range(num_ranks())])
    return [*packs, *[_FILLER] * (int(max(counts)) - len(packs))]
