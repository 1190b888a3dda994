"""Random layers of experts, and what they compute, written out in float64."""

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
    """What ``ops.experts`` takes."""

    routing: Routing
    gate_up: Tensor
    down: Tensor
    router: Tensor
    correction: Tensor | None
    shared_gate: Tensor | None
    has_shared: bool

    @property
    def inner(self) -> int:
        return self.down.shape[1]

    def rows(self, rng: random.Random, count: int) -> tuple[Tensor, Tensor | None]:
        """Rows to compute with, and those that a shared expert computed, where there is one."""
        generator = torch.Generator().manual_seed(rng.getrandbits(60))
        both = torch.randn(2, count, self.router.shape[1], generator=generator).to(self.router.dtype)
        return both[0], both[1] if self.has_shared else None

    def __call__(self, x: Tensor, shared: Tensor | None) -> Tensor:
        given = self.gate_up, self.down, self.router, self.routing, self.correction, self.shared_gate
        return ops.experts(x, shared, *given)


def random_layer(
    rng: random.Random, dtype: torch.dtype, *, hidden: int | None = None, inner: int | None = None,
    shared: bool | None = None, **fields: Any,
) -> ExpertLayer:  # fmt: skip
    """``fields`` are of :class:`Routing`."""
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

    has_shared = rng.random() < 0.5 if shared is None else shared
    return ExpertLayer(
        routing,
        random_weight(count * 2 * inner, hidden),
        random_weight(count * hidden, inner),
        random_weight(count, hidden),
        random_weight(count).float() if routing.scoring == "sigmoid" else None,
        random_weight(1, hidden) if has_shared and rng.random() < 0.7 else None,
        has_shared,
    )


def by_hand(layer: ExpertLayer, x: Tensor, shared: Tensor | None) -> Tensor:
    """float64 [T, D], token by token and expert by expert."""
    routing, wide = layer.routing, x.double()
    weights, chosen = route(wide.float() @ layer.router.float().T, routing, layer.correction)
    gate_ups, downs = (each.double().chunk(routing.num_experts) for each in (layer.gate_up, layer.down))
    out = torch.zeros_like(wide)
    for token in range(len(x)):
        for weight, expert in zip(weights[token].tolist(), chosen[token].tolist(), strict=True):
            gate, up = (gate_ups[expert] @ wide[token]).chunk(2)
            out[token] += weight * (downs[expert] @ (torch.nn.functional.silu(gate) * up))
    if shared is not None:
        gate = 1.0 if layer.shared_gate is None else (wide @ layer.shared_gate.double().T).sigmoid()
        out = out + gate * shared.double()
    return out
