"""The operations models are written in. Each picks the fastest implementation that fits its tensors.

Call them through the module (``ops.rms_norm(...)``), so that a replaced implementation is seen by every model.
"""

from __future__ import annotations

from chairlift.kernels.onednn import pack_weight, packed_linear
from chairlift.kernels.reference import apply_rotary, copy_blocks, linear, rms_norm, silu_and_mul, write_kv
from chairlift.kernels.sdpa import PagedRow, packed_attention, paged_attention, plan_rows

__all__ = [
    "PagedRow",
    "apply_rotary",
    "copy_blocks",
    "linear",
    "pack_weight",
    "packed_attention",
    "packed_linear",
    "paged_attention",
    "plan_rows",
    "rms_norm",
    "silu_and_mul",
    "write_kv",
]
