"""A layer of experts as one operation: routing, the MLPs of the chosen experts, and the weighted sum of their results.

Experts are gated MLPs; each token passes through only a few of them (Shazeer et al., 2017). The result of a token must
not depend on other tokens of its batch. Therefore the results of its experts are added in the order in which it chose
them, and matmuls are computed row by row. This is slow when PyTorch runs a whole model on the CPU. In training and on a
GPU, all rows are computed at once instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from chairlift.errors import InvariantError
from chairlift.kernels.coded import CodedWeight
from chairlift.kernels.recording import Value, expect, operation
from chairlift.kernels.routing import Routing

if TYPE_CHECKING:
    from chairlift.kernels.cpu.packing import PackedMatrix

    Weight: TypeAlias = Tensor | PackedMatrix | CodedWeight

__all__ = ["ExpertChange", "changed_experts", "experts", "forcing", "latent_experts", "route"]


_BEYOND = 1e9
"""More than the difference of any two scores of a router."""


def route(logits: Tensor, routing: Routing, correction: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Weights (float32) and indices (int64) of the experts that each token chooses, both [T, k], best first.

    ``logits`` are [T, E]. ``correction``, [E] or [T, E], is added to the scores when experts are chosen, but not to the
    weights (DeepSeek-V3 uses it to balance the load). Among equal scores the lower index is chosen.
    """
    logits = logits.float()
    if routing.scoring == "softmax_chosen":
        scores = logits
    else:  # in float64, because the rounding of torch's float32 exponential depends on a number's place in the tensor
        wide = logits.double()
        scores = (wide.softmax(-1) if routing.scoring == "softmax" else wide.sigmoid()).float()
    choice = scores if correction is None else scores + correction.float()
    if routing.groups > 1:
        choice = _within_groups(choice, routing)
    chosen = _best(choice, routing.top_k)
    weights = scores.gather(1, chosen)
    if routing.scoring == "softmax_chosen":
        weights = weights.double().softmax(-1).float()
    if routing.normalise:
        total = weights[:, :1]
        for column in range(1, routing.top_k):
            total = total + weights[:, column : column + 1]
        weights = weights / (total + routing.epsilon)
    return (weights if routing.scale == 1.0 else weights * routing.scale), chosen


def forcing(chosen: Tensor, num_experts: int) -> Tensor:
    """Correction float32 [T, ``num_experts``] with which :func:`route` chooses the experts ``chosen`` (int64 [T, k],
    best first), whatever the scores are. Their weights are still those of the scores."""
    top_k = chosen.shape[1]
    bonus = torch.arange(top_k, 0, -1, dtype=torch.float32, device=chosen.device) * _BEYOND
    forced = torch.zeros(len(chosen), num_experts, device=chosen.device)
    return forced.scatter_(1, chosen, bonus.expand(len(chosen), top_k))


def _within_groups(choice: Tensor, routing: Routing) -> Tensor:
    """``choice`` [T, E], the scores by which experts are chosen, with minus infinity for all experts outside the best
    groups of each token."""
    by_group = choice.reshape(len(choice), routing.groups, -1)
    best = by_group.sort(dim=-1, descending=True, stable=True).values
    totals = best[..., 0] if routing.group_score == "best" else best[..., 0] + best[..., 1]
    kept = torch.zeros_like(totals, dtype=torch.bool).scatter(1, _best(totals, routing.kept_groups), True)
    return torch.flatten(by_group.masked_fill(~kept[..., None], float("-inf")), 1)


def _best(scores: Tensor, count: int) -> Tensor:
    return torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, :count]


def _width(
    x: Value, shared: Value | None, gate_up: Weight, down: Weight, router: Tensor, routing: Routing,
    correction: Tensor | None = None, shared_gate: Tensor | None = None, router_bias: Tensor | None = None,
    biases: tuple[Tensor, Tensor] | None = None, clamp: tuple[float, float] | None = None, gated: bool = True,
) -> int:  # fmt: skip
    if shared is not None:
        expect(shared, "rows", x.width)
    return expect(x, "rows", router.shape[1])


@operation(_width)
def experts(
    x: Tensor,
    shared: Tensor | None,
    gate_up: Weight,
    down: Weight,
    router: Tensor,
    routing: Routing,
    correction: Tensor | None = None,
    shared_gate: Tensor | None = None,
    router_bias: Tensor | None = None,
    biases: tuple[Tensor, Tensor] | None = None,
    clamp: tuple[float, float] | None = None,
    gated: bool = True,
) -> Tensor:
    """Send each token of ``x`` [T, D] through the experts chosen for it, and return the weighted sum of their results,
    [T, D].

    An expert is down(silu(gate(x)) * up(x)) (Shazeer, 2020). ``gate_up`` is [E 2 I, D], with gate's rows before up's
    for each expert, ``down`` [E D, I], ``router`` [E, D]; see :func:`route` for ``correction`` [E]. ``shared`` [T, D]
    is the result of an expert for all tokens. It is added, after multiplication by sigmoid(x ``shared_gate``) if the
    gate's weight [1, D] is given (Qwen2-MoE). ``router_bias`` [E] is added to the router's logits. ``biases`` are added
    to gate and up [E 2 I], and to down [E D]. With ``clamp`` (alpha, limit), gate becomes g = min(gate, limit), up
    becomes u, limited to -limit..limit, and an expert is down(g sigmoid(alpha g) (u + 1)) (gpt-oss, OpenAI, 2025). With
    ``gated`` False, ``gate_up`` is [E I, D], and an expert is down(max(0, up(x))^2) (So et al., 2021; Nemotron 3). Sums
    are computed in float32, in the order in which the token chose its experts, and rounded once.
    """
    given = (gate_up, down, router, routing, correction, shared_gate, router_bias, biases, clamp, gated)
    return _summed(x, x, shared, *given)


def _latent_width(
    x: Value, routed: Value, gate_up: Weight, down: Weight, router: Tensor, routing: Routing,
    correction: Tensor | None = None, gated: bool = True,
) -> int:  # fmt: skip
    expect(routed, "rows", router.shape[1])
    return expect(x, "rows", x.width)


@operation(_latent_width)
def latent_experts(
    x: Tensor,
    routed: Tensor,
    gate_up: Weight,
    down: Weight,
    router: Tensor,
    routing: Routing,
    correction: Tensor | None = None,
    gated: bool = True,
) -> Tensor:
    """:func:`experts` on rows ``x`` [T, L] -> [T, L]. The router reads other rows, ``routed`` [T, D]; ``router`` is [E,
    D]. In Nemotron 3 the experts' rows have fewer columns than the model's hidden states."""
    return _summed(x, routed, None, gate_up, down, router, routing, correction, gated=gated)


class ExpertChange(NamedTuple):
    """Change of a layer of experts by an adapter. The low-rank parts of an expert are (first output, A [r, in],
    B [rows, r]) tuples: ``x @ A.T @ B.T`` is added to the outputs from the first one on."""

    first: Mapping[int, Sequence[tuple[int, Tensor, Tensor]]]
    """Expert -> low-rank parts of its gate and up."""
    down: Mapping[int, Sequence[tuple[int, Tensor, Tensor]]]
    """Expert -> low-rank parts of its down."""
    router: Tensor | None = None
    """New weight of the router; None: the model's own."""
    shared_gate: Tensor | None = None
    """New weight of the gate of the shared expert; None: the model's own."""


def changed_experts(
    change: ExpertChange,
    x: Tensor,
    routed: Tensor,
    shared: Tensor | None,
    gate_up: Weight,
    down: Weight,
    router: Tensor,
    routing: Routing,
    correction: Tensor | None = None,
    shared_gate: Tensor | None = None,
    router_bias: Tensor | None = None,
    biases: tuple[Tensor, Tensor] | None = None,
    clamp: tuple[float, float] | None = None,
    gated: bool = True,
) -> Tensor:
    """:func:`experts`, or :func:`latent_experts` if ``routed`` are other rows than ``x``, with the change of an
    adapter."""
    router = router if change.router is None else change.router
    shared_gate = shared_gate if change.shared_gate is None else change.shared_gate
    given = (gate_up, down, router, routing, correction, shared_gate, router_bias, biases, clamp, gated)
    return _summed(x, routed, shared, *given, change=change)


def _with_low_rank(
    out: Tensor, x: Tensor, parts: Sequence[tuple[int, Tensor, Tensor]], product: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    for start, a, b in parts:
        out[:, start : start + len(b)] += product(product(x, a), b)
    return out


def _summed(
    x: Tensor,
    routed: Tensor,
    shared: Tensor | None,
    gate_up: Weight,
    down: Weight,
    router: Tensor,
    routing: Routing,
    correction: Tensor | None = None,
    shared_gate: Tensor | None = None,
    router_bias: Tensor | None = None,
    biases: tuple[Tensor, Tensor] | None = None,
    clamp: tuple[float, float] | None = None,
    gated: bool = True,
    *,
    change: ExpertChange | None = None,
) -> Tensor:
    """Computes :func:`experts`, but the router reads ``routed`` instead of ``x``. ``change`` is that of an adapter."""
    # Written as its definition. The Triton kernels, which decode in registers, are the fast version.
    gate_up, down = (each.unpack(x.dtype) if isinstance(each, CodedWeight) else each for each in (gate_up, down))
    if not isinstance(gate_up, Tensor) or not isinstance(down, Tensor):
        raise InvariantError(
            "these experts are laid out for the native kernels, which run them in a step program only; "
            "keep them out of functions given to ops.call_out, or load the model in another layout"
        )
    layer = _Experts.of(routing.num_experts, gate_up, down, biases, clamp, gated)._replace(change=change)
    product = functional.linear if x.requires_grad or gate_up.requires_grad or x.is_cuda else _row_by_row
    logits = product(routed.float(), router.float())
    logits = logits if router_bias is None else logits + router_bias.float()
    weights, chosen = route(logits, routing, correction)
    # On a GPU, every expert computes all tokens. A list of each expert's tokens would make the host wait for the GPU,
    # which a CUDA graph cannot contain.
    results = (_all_rows if x.is_cuda else _chosen_rows)(x, layer, chosen, product)
    out = weights[:, :1] * results[:, 0].float()
    for column in range(1, routing.top_k):
        out = out + weights[:, column : column + 1] * results[:, column].float()
    if shared is not None:
        added = shared.float()
        if shared_gate is not None:
            added = product(x.float(), shared_gate.float()).double().sigmoid().float() * added
        out = out + added
    return out.to(x.dtype)


_Product: TypeAlias = Callable[[Tensor, Tensor], Tensor]


def _row_by_row(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight.T``, computed row by row. A library's order of summation may depend on the number of rows and on a
    row's position in a tile."""
    rows = [functional.linear(row.clone(), weight) for row in torch.split(x, 1)]  # each copy has the same alignment
    return torch.cat(rows)


class _Experts(NamedTuple):
    """Weights of all experts of one layer, each tensor [E, ...]."""

    gate_ups: Tensor
    downs: Tensor
    gate_up_biases: Tensor | None
    down_biases: Tensor | None
    clamp: tuple[float, float] | None
    gated: bool
    change: ExpertChange | None = None

    @classmethod
    def of(
        cls, count: int, gate_up: Tensor, down: Tensor, biases: tuple[Tensor, Tensor] | None,
        clamp: tuple[float, float] | None, gated: bool,
    ) -> _Experts:  # fmt: skip
        first, second = biases or (None, None)
        return cls(
            gate_up.reshape(count, -1, gate_up.shape[1]),
            down.reshape(count, -1, down.shape[1]),
            None if first is None else first.reshape(count, -1),
            None if second is None else second.reshape(count, -1),
            clamp,
            gated,
        )

    def compute(self, expert: int, x: Tensor, product: _Product) -> Tensor:
        """Result of one expert's MLP for the rows ``x``. The gate is computed in float64, for the reason given in
        :func:`route`."""
        both = product(x, self.gate_ups[expert])
        if self.change is not None:
            both = _with_low_rank(both, x, self.change.first.get(expert, ()), product)
        both = both if self.gate_up_biases is None else both + self.gate_up_biases[expert]
        if not self.gated:
            return self._down(expert, functional.relu(both).square(), product)
        gate, up = both.chunk(2, dim=-1)
        if self.clamp is None:
            inner = functional.silu(gate.double()).to(x.dtype) * up
        else:
            alpha, limit = self.clamp
            gate = gate.double().clamp(max=limit)
            inner = (gate * (alpha * gate).sigmoid()).to(x.dtype) * (up.clamp(-limit, limit) + 1)
        return self._down(expert, inner, product)

    def _down(self, expert: int, inner: Tensor, product: _Product) -> Tensor:
        out = product(inner, self.downs[expert])
        if self.change is not None:
            out = _with_low_rank(out, inner, self.change.down.get(expert, ()), product)
        return out if self.down_biases is None else out + self.down_biases[expert]


def _chosen_rows(x: Tensor, layer: _Experts, chosen: Tensor, product: _Product) -> Tensor:
    """Results [T, k, D] of the k experts that each token chose. Each expert computes only its own tokens."""
    top_k = chosen.shape[1]
    flat = chosen.flatten()
    order = flat.argsort(stable=True)
    counts = flat.bincount(minlength=len(layer.downs)).tolist()
    parts = []
    start = 0
    for expert, count in enumerate(counts):
        if count:
            tokens = order[start : start + count] // top_k
            parts.append(layer.compute(expert, x[tokens], product))
            start += count
    return torch.cat(parts)[order.argsort()].reshape(*chosen.shape, -1)


def _all_rows(x: Tensor, layer: _Experts, chosen: Tensor, product: _Product) -> Tensor:
    """Results [T, k, D] as in :func:`_chosen_rows`, but every expert computes every token. The host needs no list of
    choices."""
    results = x.new_zeros((*chosen.shape, x.shape[1]))
    for expert in range(len(layer.downs)):
        out = layer.compute(expert, x, product)
        results = torch.where((chosen == expert)[..., None], out[:, None], results)
    return results
