"""Tile sizes of each kernel. All numbers are here, and none is searched for at run time.

Those of the product for few rows and of attention were measured on an H200 (132 multiprocessors), on the layers of
Qwen3-0.6B. The others follow published kernels of this kind. A search at run time would delay the first requests. It
could also choose differently after every start, which would change the last bits of answers.
"""

from __future__ import annotations

import dataclasses

import torch

__all__ = [
    "ANY_ROWS_BLOCK",
    "APPLY_BLOCK",
    "DRAW_CHUNK",
    "GEMM_ADD_BLOCK",
    "GEMM_BLOCK_M",
    "MOST_GROUP",
    "ROPE_HEADS",
    "ROPE_WARPS",
    "SAMPLING_WARPS",
    "SEARCH_BLOCK",
    "SEARCH_ROOM",
    "AttentionLaunch",
    "GemmLaunch",
    "attention_launch",
    "elementwise_warps",
    "gemm_launch",
    "num_multiprocessors",
    "power_of_2",
]

PROGRAMS_PER_MULTIPROCESSOR = 3
"""Programs per multiprocessor in a small launch, so that all multiprocessors have loads in flight."""
INTERPRETED_MULTIPROCESSORS = 2
"""Number of multiprocessors that the interpreter simulates. It is low, but small batches still split their keys."""
MOST_GROUP = 32
"""Most query heads that may share a KV head. A larger tile would not fit into the shared memory of every GPU."""
MOST_ATTENTION_SPLITS = 16
MOST_GEMM_SPLITS = 8
FEW_PROGRAMS = 8
"""Programs per multiprocessor up to which two programs share the keys of a tile. With few rounds of programs, the
longest sequences would otherwise end last, alone."""

GEMM_BLOCK_M = 16
"""Rows of x in a tile of the product for few rows: the least that tensor cores accept."""
ANY_ROWS_BLOCK = 64
"""Rows, and outputs, in a tile of the product for any number of rows."""
_BLOCK_N = 32
"""Outputs in a tile of the product for few rows."""
_WIDE = 24
"""Outputs per multiprocessor from which tiles of 64 outputs give enough programs."""
GEMM_ADD_BLOCK = 512
"""Outputs for which one program adds the parts of a split sum."""
ROPE_HEADS = 8
"""Heads that one program rotates and writes."""
ROPE_WARPS = 1
SAMPLING_WARPS = 8
DRAW_CHUNK = 4096
"""Token ids from which one program draws."""
SEARCH_BLOCK = 2048
"""Token ids that the search for a threshold reads at a time."""
SEARCH_ROOM = 8
"""Most candidates that the search copies, in blocks of SEARCH_BLOCK ids."""
APPLY_BLOCK = 256
"""Words that one program writes."""


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionLaunch:
    """One configuration of the attention kernel. The same configuration gives the same bits for the same row."""

    block_m: int
    """Rows of a tile: query tokens times the query heads that share a KV head. A power of 2, at least 16."""
    block_n: int
    """Keys read at a time; independent of the size of a cache block."""
    num_splits: int
    """Programs that share the keys of one tile of queries."""
    num_warps: int
    num_stages: int


@dataclasses.dataclass(frozen=True, slots=True)
class GemmLaunch:
    """One configuration of the product for few rows. It does not depend on the number of rows."""

    block_m: int
    block_n: int
    block_k: int
    num_splits: int
    """Programs that share the sum over the inputs of one tile of outputs."""
    num_warps: int
    num_stages: int


def attention_launch(
    *,
    head_dim: int,
    group: int,
    num_kv_heads: int,
    max_rows: int,
    decode_only: bool,
    num_multiprocessors: int,
    itemsize: int = 2,
) -> AttentionLaunch:
    """Configuration for launches of at most ``max_rows`` sequences with ``group`` query heads per KV head.

    The keys are split only when all rows have one query each (``decode_only``) and are too few to fill the GPU. Numbers
    of 4 bytes (``itemsize``) use small tiles, because their products run outside the tensor cores, from registers.
    """
    block_n = 64 if head_dim <= 128 else 32
    block_m = 64
    if itemsize == 4:
        block_n, block_m = block_n // 2, 16
    # With fewer than 5 stages the compiler loads the next keys, whose place comes from a table, only after these are
    # done. Five stages of wide tiles with wide heads would not fit into the memory of all GPUs.
    stages = 5 if decode_only or head_dim <= 128 else 3
    if not decode_only:
        return AttentionLaunch(max(block_m, power_of_2(group)), block_n, num_splits=1, num_warps=4, num_stages=stages)
    wanted = PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors // max(1, max_rows * num_kv_heads)
    few = max_rows * num_kv_heads <= FEW_PROGRAMS * num_multiprocessors
    num_splits = min(MOST_ATTENTION_SPLITS, power_of_2(wanted + 1) // 2) if wanted > 1 else 1 + few
    return AttentionLaunch(max(16, power_of_2(group)), block_n, num_splits, num_warps=4, num_stages=stages)


def gemm_launch(
    out_features: int,
    in_features: int,
    num_multiprocessors: int,
    *,
    num_rows: int = 1,
    any_rows: bool = False,
    itemsize: int = 2,
) -> GemmLaunch:
    """Configuration for a weight [out_features, in_features] and ``num_rows`` rows, or for ``any_rows``.

    The number of rows matters only by whether one tile of 16 holds them. There are about as many programs as
    multiprocessors. A program's shared memory fits into the 99 KiB of smaller GPUs, also for numbers of 4 bytes
    (``itemsize``).
    """
    few = num_rows <= GEMM_BLOCK_M and not any_rows
    block_m = GEMM_BLOCK_M if few else ANY_ROWS_BLOCK
    is_wide = not few and (any_rows or out_features >= _WIDE * num_multiprocessors)
    block_n = ANY_ROWS_BLOCK if is_wide else _BLOCK_N
    most_k = 64 if any_rows or (not few and itemsize == 4) else 128
    block_k = min(most_k, max(16, power_of_2(in_features)))
    columns, steps = -(-out_features // block_n), -(-in_features // block_k)
    num_splits = max(1, min(MOST_GEMM_SPLITS, num_multiprocessors // columns, steps // 2))
    stages = 3 if block_n == ANY_ROWS_BLOCK and block_k == 128 else 4
    return GemmLaunch(block_m, block_n, block_k, num_splits, num_warps=4, num_stages=stages)


def num_multiprocessors(device: torch.device) -> int:
    """Number of multiprocessors that a launch can fill."""
    if device.type != "cuda":
        return INTERPRETED_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def elementwise_warps(width: int) -> int:
    """Number of warps for a program that works on ``width`` numbers at a time."""
    return 4 if width <= 2048 else 8 if width <= 8192 else 16


def power_of_2(least: int) -> int:
    """The smallest power of 2 that is at least ``least``."""
    return 1 << max(0, least - 1).bit_length()
