"""Checkpoints with fixed scales of activations, and with scales for a KV cache in 8 bits: the weights are theirs, the
other scales are not used, and a note says so.

Changes that must make these fail: the note left out; a weight multiplied by the scale of activations; scales of K and V
dropped from a checkpoint whose config does not name them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from chairlift.errors import ModelLoadError
from tests.models.quantized import packers
from tests.models.quantized.layouts import check_layout
from tests.models.quantized.make import Pack, model_pair, parameters, rewrite
from tests.models.quantized.test_compressed_tensors import FP8, INT8, float_weights, int_weights, settings_and_pack

STATIC = "fixed scales of activations are not used"
KV = "kv_cache_scheme is not followed"


def compressed(form: str, weights: Mapping[str, Any], activations: Mapping[str, Any]) -> tuple[Any, Pack]:
    """compressed-tensors with a fixed scale and zero point of each layer's activations."""
    settings, pack = settings_and_pack(form, weights, {**activations, "dynamic": False, "strategy": "tensor"})

    def with_activations(weight: Tensor) -> tuple[Mapping[str, Tensor], Tensor]:
        tensors, worth = pack(weight)
        return {**tensors, "input_scale": torch.tensor([0.5]), "input_zero_point": torch.zeros(1)}, worth

    return settings, with_activations


CASES: dict[str, tuple[Any, Pack]] = {
    "AutoFP8": packers.static_fp8("weight_scale", "input_scale"),
    "Ministral 3": packers.static_fp8("weight_scale_inv", "activation_scale", weight_block_size=None),
    "compressed-tensors FP8": compressed("float-quantized", float_weights("tensor"), FP8),
    "compressed-tensors W8A8": compressed("int-quantized", int_weights(8, "channel"), INT8),
}


@pytest.mark.parametrize("case", CASES)
def test_static_scales_are_replaced_with_a_note(tmp_path: Path, case: str) -> None:
    notes = check_layout(*model_pair(tmp_path, *CASES[case]))
    assert sum(STATIC in note for note in notes) == 1


@pytest.mark.parametrize("scheme", [{"num_bits": 8, "type": "float", "dynamic": False, "symmetric": True}, "static"])
def test_scales_of_k_and_v_are_passed_over_with_a_note(tmp_path: Path, scheme: Any) -> None:
    made = CASES["AutoFP8"] if scheme == "static" else CASES["compressed-tensors FP8"]
    quantised, twin = model_pair(tmp_path, {**made[0], "kv_cache_scheme": scheme}, made[1])
    places = ("self_attn.k_scale", "self_attn.v_scale", "self_attn.k_proj.k_scale", "self_attn.v_proj.output_scale")

    def add(tensors: dict[str, Tensor]) -> None:
        tensors.update({f"model.layers.{i}.{place}": torch.tensor(0.1) for i in range(2) for place in places})

    rewrite(quantised, add)
    notes = check_layout(quantised, twin)
    assert sum(KV in note for note in notes) == 1


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_ministral_is_read_without_its_image_encoder(tmp_path: Path, prefix: str) -> None:
    """As it is published: static FP8, and the text model inside a model that reads images."""
    whole, twin = model_pair(tmp_path, *CASES["Ministral 3"], family="ministral3", tie_word_embeddings=False)
    config = json.loads((whole / "config.json").read_text())
    outer = {
        "model_type": "mistral3",
        "architectures": ["Mistral3ForConditionalGeneration"],
        "quantization_config": config.pop("quantization_config"),
        "tie_word_embeddings": False,
        "vision_config": {"model_type": "pixtral"},
    }
    (whole / "config.json").write_text(json.dumps({**outer, "text_config": config}))

    def rename(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.startswith("model.")]:
            tensors[prefix + name.removeprefix("model.")] = tensors.pop(name)
        head = "language_model.lm_head.weight" if prefix.startswith("language") else "lm_head.weight"
        tensors[head] = tensors.pop("lm_head.weight")
        tensors["vision_tower.patch_conv.weight"] = torch.ones(4, 3, 2, 2)
        tensors["multi_modal_projector.linear_1.weight"] = torch.ones(4, 4)

    rewrite(whole, rename)
    notes = check_layout(whole, twin, mmproj="none")
    assert sum(STATIC in note for note in notes) == 1


def test_scales_that_the_config_does_not_name_are_refused(tmp_path: Path) -> None:
    quantised, _ = model_pair(tmp_path, *CASES["AutoFP8"])
    rewrite(quantised, lambda tensors: tensors.update({"model.layers.0.self_attn.k_scale": torch.tensor(0.1)}))
    with pytest.raises(ModelLoadError, match="1 unexpected"):
        parameters(quantised)


def test_rows_with_a_scale_each_are_read_as_fbgemm_writes_them(tmp_path: Path) -> None:
    def pack(weight: Tensor) -> tuple[Mapping[str, Tensor], Tensor]:
        scale = torch.rand(len(weight), 1) / 100
        stored = (weight * 80).to(torch.float8_e4m3fn)
        return {"weight": stored, "weight_scale": scale}, stored.float() * scale

    check_layout(*model_pair(tmp_path, {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, pack))
