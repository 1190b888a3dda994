"""Token embedding."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["Embedding"]


class Embedding(nn.Module):
    """``token_ids[T]`` int64 -> [T, hidden]; ``weight`` is [vocab, hidden]."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, token_ids: Tensor) -> Tensor:
        return nn.functional.embedding(token_ids, self.weight)
