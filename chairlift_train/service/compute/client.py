"""One client's adapter: its matrices, the gradient so far, and the optimiser's moments, each as one flat vector.

Flat vectors make a step a few operations on whole tensors, and one copy the whole state.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from chairlift.kernels.cpu.packing import PANEL
from chairlift.lora.adapter import Adapter
from chairlift.lora.sites import Sites, layer_of
from chairlift.lora.trainable import TrainableAdapter
from chairlift.models.causal_lm import CausalLM
from chairlift.models.formats.checkpoint import CheckpointPart
from chairlift.models.layers.linear import Adapted
from chairlift_train.service.compute.calls import AdamParameters, AdapterConfig, TrainingError
from chairlift_train.service.compute.checks import check_adam

__all__ = ["Client", "Moments", "bytes_of", "modules_of"]

_KEPT: Final = 5
"""Number of vectors that a client has at most: matrices, gradient, gradient of a running call, and two moments."""


@dataclasses.dataclass(slots=True)
class Moments:
    """State of AdamW, float32 [number of values]."""

    first: Tensor
    second: Tensor
    steps: int = 0


def modules_of(sites: Sites, config: AdapterConfig) -> list[str]:
    """Names of the modules that learn, in the order of the model. Raises TrainingError if there are none."""
    wanted = {".mlp.": config.train_mlp, ".self_attn.": config.train_attn, ".mixer.": config.train_attn}
    found = [
        name
        for name, part in sites.parts.items()
        if any(learns and within in f".{layer_of(part)}." for within, learns in wanted.items())
    ]
    found += [sites.head] if config.train_unembed else []
    if not found:
        raise TrainingError("nothing would learn; set train_mlp, train_attn or train_unembed")
    return found


def _parts_of(sites: Sites, modules: Sequence[str]) -> list[CheckpointPart]:
    return [sites.more[name] if name == sites.head else sites.parts[name] for name in modules]


def bytes_of(sites: Sites, modules: Sequence[str], rank: int, itemsize: int) -> int:
    """Bytes that a client with matrices for ``modules`` takes: its vectors, and the engine's copy of the matrices, with
    ``itemsize`` bytes for each value."""
    width = sum(sum(part.shape) for part in _parts_of(sites, modules))
    return width * (4 * _KEPT * rank + itemsize * -(-rank // PANEL) * PANEL)


class Client:
    """The state of one client's training.

    ``modules`` are names of transformers' modules. The scale of the low-rank terms is ``alpha / rank``. ``base`` is the
    name of the model in the adapter's configuration.
    """

    def __init__(
        self, model: CausalLM, modules: Sequence[str], config: AdapterConfig, *, alpha: float, base: str
    ) -> None:
        self.config = config
        self.modules = list(modules)
        generator = torch.Generator().manual_seed(config.seed)
        how: dict[str, Any] = {"r": config.rank, "alpha": alpha, "base": base}
        self.adapter = TrainableAdapter(model, **how, targets=modules, attached=False, generator=generator)
        parameters = list(self.adapter.parameters.values())
        self.weights = torch.cat([each.detach().reshape(-1) for each in parameters])
        """All matrices, float32. The adapter's parameters are views of it."""
        self.gradient: Tensor | None = None
        """Gradient since the last step; None without a call since then."""
        self.moments: Moments | None = None
        """None before the first step."""
        places: dict[int, slice] = {}
        at = 0
        for each in parameters:
            places[id(each)] = slice(at, at + each.numel())
            each.data = self.weights[places[id(each)]].view_as(each)
            at += each.numel()
        self.products: dict[str, Adapted] = self.adapter.products
        """Name of each layer -> function that adds the low-rank terms to the layer's result."""
        self.matrices: dict[str, list[torch.nn.Parameter]] = {
            name: getattr(product, "matrices", []) for name, product in self.products.items()
        }
        """Name of each layer -> its matrices."""
        self.places = {name: [places[id(each)] for each in found] for name, found in self.matrices.items()}
        """Name of each layer -> where its matrices are in the flat vectors."""

    @property
    def layout(self) -> list[tuple[str, tuple[int, ...]]]:
        """(name, shape) of each matrix, in the order of the flat vectors."""
        return [(name, tuple(each.shape)) for name, each in self.adapter.parameters.items()]

    def served(self) -> Adapter:
        """The adapter as the engine computes it. The matrices are not copied."""
        return self.adapter.as_served()

    def add(self, gradient: Tensor) -> None:
        """Add the gradient of a call that has ended. The client may keep the tensor itself."""
        self.gradient = gradient if self.gradient is None else self.gradient.add_(gradient)

    def optim_step(self, adam: AdamParameters) -> Mapping[str, float]:
        """Take one step of AdamW with the gradient, and forget the gradient. Returns its norm before clipping.

        Raises TrainingError without a gradient, for parameters that are out of range, and if a weight would not be
        finite: then the gradient is forgotten, and weights and moments stay.
        """
        check_adam(adam)
        gradient = self.gradient
        if gradient is None:
            raise TrainingError("there is no gradient; call forward_backward before each optim_step")
        self.gradient = None
        norm = float(torch.linalg.vector_norm(gradient, dtype=torch.float64))
        if adam.grad_clip_norm > 0 and norm > adam.grad_clip_norm:
            gradient = gradient * (adam.grad_clip_norm / norm)
        weights, moments = _adamw(self.weights, self.moments, gradient, adam)
        if not all(bool(each.isfinite().all()) for each in (weights, moments.first, moments.second)):
            raise TrainingError(
                f"the step would make weights that are not finite (norm of the gradient: {norm:.3g}); the gradient is"
                " dropped, and the weights are those from before. Lower learning_rate, or set grad_clip_norm"
            )
        self.weights.copy_(weights)
        self.moments = moments
        return {"grad_norm": norm, "step": float(moments.steps)}


def _adamw(weights: Tensor, before: Moments | None, gradient: Tensor, adam: AdamParameters) -> tuple[Tensor, Moments]:
    """(new weights, new moments) after a step of AdamW (Loshchilov and Hutter, 2019), in the order of operations of
    ``torch.optim.AdamW``. The arguments do not change."""
    first, second = (torch.zeros_like(weights),) * 2 if before is None else (before.first, before.second)
    steps = 1 + (0 if before is None else before.steps)
    first = first.lerp(gradient, 1 - adam.beta1)
    second = (second * adam.beta2).addcmul_(gradient, gradient, value=1 - adam.beta2)
    spread = (second.sqrt() / math.sqrt(1 - adam.beta2**steps)).add_(adam.eps)
    shrunk = weights * (1 - adam.learning_rate * adam.weight_decay)
    moved = shrunk.addcdiv_(first, spread, value=-adam.learning_rate / (1 - adam.beta1**steps))
    return moved, Moments(first, second, steps)
