"""The image encoder of LLaVA: CLIP, and a projector of two linear layers.

As in :mod:`chairlift.models.vision.vision_tower`, an image is computed in pieces of bounded size.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from chairlift.base.image_spans import ImageTile
from chairlift.models.vision.vision_config import LlavaConfig
from chairlift.models.vision.vision_tower import Pixels, Product, VisionLayers, Weights, activated, in_pieces

__all__ = ["ClipTower"]

_TOP = "vision_tower."


class ClipTower:
    """Image encoder of LLaVA: ``encode(tile)`` yields the rows of one image, [rows_per_tile, text_width], in the
    tower's dtype. Raises the errors of :class:`~chairlift.models.vision.vision_tower.Weights`."""

    rounds_floats = False

    def __init__(self, config: LlavaConfig, weights: Weights) -> None:
        self.config = config
        self.dtype = weights.dtype
        width = config.hidden_size
        patch = config.patch_size
        text = config.text_width
        take = weights.take

        def product(name: str, *shape: int) -> Product:
            bias = take(f"{name}.bias", text) if config.projector_bias else None
            return Product(take(f"{name}.weight", *shape), bias)

        self._class = take(f"{_TOP}embeddings.class_embedding", width)
        self._patches = take(f"{_TOP}embeddings.patch_embedding.weight", width, 3, patch, patch)
        self._positions = take(f"{_TOP}embeddings.position_embedding.weight", config.side**2 + 1, width)
        self._norm = weights.pair(f"{_TOP}pre_layrnorm", width)
        # Layers behind the last layer that the projector reads are not needed.
        self._layers = VisionLayers(config, weights, f"{_TOP}encoder.layers.", max(config.feature_layers))
        at = "multi_modal_projector.linear_"
        self._projector = product(f"{at}1", text, width * len(config.feature_layers)), product(f"{at}2", text, text)
        self._pixels = Pixels(config.image_size, weights.normalise)

    def encode(self, tile: ImageTile) -> Iterator[Tensor | None]:
        """Compute the embeddings of the image ``tile``, uint8 [3, size, size], in pieces. Yields None after each piece,
        and finally the embeddings."""
        with torch.inference_mode():
            state = self._embed(tile)
        yield None
        features = {0: state.clone()} if 0 in self.config.feature_layers else {}

        def keep(count: int) -> None:
            if count in self.config.feature_layers:
                features[count] = state.clone()

        yield from self._layers.run(state, keep)
        with torch.inference_mode():
            chosen = torch.cat([features[layer] for layer in self.config.feature_layers], 1)
            chosen = chosen if self.config.keeps_class else chosen[1:]
        yield (yield from in_pieces(chosen, self._project))

    def _embed(self, tile: ImageTile) -> Tensor:
        """Hidden states of the class token and of the patches before the first layer, [1 + patches, width]."""
        pixels = self._pixels(tile).to(self.dtype)
        patches = functional.conv2d(pixels[None], self._patches, stride=self.config.patch_size).flatten(2)[0].t()
        state = torch.cat([self._class[None], patches]) + self._positions
        return functional.layer_norm(state, state.shape[1:], *self._norm, self.config.norm_eps)

    def _project(self, rows: Tensor) -> Tensor:
        first, second = self._projector
        return second(activated(self.config.projector_activation, first(rows)))
