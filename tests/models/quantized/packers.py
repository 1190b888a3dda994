"""Packers for GPTQ, AWQ and fp8 layers, written from the descriptions of the formats, mostly one element at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tests.models.quantized.make import Pack, packed_words

__all__ = ["awq", "block_fp8", "gptq", "static_fp8", "tensor_fp8"]


def _random_codes(weight: Tensor, groups: int, bits: int, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(codes [out, in], float16 scales [out, groups], zero points [out, groups]), all random."""
    generator = torch.Generator().manual_seed(weight.shape[1] + int(weight[0, 0].abs() * 1e6))
    n, k = weight.shape
    codes = torch.randint(0, 1 << bits, (n, k), generator=generator)
    scales = ((torch.rand(n, groups, generator=generator) + 0.5) / (1 << bits)).half()
    zeros = torch.randint(1, 1 << bits, (n, groups), generator=generator)
    return codes, scales, torch.full_like(zeros, 1 << (bits - 1)) if symmetric else zeros


def gptq(
    bits: int = 4, group: int = 32, *, symmetric: bool = True, order: str = "", v2: bool = False
) -> tuple[Any, Pack]:
    """Returns (settings, packer). ``order`` selects the stored g_idx: ``given`` for consecutive groups, ``random`` for
    a shuffled one, empty for none."""
    settings = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "sym": symmetric,
        "desc_act": order == "random",
        **({"checkpoint_format": "gptq_v2"} if v2 else {}),
    }

    def pack(weight: Tensor) -> tuple[Mapping[str, Tensor], Tensor]:
        k = weight.shape[1]
        size = k if group == -1 else group
        groups = -(-k // size)
        codes, scales, zeros = _random_codes(weight, groups, bits, symmetric)
        g_idx = torch.arange(k) // size
        if order == "random":
            g_idx = g_idx[torch.randperm(k, generator=torch.Generator().manual_seed(k))]
        stored_zeros = zeros if v2 else (zeros - 1) % (1 << bits)
        tensors = {
            "qweight": packed_words(codes, bits).t(),
            "qzeros": packed_words(stored_zeros.t().contiguous(), bits),
            "scales": scales.t(),
        }
        if order:
            tensors["g_idx"] = g_idx.int()
        return tensors, (codes - zeros[:, g_idx]).float() * scales[:, g_idx].float()

    return settings, pack


def awq(group: int = 32) -> tuple[Any, Pack]:
    settings = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    places = [0, 4, 1, 5, 2, 6, 3, 7]

    def words(values: Tensor) -> Tensor:
        """Pack [inputs, outputs] into words [inputs, outputs / 8]. Output n is in nibble ``places[n % 8]`` of its
        word."""
        stored = torch.zeros_like(values)
        for n in range(values.shape[1]):
            stored[:, n // 8 * 8 + places[n % 8]] = values[:, n]
        return packed_words(stored, 4)

    def pack(weight: Tensor) -> tuple[Mapping[str, Tensor], Tensor]:
        k = weight.shape[1]
        size = k if group == -1 else group
        codes, scales, zeros = _random_codes(weight, -(-k // size), 4, False)
        index = torch.arange(k) // size
        tensors = {"qweight": words(codes.t()), "qzeros": words(zeros.t()), "scales": scales.t()}
        return tensors, (codes - zeros[:, index]).float() * scales[:, index].float()

    return settings, pack


def block_fp8(block: tuple[int, int] = (128, 128), dtype: torch.dtype = torch.float32) -> tuple[Any, Pack]:
    settings = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": list(block)}

    def pack(weight: Tensor) -> tuple[Mapping[str, Tensor], Tensor]:
        n, k = weight.shape
        scales = (torch.rand(-(-n // block[0]), -(-k // block[1])) / 100 + 0.001).to(dtype)
        stored = (weight * 100).to(torch.float8_e4m3fn)
        worth = torch.empty(n, k)
        for i in range(n):
            for j in range(0, k, block[1]):
                scale = scales[i // block[0], j // block[1]].float()
                worth[i, j : j + block[1]] = stored[i, j : j + block[1]].float() * scale
        return {"weight": stored, "weight_scale_inv": scales}, worth

    return settings, pack


def tensor_fp8(name: str = "weight_scale", shape: tuple[int, ...] = ()) -> tuple[Any, Pack]:
    def pack(weight: Tensor) -> tuple[Mapping[str, Tensor], Tensor]:
        scale = torch.full(shape, 0.0123)
        stored = (weight * 80).to(torch.float8_e4m3fn)
        return {"weight": stored, name: scale}, stored.float() * scale.reshape(-1)[0]

    return {"quant_method": "fp8", "activation_scheme": "dynamic"}, pack


def static_fp8(scale: str, activations: str, **settings: Any) -> tuple[Any, Pack]:
    """FP8 with fixed scales of activations. ``scale`` and ``activations`` are the endings of the scales' names."""
    given, pack = tensor_fp8(scale)

    def with_activations(weight: Tensor) -> tuple[Mapping[str, Tensor], Tensor]:
        tensors, worth = pack(weight)
        return {**tensors, activations: torch.tensor(0.5)}, worth

    return {**given, "activation_scheme": "static", **settings}, with_activations
