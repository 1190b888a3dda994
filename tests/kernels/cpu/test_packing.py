"""Packed weights against their definition in numpy."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from chairlift.kernels.cpu import packing
from chairlift.kernels.cpu.library import Memory
from chairlift.kernels.cpu.packing import NATIVE_DTYPES, PackedWeight, copy_rows, packed_bytes
from tests.native import needs_kernels

pytestmark = needs_kernels

SHAPES = [(1, 1), (32, 32), (33, 31), (100, 65), (7, 300), (64, 64), (97, 257), (2, 33)]
DTYPES = list(NATIVE_DTYPES)


def random_weight(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows + columns)).to(dtype)


def bits(tensor: torch.Tensor) -> np.ndarray:
    """The elements as integers, so that NaN and -0 count too."""
    return tensor.contiguous().view(torch.int16 if tensor.dtype == torch.bfloat16 else torch.int32).numpy()


def pad(count: int) -> int:
    return (count + 31) // 32 * 32


def packed_by_definition(weight: torch.Tensor, interleaved: bool) -> np.ndarray:
    """[panels, in / P, 32, P] as integers, element by element."""
    rows, k = weight.shape
    pair = 4 // weight.element_size()
    half = rows // 2
    padded = 2 * pad(half) if interleaved else pad(rows)
    source = bits(weight)
    out = np.zeros((padded // 32, pad(k) // pair, 32, pair), source.dtype)
    for row in range(rows):
        panel, column = divmod(row % half, 32) if interleaved else divmod(row, 32)
        if interleaved:
            panel = 2 * panel + row // half
        for i in range(k):
            out[panel, i // pair, column, i % pair] = source[row, i]
    return out


def stored(packed: PackedWeight) -> np.ndarray:
    """All bytes in memory."""
    kind = {torch.bfloat16: np.int16, torch.float32: np.int32}[packed.dtype]
    return packed.memory.array(kind, (packed.memory.nbytes // np.dtype(kind).itemsize,))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("interleaved", [False, True])
def test_packing_is_its_definition(shape: tuple[int, int], dtype: torch.dtype, interleaved: bool) -> None:
    rows, k = (2 * shape[0] if interleaved else shape[0]), shape[1]
    weight = random_weight(rows, k, dtype)
    packed = PackedWeight(rows, k, dtype, interleaved=interleaved)
    packed.pack_rows(weight)
    expected = packed_by_definition(weight, interleaved)
    assert np.array_equal(stored(packed), expected.reshape(-1))
    assert torch.equal(packed.unpack(), weight)
    assert (packed.n, packed.k, packed.panels) == (len(expected) * 32 if interleaved else rows, k, len(expected))
    assert packed.memory.nbytes == packed_bytes(rows, k, dtype, interleaved=interleaved) == expected.nbytes


@pytest.mark.parametrize("stored_as", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_other_dtypes_are_rounded_as_torch_rounds(dtype: torch.dtype, stored_as: torch.dtype) -> None:
    weight = random_weight(70, 40).to(stored_as)
    packed = PackedWeight(70, 40, dtype)
    packed.pack_rows(weight)
    assert torch.equal(packed.unpack(), weight.to(dtype))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("cuts", [(), (50,), (33, 34), (1, 49, 51, 99), (64,)])
@pytest.mark.parametrize("slice_bytes", [1, 40 * 4 * 32, 1 << 20])
def test_parts_land_where_they_belong(
    monkeypatch: pytest.MonkeyPatch, cuts: tuple[int, ...], interleaved: bool, slice_bytes: int
) -> None:
    """Parts of any size, in any order, in slices of any size."""
    monkeypatch.setattr(packing, "_SLICE_BYTES", slice_bytes)
    weight = random_weight(100, 40, torch.bfloat16)
    packed = PackedWeight(100, 40, torch.bfloat16, interleaved=interleaved)
    edges = [0, *cuts, 100]
    for first, end in reversed(list(itertools.pairwise(edges))):
        packed.pack_rows(weight[first:end], first)
    assert np.array_equal(stored(packed), packed_by_definition(weight, interleaved).reshape(-1))


def test_a_source_may_have_any_strides() -> None:
    weight = random_weight(80, 100)
    for source in (weight.t(), weight[:, 3:50], weight[::2], weight.expand(80, 100)):
        packed = PackedWeight(*source.shape, torch.float32)
        packed.pack_rows(source)
        assert torch.equal(packed.unpack(), source)


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_bias_follows_its_outputs(interleaved: bool) -> None:
    """Each packed column has the bias of the output it computes; padding has none."""
    rows = 70
    weight, bias = random_weight(rows, 1), random_weight(rows, 3, torch.bfloat16)[:, 0]
    packed = PackedWeight(rows, 1, torch.float32, interleaved=interleaved)
    assert packed.bias is None
    packed.pack_rows(bias[:, None])
    packed.set_bias(bias)
    assert packed.bias is not None and packed.bias.dtype == torch.float32
    first_input = packed.memory.array(np.float32, (packed.panels, 32, 32))[:, 0]
    assert np.array_equal(packed.bias.numpy(), first_input.reshape(-1))
    assert np.count_nonzero(packed.bias) == np.count_nonzero(bias.float()) == rows
    with pytest.raises(ValueError, match=r"shape \[70, 1\], but there are 70 outputs"):
        packed.set_bias(weight)


def test_shapes_and_dtypes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"no torch.float16; use one of torch.float32, torch.bfloat16"):
        PackedWeight(32, 32, torch.float16)
    with pytest.raises(ValueError, match="come in pairs, got 33"):
        PackedWeight(33, 32, torch.float32, interleaved=True)
    with pytest.raises(ValueError, match="does not lie in 100 bytes"):
        PackedWeight(32, 32, torch.float32, memory=Memory(100))
    packed = PackedWeight(40, 8, torch.float32)
    for shape, first in (((41, 8), 0), ((1, 8), 40), ((2, 8), -1), ((4, 7), 0), ((8,), 0)):
        with pytest.raises(ValueError, match=r"do not fit into a weight of shape \[40, 8\]"):
            packed.pack_rows(torch.zeros(shape), first)
    assert not stored(packed).any()


def resident_file_pages(path: Path) -> int:
    """Bytes of this process's mapping of a file that lie in memory."""
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if "-" in first and len(rest) > 3:
            inside = rest[-1] == str(path)
        elif inside and first == "Rss:":
            found += int(rest[0]) * 1024
    return found


@pytest.mark.parametrize("copied", [False, True])
def test_pages_of_a_mapped_file_are_let_go(tmp_path: Path, copied: bool) -> None:
    path = tmp_path / "weights.safetensors"
    weight = random_weight(40_000, 256, torch.bfloat16)
    save_file({"weight": weight}, path)
    with safe_open(path, framework="pt") as file:
        source = file.get_tensor("weight")
        if copied:
            target = torch.empty_like(source)
            copy_rows(target, source)
        else:
            packed = PackedWeight(*source.shape, torch.bfloat16)
            packed.pack_rows(source, mapped=True)
        assert resident_file_pages(path) < 1 << 20
        assert torch.equal(target if copied else packed.unpack(), weight)
        assert torch.equal(source, weight), "pages come back from the file"
    # Memory that is no file would come back as zeros.
    before = weight.clone()
    PackedWeight(*weight.shape, torch.bfloat16).pack_rows(weight)
    assert torch.equal(weight, before)
