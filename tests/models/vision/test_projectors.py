"""GGUF models beside the image encoders of InternVL, Mistral 3 and Qwen2-VL answer like transformers.

The tests write the files themselves, with the names that llama.cpp's converter gives the tensors. Nightly tests in
``test_mmproj.py`` run the converter.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from chairlift import LLM
from chairlift.text.tokenizer.tokenizer import Tokenizer
from tests.models.gguf.make import to_gguf, write_gguf
from tests.models.vision.test_equivalence import check
from tests.models.vision.tiny import (
    SQUARE,
    InternReference,
    MistralReference,
    QwenReference,
    picture,
    tiny_intern,
    tiny_mistral,
    tiny_qwen,
)
from tests.native import needs_kernels

pytestmark = needs_kernels
_TEXT = re.compile(r"^(language_model\.)?(lm_head\.|model\.)")
_LINES = {"clip.use_silu": True, "clip.vision.spatial_merge_size": 2}
_TILES = {
    "clip.use_gelu": True,
    "clip.vision.attention.layer_norm_epsilon": 1e-6,
    "clip.vision.preproc_max_tiles": 4,
    "clip.vision.projector.scale_factor": 2,
}
_PIXELS = {"clip.vision.image_min_pixels": 2 * SQUARE**2, "clip.vision.image_max_pixels": 40 * SQUARE**2}
KINDS: dict[str, tuple[Any, Any, dict[str, Any], dict[str, Any]]] = {
    "internvl": (lambda folder: tiny_intern(folder, vision={"num_hidden_layers": 4}), InternReference, {}, _TILES),
    "pixtral": (lambda folder: tiny_mistral(folder, layers=3), MistralReference, {}, _LINES),
    "qwen2vl_merger": (
        lambda folder: tiny_qwen(folder, "qwen2_vl"),
        QwenReference,
        {"architecture": "qwen2vl", "qwen2vl.rope.dimension_sections": [2, 3, 3, 0]},
        {**_PIXELS, "clip.vision.feed_forward_length": 0},
    ),
}
"""Value of ``clip.projector_type`` -> (function that writes the tiny model, class of the reference, further arguments
of :func:`to_gguf`, keys of the encoder)."""


def in_file(kind: str, name: str, each: Any, heads: int) -> Iterator[tuple[str, Any]]:
    """(name that the name map of ``gguf`` knows, values) of the tensors that the converter makes of one tensor of an
    encoder. Qwen2-VL is written as by old converters, which exchange the names of the layers of an MLP."""
    if kind == "pixtral" and re.search(r"\.[qk]_proj\.", name):
        halves = each.reshape(heads, 2, -1, each.shape[1])
        yield name, halves.swapaxes(1, 2).reshape(each.shape)
    elif ".qkv." in name:
        for part, values in zip("qkv", np.split(each, 3), strict=True):
            yield name.replace("qkv", part), values
    elif kind == "qwen2vl_merger":
        other = {"fc1": "fc2", "fc2": "fc1"}
        yield re.sub("fc[12]", lambda part: other[part[0]], name), each
    elif kind == "internvl":
        projector = {"layer_norm": "mlp1.0", "linear_1": "mlp1.1", "linear_2": "mlp1.3"}
        found = re.sub(r"multi_modal_projector\.(\w+)", lambda part: projector[part[1]], name)
        found = found.replace("vision_tower.", "model.vision_tower.")
        yield found + ".weight" * found.endswith(("lambda_1", "lambda_2", "position_embeddings")), each
    else:
        yield name, each


def encoder(kind: str, tensors: dict[str, Any], layers: int, heads: int) -> dict[str, Any]:
    """Tensors of the encoder's file."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, layers)
    found = {}
    for name, each in tensors.items():
        if name.endswith("patch_embed.proj.weight"):
            found |= {f"v.patch_embd.weight{end}": each[:, :, frame] for frame, end in enumerate(("", ".1"))}
            continue
        for known, values in in_file(kind, name, each, heads):
            stored = names.get_name(known, try_suffixes=(".weight", ".bias"))
            assert stored is not None, known
            found[stored] = values
    if kind == "pixtral":
        found["v.token_embd.img_break"] = np.zeros(64, dtype=np.float32)
    return {name: (np.ascontiguousarray(each), gguf.GGMLQuantizationType.F32) for name, each in found.items()}


def write(kind: str, folder: Path) -> tuple[Path, Path]:
    """Write a tiny model as two GGUF files. Returns the path of the model for texts, and the original's folder."""
    make, _, more, keys = KINDS[kind]
    original = make(folder / "original")
    config = json.loads((original / "config.json").read_text())
    tensors = load_file(original / "model.safetensors")
    text, vision = config["text_config"], config["vision_config"]
    texts = {name: each for name, each in tensors.items() if _TEXT.match(name)}
    apart = folder / "texts"
    apart.mkdir()
    (apart / "config.json").write_text(json.dumps({**text, "eos_token_id": 257}))
    save_file({name.removeprefix("language_model."): each for name, each in texts.items()}, apart / "model.safetensors")
    vocabulary = Tokenizer.from_dir(original).backend.get_vocab(with_added_tokens=True)
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    model = to_gguf(apart, folder / "model.gguf", **{"tokenizer.ggml.tokens": tokens, **more})
    patch = vision["patch_size"]
    layers = vision.get("num_hidden_layers", vision.get("depth"))
    heads = vision.get("num_attention_heads", vision.get("num_heads"))
    size = vision.get("image_size", 560)
    metadata = {
        "general.architecture": "clip",
        "general.type": "mmproj",
        "clip.has_vision_encoder": True,
        "clip.projector_type": kind,
        "clip.vision.image_mean": [0.5, 0.4, 0.6],
        "clip.vision.image_std": [0.5, 0.6, 0.4],
        "clip.vision.image_size": size[0] if isinstance(size, list) else size,
        "clip.vision.patch_size": patch[0] if isinstance(patch, list) else patch,
        "clip.vision.embedding_length": vision.get("embed_dim", vision["hidden_size"]),
        "clip.vision.feed_forward_length": vision["intermediate_size"],
        "clip.vision.block_count": layers,
        "clip.vision.attention.head_count": heads,
        "clip.vision.projection_dim": text["hidden_size"],
        **keys,
    }
    images = {name: each for name, each in tensors.items() if name not in texts}
    write_gguf(folder / "mmproj-model.gguf", metadata, encoder(kind, images, layers, heads))
    return model, original


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_beside_the_model_reads_images_like_transformers(kind: str, tmp_path: Path) -> None:
    model, original = write(kind, tmp_path)
    llm = LLM(model, tokenizer=str(original), dtype="float32", num_kv_blocks=80)
    assert not llm.info.notes
    one, two = picture(1, 40, 24), picture(2, 24, 64)
    check(KINDS[kind][1](original), llm, (one, "What?"), ("Before ", one, " or ", two), ("no image",))
