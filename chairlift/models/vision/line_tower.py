"""The image encoder of Mistral 3: Pixtral, whose patches have rotary positions, and a projector that merges squares."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor

from chairlift.models.vision.patch_tower import PatchTower, rms_normed
from chairlift.models.vision.vision_config import LineConfig
from chairlift.models.vision.vision_tower import PIECE, Product, Weights, activated, in_pieces

__all__ = ["LineTower"]

_TOWER = "vision_tower."
_PROJECTOR = "multi_modal_projector."


class LineTower(PatchTower):
    """Image encoder of Mistral 3: ``encode(tile)`` yields the rows of one image, [rows, text_width], line by line.

    As in Qwen-VL, patches are ordered square by square while they are computed.
    """

    config: LineConfig
    eps = 1e-5

    def __init__(self, config: LineConfig, weights: Weights) -> None:
        self.config = config
        self.dtype = weights.dtype
        width = config.hidden_size
        inner = config.intermediate_size
        patch = config.patch_size

        def product(name: str, *shape: int) -> Product:
            return Product(weights.take(f"{_TOWER}{name}.weight", *shape))

        def norm(name: str) -> tuple[Tensor, ...]:
            return (weights.take(f"{_TOWER}{name}.weight", width),)

        embedding = weights.take(f"{_TOWER}patch_conv.weight", width, 3, patch, patch)
        self._embedding = Product(embedding.flatten(1))
        self._positions = None
        self._first_norm = norm("ln_pre")
        self._layers = []
        for index in range(config.num_hidden_layers):
            at = f"transformer.layers.{index}."
            parts = [weights.take(f"{_TOWER}{at}attention.{name}_proj.weight", width, width) for name in "qkv"]
            out = product(f"{at}attention.o_proj", width, width)
            ups = [product(f"{at}feed_forward.{name}_proj", inner, width) for name in ("gate", "up")]
            down = product(f"{at}feed_forward.down_proj", width, inner)
            norms = norm(f"{at}attention_norm"), norm(f"{at}ffn_norm")
            self._layers.append((norms[0], Product(torch.cat(parts)), out, norms[1], ups, down))
        self._mergers = {}
        self._merger: Any = self._read_projector(weights)
        self._set_channels(weights)
        size = width // config.num_attention_heads
        frequencies = 1.0 / config.rope_theta ** (torch.arange(0, size, 2).float() / size)
        self._frequencies = torch.stack([frequencies[0::2], frequencies[1::2]])

    def _read_projector(self, weights: Weights) -> tuple[Tensor, Product, Product, Product]:
        """(weight of the norm, merging layer, first and second linear layer) of the projector."""
        config = self.config
        width, text, count = config.hidden_size, config.text_width, config.merge_size**2
        merging = weights.take(f"{_PROJECTOR}patch_merger.merging_layer.weight", width, width * count)
        # The checkpoint joins the patches of a square channel by channel, and here they are joined patch by patch.
        merging = merging.view(width, width, count).transpose(1, 2).reshape(width, -1)

        def linear(name: str, *shape: int) -> Product:
            if config.projector_bias:
                return weights.product(_PROJECTOR + name, *shape)
            return Product(weights.take(f"{_PROJECTOR}{name}.weight", *shape))

        scale = weights.take(f"{_PROJECTOR}norm.weight", width)
        return scale, Product(merging.contiguous()), linear("linear_1", text, width), linear("linear_2", text, text)

    def _merge(self, state: Tensor, *merger: Any) -> Generator[None, None, Tensor]:
        """Merge each square of patches into one row, [squares, text_width]. Yields after each piece."""
        scale, merging, first, second = merger
        config = self.config

        def merged(squares: Tensor) -> Tensor:
            normed = rms_normed(squares.reshape(-1, config.hidden_size), scale, config.norm_eps)
            inner = first(merging(normed.view(len(squares), -1)))
            rows: Tensor = second(activated(config.projector_activation, inner))
            return rows

        squares = state.view(-1, merging.width)
        return (yield from in_pieces(squares, merged, PIECE // config.merge_size**2))
