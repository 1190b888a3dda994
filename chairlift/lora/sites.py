"""The layers of a model that an adapter may change: its linear layers, by the names that PEFT uses."""

from __future__ import annotations

import dataclasses

import torch

from chairlift.errors import ConfigError
from chairlift.models.causal_lm import CausalLM
from chairlift.models.formats.checkpoint import CheckpointPart, checkpoint_layout
from chairlift.models.hf_config import NetworkConfig
from chairlift.models.layers.linear import Linear
from chairlift.models.registry import FAMILIES

__all__ = ["Sites", "layer_of", "sites_in", "sites_of"]

_HEAD = "lm_head"


@dataclasses.dataclass(frozen=True, slots=True)
class Sites:
    """The layers of a model that adapters may change."""

    family: str
    """``model_type`` of the model that the layers belong to."""
    transposed: bool
    """Whether the checkpoint stores the weights of some of these layers as [in, out]. PEFT sets ``fan_in_fan_out`` for
    such layers."""
    parts: dict[str, CheckpointPart]
    """Name of a module in transformers' model -> its rows in a layer of this package."""
    prefix: str = ""
    """Name prefix that is missing in adapters made for the model without its output head."""

    @property
    def layers(self) -> dict[str, tuple[int, int]]:
        """Name of each layer in this package -> (number of inputs, number of outputs)."""
        sizes: dict[str, tuple[int, int]] = {}
        for part in self.parts.values():
            name = layer_of(part)
            outputs = max(sizes.get(name, (0, 0))[1], part.start + part.shape[0])
            sizes[name] = part.shape[1], outputs
        return sizes


def layer_of(part: CheckpointPart) -> str:
    """Name of the layer that contains the rows of ``part``."""
    return part.parameter.rpartition(".")[0]


def sites_of(model: CausalLM) -> Sites:
    """Linear layers of a model, without the output head and the experts. Raises ConfigError if there are none."""
    if not isinstance(model, CausalLM):
        raise ConfigError("adapters need a model that Chairlift's own code runs; leave enable_lora out")
    return sites_in(model.config)  # packing has taken names and shapes out of the model itself


def sites_in(config: NetworkConfig) -> Sites:
    """The layers that adapters may change in a model with this config."""
    with torch.device("meta"):
        blank = CausalLM(config)
    linear = {name for name, module in blank.named_modules() if isinstance(module, Linear) and name != _HEAD}
    parts = [part for part in checkpoint_layout(blank) if part.parameter.endswith(".weight")]
    family = FAMILIES[config.model_type]
    stored, own = family.module_prefix
    found = {
        own + part.name.removesuffix(".weight").removeprefix(stored): part for part in parts if layer_of(part) in linear
    }
    transposed = any(part.transposed for part in found.values())
    prefix = next(iter(found), "").partition(".")[0] + "."  # left out where the class without a head was adapted
    return Sites(family.model_type, transposed, found, prefix)
