"""The image encoder of InternVL: a vision transformer with factors for its branches, and a projector.

As in :mod:`chairlift.models.vision.vision_tower`, a tile is computed in pieces of bounded size.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from chairlift.base.image_spans import ImageTile
from chairlift.models.vision.patch_tower import rms_normed
from chairlift.models.vision.vision_config import InternConfig
from chairlift.models.vision.vision_tower import PIECE, Pixels, Product, Weights, activated, in_pieces

__all__ = ["InternTower"]

_TOP = "vision_tower."
_PROJECTOR = "multi_modal_projector."
_HEAD_EPS = 1e-6
_PROJECTOR_EPS = 1e-5


class InternTower:
    """Image encoder of InternVL: ``encode(tile)`` yields the rows of one tile, [rows_per_tile, text_width], in the
    tower's dtype. Raises the errors of :class:`~chairlift.models.vision.vision_tower.Weights`."""

    rounds_floats = False

    def __init__(self, config: InternConfig, weights: Weights) -> None:
        self.config = config
        self.dtype = weights.dtype
        width = config.hidden_size
        patch = config.patch_size
        take = weights.take
        at = f"{_TOP}embeddings."
        self._class = take(f"{at}cls_token", 1, 1, width)[0]
        self._patches = weights.pair(f"{at}patch_embeddings.projection", width, 3, patch, patch)
        self._positions = take(f"{at}position_embeddings", 1, config.side**2 + 1, width)[0]
        self._layers = [self._read_layer(weights, index) for index in range(config.num_hidden_layers)]
        self._norm = None if config.mean_pooling else weights.pair(f"{_TOP}layernorm", width)
        merged = width * config.scale_factor**2
        text = config.text_width
        self._merged_norm = weights.pair(f"{_PROJECTOR}layer_norm", merged)
        first = weights.product(f"{_PROJECTOR}linear_1", text, merged)
        self._projector = first, weights.product(f"{_PROJECTOR}linear_2", text, text)
        self._pixels = Pixels(config.image_size, weights.normalise)

    def _read_layer(self, weights: Weights, index: int) -> dict[str, Any]:
        config = self.config
        width, inner = config.hidden_size, config.intermediate_size
        take, at = weights.take, f"{_TOP}encoder.layer.{index}."

        def norm(name: str) -> tuple[Tensor, ...]:
            scale = take(f"{at}{name}.weight", width)
            return (scale,) if config.rms else (scale, take(f"{at}{name}.bias", width))

        names = [f"{at}attention.{name}_proj" for name in "qkv"]
        biases = [take(f"{name}.bias", width) for name in names] if config.attention_bias else []
        qkv = Product(
            torch.cat([take(f"{name}.weight", width, width) for name in names]), torch.cat(biases) if biases else None
        )
        heads = [take(f"{at}attention.{name}_norm.weight", width) for name in "qk"] if config.qk_norm else []
        return {
            "qkv": qkv,
            "heads": heads,
            "out": weights.product(f"{at}attention.projection_layer", width, width),
            "norms": (norm("layernorm_before"), norm("layernorm_after")),
            "factors": (take(f"{at}lambda_1", width), take(f"{at}lambda_2", width)),
            "mlp": (weights.product(f"{at}mlp.fc1", inner, width), weights.product(f"{at}mlp.fc2", width, inner)),
        }

    def encode(self, tile: ImageTile) -> Iterator[Tensor | None]:
        """Compute the embeddings of ``tile``, uint8 [3, size, size], in pieces. Yields None after each piece, and
        finally the embeddings."""
        with torch.inference_mode():
            weight, bias = self._patches
            pixels = self._pixels(tile).to(self.dtype)
            patches = functional.conv2d(pixels[None], weight, bias, stride=self.config.patch_size).flatten(2)[0].t()
            state = torch.cat([self._class, patches]) + self._positions
        yield None
        for layer in self._layers:
            yield from self._attend(layer, state)
            yield from self._transform(layer, state)
        with torch.inference_mode():
            squares = self._squares(state[1:])
        yield (yield from in_pieces(squares, self._project))

    def _attend(self, layer: dict[str, Any], state: Tensor) -> Iterator[None]:
        """Compute the attention half of a layer and add it to ``state``. Yields after each piece."""
        heads = self.config.num_attention_heads
        found = yield from in_pieces(state, lambda part: layer["qkv"](self._normed(part, layer["norms"][0])))
        with torch.inference_mode():
            width = state.shape[1]
            parts = list(torch.split(found, width, 1))
            for place, scale in enumerate(layer["heads"]):
                parts[place] = rms_normed(parts[place], scale, _HEAD_EPS)
            # [heads, patches, size]
            q, k, v = (each.reshape(-1, heads, width // heads).transpose(0, 1) for each in parts)
        for at in range(0, len(state), PIECE):
            with torch.inference_mode():
                some = functional.scaled_dot_product_attention(q[None, :, at : at + PIECE], k[None], v[None])[0]
                state[at : at + PIECE] += layer["factors"][0] * layer["out"](some.transpose(0, 1).flatten(1))
            yield None

    def _transform(self, layer: dict[str, Any], state: Tensor) -> Iterator[None]:
        """Compute the MLP half of a layer and add it to ``state``. Yields after each piece."""
        first, second = layer["mlp"]
        for at in range(0, len(state), PIECE):
            with torch.inference_mode():
                inner = first(self._normed(state[at : at + PIECE], layer["norms"][1]))
            yield None
            with torch.inference_mode():
                state[at : at + PIECE] += layer["factors"][1] * second(activated(self.config.activation, inner))
            yield None

    def _normed(self, rows: Tensor, norm: tuple[Tensor, ...]) -> Tensor:
        if self.config.rms:
            return rms_normed(rows, norm[0], self.config.norm_eps)
        weight, bias = norm
        return functional.layer_norm(rows, rows.shape[1:], weight, bias, self.config.norm_eps)

    def _squares(self, patches: Tensor) -> Tensor:
        """Join each square of neighbouring patches, [rows_per_tile, merged width]."""
        if self._norm is not None:
            patches = functional.layer_norm(patches, patches.shape[1:], *self._norm, self.config.norm_eps)
        scale, side = self.config.scale_factor, self.config.side
        squares = patches.view(side // scale, scale, side // scale, scale, -1).transpose(1, 2)
        return squares.reshape(self.config.rows_per_tile, -1)

    def _project(self, squares: Tensor) -> Tensor:
        first, second = self._projector
        normed = functional.layer_norm(squares, squares.shape[1:], *self._merged_norm, _PROJECTOR_EPS)
        return second(activated(self.config.projector_activation, first(normed)))
