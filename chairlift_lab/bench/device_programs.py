"""Runs single kernels on a GPU, as :mod:`chairlift_lab.bench.programs` does for the compiled CPU kernels.

Each case is recorded once as a CUDA graph of equal operations on different parts of memory, as the engine records its
decode steps. So the time does not include the launch of each kernel. Before a run, the L2 cache is filled with other
data.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

from chairlift.executor.backends.triton.step_graph import CudaGraphs, EagerSteps, Graph, GraphMaker
from chairlift.kernels import ops
from chairlift.kernels.triton.launch import attention_launch, gemm_launch, num_multiprocessors
from chairlift.kernels.triton.linear_small import linear_small
from chairlift.kernels.triton.paged_attention import paged_attention
from chairlift.kernels.triton.program import SMALL_ROWS
from chairlift.kernels.triton.sampling import SamplingSettings, sample
from chairlift.kernels.triton.scaled import scaled_linear
from chairlift_lab.bench.programs import BLOCK_SIZE, WEIGHT_STD, Prepare
from chairlift_lab.bench.shapes import LayerShapes

__all__ = ["DeviceKernels"]

_INTERPRETED_CACHE: Final = 1 << 16
_ALIGNED: Final = 1024
"""Alignment: in the region of random numbers, each weight begins at a multiple of this number of elements."""


class DeviceKernels:
    """Prepares timed runs of single kernels on a CUDA device, in one dtype. Tests use the CPU and Triton's interpreter.

    With fp8 (float8_e4m3fn), only matrix multiplications with fp8 weights can be run; their activations are bfloat16,
    or float32 in the interpreter. Operations take their weights in turn from a region of ``region_bytes`` of random
    numbers, which is enlarged if a cache could hold it. No single operation may read more than the region. Raises
    torch.OutOfMemoryError if there is too little memory.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, region_bytes: int) -> None:
        cuda = device.type == "cuda"
        if device.index is not None:
            torch.cuda.set_device(device)  # Triton launches kernels on the current device of the thread
        cache = torch.cuda.get_device_properties(device).L2_cache_size if cuda else _INTERPRETED_CACHE
        self._device = device
        self._dtype = dtype
        self._is_fp8 = dtype == torch.float8_e4m3fn
        if self._is_fp8:
            self._dtype = torch.bfloat16 if cuda else torch.float32
        self._graphs: GraphMaker = CudaGraphs(device) if cuda else EagerSteps()
        self._multiprocessors = num_multiprocessors(device)
        self._generator = torch.Generator(device).manual_seed(0)
        self._region = self._normal(max(region_bytes, 4 * cache) // dtype.itemsize)
        # Random numbers in fp8 are not multiplied by WEIGHT_STD, because each fp8 weight has a scale of its own.
        self._region = self._region.to(dtype) if self._is_fp8 else self._region.mul_(WEIGHT_STD)
        self._other = torch.zeros(2 * cache, dtype=torch.uint8, device=device)
        self._next = 0

    def products(self, k: int, n: int, rows: int, count: int) -> dict[str, Prepare]:
        """Prepare ``count`` matrix multiplications [rows, k] x [k, n] with each kernel that can run them. Returns
        kernel -> prepared run. The kernel that the engine would choose comes first. With fp8, ``library`` rounds the
        rows to fp8 first, and k and n must be multiples of 16.
        """
        x = self._normal(rows, k)
        weights = self._weights(n, k, count)
        streamed: dict[str, Callable[..., Tensor]] = {"streamed": self._streamed(n, k, rows)}
        library: dict[str, Callable[..., Tensor]] = {"library": ops.linear}
        if self._is_fp8:
            scales = torch.full((n,), WEIGHT_STD, device=self._device)
            streamed["streamed"] = functools.partial(streamed["streamed"], scales=scales)
            library["library"] = functools.partial(scaled_linear, scales=scales)
        if rows <= SMALL_ROWS:
            kernels = streamed | library
        elif rows <= 2 * SMALL_ROWS:
            kernels = library | streamed
        else:
            kernels = library
        return {name: self._timed(functools.partial(kernel, x, bias=None), weights) for name, kernel in kernels.items()}

    def attention(
        self, model: LayerShapes, *, queries: int, context: int, batch: int, shuffled: bool, count: int
    ) -> Prepare:
        """Prepare the attention of ``count`` layers, as :meth:`chairlift_lab.bench.programs.Kernels.attention`
        does."""
        blocks = -(-context // BLOCK_SIZE)
        tokens = batch * queries
        order = torch.arange(batch * blocks, dtype=torch.int32, device=self._device)
        if shuffled:
            order = order[torch.randperm(len(order), generator=self._generator, device=self._device)]
        table = order.view(batch, blocks)
        lengths = torch.full((batch,), context, dtype=torch.int32, device=self._device)
        starts = torch.arange(0, tokens + 1, queries, dtype=torch.int32, device=self._device)
        q = self._normal(tokens, model.heads, model.head_dim)
        launch = attention_launch(
            head_dim=model.head_dim,
            group=model.heads // model.kv_heads,
            num_kv_heads=model.kv_heads,
            max_rows=batch,
            decode_only=queries == 1,
            num_multiprocessors=self._multiprocessors,
            itemsize=self._dtype.itemsize,
        )

        def attend(keys: Tensor, values: Tensor) -> Tensor:
            return paged_attention(
                q, keys, values, lengths, table, scale=model.head_dim**-0.5, window=None, launch=launch,
                cu_seqlens=starts if queries > 1 else None,
            )  # fmt: skip

        shape = batch * blocks, BLOCK_SIZE, model.kv_heads, model.head_dim
        return self._timed(attend, [(self._take(*shape), self._take(*shape)) for _ in range(count)])

    def head(self, k: int, vocab_size: int, rows: int, *, temperature: float, count: int) -> Prepare:
        """Prepare the output head and sampling for ``rows`` rows, repeated ``count`` times. Temperature 0 is greedy
        sampling."""
        x = self._normal(rows, k)
        linear = self._streamed(vocab_size, k, rows) if rows <= SMALL_ROWS else ops.linear
        slots = torch.arange(rows, dtype=torch.int32, device=self._device)
        settings = SamplingSettings(
            seeds=slots.long(),
            temperature=torch.full_like(slots, temperature, dtype=torch.float32),
            log_min_p=torch.full_like(slots, -math.inf, dtype=torch.float32),
            top_k=torch.zeros_like(slots),
            top_p=torch.ones_like(slots, dtype=torch.float64),
        )

        def choose(weight: Tensor) -> Tensor:
            return sample(linear(x, weight, bias=None), settings, slots, slots)[0]

        return self._timed(choose, self._weights(vocab_size, k, count))

    def _streamed(self, n: int, k: int, rows: int) -> Callable[..., Tensor]:
        itemsize = 4 if self._dtype == torch.float32 else 2
        launch = gemm_launch(n, k, self._multiprocessors, num_rows=rows, itemsize=itemsize)
        return functools.partial(linear_small, launch=launch)

    def _weights(self, n: int, k: int, count: int) -> list[tuple[Tensor]]:
        return [(self._take(n, k),) for _ in range(count)]

    def _timed(self, kernel: Callable[..., Tensor], operands: Sequence[tuple[Tensor, ...]]) -> Prepare:
        """Prepare a run that calls ``kernel`` once for each of the operands. A run returns the last result."""
        graph: Graph[Tensor] | None = None

        def step() -> Tensor:
            for each in operands[:-1]:
                kernel(*each)
            return kernel(*operands[-1])

        def prepare() -> Callable[[], Tensor]:
            nonlocal graph
            recorded = graph = graph or self._graphs.record(step)
            self._other.sum()
            self._wait()

            def run() -> Tensor:
                out = recorded.replay()
                self._wait()
                return out

            return run

        return prepare

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _take(self, *shape: int) -> Tensor:
        """Take a tensor of this shape from the next free part of the region. After the end of the region, start again
        at its beginning."""
        size = math.prod(shape)
        if self._next + size > len(self._region):
            self._next = 0
        part = self._region[self._next : self._next + size].view(shape)
        self._next += -(-size // _ALIGNED) * _ALIGNED
        return part

    def _normal(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device).normal_(generator=self._generator)
