"""Fused attention equals its definition, for every shape the engine and the trainer can ask for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward as gemma2
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as gpt_oss

from chairlift.kernels import ops, reference, sdpa

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def random_tensor(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def paged_case(
    rows: list[tuple[int, int]], block_size: int, kv_heads: int, head_dim: int, window: int | None, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Caches whose unused slots are NaN, and tables whose unused entries would be an index error."""
    max_blocks = max(-(-seq_len // block_size) for seq_len, _ in rows) + 1
    num_blocks = len(rows) * max_blocks + 3
    keys = torch.full((num_blocks, block_size, kv_heads, head_dim), float("nan"), dtype=dtype)
    values = keys.clone()
    table = torch.full((len(rows), max_blocks), 10**9)
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(1)).tolist()
    for i, (seq_len, new) in enumerate(rows):
        first = 0 if window is None else max(0, seq_len - new - window + 1)
        for block in range(first // block_size, -(-seq_len // block_size)):
            table[i, block] = order.pop()
        where = torch.arange(first, seq_len)
        slots = table[i][where // block_size] * block_size + where % block_size
        fresh = (random_tensor(len(where), kv_heads, head_dim, dtype=dtype, seed=s + 2 * i) for s in (0, 1))
        ops.write_kv(keys, values, slots, *fresh)
    return keys, values, table


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    rows=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=5),
    block_size=st.sampled_from([1, 3, 8, 16]),
    heads=st.sampled_from([(4, 2), (4, 4), (6, 1), (14, 2)]),
    window=st.sampled_from([None, 1, 2, 5, 16, 100]),
    tile=st.sampled_from([1, 4, 256]),
    dtype=st.sampled_from(list(TOLERANCE)),
    cap=st.sampled_from([None, None, 0.5, 4.0]),
    with_sinks=st.booleans(),
)
def test_paged_attention_equals_its_definition(
    rows: list[tuple[int, int]],
    block_size: int,
    heads: tuple[int, int],
    window: int | None,
    tile: int,
    dtype: torch.dtype,
    cap: float | None,
    with_sinks: bool,
) -> None:
    rows = [(max(pair), min(pair)) for pair in rows]
    keys, values, table = paged_case(rows, block_size, heads[1], 16, window, dtype)
    cu_seqlens = [0]
    for _, new in rows:
        cu_seqlens.append(cu_seqlens[-1] + new)
    seq_lens = [seq_len for seq_len, _ in rows]
    q = random_tensor(cu_seqlens[-1], heads[0], 16, dtype=dtype, seed=99)
    plan = ops.plan_rows(cu_seqlens, seq_lens, table, block_size, window)
    how: dict[str, Any] = {"cap": cap, "sinks": random_tensor(heads[0], seed=98) if with_sinks else None}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sdpa, "QUERY_TILE", tile)
        ours = ops.paged_attention(q, keys, values, plan, scale=0.3, window=window, **how)
    truth = reference.paged_attention(q, keys, values, cu_seqlens, seq_lens, table, scale=0.3, window=window, **how)
    torch.testing.assert_close(ours, truth, rtol=0, atol=TOLERANCE[dtype])


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=5).filter(any),
    heads=st.sampled_from([(4, 2), (4, 4), (6, 1)]),
    window=st.sampled_from([None, 1, 4, 100]),
    tile=st.sampled_from([3, 256]),
    cap=st.sampled_from([None, 2.0]),
    with_sinks=st.booleans(),
)
def test_packed_attention_and_its_gradients_equal_the_definition(
    lengths: list[int], heads: tuple[int, int], window: int | None, tile: int, cap: float | None, with_sinks: bool
) -> None:
    cu_seqlens = [0]
    for length in lengths:
        cu_seqlens.append(cu_seqlens[-1] + length)
    shapes = [(cu_seqlens[-1], heads[0], 8)] + 2 * [(cu_seqlens[-1], heads[1], 8)]
    weight = random_tensor(*shapes[0], seed=9)
    results = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sdpa, "QUERY_TILE", tile)
        for attend in (ops.packed_attention, reference.packed_attention):
            inputs = [random_tensor(*shape, seed=i).requires_grad_(True) for i, shape in enumerate(shapes)]
            q, k, v = inputs
            sinks = random_tensor(heads[0], seed=8).requires_grad_(True) if with_sinks else None
            inputs += [] if sinks is None else [sinks]
            out = attend(q, k, v, cu_seqlens, scale=0.4, window=window, cap=cap, sinks=sinks)
            results.append([out, *torch.autograd.grad((out * weight).sum(), inputs)])
    for ours, truth in zip(*results, strict=True):
        torch.testing.assert_close(ours, truth, rtol=0, atol=2e-5)


def test_sinks_are_those_of_gpt_oss_and_caps_those_of_gemma2() -> None:
    """As transformers computes them, of one sequence."""
    q, k, v, sinks = (
        random_tensor(*shape, seed=i) for i, shape in enumerate([(9, 4, 16), (9, 2, 16), (9, 2, 16), (4,)])
    )
    mask = torch.full((9, 9), float("-inf")).triu(1)[None, None]
    theirs = (x.transpose(0, 1)[None] for x in (q, k, v))
    module = torch.nn.Module()
    module.num_key_value_groups, module.sinks, module.training = 2, sinks, False
    query, key, value = theirs
    (sunk, _), (capped, _) = (
        gpt_oss(module, query, key, value, mask, 0.7),
        gemma2(module, query, key, value, mask, scaling=0.7, softcap=1.5),
    )
    how: dict[str, Any] = {"scale": 0.7, "window": None}
    for attend in (ops.packed_attention, reference.packed_attention):
        torch.testing.assert_close(attend(q, k, v, [0, 9], **how, sinks=sinks), sunk[0], rtol=0, atol=1e-5)
        torch.testing.assert_close(attend(q, k, v, [0, 9], **how, cap=1.5), capped[0], rtol=0, atol=1e-5)


def test_rows_without_queries_take_no_part() -> None:
    keys, values, table = paged_case([(9, 1), (5, 1), (7, 2)], 4, 2, 16, None, torch.float32)
    q = random_tensor(3, 4, 16)
    plan = ops.plan_rows([0, 1, 1, 3], [9, 5, 7], table, 4, None)
    assert [(row.start, row.num_queries, row.num_keys) for row in plan] == [(0, 1, 9), (1, 2, 7)]
    ours = ops.paged_attention(q, keys, values, plan, scale=0.3, window=None)
    others = reference.paged_attention(q, keys, values, [0, 1, 1, 3], [9, 5, 7], table, scale=0.3, window=None)
    torch.testing.assert_close(ours, others, rtol=0, atol=1e-5)


@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("window", [None, 3])
def test_a_broken_token_reaches_only_those_that_see_it(window: int | None, bad: float, cap: float | None) -> None:
    keys, values, table = paged_case([(9, 7)], 4, 2, 16, window, torch.float32)
    q = random_tensor(7, 4, 16)
    plan = ops.plan_rows([0, 7], [9], table, 4, window)
    before = ops.paged_attention(q, keys, values, plan, scale=0.3, window=window, cap=cap)
    keys[table[0, 1], 1], values[table[0, 1], 1] = bad, bad  # token 5
    after = ops.paged_attention(q, keys, values, plan, scale=0.3, window=window, cap=cap)
    sees = [position >= 5 and (window is None or position - window < 5) for position in range(2, 9)]
    assert after.isfinite().flatten(1).all(1).tolist() == [not seen for seen in sees]
    well = ~torch.tensor(sees)
    torch.testing.assert_close(after[well], before[well], rtol=0, atol=1e-6)


def test_windowed_decode_gathers_only_blocks_inside_the_window() -> None:
    table = torch.arange(64)[None]
    (row,) = ops.plan_rows([0, 1], [1000], table, 16, 40)
    # Keys 960 to 999: blocks 60, 61 and 62.
    assert row.block_ids.tolist() == [60, 61, 62]
    assert (row.num_keys, row.skip) == (40, 0)
    (row,) = ops.plan_rows([0, 1], [1003], table, 16, 40)
    assert (row.block_ids.tolist(), row.num_keys, row.skip) == ([60, 61, 62], 40, 3)


def test_no_mask_is_larger_than_a_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[int, ...]] = []
    whole = sdpa._tile_mask

    def recorded(rows: int, keys: int, *args: object) -> torch.Tensor:
        shapes.append((rows, keys))
        return whole(rows, keys, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(sdpa, "_tile_mask", recorded)
    keys, values, table = paged_case([(1500, 1400), (600, 600), (9, 1)], 16, 1, 16, None, torch.float32)
    plan = ops.plan_rows([0, 1400, 2000, 2001], [1500, 600, 9], table, 16, None)
    ops.paged_attention(random_tensor(2001, 2, 16), keys, values, plan, scale=0.3, window=None)
    # A prompt from its first token on and a decode need none.
    assert len(shapes) == 6
    assert max(rows for rows, _ in shapes) == 256
