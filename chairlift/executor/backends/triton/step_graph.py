"""Steps with fixed numbers of rows or tokens. Each is recorded once as a CUDA graph; later steps of this size replay
the graph with a single launch."""

from __future__ import annotations

import bisect
import contextlib
import gc
import itertools
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

import torch

__all__ = [
    "MAX_RECORDED_TOKENS",
    "CudaGraphs",
    "EagerSteps",
    "Graph",
    "GraphMaker",
    "graph_sizes",
    "padded_size",
    "token_sizes",
]

MAX_RECORDED_TOKENS = 1024
"""Maximum number of tokens of a recorded step. Larger steps take longer to compute on the device than the host takes to
launch them. The limit was not measured."""

_T = TypeVar("_T")
_T_co = TypeVar("_T_co", covariant=True)


class Graph(Protocol[_T_co]):
    """A recorded step, whose buffers have fixed addresses."""

    def replay(self) -> _T_co:
        """Compute the step from the contents of its buffers. The next replay may overwrite the result."""
        ...


class GraphMaker(Protocol):
    """Makes graphs of steps. It counts the graphs, and the bytes of memory that they take."""

    num_graphs: int
    num_bytes: int

    def record(self, step: Callable[[], _T]) -> Graph[_T]: ...


class _EagerGraph(Generic[_T]):
    """Replacement of a CUDA graph: each replay launches all operations of the step again."""

    def __init__(self, step: Callable[[], _T]) -> None:
        self._step = step

    def replay(self) -> _T:
        return self._step()


class _CudaGraph(Generic[_T]):
    """A CUDA graph of a step; a replay launches the graph."""

    def __init__(self, graph: torch.cuda.CUDAGraph, result: _T) -> None:
        self._graph = graph
        self._result = result

    def replay(self) -> _T:
        self._graph.replay()
        return self._result


class EagerSteps:
    """Graph maker without CUDA graphs: each replay launches all operations of the step again."""

    num_graphs = 0
    num_bytes = 0

    def record(self, step: Callable[[], _T]) -> Graph[_T]:
        return _EagerGraph(step)


class CudaGraphs:
    """Captures steps as CUDA graphs. All graphs share one memory pool, because only one of them runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self.num_graphs = 0
        self.num_bytes = 0
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        # All captures use one stream, because cuBLAS allocates memory for every stream that it uses. PyTorch's own
        # capture stream may belong to another device.
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def record(self, step: Callable[[], _T]) -> Graph[_T]:
        """Run ``step`` once, which compiles its kernels, then capture it.

        So the step runs twice on the same input before its first result is used; this must do no harm.
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
        # Starting a capture writes to tensors that the first capture created. PyTorch 2.11 requires that all captures
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
    """Disable the garbage collector while a graph is captured. The collector might delete an engine, which waits for
    the device; waiting is not allowed during a capture."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def graph_sizes(max_rows: int) -> list[int]:
    """Numbers of rows for which steps are recorded: 1, 2, 4, 8, 16, 24 ... 256, then every 32, up to ``max_rows``."""
    ladder = itertools.chain((1, 2, 4), range(8, 256, 8), itertools.count(256, 32))
    return [*itertools.takewhile(lambda size: size < max_rows, ladder), max_rows]


def token_sizes(max_tokens: int) -> list[int]:
    """Numbers of tokens for which steps with prompt chunks are recorded: every 64 up to 512, then every 128."""
    sizes = [*range(64, 512, 64), *range(512, MAX_RECORDED_TOKENS + 1, 128)]
    return [size for size in sizes if size < max_tokens] + [max_tokens] * (max_tokens <= MAX_RECORDED_TOKENS)


def padded_size(sizes: list[int], num_rows: int) -> int:
    """The smallest of ``sizes`` that is at least ``num_rows``."""
    return sizes[bisect.bisect_left(sizes, num_rows)]
