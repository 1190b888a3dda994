"""Chooses what computes the forward pass of a model with Chairlift's own layers."""

from __future__ import annotations

import torch

from chairlift.lora.trainable import TrainableAdapter
from chairlift.lora.trainable_set import TrainableAdapters
from chairlift.models.causal_lm import CausalLM
from chairlift_train.config import TrainerConfig
from chairlift_train.networks import NativeNetwork

__all__ = ["native_network"]


def native_network(
    model: CausalLM, adapter: TrainableAdapter | TrainableAdapters | None, config: TrainerConfig
) -> NativeNetwork:
    """The network of a model with Chairlift's own layers, whose forward pass ``config`` chooses. Raises ConfigError for
    an exact forward pass of a model that the engine's CPU kernels do not run."""
    if config.forward == "torch":
        return NativeNetwork(model, adapter)
    from chairlift_train.exact import ExactNetwork  # imported here, because only it needs the engine

    return ExactNetwork(model, adapter, dtype=getattr(torch, config.dtype))
