"""Trains Medusa heads: the model is frozen, and each head learns to predict a token further ahead (Cai et al., 2024).

The model computes its last hidden states once per pack. From the hidden state at position t, head i predicts the token
at position t + 2 + i, and the model itself predicts the token at t + 1. The losses of the heads are added, with smaller
weights for later heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from chairlift.models.causal_lm import CausalLM
from chairlift_train.checkpoint import ModelFiles
from chairlift_train.heads.training import HeadsNetwork
from chairlift_train.layout import Pack
from chairlift_train.varlen import VarlenContext

__all__ = ["MedusaNetwork"]

_WEIGHTS_NAME: Final = "medusa_lm_head.safetensors"


class MedusaNetwork(HeadsNetwork):
    """A frozen model with Medusa heads: blocks x + SiLU(Wx + b), followed by an output head.

    The blocks begin as the identity, so that each head begins as the model's output head. With ``own_output_heads``,
    each head trains its own copy of the model's output head. Otherwise all heads use the model's output head, and their
    files are small. Training is in float32. ``base`` is the name of the model, which is written with the heads.
    """

    def __init__(
        self, model: CausalLM, *, num_heads: int, num_layers: int, own_output_heads: bool = False, base: str = ""
    ) -> None:
        super().__init__(model, base=base)
        self.num_heads = num_heads
        self.num_layers = num_layers
        self.own_output_heads = own_output_heads
        parameters: dict[str, nn.Parameter] = {}
        output = model.lm_head.weight.detach()
        for head in range(num_heads):
            for layer in range(num_layers):
                for part, shape in (("weight", (output.shape[1],) * 2), ("bias", (output.shape[1],))):
                    parameters[f"{head}.{layer}.linear.{part}"] = nn.Parameter(torch.zeros(shape, device=output.device))
            if own_output_heads:
                parameters[f"{head}.{num_layers}.weight"] = nn.Parameter(output.clone())
        self.trained = parameters

    def states(self, batch: Mapping[str, Tensor], pack: Pack) -> Iterator[Tensor]:
        """Yield, for each head, the last hidden states [tokens, hidden size] that the model computes for a collated
        pack. They are computed once. No weight of the model has a gradient, so they have no graph."""
        context = VarlenContext(pack.layout.cu_seqlens)
        states: Tensor = self.model(batch["input_ids"][0], batch["position_ids"][0], context)
        for _ in range(self.num_heads):
            yield states

    def head_logits(self, states: Tensor, head: int) -> Tensor:
        """Logits [R, V] of one head for the model's hidden states ``states`` [R, D]."""
        hidden = states
        for layer in range(self.num_layers):
            weight, bias = (self.trained[f"{head}.{layer}.linear.{part}"] for part in ("weight", "bias"))
            hidden = hidden + functional.silu(functional.linear(hidden, weight, bias))
        if self.own_output_heads:
            return functional.linear(hidden, self.trained[f"{head}.{self.num_layers}.weight"])
        return self.model.compute_logits(hidden)

    def settings(self) -> Mapping[str, Any]:
        """Settings that must be equal when the training of heads is resumed, as plain data."""
        names = ("num_heads", "num_layers", "own_output_heads")
        return {**{name: getattr(self, name) for name in names}, "base": self._base_digest}

    def write(self, directory: Path, files: ModelFiles) -> None:
        """Write the heads in Medusa's file format, in the dtype of ``files``. ``directory`` is created if needed."""
        tensors = {name: each.detach().to(files.dtype) for name, each in self.trained.items()}
        config = {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "base_model_name_or_path": None,
            "medusa_num_heads": self.num_heads,
            "medusa_num_layers": self.num_layers,
            "original_lm_head": not self.own_output_heads,
            "hidden_size": self.model.lm_head.weight.shape[1],
            "vocab_size": self.model.config.vocab_size,
            "torch_dtype": str(files.dtype).removeprefix("torch."),
        }
        self._write_files(directory, _WEIGHTS_NAME, tensors, config)
