"""The layer of experts that replaces the MLP in some models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from chairlift.errors import InvariantError
from chairlift.kernels import ops
from chairlift.kernels.experts import ExpertChange, changed_experts
from chairlift.models.hf_config import NetworkConfig
from chairlift.models.layers.linear import Linear, Stack
from chairlift.models.layers.mlp import MLP

__all__ = ["MixtureOfExperts"]


class _Gate(nn.Module):
    """The router of experts. Its weight [out, in] is neither quantised nor converted to the layout of a kernel, and its
    matmul is computed in float32. With ``biased`` it has a bias [out]. With ``corrected`` it has a float32 bias that
    only affects which experts are chosen."""

    float32_parameters = ("e_score_correction_bias",)
    bias: nn.Parameter | None
    e_score_correction_bias: nn.Parameter | None

    def __init__(self, out_features: int, in_features: int, *, biased: bool = False, corrected: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.register_parameter("bias", nn.Parameter(torch.zeros(out_features)) if biased else None)
        bias = nn.Parameter(torch.zeros(out_features)) if corrected else None
        self.register_parameter("e_score_correction_bias", bias)
        if not self.weight.is_meta:
            nn.init.normal_(self.weight, std=0.02)


class _Experts(nn.Module):
    """Weights of all experts of a layer: gate and up, [E 2 I, D], with gate's rows first (or up alone, [E I, D]), and
    down, [E D, I]. Either both have biases or neither has."""

    def __init__(self, count: int, hidden: int, inner: int, *, biased: bool, gated: bool) -> None:
        super().__init__()
        if gated:
            self.gate_up_proj = Stack(count, 2 * inner, hidden, bias=biased, interleaved=True)
        else:
            self.up_proj = Stack(count, inner, hidden, bias=biased)
        self.down_proj = Stack(count, hidden, inner, bias=biased)

    @property
    def first(self) -> Stack:
        """The stack of weights before the activation: gate and up, or up alone."""
        return self.gate_up_proj if hasattr(self, "gate_up_proj") else self.up_proj

    @property
    def biases(self) -> tuple[Tensor, Tensor] | None:
        """Biases of gate and up [E 2 I], and of down [E D]; None if there are none."""
        first, second = self.first.bias, self.down_proj.bias
        return None if first is None or second is None else (first, second)


class AdaptedExperts(Protocol):
    """The changes of a layer of experts by adapters, in plain torch."""

    def in_use(self) -> Sequence[tuple[ExpertChange, Tensor]]:
        """(change, int64 indices of its tokens in the flat batch) for each adapter that the current step uses."""
        ...


class MixtureOfExperts(nn.Module):
    """[T, D] -> [T, D]: each token passes through the experts that the router chooses for it, as ``config.experts``
    says; see ``ops.experts``.

    ``shared_expert`` is an MLP for every token. With ``config.experts.latent_size`` the experts work between two linear
    layers, ``latent_in`` and ``latent_out``; the router and the shared expert read the input itself. Raises
    InvariantError for a config without experts.
    """

    adapted: AdaptedExperts | None = None
    """Changes by adapters. None if there are no adapters, or if step programs apply them."""

    forced: Tensor | None = None
    """Correction float32 [T, E] of :func:`~chairlift.kernels.experts.forcing`, which chooses the experts of each token
    in place of the router's own correction; None: the router chooses."""

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        if config.experts is None:
            raise InvariantError(f"the config of this {config.model_type} model has no experts")
        if config.mlp not in ("swiglu", "relu2"):
            raise InvariantError(f"experts have gates or a squared ReLU, not {config.mlp}")
        found = config.experts
        hidden = config.hidden_size
        self.routing = found.routing
        self.clamp = found.clamp
        count = found.routing.num_experts
        self.gate = _Gate(count, hidden, biased=found.bias, corrected=found.correction)
        self.gated = config.gated
        latent = found.latent_size
        width = latent or hidden
        self.experts = _Experts(count, width, found.intermediate_size, biased=found.bias, gated=config.gated)
        self.latent_in = Linear(hidden, latent, bias=config.mlp_bias) if latent else None
        self.latent_out = Linear(latent, hidden, bias=config.mlp_bias) if latent else None
        self.shared_expert = MLP(config, found.shared_size) if found.shared_size else None
        self.shared_expert_gate = _Gate(1, hidden) if found.shared_gate else None

    def forward(self, x: Tensor) -> Tensor:
        gate_up = self.experts.first.weight
        down = self.experts.down_proj.weight
        gate = self.gate
        shared = None if self.shared_expert is None else self.shared_expert(x)
        shared_gate = None if self.shared_expert_gate is None else self.shared_expert_gate.weight
        correction = gate.e_score_correction_bias if self.forced is None else self.forced
        if self.latent_in is not None and self.latent_out is not None:
            weights = (gate_up, down, gate.weight, self.routing)
            latent = self.latent_in(x)
            inner = ops.latent_experts(latent, x, *weights, correction, self.gated)
            for change, at in () if self.adapted is None else self.adapted.in_use():
                own = correction if self.forced is None else self.forced[at]
                inner[at] = changed_experts(change, latent[at], x[at], None, *weights, own, gated=self.gated)
            out: Tensor = self.latent_out(inner)
            return out if shared is None else out + shared
        first = (gate_up, down, gate.weight, self.routing)
        rest: tuple[Any, ...] = (shared_gate, gate.bias, self.experts.biases, self.clamp, self.gated)
        out = ops.experts(x, shared, *first, correction, *rest)
        for change, at in () if self.adapted is None else self.adapted.in_use():
            own = correction if self.forced is None else self.forced[at]
            of_all = None if shared is None else shared[at]
            out[at] = changed_experts(change, x[at], x[at], of_all, *first, own, *rest)
        return out
