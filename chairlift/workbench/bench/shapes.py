"""Shapes for measuring kernels: those of known models, or any product by its size."""

from __future__ import annotations

import dataclasses
import re
from typing import Final

from chairlift.errors import ConfigError

__all__ = ["MODEL_SHAPES", "ModelShape", "Product", "Shapes"]


@dataclasses.dataclass(frozen=True, slots=True)
class Product:
    """A linear layer: inputs and outputs."""

    name: str
    k: int
    n: int


@dataclasses.dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a decoder, by Hugging Face's names in short."""

    name: str
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int

    def products(self) -> list[Product]:
        """The four fused products of a layer."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return [
            Product(f"{self.name} qkv", self.hidden, q + 2 * kv),
            Product(f"{self.name} o", q, self.hidden),
            Product(f"{self.name} gate_up", self.hidden, 2 * self.intermediate),
            Product(f"{self.name} down", self.intermediate, self.hidden),
        ]


MODEL_SHAPES: Final = {
    shape.name: shape
    for shape in (
        ModelShape("qwen2.5-0.5b", 896, 4864, 14, 2, 64, 151_936),
        ModelShape("smollm-135m", 576, 1536, 9, 3, 64, 49_152),
        ModelShape("qwen3-0.6b", 1024, 3072, 16, 8, 128, 151_936),
        ModelShape("llama-3.2-1b", 2048, 8192, 32, 8, 64, 128_256),
    )
}
"""Models by the name that ``--shapes`` takes."""

_MOST: Final = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class Shapes:
    """Shapes to measure: products, and models for their attention and output heads."""

    products: tuple[Product, ...]
    models: tuple[ModelShape, ...]

    @classmethod
    def parse(cls, text: str) -> Shapes:
        """Names of :data:`MODEL_SHAPES` and products ``KxN`` (inputs x outputs), separated by commas.

        Raises ConfigError for anything else.
        """
        products: list[Product] = []
        models: list[ModelShape] = []
        for item in text.split(","):
            name = item.strip().lower()
            size = re.fullmatch(r"(\d{1,7})x(\d{1,7})", name)
            if name in MODEL_SHAPES:
                models.append(MODEL_SHAPES[name])
                products += models[-1].products()
            elif size and 1 <= (k := int(size[1])) <= _MOST and 1 <= (n := int(size[2])) <= _MOST:
                products.append(Product(name, k, n))
            else:
                raise ConfigError(
                    f"unknown shape {item.strip()!r}; give {', '.join(MODEL_SHAPES)}, or inputs x outputs like 896x1152"
                )
        return cls(tuple(dict.fromkeys(products)), tuple(dict.fromkeys(models)))
