"""Load-balancing loss for native models with experts, computed over a whole optimiser step.

The loss is a product of two means, so the losses of single packs do not add up to the loss of their step. Therefore the
tokens per expert are counted over all packs and ranks of the step before its first backward pass.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from chairlift.errors import ConfigError
from chairlift.kernels.experts import route
from chairlift.models.layers.experts import MixtureOfExperts
from chairlift_train.layout import Pack
from chairlift_train.parallel import sum_over_group, sum_over_ranks

__all__ = ["ExpertBalance"]


class ExpertBalance:
    """Load-balancing loss E / k * sum_e f_e * P_e, averaged over the layers with experts. It is 1 for an even load.

    f_e is the fraction of the step's tokens that are routed to expert e, and P_e is the expert's mean probability
    (Switch Transformer, eq. 4-6; Fedus et al., 2022). f has no gradient. E is the number of experts, and k is the
    number of experts per token. The probabilities are the softmax of the router's logits. For routers with sigmoids
    (DeepSeek-V3) they are the sigmoids divided by their sum. Tokens are routed as in the forward pass; no token is
    dropped. The part of each rank is divided by the number of tokens of all ranks, so the gradients of the ranks must
    be summed.
    """

    def __init__(self, model: nn.Module) -> None:
        """Find the layers with experts. Raises ConfigError for a model without experts."""
        self._layers = [module for module in model.modules() if isinstance(module, MixtureOfExperts)]
        if not self._layers:
            raise ConfigError("balance_loss is for models with experts, and this model has none; leave it out")
        self._counts = torch.empty(0)
        self._num_tokens = 0.0
        self._total: Tensor | float = 0.0

    @contextlib.contextmanager
    def watched(self) -> Iterator[list[Tensor]]:
        """Context in which forward passes append the router's logits [T, E] of each layer with experts to a list.

        The backward pass must also run inside the context, because gradient checkpointing computes layers again and
        must get the same tensors.
        """
        logits: list[Tensor] = []

        def keep(module: MixtureOfExperts, args: tuple[Tensor, ...]) -> None:
            gate = module.gate
            bias = None if gate.bias is None else gate.bias.float()
            logits.append(functional.linear(args[0].float(), gate.weight.float(), bias))

        with contextlib.ExitStack() as stack:
            for layer in self._layers:
                stack.callback(layer.register_forward_pre_hook(keep).remove)
            yield logits

    @contextlib.contextmanager
    def step(self, packs: Sequence[Pack], forward: Callable[[Pack], Sequence[Tensor]]) -> Iterator[None]:
        """Context of one optimiser step, in which :meth:`part` can be called.

        At the start, the tokens of each expert are counted over ``packs``, the packs of this rank, and over all ranks.
        ``forward`` returns the router's logits of a pack, as the training pass will compute them. Every rank must enter
        the context, even without packs.
        """
        counts = torch.zeros(len(self._layers), self._layers[0].routing.num_experts, dtype=torch.float64)
        for pack in packs:
            counts += self._count(forward(pack))
        self._counts = sum_over_group(counts)
        (self._num_tokens,) = sum_over_ranks([sum(pack.num_tokens for pack in packs)])
        self._total = 0.0
        try:
            yield
        finally:
            self._num_tokens = 0.0

    def part(self, logits: Sequence[Tensor]) -> Tensor:
        """A pack's part of the load-balancing loss of the step, as a scalar tensor. ``logits`` are the router's logits
        of the pack.

        Raises ConfigError outside :meth:`step`, and for a step without tokens.
        """
        if not self._num_tokens:
            raise ConfigError("call part() inside `with balance.step(packs, forward):`, for packs with tokens")
        total = torch.zeros((), device=logits[0].device)
        for layer, each, count in zip(self._layers, logits, self._counts, strict=True):
            scores = each.float().sigmoid() if layer.routing.scoring == "sigmoid" else each.float().softmax(-1)
            probabilities = (scores / scores.sum(-1, keepdim=True)).sum(0) / self._num_tokens
            factor = layer.routing.num_experts / layer.routing.top_k / len(self._layers)
            total = total + factor * (probabilities * (count / self._num_tokens).to(probabilities)).sum()
        self._total = self._total + total.detach()
        return total

    @property
    def total(self) -> float:
        """This rank's part of the load-balancing loss of the last step. The sum over all ranks is the whole loss."""
        return float(self._total)

    def _count(self, logits: Sequence[Tensor]) -> Tensor:
        """Number of tokens routed to each expert: float64 [layers, experts] on the CPU."""
        rows = []
        for layer, each in zip(self._layers, logits, strict=True):
            _, chosen = route(each.detach(), layer.routing, layer.gate.e_score_correction_bias)
            rows.append(chosen.flatten().bincount(minlength=layer.routing.num_experts).cpu())
        return torch.stack(rows).double()
