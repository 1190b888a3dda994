"""Slices of a tensor in a GGUF file: the file's own integers where our kinds hold them, otherwise its exact numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from chairlift.kernels.grouped import GroupedRows, GroupKind
from chairlift.models.formats.gguf.blocks import BLOCK_TYPES
from chairlift.models.formats.gguf.reader import GGUFModel
from chairlift.models.formats.gguf_tensors import GGUFTensor

ROWS, COLUMNS = 24, 512
EXACT = {
    "Q4_0": GroupKind(4, 32),
    "Q4_1": GroupKind(4, 32, True),
    "Q5_0": GroupKind(8, 32),
    "Q5_1": GroupKind(8, 32, True),
    "Q8_0": GroupKind(8, 32),
    "Q4_K": GroupKind(4, 32, True),
    "Q5_K": GroupKind(8, 32, True),
    "IQ4_NL": GroupKind(8, 32),
    "MXFP4": GroupKind(8, 32),
    "IQ4_XS": GroupKind(8, 32),
    "TQ1_0": GroupKind(4, 32),
    "TQ2_0": GroupKind(4, 32),
}
ROUNDED = ("Q2_K", "Q3_K", "Q6_K", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ1_M")
HALVES = {
    "TQ1_0": (52,),
    "TQ2_0": (64,),
    "IQ1_M": (),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}
"""Bytes of a block at which half numbers begin; in other types with minimums at 0 and 2, else at 0."""


def raw_blocks(
    name: str, seed: int = 0, rows: int = ROWS, columns: int = COLUMNS
) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Random rows [rows, bytes] of ``columns`` numbers, with scales as models have them."""
    kind = next(kind for kind in BLOCK_TYPES.values() if kind.name == name)
    rng = np.random.default_rng(seed)
    if kind.weights == 1:
        numbers = rng.normal(scale=0.1, size=(rows, columns)).astype(np.float32)
        return gguf.quants.quantize(numbers, gguf.GGMLQuantizationType[name]).view(np.uint8)
    blocks = rng.integers(0, 256, (rows * columns // kind.weights, kind.bytes), dtype=np.uint8)
    for at in HALVES.get(name, (0, 2) if kind.minimum else (0,)):
        scales = rng.normal(scale=0.01, size=len(blocks)).astype(np.float16)
        blocks[:, at : at + 2] = scales[:, None].view(np.uint8)
    if name == "IQ1_M":  # four bits of the scale in each of four numbers
        words = blocks[:, 48:56].copy().view(np.uint16)
        bits = np.float16(0.01).view(np.uint16)
        words = (words & 0x0FFF) | (((bits >> np.arange(0, 16, 4, dtype=np.uint16)) & 15) << 12).astype(np.uint16)
        blocks[:, 48:56] = words.view(np.uint8)
    if name == "MXFP4":
        blocks[:, 0] = rng.integers(110, 125, len(blocks))
    return blocks.reshape(rows, -1)


def stored(path: Path, name: str, order: Any = None) -> tuple[GGUFTensor, torch.Tensor]:
    """A tensor in a file, and what the public package says it is worth."""
    kind = gguf.GGMLQuantizationType[name]
    raw = raw_blocks(name)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("blk.0.attn_q.weight", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    worth = torch.from_numpy(gguf.quants.dequantize(raw, kind))
    return GGUFTensor(GGUFModel(path), "blk.0.attn_q.weight", order), worth


@pytest.mark.parametrize("permuted", [False, True])
@pytest.mark.parametrize("name", EXACT)
def test_integers_are_the_files_own(tmp_path: Path, name: str, permuted: bool) -> None:
    order = np.random.default_rng(1).permutation(ROWS) if permuted else None
    tensor, worth = stored(tmp_path / "model.gguf", name, order)
    worth = worth if order is None else worth[torch.from_numpy(order)]
    assert tensor.kind == EXACT[name]
    assert tensor.get_shape() == [ROWS, COLUMNS] and len(tensor) == ROWS
    for first, last in ((0, ROWS), (3, 4), (7, 20), (5, 5)):
        rows = tensor[first:last]
        assert isinstance(rows, GroupedRows) and rows.kind == tensor.kind
        assert rows.codes.dtype == torch.uint8 and rows.codes.shape == (last - first, COLUMNS)
        assert rows.scales.dtype == torch.float32 and rows.scales.shape == (last - first, COLUMNS // 32)
        assert torch.equal(rows.dequantize(), worth[first:last])
    assert torch.equal(tensor.get_tensor("any"), worth)


@pytest.mark.parametrize("permuted", [False, True])
@pytest.mark.parametrize("name", ROUNDED)
def test_groups_of_16_are_read_exactly_and_rounded_only_by_layers_that_store_integers(
    tmp_path: Path, name: str, permuted: bool
) -> None:
    order = np.random.default_rng(1).permutation(ROWS) if permuted else None
    tensor, worth = stored(tmp_path / "model.gguf", name, order)
    worth = worth if order is None else worth[torch.from_numpy(order)]
    rows = tensor[:]
    assert isinstance(rows, torch.Tensor) and torch.equal(rows, worth) and torch.equal(tensor[7:20], worth[7:20])
    assert tensor.kind == GroupKind(8, 32)
    rounded = GroupedRows.quantize(rows, tensor.kind).dequantize()
    largest = worth.view(ROWS, -1, 32).abs().amax(-1).repeat_interleave(32, dim=1)
    assert ((rounded - worth).abs() <= largest / 254 * 1.13 + 1e-9).all()  # scales are rounded to float16


def test_floats_and_vectors_are_no_integers(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    values = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)
    writer.add_tensor("blk.0.attn_q.weight", values)
    kind = gguf.GGMLQuantizationType.Q8_0
    writer.add_tensor("blk.0.attn_q.bias", gguf.quants.quantize(values[0], kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model = GGUFModel(tmp_path / "model.gguf")
    matrix, bias = (GGUFTensor(model, f"blk.0.attn_q.{each}", None) for each in ("weight", "bias"))
    assert matrix.kind is None and torch.equal(matrix[:], torch.from_numpy(values))
    assert bias.kind is None and bias[3:9].shape == (6,)
