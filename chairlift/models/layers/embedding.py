"""Token embedding."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from chairlift.errors import InvariantError
from chairlift.kernels import ops

if TYPE_CHECKING:
    from chairlift.kernels.cpu.packing import PackedWeight

__all__ = ["Embedding"]


class Embedding(nn.Module):
    """``token_ids[T]`` int64 -> [T, hidden]; ``weight`` is [vocab, hidden].

    One that shares its weight with an output head in the native kernels' layout has that as ``native``, and no
    ``weight``.
    """

    weight: nn.Parameter | None

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size))
        self.native: PackedWeight | None = None
        if not self.weight.is_meta:  # there is nothing to draw, and torch would import a second's worth of modules
            nn.init.normal_(self.weight, std=0.02)

    def forward(self, token_ids: Tensor) -> Tensor:
        weight = self.weight if self.native is None else self.native
        if weight is None:
            raise InvariantError("an embedding has neither its weight nor a packed one")
        return ops.embedding(token_ids, weight)
