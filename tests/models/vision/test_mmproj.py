"""A GGUF model beside its image encoder (mmproj) answers like transformers with the original model."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from chairlift import LLM
from chairlift.errors import ConfigError, ModelLoadError, RequestError
from chairlift.models.model_files import read_config
from chairlift.text.tokenizer.tokenizer import Tokenizer
from tests.models.gguf.make import converted_with_images, to_gguf, write_gguf
from tests.models.vision.test_equivalence import check
from tests.models.vision.tiny import (
    GEMMA_ROWS,
    SQUARE,
    GemmaReference,
    InternReference,
    MistralReference,
    QwenReference,
    Reference,
    picture,
    tiny_gemma,
    tiny_intern,
    tiny_mistral,
    tiny_qwen,
    tiny_vlm,
)
from tests.native import needs_kernels

pytestmark = needs_kernels
_INTERN = {"num_hidden_layers": 4}
_RMS = {**_INTERN, "norm_type": "rms_norm", "use_qk_norm": True, "attention_bias": False}
"""llama.cpp's converter knows the names of a projector's layers only up to the number of the encoder's layers."""
MODELS = {
    "gemma3": (lambda folder: tiny_gemma(folder, image_seq_length=GEMMA_ROWS), GemmaReference),
    "idefics3": (lambda folder: tiny_vlm(folder, "idefics3"), Reference),
    "smolvlm": (lambda folder: tiny_vlm(folder, "smolvlm"), Reference),
    "internvl": (lambda folder: tiny_intern(folder, vision=_INTERN), InternReference),
    "internvl-qwen3": (lambda folder: tiny_intern(folder, "qwen3", _RMS), InternReference),
    "mistral3": (lambda folder: tiny_mistral(folder, layers=3), MistralReference),
    "mistral3-llama": (lambda folder: tiny_mistral(folder, layers=3), MistralReference),
    "qwen2_vl": (lambda folder: tiny_qwen(folder, "qwen2_vl"), QwenReference),
    "qwen2_5_vl": (lambda folder: tiny_qwen(folder, "qwen2_5_vl"), QwenReference),
    "qwen3_vl": (tiny_qwen, QwenReference),
}
LIMITS = {"image_min_pixels": 2 * SQUARE**2, "image_max_pixels": 40 * SQUARE**2}
MORE = {"qwen2_vl": LIMITS, "qwen2_5_vl": {**LIMITS, "window_size": 2 * SQUARE}, "qwen3_vl": LIMITS}
"""Family -> keys of the tiny model that llama.cpp's converter does not write."""


def representable(model_dir: Path) -> None:
    """Change a Gemma 3 to one that llama.cpp's files can represent: the converter always writes one matrix in float16,
    and every sixth layer is the one with full attention."""
    config = json.loads((model_dir / "config.json").read_text())
    config["text_config"]["layer_types"] = ["sliding_attention"] * config["text_config"]["num_hidden_layers"]
    (model_dir / "config.json").write_text(json.dumps(config))
    path = model_dir / "model.safetensors"
    tensors = load_file(path)
    for name in [name for name in tensors if name.endswith("mm_input_projection_weight")]:
        tensors[name] = tensors[name].half().float()
    save_file(tensors, path, {"format": "pt"})


def as_published(model_dir: Path, family: str) -> None:
    """Give the files of a model the names that published models have, which transformers 5 changes."""
    path = model_dir / "model.safetensors"
    tensors = load_file(path)
    config = json.loads((model_dir / "config.json").read_text())
    if family.startswith("internvl"):
        tensors, config = as_interns(tensors, config)
    elif not family.startswith("mistral3"):
        tensors = {name.replace("vision_tower.", "vision_tower.vision_model."): each for name, each in tensors.items()}
    if config["model_type"] in ("idefics3", "smolvlm"):
        config["text_config"]["architectures"] = ["VLlama3ForCausalLM"]
    if family == "mistral3-llama":  # as earlier converters did
        config["text_config"]["architectures"] = ["MistralForCausalLM"]
    save_file(tensors, path, {"format": "pt"})
    (model_dir / "config.json").write_text(json.dumps(config))


_INTERN_NAMES = (
    (r"vision_tower\.embeddings\.cls_token", "vision_model.embeddings.class_embedding"),
    (r"vision_tower\.embeddings\.position_embeddings", "vision_model.embeddings.position_embedding"),
    (r"vision_tower\.embeddings\.patch_embeddings\.projection", "vision_model.embeddings.patch_embedding"),
    (r"vision_tower\.encoder\.layer\.", "vision_model.encoder.layers."),
    (r"attention\.projection_layer", "attn.proj"),
    (r"attention\.([qk]_norm)", r"attn.\1"),
    ("layernorm_before", "norm1"),
    ("layernorm_after", "norm2"),
    ("lambda_", "ls"),
    (r"multi_modal_projector\.layer_norm", "mlp1.0"),
    (r"multi_modal_projector\.linear_1", "mlp1.1"),
    (r"multi_modal_projector\.linear_2", "mlp1.3"),
)


def as_interns(tensors: dict[str, Any], config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tensors and config of an InternVL in the layout of its authors, which is the one that llama.cpp converts."""
    found: dict[str, Any] = {}
    for name, each in tensors.items():
        for pattern, other in _INTERN_NAMES:
            name = re.sub(pattern, other, name)
        if joined := re.fullmatch(r"(.+\.)attention\.q_proj(\..+)", name):
            places = [f"vision_tower.encoder.layer.{name.split('.')[3]}.attention.{part}_proj" for part in "qkv"]
            found[f"{joined[1]}attn.qkv{joined[2]}"] = torch.cat([tensors[place + joined[2]] for place in places])
        elif ".attention." not in name:
            found[name] = each
    text, vision = config["text_config"], config["vision_config"]
    text["architectures"] = ["Qwen3ForCausalLM" if text["model_type"] == "qwen3" else "Qwen2ForCausalLM"]
    vision["architectures"] = ["InternVisionModel"]
    return found, {**config, "min_dynamic_patch": 1, "max_dynamic_patch": 4}


@pytest.mark.nightly
@pytest.mark.parametrize("family", MODELS)
def test_a_converted_model_reads_images_like_transformers(family: str, tmp_path: Path) -> None:
    write, reference = MODELS[family]
    model_dir = write(tmp_path / "model")
    if family == "gemma3":
        representable(model_dir)
    theirs = reference(model_dir)
    as_published(model_dir, family)
    model = converted_with_images(model_dir, tmp_path / "gguf", **MORE.get(family, {}))
    llm = LLM(model, tokenizer=str(model_dir), dtype="float32", max_num_seqs=4, num_kv_blocks=80)
    one, two = picture(1, 40, 24), picture(2, 24, 64)
    check(theirs, llm, (one, "What?"), ("Before ", one, " or ", two), ("no image",))


def written(folder: Path, *, encoder: str = "mmproj-model.gguf", tokens: list[str] | None = None, **more: Any) -> Path:
    """Write a SmolVLM as two GGUF files in ``folder``. ``more`` replaces keys and tensors of the encoder; None removes
    one. Returns the path of the model for texts; the original is in ``folder`` / original."""
    original = tiny_vlm(folder / "original")
    config = json.loads((original / "config.json").read_text())
    tensors = load_file(original / "model.safetensors")
    text, vision = config["text_config"], config["vision_config"]
    apart = folder / "texts"
    apart.mkdir()
    (apart / "config.json").write_text(json.dumps({**text, "eos_token_id": 257}))
    save_file(
        {
            name.replace("model.text_model.", "model."): each
            for name, each in tensors.items()
            if ".vision_model." not in name and ".connector." not in name
        },
        apart / "model.safetensors",
    )
    vocabulary = Tokenizer.from_dir(original).backend.get_vocab(with_added_tokens=True)
    numbered = sorted(vocabulary, key=lambda token: vocabulary[token])
    path = to_gguf(apart, folder / "model.gguf", **{"tokenizer.ggml.tokens": tokens or numbered})
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, vision["num_hidden_layers"])
    f32 = gguf.GGMLQuantizationType.F32
    stored = {
        names.get_name(name, try_suffixes=(".weight", ".bias")): (each.numpy(), f32)
        for name, each in tensors.items()
        if ".vision_model." in name or ".connector." in name
    }
    keys = {
        "general.architecture": "clip",
        "general.type": "mmproj",
        "clip.has_vision_encoder": True,
        "clip.projector_type": "idefics3",
        "clip.vision.image_mean": [0.5, 0.4, 0.6],
        "clip.vision.image_std": [0.5, 0.6, 0.4],
        "clip.vision.image_size": vision["image_size"],
        "clip.vision.preproc_image_size": 2 * vision["image_size"],
        "clip.vision.patch_size": vision["patch_size"],
        "clip.vision.embedding_length": vision["hidden_size"],
        "clip.vision.feed_forward_length": vision["intermediate_size"],
        "clip.vision.block_count": vision["num_hidden_layers"],
        "clip.vision.attention.head_count": vision["num_attention_heads"],
        "clip.vision.attention.layer_norm_epsilon": vision["layer_norm_eps"],
        "clip.vision.projection_dim": text["hidden_size"],
        "clip.vision.projector.scale_factor": 2,
    }
    whole = {name: each for name, each in {**keys, **stored, **more}.items() if each is not None}
    write_gguf(
        folder / encoder,
        {name: each for name, each in whole.items() if not isinstance(each, tuple)},
        {name: each for name, each in whole.items() if isinstance(each, tuple)},
    )
    return path


def engine(model: Path, **settings: Any) -> LLM:
    tokenizer = str(model.parent / "original")
    return LLM(model, **{"tokenizer": tokenizer, "dtype": "float32", "num_kv_blocks": 80, **settings})


def swapped(model: Path) -> dict[str, Any]:
    """The tensors of the encoder with ``ffn_up`` and ``ffn_down`` exchanged, as older converters named them."""
    found: dict[str, Any] = {}
    for tensor in gguf.GGUFReader(model.with_name("mmproj-model.gguf")).tensors:
        if ".ffn_" in tensor.name:
            other = tensor.name.replace("up", "?").replace("down", "up").replace("?", "down")
            found[other] = (np.array(tensor.data), gguf.GGMLQuantizationType.F32)
    return found


@pytest.mark.parametrize("old", [False, True])
def test_a_file_beside_the_model_reads_images_like_transformers(old: bool, tmp_path: Path) -> None:
    model = written(tmp_path / "a")
    if old:
        model = written(tmp_path / "b", **swapped(model))
    llm = engine(model)
    one, two = picture(1, 40, 24), picture(2, 24, 64)
    check(Reference(model.parent / "original"), llm, (one, "What?"), ("Before ", one, " or ", two), ("no image",))
    assert not llm.info.notes


def test_the_file_is_named_or_left_out(tmp_path: Path) -> None:
    model = written(tmp_path / "a", encoder="images.gguf")
    images = [{"role": "user", "content": [{"type": "image", "image": picture(1)}]}]
    for settings in ({}, {"mmproj": "none"}):
        llm = engine(model, **settings)
        assert not llm.info.takes_images
        with pytest.raises(RequestError, match="image"):
            llm.chat(images)
    given = engine(model, mmproj=str(tmp_path / "a" / "images.gguf"))
    check(Reference(tmp_path / "a" / "original"), given, (picture(1), "What?"))
    with pytest.raises(ModelLoadError, match="is not a file"):
        engine(model, mmproj="images.gguf")
    with pytest.raises(ModelLoadError, match=r"mmproj is .* not a GGUF file"):
        engine(tmp_path / "a" / "original", tokenizer=None, mmproj=str(tmp_path / "a" / "images.gguf"))
    with pytest.raises(ModelLoadError, match=r"--mmproj images\.gguf"):
        read_config(tmp_path / "a" / "images.gguf")
    with pytest.raises(ConfigError, match="mmproj to none"):
        engine(model, mmproj=str(tmp_path / "a" / "images.gguf"), enable_lora=True)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "kind": ({"clip.projector_type": "llama4"}, "projector type 'llama4' is not supported.*safetensors"),
    "older": ({"clip.projector_type": "pixtral"}, "projector 'pixtral' has no mm.input_norm.weight"),
    "another-model": ({"clip.projector_type": "qwen3vl_merger"}, "is for architecture 'qwen3vl', not 'llama'"),
    "width": ({"clip.vision.projection_dim": 128}, "have 128 numbers, and the model's embeddings 64"),
    "sounds": ({"clip.has_vision_encoder": False, "clip.has_audio_encoder": True}, "an encoder of sounds"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_encoder_that_does_not_fit_is_named(name: str, tmp_path: Path) -> None:
    """Beside the model, the file is not used, and a note says why. If the setting names it, it is an error."""
    change, problem = REFUSED[name]
    model = written(tmp_path / "a", **change)
    llm = engine(model)
    assert not llm.info.takes_images
    (note,) = llm.info.notes
    assert re.search(f"mmproj-model.gguf beside the model is not used, because .*{problem}", note)
    with pytest.raises(ModelLoadError, match=problem):
        engine(model, mmproj=str(model.with_name("mmproj-model.gguf")))


DAMAGED: dict[str, tuple[dict[str, Any], str]] = {
    "tensor": ({"v.blk.1.ln1.bias": None}, r"layers.1.layer_norm1.bias is missing"),
    "unknown": ({"v.class_embd": (np.zeros(4, dtype=np.float32), 0)}, "'v.class_embd' has no place"),
    "shape": ({"mm.model.fc.weight": (np.zeros((4, 4), dtype=np.float32), 0)}, r"shape \[4, 4\]"),
    "matrix": ({"v.blk.0.ffn_up.weight": (np.zeros(4, dtype=np.float32), 0)}, r"shape \[4\], and must be a matrix"),
    "key": ({"clip.vision.patch_size": None}, "clip.vision.patch_size must be a number, got None"),
    "tokens": ({"tokens": ["a", "b"]}, "has no token '<image>'"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_encoder_is_an_error(name: str, tmp_path: Path) -> None:
    change, problem = DAMAGED[name]
    with pytest.raises(ModelLoadError, match=problem):
        engine(written(tmp_path / "a", **change))
