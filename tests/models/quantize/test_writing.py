from __future__ import annotations

import json
from pathlib import Path

import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import QuantizationConfig
from safetensors import safe_open
from safetensors.torch import load_file

from chairlift.kernels.grouped import GroupKind
from chairlift.models.formats.quantize.writing import (
    Planned,
    ShardWriter,
    packed_by_output,
    packed_words,
    quantization_config,
)

TENSORS = {
    "a.weight": torch.randn(6, 4).bfloat16(),
    "b.packed": torch.randint(-(2**31), 2**31 - 1, (5, 3), dtype=torch.int32),
    "b.shape": torch.tensor([5, 24]),
    "c.bias": torch.randn(7).half(),
    "d.empty": torch.zeros(0, 4).half(),
}


def write(folder: Path, shard_bytes: int = 10**9) -> ShardWriter:
    """In pieces, and from the last to the first."""
    writer = ShardWriter(folder, [Planned(n, t.dtype, tuple(t.shape)) for n, t in TENSORS.items()], shard_bytes)
    with writer:
        for name, tensor in reversed(TENSORS.items()):
            for first in range(0, len(tensor), 2):
                writer.write(name, first, tensor[first : first + 2])
    return writer


def test_small_weights_are_written_to_one_file(tmp_path: Path) -> None:
    writer = write(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == writer.names == ["model.safetensors"]
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == TENSORS.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())
    assert writer.nbytes == sum(tensor.nbytes for tensor in TENSORS.values())
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_several_files_have_an_index(tmp_path: Path) -> None:
    writer = write(tmp_path, shard_bytes=70)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(writer.names)
    assert index["metadata"]["total_size"] == writer.nbytes
    assert len(writer.names) == 3
    for name, tensor in TENSORS.items():
        found = load_file(tmp_path / index["weight_map"][name])
        assert torch.equal(found[name], tensor)
        assert sum(each.nbytes for each in found.values()) <= 70


def test_words_are_as_the_format_has_them() -> None:
    for bits in (4, 5, 6, 8):
        codes = torch.randint(0, 1 << bits, (3, 64), dtype=torch.uint8)
        assert torch.equal(
            packed_words(codes, bits), pack_to_int32((codes.int() - (1 << (bits - 1))).to(torch.int8), bits)
        )


def test_zero_points_of_several_rows_share_a_word() -> None:
    zeros = torch.randint(0, 16, (21, 3), dtype=torch.uint8)
    words = packed_by_output(zeros, 4)
    assert words.shape == (3, 3)
    for row in range(21):
        assert torch.equal(words[row // 8] >> 4 * (row % 8) & 15, zeros[row].int())
    for bits in (5, 6):
        signed = (zeros.int() - (1 << (bits - 1))).to(torch.int8)
        assert torch.equal(packed_by_output(zeros, bits), pack_to_int32(signed, bits, packed_dim=0))


def test_the_public_package_reads_the_settings() -> None:
    config = QuantizationConfig.model_validate(quantization_config({GroupKind(4, 128): ["a", "b"]}, ["gate"]))
    [scheme] = config.config_groups.values()
    assert scheme.weights.num_bits == 4
    assert scheme.weights.group_size == 128
    assert scheme.weights.strategy == "group"
    assert scheme.weights.symmetric
    assert scheme.targets == ["Linear"]
    assert config.ignore == ["gate", "lm_head"]


def test_the_settings_name_the_layers_of_rarer_kinds() -> None:
    kinds = {GroupKind(8, 32): ["x.down_proj", "lm_head"], GroupKind(4, 32, minimum=True): ["a", "b", "c"]}
    config = QuantizationConfig.model_validate(quantization_config(kinds, []))
    first, second = config.config_groups.values()
    assert (first.weights.num_bits, first.weights.symmetric, first.targets) == (4, False, ["Linear"])
    assert (second.weights.num_bits, second.weights.symmetric) == (8, True)
    assert second.targets == ["x.down_proj", "lm_head"]
    assert config.ignore == []
