# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator"
"""Programmatic dependent launch: a kernel starts before the previous kernel has ended (CUDA, compute capability 9.0 and
up).

A decode step is a chain of about 250 short kernels. Starting a kernel takes about as long as the shortest of them runs.
A kernel that is launched in this way may start when all programs of the previous kernel have called
:func:`wait_for_inputs` or have ended. It must itself call :func:`wait_for_inputs` before it reads results of an earlier
kernel. It must also call it before it writes anything, because an earlier kernel may still read the same buffers. The
call returns when all earlier kernels have ended.

Measured on an H200: prefetching the weights before the wait (``prefetch.global.L2``) made steps of few rows slower.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = ["dependent_launch", "wait_for_inputs"]


@triton.jit
def wait_for_inputs(PDL: tl.constexpr) -> None:
    """Wait until the previous kernel has ended. The next kernel may start after this call. Without ``PDL`` nothing is
    done."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


def dependent_launch(device: torch.device) -> dict[str, bool]:
    """Launch arguments on ``device``: the kernel's ``PDL``, and the compiler's option if the GPU supports dependent
    launch."""
    return {"PDL": True, "launch_pdl": True} if _is_known(device) else {"PDL": False}


@functools.cache
def _is_known(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
