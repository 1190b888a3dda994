"""K and V in 8 bits in Triton: the CPU's bytes, and attention on the numbers that they stand for."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from chairlift.errors import InvariantError
from chairlift.kernels import ops, reference
from chairlift.kernels.triton import kv8
from chairlift.kernels.triton import paged_attention as kernels
from chairlift.kernels.triton.launch import AttentionLaunch
from chairlift.kernels.triton.paged_attention import SharedTiles, paged_attention
from chairlift.kernels.triton.rope_cache import rope_and_cache
from chairlift.kernels.triton.shared_prefixes import find_shared_tiles
from tests.kernels.cpu.one_op import Codes
from tests.kernels.triton.probes import TOLERANCE, normal, seeds
from tests.sweep import sweep

POISON = 0
"""The number of a block that nobody owns: all its scales are NaN."""


def empty(num_blocks: int, block_size: int, kv_heads: int, head_dim: int, device: torch.device) -> list[Tensor]:
    """Codes of K and V, and their scales, which are NaN."""
    shape = (num_blocks, block_size, kv_heads)
    codes = [torch.full((*shape, head_dim), 77, dtype=torch.uint8, device=device) for _ in "kv"]
    return [*codes, *(torch.full((*shape, 2), float("nan"), device=device) for _ in "kv")]


def write(caches: list[Tensor], qkv: Tensor, slots: Tensor, num_heads: int, **how: Any) -> Tensor:
    return rope_and_cache(
        qkv, how.pop("rotary", None), caches[0], caches[1], slots, num_heads=num_heads, scales=(caches[2], caches[3]),
        dtype=how.pop("dtype", qkv.dtype), **how,
    )  # fmt: skip


def extremes(qkv: Tensor, head_dim: int) -> Tensor:
    """Heads whose numbers are equal, zero, large with an outlier, not finite, or too far apart for float32."""
    heads = qkv.view(len(qkv), -1, head_dim)
    heads[0, -1] = heads[0, -1, :1]
    heads[1, -2] = 0
    heads[2, -1, 0] *= 100
    heads[3, -2, 1] = float("nan")
    heads[4, -1, 0] = float("inf")
    if qkv.dtype == torch.float32:
        heads[5, -1, :2] = torch.tensor([3e38, -3e38])
    return qkv


@pytest.mark.parametrize("count", seeds(4))
def test_the_bytes_are_those_of_the_cpu(request: pytest.FixtureRequest, count: int, device: torch.device) -> None:
    """The reference is that of the CPU's tests, which compare it with the CPU's bytes."""

    def check(seed: int) -> None:
        draw = random.Random(seed)
        dtype, head_dim, block_size = draw.choice(list(TOLERANCE)), draw.choice([16, 24, 64]), draw.choice([4, 5])
        heads, kv_heads = draw.choice([(1, 1), (4, 2), (7, 1), (9, 3)])
        qkv = normal(7, (heads + 2 * kv_heads) * head_dim, dtype=dtype, seed=seed, device=torch.device("cpu"))
        qkv = extremes(qkv, head_dim).to(device)
        angles = normal(7, 1, head_dim // 2, dtype=torch.float32, seed=seed + 1, device=device)
        rotary = (angles.cos().to(dtype), angles.sin().to(dtype)) if draw.random() < 0.5 else None
        slots = torch.tensor([*draw.sample(range(4 * block_size), 6), -1], device=device)
        caches = empty(4, block_size, kv_heads, head_dim, device)
        q = write(caches, qkv, slots, heads, rotary=rotary)
        expected_q, *kv = ops.rotary_heads(qkv, rotary, heads, kv_heads, head_dim, None, None, 0.0)
        torch.testing.assert_close(q, expected_q, rtol=0, atol=0, equal_nan=True)
        unwritten = torch.ones(4 * block_size, dtype=torch.bool)
        unwritten[slots[:6].cpu()] = False
        for x, codes, scales in zip(kv, caches[:2], caches[2:], strict=True):
            known = Codes.of(x[:6].cpu())
            ours, found = (each.cpu().flatten(0, 1) for each in (codes, scales))
            assert torch.equal(ours[slots[:6].cpu()], known.codes.where(known.scale.isfinite()[..., None], 0))
            torch.testing.assert_close(found[slots[:6].cpu()][..., 0], known.scale, rtol=0, atol=0, equal_nan=True)
            sound = known.scale.isfinite()
            assert torch.equal(found[slots[:6].cpu()][..., 1][sound], known.minimum[sound])
            assert (ours[unwritten] == 77).all() and found[unwritten].isnan().all()

    sweep(request, count, check)


@dataclasses.dataclass
class Case:
    """One sequence with all keys written, between poisoned blocks and after poisoned slots."""

    length: int
    heads: tuple[int, int]
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    window: int | None = None
    more: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        kv_heads, blocks = self.heads[1], -(-self.length // 8)
        self.table = torch.randperm(blocks + 2, generator=torch.Generator().manual_seed(1)).add(1)[: blocks + 1]
        self.table[-1] = POISON
        self.table = self.table.int()[None].to(self.device)
        self.caches = empty(blocks + 3, 8, kv_heads, self.head_dim, self.device)
        width = (self.heads[0] + 2 * kv_heads) * self.head_dim
        x = normal(self.length, width, dtype=self.dtype, seed=self.length, device=torch.device("cpu"))
        parts = x.view(self.length, -1, self.head_dim).split([self.heads[0], kv_heads, kv_heads], dim=1)
        self.q = parts[0].contiguous().to(self.device)
        at = torch.arange(self.length, device=self.device)
        slots = self.table[0].long()[at // 8] * 8 + at % 8
        for part, codes, scales in zip(parts[1:], self.caches[:2], self.caches[2:], strict=True):
            known = Codes.of(part)
            codes.view(-1, *codes.shape[2:])[slots] = known.codes.to(self.device)
            both = torch.stack((known.scale, known.minimum), dim=-1)
            scales.view(-1, *scales.shape[2:])[slots] = both.to(self.device)

    def run(self, launch: AttentionLaunch, start: int, end: int) -> Tensor:
        """Attention of the queries ``start`` to ``end - 1``."""
        lengths, offsets = (torch.tensor(x, dtype=torch.int32, device=self.device) for x in ([end], [0, end - start]))
        return paged_attention(
            self.q[start:end], self.caches[0], self.caches[1], lengths, self.table, scale=0.3, window=self.window,
            launch=launch, cu_seqlens=offsets, scales=(self.caches[2], self.caches[3]), **self.more,
        )  # fmt: skip

    def truth(self, start: int, end: int) -> Tensor:
        """Attention on the numbers that the codes stand for, in float32."""
        numbers = [
            codes * scales[..., :1] + scales[..., 1:]
            for codes, scales in zip(self.caches[:2], self.caches[2:], strict=True)
        ]
        return reference.paged_attention(
            self.q[start:end].float(), *numbers, [0, end - start], [end], self.table.long(), scale=0.3,
            window=self.window, **self.more,
        )  # fmt: skip


def any_case(seed: int, device: torch.device) -> tuple[Case, AttentionLaunch]:
    draw = random.Random(seed)
    heads = draw.choice([(2, 2), (6, 2), (7, 1)])
    more: dict[str, Any] = {}
    if draw.random() < 0.5:
        more = {"cap": 3.0, "sinks": normal(heads[0], dtype=torch.float32, seed=seed, device=device)}
    case = Case(
        draw.choice([1, 9, 33, 50]), heads, draw.choice([16, 24, 64]), draw.choice(list(TOLERANCE)), device,
        draw.choice([None, 7, 20]), more,
    )  # fmt: skip
    return case, AttentionLaunch(16, draw.choice([16, 32]), draw.choice([1, 1, 3]), num_warps=4, num_stages=2)


@pytest.mark.parametrize("count", seeds(6))
def test_attention_is_that_on_the_numbers_of_the_codes(
    request: pytest.FixtureRequest, count: int, device: torch.device
) -> None:
    def check(seed: int) -> None:
        case, launch = any_case(seed, device)
        start = random.Random(seed).choice([0, case.length - 1])
        ours, truth = case.run(launch, start, case.length), case.truth(start, case.length)
        torch.testing.assert_close(ours.float(), truth, rtol=0, atol=1.5 * TOLERANCE[case.dtype])

    sweep(request, count, check)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_chunks_do_not_show(dtype: torch.dtype, device: torch.device) -> None:
    case, launch = Case(50, (6, 2), 32, dtype, device, window=20), AttentionLaunch(16, 16, 1, 4, 2)
    whole = case.run(launch, 0, 50)
    for start, end in ((0, 20), (20, 31), (31, 32), (32, 50)):
        assert torch.equal(case.run(launch, start, end), whole[start:end])


def test_shared_tiles_have_the_bits_of_rows_alone(device: torch.device) -> None:
    case, launch = Case(64, (4, 2), 16, torch.bfloat16, device), AttentionLaunch(16, 16, 2, 4, 2)
    table = case.table[:, :8].expand(3, -1).contiguous()
    lengths = np.array([60, 61, 62], dtype=np.int32)
    how = {"block_size": 8, "window": None, "launch": launch, "group": 2}
    found = find_shared_tiles(table.cpu().numpy(), lengths, 3, **how)
    assert found is not None
    tiles = SharedTiles(*(torch.from_numpy(each).to(device) for each in (found.members, found.ends)))
    given = (case.q[60:63], case.caches[0], case.caches[1], torch.from_numpy(lengths).to(device), table)
    more: dict[str, Any] = {"scale": 0.3, "window": None, "launch": launch, "scales": (case.caches[2], case.caches[3])}
    assert torch.equal(paged_attention(*given, **more, shared=tiles), paged_attention(*given, **more))


def test_scales_that_do_not_fit_are_refused(device: torch.device) -> None:
    case, launch = Case(9, (2, 1), 16, torch.float32, device), AttentionLaunch(16, 16, 1, 4, 2)
    with pytest.raises(InvariantError, match=r"a cache of torch\.uint8 has no scales"):
        paged_attention(
            case.q[:1], case.caches[0], case.caches[1], case.table[0, :1], case.table, scale=1.0, window=None,
            launch=launch,
        )  # fmt: skip
    case.caches[2] = case.caches[2][..., :1]
    with pytest.raises(InvariantError, match="do not go with codes"):
        case.run(launch, 0, 1)


def the_minimum_is_left_out(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(kernels, "load_scales", lambda *given: (kv8.load_scales(*given)[0], kv8.load_scales(*given)[0]))


def codes_are_not_centred(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(kernels, "centred", lambda codes, dtype: kv8.centred(codes, dtype) + 128.0)


@pytest.mark.planted("test_attention_is_that_on_the_numbers_of_the_codes")
@pytest.mark.skipif(torch.cuda.is_available(), reason="only interpreted kernels can be replaced")
@pytest.mark.parametrize("fault", [the_minimum_is_left_out, codes_are_not_centred])
def test_mistakes_of_attention_are_noticed(
    fault: Callable[[pytest.MonkeyPatch], None], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, launch = Case(20, (4, 2), 16, torch.float32, device), AttentionLaunch(16, 16, 1, 4, 2)
    torch.testing.assert_close(case.run(launch, 0, 20), case.truth(0, 20), rtol=0, atol=1e-4)
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(case.run(launch, 0, 20), case.truth(0, 20), rtol=0, atol=1e-4)
