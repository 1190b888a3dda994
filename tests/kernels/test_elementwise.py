"""Norms, products and copies; and that transformers computes the same to the bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from chairlift.kernels import onednn, ops
from chairlift.kernels.onednn import pack_weight

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def random_tensor(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_equals_transformers_to_the_bit(dtype: torch.dtype) -> None:
    norm = LlamaRMSNorm(64, eps=1e-5).to(dtype)
    norm.weight.data = 1 + 0.1 * random_tensor(64, dtype=dtype, seed=1)
    x = 3 * random_tensor(9, 64, dtype=dtype)
    assert torch.equal(ops.rms_norm(x, norm.weight, 1e-5), norm(x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary_equals_transformers_to_the_bit(dtype: torch.dtype) -> None:
    q, k = random_tensor(9, 4, 16, dtype=dtype), random_tensor(9, 2, 16, dtype=dtype, seed=1)
    angles = random_tensor(9, 8, seed=2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    whole = (torch.cat((x, x), -1)[None] for x in (cos, sin))
    theirs = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], *whole)
    for x, expected in zip((q, k), theirs, strict=True):
        assert torch.equal(ops.apply_rotary(x, cos[:, None], sin[:, None]), expected[0].transpose(0, 1))


def test_silu_and_mul_takes_the_gate_first() -> None:
    gate, up = random_tensor(5, 7), random_tensor(5, 7, seed=1)
    expected = gate / (1 + torch.exp(-gate)) * up
    torch.testing.assert_close(ops.silu_and_mul(torch.cat((gate, up), -1)), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3, 64])
@pytest.mark.parametrize("with_bias", [False, True])
def test_packed_linear_equals_the_plain_one(dtype: torch.dtype, rows: int, with_bias: bool) -> None:
    weight = random_tensor(48, 80, dtype=dtype)
    bias = random_tensor(48, dtype=dtype, seed=1) if with_bias else None
    x = random_tensor(rows, 80, dtype=dtype, seed=2)
    packed = ops.pack_weight(weight)
    if packed is None:
        wide = "AVX512" in torch.backends.cpu.get_cpu_capability()
        assert dtype == torch.float16 or (dtype == torch.bfloat16 and not wide), "oneDNN packs this on every x86 CPU"
        return
    ours, expected = ops.packed_linear(x, packed, bias), ops.linear(x.float(), weight.float(), None)
    expected = expected if bias is None else expected + bias.float()
    assert ours.dtype == dtype
    torch.testing.assert_close(ours.float(), expected, rtol=2**-7 if dtype != torch.float32 else 1e-5, atol=1e-3)


def test_write_kv_touches_its_slots_only() -> None:
    keys, values = torch.zeros(5, 4, 2, 3), torch.zeros(5, 4, 2, 3)
    key, value = random_tensor(3, 2, 3), random_tensor(3, 2, 3, seed=1)
    ops.write_kv(keys, values, torch.tensor([19, 0, 6]), key, value)
    for cache, new in ((keys, key), (values, value)):
        assert torch.equal(cache.view(20, 2, 3)[[19, 0, 6]], new)
        assert int((cache != 0).any(-1).any(-1).sum()) == 3


def test_copy_blocks_reads_all_sources_first() -> None:
    cache = torch.arange(24.0).reshape(6, 2, 2)
    before = cache.clone()
    # A chain: block 1 is both overwritten and a source.
    ops.copy_blocks(cache, torch.tensor([0, 1]), torch.tensor([1, 4]))
    assert torch.equal(cache[[1, 4]], before[[0, 1]])
    assert torch.equal(cache[[0, 2, 3, 5]], before[[0, 2, 3, 5]])


@pytest.mark.parametrize("shape", [(5, 32), (2, 3, 32)])
def test_a_product_that_onednn_once_failed_to_prepare_is_computed_with_more_rows(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, x = torch.randn(24, 32), torch.randn(*shape)
    packed, multiply = pack_weight(weight), onednn._multiply
    tried: list[int] = []
    if packed is None:
        pytest.skip("this torch has no oneDNN")

    def fails_below(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
        tried.append(len(x.reshape(-1, 32)))
        if tried[-1] < fewest:
            raise RuntimeError("could not create a primitive")
        return multiply(x, packed, bias)

    monkeypatch.setattr(onednn, "_multiply", fails_below)
    rows = x.numel() // 32
    fewest = rows + 3
    torch.testing.assert_close(onednn.packed_linear(x, packed, None), x @ weight.T)
    assert tried == [rows, rows + 1, rows + 3]
    fewest = 1000
    with pytest.raises(RuntimeError, match="could not create"):
        onednn.packed_linear(x, packed, None)
