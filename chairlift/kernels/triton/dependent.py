# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator"
"""Programmatic dependent launch: a kernel starts while the one before it ends (CUDA, compute capability 9.0 and up).

A decode step is a chain of some 250 short kernels, and starting one takes about as long as the shortest of them runs.
A kernel that is launched so may start once all programs of the one before it have called :func:`wait_for_inputs` or
ended. It must call that itself before it reads what an earlier kernel writes, and before it writes anything: its
buffers may be those that an earlier kernel still reads. The call returns when the kernel before has ended, and with it
all before that.

Measured on an H200: asking for the weights before the wait (``prefetch.global.L2``) made steps of few rows slower.
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
    """Until the kernel before has ended; from then on the next one may start."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


def dependent_launch(device: torch.device) -> dict[str, bool]:
    """What a launch on ``device`` takes: the kernel's ``PDL``, and the compiler's option where the GPU knows it."""
    return {"PDL": True, "launch_pdl": True} if _is_known(device) else {"PDL": False}


@functools.cache
def _is_known(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
