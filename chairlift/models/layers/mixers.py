"""Recurrent layers that replace attention."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from chairlift.kernels.cells import GRU, LSTM
from chairlift.kernels.mamba2 import Mamba2, Mamba2Shape
from chairlift.kernels.short_conv import ShortConv
from chairlift.models.context import AttentionContext, LayerState
from chairlift.models.hf_config import NetworkConfig
from chairlift.models.layers.delta_net import DeltaNetMixer
from chairlift.models.layers.linear import Linear
from chairlift.models.mixers import CellConfig, DeltaNetConfig, Mamba2Config, ShortConvConfig

__all__ = ["CellMixer", "Mamba2Mixer", "Mixer", "ShortConvMixer", "make_mixer"]


class _Taps(nn.Module):
    """Weight [W, 1, K] of a convolution that treats each channel separately, and an optional bias [W]; see
    :class:`ShortConv`."""

    bias: nn.Parameter | None

    def __init__(self, channels: int, taps: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, taps))
        self.register_parameter("bias", nn.Parameter(torch.zeros(channels)) if bias else None)
        if not self.weight.is_meta:
            nn.init.normal_(self.weight, std=taps**-0.5)


class ShortConvMixer(nn.Module):
    """The short convolution layer of LFM2, out(c conv(b x)): [T, D] -> [T, D]. One linear layer computes b, c and x
    from the input."""

    def __init__(self, config: NetworkConfig, mixer: ShortConvConfig, layer: int) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.layer = config.cache_number(layer, state=True)
        self.in_proj = Linear(hidden, 3 * hidden, bias=mixer.bias)
        self.conv = _Taps(hidden, mixer.taps, bias=mixer.bias)
        self.out_proj = Linear(hidden, hidden, bias=mixer.bias)

    @property
    def state(self) -> LayerState:
        """Shape of the recurrent state that this layer keeps for each request."""
        return LayerState(self._cell().parts)

    def forward(self, x: Tensor, ctx: AttentionContext) -> Tensor:
        out: Tensor = self.out_proj(ctx.recur(self.layer, self._cell(), self.in_proj(x)))
        return out

    def _cell(self) -> ShortConv:
        return ShortConv(self.conv.weight, self.conv.bias, gated=True)


class _GateNorm(nn.Module):
    """Weight [I] of the norm that is combined with the gate in a Mamba-2 layer."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))


class Mamba2Mixer(nn.Module):
    """A Mamba-2 layer: a linear layer, the cell :class:`~chairlift.kernels.mamba2.Mamba2`, and an output linear layer:
    [T, D] -> [T, D]."""

    float32_parameters = ("A_log", "D", "dt_bias")
    """Parameters that stay float32 in a model of any dtype. Decay rates in 16 bits would be too inexact for long
    texts."""
    own_heads: tuple[int, int] | None = None
    """``own_heads`` of the cell."""

    def __init__(self, config: NetworkConfig, mixer: Mamba2Config, layer: int) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.layer = config.cache_number(layer, state=True)
        self.shape = Mamba2Shape(
            heads=mixer.heads,
            head_dim=mixer.head_dim,
            state_size=mixer.state_size,
            groups=mixer.groups,
            time_limit=mixer.time_limit,
            norm_groups=mixer.norm_groups,
            norm_eps=config.norm_eps,
            norm_first=mixer.norm_first,
            gate_factor=mixer.factors[0],
            step_factor=mixer.factors[4],
        )
        wide = mixer.groups * mixer.state_size
        parts = tuple(zip((mixer.inner, wide, wide), mixer.factors[1:4], strict=True))
        self.factors = parts if set(mixer.factors[1:4]) != {1.0} else ()
        self.in_proj = Linear(hidden, self.shape.columns, bias=mixer.bias)
        self.conv = _Taps(self.shape.channels, mixer.taps, bias=mixer.conv_bias)
        self.A_log = nn.Parameter(torch.arange(1, mixer.heads + 1).float().log())
        self.D = nn.Parameter(torch.ones(mixer.heads))
        # softplus of these values gives time steps from 0.001 to 0.1, evenly spaced on a logarithmic scale.
        self.dt_bias = nn.Parameter(torch.logspace(-3, -1, mixer.heads).expm1().log())
        self.norm = _GateNorm(mixer.inner) if mixer.norm else None
        self.out_proj = Linear(mixer.inner, hidden, bias=mixer.bias if mixer.out_bias is None else mixer.out_bias)

    @property
    def state(self) -> LayerState:
        """Shape of the recurrent state that this layer keeps for each request."""
        return LayerState(self.cell().parts)

    def forward(self, x: Tensor, ctx: AttentionContext) -> Tensor:
        out: Tensor = self.out_proj(ctx.recur(self.layer, self.cell(), self.in_proj(x)))
        return out

    def cell(self) -> Mamba2:
        """The recurrent cell of this layer."""
        norm = None if self.norm is None else self.norm.weight
        conv = ShortConv(self.conv.weight, self.conv.bias, silu=True, factors=self.factors)
        return Mamba2(self.shape, conv, self.A_log, self.dt_bias, self.D, norm, self.own_heads)


class CellMixer(nn.Module):
    """An LSTM or GRU layer: a linear layer for the inputs, then the cell :class:`~chairlift.kernels.cells.LSTM` or
    :class:`~chairlift.kernels.cells.GRU`: [T, D] -> [T, D]."""

    bias: nn.Parameter | None

    def __init__(self, config: NetworkConfig, mixer: CellConfig, layer: int) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.layer = config.cache_number(layer, state=True)
        self.kind = mixer.kind
        width = mixer.gates * hidden
        self.in_proj = Linear(hidden, width, bias=mixer.bias)
        self.recurrent = nn.Parameter(torch.empty(width, hidden))
        self.register_parameter("bias", nn.Parameter(torch.zeros(width)) if mixer.bias else None)
        if not self.recurrent.is_meta:
            nn.init.normal_(self.recurrent, std=hidden**-0.5)
            if self.bias is not None:
                # The biases of f (LSTM) and z (GRU) start at 1, so that the state of a new model changes slowly
                # (Jozefowicz et al., 2015).
                nn.init.ones_(self.bias[hidden : 2 * hidden])

    @property
    def state(self) -> LayerState:
        """Shape of the recurrent state that this layer keeps for each request."""
        return LayerState(self._cell().parts)

    def forward(self, x: Tensor, ctx: AttentionContext) -> Tensor:
        return ctx.recur(self.layer, self._cell(), self.in_proj(x))

    def _cell(self) -> LSTM | GRU:
        return (GRU if self.kind == "gru" else LSTM)(self.recurrent, self.bias)


Mixer = ShortConvMixer | Mamba2Mixer | DeltaNetMixer | CellMixer


def make_mixer(config: NetworkConfig, layer: int) -> Mixer | None:
    """Create the recurrent mixer that ``config`` gives to ``layer``; None if the layer has none."""
    mixer = config.mixer(layer)
    if isinstance(mixer, Mamba2Config):
        return Mamba2Mixer(config, mixer, layer)
    if isinstance(mixer, DeltaNetConfig):
        return DeltaNetMixer(config, mixer, layer)
    if isinstance(mixer, CellConfig):
        return CellMixer(config, mixer, layer)
    return None if mixer is None else ShortConvMixer(config, mixer, layer)
