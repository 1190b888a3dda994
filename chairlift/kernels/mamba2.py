"""Mamba-2 (Dao and Gu, 2024) as a recurrent cell: a short convolution, a scan over states, and a gated norm."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from chairlift.kernels.recurrent import StatePart, panel_width
from chairlift.kernels.short_conv import ShortConv

__all__ = ["BLOCK", "Mamba2", "Mamba2Shape"]

BLOCK = 64
"""Number of tokens that the scan in plain torch processes with one set of matmuls."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Shape:
    """Sizes and numeric settings of a Mamba-2 layer. I is ``heads * head_dim``."""

    heads: int
    head_dim: int
    state_size: int
    groups: int = 1
    """Number of groups into which the heads are divided; the heads of a group share B and C."""
    time_limit: tuple[float, float] = (0.0, float("inf"))
    """(minimum, maximum) of a time step. It applies to every token; in transformers it applies only when several tokens
    are computed at once."""
    norm_groups: int = 1
    """Number of groups of channels in the gated norm; each group has its own root mean square."""
    norm_eps: float = 1e-5
    norm_first: bool = False
    """Whether the norm comes before the gate: norm(y) * silu(gate) instead of norm(y * silu(gate))."""
    gate_factor: float = 1.0
    """Factor by which the gate is multiplied before silu."""
    step_factor: float = 1.0
    """Factor by which the inputs of time steps are multiplied before the bias is added."""

    @property
    def inner(self) -> int:
        """I: the width of x, of the gate and of the layer's result."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """I + 2 G N: the width of the convolution, which covers x, B and C."""
        return self.inner + 2 * self.groups * self.state_size

    @property
    def columns(self) -> int:
        """Width of the layer's input: gate, x, B, C, and one time step per head."""
        return self.inner + self.channels + self.heads


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Mamba2:
    """Input [T, gate (I) | x (I), B (G N), C (G N) | dt (H)] -> [T, I].

    x, B and C pass through a convolution and silu. Then, in float32, for each head with its state S [N, P]: d =
    softplus(dt + dt_bias), limited; S = exp(-d exp(A_log)) S + B (d x)'; y = S' C + D x. The result is y silu(gate),
    followed by a norm if there is one. The state is float32 whatever the model's dtype is.
    """

    shape: Mamba2Shape
    conv: ShortConv
    a_log: Tensor
    """Logarithm of each head's decay rate, [H]."""
    dt_bias: Tensor
    """Number that is added to each head's time step before softplus, [H]."""
    skip: Tensor
    """D, the factor by which x is multiplied before it is added to a head's output, [H]."""
    norm: Tensor | None
    """Weight [I] of the norm; None if the layer has a gate but no norm."""
    own_heads: tuple[int, int] | None = None
    """(first, number) of the heads that this process scans in a step program, if several processes share the layer;
    None: all."""

    @property
    def parts(self) -> tuple[StatePart, ...]:
        """Parts of the recurrent state: the last inputs of the convolution, and the matrix S of each head, in panels of
        columns."""
        shape = self.shape
        panel = panel_width(self.shape.head_dim)
        heads = shape.heads if self.own_heads is None else self.own_heads[1]
        states = (heads, shape.head_dim // panel, shape.state_size, panel)
        return (*self.conv.parts, StatePart(states, torch.float32))

    def width(self, *widths: int) -> int:
        if widths != (self.shape.columns,):
            raise ValueError(f"the Mamba-2 layer takes rows of {self.shape.columns}, got rows of {list(widths)}")
        return self.shape.inner

    def scan(self, inputs: tuple[Tensor, ...], state: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        shape, (given,), (tail, kept) = self.shape, inputs, state
        gate, mixed, steps = torch.split(given, [shape.inner, shape.channels, shape.heads], dim=-1)
        mixed, (tail,) = self.conv.scan((mixed,), (tail,))
        lead = mixed.shape[:2]
        wide = shape.groups * shape.state_size
        x, b, c = torch.split(mixed.float(), [shape.inner, wide, wide], dim=-1)
        x = x.view(*lead, shape.groups, -1, shape.head_dim)
        b, c = (each.view(*lead, shape.groups, shape.state_size) for each in (b, c))
        times = torch.nn.functional.softplus(steps.float() * shape.step_factor + self.dt_bias.float()).clamp(
            *shape.time_limit
        )
        times = times.view(*lead, shape.groups, -1)
        rates = -self.a_log.float().exp().view(shape.groups, -1)
        panels = kept.shape
        kept = kept.transpose(2, 3).reshape(len(kept), shape.groups, -1, shape.state_size, shape.head_dim)
        outputs = []
        for at in range(0, lead[1], BLOCK):
            some = slice(at, at + BLOCK)
            y, kept = _block(x[:, some], b[:, some], c[:, some], times[:, some], rates, kept)
            outputs.append(y)
        y = torch.cat(outputs, dim=1) + self.skip.float().view(shape.groups, -1, 1) * x
        y = y.reshape(*lead, shape.inner).to(given.dtype)
        y = self._gated(y.float(), gate.float()).to(given.dtype)
        kept = kept.reshape(panels[0], shape.heads, shape.state_size, -1, panels[-1]).transpose(2, 3)
        return y, (tail, kept)

    def _gated(self, y: Tensor, gate: Tensor) -> Tensor:
        """Apply the gate and the norm to ``y``, in float32."""
        gate = torch.nn.functional.silu(gate * self.shape.gate_factor)
        if self.norm is None:
            return y * gate
        y = y if self.shape.norm_first else y * gate
        grouped = y.view(*y.shape[:-1], self.shape.norm_groups, -1)
        grouped = grouped * torch.rsqrt(grouped.pow(2).mean(-1, keepdim=True) + self.shape.norm_eps)
        y = grouped.flatten(-2) * self.norm.float()
        return y * gate if self.shape.norm_first else y


def _block(x: Tensor, b: Tensor, c: Tensor, times: Tensor, rates: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Process several tokens with matmuls, in float32: x [B, n, G, R, P] for R heads in each of G groups, b and c [B,
    n, G, N], times [B, n, G, R], rates [G, R] and state [B, G, R, N, P] -> y like x, and the state after them."""
    count = x.shape[1]
    decays = (times * rates).cumsum(1).movedim(1, -1)  # [B, G, R, n]: logarithms
    between = decays.unsqueeze(-1) - decays.unsqueeze(-2)
    later = torch.ones(count, count, dtype=torch.bool, device=x.device).triu(1)
    mixing = between.masked_fill(later, float("-inf")).exp()
    mixing = mixing * torch.einsum("blgn,bsgn->bgls", c, b).unsqueeze(2)
    scaled = x * times.unsqueeze(-1)
    y = torch.einsum("bgrls,bsgrp->blgrp", mixing, scaled)
    y = y + torch.einsum("blgn,bgrnp->blgrp", c, state) * decays.exp().movedim(-1, 1).unsqueeze(-1)
    left = (decays[..., -1:] - decays).exp().movedim(-1, 1).unsqueeze(-1)
    added = torch.einsum("bsgn,bsgrp->bgrnp", b, scaled * left)
    return y, state * decays[..., -1].exp()[..., None, None] + added
