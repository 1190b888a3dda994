"""The image encoders of Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5: a transformer over the patches of an image.

Images may have any size. Rotary embeddings encode the row and column of a patch. Each square of neighbouring patches
becomes one output row, and patches are ordered square by square. As in :mod:`chairlift.models.vision.vision_tower`, an
image is computed in pieces of bounded size.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from chairlift.base.image_spans import ImageTile
from chairlift.models.vision.vision_config import PatchConfig
from chairlift.models.vision.vision_tower import PIECE, Product, Weights, activated, in_pieces

__all__ = ["PatchTower", "rms_normed"]

_EPS = 1e-6
_SCORES = PIECE * 1024
"""Maximum number of attention scores per head that are computed in one piece. It limits the memory for images with many
patches."""


class PatchTower:
    """Image encoder of Qwen-VL: ``encode(tile)`` yields the rows of one image, [rows, (1 + levels) * text_width], in
    the tower's dtype.

    The first ``text_width`` columns of a row are its embedding. Each further ``text_width`` columns are added to the
    text model's hidden state after one of its first layers. Raises the errors of
    :class:`~chairlift.models.vision.vision_tower.Weights`.
    """

    rounds_floats = False
    eps = _EPS
    """Epsilon of the norms of the layers."""

    def __init__(self, config: PatchConfig, weights: Weights) -> None:
        self.config = config
        self.dtype = weights.dtype
        width = config.hidden_size
        inner = config.intermediate_size
        patch = config.patch_size

        top = "model.visual." if config.deep else "visual."

        def take(name: str, *shape: int) -> Tensor:
            return weights.take(top + name, *shape)

        def product(name: str, *shape: int) -> Product:
            return weights.product(top + name, *shape)

        def norm(name: str, size: int = width) -> tuple[Tensor, ...]:
            names = (f"{name}.weight",) if config.gated else (f"{name}.weight", f"{name}.bias")
            return tuple(take(each, size) for each in names)

        # The encoder's weights are for `frames` frames per patch. An image repeats one frame, so the weights of the
        # frames can be added up.
        embedding = weights.stored(f"{top}patch_embed.proj.weight", width, 3, config.frames, patch, patch)
        bias = take("patch_embed.proj.bias", width) if config.deep else None
        self._embedding = Product(embedding.float().sum(2).flatten(1).to(self.dtype), bias)
        self._positions = take("pos_embed.weight", config.side**2, width) if config.deep else None
        self._first_norm: tuple[Tensor, ...] | None = None
        self._layers = []
        for index in range(config.num_hidden_layers):
            at = f"blocks.{index}."
            *firsts, last = ("linear_fc1", "linear_fc2") if config.deep else ("fc1", "fc2")
            if config.gated:
                *firsts, last = ("gate_proj", "up_proj", "down_proj")
            ups = [product(f"{at}mlp.{name}", inner, width) for name in firsts]
            down = product(f"{at}mlp.{last}", width, inner)
            qkv = product(f"{at}attn.qkv", 3 * width, width)
            out = product(f"{at}attn.proj", width, width)
            self._layers.append((norm(f"{at}norm1"), qkv, out, norm(f"{at}norm2"), ups, down))
        merged = width * config.merge_size**2

        def merger(at: str, names: tuple[str, str, str], normed: int) -> tuple[tuple[Tensor, ...], Product, Product]:
            first, second, last = (f"{at}.{name}" for name in names)
            return norm(first, normed), product(second, merged, merged), product(last, config.text_width, merged)

        deep = ("norm", "linear_fc1", "linear_fc2")
        self._merger = merger("merger", deep if config.deep else ("ln_q", "mlp.0", "mlp.2"), width)
        self._mergers = {
            layer: merger(f"deepstack_merger_list.{index}", deep, merged) for index, layer in enumerate(config.levels)
        }
        self._set_channels(weights)
        size = width // config.num_attention_heads // 2
        self._frequencies = 1.0 / config.rope_theta ** (torch.arange(0, size, 2).float() / size)

    def _set_channels(self, weights: Weights) -> None:
        """Keep the numbers that normalise pixels."""
        factor, mean, deviation = weights.normalise
        channels = [torch.tensor(values).view(3, 1, 1) for values in (mean, deviation)]
        self._factor, self._mean, self._deviation = factor, *channels

    def encode(self, tile: ImageTile) -> Iterator[Tensor | None]:
        """Compute the embeddings of the image ``tile``, uint8 [3, height, width], in pieces. Yields None after each
        piece, and finally the embeddings."""
        config = self.config
        with torch.inference_mode():
            order, sizes = self._windows(tile.grid)
            rotation = tuple(self._ordered(each, order) for each in self._rotation(tile.grid))
        embedded = yield from in_pieces(self._pixels(tile), self._embedding)
        with torch.inference_mode():
            if self._positions is not None:
                embedded = embedded + self._learned(self._positions, *tile.grid)
            if self._first_norm is not None:
                embedded = self._normed(embedded, self._first_norm)
            state = self._ordered(embedded, order)
        yield None
        levels = []
        for index, layer in enumerate(self._layers):
            whole = not config.window or index in config.full_layers
            yield from self._attend(layer, state, rotation, [len(state)] if whole else sizes)
            yield from self._transform(layer, state)
            if index in self._mergers:
                levels.append((yield from self._merge(state, *self._mergers[index])))
        merged = yield from self._merge(state, *self._merger)
        with torch.inference_mode():
            rows = torch.cat([merged, *levels], 1)[torch.argsort(order)]
        yield rows

    def _pixels(self, tile: ImageTile) -> Tensor:
        """Normalised pixel values of each patch, [patches, 3 * patch_size ** 2]. Patches are ordered square by
        square."""
        size, (rows, columns) = self.config.patch_size, tile.grid
        with torch.inference_mode():
            pixels = torch.frombuffer(bytearray(tile.pixels), dtype=torch.uint8).view(3, rows * size, columns * size)
            normal = (pixels.float() * self._factor - self._mean) / self._deviation
            patches = normal.view(3, rows, size, columns, size).permute(1, 3, 0, 2, 4).flatten(2)
            return self._squares(patches).to(self.dtype)

    def _learned(self, table: Tensor, rows: int, columns: int) -> Tensor:
        """Learned positions [patches, width], interpolated from the square table."""
        side = self.config.side
        places = [torch.arange(count).float() * (side - 1) / max(count - 1, 1) for count in (rows, columns)]
        (top, low), (left, right) = ([each.long(), (each.long() + 1).clamp(max=side - 1)] for each in places)
        down = places[0] - top
        along = places[1] - left
        weights = (1 - down, 1 - along), (1 - down, along), (down, 1 - along), (down, along)
        corners = (top, left), (top, right), (low, left), (low, right)
        parts = []
        for (a, b), (row, column) in zip(weights, corners, strict=True):
            found = table[(row[:, None] * side + column).flatten()].view(rows, columns, -1)
            parts.append(self._squares(found * (a[:, None] * b)[..., None]))
        return torch.stack(parts, 1).sum(1).to(self.dtype)

    def _squares(self, patches: Tensor) -> Tensor:
        """Reorder patches [rows, columns, n] square by square: [rows * columns, n]."""
        side = self.config.merge_size
        rows, columns, width = patches.shape
        return patches.view(rows // side, side, columns // side, side, width).transpose(1, 2).reshape(-1, width)

    def _rotation(self, grid: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Cosines and sines of each patch's rotary angles, each [patches, head size]."""
        rows, columns = torch.meshgrid(*(torch.arange(count) for count in grid), indexing="ij")
        places = self._squares(torch.stack([rows, columns], -1)).float()
        angles = (places[..., None] * self._frequencies).flatten(1)
        return angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)

    def _windows(self, grid: tuple[int, int]) -> tuple[Tensor, list[int]]:
        """Indices of the squares of patches ordered by attention window, and the number of patches of each window."""
        merge = self.config.merge_size
        side = self.config.window
        rows, columns = (count // merge for count in grid)
        squares = torch.arange(rows * columns).view(rows, columns)
        if not side:
            return squares.flatten(), [grid[0] * grid[1]]
        windows = [each.flatten() for band in torch.split(squares, side) for each in torch.split(band, side, 1)]
        return torch.cat(windows), [len(each) * merge**2 for each in windows]

    def _ordered(self, patches: Tensor, order: Tensor) -> Tensor:
        return patches.view(len(order), -1, patches.shape[1])[order].view(len(patches), -1)

    def _attend(self, layer: Any, state: Tensor, rotation: tuple[Tensor, ...], windows: list[int]) -> Iterator[None]:
        """Compute the attention half of a layer and add it to ``state``. Patches attend only within their window.
        Yields after each piece."""
        norm, qkv, out, *_ = layer
        heads, (cosines, sines) = self.config.num_attention_heads, rotation
        found = yield from in_pieces(state, lambda part: qkv(self._normed(part, norm)))
        with torch.inference_mode():
            # [heads, patches, size]
            q, k, v = found.view(len(state), 3, heads, -1).permute(1, 2, 0, 3).unbind(0)
            q, k = (_rotated(each, cosines, sines) for each in (q, k))
        yield None
        begin = 0
        for count in windows:
            end = begin + count
            piece = max(16, min(PIECE, _SCORES // count))
            for at in range(begin, end, piece):
                last = min(at + piece, end)
                with torch.inference_mode():
                    keys = k[None, :, begin:end], v[None, :, begin:end]
                    some = functional.scaled_dot_product_attention(q[None, :, at:last], *keys)[0]
                    state[at:last] += out(some.transpose(0, 1).flatten(1))
                yield None
            begin = end

    def _transform(self, layer: Any, state: Tensor) -> Iterator[None]:
        """Compute the MLP half of a layer and add it to ``state``. Yields after each piece."""
        *_, norm, ups, down = layer
        for at in range(0, len(state), PIECE):
            with torch.inference_mode():
                normed = self._normed(state[at : at + PIECE], norm)
                inner = ups[0](normed)
            yield None
            with torch.inference_mode():
                if len(ups) == 2:
                    inner = activated(self.config.activation, inner) * ups[1](normed)
                else:
                    inner = activated(self.config.activation, inner)
            if len(ups) == 2:
                yield None
            with torch.inference_mode():
                state[at : at + PIECE] += down(inner)
            yield None

    def _merge(
        self, state: Tensor, norm: tuple[Tensor, ...], first: Product, second: Product
    ) -> Generator[None, None, Tensor]:
        """Merge each square of patches into one row, [squares, text_width]. If the norm is as wide as a square, it is
        applied after the square's patches are joined. Yields after each piece."""

        def merged(squares: Tensor) -> Tensor:
            normed = self._normed(squares.reshape(-1, len(norm[0])), norm).view(-1, first.width)
            return second(functional.gelu(first(normed)))

        squares = state.view(-1, first.width)
        return (yield from in_pieces(squares, merged, PIECE // self.config.merge_size**2))

    def _normed(self, rows: Tensor, norm: tuple[Tensor, ...]) -> Tensor:
        if not self.config.gated:
            weight, bias = norm
            return functional.layer_norm(rows, rows.shape[1:], weight, bias, self.eps)
        return rms_normed(rows, norm[0], self.eps)


def rms_normed(rows: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of ``rows`` [n, width], computed in float32."""
    wide = rows.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(rows.dtype)


def _rotated(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate heads [heads, patches, size]: dimension i of the first half of a head is paired with dimension i of the
    second half."""
    wide = heads.float()
    half = heads.shape[-1] // 2
    turned = torch.cat((-wide[..., half:], wide[..., :half]), -1)
    return (wide * cosines + turned * sines).to(heads.dtype)
