"""Converts a model directory to one GGUF file for llama.cpp, inside the environment that ``setup_llama_cpp.sh``
creates.

    ENV/bin/python benchmarks/peers/to_gguf.py --model DIR --out FILE.gguf [--type bf16]

It supports Llama and Qwen2 models with byte-level tokenizers, such as those of ``make_random_model.py``. For other
models use llama.cpp's own converter, which is in ENV/source and needs torch and transformers. Matrices get the given
type; norms and biases are float32. The rows of Llama's queries and keys are permuted, because llama.cpp rotates
neighbouring dimensions and the original rotates the two halves of a head.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

ARCHITECTURES = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2}
TYPES = {
    "bf16": gguf.GGMLQuantizationType.BF16,
    "f16": gguf.GGMLQuantizationType.F16,
    "f32": gguf.GGMLQuantizationType.F32,
}


def tensors(file: Path) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """(name, values) of each tensor in a safetensors file."""
    raw = np.memmap(file, dtype=np.uint8, mode="r")
    length = int(raw[:8].view(np.uint64)[0])
    header = json.loads(raw[8 : 8 + length].tobytes())
    header.pop("__metadata__", None)
    for name, about in header.items():
        first, last = (8 + length + offset for offset in about["data_offsets"])
        data = np.frombuffer(
            raw[first:last].tobytes(), dtype={"BF16": "<u2", "F16": "<f2", "F32": "<f4"}[about["dtype"]]
        )
        if about["dtype"] == "BF16":
            data = (data.astype(np.uint32) << 16).view(np.float32)
        yield name, data.astype(np.float32).reshape(about["shape"])


def neighbours(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rows of each head reordered into pairs: the first row of each half, the second row of each half, and so on."""
    width = weight.shape[0] // heads
    return weight.reshape(heads, 2, width // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def add_settings(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    heads = config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    rope = config.get("rope_parameters") or config
    if rope.get("rope_type", "default") != "default" or config.get("rope_scaling"):
        raise SystemExit("this model scales its positions; convert it with llama.cpp's own converter")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_rope_dimension_count(width)
    writer.add_rope_freq_base(rope.get("rope_theta", 10000.0))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])


def add_tokenizer(writer: gguf.GGUFWriter, config: dict[str, Any], file: Path) -> None:
    """Add the vocabulary, so that outputs have a text. The rule that splits a text before merges are applied matters
    only for prompts given as text."""
    data = json.loads(file.read_text(encoding="utf-8"))
    if data["model"].get("type", "BPE") != "BPE":
        raise SystemExit(f"{file} is no byte-level BPE; convert the model with llama.cpp's own converter")
    names = {number: token for token, number in data["model"]["vocab"].items()}
    added = {token["id"]: token for token in data.get("added_tokens", [])}
    names |= {number: token["content"] for number, token in added.items()}
    size = config["vocab_size"]
    kinds = [
        gguf.TokenType.UNUSED
        if number not in names
        else gguf.TokenType.CONTROL
        if added.get(number, {}).get("special")
        else gguf.TokenType.NORMAL
        for number in range(size)
    ]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in data["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2" if config["model_type"] == "qwen2" else "default")
    writer.add_token_list([names.get(number, f"[unused{number}]") for number in range(size)])
    writer.add_token_types(kinds)
    writer.add_token_merges(merges or ["Ġ Ġ"])  # one merge that is never used, because the list must not be empty
    end = config["eos_token_id"]
    writer.add_eos_token_id(end[0] if isinstance(end, list) else end)
    writer.add_add_bos_token(False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--type", choices=sorted(TYPES), default="bf16", help="number type of the matrices")
    args = parser.parse_args()
    config = json.loads((args.model / "config.json").read_text())
    kind = config["model_type"]
    if kind not in ARCHITECTURES:
        raise SystemExit(f"{kind} models are not converted here; use llama.cpp's own converter")
    writer = gguf.GGUFWriter(args.out, gguf.MODEL_ARCH_NAMES[ARCHITECTURES[kind]])
    add_settings(writer, config)
    if (args.model / "tokenizer.json").exists():
        add_tokenizer(writer, config, args.model / "tokenizer.json")
    else:
        writer.add_tokenizer_model("no_vocab")
    names = gguf.get_tensor_name_map(ARCHITECTURES[kind], config["num_hidden_layers"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for file in sorted(args.model.glob("*.safetensors")):
        for name, values in tensors(file):
            target = names.get_name(name, try_suffixes=(".weight", ".bias"))
            if target is None:
                raise SystemExit(f"llama.cpp knows no place for {name}")
            if kind == "llama" and name.split(".")[-2] in heads:
                values = neighbours(values, heads[name.split(".")[-2]])
            data_type = TYPES[args.type] if values.ndim > 1 else TYPES["f32"]
            writer.add_tensor(target, gguf.quantize(values, data_type), raw_dtype=data_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
