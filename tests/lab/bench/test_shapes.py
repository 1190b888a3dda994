from __future__ import annotations

import pytest

from chairlift.errors import ConfigError
from chairlift_lab.bench.shapes import MODEL_SHAPES, ExpertLayer, MatmulShape, Shapes


def test_models_bring_their_layers_products() -> None:
    shapes = Shapes.parse("qwen2.5-0.5b")
    assert shapes.models == (MODEL_SHAPES["qwen2.5-0.5b"],)
    assert [(product.k, product.n) for product in shapes.products] == [
        (896, 1152),
        (896, 896),
        (896, 9728),
        (4864, 896),
    ]


def test_products_and_models_mix_and_count_once() -> None:
    shapes = Shapes.parse(" 64x100, SmolLM-135M,64x100")
    assert shapes.products[0] == MatmulShape("64x100", 64, 100)
    assert len(shapes.products) == 5
    assert [model.name for model in shapes.models] == ["smollm-135m"]
    assert Shapes.parse("7x9").models == ()


def test_experts_are_given_by_size_or_by_model() -> None:
    shapes = Shapes.parse("2of8:256x128,granite-3-1b-a400m,64x10,2of8:256x128")
    assert shapes.experts == (
        ExpertLayer("2of8:256x128", 8, 2, 256, 128),
        ExpertLayer("granite-3-1b-a400m experts", 32, 8, 1024, 512),
    )
    # Beside experts a layer has the products of its attention only.
    assert [(product.k, product.n) for product in shapes.products] == [(1024, 2048), (1024, 1024), (64, 10)]


_WRONG = ("", "llama", "64", "0x5", "5x0", "64x", "64x9999999", "64x10,", "-1x4", "1.5x2")
_WRONG_EXPERTS = ("0of8:32x32", "9of8:32x32", "2of4097:32x32", "2of8:0x32", "2of8:32", "of8:32x32", "2of8x32x32")


@pytest.mark.parametrize("text", [*_WRONG, *_WRONG_EXPERTS])
def test_unknown_shapes_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"give qwen2\.5-0\.5b, .* or inputs x outputs like 896x1152, or experts"):
        Shapes.parse(text)
