"""The LSTM (Hochreiter and Schmidhuber, 1997) as a recurrent cell, with the gates in the order of ``torch.nn.LSTM``."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from chairlift.kernels.recurrent import StatePart

__all__ = ["LSTM"]

_ROWS = 16
"""Rows that one product of the hidden states has, with rows of zeros behind the last. Products of one size have one
order of additions, so that a row's bits depend on no other row."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class LSTM:
    """Input [T, 4 H], the product of each token with its bias, in the order i, f, g, o -> hidden states h [T, H].

    With z = input + U h + b: c = sigmoid(f) c + sigmoid(i) tanh(g), and h = sigmoid(o) tanh(c). Gates and the state c
    are float32 whatever the model's dtype is.
    """

    weight: Tensor
    """U, [4 H, H]."""
    bias: Tensor | None
    """b, [4 H]."""

    @property
    def parts(self) -> tuple[StatePart, ...]:
        """h in the model's dtype, and c."""
        size = self.weight.shape[1]
        return StatePart((size,)), StatePart((size,), torch.float32)

    def width(self, *widths: int) -> int:
        if widths != (len(self.weight),):
            raise ValueError(f"the LSTM takes rows of {len(self.weight)}, got rows of {list(widths)}")
        return self.weight.shape[1]

    def scan(self, inputs: tuple[Tensor, ...], state: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        (given,), (hidden, cells) = inputs, state
        hidden, rows = hidden.to(given.dtype), len(hidden)
        added = 0.0 if self.bias is None else self.bias.float()
        outputs = []
        for token in given.float().add(added).unbind(1):
            padded = torch.nn.functional.pad(hidden, (0, 0, 0, -rows % _ROWS))
            products = [torch.nn.functional.linear(block, self.weight) for block in torch.split(padded, _ROWS)]
            i, f, g, o = (token + torch.cat(products)[:rows].float()).chunk(4, dim=-1)
            cells = f.sigmoid() * cells + i.sigmoid() * g.tanh()
            hidden = (o.sigmoid() * cells.tanh()).to(given.dtype)
            outputs.append(hidden)
        return torch.stack(outputs, dim=1), (hidden, cells)
