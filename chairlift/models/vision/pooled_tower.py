"""The image encoder of Gemma 3: SigLIP, and a projector that averages squares of patches.

As in :mod:`chairlift.models.vision.vision_tower`, an image is computed in pieces of bounded size.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from chairlift.base.image_spans import ImageTile
from chairlift.models.vision.vision_config import PooledTowerConfig
from chairlift.models.vision.vision_tower import Pixels, Product, VisionLayers, Weights, in_pieces

__all__ = ["PooledTower"]

_TOP = "vision_tower."
_PROJECTOR = "multi_modal_projector."


class PooledTower:
    """Image encoder of Gemma 3: ``encode(tile)`` yields the rows of one image, [rows_per_tile, text_width], in the
    tower's dtype. Raises the errors of :class:`~chairlift.models.vision.vision_tower.Weights`."""

    rounds_floats = False

    def __init__(self, config: PooledTowerConfig, weights: Weights) -> None:
        self.config = config
        self.dtype = weights.dtype
        width = config.hidden_size
        patch = config.patch_size
        text = config.text_width
        take = weights.take
        pair = weights.pair
        self._patches = pair(f"{_TOP}embeddings.patch_embedding", width, 3, patch, patch)
        self._positions = take(f"{_TOP}embeddings.position_embedding.weight", config.side**2, width)
        self._layers = VisionLayers(config, weights, f"{_TOP}encoder.layers.", config.num_hidden_layers)
        self._norm = pair(f"{_TOP}post_layernorm", width)
        self._pooled_norm = 1.0 + take(f"{_PROJECTOR}mm_soft_emb_norm.weight", width).float()
        projection = take(f"{_PROJECTOR}mm_input_projection_weight", width, text)
        self._projection = Product(projection.t().contiguous())
        self._pixels = Pixels(config.image_size, weights.normalise)

    def encode(self, tile: ImageTile) -> Iterator[Tensor | None]:
        """Compute the embeddings of the image ``tile``, uint8 [3, size, size], in pieces. Yields None after each piece,
        and finally the embeddings."""
        weight, bias = self._patches
        # A row of patches at a time, because the image has up to 4,096 patches.
        with torch.inference_mode():
            bands = torch.split(self._pixels(tile).to(self.dtype), self.config.patch_size, 1)
        found = []
        for band in bands[: self.config.side]:
            with torch.inference_mode():
                patches = functional.conv2d(band[None], weight, bias, stride=self.config.patch_size)
                found.append(patches.flatten(2)[0].t())
            yield None
        with torch.inference_mode():
            state = torch.cat(found) + self._positions
        yield from self._layers.run(state)
        with torch.inference_mode():
            pooled = self._pool(state)
        yield None
        yield (yield from in_pieces(pooled, self._projection))

    def _pool(self, state: Tensor) -> Tensor:
        """Norm, mean of each square of patches, and norm: [rows_per_tile, width]."""
        config = self.config
        normed = functional.layer_norm(state, state.shape[1:], *self._norm, config.norm_eps)
        grid = normed.t().reshape(1, config.hidden_size, config.side, config.side)
        pooled = functional.avg_pool2d(grid, config.side // config.rows_per_side).flatten(2)[0].t().float()
        scale = torch.rsqrt(pooled.pow(2).mean(-1, keepdim=True) + config.norm_eps)
        return (pooled * scale * self._pooled_norm).to(self.dtype)
