"""Kinds of changes that an adapter may make. A backend lists those that its kernels compute."""

from __future__ import annotations

from typing import Final

from chairlift.lora.adapter import Adapter
from chairlift.lora.sites import Sites

__all__ = ["ALL_KINDS", "EMBEDDING", "EXPERTS", "LOW_RANK", "VECTORS", "WHOLE", "kinds_of"]

LOW_RANK: Final = "low-rank matrices of linear layers and the output head"
VECTORS: Final = "DoRA, and biases of linear layers"
WHOLE: Final = "whole new weights of linear layers and the output head"
EMBEDDING: Final = "the token embedding, and new tokens"
EXPERTS: Final = "experts, routers, and gates of shared experts"
ALL_KINDS: Final = (LOW_RANK, VECTORS, WHOLE, EMBEDDING, EXPERTS)


def kinds_of(adapter: Adapter, sites: Sites) -> list[str]:
    """The kinds of changes of an adapter for a model with these ``sites``, in the order of :data:`ALL_KINDS`."""
    of_experts = {name for layer in sites.experts.values() for name in layer.names}
    plain = [parts for name, parts in adapter.layers.items() if name not in of_experts]
    replaced = [part for parts in adapter.replaced.values() for part in parts]
    vectors = [part.bias for part in replaced]
    vectors += [vector for parts in plain for part in parts for vector in (part.magnitude, part.bias)]
    found = {
        LOW_RANK: bool(plain),
        VECTORS: any(vector is not None for vector in vectors),
        WHOLE: any(part.weight is not None for part in replaced),
        EMBEDDING: adapter.embedding is not None,
        EXPERTS: bool(of_experts & set(adapter.names)),
    }
    return [kind for kind in ALL_KINDS if found[kind]]
