"""Steps of fixed numbers of rows or tokens, recorded once as a CUDA graph and replayed with a single launch."""

from __future__ import annotations

import bisect
import contextlib
import gc
import itertools
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

import torch

__all__ = [
    "MOST_RECORDED_TOKENS",
    "CudaGraphs",
    "EagerSteps",
    "Graph",
    "GraphMaker",
    "graph_sizes",
    "padded_size",
    "token_sizes",
]

MOST_RECORDED_TOKENS = 1024
"""Larger steps, with prefill chunks, take longer to compute than the host takes to launch them. This limit is not
measured."""

_T = TypeVar("_T")
_T_co = TypeVar("_T_co", covariant=True)


class Graph(Protocol[_T_co]):
    """A step with buffers at fixed addresses."""

    def replay(self) -> _T_co:
        """Compute the step from the contents of the buffers. The next replay may overwrite the result."""
        ...


class GraphMaker(Protocol):
    """Makes graphs, and knows their cost."""

    num_graphs: int
    num_bytes: int

    def record(self, step: Callable[[], _T]) -> Graph[_T]: ...


class _EagerGraph(Generic[_T]):
    """A step without a graph, launched anew each time."""

    def __init__(self, step: Callable[[], _T]) -> None:
        self._step = step

    def replay(self) -> _T:
        return self._step()


class _CudaGraph(Generic[_T]):
    """A step that was captured on the device."""

    def __init__(self, graph: torch.cuda.CUDAGraph, result: _T) -> None:
        self._graph = graph
        self._result = result

    def replay(self) -> _T:
        self._graph.replay()
        return self._result


class EagerSteps:
    """Makes steps without graphs."""

    num_graphs = 0
    num_bytes = 0

    def record(self, step: Callable[[], _T]) -> Graph[_T]:
        return _EagerGraph(step)


class CudaGraphs:
    """Captures steps. All graphs share one memory pool, because only one of them runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self.num_graphs = 0
        self.num_bytes = 0
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        # One stream for all, because cuBLAS keeps memory for every stream that it used. torch's own stream may belong
        # to another device.
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def record(self, step: Callable[[], _T]) -> Graph[_T]:
        """Run ``step`` once, which compiles its kernels, then capture it.

        So it runs twice on the same input before the first result is used; this must be harmless.
        """
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        try:
            with torch.cuda.stream(self._stream):
                step()
        finally:  # a step that runs out of memory may have launched a part
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()  # capturing does it too, and would count it
        before = torch.cuda.memory_reserved(self._device)
        graph = torch.cuda.CUDAGraph()
        # Starting a capture writes to tensors that the first capture made. PyTorch 2.11 requires that all captures
        # start in the same inference mode.
        with (
            _without_collecting(),
            torch.inference_mode(False),
            torch.cuda.graph(graph, self._pool, self._stream),
            torch.inference_mode(),
        ):
            result = step()
        self.num_graphs += 1
        self.num_bytes += max(0, torch.cuda.memory_reserved(self._device) - before)
        return _CudaGraph(graph, result)


@contextlib.contextmanager
def _without_collecting() -> Iterator[None]:
    """Disable the garbage collector while a graph is captured. It might collect an engine, whose end waits for the
    device, and nothing may wait during a capture."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def graph_sizes(most_rows: int) -> list[int]:
    """Numbers of rows that steps are recorded for: 1, 2, 4, 8, 16, 24 ... 256, then by 32, up to ``most_rows``."""
    ladder = itertools.chain((1, 2, 4), range(8, 256, 8), itertools.count(256, 32))
    return [*itertools.takewhile(lambda size: size < most_rows, ladder), most_rows]


def token_sizes(most_tokens: int) -> list[int]:
    """Numbers of tokens that steps with prefill chunks are recorded for: by 64 up to 512, then by 128."""
    sizes = [*range(64, 512, 64), *range(512, MOST_RECORDED_TOKENS + 1, 128)]
    return [size for size in sizes if size < most_tokens] + [most_tokens] * (most_tokens <= MOST_RECORDED_TOKENS)


def padded_size(sizes: list[int], num_rows: int) -> int:
    """The smallest of ``sizes`` that holds ``num_rows``."""
    return sizes[bisect.bisect_left(sizes, num_rows)]
