"""Writes a repository of repositories.py at small size, and its twin: the same numbers as floats."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from chairlift.models.formats.gguf.blocks import BLOCK_TYPES
from chairlift.models.registry import FAMILIES
from tests.models.gguf.make import converted, to_gguf
from tests.models.gguf.test_tensors import raw_blocks
from tests.models.quantized.published_settings import PACKS, SETTINGS
from tests.models.quantized.repositories import Repository
from tests.models.tiny import tiny_hf_model
from tests.models.tiny_transformers import tiny_transformers_model

__all__ = ["Made", "make_refused", "make_repository"]

_SIZES: Final[dict[str, Any]] = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
_GGUF_SIZES: Final[dict[str, Any]] = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
_OF_FAMILIES: Final[dict[str, dict[str, Any]]] = {
    "deepseek_v3": {"kv_lora_rank": 128, "moe_intermediate_size": 128, "q_lora_rank": 128},
    "gemma2": {"num_hidden_layers": 2},
    "gemma3_text": {"num_hidden_layers": 6, "layer_types": None},
    "glm4_moe": {"moe_intermediate_size": 64},
    "gpt_oss": {"layer_types": ["sliding_attention", "full_attention"]},
    "lfm2": {"num_hidden_layers": 4},
    "qwen3_moe": {"moe_intermediate_size": 128},
    "qwen3_next": {
        **{"num_hidden_layers": 3, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128},
        **{"linear_key_head_dim": 32, "linear_value_head_dim": 32},
    },
    "smollm3": {"num_hidden_layers": 4},
}
"""Family -> fields that its layers need: rows of whole groups, and one layer of each kind."""
_BY_CONVERTER: Final = ("gpt_oss", "lfm2")
"""Families whose files llama.cpp's own converter writes."""
_MIXES: Final[dict[str, tuple[str, dict[str, str]]]] = {
    "Q2_K": ("Q2_K", {"attn_v": "Q4_K", "ffn_down": "Q3_K", "output": "Q6_K"}),
    "Q3_K_M": ("Q3_K", {"attn_v": "Q5_K", "ffn_down": "Q4_K", "output": "Q6_K"}),
    "Q4_0": ("Q4_0", {"token_embd": "F16"}),
    "Q4_K_M": ("Q4_K", {"attn_v": "Q6_K", "ffn_down": "Q6_K", "output": "Q6_K", "ffn_down_exps": "Q6_K"}),
    "Q5_K_M": ("Q5_K", {"attn_v": "Q6_K", "ffn_down": "Q6_K", "output": "Q6_K"}),
    "Q6_K": ("Q6_K", {}),
    "Q8_0": ("Q8_0", {}),
    "IQ4_XS": ("IQ4_XS", {"attn_v": "Q5_K", "output": "Q6_K"}),
    "MXFP4_MOE": ("Q8_0", {"ffn_gate_exps": "MXFP4", "ffn_up_exps": "MXFP4", "ffn_down_exps": "MXFP4"}),
}
"""Name of a mix of block types -> the type of most matrices, and of those that have another."""
_SMALLER: Final = {"Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0", "IQ4_XS": "IQ4_NL"}
"""Type with blocks of 256 columns -> the type that llama.cpp takes where a row is no multiple of them."""
_FLOATS_OF_FILES: Final = re.compile(r"norm|ffn_gate_inp|ssm_|shortconv\.conv|rope_|attn_sinks|position")


@dataclasses.dataclass(frozen=True, slots=True)
class Made:
    """A repository on disk."""

    quantised: Path
    twin: Path
    """The same numbers as floats: a directory that transformers reads, or a GGUF file."""
    dense: Path
    """The directory from which both were made."""


def make_repository(folder: Path, repository: Repository) -> Made:
    """Write the repository, which must not be one that is refused."""
    sizes = _GGUF_SIZES if repository.is_gguf else _SIZES
    fields = {**sizes, **_OF_FAMILIES.get(repository.family, {}), **repository.settings}
    if "num_hidden_layers" in fields and repository.family == "qwen3_next":
        fields["num_hidden_layers"] = 3
    write = tiny_hf_model if repository.family in FAMILIES else tiny_transformers_model
    dense = write(folder, repository.family, **fields)
    if repository.is_gguf:
        convert = converted if repository.family in _BY_CONVERTER else to_gguf
        whole = convert(dense, folder / "whole.gguf")
        return _requantised(whole, folder, dense, *_MIXES[repository.layout])
    return _directory(folder, repository, dense)


def make_refused(folder: Path, repository: Repository) -> Path:
    """Write as much of a repository as a refusal needs: its settings, or the header of its GGUF file."""
    if repository.is_gguf:
        path = folder / "model.gguf"
        writer = gguf.GGUFWriter(path, repository.family)
        writer.add_uint32(f"{repository.family}.block_count", 2)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path
    known = repository.family in ("llama", "qwen3", "qwen3_moe")
    model_dir = tiny_hf_model(folder, repository.family if known else "llama", num_hidden_layers=1)
    config = json.loads((model_dir / "config.json").read_text())
    config["model_type"] = repository.family
    settings = SETTINGS.get(repository.layout, {"quant_method": repository.layout, "bits": 4})
    config["quantization" if repository.place == "quantization" else "quantization_config"] = settings
    (model_dir / "config.json").write_text(json.dumps(config))
    return model_dir


def _directory(folder: Path, repository: Repository, dense: Path) -> Made:
    twin, quantised = folder / "twin", folder / "quantised"
    shutil.copytree(dense, twin)
    shutil.copytree(dense, quantised)
    stored, worth = dict[str, Tensor](), dict[str, Tensor]()
    for name, weight in load_file(dense / "model.safetensors").items():
        if repository.layout == "mxfp4" and name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors, worth[name] = _stack(weight)
            stored |= {f"{name}_{ending}": each for ending, each in tensors.items()}
        elif weight.dim() != 2 or re.search(repository.floats, name) or repository.layout == "mxfp4":
            stored[name] = worth[name] = weight
        else:
            tensors, worth[name] = PACKS[repository.layout](weight)
            layer = name.removesuffix(".weight")
            stored |= {f"{layer}.{ending}": each.contiguous() for ending, each in tensors.items()}
    stored = {_renamed(name, repository.prefix): each.contiguous() for name, each in stored.items()}
    save_file(worth, twin / "model.safetensors", metadata={"format": "pt"})
    save_file(stored, quantised / "model.safetensors", metadata={"format": "pt"})
    _write_settings(quantised, repository)
    return Made(quantised, twin, dense)


def _renamed(name: str, prefix: str) -> str:
    if not prefix:
        return name
    return prefix + name.removeprefix("model.") if name.startswith("model.") else f"language_model.{name}"


def _write_settings(quantised: Path, repository: Repository) -> None:
    settings = SETTINGS[repository.layout]
    config = json.loads((quantised / "config.json").read_text())
    place = repository.place
    if place == "hf_quant_config.json":
        (quantised / place).write_text(json.dumps(settings))
    elif place == "quantization":  # MLX writes both
        config |= {"quantization": settings, "quantization_config": settings}
    elif repository.whole:
        rope = config.pop("rope_parameters")  # as older versions of transformers write it
        config |= {"rope_theta": rope["rope_theta"]} if repository.family == "mistral" else {"rope_parameters": rope}
        config.pop("tie_word_embeddings")
        outer = {**repository.whole, "text_config": config, "dtype": config.pop("dtype")}
        (config if place == "text_config" else outer)["quantization_config"] = settings
        config = outer
    else:
        config["quantization_config"] = settings
    (quantised / "config.json").write_text(json.dumps(config))


def _stack(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Weights of experts [E, in, out] in MXFP4, and what transformers makes of them."""
    count, size, rows = weight.shape
    generator = torch.Generator().manual_seed(rows)
    shape = (count, rows, size // 32)
    blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(122, 125, shape, generator=generator, dtype=torch.uint8)
    worth = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    return {"blocks": blocks, "scales": scales}, worth.contiguous()


def _requantised(whole: Path, folder: Path, dense: Path, usual: str, others: Mapping[str, str]) -> Made:
    """Copies of a GGUF file of floats: one with the block types of a mix, and one with what these are worth."""
    reader = gguf.GGUFReader(whole)
    architecture = str(reader.fields["general.architecture"].contents())
    paths = folder / "model.gguf", folder / "twin.gguf"
    writers = [gguf.GGUFWriter(path, architecture) for path in paths]
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        inner = field.types[-1] if len(field.types) > 1 else None
        for writer in writers:
            writer.add_key_value(field.name, field.contents(), field.types[0], inner)
    for seed, tensor in enumerate(reader.tensors):
        values = np.ascontiguousarray(tensor.data)
        name = _type_of(tensor.name, values, usual, others)
        if name == "F32":
            for writer in writers:
                writer.add_tensor(tensor.name, values)
            continue
        kind = gguf.GGMLQuantizationType[name]
        raw = _blocks(name, values, seed)
        writers[0].add_tensor(tensor.name, raw, raw_dtype=kind)
        writers[1].add_tensor(tensor.name, gguf.quants.dequantize(raw, kind).astype(np.float32).reshape(values.shape))
    for writer in writers:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return Made(*paths, dense)


def _type_of(name: str, values: Any, usual: str, others: Mapping[str, str]) -> str:
    """Block type of a tensor, as llama.cpp chooses it."""
    parts = name.removesuffix(".weight").split(".")
    layer = ".".join(parts[2:]) if parts[0] == "blk" else parts[0]
    if values.ndim < 2 or _FLOATS_OF_FILES.search(name) or not name.endswith(".weight"):
        return "F32"
    found = others.get(layer, usual)
    columns = next(kind.weights for kind in BLOCK_TYPES.values() if kind.name == found)
    found = found if values.shape[-1] % columns == 0 else _SMALLER.get(found, found)
    return found if values.shape[-1] % 32 == 0 or found == "F16" else "F32"


def _blocks(name: str, values: Any, seed: int) -> Any:
    """Rows of blocks: the quantised ``values``, or random ones where the package cannot quantise."""
    kind = gguf.GGMLQuantizationType[name]
    try:
        return gguf.quants.quantize(values, kind)
    except NotImplementedError:
        rows = values.size // values.shape[-1]
        return raw_blocks(name, seed, rows, values.shape[-1]).reshape(*values.shape[:-1], -1)
