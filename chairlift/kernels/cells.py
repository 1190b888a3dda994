"""LSTM (Hochreiter and Schmidhuber, 1997) and GRU (Cho et al., 2014) as recurrent cells, with the gates in the order of
``torch.nn.LSTM`` and ``torch.nn.GRU``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from chairlift.kernels.recurrent import StatePart

__all__ = ["GRU", "LSTM"]

_ROWS = 16
"""Number of rows of hidden states that one matmul multiplies; the last matmul is padded with rows of zeros. A matmul of
fixed size adds in a fixed order, so a row's bits do not depend on other rows."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class LSTM:
    """Recurrent part of an LSTM: input [T, 4 H] -> hidden states h [T, H].

    The input holds the result of the input's linear layer for each token, in the order i, f, g, o. With z = input + U h
    + b, whose quarters are i, f, g and o: c = sigmoid(f) c + sigmoid(i) tanh(g), and h = sigmoid(o) tanh(c). Gates and
    the state c are float32 whatever the model's dtype is.
    """

    weight: Tensor
    """U, the weight [4 H, H] by which the previous hidden state is multiplied."""
    bias: Tensor | None
    """b, the bias [4 H] that is added to U h; None if there is none."""

    @property
    def parts(self) -> tuple[StatePart, ...]:
        """Parts of the recurrent state: h in the model's dtype, and c in float32."""
        size = self.weight.shape[1]
        return StatePart((size,)), StatePart((size,), torch.float32)

    def width(self, *widths: int) -> int:
        if widths != (len(self.weight),):
            raise ValueError(f"the LSTM takes rows of {len(self.weight)}, got rows of {list(widths)}")
        return self.weight.shape[1]

    def scan(self, inputs: tuple[Tensor, ...], state: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        (given,), (hidden, cells) = inputs, state
        hidden = hidden.to(given.dtype)
        added = 0.0 if self.bias is None else self.bias.float()
        outputs = []
        for token in given.float().add(added).unbind(1):
            i, f, g, o = (token + _product(hidden, self.weight)).chunk(4, dim=-1)
            cells = f.sigmoid() * cells + i.sigmoid() * g.tanh()
            hidden = (o.sigmoid() * cells.tanh()).to(given.dtype)
            outputs.append(hidden)
        return torch.stack(outputs, dim=1), (hidden, cells)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class GRU:
    """Recurrent part of a GRU: input [T, 3 H] -> hidden states h [T, H].

    The input holds the result of the input's linear layer for each token, in the order r, z, n. With u = U h + b: r =
    sigmoid(input_r + u_r), z = sigmoid(input_z + u_z), n = tanh(input_n + r u_n), and h = (1 - z) n + z h. Gates and
    the state h are float32 whatever the model's dtype is; h is converted to that dtype for the matmul with U.
    """

    weight: Tensor
    """U, the weight [3 H, H] by which the previous hidden state is multiplied."""
    bias: Tensor | None
    """b, the bias [3 H] that is added to U h; None if there is none."""

    @property
    def parts(self) -> tuple[StatePart, ...]:
        """The only part of the recurrent state: h in float32."""
        return (StatePart((self.weight.shape[1],), torch.float32),)

    def width(self, *widths: int) -> int:
        if widths != (len(self.weight),):
            raise ValueError(f"the GRU takes rows of {len(self.weight)}, got rows of {list(widths)}")
        return self.weight.shape[1]

    def scan(self, inputs: tuple[Tensor, ...], state: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        (given,), (hidden,) = inputs, state
        added = 0.0 if self.bias is None else self.bias.float()
        outputs = []
        for token in given.float().unbind(1):
            r, z, n = token.chunk(3, dim=-1)
            from_r, from_z, from_n = (_product(hidden.to(given.dtype), self.weight) + added).chunk(3, dim=-1)
            r = _exact(torch.sigmoid, r + from_r)
            z = _exact(torch.sigmoid, z + from_z)
            hidden = (1 - z) * _exact(torch.tanh, n + r * from_n) + z * hidden
            outputs.append(hidden.to(given.dtype))
        return torch.stack(outputs, dim=1), (hidden,)


def _exact(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """``function(x)`` of a float32 tensor, computed in float64, because the rounding of torch's float32 functions
    depends on an element's index in the tensor."""
    return function(x.double()).float()


def _product(hidden: Tensor, weight: Tensor) -> Tensor:
    """float32 [B, N]: ``hidden`` [B, H] times the transpose of ``weight`` [N, H], in matmuls of ``_ROWS`` rows."""
    rows = len(hidden)
    padded = torch.nn.functional.pad(hidden, (0, 0, 0, -rows % _ROWS))
    products = [torch.nn.functional.linear(block, weight) for block in torch.split(padded, _ROWS)]
    return torch.cat(products)[:rows].float()
