# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator"
"""Attention of a ragged batch over paged keys and values: decodes and prefill chunks in one launch.

The kernel has the structure of the unified attention that IBM wrote for vLLM's Triton backend. The query heads that
share a KV head, and several query tokens, form the rows of one tile, so that decodes use the tensor cores too. The
running softmax is FlashAttention-2's (Dao, 2023), in powers of 2. If there are few, long rows, several programs share
the keys, and their partial results are combined (Flash-Decoding; Dao et al., 2023).

**Determinism.** A tile reads keys 0 to ``block_n - 1``, then the next ``block_n``, and so on, and each row of the tile
is reduced separately. Therefore, with one :class:`~chairlift.kernels.triton.launch.AttentionLaunch` the output of a
sequence has the same bits, whatever other sequences are in the launch and whatever its index is. With ``num_splits=1``,
the output also does not depend on how the prompt was divided into chunks. (With more splits it does, because the splits
divide the keys of a tile.) Different launch configurations may give different bits. Decode-only launches and mixed
launches have different configurations.

**Shared prefixes.** Decode rows whose block tables begin alike can share tiles of queries (:class:`SharedTiles`). A
first launch computes the tiles of keys that they have in common, and stores the state of each row: highest score, sum,
values. The usual launch goes on from that state. Each row passes through the same operations in the same order as
without sharing, in a tile of the same height, so its bits are the same.
"""

from __future__ import annotations

import dataclasses
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from chairlift.errors import InvariantError
from chairlift.kernels.triton.dependent import dependent_launch, wait_for_inputs
from chairlift.kernels.triton.kv8 import centred, load_scales
from chairlift.kernels.triton.launch import AttentionLaunch, power_of_2

__all__ = ["SharedTiles", "paged_attention"]


@dataclasses.dataclass(frozen=True, slots=True)
class SharedTiles:
    """Tasks of a decode step that read keys for several rows together. All numbers are data, so one captured launch
    serves any tasks. :func:`~chairlift.kernels.triton.shared_prefixes.find_shared_tiles` makes them."""

    members: Tensor
    """int32 [tasks, block_m // group], contiguous: the rows of each task; -1 after the last row. A row is in one task
    at most. Rows of a task see their first key at the same position and divide their keys at the same positions."""
    ends: Tensor
    """int32 [N]: for a row in a task, the number of tiles of keys, counted from the beginning of the sequence, up to
    which the task's block tables are equal and every row has keys. It is equal for the rows of a task. 0: the row is in
    no task."""


@triton.jit
def _find_row(cu_seqlens_ptr: tl.tensor, num_rows: tl.tensor, block: tl.tensor, BLOCK_Q: tl.constexpr) -> tl.tensor:
    """Index of the row to which tile ``block`` belongs. The tiles of row i start at ``cu_seqlens[i] // BLOCK_Q +
    i``."""
    low = 0
    high = num_rows
    while high - low > 1:
        middle = (low + high) // 2
        before = tl.load(cu_seqlens_ptr + middle) // BLOCK_Q + middle <= block
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    return low


@triton.jit
def _tiles_of_split(
    low: tl.tensor, end: tl.tensor, split: tl.tensor, BLOCK_N: tl.constexpr, NUM_SPLITS: tl.constexpr
) -> tl.tensor:
    """(first tile, end) of the tiles of keys that split ``split`` has of keys ``low`` to ``end - 1``."""
    first_tile = low // BLOCK_N
    end_tile = tl.cdiv(end, BLOCK_N)
    if NUM_SPLITS > 1:
        share = tl.cdiv(end_tile - first_tile, NUM_SPLITS)
        first_tile += split * share
        end_tile = tl.minimum(first_tile + share, end_tile)
    return first_tile, end_tile


@triton.jit
def _no_keys(
    sinks_ptr: tl.tensor, head: tl.tensor, real: tl.tensor, split: tl.tensor, BLOCK_M: tl.constexpr,
    HEAD_PAD: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """(weighted values, sums, maxima) of a tile that has not attended to any key yet. A sink is a score without a
    value; the first split begins with it."""
    best = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    values = tl.zeros([BLOCK_M, HEAD_PAD], dtype=tl.float32)
    if sinks_ptr is not None:
        # A vector, because the interpreter cannot combine a mask with a scalar.
        begins = real & (split + tl.zeros([BLOCK_M], dtype=tl.int32) == 0)
        best = tl.load(sinks_ptr + head, mask=begins, other=float("-inf")).to(tl.float32) * 1.4426950408889634
        total = tl.where(begins, 1.0, 0.0)
    return values, total, best


@triton.jit
def _load_state(
    partial_ptr: tl.tensor, stats_ptr: tl.tensor, state: tl.tensor, stored: tl.tensor, inside: tl.tensor,
    total: tl.tensor, best: tl.tensor, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """(weighted values, sums, maxima) that an earlier launch stored at ``state``; 0, ``total`` and ``best`` where
    nothing is ``stored``."""
    d = tl.arange(0, HEAD_PAD)
    best = tl.load(stats_ptr + 2 * state, mask=stored, other=best)
    total = tl.load(stats_ptr + 2 * state + 1, mask=stored, other=total)
    sums = partial_ptr + (state * HEAD_DIM)[:, None] + d[None, :]
    return tl.load(sums, mask=inside & stored[:, None], other=0.0), total, best


@triton.jit
def _capped(scores: tl.tensor, CAP: tl.constexpr) -> tl.tensor:
    """CAP tanh(scores / CAP). Far from 0 the exponential is 0 or infinite, which gives -CAP or CAP."""
    return CAP - 2.0 * CAP / (tl.exp2(scores * (2.0 * 1.4426950408889634 / CAP)) + 1.0)


@triton.jit
def _attend_keys(
    q: tl.tensor, values: tl.tensor, total: tl.tensor, best: tl.tensor, position: tl.tensor, key_ptr: tl.tensor,
    value_ptr: tl.tensor, key_scales_ptr: tl.tensor, value_scales_ptr: tl.tensor, table_ptr: tl.tensor,
    kv_head: tl.tensor, low: tl.tensor, end: tl.tensor, first_tile: tl.tensor, end_tile: tl.tensor, scale: tl.tensor,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, BLOCK_N: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Attend to keys ``low`` to ``end - 1`` in tiles ``first_tile`` to ``end_tile - 1``, after the keys whose (weighted
    values, sums, maxima), all float32, are given. Returns the three with these keys.

    Table entries and slots outside ``low`` to ``end - 1`` may hold anything and are not read. With scales, K and V have
    8 bits. The scales of keys multiply scores, and those of values the weights, before these are rounded.
    """
    d = tl.arange(0, HEAD_PAD)
    if key_scales_ptr is not None:
        q_sum = tl.sum(q.to(tl.float32), axis=1)
        values *= 128.0  # 128 units of a value are about as large as the value, so float16 represents the weights
    for tile in range(first_tile, end_tile):
        key = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        held = (key >= low) & (key < end)
        # In a large cache, the index of a block times the block size exceeds 2^31 elements.
        block = tl.load(table_ptr + key // BLOCK_SIZE, mask=held, other=0).to(tl.int64)
        head = (block * BLOCK_SIZE + key % BLOCK_SIZE) * NUM_KV_HEADS + kv_head
        place = head * HEAD_DIM
        here = held[:, None] & (d < HEAD_DIM)[None, :]
        k = tl.load(key_ptr + place[:, None] + d[None, :], mask=here, other=0.0)
        v = tl.load(value_ptr + place[:, None] + d[None, :], mask=here, other=0.0)
        seen = held[None, :] & (key[None, :] <= position[:, None])
        if WINDOW is not None:
            seen = seen & (position[:, None] - key[None, :] < WINDOW)
        if key_scales_ptr is None:
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        else:
            unit, middle = load_scales(key_scales_ptr, head, held)
            scores = tl.dot(q, tl.trans(centred(k, q.dtype)), input_precision="ieee") * unit[None, :]
            scores = (scores + q_sum[:, None] * middle[None, :]) * scale
        if CAP is not None:
            scores = _capped(scores, CAP)
        scores = tl.where(seen, scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, axis=1))
        # For a row that has not attended to any key yet, -inf minus -inf would be NaN.
        base = tl.where(new_best == float("-inf"), 0.0, new_best)
        p = tl.exp2(scores - base[:, None])
        fade = tl.exp2(best - base)
        total = total * fade + tl.sum(p, axis=1)
        if value_scales_ptr is None:
            values = tl.dot(p.to(v.dtype), v, values * fade[:, None], input_precision="ieee")
        else:
            unit, middle = load_scales(value_scales_ptr, head, held)
            values = values * fade[:, None] + tl.sum(p * (128.0 * middle)[None, :], axis=1)[:, None]
            weights = (p * (128.0 * unit)[None, :]).to(q.dtype)
            values = tl.dot(weights, centred(v, q.dtype), values, input_precision="ieee")
        best = new_best
    if value_scales_ptr is not None:
        values *= 0.0078125
    return values, total, best


@triton.jit
def _attend_shared(
    partial_ptr: tl.tensor, stats_ptr: tl.tensor, q_ptr: tl.tensor, key_ptr: tl.tensor, value_ptr: tl.tensor,
    key_scales_ptr: tl.tensor, value_scales_ptr: tl.tensor, seq_lens_ptr: tl.tensor, table_ptr: tl.tensor,
    table_rows_ptr: tl.tensor, members_ptr: tl.tensor, ends_ptr: tl.tensor, sinks_ptr: tl.tensor, scale: tl.tensor,
    q_stride: tl.tensor, table_stride: tl.tensor,
    GROUP: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    NUM_SPLITS: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Kernel that attends to the tiles of keys that the rows of a task share, and stores each row's state. One program
    per task, KV head and split. Every row has one query."""
    ROWS: tl.constexpr = BLOCK_M // GROUP
    task = tl.program_id(0) // NUM_KV_HEADS
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    split = tl.program_id(1)
    wait_for_inputs(PDL)
    leader = tl.load(members_ptr + task * ROWS)
    if leader < 0:
        return
    seq_len = tl.load(seq_lens_ptr + leader)
    low = 0
    if WINDOW is not None:
        low = tl.maximum(seq_len - WINDOW, 0)
    first_tile, end_tile = _tiles_of_split(low, seq_len, split, BLOCK_N, NUM_SPLITS)
    end_tile = tl.minimum(end_tile, tl.load(ends_ptr + leader))
    if first_tile >= end_tile:
        return
    table_row = leader
    if table_rows_ptr is not None:
        table_row = tl.load(table_rows_ptr + leader)

    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, HEAD_PAD)
    row = tl.load(members_ptr + task * ROWS + m // GROUP, mask=m < ROWS * GROUP, other=-1)
    real = row >= 0
    # A row of the tile that is no query sees no key.
    position = tl.load(seq_lens_ptr + row, mask=real, other=0) - 1
    head = kv_head * GROUP + m % GROUP
    token = row.to(tl.int64)
    inside = real[:, None] & (d < HEAD_DIM)[None, :]
    q = tl.load(q_ptr + (token * q_stride + head * HEAD_DIM)[:, None] + d[None, :], mask=inside, other=0.0)
    values, total, best = _no_keys(sinks_ptr, head, real, split, BLOCK_M, HEAD_PAD)
    table = table_ptr + table_row.to(tl.int64) * table_stride
    values, total, best = _attend_keys(
        q, values, total, best, position, key_ptr, value_ptr, key_scales_ptr, value_scales_ptr, table, kv_head, low,
        seq_len, first_tile, end_tile, scale, NUM_KV_HEADS, HEAD_DIM, HEAD_PAD, BLOCK_SIZE, WINDOW, CAP, BLOCK_N,
    )  # fmt: skip
    place = (token * (GROUP * NUM_KV_HEADS) + head) * NUM_SPLITS + split
    tl.store(stats_ptr + 2 * place, best, mask=real)
    tl.store(stats_ptr + 2 * place + 1, total, mask=real)
    tl.store(partial_ptr + (place * HEAD_DIM)[:, None] + d[None, :], values, mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _attend(
    out_ptr: tl.tensor, partial_ptr: tl.tensor, stats_ptr: tl.tensor, q_ptr: tl.tensor, key_ptr: tl.tensor,
    value_ptr: tl.tensor, key_scales_ptr: tl.tensor, value_scales_ptr: tl.tensor, cu_seqlens_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor, table_ptr: tl.tensor, table_rows_ptr: tl.tensor, ends_ptr: tl.tensor,
    sinks_ptr: tl.tensor, num_rows: tl.tensor, scale: tl.tensor, q_stride: tl.tensor, table_stride: tl.tensor,
    GROUP: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    NUM_SPLITS: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Attention kernel. One program per tile of queries, KV head and split. Without ``cu_seqlens``, every row has one
    query. With ``ends``, it has one too, and goes on after the tiles that :func:`_attend_shared` computed."""
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    row = tl.program_id(0) // NUM_KV_HEADS  # the KV heads of a token are neighbours, in the cache and here
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    split = tl.program_id(1)
    start = row
    first_query = 0
    num_queries = 1
    wait_for_inputs(PDL)
    if cu_seqlens_ptr is not None:
        block = row
        row = _find_row(cu_seqlens_ptr, num_rows, block, BLOCK_Q)
        start = tl.load(cu_seqlens_ptr + row)
        first_query = (block - start // BLOCK_Q - row) * BLOCK_Q
        num_queries = tl.load(cu_seqlens_ptr + row + 1) - start
    seq_len = tl.load(seq_lens_ptr + row)
    # Padding rows and tiles compute nothing. They exist because the grid has a fixed size.
    if (first_query >= num_queries) | (seq_len <= 0):
        return
    table_row = row
    if table_rows_ptr is not None:
        table_row = tl.load(table_rows_ptr + row)

    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, HEAD_PAD)
    query = first_query + m // GROUP
    head = kv_head * GROUP + m % GROUP
    real = (m < BLOCK_Q * GROUP) & (query < num_queries)
    token = (start + query).to(tl.int64)
    inside = real[:, None] & (d < HEAD_DIM)[None, :]
    q = tl.load(q_ptr + (token * q_stride + head * HEAD_DIM)[:, None] + d[None, :], mask=inside, other=0.0)

    cached = seq_len - num_queries
    end = cached + tl.minimum(first_query + BLOCK_Q, num_queries)
    low = 0
    if WINDOW is not None:
        low = tl.maximum(cached + first_query - WINDOW + 1, 0)
    first_tile, end_tile = _tiles_of_split(low, end, split, BLOCK_N, NUM_SPLITS)
    place = token * (GROUP * NUM_KV_HEADS) + head
    values, total, best = _no_keys(sinks_ptr, head, real, split, BLOCK_M, HEAD_PAD)
    if ends_ptr is not None:
        shared_end = tl.minimum(tl.load(ends_ptr + row), end_tile)
        # A vector, because the interpreter cannot combine a mask with a scalar.
        stored = real & (first_tile + tl.zeros([BLOCK_M], dtype=tl.int32) < shared_end)
        at = place * NUM_SPLITS + split
        values, total, best = _load_state(partial_ptr, stats_ptr, at, stored, inside, total, best, HEAD_DIM, HEAD_PAD)
        first_tile = tl.maximum(first_tile, shared_end)
    table = table_ptr + table_row.to(tl.int64) * table_stride
    values, total, best = _attend_keys(
        q, values, total, best, cached + query, key_ptr, value_ptr, key_scales_ptr, value_scales_ptr, table, kv_head,
        low, end, first_tile, end_tile, scale, NUM_KV_HEADS, HEAD_DIM, HEAD_PAD, BLOCK_SIZE, WINDOW, CAP, BLOCK_N,
    )  # fmt: skip
    if NUM_SPLITS == 1:
        out = (values / total[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + (place * HEAD_DIM)[:, None] + d[None, :], out, mask=inside)
    else:
        place = place * NUM_SPLITS + split
        tl.store(stats_ptr + 2 * place, best, mask=real)
        tl.store(stats_ptr + 2 * place + 1, total, mask=real)
        if first_tile < end_tile:
            tl.store(partial_ptr + (place * HEAD_DIM)[:, None] + d[None, :], values, mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _combine(
    out_ptr: tl.tensor, partial_ptr: tl.tensor, stats_ptr: tl.tensor, cu_seqlens_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor, num_rows: tl.tensor, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr,
    NUM_SPLITS: tl.constexpr, SPLITS_PAD: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Kernel that combines splits: scale them by their maxima and add them. One program per token and query head. An
    empty split is not read."""
    token = tl.program_id(0)
    head = tl.program_id(1)
    wait_for_inputs(PDL)
    if cu_seqlens_ptr is not None:
        if token >= tl.load(cu_seqlens_ptr + num_rows):
            return
    else:
        if tl.load(seq_lens_ptr + token) <= 0:
            return
    place = token.to(tl.int64) * tl.num_programs(1) + head
    s = tl.arange(0, SPLITS_PAD)
    d = tl.arange(0, HEAD_PAD)
    stats = stats_ptr + 2 * (place * NUM_SPLITS + s)
    best = tl.load(stats, mask=s < NUM_SPLITS, other=float("-inf"))
    total = tl.load(stats + 1, mask=s < NUM_SPLITS, other=0.0)
    filled = total != 0.0
    weight = tl.where(filled, tl.exp2(best - tl.max(best, axis=0)), 0.0)
    inside = filled[:, None] & (d < HEAD_DIM)[None, :]
    partial = partial_ptr + ((place * NUM_SPLITS + s) * HEAD_DIM)[:, None] + d[None, :]
    values = tl.sum(tl.load(partial, mask=inside, other=0.0) * weight[:, None], axis=0)
    out = values / tl.sum(total * weight, axis=0)
    tl.store(out_ptr + place * HEAD_DIM + d, out.to(out_ptr.dtype.element_ty), mask=d < HEAD_DIM)


def paged_attention(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    *,
    scale: float,
    window: int | None,
    launch: AttentionLaunch,
    cu_seqlens: Tensor | None = None,
    table_rows: Tensor | None = None,
    shared: SharedTiles | None = None,
    cap: float | None = None,
    sinks: Tensor | None = None,
    scales: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Causal attention of each sequence's newest tokens over its blocks (PagedAttention: Kwon et al., 2023).

    Lengths, offsets and tables are read on the device and the grid depends on shapes only, so a captured launch serves
    any lengths. The new keys and values must have been written.

    Args: q: [T, Hq, Dh], float32, float16 or bfloat16; a token's heads are side by side, tokens need not be adjacent (a
    slice of a wider tensor). Dh from 16 to 256. key_cache, value_cache: [num_blocks, block_size, Hkv, Dh], contiguous,
    of q's dtype; Hkv divides Hq. Slots that no sequence of the launch uses may hold anything, even NaN. seq_lens: int32
    [N], tokens in each sequence, including those of this step. 0: a padding row. block_table: int32 [rows, max_blocks],
    the last dimension contiguous. Entries after a sequence's end or before its window are never read. scale: factor of
    the scores. window: number of tokens that a query sees, itself included; None: all. launch: tile sizes, from
    :func:`~chairlift.kernels.triton.launch.attention_launch`. cu_seqlens: int32 [N + 1], offsets of the rows in q; the
    last may be less than T. None: N = T, one query each. table_rows: int32 [N], row i's line of ``block_table``; None:
    line i. shared: keys that rows read together, in a launch before; every row has one query then, and row i is token
    i. None: each row reads its keys itself. The bits are the same. cap: a score s becomes ``cap`` tanh(s / ``cap``)
    (Gemma 2); None: no cap. sinks: [Hq], contiguous, floating point: one more score in each head's softmax, without a
    value and after the cap (gpt-oss). scales: of K and V in 8 bits, each float32 [num_blocks, block_size, Hkv, 2],
    contiguous; the caches are uint8 then. See :mod:`~chairlift.kernels.triton.kv8`.

    Returns: [T, Hq, Dh], contiguous, in q's dtype. Tokens that belong to no row are not written.

    Raises:
        InvariantError: the shapes do not fit together.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = key_cache.shape[2]
    num_rows = seq_lens.shape[0]
    group = num_heads // num_kv_heads
    _check(q, key_cache, value_cache, block_table, launch, num_rows, shared, sinks)
    _check_scales(key_cache, value_cache, scales)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if num_tokens == 0 or num_rows == 0:
        return out
    splits = launch.num_splits
    dependent = dependent_launch(q.device)
    # With splits, a tile stores its sums for the last launch, and a shared tile stores them for the next. Otherwise
    # these arguments are unused.
    partial, stats = _empty_states(q, splits) if splits > 1 or shared is not None else (out, out)
    scale *= math.log2(math.e)
    both = scales or (None, None)
    sizes = {
        "GROUP": group, "NUM_KV_HEADS": num_kv_heads, "HEAD_DIM": head_dim, "HEAD_PAD": power_of_2(head_dim),
        "BLOCK_SIZE": key_cache.shape[1], "WINDOW": window, "CAP": None if cap is None else cap * math.log2(math.e),
        "BLOCK_M": launch.block_m, "BLOCK_N": launch.block_n, "NUM_SPLITS": splits, "num_warps": launch.num_warps,
        "num_stages": launch.num_stages, **dependent,
    }  # fmt: skip
    if shared is not None:
        _attend_shared[(len(shared.members) * num_kv_heads, splits)](
            partial, stats, q, key_cache, value_cache, *both, seq_lens, block_table, table_rows, shared.members,
            shared.ends, sinks, scale, q.stride(0), block_table.stride(0), **sizes,
        )  # fmt: skip
    tiles = num_rows if cu_seqlens is None else num_tokens // (launch.block_m // group) + num_rows
    _attend[(tiles * num_kv_heads, splits)](
        out, partial, stats, q, key_cache, value_cache, *both, cu_seqlens, seq_lens, block_table, table_rows,
        None if shared is None else shared.ends, sinks, num_rows, scale, q.stride(0), block_table.stride(0), **sizes,
    )  # fmt: skip
    if splits > 1:
        _combine[(num_tokens, num_heads)](
            out, partial, stats, cu_seqlens, seq_lens, num_rows,
            HEAD_DIM=head_dim, HEAD_PAD=power_of_2(head_dim), NUM_SPLITS=splits, SPLITS_PAD=power_of_2(splits),
            **dependent,
        )  # fmt: skip
    return out


def _empty_states(q: Tensor, splits: int) -> tuple[Tensor, Tensor]:
    """Memory for the state of each query head and split: weighted values [T, Hq, splits, Dh], and maximum and sum [T,
    Hq, splits, 2], float32."""
    num_tokens, num_heads, head_dim = q.shape
    shapes = [(num_tokens, num_heads, splits, width) for width in (head_dim, 2)]
    partial, stats = (torch.empty(shape, dtype=torch.float32, device=q.device) for shape in shapes)
    return partial, stats


def _check(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    launch: AttentionLaunch,
    num_rows: int,
    shared: SharedTiles | None,
    sinks: Tensor | None,
) -> None:
    """Raise InvariantError for arguments with which the kernel would read wrong memory."""
    num_heads, head_dim = q.shape[1:]
    num_kv_heads = key_cache.shape[2]
    if num_heads % num_kv_heads or key_cache.shape[3] != head_dim or key_cache.shape != value_cache.shape:
        raise InvariantError(f"q {list(q.shape)} does not go with caches {list(key_cache.shape)}")
    if not 16 <= head_dim <= 256 or num_heads // num_kv_heads > launch.block_m:
        raise InvariantError(
            f"head size {head_dim} must be from 16 to 256, and {num_heads} heads over {num_kv_heads} must fit into "
            f"block_m {launch.block_m}"
        )
    if not (key_cache.is_contiguous() and value_cache.is_contiguous() and q.stride()[1:] == (head_dim, 1)):
        raise InvariantError("the caches must be contiguous, and the heads of a token side by side")
    if block_table.stride(1) != 1:
        raise InvariantError("the lines of the block table must be contiguous")
    if sinks is not None and (sinks.shape != (num_heads,) or not sinks.is_contiguous()):
        raise InvariantError(f"sinks {list(sinks.shape)} must be one number for each of {num_heads} heads, contiguous")
    rows = launch.block_m // (num_heads // num_kv_heads)
    if shared is not None and (shared.members.shape[1:] != (rows,) or len(shared.ends) != num_rows):
        raise InvariantError(
            f"members {list(shared.members.shape)} and ends {list(shared.ends.shape)} do not go with {rows} rows in a "
            f"tile and {num_rows} rows in the step"
        )


def _check_scales(key_cache: Tensor, value_cache: Tensor, scales: tuple[Tensor, Tensor] | None) -> None:
    """Raise InvariantError for scales that do not go with the caches."""
    if (key_cache.dtype == torch.uint8) != (scales is not None):
        raise InvariantError(f"a cache of {key_cache.dtype} has {'no ' if scales is None else ''}scales")
    for cache, given in zip((key_cache, value_cache), scales or (), strict=False):
        if given.shape != (*cache.shape[:3], 2) or given.dtype != torch.float32 or not given.is_contiguous():
            raise InvariantError(f"scales {list(given.shape)} do not go with codes {list(cache.shape)}")
