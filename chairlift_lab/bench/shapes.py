"""Shapes of layers for measuring kernels: layers of known models, and linear or expert layers of given sizes."""

from __future__ import annotations

import dataclasses
import re
from typing import Final

from chairlift.errors import ConfigError

__all__ = ["MODEL_SHAPES", "ExpertLayer", "LayerShapes", "MatmulShape", "Shapes"]


@dataclasses.dataclass(frozen=True, slots=True)
class MatmulShape:
    """A linear layer: a matrix multiplication with ``k`` inputs and ``n`` outputs."""

    name: str
    k: int
    n: int


@dataclasses.dataclass(frozen=True, slots=True)
class ExpertLayer:
    """A layer of gated experts. Each expert has ``k`` inputs, ``inner`` columns and ``k`` outputs; each token uses
    ``chosen`` experts."""

    name: str
    num_experts: int
    chosen: int
    k: int
    inner: int


@dataclasses.dataclass(frozen=True, slots=True)
class LayerShapes:
    """Sizes of a decoder model. The names are those of Hugging Face's configuration, shortened."""

    name: str
    hidden: int
    intermediate: int
    """Number of columns of the hidden layer in the MLP, or in one expert."""
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    num_experts: int = 0
    """Number of experts in a layer. 0: the layer has one MLP for all tokens."""
    chosen: int = 0
    """Number of experts that each token uses."""

    def experts(self) -> list[ExpertLayer]:
        """The expert layer of the model as a list. Empty if the model has no experts."""
        if not self.num_experts:
            return []
        return [ExpertLayer(f"{self.name} experts", self.num_experts, self.chosen, self.hidden, self.intermediate)]

    def products(self) -> list[MatmulShape]:
        """The linear layers of one decoder layer, fused as in the engine: four, or only two if the MLP is experts."""
        q = self.heads * self.head_dim
        kv = self.kv_heads * self.head_dim
        attention = [
            MatmulShape(f"{self.name} qkv", self.hidden, q + 2 * kv),
            MatmulShape(f"{self.name} o", q, self.hidden),
        ]
        if self.num_experts:
            return attention
        return [
            *attention,
            MatmulShape(f"{self.name} gate_up", self.hidden, 2 * self.intermediate),
            MatmulShape(f"{self.name} down", self.intermediate, self.hidden),
        ]


MODEL_SHAPES: Final = {
    shape.name: shape
    for shape in (
        LayerShapes("qwen2.5-0.5b", 896, 4864, 14, 2, 64, 151_936),
        LayerShapes("smollm-135m", 576, 1536, 9, 3, 64, 49_152),
        LayerShapes("qwen3-0.6b", 1024, 3072, 16, 8, 128, 151_936),
        LayerShapes("llama-3.2-1b", 2048, 8192, 32, 8, 64, 128_256),
        LayerShapes("granite-3-1b-a400m", 1024, 512, 16, 8, 64, 49_155, num_experts=32, chosen=8),
        LayerShapes("olmoe-1b-7b", 2048, 1024, 16, 16, 128, 50_304, num_experts=64, chosen=8),
        LayerShapes("qwen3-30b-a3b", 2048, 768, 32, 4, 128, 151_936, num_experts=128, chosen=8),
    )
}
"""Name in ``--shapes`` -> sizes of the model."""

_MAX_SIZE: Final = 1 << 20
_MAX_EXPERTS: Final = 4096
"""Maximum number of experts that the kernels support."""


@dataclasses.dataclass(frozen=True, slots=True)
class Shapes:
    """Shapes to measure: linear layers, models (for their attention and output heads), and layers of experts."""

    products: tuple[MatmulShape, ...]
    models: tuple[LayerShapes, ...]
    experts: tuple[ExpertLayer, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Shapes:
        """Parse a list of shapes that are separated by commas.

        A shape is a name in :data:`MODEL_SHAPES`, a linear layer ``KxN`` (inputs x outputs), or a layer of experts
        ``CofE:KxI`` (C of E experts per token, each with K inputs and I inner columns). Raises ConfigError for anything
        else.
        """
        products: list[MatmulShape] = []
        models: list[LayerShapes] = []
        experts: list[ExpertLayer] = []
        for item in text.split(","):
            name = item.strip().lower()
            size = re.fullmatch(r"(?:(\d{1,4})of(\d{1,4}):)?(\d{1,7})x(\d{1,7})", name)
            chosen, number, k, n = (int(each or 0) for each in size.groups()) if size else (0, 0, 0, 0)
            if name in MODEL_SHAPES:
                models.append(MODEL_SHAPES[name])
                products += models[-1].products()
                experts += models[-1].experts()
            elif size and size[1] is None and 1 <= k <= _MAX_SIZE and 1 <= n <= _MAX_SIZE:
                products.append(MatmulShape(name, k, n))
            elif size and 1 <= chosen <= number <= _MAX_EXPERTS and 1 <= k <= _MAX_SIZE and 1 <= n <= _MAX_SIZE:
                experts.append(ExpertLayer(name, number, chosen, k, n))
            else:
                raise ConfigError(
                    f"unknown shape {item.strip()!r}; give {', '.join(MODEL_SHAPES)}, or inputs x outputs like "
                    "896x1152, or experts like 8of32:1024x512 (8 of 32 per token, inputs x inner columns)"
                )
        return cls(tuple(dict.fromkeys(products)), tuple(dict.fromkeys(models)), tuple(dict.fromkeys(experts)))
