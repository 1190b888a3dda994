"""Steps of fixed numbers of rows or tokens, each recorded once as a CUDA graph and replayed with a single launch."""

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
"""Larger steps, with chunks of prompts, are computed for longer than the host takes to launch them; unmeasured."""

_T = TypeVar("_T")
_T_co = TypeVar("_T_co", covariant=True)


class Graph(Protocol[_T_co]):
    """A step over buffers at fixed addresses."""

    def replay(self) -> _T_co:
        """Compute it on what the buffers hold; what is returned may be overwritten by the next replay."""
        ...


class GraphMaker(Protocol):
    """Makes graphs, and knows what they cost."""

    num_graphs: int
    num_bytes: int

    def record(self, step: Callable[[], _T]) -> Graph[_T]: ...


class _EagerGraph(Generic[_T]):
    """A step that is computed anew each time."""

    def __init__(self, step: Callable[[], _T]) -> None:
        self._step = step

    def replay(self) -> _T:
        return self._step()


class _CudaGraph(Generic[_T]):
    """A step captured on the device."""

    def __init__(self, graph: torch.cuda.CUDAGraph, result: _T) -> None:
        self._graph = graph
        self._result = result

    def replay(self) -> _T:
        self._graph.replay()
        return self._result


class EagerSteps:
    """No graphs: a step is computed anew each time, launch by launch."""

    num_graphs = 0
    num_bytes = 0

    def record(self, step: Callable[[], _T]) -> Graph[_T]:
        return _EagerGraph(step)


class CudaGraphs:
    """Captures steps. All graphs share one pool of memory: only one of them runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self.num_graphs = 0
        self.num_bytes = 0
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        # One for all: cuBLAS keeps memory for every stream it has worked on, and torch's own may be another device's.
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def record(self, step: Callable[[], _T]) -> Graph[_T]:
        """Run ``step`` once as it is, which compiles its kernels, then capture it.

        So it runs twice on the same input before the first result is used, and must not mind.
        """
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        try:
            with torch.cuda.stream(self._stream):
                step()
        finally:  # of a step that finds no memory, a part may have been launched
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()  # capturing does it too, and it would be counted
        before = torch.cuda.memory_reserved(self._device)
        graph = torch.cuda.CUDAGraph()
        # Beginning a capture writes to tensors that the first one made; PyTorch 2.11 demands one mode for both.
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
    """Garbage may be an engine, whose end waits for the device: while a graph is captured nothing may."""
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
    """Numbers of tokens that steps with chunks of prompts are recorded for: by 64 up to 512, then by 128."""
    sizes = [*range(64, 512, 64), *range(512, MOST_RECORDED_TOKENS + 1, 128)]
    return [size for size in sizes if size < most_tokens] + [most_tokens] * (most_tokens <= MOST_RECORDED_TOKENS)


def padded_size(sizes: list[int], num_rows: int) -> int:
    """The smallest of ``sizes`` that holds ``num_rows``."""
    return sizes[bisect.bisect_left(sizes, num_rows)]
