"""Random layers of experts, and reference results for them in float64."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import torch
from torch import Tensor

from chairlift.kernels import ops
from chairlift.kernels.experts import route
from chairlift.kernels.routing import Routing

__all__ = ["ExpertLayer", "by_hand", "random_layer"]


@dataclasses.dataclass
class ExpertLayer:
    """Arguments of ``ops.experts`` for one layer."""

    routing: Routing
    gate_up: Tensor
    down: Tensor
    router: Tensor
    correction: Tensor | None
    shared_gate: Tensor | None
    has_shared: bool
    router_bias: Tensor | None = None
    biases: tuple[Tensor, Tensor] | None = None
    clamp: tuple[float, float] | None = None
    gated: bool = True

    @property
    def inner(self) -> int:
        return self.down.shape[1]

    def rows(self, rng: random.Random, count: int) -> tuple[Tensor, Tensor | None]:
        """Random input rows, and random results of a shared expert (None if there is none)."""
        generator = torch.Generator().manual_seed(rng.getrandbits(60))
        both = torch.randn(2, count, self.router.shape[1], generator=generator).to(self.router.dtype)
        return both[0], both[1] if self.has_shared else None

    def __call__(self, x: Tensor, shared: Tensor | None) -> Tensor:
        return ops.experts(x, shared, self.gate_up, self.down, *self.rest)

    @property
    def rest(self) -> tuple[Any, ...]:
        """The further arguments of ``ops.experts``, which follow the weights of the experts."""
        return (
            *(self.router, self.routing, self.correction, self.shared_gate),
            *(self.router_bias, self.biases, self.clamp, self.gated),
        )


def random_layer(
    rng: random.Random, dtype: torch.dtype, *, hidden: int | None = None, inner: int | None = None,
    shared: bool | None = None, biased: bool = False, clamp: tuple[float, float] | None = None, gated: bool = True,
    **fields: Any,
) -> ExpertLayer:  # fmt: skip
    """A random layer. ``fields`` are fields of :class:`Routing`. With ``biased``, the router and the experts have
    biases."""
    hidden, inner = hidden or rng.randint(3, 130), inner or rng.randint(3, 90)
    size, groups = rng.randint(2, 5), rng.choice((1, 1, 3))
    chosen = {"num_experts": size * groups, "scoring": rng.choice(("softmax", "softmax_chosen", "sigmoid"))}
    chosen |= {"normalise": rng.random() < 0.5, "scale": rng.choice((1.0, 2.5)), "epsilon": rng.choice((0.0, 1e-20))}
    if groups > 1:
        chosen |= {"groups": groups, "kept_groups": 2, "group_score": rng.choice(("best_two", "best"))}
    chosen["top_k"] = rng.randint(1, min(size * 2, size * groups) if groups > 1 else size)
    if fields:
        chosen = {"scoring": chosen["scoring"], **fields}
    routing = Routing(**chosen)
    generator, count = torch.Generator().manual_seed(rng.getrandbits(60)), routing.num_experts

    def random_weight(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator) * 0.3).to(dtype)

    first = (1 + gated) * inner
    has_shared = rng.random() < 0.5 if shared is None else shared
    return ExpertLayer(
        routing,
        random_weight(count * first, hidden),
        random_weight(count * hidden, inner),
        random_weight(count, hidden),
        random_weight(count).float() if routing.scoring == "sigmoid" else None,
        random_weight(1, hidden) if has_shared and rng.random() < 0.7 else None,
        has_shared,
        random_weight(count) if biased else None,
        (random_weight(count * first), random_weight(count * hidden)) if biased else None,
        clamp,
        gated,
    )


def by_hand(layer: ExpertLayer, x: Tensor, shared: Tensor | None) -> Tensor:
    """Reference result, float64 [tokens, hidden size], computed token by token and expert by expert."""
    routing, wide = layer.routing, x.double()
    logits = wide.float() @ layer.router.float().T
    logits = logits if layer.router_bias is None else logits + layer.router_bias.float()
    weights, chosen = route(logits, routing, layer.correction)
    gate_ups, downs = (each.double().chunk(routing.num_experts) for each in (layer.gate_up, layer.down))
    out = torch.zeros_like(wide)
    for token in range(len(x)):
        for weight, expert in zip(weights[token].tolist(), chosen[token].tolist(), strict=True):
            both, second = gate_ups[expert] @ wide[token], torch.zeros(())
            if layer.biases is not None:
                first, second = (each.double().chunk(routing.num_experts)[expert] for each in layer.biases)
                both = both + first
            gate, up = both.chunk(2) if layer.gated else (both, both)
            if not layer.gated:
                inner = both.clamp(min=0.0) ** 2
            elif layer.clamp is None:
                inner = gate * gate.sigmoid() * up
            else:
                alpha, limit = layer.clamp
                gate = gate.clamp(max=limit)
                inner = gate * (alpha * gate).sigmoid() * (up.clamp(-limit, limit) + 1)
            out[token] += weight * (downs[expert] @ inner + second)
    if shared is not None:
        gate = 1.0 if layer.shared_gate is None else (wide @ layer.shared_gate.double().T).sigmoid()
        out = out + gate * shared.double()
    return out
