"""The image encoder of Idefics 3 and SmolVLM: a SigLIP transformer over patches, and a connector to the text model.

A tile is computed in pieces of bounded size, so that engine steps can run between two pieces. The division into pieces
is always the same, so the result is identical to the last bit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from chairlift.base.image_spans import ImageTile
from chairlift.errors import ModelLoadError
from chairlift.kernels.onednn import pack_weight, packed_linear
from chairlift.models.vision.vision_config import SquareConfig, VisionConfig

__all__ = [
    "PIECE",
    "Pixels",
    "Product",
    "Tower",
    "VisionLayers",
    "VisionTower",
    "Weights",
    "activated",
    "in_pieces",
]

PIECE = 64
"""Maximum number of patches in a piece of work, which has at most one large matmul. Small pieces keep the pauses of
running requests short. Large pieces use the weights better: an image of 100 patches took 6 % longer with 64 than with
128, and 18 % longer with 32."""


class Tower(Protocol):
    """Interface of an image encoder, which turns tiles of images into embeddings."""

    rounds_floats: bool
    """Whether stored numbers of the encoder were rounded to its dtype."""

    def encode(self, tile: ImageTile) -> Iterator[Tensor | None]:
        """Compute a tile of an image in pieces. Yields None after each piece, and finally the tile's embeddings [rows,
        row size]."""
        ...


def in_pieces(rows: Tensor, compute: Callable[[Tensor], Tensor], size: int = PIECE) -> Generator[None, None, Tensor]:
    """Compute ``compute(rows)`` in pieces of ``size`` rows. Yields after each piece. Returns the results of all pieces,
    joined."""
    found = []
    for part in torch.split(rows, size):
        with torch.inference_mode():
            found.append(compute(part))
        yield
    with torch.inference_mode():
        return torch.cat(found)


class Product:
    """A linear layer, ``x @ weight.T + bias``. The weight is packed once, if the processor has kernels for packed
    weights."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        packed = pack_weight(weight)
        self.width = weight.shape[1]
        self._packs = packed is not None
        self._weight = weight if packed is None else packed
        self._bias = bias

    def __call__(self, rows: Tensor) -> Tensor:
        if self._packs:
            return packed_linear(rows, self._weight, self._bias)
        return functional.linear(rows, self._weight, self._bias)


@dataclasses.dataclass(frozen=True, slots=True)
class Weights:
    """Reads the tensors of an image encoder. All methods raise :class:`~chairlift.errors.ModelLoadError` for tensors
    that are missing, misshapen or not finite."""

    tensors: Mapping[str, Any]
    """Name of a tensor in the checkpoint -> open safetensors file."""
    where: Path
    dtype: torch.dtype
    """Data type of the encoder."""
    normalise: tuple[float, list[float], list[float]]
    """Result of :func:`~chairlift.models.vision.vision_config.normalisation`."""

    def stored(self, name: str, *shape: int) -> Tensor:
        """A tensor as it is stored."""
        if name not in self.tensors:
            raise ModelLoadError(
                f"{self.where}: tensor {name} is missing; download the model again, or set mmproj to none"
            )
        tensor: Tensor = self.tensors[name].get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise ModelLoadError(
                f"{self.where}: tensor {name} has shape {list(tensor.shape)}, but config.json asks for {list(shape)}"
            )
        if not tensor.isfinite().all():
            raise ModelLoadError(f"{self.where}: tensor {name} has NaN or infinity; download the model again")
        return tensor

    def take(self, name: str, *shape: int) -> Tensor:
        """A copy of a tensor in the encoder's dtype."""
        return self.stored(name, *shape).to(self.dtype, copy=True)

    def pair(self, name: str, *shape: int) -> tuple[Tensor, Tensor]:
        """Weight and bias of a layer."""
        return self.take(f"{name}.weight", *shape), self.take(f"{name}.bias", shape[0])

    def product(self, name: str, *shape: int) -> Product:
        return Product(*self.pair(name, *shape))


def activated(name: str, rows: Tensor) -> Tensor:
    """``rows`` after the activation ``gelu``, ``gelu_tanh``, ``quick_gelu`` or ``silu``."""
    if name == "silu":
        return functional.silu(rows)
    if name == "quick_gelu":
        return rows * torch.sigmoid(1.702 * rows)
    return functional.gelu(rows, approximate="tanh" if name == "gelu_tanh" else "none")


class Pixels:
    """Normalises the pixels of square tiles: uint8 [3, size, size] becomes float32. ``normalise`` is the result of
    :func:`~chairlift.models.vision.vision_config.normalisation`."""

    def __init__(self, size: int, normalise: tuple[float, list[float], list[float]]) -> None:
        factor, mean, deviation = normalise
        self._size = size
        self._factor = factor
        self._mean = _channels(mean)
        self._deviation = _channels(deviation)

    def __call__(self, tile: ImageTile) -> Tensor:
        image = torch.frombuffer(bytearray(tile.pixels), dtype=torch.uint8).view(3, self._size, self._size)
        return (image.float() * self._factor - self._mean) / self._deviation


class VisionLayers:
    """The first ``count`` transformer layers of SigLIP or CLIP. The names of their tensors begin with ``prefix`` and
    the number of a layer."""

    def __init__(self, config: SquareConfig, weights: Weights, prefix: str, count: int) -> None:
        self._config = config
        self._layers = list[Any]()
        width = config.hidden_size
        inner = config.intermediate_size
        pair = weights.pair
        for index in range(count):
            at = f"{prefix}{index}."
            parts = [pair(f"{at}self_attn.{name}_proj", width, width) for name in "qkv"]
            qkv = Product(torch.cat([weight for weight, _ in parts]), torch.cat([bias for _, bias in parts]))
            norms = pair(f"{at}layer_norm1", width), pair(f"{at}layer_norm2", width)
            out = weights.product(f"{at}self_attn.out_proj", width, width)
            mlp = weights.product(f"{at}mlp.fc1", inner, width), weights.product(f"{at}mlp.fc2", width, inner)
            self._layers.append((norms, qkv, out, *mlp))

    def run(self, state: Tensor, after: Callable[[int], None] = lambda index: None) -> Iterator[None]:
        """Compute the layers, and replace ``state`` [patches, width] by their result. ``after`` is called with the
        number of layers that are computed. Yields after each piece."""
        for count, layer in enumerate(self._layers, 1):
            yield from self._attend(layer, state)
            yield from self._transform(layer, state)
            with torch.inference_mode():
                after(count)

    def _attend(self, layer: Any, state: Tensor) -> Iterator[None]:
        """Compute the attention half of a layer and add it to ``state``. Yields after each piece."""
        ((norm, _), qkv, out, *_), heads = layer, self._config.num_attention_heads
        found = yield from in_pieces(state, lambda part: qkv(self._normed(part, norm)))
        with torch.inference_mode():
            width = state.shape[1]
            size = state.shape[1] // heads
            # [heads, patches, size]
            q, k, v = (each.reshape(-1, heads, size).transpose(0, 1) for each in torch.split(found, width, 1))
        for at in range(0, len(state), PIECE):
            with torch.inference_mode():
                some = functional.scaled_dot_product_attention(q[None, :, at : at + PIECE], k[None], v[None])[0]
                state[at : at + PIECE] += out(some.transpose(0, 1).flatten(1))
            yield None

    def _transform(self, layer: Any, state: Tensor) -> Iterator[None]:
        """Compute the MLP half of a layer and add it to ``state``. Yields after each piece."""
        (_, norm), _, _, first, second = layer
        for at in range(0, len(state), PIECE):
            with torch.inference_mode():
                inner = first(self._normed(state[at : at + PIECE], norm))
            yield None
            with torch.inference_mode():
                state[at : at + PIECE] += second(activated(self._config.activation, inner))
            yield None

    def _normed(self, rows: Tensor, norm: tuple[Tensor, Tensor]) -> Tensor:
        return functional.layer_norm(rows, rows.shape[1:], *norm, self._config.norm_eps)


class VisionTower:
    """Image encoder of SmolVLM: ``encode(tile)`` yields the rows of one tile, [rows_per_tile, text_width], in the
    tower's dtype. Raises the errors of :class:`Weights`."""

    rounds_floats = False

    def __init__(self, config: VisionConfig, weights: Weights) -> None:
        self.config = config
        self.dtype = weights.dtype
        width = config.hidden_size
        patch = config.patch_size
        top = "model.vision_model."
        self._patches = weights.pair(f"{top}embeddings.patch_embedding", width, 3, patch, patch)
        positions = weights.take(f"{top}embeddings.position_embedding.weight", config.side**2, width)
        self._positions = positions[_position_ids(config.side)]
        self._layers = VisionLayers(config, weights, f"{top}encoder.layers.", config.num_hidden_layers)
        self._norm = weights.pair(f"{top}post_layernorm", width)
        shape = config.text_width, width * config.scale_factor**2
        self._project = Product(weights.take("model.connector.modality_projection.proj.weight", *shape))
        self._pixels = Pixels(config.image_size, weights.normalise)

    def encode(self, tile: ImageTile) -> Iterator[Tensor | None]:
        """Compute the embeddings of ``tile``, uint8 [3, size, size], in pieces. Yields None after each piece, and
        finally the embeddings."""
        with torch.inference_mode():
            weight, bias = self._patches
            pixels = self._pixels(tile).to(self.dtype)
            patches = functional.conv2d(pixels[None], weight, bias, stride=self.config.patch_size)
            state = patches.flatten(2)[0].t() + self._positions
        yield None
        yield from self._layers.run(state)
        with torch.inference_mode():
            rows = self._connect(state)
        yield rows

    def _connect(self, state: Tensor) -> Tensor:
        """Merge each square of patches into one row, and project the rows to the text model's width."""
        scale = self.config.scale_factor
        side = self.config.side
        normed = functional.layer_norm(state, state.shape[1:], *self._norm, self.config.norm_eps)
        squares = normed.view(side // scale, scale, side // scale, scale, -1)
        return self._project(squares.transpose(1, 2).reshape(self.config.rows_per_tile, -1))


def _channels(values: list[float]) -> Tensor:
    return torch.tensor(values).view(3, 1, 1)


def _position_ids(side: int) -> Tensor:
    """int64 [side * side]: index of each patch's position embedding. The indices are computed in float32 as in
    transformers, where rounding may move a patch at a border to the previous index."""
    places = torch.clamp(torch.arange(side, dtype=torch.float32) * (1.0 / torch.tensor(side)), max=1.0 - 1e-6)
    parts = torch.bucketize(places, torch.arange(1 / side, 1.0, 1 / side), right=True)
    return (parts[:, None] * side + parts).flatten()
