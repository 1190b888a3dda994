"""The layers of a model that an adapter may change, by the names that PEFT uses."""

from __future__ import annotations

import dataclasses
import re

import torch

from chairlift.errors import ConfigError
from chairlift.lora.names import module_names
from chairlift.models.causal_lm import CausalLM
from chairlift.models.formats.checkpoint import CheckpointPart, Naming, checkpoint_layout, decoder_layout
from chairlift.models.hf_config import NetworkConfig
from chairlift.models.layers.experts import MixtureOfExperts
from chairlift.models.layers.linear import Linear, Stack
from chairlift.models.registry import FAMILIES

__all__ = ["HEAD", "ExpertSites", "Sites", "blank_model", "layer_of", "member_of", "sites_in", "sites_of"]

HEAD = "lm_head"
"""Name of the output head in this package."""
_EMBEDDING = "model.embed_tokens"


@dataclasses.dataclass(frozen=True, slots=True)
class ExpertSites:
    """A layer of experts. In this package, the rows of all experts' weights are stacked."""

    count: int
    """Number of experts."""
    first: str
    """Name of the stack of gate and up (or of up alone)."""
    down: str
    """Name of the stack of the weights behind the activation."""
    sizes: tuple[tuple[int, int], tuple[int, int]]
    """(outputs, inputs) of one expert's weight in each of the two stacks."""
    first_order: tuple[int, ...]
    """Row of the checkpoint's weight for each row of one expert in the stack :attr:`first`; empty if they are equal."""
    router: str
    """Name of the router."""
    shared_gate: str
    """Name of the gate of the shared expert; empty if there is none."""

    @property
    def names(self) -> list[str]:
        """Names of all changeable matrices, in the order of the kernels' table: the experts of both stacks, the router,
        and the gate of the shared expert."""
        members = [member_of(stack, expert) for stack in (self.first, self.down) for expert in range(self.count)]
        return [*members, self.router, self.shared_gate or f"{self.router}:none"]


@dataclasses.dataclass(frozen=True, slots=True)
class Sites:
    """The layers of a model that adapters may change."""

    family: str
    """``model_type`` of the model that the layers belong to."""
    transposed: bool
    """Whether the checkpoint stores the weights of some of these layers as [in, out]. PEFT sets ``fan_in_fan_out`` for
    such layers."""
    network: NetworkConfig
    """Shape of the model."""
    parts: dict[str, CheckpointPart]
    """Name of a module in transformers' model, or of a weight in a GGUF file -> its rows in a linear layer of this
    package."""
    prefix: str = ""
    """Name prefix that is missing in adapters made for the model without its output head."""
    more: dict[str, CheckpointPart] = dataclasses.field(default_factory=dict)
    """The same for the output head, single experts, routers, and gates of shared experts, and for names that an adapter
    may use instead."""
    head: str = HEAD
    """Name of the output head in transformers' model."""
    embedding: str = _EMBEDDING
    """Name of the token embedding in transformers' model."""
    vocab: tuple[int, int] = (0, 0)
    """(number of tokens, width) of the token embedding."""
    tied: bool = False
    """Whether the output head uses the weight of the token embedding."""
    experts: dict[int, ExpertSites] = dataclasses.field(default_factory=dict)
    """Number of a decoder layer -> its layer of experts."""

    @property
    def layers(self) -> dict[str, tuple[int, int]]:
        """Name of each linear layer in this package -> (number of inputs, number of outputs)."""
        sizes: dict[str, tuple[int, int]] = {}
        for part in self.parts.values():
            name = layer_of(part)
            outputs = max(sizes.get(name, (0, 0))[1], part.start + part.shape[0])
            sizes[name] = part.shape[1], outputs
        return sizes

    @property
    def stacks(self) -> dict[str, ExpertSites]:
        """Name of each stack of experts -> its layer of experts."""
        return {name: layer for layer in self.experts.values() for name in (layer.first, layer.down)}


def layer_of(part: CheckpointPart) -> str:
    """Name of the layer that contains the rows of ``part``."""
    return part.parameter.rpartition(".")[0]


def member_of(stack: str, expert: int) -> str:
    """Name of one expert's weight in a stack."""
    return f"{stack}:{expert}"


def sites_of(model: CausalLM) -> Sites:
    """The layers of a model that adapters may change. Raises ConfigError if the model is none of this package."""
    if not isinstance(model, CausalLM):
        raise ConfigError("adapters need a model that Chairlift's own code runs; leave enable_lora out")
    return sites_in(model.config)  # packing has taken names and shapes out of the model itself


def blank_model(config: NetworkConfig) -> CausalLM:
    """A model with this config and without memory. It has an output head of its own, because a tied one has a name,
    too."""
    with torch.device("meta"):
        return CausalLM(dataclasses.replace(config, tie_word_embeddings=False))


def sites_in(config: NetworkConfig, naming: Naming | None = None) -> Sites:
    """The layers that adapters may change in a model with this config. ``naming`` gives the names of the modules, by
    default those of transformers' model."""
    tied = config.tie_word_embeddings
    blank = blank_model(config)
    linear = {name for name, module in blank.named_modules() if isinstance(module, Linear) and name != HEAD}
    layout = checkpoint_layout(blank) if naming is None else decoder_layout(blank, blank.config, naming=naming)
    parts = [part for part in layout if len(part.shape) == 2]
    family = FAMILIES[config.model_type]
    stored, own = family.module_prefix if naming is None else ("", "")

    def module_of(part: CheckpointPart) -> str:
        return own + part.name.removesuffix(".weight").removeprefix(stored)

    found = {module_of(part): part for part in parts if layer_of(part) in linear}
    experts = _experts_of(blank, parts)
    others = {HEAD, *(name for layer in experts.values() for name in (layer.router, layer.shared_gate))}
    stacks = {name for layer in experts.values() for name in (layer.first, layer.down)}
    more: dict[str, CheckpointPart] = {}
    for part in parts:
        if layer_of(part) in others or layer_of(part) in stacks:
            more |= dict.fromkeys(module_names(module_of(part)), part)
    if naming is None and family.library_type:
        library = sites_in(dataclasses.replace(config, model_type=family.library_type))
        more |= library.parts | library.more
    names = {layer_of(part): module_of(part) for part in parts}
    transposed = any(part.transposed for part in found.values())
    # The prefix is left out where the class without a head was adapted.
    prefix = "" if naming is not None else next(iter(found), "").partition(".")[0] + "."
    return Sites(
        *(family.model_type, transposed, config, found, prefix, more),
        head=names[HEAD],
        embedding=names[_EMBEDDING],
        vocab=(config.vocab_size, config.embedding_width or config.hidden_size),
        tied=tied,
        experts=experts,
    )


def _experts_of(blank: CausalLM, parts: list[CheckpointPart]) -> dict[int, ExpertSites]:
    found: dict[int, ExpertSites] = {}
    for name, module in blank.named_modules():
        if not isinstance(module, MixtureOfExperts):
            continue
        first = next(own for own, each in module.experts.named_children() if each is module.experts.first)
        stacks = [f"{name}.experts.{first}", f"{name}.experts.down_proj"]
        shapes = [_one_of(stack) for stack in (module.experts.first, module.experts.down_proj)]
        stored = next(part for part in parts if layer_of(part) == stacks[0])
        order = tuple(stored.sources(0, shapes[0][0]).tolist()) if stored.order else ()
        number = re.search(r"\.(\d+)\.", name)
        found[int(number[1]) if number else 0] = ExpertSites(
            count=module.routing.num_experts,
            first=stacks[0],
            down=stacks[1],
            sizes=(shapes[0], shapes[1]),
            first_order=order,
            router=f"{name}.gate",
            shared_gate=f"{name}.shared_expert_gate" if module.shared_expert_gate is not None else "",
        )
    return found


def _one_of(stack: Stack) -> tuple[int, int]:
    return stack.shape.out_features // stack.shape.stack, stack.shape.in_features
