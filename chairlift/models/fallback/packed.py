"""Packs linear layers of a transformers model for PyTorch's CPU kernels, as native families do.

``torch.nn.functional.linear`` reorders a weight on every call. For a few rows this costs more than the matmul itself.
"""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from chairlift.kernels.onednn import pack_weight, packed_linear
from chairlift.models.fallback.model import ATTENTION, use_attention

__all__ = ["pack_linears"]


def pack_linears(hf: Any) -> int:
    """Pack the weight of each ``nn.Linear`` if the processor has kernels for packed weights. Returns the added bytes.

    A layer that a forward pass does not call is not packed: other code may read its weight (LongCat's router). A weight
    that another module shares (a tied head) is kept in addition to its packed copy. Every other original weight is
    replaced by a NaN tensor of the same shape that uses no memory. If any code still reads it, the comparison with
    transformers at load fails.
    """
    shared = Counter(id(weight) for module in hf.modules() for weight in module.parameters(recurse=False))
    added = 0
    for module in _called(hf):
        weight = module.weight
        packed = pack_weight(weight)
        if packed is None:
            continue
        layer: Any = module
        layer.forward = functools.partial(_product, packed, module.bias)
        if shared[id(weight)] > 1:
            added += weight.nbytes
        else:
            weight.data = torch.full((1, 1), float("nan"), dtype=weight.dtype).expand(weight.shape)
    return added


@torch.inference_mode()
def _called(hf: Any) -> list[nn.Linear]:
    """Linear layers of the model that a forward pass of two tokens calls, each listed once."""
    found: dict[int, nn.Linear] = {}

    def note(module: nn.Module, _: Any) -> None:
        if type(module) is nn.Linear:
            found[id(module)] = module

    hooks = [module.register_forward_pre_hook(note) for module in hf.modules() if type(module) is nn.Linear]
    use_attention(hf, "eager")
    try:
        ids = torch.arange(2, device=hf.device)[None]
        hf(input_ids=ids, position_ids=ids, use_cache=False)
    finally:
        use_attention(hf, ATTENTION)
        for hook in hooks:
            hook.remove()
    return list(found.values())


def _product(packed: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    """Replacement for the method ``forward`` of a linear layer: x [..., in] -> [..., out]."""
    return packed_linear(x, packed, bias)
