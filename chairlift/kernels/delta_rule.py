"""Gated delta rule (Yang et al., 2024) as a recurrent cell, with the convolution before it and the norm after it.

Each value head has a state matrix S [Dk, Dv] in float32. A token with key k, value v, query q, decay g in (0, 1) and
rate b in (0, 1) first decays the state, S <- g S. It then moves the value stored under k towards v by the fraction b, S
<- S + k (b (v - S'k))', and its output is S'q.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from chairlift.kernels.recurrent import StatePart, panel_width

__all__ = ["L2_EPS", "DeltaRule"]

L2_EPS = 1e-6
"""Number added to the sum of squares of a q or k vector before the square root, so that the length is never 0. The
value is Qwen3-Next's."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class DeltaRule:
    """Two inputs per token -> [T, value_heads * value_dim].

    The first input has the columns of q and k (``key_heads`` of ``key_dim`` each), of v and of the gate z
    (``value_heads`` of ``value_dim`` each). q, k and v pass through a causal convolution, separate for each channel,
    and silu. q and k are then divided by their length, and q also by the square root of ``key_dim``. The second input
    has one column b and one column a per value head: the rate is sigmoid(b), and the decay exp(-exp(decay_log)
    softplus(a + step_bias)). The output of each head is divided by its root mean square, and multiplied by ``norm`` and
    silu(z).

    Neighbouring value heads share a key head. Everything is computed in float32, and rounded once at the end.
    """

    conv: Tensor
    """Weight [channels, 1, K] of the convolution; the last of the K taps belongs to the current token."""
    decay_log: Tensor
    """Logarithms of the factors in the decay's exponent, one per value head: [value_heads]."""
    step_bias: Tensor
    """Numbers added to column a before softplus, one per value head: [value_heads]."""
    norm: Tensor
    """Weight of the norm of each head's output, [value_dim]."""
    eps: float
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    own_heads: tuple[int, int] | None = None
    """(first, number) of the value heads that this process scans in a step program, if several processes share the
    layer; None: all."""

    @property
    def channels(self) -> int:
        """Number of channels of the convolution: the columns of q, k and v together."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def taps(self) -> int:
        return self.conv.shape[2]

    @property
    def panel(self) -> int:
        """Number of columns of a state matrix that are stored together. The matrices are stored as [value_heads,
        value_dim / panel, key_dim, panel]."""
        return panel_width(self.value_dim)

    @property
    def parts(self) -> tuple[StatePart, ...]:
        """Parts of the recurrent state: the last K - 1 inputs of the convolution, oldest first, and the matrix S of
        each head, in float32 in any model."""
        heads = self.value_heads if self.own_heads is None else self.own_heads[1]
        memory = (heads, self.value_dim // self.panel, self.key_dim, self.panel)
        return (StatePart((self.taps - 1, self.channels)), StatePart(memory, torch.float32))

    def width(self, *widths: int) -> int:
        values = self.value_heads * self.value_dim
        expected = (self.channels + values, 2 * self.value_heads)
        if widths != expected:
            raise ValueError(f"the delta rule takes rows of {list(expected)}, got rows of {list(widths)}")
        return values

    def scan(self, inputs: tuple[Tensor, ...], state: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        (rows, rates), (tail, memory) = inputs, state
        batch, count = rows.shape[:2]
        mixed = rows[..., : self.channels]
        gate = rows[..., self.channels :]
        q, k, v, tail = self._convolved(mixed, tail)
        rate, decay = self._rates(rates)
        memory = memory.transpose(2, 3).reshape(batch, self.value_heads, self.key_dim, self.value_dim)
        read = []
        for t in range(count):
            memory = memory * decay[:, t, :, None, None]
            key = k[:, t, :, :, None]
            missing = v[:, t] - (memory * key).sum(dim=2)
            memory = memory + key * (missing * rate[:, t, :, None])[:, :, None]
            read.append((memory * q[:, t, :, :, None]).sum(dim=2))
        out = torch.stack(read, dim=1)
        out = out * torch.rsqrt(out.pow(2).mean(-1, keepdim=True) + self.eps) * self.norm.float()
        out = out * torch.nn.functional.silu(gate.float().view(out.shape))
        panels = memory.view(batch, self.value_heads, self.key_dim, -1, self.panel).transpose(2, 3)
        return out.flatten(2).to(rows.dtype), (tail, panels)

    def _convolved(self, mixed: Tensor, tail: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(q [B, n, value_heads, key_dim], k of the same shape, v [B, n, value_heads, value_dim], convolution state
        after these tokens)."""
        count = mixed.shape[1]
        whole = torch.cat((tail.to(mixed.dtype), mixed), dim=1)
        taps = self.conv.float()
        y = whole[:, :count].float() * taps[:, 0, 0]
        for tap in range(1, self.taps):
            y = y + whole[:, tap : tap + count].float() * taps[:, 0, tap]
        y = torch.nn.functional.silu(y)
        keys = self.key_heads * self.key_dim
        q = y[..., :keys]
        k = y[..., keys : 2 * keys]
        v = y[..., 2 * keys :]
        heads = (*y.shape[:2], self.key_heads, self.key_dim)
        q = _unit(q.reshape(heads))
        k = _unit(k.reshape(heads))
        q = q * self.key_dim**-0.5
        q, k = (each.repeat_interleave(self.value_heads // self.key_heads, dim=2) for each in (q, k))
        return q, k, v.reshape(*y.shape[:2], self.value_heads, self.value_dim), whole[:, count:]

    def _rates(self, rates: Tensor) -> tuple[Tensor, Tensor]:
        """(rate b, decay g) of each token and value head, each [B, n, value_heads]."""
        b, a = rates.float().chunk(2, dim=-1)
        step = torch.nn.functional.softplus(a + self.step_bias.float())
        return torch.sigmoid(b), torch.exp(-self.decay_log.float().exp() * step)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).sum(dim=-1, keepdim=True) + L2_EPS)
