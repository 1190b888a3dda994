"""Tile sizes of each kernel. All sizes are constants in this file; there is no search (autotuning) at run time.

The sizes for the matmul of few rows and for attention were chosen by measurements on an H200 (132 multiprocessors) with
the layers of Qwen3-0.6B. The other sizes follow published kernels of this kind. A search at run time would delay the
first requests. It could also choose different sizes after every start, which would change the last bits of results.
"""

from __future__ import annotations

import dataclasses

import torch

__all__ = [
    "ANY_ROWS_BLOCK",
    "APPLY_BLOCK",
    "CONCURRENT_CHUNKS",
    "DRAW_CHUNK",
    "EXPAND_BLOCK",
    "GEMM_ADD_BLOCK",
    "GEMM_BLOCK_M",
    "MAX_GROUP",
    "MAX_STATE_TILE",
    "PAIR_BLOCK_K",
    "PAIR_BLOCK_N",
    "PAIR_WARPS",
    "PROGRAMS_PER_MULTIPROCESSOR",
    "ROPE_HEADS",
    "ROPE_WARPS",
    "SAMPLING_WARPS",
    "SEARCH_BLOCK",
    "SEARCH_ROOM",
    "SORT_CHUNK",
    "AttentionLaunch",
    "GemmLaunch",
    "ShrinkLaunch",
    "attention_launch",
    "conv_tile",
    "elementwise_warps",
    "experts_launch",
    "gemm_launch",
    "num_multiprocessors",
    "power_of_2",
    "shrink_launch",
    "state_warps",
]

PROGRAMS_PER_MULTIPROCESSOR = 3
"""Number of programs per multiprocessor that a small launch aims at. Several are needed so that every multiprocessor
always has loads in flight."""
INTERPRETED_MULTIPROCESSORS = 2
"""Number of multiprocessors that the interpreter simulates. It is low to save time, but high enough that small batches
still split their keys."""
MAX_GROUP = 32
"""Maximum number of query heads that may share a KV head. A larger tile would not fit into the shared memory of every
GPU."""
MAX_ATTENTION_SPLITS = 16
MAX_GEMM_SPLITS = 8
FEW_PROGRAMS = 8
"""Maximum number of programs per multiprocessor at which two programs share the keys of a tile. With so few programs,
the longest sequences would otherwise run at the end while the other multiprocessors are idle."""

GEMM_BLOCK_M = 16
"""Number of rows of x in a tile of the matmul for few rows: the minimum for tensor cores."""
ANY_ROWS_BLOCK = 64
"""Number of rows of x in a tile of the matmul for any number of rows. It is also the number of outputs in the tile."""
_BLOCK_N = 32
"""Number of outputs in a narrow tile of the matmul for few rows."""
_WIDE = 24
"""Minimum number of outputs per multiprocessor for tiles of 64 outputs. Layers with fewer outputs get tiles of 32, so
that there are enough programs."""
GEMM_ADD_BLOCK = 512
"""Number of outputs that one program computes when the sum of a matmul was split: it adds the parts of each sum."""
ROPE_HEADS = 8
"""Number of heads of one token that one program rotates and writes."""
ROPE_WARPS = 1
SAMPLING_WARPS = 8
DRAW_CHUNK = 4096
"""Number of token ids that one program of the sampling kernel compares. It returns the best of them."""
CONCURRENT_CHUNKS = 512
"""Number of programs of the sampling kernel that run at the same time on a large GPU, about. With at most that many,
none can learn from the programs before it which chunks of ids cannot win."""
SEARCH_BLOCK = 2048
"""Number of token ids that the search for the sampling threshold (min-p, top-k, top-p) reads at a time."""
SEARCH_ROOM = 8
"""Size of the buffer into which the search for a threshold copies candidate ids. The unit is SEARCH_BLOCK ids, so the
buffer holds SEARCH_ROOM * SEARCH_BLOCK candidates."""
PAIR_BLOCK_N = 16
"""Number of outputs that one program of the matmul for few pairs of (row, expert) computes."""
PAIR_BLOCK_K = 256
"""Number of inputs that this matmul reads at a time. A thread of four warps has 32 numbers of a tile."""
PAIR_WARPS = 4
SORT_CHUNK = 512
"""Number of pairs of (row, expert) that a program of the kernel that sorts them by expert reads at a time."""
MAX_STATE_TILE = 16_384
"""Maximum number of elements of a panel of a recurrent state, which a program holds in registers: rows times columns,
each rounded up to a power of 2."""
_STATE_PER_WARP = 2048
"""Number of elements of such a panel that a warp holds: 64 in each thread."""
EXPAND_BLOCK = 64
"""Number of rows, and of outputs, in a tile of the kernel that adds adapters' terms to results of torch's library."""
MAX_SHRINK_SPLITS = 4
APPLY_BLOCK = 256
"""Number of rows or words that one program of a kernel for the decode state processes."""


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionLaunch:
    """Launch configuration of the attention kernel. With the same configuration, a row always gets the same bits."""

    block_m: int
    """Number of rows in a tile: query tokens times the query heads that share a KV head. A power of 2, at least 16."""
    block_n: int
    """Number of keys that are read at a time. It does not depend on the size of a cache block."""
    num_splits: int
    """Number of programs that share the keys of one tile of queries."""
    num_warps: int
    num_stages: int


@dataclasses.dataclass(frozen=True, slots=True)
class GemmLaunch:
    """Launch configuration of the matmul for few rows. It does not depend on the number of rows."""

    block_m: int
    block_n: int
    block_k: int
    num_splits: int
    """Number of programs that share the sum over the inputs for one tile of outputs."""
    num_warps: int
    num_stages: int


@dataclasses.dataclass(frozen=True, slots=True)
class ShrinkLaunch:
    """Launch configuration of the product of rows with the matrices A of their adapters."""

    block_m: int
    block_r: int
    """Number of ranks in a tile. It divides the rank of the pool."""
    block_k: int
    num_splits: int
    """Number of programs that share the sum over the inputs."""
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
    int8_kv: bool = False,
) -> AttentionLaunch:
    """Attention configuration for launches of at most ``max_rows`` sequences with ``group`` query heads per KV head.

    The keys are split only when all rows have one query each (``decode_only``) and are too few to fill the GPU.
    Elements of 4 bytes (``itemsize``) use small tiles, because their matmuls use registers instead of tensor cores.
    Chunks with K and V in 8 bits read half as many keys at a time, because widened codes take registers, too.
    """
    block_n = 64 if head_dim <= 128 else 32
    block_m = 64
    if itemsize == 4:
        block_n = block_n // 2
        block_m = 16
    if int8_kv and not decode_only:
        block_n = max(16, block_n // 2)
    # With fewer than 5 stages, the compiler does not load the next keys while the current keys are processed, because
    # their address comes from a table. With wide heads, five stages of wide tiles would not fit into the shared memory
    # of all GPUs.
    stages = 5 if decode_only or head_dim <= 128 else 3
    if not decode_only:
        return AttentionLaunch(max(block_m, power_of_2(group)), block_n, num_splits=1, num_warps=4, num_stages=stages)
    splits = PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors // max(1, max_rows * num_kv_heads)
    few = max_rows * num_kv_heads <= FEW_PROGRAMS * num_multiprocessors
    num_splits = min(MAX_ATTENTION_SPLITS, power_of_2(splits + 1) // 2) if splits > 1 else 1 + few
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
    """Matmul configuration for a weight [out_features, in_features] and ``num_rows`` rows, or for ``any_rows``.

    The number of rows matters only in whether all rows fit into one tile of 16. There are about as many programs as
    multiprocessors. A program's shared memory fits into the 99 KiB of smaller GPUs, also for elements of 4 bytes
    (``itemsize``).
    """
    few = num_rows <= GEMM_BLOCK_M and not any_rows
    block_m = GEMM_BLOCK_M if few else ANY_ROWS_BLOCK
    is_wide = not few and (any_rows or out_features >= _WIDE * num_multiprocessors)
    block_n = ANY_ROWS_BLOCK if is_wide else _BLOCK_N
    max_k = 64 if any_rows or (not few and itemsize == 4) else 128
    block_k = min(max_k, max(16, power_of_2(in_features)))
    columns = -(-out_features // block_n)
    steps = -(-in_features // block_k)
    num_splits = max(1, min(MAX_GEMM_SPLITS, num_multiprocessors // columns, steps // 2))
    stages = 3 if block_n == ANY_ROWS_BLOCK and block_k == 128 else 4
    return GemmLaunch(block_m, block_n, block_k, num_splits, num_warps=4, num_stages=stages)


def experts_launch(num_pairs: int, num_experts: int, *, itemsize: int = 2, any_rows: bool = False) -> GemmLaunch:
    """Configuration of the grouped matmul of ``num_pairs`` pairs of (row, expert).

    Tiles have 16 pairs if an expert has at most that many on average, and otherwise, or for ``any_rows``, 64. Elements
    of 4 bytes (``itemsize``) are read in smaller steps. The sum over the inputs is never split, because the experts
    already make many programs.
    """
    few = num_pairs <= GEMM_BLOCK_M * num_experts and not any_rows
    block_k = 128 if few and itemsize < 4 else 64
    return GemmLaunch(GEMM_BLOCK_M if few else ANY_ROWS_BLOCK, ANY_ROWS_BLOCK, block_k, 1, num_warps=4, num_stages=4)


def shrink_launch(
    num_rows: int, in_features: int, rank: int, *, any_rows: bool = False, itemsize: int = 2
) -> ShrinkLaunch:
    """Configuration of the product of ``num_rows`` rows of ``in_features`` numbers with matrices A of at most ``rank``
    ranks for each part.

    Tiles have 16 rows, so that few adapters meet in one, and more only for prompts. The number of rows matters for
    nothing else, and for ``any_rows`` not at all. An adapter's ranks make few programs, so several share a sum. Not
    measured.
    """
    many = num_rows > ANY_ROWS_BLOCK and not any_rows
    block_r = 32 if rank % 32 == 0 else 16
    block_k = min(128 if itemsize < 4 and not many else 64, max(16, power_of_2(in_features)))
    steps = -(-in_features // block_k)
    splits = 1 if many else max(1, min(MAX_SHRINK_SPLITS, steps // 2))
    return ShrinkLaunch(ANY_ROWS_BLOCK if many else GEMM_BLOCK_M, block_r, block_k, splits, num_warps=4, num_stages=4)


def num_multiprocessors(device: torch.device) -> int:
    """Number of multiprocessors of ``device``, which a launch should fill."""
    if device.type != "cuda":
        return INTERPRETED_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def elementwise_warps(width: int) -> int:
    """Number of warps for a program that processes ``width`` elements at a time."""
    if width <= 2048:
        return 4
    if width <= 8192:
        return 8
    return 16


def conv_tile(channels: int, *, one_token: bool) -> tuple[int, int, int]:
    """(tokens, channels, warps) of a program of the short convolution, which computes one tile after the other. With
    ``one_token``, each row has one token."""
    if one_token:
        return 1, min(256, power_of_2(channels)), 2
    return 16, min(64, power_of_2(channels)), 4


def state_warps(rows: int, columns: int) -> int:
    """Number of warps for a program that holds a panel [``rows``, ``columns``] of a recurrent state in registers; both
    are powers of 2. It does not depend on the step, so neither does the order of sums."""
    return max(1, rows * columns // _STATE_PER_WARP)


def power_of_2(minimum: int) -> int:
    """The smallest power of 2 that is at least ``minimum``."""
    return 1 << max(0, minimum - 1).bit_length()
