"""Causal convolution over a few tokens, separate for each channel, as a recurrent cell. Its state is the last
inputs."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from chairlift.kernels.recurrent import StatePart

__all__ = ["ShortConv"]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class ShortConv:
    """y_t = bias + sum over k of weight[k] x_(t - K + 1 + k), separately for each of W channels, summed in float32.

    Without ``gated``, x is the input [T, W], and the result is silu(y), or y if ``silu`` is false (Mamba; Gu and Dao,
    2023). With ``gated``, the input [T, 3 W] consists of b, c and x; the convolution is applied to b x, and the result
    is c y (LFM2).
    """

    weight: Tensor
    """Weight [W, 1, K]; the last of the K taps belongs to the current token."""
    bias: Tensor | None
    """Bias [W] of the channels; None if there is none."""
    gated: bool = False
    silu: bool = False
    factors: tuple[tuple[int, float], ...] = ()
    """One (number of channels, factor of the inputs of these channels) for each range of neighbouring channels. Empty:
    there are no factors."""

    @property
    def channels(self) -> int:
        return self.weight.shape[0]

    @property
    def taps(self) -> int:
        return self.weight.shape[2]

    @property
    def parts(self) -> tuple[StatePart, ...]:
        """The only part of the recurrent state: the last K - 1 inputs of the convolution, oldest first."""
        return (StatePart((self.taps - 1, self.channels)),)

    def channel_factors(self, device: torch.device) -> Tensor | None:
        """float32 [W], the factor of each channel's input; None if there are no factors."""
        if not self.factors:
            return None
        return torch.cat([torch.full((count,), factor, device=device) for count, factor in self.factors])

    def width(self, *widths: int) -> int:
        expected = self.channels * (3 if self.gated else 1)
        if widths != (expected,):
            raise ValueError(f"the convolution takes rows of {expected}, got rows of {list(widths)}")
        return self.channels

    def scan(self, inputs: tuple[Tensor, ...], state: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        (x,), (before,) = inputs, state
        gate = None
        if self.gated:
            b, gate, x = x.chunk(3, dim=-1)
            x = b * x
        count = x.shape[1]
        whole = torch.cat((before.to(x.dtype), x), dim=1)
        taps = self.weight.float()
        factors = self.channel_factors(x.device)
        if factors is not None:
            taps = taps * factors[:, None, None]
        y = whole[:, :count].float() * taps[:, 0, 0]
        for tap in range(1, self.taps):
            y = y + whole[:, tap : tap + count].float() * taps[:, 0, tap]
        if self.bias is not None:
            y = y + self.bias.float()
        if self.silu:
            y = torch.nn.functional.silu(y)
        y = y.to(x.dtype)
        return (y if gate is None else gate * y), (whole[:, count:],)
