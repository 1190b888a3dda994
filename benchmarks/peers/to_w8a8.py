"""Rounds the linear layers of a model to 8 bits for vLLM: ``python benchmarks/peers/to_w8a8.py MODEL OUT``.

OUT has the format of compressed-tensors (int-quantized): int8 weights with a scale for each output, and activations
that the engine rounds to 8 bits for each token. Embedding and output head stay as they are.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

WEIGHTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
ACTIVATIONS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


def rounded(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a model, with the matrices of its layers in 8 bits."""
    result = {}
    for name, weight in tensors.items():
        if weight.ndim != 2 or ".layers." not in name:
            result[name] = weight
            continue
        scale = weight.float().abs().amax(1, keepdim=True).clamp_min(1e-12) / 127
        result[name] = (weight.float() / scale).round().to(torch.int8)
        result[f"{name}_scale"] = scale.to(weight.dtype)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    args.out.mkdir(parents=True)
    group = {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": ACTIVATIONS}
    config = json.loads((args.model / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }
    (args.out / "config.json").write_text(json.dumps(config, indent=1))
    shutil.copy(args.model / "tokenizer.json", args.out)
    for file in args.model.glob("*.safetensors"):
        save_file(rounded(load_file(file)), args.out / file.name)


if __name__ == "__main__":
    main()
